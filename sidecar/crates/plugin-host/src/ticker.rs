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
const IDLE_TICKS_MAX: u32 = 2 * limits::CALL_MS_MAX.div_ceil(TICK_MS) + 2;

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

    /// How often the epoch was raised. It is not while no calls are made.
    pub(crate) fn now(&self) -> u64 {
        self.shared.ticks.load(Ordering::Relaxed)
    }

    /// A call begins, or goes on: the epoch rises from now on. Both orders are sequentially consistent, so either the
    /// thread sees the call before it rests, or the call sees that the thread rests. Where a call was noted since the last
    /// tick, the thread has [`IDLE_TICKS_MAX`] before it and need not be told of another one.
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
            // It panics nowhere; if it did, there would be nobody left who waits for the epoch.
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

/// So many ticks take at least this time, as the first of them may end at once.
pub(crate) const fn ticks(milliseconds: u32) -> u64 {
    milliseconds.div_ceil(TICK_MS) as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for a state of the thread, but not for ever.
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
