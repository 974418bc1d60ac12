//! The client for programs that are not asynchronous: calls block, and a thread of its own keeps the session alive.
//!
//! Waits come in slices, so that the caller can look after other things in between: Python looks for signals.

use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use ronde_rpc::EpochView;
use ronde_shm::{ForkGuard, ForkSafe};
use ronde_wire::Shape;
use tokio::sync::oneshot;

use crate::client::Client as AsyncClient;
use crate::error::Error;
use crate::operation::{AllReduceOptions, Operation};
use crate::options::Options;
use crate::tensor::{Tensor, TensorRef};

/// A client whose calls block. May be shared by threads.
///
/// Dropping it ends the session in order and waits, shortly, until the sidecar has heard of it.
#[derive(Debug)]
pub struct Client {
    inner: ForkSafe<Inner>,
    view: EpochView,
}

#[derive(Debug)]
struct Inner {
    /// Declared first: the session ends before its thread is waited for.
    client: AsyncClient,
    _thread: Thread,
}

impl Client {
    /// [`crate::Client::connect`], blocking.
    ///
    /// # Errors
    /// Those of [`crate::Client::connect`].
    pub fn connect(options: Options) -> Result<Self, Error> {
        let mut connecting = Connecting::start(options)?;
        loop {
            if let Some(client) = connecting.wait_timeout(SLICE)? {
                return Ok(client);
            }
        }
    }

    /// Reduces a tensor over all ranks of the set; every rank gets the result.
    ///
    /// # Errors
    /// [`Error::Argument`] and [`Error::Limit`] at once; [`Error::Failure`] with the culprit when it fails.
    pub fn allreduce<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
        options: AllReduceOptions,
    ) -> Result<Tensor, Error> {
        let tensor = tensor.into();
        self.submit_from(&Operation::allreduce(name.into(), tensor, options), tensor.bytes)?.wait()
    }

    /// Concatenates the tensors of all ranks along the first dimension, in rank order.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub fn allgather<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
    ) -> Result<Tensor, Error> {
        let tensor = tensor.into();
        self.submit_from(&Operation::allgather(name.into(), tensor), tensor.bytes)?.wait()
    }

    /// Gives every rank the tensor of rank `root`.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub fn broadcast<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
        root: u32,
    ) -> Result<Tensor, Error> {
        let tensor = tensor.into();
        self.submit_from(&Operation::broadcast(name.into(), tensor, root), tensor.bytes)?.wait()
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub fn barrier<'a>(&self, name: impl Into<Option<&'a str>>) -> Result<(), Error> {
        self.submit_from(&Operation::barrier(name.into()), &[])?.wait().map(drop)
    }

    /// Submits any operation; the bytes are copied once, into shared memory. Blocks only while the arena grows.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub fn submit_from(&self, operation: &Operation<'_>, bytes: &[u8]) -> Result<Handle, Error> {
        self.inner.get()?.client.submit_from(operation, bytes).map(Handle)
    }

    /// The rank, sizes and positions in the epoch.
    #[must_use]
    pub fn view(&self) -> &EpochView {
        &self.view
    }

    /// This worker's number in the job.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.view.rank.0
    }

    /// The number of workers in the job.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.view.size
    }

    /// Why nothing can be submitted any more, if so.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        match self.inner.get() {
            Ok(inner) => inner.client.over(),
            Err(error) => Some(error.into()),
        }
    }

    /// The sidecar's messages for people since the last call.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.inner.get().map(|inner| inner.client.take_notices()).unwrap_or_default()
    }
}

/// A client that is being connected, so that the wait can be interrupted. Dropping it gives up.
#[derive(Debug)]
pub struct Connecting {
    connected: mpsc::Receiver<Result<AsyncClient, Error>>,
    thread: Option<Thread>,
    fork_guard: ForkGuard,
}

impl Connecting {
    /// Starts the session's thread, which connects.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn start(options: Options) -> Result<Self, Error> {
        let (report, connected) = mpsc::sync_channel(1);
        let (cancel, cancelled) = oneshot::channel::<()>();
        let (ended, ends) = mpsc::sync_channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Thread { reason: error.to_string() })?;
        let run = move || {
            runtime.block_on(serve(options, report, cancelled));
            // Nobody listens when the client was not dropped before the process ends.
            let _ = ended.send(());
        };
        let handle = std::thread::Builder::new()
            .name("ronde-session".to_owned())
            .spawn(run)
            .map_err(|error| Error::Thread { reason: error.to_string() })?;
        let thread = Thread { handle: Some(handle), cancel: Some(cancel), ends: Mutex::new(ends) };
        Ok(Self { connected, thread: Some(thread), fork_guard: ForkGuard::new() })
    }

    /// Waits at most `slice` for the client; `None` when it is not connected yet.
    ///
    /// # Errors
    /// Those of [`crate::Client::connect`].
    pub fn wait_timeout(&mut self, slice: Duration) -> Result<Option<Client>, Error> {
        self.fork_guard.check()?;
        let client = match self.connected.recv_timeout(slice) {
            Ok(outcome) => outcome?,
            Err(mpsc::RecvTimeoutError::Timeout) => return Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Error::Closed),
        };
        let Some(thread) = self.thread.take() else { return Err(Error::Closed) };
        let view = *client.view();
        Ok(Some(Client { inner: ForkSafe::new(Inner { client, _thread: thread }), view }))
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // A child has the parent's numbers but not its thread.
        if self.fork_guard.is_child() {
            std::mem::forget(self.thread.take());
        }
    }
}

/// An operation in flight. Dropping it withdraws the operation unless it is complete.
#[derive(Debug)]
pub struct Handle(crate::Handle);

/// Whether a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The operation is complete or has failed: reading it returns at once.
    Ready,
    /// It is still in flight.
    NotReady,
}

impl Handle {
    /// Whether the operation is complete or has failed.
    #[must_use]
    pub fn poll(&self) -> bool {
        self.0.poll()
    }

    /// The operation's name, as the ranks know it.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn name(&self) -> Result<&str, Error> {
        self.0.name()
    }

    /// Waits at most `slice`.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`]. The failure of the operation is told by what reads it.
    pub fn wait_timeout(&mut self, slice: Duration) -> Result<Progress, Error> {
        self.0.wait_timeout(slice).map(|ready| if ready { Progress::Ready } else { Progress::NotReady })
    }

    /// The shape of the result, once it is [`Progress::Ready`].
    ///
    /// # Errors
    /// The operation's failure; [`Error::Argument`] before it is ready.
    pub fn shape(&self) -> Result<&Shape, Error> {
        self.0.shape()?.ok_or_else(|| Error::argument("the operation is still in flight; wait for it first"))
    }

    /// Copies the result into `target`, which has exactly its length. Once only.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::Argument`] when it is not ready or the target has another length.
    pub fn read_into(&mut self, target: &mut [u8]) -> Result<(), Error> {
        self.shape()?;
        self.0.read_into(target)
    }

    /// Waits for the result and copies it out.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait(mut self) -> Result<Tensor, Error> {
        while self.wait_timeout(SLICE)? == Progress::NotReady {}
        self.0.read()
    }

    /// Waits for the result and copies it into `target`, which has exactly its length.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::Argument`] when the target has another length.
    pub fn wait_into(mut self, target: &mut [u8]) -> Result<Shape, Error> {
        while self.wait_timeout(SLICE)? == Progress::NotReady {}
        let shape = self.shape()?.clone();
        self.read_into(target)?;
        Ok(shape)
    }
}

/// The session's thread. Dropping this waits, shortly, until it has ended.
#[derive(Debug)]
struct Thread {
    handle: Option<JoinHandle<()>>,
    /// Its end is the sign to give up connecting.
    cancel: Option<oneshot::Sender<()>>,
    /// In a lock only to be shared: `Client` may be used by several threads.
    ends: Mutex<mpsc::Receiver<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.cancel.take());
        if let Some(handle) = self.handle.take()
            && self.ends.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(END_TIMEOUT).is_ok()
        {
            // It has sent its last message; a panic there has been reported on standard error.
            let _ = handle.join();
        }
    }
}

/// Connects, reports, and keeps the session's task running until it ends.
async fn serve(
    options: Options,
    report: mpsc::SyncSender<Result<AsyncClient, Error>>,
    cancelled: oneshot::Receiver<()>,
) {
    // Cancelled by a message, which nobody sends, or by the end of the other side.
    let cancelled = async { drop(cancelled.await) };
    match AsyncClient::connect_until(options, cancelled).await {
        Ok(mut client) => {
            let listener = client.take_listener();
            // When nobody waits any more, the client comes back and is dropped here, which ends the session.
            drop(report.send(Ok(client)));
            if let Some(listener) = listener {
                // Fails only when the task panics, which has been reported on standard error.
                let _ = listener.await;
            }
        }
        Err(error) => drop(report.send(Err(error))),
    }
}

// Shared by threads and handed between them, as documented.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Client>();
    shared::<Handle>();
};

/// How long one wait lasts before the next one begins.
const SLICE: Duration = Duration::from_secs(1);
/// How long the end of a session may take; longer than the session itself listens after its farewell.
const END_TIMEOUT: Duration = Duration::from_secs(3);
