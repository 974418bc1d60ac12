//! Copies by code that the optimiser cannot see into: bytes that another process may be writing.
//!
//! Why that is sound stands in the header of `mapping`: to the language either function is unknown code that may well copy
//! byte by byte with relaxed atomic loads and stores.

use std::ffi::c_void;
use std::hint::black_box;

/// From how many bytes on a copy goes around the caches. What is copied in one piece of this size is evicted before
/// anybody reads it, and a plain store would first fetch the line that it overwrites: two threads that copy 64 MiB each do
/// so 1.7 times as fast in this way. Of less than this the reader finds most in a cache (docs/adr/0015).
pub const NON_TEMPORAL_BYTES_MIN: usize = 4 << 20;

/// Copies bytes, around the caches when there are many.
///
/// # Safety
///
/// `len` bytes are readable at `source` and writable at `target`, and the two ranges do not overlap.
pub(crate) unsafe fn copy(target: *mut c_void, source: *const c_void, len: usize) {
    // SAFETY: the caller's promise is both functions' contract.
    unsafe {
        if len < NON_TEMPORAL_BYTES_MIN {
            copy_cached(target, source, len);
        } else {
            copy_non_temporal(target, source, len);
        }
    }
}

/// Bytes of a piece of a copy: below what makes the GNU C library use the processor's string instructions, which on some
/// processors are thirty times slower where the target lies less than [`ALIAS_BYTES`] behind the source in its page. The
/// wire's crate, which is not needed here, says more of it and does the same (`proto/wire/src/copying.rs`).
const SMALL_COPY_BYTES: usize = 2_048;
/// Bytes of a page, as the processor compares addresses.
const PAGE_BYTES: usize = 4_096;
const ALIAS_BYTES: usize = 64;
/// From here on string instructions are worth their start.
const STRING_COPY_BYTES_MIN: usize = 8 << 10;

/// Copies bytes so that the target's are in a cache.
///
/// Against word-wise relaxed atomics this is a fifth faster on blocks of 16 KiB and a third faster on 64 MiB at once.
///
/// # Safety
///
/// As for [`copy`].
unsafe fn copy_cached(target: *mut c_void, source: *const c_void, len: usize) {
    let copy: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void = black_box(libc::memcpy);
    let distance = target.addr().wrapping_sub(source.addr()) % PAGE_BYTES;
    let is_split = len < STRING_COPY_BYTES_MIN || (1..ALIAS_BYTES).contains(&distance);
    let step = if is_split { SMALL_COPY_BYTES } else { len };
    for start in (0..len).step_by(step) {
        let piece = step.min(len - start);
        // SAFETY: the piece lies within the ranges of the caller's promise, which is the whole contract of memcpy.
        unsafe { copy(target.byte_add(start), source.byte_add(start), piece) };
    }
}

/// Copies bytes so that the target's are in no cache, where the processor can do so.
///
/// # Safety
///
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_non_temporal(target: *mut c_void, source: *const c_void, len: usize) {
    let head = target.align_offset(STORE_BLOCK_BYTES).min(len);
    let lines = (len - head) / STORE_BLOCK_BYTES;
    let tail = head + lines * STORE_BLOCK_BYTES;
    if lines == 0 || !std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise.
        return unsafe { copy_cached(target, source, len) };
    }
    // SAFETY: `head <= tail <= len`, so each of the three ranges lies within the caller's; the middle one begins at a
    // multiple of the lines' size and is so many of them long; the processor has AVX.
    unsafe {
        copy_cached(target, source, head);
        store_non_temporal(target.byte_add(head), source.byte_add(head), lines);
        copy_cached(target.byte_add(tail), source.byte_add(tail), len - tail);
    }
}

/// The same without such instructions.
///
/// # Safety
///
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy_non_temporal(target: *mut c_void, source: *const c_void, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy_cached(target, source, len) };
}

/// Bytes of a turn of the loop: two cache lines.
#[cfg(target_arch = "x86_64")]
const STORE_BLOCK_BYTES: usize = 128;

/// Copies `count` times [`STORE_BLOCK_BYTES`].
///
/// # Safety
///
/// As for [`copy`]; `target` is aligned to 32 bytes, `count` is not 0, and the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn store_non_temporal(target: *mut c_void, source: *const c_void, count: usize) {
    // SAFETY: the caller's promise covers each address that is read and written. All vector registers are given up, the
    // fence orders the stores before whatever is written to announce them, and no stack is used.
    unsafe {
        std::arch::asm!(
            "2:",
            "vmovdqu ymm0, [rsi]",
            "vmovdqu ymm1, [rsi + 32]",
            "vmovdqu ymm2, [rsi + 64]",
            "vmovdqu ymm3, [rsi + 96]",
            "vmovntdq [rdi], ymm0",
            "vmovntdq [rdi + 32], ymm1",
            "vmovntdq [rdi + 64], ymm2",
            "vmovntdq [rdi + 96], ymm3",
            "add rsi, 128",
            "add rdi, 128",
            "dec rcx",
            "jnz 2b",
            "sfence",
            "vzeroupper",
            inout("rsi") source => _,
            inout("rdi") target => _,
            inout("rcx") count => _,
            clobber_abi("C"),
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lengths around the loop's size and all misalignments of either side; nothing beside the target is written.
    #[test]
    fn non_temporal_copies_equal_their_source() {
        let source: Vec<u8> = (0..2_048_u32).map(|index| (index * 7 % 251) as u8).collect();
        for from in [0, 1, 31, 32, 63] {
            for to in 0..130 {
                for len in [0, 1, 127, 128, 129, 255, 256, 300, 640, 1_023] {
                    let mut target = vec![255; 2_048];
                    // SAFETY: both ranges lie within their vectors, which are distinct.
                    unsafe {
                        copy_non_temporal(target[to..].as_mut_ptr().cast(), source[from..].as_ptr().cast(), len);
                    }
                    assert_eq!(target[to..to + len], source[from..from + len], "{from} {to} {len}");
                    assert!(
                        target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 255),
                        "{from} {to} {len}"
                    );
                }
            }
        }
    }
}
