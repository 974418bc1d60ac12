//! What tests control and count: failures, delays, live objects.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

/// A result code of the driver. Zero is success.
pub(crate) type Code = i32;

/// The failures to inject, by function.
#[derive(Debug, Default)]
pub(crate) struct Failures(HashMap<String, Failure>);

#[derive(Clone, Copy, Debug)]
struct Failure {
    code: Code,
    /// Calls before the one that fails. `None`: all of them fail.
    calls_before: Option<u64>,
}

impl Failures {
    /// Parses `FUNCTION=CODE[@N],...`; entries that are not of that form are left out.
    fn parse(text: &str) -> Self {
        let entries = text.split(',').filter_map(|entry| {
            let (function, rest) = entry.trim().split_once('=')?;
            let (code, nth) = rest.split_once('@').map_or((rest, None), |(code, nth)| (code, nth.parse().ok()));
            let calls_before = nth.map(|nth: u64| nth.saturating_sub(1));
            Some((function.to_owned(), Failure { code: code.parse().ok()?, calls_before }))
        });
        Self(entries.collect())
    }

    fn add(&mut self, function: &str, code: Code, nth: u64) {
        let calls_before = nth.checked_sub(1);
        self.0.insert(function.to_owned(), Failure { code, calls_before });
    }

    fn next(&mut self, function: &str) -> Code {
        let Some(failure) = self.0.get_mut(function) else { return 0 };
        match failure.calls_before {
            None => failure.code,
            Some(0) => self.0.remove(function).map_or(0, |failure| failure.code),
            Some(left) => {
                failure.calls_before = Some(left - 1);
                0
            }
        }
    }
}

/// Figures that tests read.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) copy_delay_us: AtomicU64,
    pub(crate) streams: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) contexts: AtomicU64,
    pub(crate) registrations: AtomicU64,
    pub(crate) registrations_made: AtomicU64,
    pub(crate) communicators: AtomicU64,
    pub(crate) stream_synchronizations: AtomicU64,
    pub(crate) copies: AtomicU64,
    pub(crate) pageable_copies: AtomicU64,
    pub(crate) invalidated_captures: AtomicU64,
    pub(crate) blocked: AtomicU64,
    pub(crate) waiting: AtomicU64,
}

pub(crate) static COUNTERS: LazyLock<Counters> = LazyLock::new(|| Counters {
    copy_delay_us: AtomicU64::new(number("RONDE_DEVICE_COPY_DELAY_US", 0)),
    streams: AtomicU64::new(0),
    events: AtomicU64::new(0),
    contexts: AtomicU64::new(0),
    registrations: AtomicU64::new(0),
    registrations_made: AtomicU64::new(0),
    communicators: AtomicU64::new(0),
    stream_synchronizations: AtomicU64::new(0),
    copies: AtomicU64::new(0),
    pageable_copies: AtomicU64::new(0),
    invalidated_captures: AtomicU64::new(0),
    blocked: AtomicU64::new(0),
    waiting: AtomicU64::new(0),
});

static FAILURES: LazyLock<Mutex<Failures>> =
    LazyLock::new(|| Mutex::new(Failures::parse(&std::env::var("RONDE_DEVICE_FAIL").unwrap_or_default())));

/// The functions whose calls do not return.
static BLOCKED: LazyLock<(Mutex<HashSet<String>>, Condvar)> = LazyLock::new(Default::default);

/// The code with which this call of a function fails; zero if it does not. Waits while the function is blocked.
pub(crate) fn injected(function: &str) -> Code {
    let (blocked, changed) = &*BLOCKED;
    let functions = lock(blocked);
    if functions.contains(function) {
        change(&COUNTERS.blocked, true);
        let waited = changed.wait_timeout_while(functions, BLOCK_TIMEOUT, |functions| functions.contains(function));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        change(&COUNTERS.blocked, false);
    }
    lock(&FAILURES).next(function)
}

/// A test that forgets a blocked function ends all the same.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// A number from the environment.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// How long a copy takes in addition.
pub(crate) fn copy_delay() -> Duration {
    Duration::from_micros(COUNTERS.copy_delay_us.load(Ordering::Relaxed))
}

/// Adds one while a value of this type lives.
pub(crate) fn change(counter: &AtomicU64, is_up: bool) {
    if is_up {
        counter.fetch_add(1, Ordering::SeqCst);
    } else {
        counter.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The exported functions: a test calls them in its own process.
mod exported {
    #![expect(unsafe_code, reason = "functions of the C ABI")]

    use std::ffi::{CStr, c_char};
    use std::sync::atomic::Ordering;

    use super::{BLOCKED, COUNTERS, Code, FAILURES, lock};
    use crate::{driver, memory, sticky, stream};

    /// Makes the `nth` call of a function from now on fail; each one if `nth` is 0.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_fail(function: *const c_char, code: Code, nth: u64) {
        // SAFETY: by contract a NUL-terminated string.
        let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
        lock(&FAILURES).add(&function, code, nth);
    }

    /// Forgets all failures to inject.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_heal() {
        lock(&FAILURES).0.clear();
        sticky::set(false);
    }

    /// Makes calls of a function wait, as those of a driver that is busy do, or lets them go on.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_block(function: *const c_char, is_blocked: i32) {
        // SAFETY: by contract a NUL-terminated string.
        let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
        let (blocked, changed) = &*BLOCKED;
        let mut functions = lock(blocked);
        if is_blocked == 0 {
            functions.remove(&function);
        } else {
            functions.insert(function);
        }
        changed.notify_all();
    }

    /// Makes the first failure of a device's work the result of each later call there.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_set_sticky() {
        sticky::set(true);
    }

    /// Begins or ends the capture of a CUDA graph on a stream. Returns 0, or 400 for no stream.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_capture(handle: usize, is_capturing: i32) -> Code {
        stream::capture(handle, is_capturing != 0)
    }

    /// Sets how long each copy takes in addition.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_set_copy_delay_us(delay_us: u64) {
        COUNTERS.copy_delay_us.store(delay_us, Ordering::SeqCst);
    }

    /// Stops a stream before its next work, as a long kernel would, or lets it go on. Returns 0, or 400 for no stream.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_hold(handle: usize, hold: i32) -> Code {
        stream::hold(handle, hold != 0)
    }

    /// Enqueues a kernel: sets bytes of device memory on a stream. Returns 0 or a code.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_fill(handle: usize, address: u64, value: u8, bytes: usize) -> Code {
        stream::enqueue(handle, stream::Work::Fill { address, value, bytes })
    }

    /// Returns a figure by name: live `streams`, `events`, `contexts`, `registrations`, `communicators`; calls that are
    /// `blocked`; collectives of NCCL that are `waiting` for other ranks; `registrations_made`, `copies`, `pageable_copies`,
    /// `stream_synchronizations`, `invalidated_captures` since the start; `allocated` bytes; handles of `physical` memory.
    /// Unknown names: `u64::MAX`.
    // SAFETY: no other library of the process exports this name.
    #[unsafe(no_mangle)]
    pub(crate) extern "C" fn ronde_device_count(name: *const c_char) -> u64 {
        // SAFETY: by contract a NUL-terminated string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let counter = match name.as_ref() {
            "streams" => &COUNTERS.streams,
            "events" => &COUNTERS.events,
            "contexts" => &COUNTERS.contexts,
            "registrations" => &COUNTERS.registrations,
            "registrations_made" => &COUNTERS.registrations_made,
            "communicators" => &COUNTERS.communicators,
            "stream_synchronizations" => &COUNTERS.stream_synchronizations,
            "copies" => &COUNTERS.copies,
            "pageable_copies" => &COUNTERS.pageable_copies,
            "invalidated_captures" => &COUNTERS.invalidated_captures,
            "blocked" => &COUNTERS.blocked,
            "waiting" => &COUNTERS.waiting,
            "allocated" => return memory::allocated(),
            "physical" => return driver::handles(),
            _ => return u64::MAX,
        };
        counter.load(Ordering::SeqCst)
    }
}
