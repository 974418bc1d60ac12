//! [`Client`]: the asynchronous client.

use std::sync::Arc;

use ronde_rpc::EpochView;
use ronde_shm::{ForkSafe, LeasedSlot};
use ronde_wire::{DType, SetId};

use crate::buffer::{Buffer, SharedMemory};
use crate::device::OutputSlot;
use crate::error::Error;
use crate::handle::Handle;
use crate::in_flight::InFlight;
use crate::memory::{InputPart, whole};
use crate::methods::{
    async_groups, async_operations, async_set_removal, epoch_methods, for_each_group, for_each_operation,
};
use crate::open::OpenSession;
use crate::operation::{Label, Operation, ReduceOptions, Site};
use crate::options::Options;
use crate::outcome::{Exchanged, ProcessSet, Received};
use crate::session::{Draft, Input, Session};
use crate::tensor::{Tensor, TensorRef};
use crate::timeline::TimelineOptions;

/// A worker's session with its sidecar, in an epoch that has begun.
///
/// Calls take `&self` and may overlap. Dropping the client ends the session in order; [`Client::close`] also waits for it.
#[derive(Debug)]
pub struct Client {
    open: ForkSafe<OpenSession>,
    view: EpochView,
}

impl Client {
    /// Connects to the sidecar, claims the rank and waits until all ranks have attached.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Claim`], [`Error::Token`] when the sidecar cannot be reached or rejects this worker;
    /// [`Error::Start`] when not all ranks attach within the start timeout; [`Error::Failure`] when the job fails before it
    /// starts.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let (open, view) = OpenSession::connect(options, std::future::pending()).await?;
        Ok(Self { open: ForkSafe::new(open), view })
    }

    fn session(&self) -> Result<&Arc<Session>, Error> {
        Ok(&self.open.get()?.session)
    }

    /// Submits any operation. The call leases a slot of shared memory and copies the bytes into it. Growing the arena, which
    /// takes about 1 ms a MiB, happens on a blocking thread. Operations without a name are numbered in the order in which
    /// these calls are first polled. When a limit rejects the operation here, it fails on the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub async fn submit(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        let session = self.session()?;
        let draft = session.draft(operation)?;
        submit_draft(session, draft, operation).await.map(Handle::new)
    }

    /// Submits operations of one kind on one process set that become ready together: none of them begins before all are
    /// there on all ranks. The label names all of them. When one is rejected, none of them completes.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub async fn submit_group<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let session = self.session()?;
        let drafts = session.draft_group(label.into(), operations)?;
        let mut handles = Vec::with_capacity(drafts.len());
        for (draft, operation) in drafts.into_iter().zip(operations) {
            handles.push(Handle::new(submit_draft(session, draft, operation).await?));
        }
        Ok(handles)
    }

    /// Submits any operation from the calling thread, which blocks while the arena grows.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub fn submit_from(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        self.session()?.submit_from(operation).map(Handle::new)
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
        self.session()?.submit_group_from(label.into(), operations, Handle::new)
    }

    /// Allocates a tensor in shared memory. Fill it in place and submit it without a copy. Its contents are unspecified.
    /// Growing the arena, which takes about 1 ms a MiB, happens on a blocking thread.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid shape; [`Error::Limit`] when the arena has no room; or why the session is over.
    pub async fn buffer(&self, dtype: DType, shape: &[u64]) -> Result<Buffer, Error> {
        let (session, shape) = (Arc::clone(self.session()?), shape.to_vec());
        let made = tokio::task::spawn_blocking(move || session.buffer(dtype, &shape)).await;
        made.unwrap_or_else(|error| Err(Error::Thread { reason: error.to_string() }))
    }

    /// Whether this rank knows a process set of this number.
    ///
    /// # Errors
    /// Why the session is over.
    pub fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        self.session()?.knows_set(set)
    }

    /// Records what happens to each tensor, in a file that Perfetto and chrome://tracing open, until [`Client::stop_timeline`]
    /// or the end of the session. Completes an earlier recording first. Rank 0 records; on other ranks this does nothing.
    ///
    /// # Errors
    /// [`Error::Timeline`] when the file cannot be written, or why the session is over.
    pub async fn start_timeline(&self, options: TimelineOptions) -> Result<(), Error> {
        self.session()?.start_timeline(options).await
    }

    /// Completes the recording, if there is one.
    ///
    /// # Errors
    /// [`Error::Timeline`] when not all of it could be written.
    pub async fn stop_timeline(&self) -> Result<(), Error> {
        self.session()?.stop_timeline().await
    }

    /// Ends the session in order and waits until the sidecar has closed it. Every waiter gets [`Error::Closed`].
    pub async fn close(self) {
        if let Ok(open) = self.open.into_inner() {
            open.end().await;
        }
    }

    /// Ends the session in order, as dropping the client does, and sends the reason to the other ranks.
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

    /// What this worker has in shared memory now.
    #[must_use]
    pub fn shared_memory(&self) -> SharedMemory {
        self.session().map(|session| session.shared_memory()).unwrap_or_default()
    }

    /// Why nothing can be submitted any more: the epoch's failure, the sidecar's end, or the client's own.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        self.session().map_or_else(Some, |session| session.pending.over())
    }

    /// The sidecar's messages for people since the last call, such as which rank is late.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.session().map(|session| session.pending.take_notices()).unwrap_or_default()
    }

    /// The newest change of an elastic job's membership since the last call: the launcher adds or removes workers. End the
    /// epoch soon, by closing this client and connecting again.
    #[must_use]
    pub fn membership_change(&self) -> Option<crate::MembershipChange> {
        self.session().ok()?.pending.take_change()
    }
}

epoch_methods!();
async_set_removal!();
for_each_operation!(async_operations);
for_each_group!(async_groups);

/// Copies the input of an operation into shared memory, unless it is there already, and submits it.
async fn submit_draft(session: &Arc<Session>, draft: Draft, operation: &Operation<'_>) -> Result<InFlight, Error> {
    let bytes = operation.bytes();
    match lease_input(session, bytes).await {
        Ok(input) => {
            let output = lease_output(session, &draft).await;
            session.submit(draft, input.map_or(Input::Bytes(bytes), Input::Leased), output.map(OutputSlot::Arena))
        }
        Err(error) => Err(draft.reject(error)),
    }
}

/// The slot that the bytes are in, or a copy in a new slot if the arena has to grow for it. `None`: the submission copies the
/// bytes.
async fn lease_input(session: &Session, bytes: &[u8]) -> Result<Option<InputPart>, Error> {
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

/// A slot for the result, if it may stay in shared memory; on a blocking thread if the arena has to grow for it.
async fn lease_output(session: &Session, draft: &Draft) -> Option<LeasedSlot> {
    let (memory, bytes) = session.result_slot(draft)?;
    match memory.try_lease(bytes) {
        Ok(Some(slot)) => Some(slot),
        Ok(None) => {
            let memory = Arc::clone(memory);
            // Fails only with the runtime, and the session with it.
            tokio::task::spawn_blocking(move || memory.lease_result(bytes)).await.ok().flatten()
        }
        // Without room the result is copied.
        Err(_) => None,
    }
}
