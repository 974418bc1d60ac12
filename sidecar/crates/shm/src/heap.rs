//! Settings of the C library's allocator for a sidecar.

/// Makes the allocator keep up to 32 MiB of freed memory per heap, and allocate large blocks from the heap.
///
/// Chunks of up to 1 MiB are allocated and freed a thousand times per second. By default the GNU C library returns the
/// end of a heap to the kernel once twice as many bytes are free as the largest block had, and the kernel must zero the
/// pages of the next chunk: 4 % of a data thread's time. Call this before starting threads. It has no effect with
/// another C library.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt takes two numbers; it is safe to call at any time, and fails by a result that changes nothing.
        let kept = unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN) & libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES)
        };
        debug_assert_eq!(kept, 1, "both numbers are in range");
    }
}

/// Free bytes at the end of a heap from which the allocator returns them to the kernel.
#[cfg(target_env = "gnu")]
const KEPT_BYTES: libc::c_int = 32 << 20;
/// Size from which blocks are mapped separately; also the allocator's maximum for this setting.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: libc::c_int = 8 << 20;

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// Pages that this thread had the system make.
    fn faults() -> i64 {
        // SAFETY: the structure is plain numbers, for which zeros are values, and getrusage fills it in.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
            usage.ru_minflt
        }
    }

    #[test]
    fn memory_that_was_freed_is_there_again() {
        keep_freed_memory();
        let chunks = || (0..8).map(|_| vec![1_u8; 1 << 20]).collect::<Vec<_>>();
        drop(chunks());
        let before = faults();
        for _ in 0..10 {
            std::hint::black_box(chunks());
        }
        let made = faults() - before;
        assert!(made < 1_000, "{made} pages of {} were allocated again", 10 * 8 * 256);
    }
}
