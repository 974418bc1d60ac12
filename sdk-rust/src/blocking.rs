//! The client for programs that are not asynchronous: calls block, and a thread of its own keeps the session alive.
//!
//! Waits come in slices, so that the caller can look after other things in between: Python looks for signals.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use ronde_rpc::EpochView;
use ronde_shm::{ForkGuard, ForkSafe};
use ronde_wire::{DType, Detail, SetId, Shape};
use tokio::sync::oneshot;

use crate::buffer::{Buffer, SharedMemory};
use crate::client::Client as AsyncClient;
use crate::completions::Completions;
use crate::error::Error;
use crate::handle::ResultData;
use crate::methods::{for_each_group, for_each_operation};
use crate::operation::{Label, Operation, ReduceOptions, Site};
use crate::options::Options;
use crate::outcome::{Exchanged, Outcome, Output, ProcessSet, Received};
use crate::promise::{Promise, promise};
use crate::session::Session;
use crate::tensor::{Tensor, TensorRef};
use crate::timeline::TimelineOptions;

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
    /// The thread's.
    runtime: tokio::runtime::Handle,
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

    /// Dissolves a process set; operations on it that are pending fail. All ranks of the world call it. False, without asking
    /// anybody, for the set of all ranks and for one that there is not.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    #[track_caller]
    pub fn remove_process_set(&self, set: SetId) -> Result<bool, Error> {
        if set == SetId::WORLD || !self.inner.get()?.client.knows_set(set)? {
            return Ok(false);
        }
        self.remove_process_set_async(set)?.wait()?;
        Ok(true)
    }

    /// [`Client::remove_process_set`] of a set that there is, which returns at once.
    ///
    /// # Errors
    /// Those of [`Client::allreduce_async`].
    #[track_caller]
    pub fn remove_process_set_async(&self, set: SetId) -> Result<Handle<()>, Error> {
        Ok(self.submit_from(&Site::here().of(Operation::remove_process_set(set)))?.typed())
    }

    /// Submits any operation; the bytes are copied once, into shared memory. Blocks only while the arena grows. When a limit
    /// refuses it here, it fails on the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub fn submit_from(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        let client = &self.inner.get()?.client;
        if !operation.notify {
            client.expect_wait();
        }
        client.submit_from(operation).map(Handle)
    }

    /// Submits operations of one kind on one set that become ready together: none of them begins before all are there on all
    /// ranks. The label names all of them. When one is refused, none of them completes.
    ///
    /// # Errors
    /// Those of [`Client::submit_from`].
    pub fn submit_group_from<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let client = &self.inner.get()?.client;
        if operations.iter().all(|operation| !operation.notify) {
            client.expect_wait();
        }
        let handles = client.submit_group_from(label, operations)?;
        Ok(handles.into_iter().map(Handle).collect())
    }

    /// Counts the operations submitted with [`Operation::notify`] that complete while no thread waits for them.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn completions(&self) -> Result<Completions, Error> {
        Ok(self.inner.get()?.client.session()?.completions.clone())
    }

    /// [`crate::Client::buffer`]; blocks only while the arena grows.
    ///
    /// # Errors
    /// Those of [`crate::Client::buffer`].
    pub fn buffer(&self, dtype: DType, shape: &[u64]) -> Result<Buffer, Error> {
        self.inner.get()?.client.session()?.buffer(dtype, shape)
    }

    /// Whether there is a process set of this number, as far as this rank has heard.
    ///
    /// # Errors
    /// Why the session is over.
    pub fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        self.inner.get()?.client.knows_set(set)
    }

    /// [`crate::Client::start_timeline`], blocking.
    ///
    /// # Errors
    /// Those of [`crate::Client::start_timeline`].
    pub fn start_timeline(&self, options: TimelineOptions) -> Result<(), Error> {
        self.begin_timeline(options)?.wait()
    }

    /// [`Client::start_timeline`] that returns at once.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn begin_timeline(&self, options: TimelineOptions) -> Result<TimelineChange, Error> {
        self.in_session(|session| async move { session.start_timeline(options).await })
    }

    /// [`crate::Client::stop_timeline`], blocking.
    ///
    /// # Errors
    /// Those of [`crate::Client::stop_timeline`].
    pub fn stop_timeline(&self) -> Result<(), Error> {
        self.end_timeline()?.wait()
    }

    /// [`Client::stop_timeline`] that returns at once.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn end_timeline(&self) -> Result<TimelineChange, Error> {
        self.in_session(|session| async move { session.stop_timeline().await })
    }

    /// Does something in the session's runtime, which bounds how long it takes.
    fn in_session<F>(&self, work: impl FnOnce(Arc<Session>) -> F) -> Result<TimelineChange, Error>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let inner = self.inner.get()?;
        let session = inner.client.session()?;
        session.fork_guard.check()?;
        let (report, outcome) = promise();
        let work = work(Arc::clone(session));
        // Dropped unfinished with the runtime, which fails the promise.
        drop(inner.runtime.spawn(async move { report.with(work.await) }));
        Ok(TimelineChange(outcome))
    }

    /// [`crate::Client::part`].
    pub fn part(&self, reason: &str) {
        if let Ok(inner) = self.inner.get() {
            inner.client.part(reason);
        }
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

    /// How what is submitted reaches the sidecar: `ring`, in shared memory, or `grpc`, on the session's stream.
    #[must_use]
    pub fn submission_path(&self) -> &'static str {
        self.inner.get().map_or("grpc", |inner| inner.client.submission_path())
    }

    /// [`crate::Client::shared_memory`].
    #[must_use]
    pub fn shared_memory(&self) -> SharedMemory {
        self.inner.get().map(|inner| inner.client.shared_memory()).unwrap_or_default()
    }

    /// Why nothing can be submitted any more, if so.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        match self.inner.get() {
            Ok(inner) => {
                inner.client.poll_ring();
                inner.client.over()
            }
            Err(error) => Some(error.into()),
        }
    }

    /// The sidecar's messages for people since the last call.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        let Ok(inner) = self.inner.get() else { return Vec::new() };
        inner.client.poll_ring();
        inner.client.take_notices()
    }
}

macro_rules! operations {
    ($($(#[doc = $doc:literal])* $name:ident, $start:ident$(<$life:lifetime>)?($($argument:ident: $type:ty,)*) -> $gives:ty = $operation:expr;)*) => {
        impl Client {$(
            $(#[doc = $doc])*
            ///
            /// # Errors
            /// [`Error::Argument`] and [`Error::Limit`] at once; [`Error::Failure`] with the culprit when it fails.
            #[track_caller]
            pub fn $name$(<$life>)?(&self, $($argument: $type),*) -> Result<$gives, Error> {
                self.$start($($argument),*)?.wait()
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the tensor has been handed over.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start$(<$life>)?(&self, $($argument: $type),*) -> Result<Handle<$gives>, Error> {
                Ok(self.submit_from(&Site::here().of($operation))?.typed())
            }
        )*}
    };
}

macro_rules! groups {
    ($($(#[doc = $doc:literal])* $name:ident, $start:ident($($argument:ident: $type:ty,)*) = $operation:expr;)*) => {
        impl Client {$(
            $(#[doc = $doc])*
            /// Results come in the order of the tensors.
            ///
            /// # Errors
            /// Those of the operation on one tensor, of the first that fails.
            #[track_caller]
            pub fn $name<'a>(
                &self,
                label: impl Into<Label<'a>>,
                tensors: &[TensorRef<'a>],
                $($argument: $type),*
            ) -> Result<Vec<Tensor>, Error> {
                self.$start(label, tensors, $($argument),*)?.into_iter().map(Handle::wait).collect()
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the tensors have been handed over.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start<'a>(
                &self,
                label: impl Into<Label<'a>>,
                tensors: &[TensorRef<'a>],
                $($argument: $type),*
            ) -> Result<Vec<Handle<Tensor>>, Error> {
                let site = Site::here();
                let label = label.into();
                $(let $argument = $argument.into();)*
                let make = $operation;
                let one = |tensor: &_| site.of(make(Label { name: None, ..label }, *tensor, $(&$argument),*));
                let operations: Vec<_> = tensors.iter().map(one).collect();
                let handles = self.submit_group_from(label, &operations)?;
                Ok(handles.into_iter().map(Handle::typed).collect())
            }
        )*}
    };
}

for_each_operation!(operations);
for_each_group!(groups);

/// A client that is being connected, so that the wait can be interrupted. Dropping it gives up.
#[derive(Debug)]
pub struct Connecting {
    connected: mpsc::Receiver<Result<AsyncClient, Error>>,
    thread: Option<Thread>,
    runtime: tokio::runtime::Handle,
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
        let handle_of_runtime = runtime.handle().clone();
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
        Ok(Self { connected, thread: Some(thread), runtime: handle_of_runtime, fork_guard: ForkGuard::new() })
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
        let inner = Inner { client, runtime: self.runtime.clone(), _thread: thread };
        Ok(Some(Client { inner: ForkSafe::new(inner), view }))
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

/// The start or the stop of a timeline, which is under way.
#[derive(Debug)]
pub struct TimelineChange(Promise<()>);

impl TimelineChange {
    /// Waits at most `slice`; `None` when it is not done yet.
    ///
    /// # Errors
    /// [`Error::Timeline`], or why the session is over.
    pub fn wait_timeout(&self, slice: Duration) -> Result<Option<()>, Error> {
        self.0.wait_timeout(slice).transpose()
    }

    fn wait(self) -> Result<(), Error> {
        while self.wait_timeout(SLICE)?.is_none() {}
        Ok(())
    }
}

/// An operation in flight that gives a `T`. Dropping it withdraws the operation unless it is complete.
#[derive(Debug)]
pub struct Handle<T = Output>(crate::Handle<T>);

/// Whether a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The operation is complete or has failed: reading it returns at once.
    Ready,
    /// It is still in flight.
    NotReady,
}

impl Handle {
    fn typed<T: Outcome>(self) -> Handle<T> {
        Handle(self.0.typed())
    }
}

impl<T: Outcome> Handle<T> {
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

    /// Whether this rank gets a tensor in the end: not the ranks other than the root of a reduce, and nobody of a barrier.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn has_result(&self) -> Result<bool, Error> {
        self.0.has_result()
    }

    /// The shape of the result, once it is [`Progress::Ready`]; `[0]` when there is none.
    ///
    /// # Errors
    /// The operation's failure; [`Error::Argument`] before it is ready.
    pub fn shape(&self) -> Result<&Shape, Error> {
        Ok(&self.arrived()?.shape)
    }

    /// The type of the result, once it is [`Progress::Ready`].
    ///
    /// # Errors
    /// Those of [`Handle::shape`].
    pub fn dtype(&self) -> Result<DType, Error> {
        Ok(self.arrived()?.dtype)
    }

    /// What there is to know besides the result, once it is [`Progress::Ready`].
    ///
    /// # Errors
    /// Those of [`Handle::shape`].
    pub fn detail(&self) -> Result<&Detail, Error> {
        Ok(&self.arrived()?.detail)
    }

    fn arrived(&self) -> Result<&ResultData, Error> {
        self.0.arrived()?.ok_or_else(|| Error::argument("the operation is still in flight; wait for it first"))
    }

    /// Copies the result into `target`, which has exactly its length. Once only.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::Argument`] when it is not ready or the target has another length.
    pub fn read_into(&mut self, target: &mut [u8]) -> Result<(), Error> {
        self.shape()?;
        self.0.read_into(target)
    }

    /// Takes the result if it stays in shared memory, once it is [`Progress::Ready`]; after `None` it is still to be read.
    ///
    /// # Errors
    /// Those of [`Handle::shape`].
    pub fn take_mapped(&mut self) -> Result<Option<Buffer>, Error> {
        self.shape()?;
        self.0.take_mapped()
    }

    /// [`crate::Handle::wait_buffer`], blocking.
    ///
    /// # Errors
    /// Those of [`crate::Handle::wait_buffer`].
    pub fn wait_buffer(mut self) -> Result<Buffer, Error> {
        while self.wait_timeout(SLICE)? == Progress::NotReady {}
        self.0.read_buffer()
    }

    /// Waits for the result and copies it out.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait(mut self) -> Result<T, Error> {
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
            let task = client.take_task();
            // When nobody waits any more, the client comes back and is dropped here, which ends the session.
            drop(report.send(Ok(client)));
            if let Some(task) = task {
                // Fails only when the task panics, which has been reported on standard error.
                let _ = task.await;
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
