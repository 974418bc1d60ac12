//! Completes calls whose operations are in flight: one thread waits for any of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use ronde::blocking::{Client, Handle, Progress};
use ronde::{Completions, Error};

use super::call::ResultBuffer;
use super::ffi::{Failure, Promise};
use super::{failure, lock};
use crate::frameworks::status::Code;

/// The operations of one call.
pub(super) struct InFlight {
    handles: Vec<Handle>,
    results: Vec<ResultBuffer>,
}

impl InFlight {
    /// `results` are where the results go, in the order of the handles; none for an operation without a result.
    pub(super) fn new(handles: Vec<Handle>, results: Vec<ResultBuffer>) -> Self {
        Self { handles, results }
    }

    /// Waits for the operations. The session bounds the wait: by its operation timeout, or its end.
    pub(super) fn wait(mut self) -> Result<(), Failure> {
        for handle in &mut self.handles {
            while handle.wait_timeout(PERIOD).map_err(|error| failure(&error))? == Progress::NotReady {}
        }
        self.finish()
    }

    /// Whether all operations are complete or have failed. A failure to wait is one that `finish` reports.
    fn is_ready(&mut self) -> bool {
        self.handles.iter_mut().all(|handle| !matches!(handle.wait_timeout(Duration::ZERO), Ok(Progress::NotReady)))
    }

    /// `finish`, for which a panic is a failure of this call alone.
    fn finish_or_fail(self) -> Result<(), Failure> {
        catch_unwind(AssertUnwindSafe(|| self.finish())).unwrap_or_else(|_| {
            let text = "ronde has a bug: it panicked when it read the results of a call".to_owned();
            Err(Failure { code: Code::Internal, text })
        })
    }

    /// Reads the results of complete operations.
    fn finish(mut self) -> Result<(), Failure> {
        if self.results.is_empty() {
            return self
                .handles
                .iter()
                .try_for_each(|handle| handle.shape().map(drop))
                .map_err(|error| failure(&error));
        }
        for (handle, result) in self.handles.iter_mut().zip(&mut self.results) {
            let shape = handle.shape().map_err(|error| failure(&error))?.dimensions().to_vec();
            if shape != result.shape() {
                return Err(Failure { code: Code::InvalidArgument, text: other_shape(handle, &shape, result.shape()) });
            }
            result.read(handle)?;
        }
        Ok(())
    }
}

fn other_shape(handle: &Handle, found: &[u64], expected: &[u64]) -> String {
    let name = handle.name().unwrap_or("an operation");
    format!(
        "the result of {name} has shape {found:?}, but the program was compiled for {expected:?}: in a compiled program the \
         shapes of all ranks are known beforehand. Give rows= or received_splits= as the ranks have them, or call it outside \
         of jax.jit"
    )
}

/// A call and what completes it.
type Added = (InFlight, Promise);

/// Completes the calls of one session.
#[derive(Clone)]
pub(super) struct Completer {
    /// Calls for the thread; `None` once it has ended.
    added: Arc<Mutex<Option<Vec<Added>>>>,
    completions: Completions,
}

impl Completer {
    /// Starts the thread. It ends with the session.
    pub(super) fn start(client: Weak<Client>, completions: Completions) -> std::io::Result<Self> {
        let completer = Self { added: Arc::new(Mutex::new(Some(Vec::new()))), completions };
        let own = completer.clone();
        std::thread::Builder::new().name("ronde-xla".to_owned()).spawn(move || own.run(&client))?;
        Ok(completer)
    }

    /// Completes a call when its operations are complete or have failed. Call it while a reference to the client exists.
    pub(super) fn add(&self, in_flight: InFlight, promise: Promise) {
        if let Some(added) = lock(&self.added).as_mut() {
            added.push((in_flight, promise));
        }
        self.completions.wake();
    }

    fn run(&self, client: &Weak<Client>) {
        let _end = End(self);
        let mut waiting: Vec<Added> = Vec::new();
        let mut seen = 0;
        loop {
            // In this order: a call that is added later has a client.
            let is_over = client.strong_count() == 0;
            waiting.extend(lock(&self.added).as_mut().map(std::mem::take).unwrap_or_default());
            for (in_flight, promise) in waiting.extract_if(.., |(in_flight, _)| in_flight.is_ready()) {
                promise.complete(in_flight.finish_or_fail());
            }
            if is_over && waiting.is_empty() {
                return;
            }
            seen = self.completions.wait(seen, PERIOD);
        }
    }
}

/// Rejects calls after the end of the thread, also if it panics: their promises are dropped.
struct End<'a>(&'a Completer);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let rest = lock(&self.0.added).take();
        drop(rest);
    }
}

impl ResultBuffer {
    fn read(&mut self, handle: &mut Handle) -> Result<(), Failure> {
        let read: Result<(), Error> = self.target.with(|bytes| handle.read_into(bytes));
        read.map_err(|error| failure(&error))
    }
}

/// How long one wait lasts, before the end of the session is checked.
const PERIOD: Duration = Duration::from_secs(1);
