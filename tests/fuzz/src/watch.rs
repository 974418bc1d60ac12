//! Aborts the process when a decoder hangs, and reports the input.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A watchdog thread.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    /// The input that is being decoded, and since when.
    running: Option<Instant>,
    input: Vec<u8>,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    /// Starts the watchdog of a target. An input that hangs is written to the folder.
    pub(crate) fn begin(name: &'static str, folder: PathBuf) -> Self {
        let shared = Arc::new(Shared::default());
        let watched = shared.clone();
        let thread = thread::spawn(move || watch(&watched, name, &folder));
        Self { shared, thread: Some(thread) }
    }

    /// Runs a decoder on an input.
    pub(crate) fn over<T>(&self, input: &[u8], decode: impl FnOnce() -> T) -> T {
        let mut state = self.shared.lock();
        state.running = Some(Instant::now());
        state.input.clear();
        state.input.extend_from_slice(input);
        drop(state);
        let decoded = decode();
        self.shared.lock().running = None;
        decoded
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.over.notify_all();
        // It panics only when it aborts the process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn watch(shared: &Shared, name: &str, folder: &std::path::Path) {
    let mut state = shared.lock();
    while !state.is_over {
        let waited = shared.over.wait_timeout(state, POLL_INTERVAL);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.running.is_some_and(|since| since.elapsed() > PATIENCE) {
            let file = crate::keep(folder, &state.input);
            // Written directly to standard error: the captured output of tests is lost on abort.
            let _ =
                writeln!(std::io::stderr(), "target {name} has not returned for {PATIENCE:?}; the input is in {file}");
            std::process::abort();
        }
    }
}

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// No decoder takes a thousandth of it, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
