//! The client for programs that are not asynchronous: calls block, and a separate thread keeps the session alive.
//!
//! Waits come in slices, so that the caller can do other work in between: Python checks for signals.

mod connecting;
mod handle;

use std::sync::Arc;
use std::time::Duration;

use ronde_rpc::EpochView;
use ronde_shm::ForkSafe;
use ronde_wire::{DType, SetId};

use crate::buffer::{Buffer, SharedMemory};
use crate::completions::Completions;
use crate::device::{InputTensor, LevelCounts};
use crate::error::Error;
use crate::methods::{
    blocking_groups, blocking_operations, blocking_set_removal, epoch_methods, for_each_group, for_each_operation,
};
use crate::open::OpenSession;
use crate::operation::{Label, Operation, ReduceOptions, Site};
use crate::options::Options;
use crate::outcome::{Exchanged, ProcessSet, Received};
use crate::promise::{Promise, promise};
use crate::session::Session;
use crate::tensor::{Tensor, TensorRef};
use crate::timeline::TimelineOptions;

pub use connecting::Connecting;
pub use handle::{Handle, Progress};

/// A client whose calls block. Threads may share it.
///
/// Dropping it ends the session in order and waits, with a timeout, until the sidecar has closed it.
#[derive(Debug)]
pub struct Client {
    inner: ForkSafe<Inner>,
    view: EpochView,
}

#[derive(Debug)]
struct Inner {
    /// Declared first: the session ends before its thread is joined.
    open: OpenSession,
    /// The thread's runtime.
    runtime: tokio::runtime::Handle,
    _thread: connecting::Thread,
}

impl Client {
    fn new(inner: Inner, view: EpochView) -> Self {
        Self { inner: ForkSafe::new(inner), view }
    }

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

    fn session(&self) -> Result<&Arc<Session>, Error> {
        Ok(&self.inner.get()?.open.session)
    }

    /// Submits any operation; the bytes are copied once, into shared memory. Blocks only while the arena grows. When a limit
    /// rejects the operation here, it fails on the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub fn submit_from(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        let session = self.session()?;
        if !operation.notify {
            session.expect_wait();
        }
        session.submit_from(operation).map(Handle::new)
    }

    /// Submits operations of one kind on one process set that become ready together: none of them begins before all are
    /// there on all ranks. The label names all of them. When one is rejected, none of them completes.
    ///
    /// # Errors
    /// Those of [`Client::submit_from`].
    pub fn submit_group_from<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let session = self.session()?;
        if operations.iter().all(|operation| !operation.notify) {
            session.expect_wait();
        }
        session.submit_group_from(label.into(), operations, Handle::new)
    }

    /// Submits an operation whose contribution may be in device memory. Returns at once: the bytes are copied to shared memory
    /// after the present work of the tensor's stream, and the operation reaches the sidecar when they are there. Its name and
    /// its place among others are those of this call. Overwrite the tensor only with work that is ordered after the wait for
    /// the operation. [`Handle::deliver`] copies the result to device memory.
    ///
    /// The `tensor` of `operation` is ignored.
    ///
    /// # Errors
    /// Those of [`Client::submit_from`]; [`Error::Device`] without a GPU or its driver, and for memory of another device.
    pub fn submit_input(&self, operation: &Operation<'_>, input: InputTensor<'_>) -> Result<Handle, Error> {
        self.session()?.submit_input(operation, input).map(Handle::new)
    }

    /// [`Client::submit_group_from`] with contributions that may be in device memory: see [`Client::submit_input`].
    ///
    /// # Errors
    /// Those of [`Client::submit_input`].
    pub fn submit_group_input<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[(Operation<'_>, InputTensor<'_>)],
    ) -> Result<Vec<Handle>, Error> {
        let in_flight = self.session()?.submit_group_input(label.into(), operations)?;
        Ok(in_flight.into_iter().map(Handle::new).collect())
    }

    /// Counts the operations submitted with [`Operation::notify`] that complete while no thread waits for them.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn completions(&self) -> Result<Completions, Error> {
        Ok(self.session()?.completions.clone())
    }

    /// [`crate::Client::buffer`]; blocks only while the arena grows.
    ///
    /// # Errors
    /// Those of [`crate::Client::buffer`].
    pub fn buffer(&self, dtype: DType, shape: &[u64]) -> Result<Buffer, Error> {
        self.session()?.buffer(dtype, shape)
    }

    /// Whether this rank knows a process set of this number.
    ///
    /// # Errors
    /// Why the session is over.
    pub fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        self.session()?.knows_set(set)
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
        self.in_runtime(|session| async move { session.start_timeline(options).await })
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
        self.in_runtime(|session| async move { session.stop_timeline().await })
    }

    /// Spawns work on the session's runtime. The session bounds how long it takes.
    fn in_runtime<F>(&self, work: impl FnOnce(Arc<Session>) -> F) -> Result<TimelineChange, Error>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let Inner { open, runtime, .. } = self.inner.get()?;
        open.session.fork_guard.check()?;
        let (report, outcome) = promise();
        let work = work(Arc::clone(&open.session));
        // When the runtime drops it unfinished, the promise fails.
        drop(runtime.spawn(async move { report.with(work.await) }));
        Ok(TimelineChange(outcome))
    }

    /// [`crate::Client::part`].
    pub fn part(&self, reason: &str) {
        if let Ok(session) = self.session() {
            session.close(reason);
        }
    }

    /// How submissions reach the sidecar: `ring`, in shared memory, or `grpc`, on the session's stream.
    #[must_use]
    pub fn submission_path(&self) -> &'static str {
        self.session().map_or("grpc", |session| session.submission_path())
    }

    /// [`crate::Client::shared_memory`].
    #[must_use]
    pub fn shared_memory(&self) -> SharedMemory {
        self.session().map(|session| session.shared_memory()).unwrap_or_default()
    }

    /// What this session has done in two levels, on GPUs.
    #[must_use]
    pub fn level_counts(&self) -> LevelCounts {
        self.session().map(|session| session.level_counts()).unwrap_or_default()
    }

    /// Why nothing can be submitted any more, if so.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        match self.session() {
            Ok(session) => {
                session.poll_ring();
                session.pending.over()
            }
            Err(error) => Some(error),
        }
    }

    /// The sidecar's messages for people since the last call.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        let Ok(session) = self.session() else { return Vec::new() };
        session.poll_ring();
        session.pending.take_notices()
    }

    /// The newest change of an elastic job's membership since the last call: the launcher adds or removes workers. End the
    /// epoch soon, by closing this client and connecting again.
    #[must_use]
    pub fn membership_change(&self) -> Option<crate::MembershipChange> {
        let session = self.session().ok()?;
        session.poll_ring();
        session.pending.take_change()
    }
}

epoch_methods!();
blocking_set_removal!();
for_each_operation!(blocking_operations);
for_each_group!(blocking_groups);

/// The start or the stop of a timeline, which is in progress.
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

// Threads share a client and pass handles to each other, as documented.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Client>();
    shared::<Handle>();
};

/// How long one wait lasts before the next one begins.
const SLICE: Duration = Duration::from_secs(1);
