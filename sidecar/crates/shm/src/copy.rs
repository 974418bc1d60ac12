//! Copies of bytes that another process may be writing, by code that the optimiser cannot analyse.
//!
//! `mapping` explains why this is sound: to the language, each function is unknown code that may copy byte by byte with
//! relaxed atomic loads and stores.

use std::ffi::c_void;
use std::hint::black_box;

/// Copies of at least this size use non-temporal stores. Data of such a copy is evicted from the caches before it is
/// read, and an ordinary store would first load the cache line that it overwrites: two threads that copy 64 MiB each
/// are 1.7 times as fast with non-temporal stores. Smaller copies are mostly still cached when they are read
/// (docs/adr/0015).
pub const NON_TEMPORAL_BYTES_MIN: usize = 4 << 20;

/// Copies bytes, with non-temporal stores if there are many.
///
/// # Safety
///
/// `len` bytes are readable at `source` and writable at `target`, and the two ranges do not overlap.
pub(crate) unsafe fn copy(target: *mut c_void, source: *const c_void, len: usize) {
    // SAFETY: the caller's guarantee is the contract of both functions.
    unsafe {
        if len < NON_TEMPORAL_BYTES_MIN {
            copy_cached(target, source, len);
        } else {
            copy_non_temporal(target, source, len);
        }
    }
}

/// Block size for copies that avoid the processor's string instructions (`rep movsb`), which the GNU C library uses for
/// larger ones. On some processors these are thirty times slower if the target's offset in its page is up to
/// [`ALIAS_BYTES`] above the source's (4K aliasing). `proto/wire/src/copying.rs`, on which this crate does not depend,
/// does the same and has the measurements.
const SMALL_COPY_BYTES: usize = 2_048;
/// The page size by which the processor compares addresses.
const PAGE_BYTES: usize = 4_096;
const ALIAS_BYTES: usize = 64;
/// From this size on, string instructions are worth their start-up time.
const STRING_COPY_BYTES_MIN: usize = 8 << 10;

/// Copies bytes through the caches.
///
/// It is 20 % faster than word-wise relaxed atomics for blocks of 16 KiB, and 33 % for 64 MiB.
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
        // SAFETY: the block lies within the ranges that the caller guarantees, which is the contract of memcpy.
        unsafe { copy(target.byte_add(start), source.byte_add(start), piece) };
    }
}

/// Copies bytes with non-temporal stores if the processor supports them.
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
        // SAFETY: the caller's guarantee.
        return unsafe { copy_cached(target, source, len) };
    }
    // SAFETY: `head <= tail <= len`, so each of the three ranges lies within the caller's. The middle one starts at a
    // multiple of the block size and has `lines` blocks; the processor supports AVX.
    unsafe {
        copy_cached(target, source, head);
        store_non_temporal(target.byte_add(head), source.byte_add(head), lines);
        copy_cached(target.byte_add(tail), source.byte_add(tail), len - tail);
    }
}

/// Copies bytes through the caches: this architecture has no implementation with non-temporal stores.
///
/// # Safety
///
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy_non_temporal(target: *mut c_void, source: *const c_void, len: usize) {
    // SAFETY: the caller's guarantee.
    unsafe { copy_cached(target, source, len) };
}

/// Bytes copied by one iteration: two cache lines.
#[cfg(target_arch = "x86_64")]
const STORE_BLOCK_BYTES: usize = 128;

/// Copies `count` blocks of [`STORE_BLOCK_BYTES`] with non-temporal stores.
///
/// # Safety
///
/// As for [`copy`]; `target` is aligned to 32 bytes, `count` is not 0, and the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn store_non_temporal(target: *mut c_void, source: *const c_void, count: usize) {
    // SAFETY: the caller guarantees that all accessed addresses are valid. All vector registers are clobbered, the
    // fence orders the stores before later ones that announce them, and the stack is not used.
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

    /// All lengths around the block size, and all misalignments of both sides. Bytes next to the target stay unchanged.
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
