//! The clock that calls are measured by: a thread that raises the engine's epoch while calls are made.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ronde_plugin_abi::limits;
use wasmtime::Engine;

/// How often the epoch is raised, in milliseconds. Deadlines are checked to this precision.
pub(crate) const TICK_MS: u32 = 5;
/// Ticks without a new call after which the thread rests: longer than any call may go on without asking for more time.
const QUIET_TICKS: u32 = 2 * limits::CALL_MS_MAX.div_ceil(TICK_MS) + 2;

/// A thread that raises the epoch, and rests when no calls are made. It ends when this is dropped.
pub(crate) struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    engine: Engine,
    /// How often the epoch was raised.
    ticks: AtomicU64,
    /// Set by each call, cleared by each tick.
    called: AtomicBool,
    /// Whether the thread rests or is about to.
    rests: AtomicBool,
    orders: Mutex<Orders>,
    ordered: Condvar,
}

#[derive(Default)]
struct Orders {
    wake: bool,
    end: bool,
}

impl Ticker {
    pub(crate) fn start(engine: Engine) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            engine,
            ticks: AtomicU64::new(0),
            called: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            orders: Mutex::default(),
            ordered: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name("plugin-clock".to_owned()).spawn(move || own.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// How often the epoch was raised. It is not while no calls are made.
    pub(crate) fn now(&self) -> u64 {
        self.shared.ticks.load(Ordering::Relaxed)
    }

    /// A call begins, or goes on: the epoch rises from now on. Both orders are sequentially consistent, so either the
    /// thread sees the call before it rests, or the call sees that the thread rests. Where a call was noted since the last
    /// tick, the thread has [`QUIET_TICKS`] before it and need not be told of another one.
    #[inline]
    pub(crate) fn call(&self) {
        if self.shared.called.load(Ordering::Relaxed) {
            return;
        }
        self.shared.called.store(true, Ordering::SeqCst);
        if self.shared.rests.load(Ordering::SeqCst) {
            self.shared.orders().wake = true;
            self.shared.ordered.notify_one();
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.orders().end = true;
        self.shared.ordered.notify_one();
        if let Some(thread) = self.thread.take() {
            // It panics nowhere; if it did, there would be nobody left who waits for the epoch.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut quiet = 0;
        while !self.has_ended_after_a_tick() {
            self.engine.increment_epoch();
            self.ticks.fetch_add(1, Ordering::Relaxed);
            quiet = if self.called.swap(false, Ordering::SeqCst) { 0 } else { quiet + 1 };
            if quiet > QUIET_TICKS {
                self.rest();
                quiet = 0;
            }
        }
    }

    fn has_ended_after_a_tick(&self) -> bool {
        let tick = Duration::from_millis(TICK_MS.into());
        let waited = self.ordered.wait_timeout_while(self.orders(), tick, |orders| !orders.end);
        waited.unwrap_or_else(PoisonError::into_inner).0.end
    }

    fn rest(&self) {
        self.rests.store(true, Ordering::SeqCst);
        if !self.called.load(Ordering::SeqCst) {
            let waited = self.ordered.wait_while(self.orders(), |orders| !(orders.wake || orders.end));
            waited.unwrap_or_else(PoisonError::into_inner).wake = false;
        }
        self.rests.store(false, Ordering::SeqCst);
    }
}

/// So many ticks take at least this time, as the first of them may end at once.
pub(crate) const fn ticks(milliseconds: u32) -> u64 {
    milliseconds.div_ceil(TICK_MS) as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for a state of the thread, but not for ever.
    fn comes(state: impl Fn() -> bool) {
        for _ in 0..10_000 {
            if state() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the thread does not come into this state");
    }

    #[test]
    fn the_clock_rests_and_wakes_up() {
        let ticker = Ticker::start(Engine::default()).expect("a thread");
        let rests = || ticker.shared.rests.load(Ordering::SeqCst);
        for _ in 0..2 {
            comes(rests);
            ticker.call();
            comes(|| !rests());
        }
    }
}
