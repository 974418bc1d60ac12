//! [`Connecting`]: a client that is being connected on its session's thread.

use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use ronde_rpc::EpochView;
use ronde_shm::ForkGuard;
use tokio::sync::oneshot;

use super::{Client, Inner};
use crate::error::Error;
use crate::open::OpenSession;
use crate::options::Options;

/// A client that is being connected, so that the wait can be interrupted. Dropping it cancels the connection attempt.
#[derive(Debug)]
pub struct Connecting {
    connected: mpsc::Receiver<Connected>,
    thread: Option<Thread>,
    runtime: tokio::runtime::Handle,
    fork_guard: ForkGuard,
}

type Connected = Result<(OpenSession, EpochView), Error>;

impl Connecting {
    /// Starts the session's thread, which connects.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn start(options: Options) -> Result<Self, Error> {
        let (report, connected) = mpsc::sync_channel(1);
        let (cancel, cancelled) = oneshot::channel::<()>();
        let (report_end, ended) = mpsc::sync_channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Thread { reason: error.to_string() })?;
        let runtime_handle = runtime.handle().clone();
        let run = move || {
            runtime.block_on(run_session(options, report, cancelled));
            // The receiver is gone when the client was not dropped before the process ends.
            let _ = report_end.send(());
        };
        let handle = std::thread::Builder::new()
            .name("ronde-session".to_owned())
            .spawn(run)
            .map_err(|error| Error::Thread { reason: error.to_string() })?;
        let thread = Thread { handle: Some(handle), cancel: Some(cancel), ended: Mutex::new(ended) };
        Ok(Self { connected, thread: Some(thread), runtime: runtime_handle, fork_guard: ForkGuard::new() })
    }

    /// Waits at most `slice` for the client; `None` when it is not connected yet.
    ///
    /// # Errors
    /// Those of [`crate::Client::connect`].
    pub fn wait_timeout(&mut self, slice: Duration) -> Result<Option<Client>, Error> {
        self.fork_guard.check()?;
        let (session, view) = match self.connected.recv_timeout(slice) {
            Ok(outcome) => outcome?,
            Err(mpsc::RecvTimeoutError::Timeout) => return Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Error::Closed),
        };
        let Some(thread) = self.thread.take() else { return Err(Error::Closed) };
        let inner = Inner { open: session, runtime: self.runtime.clone(), _thread: thread };
        Ok(Some(Client::new(inner, view)))
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // A forked child has the parent's file descriptors but not its thread.
        if self.fork_guard.is_child() {
            std::mem::forget(self.thread.take());
        }
    }
}

/// The session's thread. Dropping this waits, with a timeout, until the thread has ended.
#[derive(Debug)]
pub(super) struct Thread {
    handle: Option<JoinHandle<()>>,
    /// Dropping it cancels the connection attempt.
    cancel: Option<oneshot::Sender<()>>,
    /// In a mutex only to be `Sync`: threads may share a `Client`.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.cancel.take());
        if let Some(handle) = self.handle.take()
            && self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(END_TIMEOUT).is_ok()
        {
            // It has sent its last message. A panic there has been reported on standard error.
            let _ = handle.join();
        }
    }
}

/// Connects, reports the outcome, and runs the session's task until it ends.
async fn run_session(options: Options, report: mpsc::SyncSender<Connected>, cancelled: oneshot::Receiver<()>) {
    // No message is sent: the sender is dropped.
    let cancelled = async { drop(cancelled.await) };
    match OpenSession::connect(options, cancelled).await {
        Ok((mut open, view)) => {
            let task = open.take_task();
            // Without a receiver the session comes back and is dropped here, which ends it.
            drop(report.send(Ok((open, view))));
            if let Some(task) = task {
                // Fails only when the task panics, which has been reported on standard error.
                let _ = task.await;
            }
        }
        Err(error) => drop(report.send(Err(error))),
    }
}

/// How long the end of a session may take; longer than the session waits after its Goodbye.
const END_TIMEOUT: Duration = Duration::from_secs(3);
