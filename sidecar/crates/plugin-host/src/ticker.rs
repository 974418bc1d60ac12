//! The clock for call deadlines: a thread that increments the engine's epoch while calls are made.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ronde_plugin_abi::limits;
use wasmtime::Engine;

/// The interval of ticks in milliseconds, which is the resolution of deadlines.
pub(crate) const TICK_MS: u32 = 5;
/// Number of ticks without a new call after which the thread parks: longer than any call may run without extending its
/// deadline.
const IDLE_TICKS_MAX: u32 = 2 * limits::CALL_MS_MAX.div_ceil(TICK_MS) + 2;

/// A thread that increments the epoch, and parks while no calls are made. It stops when this value is dropped.
pub(crate) struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    engine: Engine,
    /// Number of ticks.
    ticks: AtomicU64,
    /// Set by each call, cleared by each tick.
    called: AtomicBool,
    /// Whether the thread is parked or about to park.
    parked: AtomicBool,
    signals: Mutex<Signals>,
    signalled: Condvar,
}

#[derive(Default)]
struct Signals {
    unpark: bool,
    stop: bool,
}

impl Ticker {
    pub(crate) fn start(engine: Engine) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            engine,
            ticks: AtomicU64::new(0),
            called: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            signals: Mutex::default(),
            signalled: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name("plugin-clock".to_owned()).spawn(move || own.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The number of ticks so far. It does not advance while the thread is parked.
    pub(crate) fn now(&self) -> u64 {
        self.shared.ticks.load(Ordering::Relaxed)
    }

    /// Announces that a call begins or continues, so that the epoch advances. All accesses are sequentially consistent:
    /// either the thread sees the call before it parks, or the call sees that the thread is parked. If another call was
    /// announced since the last tick, the thread keeps running for [`IDLE_TICKS_MAX`] and need not be notified.
    #[inline]
    pub(crate) fn call(&self) {
        if self.shared.called.load(Ordering::Relaxed) {
            return;
        }
        self.shared.called.store(true, Ordering::SeqCst);
        if self.shared.parked.load(Ordering::SeqCst) {
            self.shared.signals().unpark = true;
            self.shared.signalled.notify_one();
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.signals().stop = true;
        self.shared.signalled.notify_one();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; if it did, nobody would be waiting for the epoch any more.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn signals(&self) -> MutexGuard<'_, Signals> {
        self.signals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut idle_ticks = 0;
        while !self.sleep_one_tick() {
            self.engine.increment_epoch();
            self.ticks.fetch_add(1, Ordering::Relaxed);
            idle_ticks = if self.called.swap(false, Ordering::SeqCst) { 0 } else { idle_ticks + 1 };
            if idle_ticks > IDLE_TICKS_MAX {
                self.park();
                idle_ticks = 0;
            }
        }
    }

    fn sleep_one_tick(&self) -> bool {
        let tick = Duration::from_millis(TICK_MS.into());
        let waited = self.signalled.wait_timeout_while(self.signals(), tick, |signals| !signals.stop);
        waited.unwrap_or_else(PoisonError::into_inner).0.stop
    }

    fn park(&self) {
        self.parked.store(true, Ordering::SeqCst);
        if !self.called.load(Ordering::SeqCst) {
            let waited = self.signalled.wait_while(self.signals(), |signals| !(signals.unpark || signals.stop));
            waited.unwrap_or_else(PoisonError::into_inner).unpark = false;
        }
        self.parked.store(false, Ordering::SeqCst);
    }
}

/// The number of ticks that take at least this time; the first one may end immediately.
pub(crate) const fn ticks(milliseconds: u32) -> u64 {
    milliseconds.div_ceil(TICK_MS) as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits, within a bound, for a state of the thread.
    fn wait_for(state: impl Fn() -> bool) {
        for _ in 0..10_000 {
            if state() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the thread does not come into this state");
    }

    #[test]
    fn the_ticker_parks_and_wakes_up() {
        let ticker = Ticker::start(Engine::default()).expect("a thread");
        let parked = || ticker.shared.parked.load(Ordering::SeqCst);
        for _ in 0..2 {
            wait_for(parked);
            ticker.call();
            wait_for(|| !parked());
        }
    }
}
