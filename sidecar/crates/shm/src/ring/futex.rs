//! Futex calls on a word of shared memory.

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` equals `expected`, for at most `timeout`. May return early.
pub(super) fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let seconds = libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX);
    // Nanoseconds are below 10^9, which fits every C long.
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos() as _ };
    // SAFETY: the word and the timeout are alive and aligned for the whole call; the kernel only reads them. The word
    // is shared with another process, so FUTEX_PRIVATE_FLAG is not set. The result does not matter: the caller checks
    // its condition again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
            ptr::null::<u32>(),
            0_u32,
        );
    }
}

/// Wakes one thread, of any process, that sleeps on `word`.
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: the kernel uses the address as a key only. The call succeeds for every mapped address.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1_u32);
    }
}
