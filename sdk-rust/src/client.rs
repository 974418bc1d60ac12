//! [`Client`]: the asynchronous client.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ronde_rpc::v1::client_message;
use ronde_rpc::{EpochView, paths, v1};
use ronde_shm::{ArenaUsage, ForkSafe, LeasedSlot};
use ronde_wire::{DType, SetId};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::buffer::{Buffer, SharedMemory};
use crate::connect;
use crate::error::Error;
use crate::handle::Handle;
use crate::memory::{InputPart, Memory, whole};
use crate::methods::{for_each_group, for_each_operation, groups, operations};
use crate::operation::{Label, Operation, ReduceOptions, Site};
use crate::options::{Options, Transfer};
use crate::outcome::{Exchanged, ProcessSet, Received};
use crate::session::{Draft, Input, Session, SessionOptions};
use crate::task::SessionTask;
use crate::tensor::{Tensor, TensorRef};
use crate::timeline::{Recorder, TimelineOptions};

/// A worker's session with its sidecar, in an epoch that has begun.
///
/// Calls take `&self` and may overlap. Dropping the client ends the session in order; [`Client::close`] also waits for it.
#[derive(Debug)]
pub struct Client {
    open: ForkSafe<Open>,
    view: EpochView,
}

impl Client {
    /// Reaches the sidecar, claims the rank and waits until all ranks have attached.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Claim`], [`Error::Token`] when the sidecar cannot be reached or does not accept this
    /// worker; [`Error::Start`] when not all ranks attach within the start timeout; [`Error::Failure`] when the job fails
    /// before it starts.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        Self::connect_until(options, std::future::pending()).await
    }

    /// [`Client::connect`] that gives up, in order, when `cancelled` completes.
    pub(crate) async fn connect_until(options: Options, cancelled: impl Future<Output = ()>) -> Result<Self, Error> {
        let token = options.read_token()?;
        let mut cancelled = pin!(cancelled);
        let attached = tokio::select! {
            attached = connect::attach(&options, token) => attached?,
            () = &mut cancelled => return Err(Error::Closed),
        };
        let memory = match options.transfer {
            Transfer::Inline => None,
            Transfer::Arena => {
                let socket = paths::mem_socket(&options.socket_dir);
                Some(Arc::new(Memory::connect(&socket, &attached.claimed)?))
            }
        };
        let ring = connect::attach_ring(&options, &attached.claimed).await;
        let session = Arc::new(Session::new(
            (options.socket_dir, options.rank),
            attached.outgoing,
            attached.claimed,
            (memory, ring),
            Recorder::new(Some(attached.client)),
            SessionOptions { operation_timeout: options.operation_timeout, mapped: options.mapped },
        ));
        let ((began, begins), (report_taken, taken)) = (oneshot::channel(), oneshot::channel());
        session.on_begin(began);
        let task = SessionTask::new(Arc::clone(&session), attached.incoming, report_taken)?;
        if session.ring().is_some() {
            session.send_on_stream(client_message::Message::RingReady(v1::RingReady {}))?;
        }
        let open = Open { session, task: Some(tokio::spawn(task.run())) };
        let begun = tokio::select! {
            begun = begin(&open.session, begins, taken, options.start_timeout) => begun,
            () = &mut cancelled => Err(Error::Closed),
        };
        let begun = match (begun, options.timeline) {
            (Ok(view), Some(timeline)) => open.session.start_timeline(timeline).await.map(|()| view),
            (begun, _) => begun,
        };
        match begun {
            Ok(view) => Ok(Self { open: ForkSafe::new(open), view }),
            Err(error) => {
                open.end().await;
                Err(error)
            }
        }
    }

    /// Dissolves a process set; operations on it that are pending fail. All ranks of the world call it. False, without asking
    /// anybody, for the set of all ranks and for one that there is not.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub async fn remove_process_set(&self, set: SetId) -> Result<bool, Error> {
        if set == SetId::WORLD || !self.open.get()?.session.knows_set(set)? {
            return Ok(false);
        }
        self.remove_process_set_async(set).await?.wait().await?;
        Ok(true)
    }

    /// [`Client::remove_process_set`] of a set that there is, which returns at once.
    ///
    /// # Errors
    /// Those of [`Client::allreduce_async`].
    pub async fn remove_process_set_async(&self, set: SetId) -> Result<Handle<()>, Error> {
        Ok(self.submit(&Operation::remove_process_set(set)).await?.typed())
    }

    /// Submits any operation. A slot of shared memory is leased and the bytes are copied into it; growing the arena, which
    /// takes about 1 ms a MiB, happens on a blocking thread. Operations without a name are numbered in the order in which
    /// these calls are first polled. When a limit refuses it here, it fails on the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub async fn submit(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        let session = &self.open.get()?.session;
        let draft = session.draft(operation)?;
        hand_over(session, draft, operation).await
    }

    /// Submits operations of one kind on one set that become ready together: none of them begins before all are there on all
    /// ranks. The label names all of them. When one is refused, none of them completes.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub async fn submit_group<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let session = &self.open.get()?.session;
        let drafts = session.draft_group(label.into(), operations)?;
        let mut handles = Vec::with_capacity(drafts.len());
        for (draft, operation) in drafts.into_iter().zip(operations) {
            handles.push(hand_over(session, draft, operation).await?);
        }
        Ok(handles)
    }

    /// Submits any operation from the calling thread, which blocks while the arena grows.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub fn submit_from(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        let session = &self.open.get()?.session;
        session.submit_from(session.draft(operation)?, operation.bytes())
    }

    /// [`Client::submit_group`] from the calling thread, which blocks while the arena grows.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub fn submit_group_from<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let session = &self.open.get()?.session;
        let drafts = session.draft_group(label.into(), operations)?.into_iter().zip(operations);
        drafts.map(|(draft, operation)| session.submit_from(draft, operation.bytes())).collect()
    }

    /// Shared memory for a tensor, to be filled and submitted from there: what lies in it is any. Growing the arena, which takes
    /// about 1 ms a MiB, happens on a blocking thread.
    ///
    /// # Errors
    /// [`Error::Argument`] for a shape that cannot be; [`Error::Limit`] where the arena has no room; or why the session is over.
    pub async fn buffer(&self, dtype: DType, shape: &[u64]) -> Result<Buffer, Error> {
        let (session, shape) = (Arc::clone(self.session()?), shape.to_vec());
        let made = tokio::task::spawn_blocking(move || session.buffer(dtype, &shape)).await;
        made.unwrap_or_else(|error| Err(Error::Thread { reason: error.to_string() }))
    }

    /// Whether there is a process set of this number, as far as this rank has heard.
    ///
    /// # Errors
    /// Why the session is over.
    pub fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        self.open.get()?.session.knows_set(set)
    }

    /// Records what happens to each tensor, in a file that Perfetto and chrome://tracing open, until [`Client::stop_timeline`] or
    /// the end of the session. A recording before it is completed. Rank 0 records; on other ranks this does nothing.
    ///
    /// # Errors
    /// [`Error::Timeline`] when the file cannot be written, or why the session is over.
    pub async fn start_timeline(&self, options: TimelineOptions) -> Result<(), Error> {
        self.open.get()?.session.start_timeline(options).await
    }

    /// Completes what is recorded; does nothing when nothing is.
    ///
    /// # Errors
    /// [`Error::Timeline`] when not all of it could be written.
    pub async fn stop_timeline(&self) -> Result<(), Error> {
        self.open.get()?.session.stop_timeline().await
    }

    /// The session, for what is done in its runtime.
    pub(crate) fn session(&self) -> Result<&Arc<Session>, Error> {
        Ok(&self.open.get()?.session)
    }

    /// Ends the session in order and waits until the sidecar has heard of it. Whoever still waits gets [`Error::Closed`].
    pub async fn close(self) {
        if let Ok(open) = self.open.into_inner() {
            open.end().await;
        }
    }

    /// Ends the session in order, as dropping the client does, but tells the other ranks why.
    pub fn part(&self, reason: &str) {
        if let Ok(open) = self.open.get() {
            open.session.close(reason);
        }
    }

    /// The session's task, for whoever keeps the runtime going until it ends.
    pub(crate) fn take_task(&mut self) -> Option<JoinHandle<()>> {
        self.open.get_mut().ok().and_then(|open| open.task.take())
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
        match self.open.get() {
            Ok(open) if open.session.ring().is_some() => "ring",
            _ => "grpc",
        }
    }

    /// What this worker has in shared memory now.
    #[must_use]
    pub fn shared_memory(&self) -> SharedMemory {
        let usage = self.open.get().ok().and_then(|open| open.session.memory.as_ref().map(|memory| memory.usage()));
        let ArenaUsage { mapped_bytes, in_use_bytes, slots, segments } = usage.unwrap_or_default();
        SharedMemory { mapped_bytes, in_use_bytes, slots, segments }
    }

    /// The calling thread submits something next and waits for it.
    pub(crate) fn expect_wait(&self) {
        if let Some(ring) = self.open.get().ok().and_then(|open| open.session.ring()) {
            ring.expect_leader();
        }
    }

    /// Hears what has come, for threads that do not wait.
    pub(crate) fn poll_ring(&self) {
        if let Ok(open) = self.open.get() {
            open.session.poll_ring();
        }
    }

    /// Why nothing can be submitted any more: the epoch's failure, the sidecar's end, or the client's own.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        match self.open.get() {
            Ok(open) => open.session.over(),
            Err(error) => Some(error.into()),
        }
    }

    /// The sidecar's messages for people since the last call, such as which rank is late.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.open.get().map(|open| open.session.take_notices()).unwrap_or_default()
    }
}

for_each_operation!(operations);
for_each_group!(groups);

/// Copies the input of an operation into shared memory, unless it lies there, and submits it.
async fn hand_over(session: &Arc<Session>, draft: Draft, operation: &Operation<'_>) -> Result<Handle, Error> {
    let bytes = operation.bytes();
    match lease(session, bytes).await {
        Ok(input) => {
            let output = lease_output(session, &draft).await;
            session.submit(draft, input.map_or(Input::Bytes(bytes), Input::Leased), output)
        }
        Err(error) => Err(draft.refused(error)),
    }
}

/// Where the bytes lie in shared memory, or a slot with them, where the arena has to grow for it.
async fn lease(session: &Session, bytes: &[u8]) -> Result<Option<InputPart>, Error> {
    let length = bytes.len() as u64;
    let Some(memory) = session.memory.as_ref().filter(|_| !bytes.is_empty()) else { return Ok(None) };
    if let Some(registered) = memory.registered_part(bytes) {
        return Ok(Some(registered));
    }
    if memory.try_lease(length)?.is_some() {
        return Ok(None);
    }
    let memory = Arc::clone(memory);
    let grown = tokio::task::spawn_blocking(move || memory.lease(length)).await;
    let mut slot = grown.unwrap_or_else(|error| Err(Error::Thread { reason: error.to_string() }))?;
    slot.write(bytes)?;
    Ok(Some(whole(slot)))
}

/// A slot for the result, if it may stay in shared memory; on a blocking thread where the arena has to grow for it.
async fn lease_output(session: &Session, draft: &Draft) -> Option<LeasedSlot> {
    let (memory, bytes) = session.mappable(draft)?;
    match memory.try_lease(bytes) {
        Ok(Some(slot)) => Some(slot),
        Ok(None) => {
            let memory = Arc::clone(memory);
            // Fails only with the runtime, and the session with it.
            tokio::task::spawn_blocking(move || memory.lease_result(bytes)).await.ok().flatten()
        }
        // What has no room is copied.
        Err(_) => None,
    }
}

/// A session that ends in order when dropped; in a forked child `ForkSafe` forgets it instead.
#[derive(Debug)]
struct Open {
    session: Arc<Session>,
    task: Option<JoinHandle<()>>,
}

impl Open {
    /// Ends the session in order and waits until the sidecar has heard of it.
    async fn end(mut self) {
        self.session.close(CLOSED);
        if let Some(task) = self.task.take() {
            // Fails only when the task was cancelled with its runtime.
            let _ = task.await;
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.session.close(CLOSED);
    }
}

async fn begin(
    session: &Session,
    begins: oneshot::Receiver<Result<EpochView, Error>>,
    taken: oneshot::Receiver<()>,
    waits: Duration,
) -> Result<EpochView, Error> {
    let begun = async {
        let view = begins.await;
        if let (Ok(Ok(_)), Some(_)) = (&view, session.ring()) {
            // Fails with the session, which the first call then tells.
            let _ = taken.await;
        }
        view
    };
    match timeout(waits, begun).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err(session.over().unwrap_or(Error::Closed)),
        Err(_) => {
            let missing = session.take_notices().pop().unwrap_or_else(|| {
                "other ranks have not attached; see whether all workers and sidecars of the job are running".to_owned()
            });
            Err(Error::Start { waited: waits, missing })
        }
    }
}

const CLOSED: &str = "the client was closed";
