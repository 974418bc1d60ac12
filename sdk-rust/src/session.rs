//! A session: the state that a client's calls and its background task share.
//!
//! What calls say goes over the ring where there is one, and else on the stream; what the sidecar says comes in
//! [`hearing`](crate::hearing), from the task or from a thread that waits.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use ronde_rpc::v1::client_message;
use ronde_rpc::{Claimed, EpochView, OutputPlace, Place, Submission, v1};
use ronde_shm::{ForkGuard, LeasedSlot, Slot, SlotHold};
use ronde_wire::{Collective, DType, Failure, PluginCall, Rank, Request, RequestId, SetId};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::buffer::{self, Buffer};
use crate::completions::{Completions, NotifyFlag};
use crate::error::{Error, sidecar_gone};
use crate::handle::{Handle, ResultData};
use crate::inline;
use crate::memory::{InputPart, Memory};
use crate::operation::{Label, Operation};
use crate::promise::{Promise, promise};
use crate::receiving::Entry;
use crate::record::FirstRecord;
use crate::ring::{Flush, Ring, spin_time};
use crate::table::Table;
use crate::timeline::{Recorder, TimelineOptions};

/// What calls and the task share.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) fork_guard: ForkGuard,
    pub(crate) claimed: Claimed,
    /// `None` when tensors travel in messages.
    pub(crate) memory: Option<Arc<Memory>>,
    pub(crate) operation_timeout: Option<Duration>,
    /// Whether results that may stay in shared memory do.
    mapped: bool,
    pub(crate) directory: PathBuf,
    outgoing: mpsc::Sender<v1::ClientMessage>,
    /// `None` when all messages travel on the stream.
    ring: Option<Ring>,
    me: Rank,
    table: Mutex<Table<Entry>>,
    /// Where results were wanted when the session ended: the sidecar may still write there, so nobody gets them again.
    retired: Mutex<Vec<LeasedSlot>>,
    /// Why results in shared memory are no longer this session's: its stream has ended.
    released: OnceLock<Error>,
    notices: Mutex<VecDeque<String>>,
    /// Counts answers that no thread waits for.
    pub(crate) completions: Completions,
    /// Told when the epoch begins, or why it does not.
    began: Mutex<Option<oneshot::Sender<Result<EpochView, Error>>>>,
    /// What was told of the rank that failed first.
    record: FirstRecord,
    pub(crate) closing: Notify,
    pub(crate) recorder: Recorder,
}

/// An operation that has its name and is not submitted yet. Dropping it tells the other ranks that this one takes no part.
#[derive(Debug)]
pub(crate) struct Draft {
    session: Arc<Session>,
    /// `None` once it has been submitted or refused.
    what: Option<Request>,
    /// Whether its completion is counted when nobody waits for it.
    notify: bool,
    /// The plugin that it asks for.
    plugin: Option<PluginCall>,
    /// Where it was asked for.
    site: Option<String>,
    /// The bytes of its result, where it may stay in shared memory.
    result_bytes: Option<u64>,
}

/// How a session treats its operations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SessionOptions {
    /// After how long a waiter gives up.
    pub(crate) operation_timeout: Option<Duration>,
    /// Whether results that may stay in shared memory do.
    pub(crate) mapped: bool,
}

impl Draft {
    /// It is not submitted, because of `error`.
    pub(crate) fn refused(mut self, error: Error) -> Error {
        if let Some(what) = self.what.take() {
            self.session.abstain(what, &error.to_string());
        }
        error
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(what) = self.what.take() {
            self.session.abstain(what, "its call was given up");
        }
    }
}

/// An input on its way.
pub(crate) enum Input<'a> {
    /// Already in shared memory.
    Leased(InputPart),
    /// To be copied by the call.
    Bytes(&'a [u8]),
}

impl Session {
    pub(crate) fn new(
        (directory, me): (PathBuf, Rank),
        outgoing: mpsc::Sender<v1::ClientMessage>,
        claimed: Claimed,
        (memory, ring): (Option<Arc<Memory>>, Option<Ring>),
        recorder: Recorder,
        options: SessionOptions,
    ) -> Self {
        Self {
            fork_guard: ForkGuard::new(),
            claimed,
            memory,
            operation_timeout: options.operation_timeout,
            mapped: options.mapped,
            directory,
            outgoing,
            ring,
            me,
            table: Mutex::new(Table::new(me)),
            retired: Mutex::default(),
            released: OnceLock::new(),
            record: FirstRecord::default(),
            notices: Mutex::default(),
            completions: Completions::default(),
            began: Mutex::default(),
            closing: Notify::new(),
            recorder,
        }
    }

    /// Checks an operation and gives it its name, which other ranks may wait for from here on.
    ///
    /// # Errors
    /// [`Error::Argument`], or why the session is over.
    pub(crate) fn draft(self: &Arc<Self>, operation: &Operation<'_>) -> Result<Draft, Error> {
        let mut table = self.open_table()?;
        let what = table.names.request(operation)?;
        Ok(self.drafted(&table, what, operation))
    }

    fn drafted(self: &Arc<Self>, table: &Table<Entry>, what: Request, operation: &Operation<'_>) -> Draft {
        let result_bytes = if operation.mapped { table.names.result_bytes(&what) } else { None };
        let (plugin, site) = (operation.plugin.clone(), operation.site.clone());
        let notify = operation.notify;
        Draft { session: Arc::clone(self), what: Some(what), notify, plugin, site, result_bytes }
    }

    /// [`Session::draft`] for operations that become ready together.
    ///
    /// # Errors
    /// Those of [`Session::draft`]; then none of them has a name.
    pub(crate) fn draft_group(
        self: &Arc<Self>,
        label: Label<'_>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Draft>, Error> {
        let mut table = self.open_table()?;
        let requests = table.names.group(label, operations)?.into_iter().zip(operations);
        Ok(requests.map(|(what, operation)| self.drafted(&table, what, operation)).collect())
    }

    /// [`Session::submit`] of these bytes; blocks while the arena grows.
    pub(crate) fn submit_from(self: &Arc<Self>, draft: Draft, bytes: &[u8]) -> Result<Handle, Error> {
        // The input first: it cannot do without a slot.
        let input = match self.memory.as_ref().filter(|_| !bytes.is_empty() && self.mappable(&draft).is_some()) {
            Some(memory) => match memory.input(bytes) {
                Ok(part) => Input::Leased(part),
                Err(error) => return Err(draft.refused(error)),
            },
            None => Input::Bytes(bytes),
        };
        let output = self.mappable(&draft).and_then(|(memory, bytes)| memory.lease_result(bytes));
        self.submit(draft, input, output)
    }

    /// Memory for a tensor, to be submitted from there; blocks while the arena grows.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub(crate) fn buffer(&self, dtype: DType, shape: &[u64]) -> Result<Buffer, Error> {
        drop(self.open_table()?);
        let bytes = buffer::bytes_of(dtype, shape)?;
        match &self.memory {
            Some(memory) if bytes > 0 => Ok(Buffer::in_slot(dtype, shape.to_vec(), memory.lease_registered(bytes)?)),
            _ => Buffer::zeros(dtype, shape, bytes),
        }
    }

    /// The memory in which the result of a drafted operation may stay, and its bytes.
    pub(crate) fn mappable(&self, draft: &Draft) -> Option<(&Arc<Memory>, u64)> {
        let (memory, bytes) = (self.memory.as_ref().filter(|_| self.mapped)?, draft.result_bytes?);
        memory.has_room_for_result(bytes).then_some((memory, bytes))
    }

    /// Submits an operation. Copies the input; blocks only while the arena grows. When it is refused, the other ranks are
    /// told that this one does not take part.
    pub(crate) fn submit(
        self: &Arc<Self>,
        mut draft: Draft,
        input: Input<'_>,
        output: Option<LeasedSlot>,
    ) -> Result<Handle, Error> {
        let Some(what) = draft.what.as_ref() else { return Err(Error::Closed) };
        let (named, notify_flag) = ((draft.plugin.take(), draft.site.take()), NotifyFlag::new(draft.notify));
        match self.hand_over((what, notify_flag), named, input, output) {
            Ok(handle) => {
                draft.what = None;
                Ok(handle)
            }
            Err(error) => Err(draft.refused(error)),
        }
    }

    fn hand_over(
        self: &Arc<Self>,
        (what, notify_flag): (&Request, NotifyFlag),
        (plugin, site): (Option<PluginCall>, Option<String>),
        input: Input<'_>,
        output: Option<LeasedSlot>,
    ) -> Result<Handle, Error> {
        self.fork_guard.check()?;
        self.lock_table().check_open(self.pending_max())?;
        let (place, input) = self.place(&what.collective, input)?;
        let (fulfil, promise) = promise();
        let wanted = output.as_ref().map(|output| place_of(output.slot()));
        let (collective, parts) = (what.collective.clone(), Vec::new());
        let entry = Entry { collective, waiter: Some(fulfil), notify_flag: notify_flag.clone(), input, output, parts };
        let request = self.lock_table().insert(entry, self.pending_max())?;
        let spin = spin_time(&place);
        let message = Submission { request, what: what.clone(), plugin, place, output: wanted, site }.into_message();
        if let Err(error) = self.send(client_message::Message::Submit(message), Flush::Now) {
            self.lock_table().remove(request);
            return Err(error);
        }
        let (name, collective) = (what.name.clone(), what.collective.clone());
        Ok(Handle::new(Arc::clone(self), request, (name, collective), (promise, spin, notify_flag)))
    }

    /// This rank takes no part in an operation that others may wait for.
    fn abstain(&self, what: Request, reason: &str) {
        if !self.fork_guard.is_child() {
            let (name, process_set, reason) = (what.name.into(), what.set.0, reason.to_owned());
            let group = what.group.map(v1::Group::from);
            self.send_or_end(client_message::Message::Abstain(v1::Abstain { name, process_set, reason, group }));
        }
    }

    /// Whether there is such a set, as far as this rank has heard.
    pub(crate) fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        Ok(self.open_table()?.names.knows(set))
    }

    /// The rank.
    pub(crate) fn me(&self) -> Rank {
        self.me
    }

    fn open_table(&self) -> Result<MutexGuard<'_, Table<Entry>>, Error> {
        self.fork_guard.check()?;
        let table = self.lock_table();
        let over = table.over().cloned();
        over.map_or(Ok(table), Err)
    }

    /// The waiter of a request has gone. Does nothing when it has been answered, nor for a join, which cannot be taken back.
    pub(crate) fn withdraw(&self, request: RequestId, reason: &str) {
        if self.fork_guard.is_child() {
            return;
        }
        let leave = |entry: &mut Entry| (entry.waiter.take(), entry.collective == Collective::Join);
        let left = self.lock_table().entry_mut(request).map(leave);
        if let Some((_, false)) = left {
            self.send_or_end(client_message::Message::Withdraw(v1::Withdraw {
                request: request.0,
                reason: reason.to_owned(),
            }));
        }
    }

    /// A result has been read. The sidecar need not know before it gets something to do.
    pub(crate) fn release(&self, request: RequestId) {
        if !self.fork_guard.is_child() {
            let sent = self.send(client_message::Message::Release(v1::Release { request: request.0 }), Flush::Later);
            self.end_if_full(sent);
        }
    }

    /// Waits at most `slice` for an answer; the thread that waits reads for the others, too.
    pub(crate) fn wait(
        self: &Arc<Self>,
        promise: &Promise<ResultData>,
        (slice, spin): (Duration, Duration),
    ) -> Option<Result<ResultData, Error>> {
        match &self.ring {
            Some(ring) => ring.wait(promise, (slice, spin), &|message| self.receive(message)),
            None => promise.wait_timeout(slice),
        }
    }

    /// Whether an answer is there. Looks at the ring, if nobody else does.
    pub(crate) fn poll(self: &Arc<Self>, promise: &Promise<ResultData>) -> bool {
        if !promise.is_ready() {
            self.poll_ring();
        }
        promise.is_ready()
    }

    /// The ring, if there is one.
    pub(crate) fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }

    /// Who is to be told when the epoch begins, or why it does not.
    pub(crate) fn on_begin(&self, began: oneshot::Sender<Result<EpochView, Error>>) {
        *self.lock_began() = Some(began);
    }

    /// Ends the session in order; everybody who still waits gets [`Error::Closed`].
    pub(crate) fn close(&self, reason: &str) {
        if self.fork_guard.is_child() {
            return;
        }
        self.recorder.close();
        // First, as the farewell lets the sidecar lease the results' memory again.
        self.release_results(&Error::Closed);
        // Fails when the stream has ended, and then there is nobody to part from.
        let _ = self.send_on_stream(client_message::Message::Goodbye(v1::Goodbye { reason: reason.to_owned() }));
        self.end(&Error::Closed);
        self.closing.notify_one();
    }

    /// Records what happens from now on, if this is rank 0. To be called in the session's runtime.
    ///
    /// # Errors
    /// [`Error::Timeline`], or why the session is over.
    pub(crate) async fn start_timeline(&self, options: TimelineOptions) -> Result<(), Error> {
        drop(self.open_table()?);
        if self.me != FIRST {
            return Ok(());
        }
        self.recorder.start(self.claimed.session_token, options).await
    }

    /// Completes what was recorded, if anything was.
    ///
    /// # Errors
    /// [`Error::Timeline`].
    pub(crate) async fn stop_timeline(&self) -> Result<(), Error> {
        self.fork_guard.check()?;
        self.recorder.stop().await
    }

    /// Reads the ring, if there is one and nobody else does.
    pub(crate) fn poll_ring(self: &Arc<Self>) {
        if let Some(ring) = &self.ring {
            ring.poll(&|message| self.receive(message));
        }
    }

    /// Why nothing can be submitted any more, if so.
    pub(crate) fn over(&self) -> Option<Error> {
        self.lock_table().over().cloned()
    }

    /// Messages of the sidecar for people that nobody has seen yet.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        self.lock_notices().drain(..).collect()
    }

    /// The memory in which the sidecar says a result lies.
    pub(crate) fn memory_of_result(&self, segment: u32) -> Result<&Arc<Memory>, Error> {
        self.memory.as_ref().ok_or_else(|| Error::Protocol {
            reason: format!("a result lies in segment {segment}, but this session has no shared memory"),
        })
    }

    /// Whether what has just been copied from shared memory was still the session's result. To be asked after the copy.
    pub(crate) fn check_results_held(&self) -> Result<(), Error> {
        // The copy's reads come before the look at the flag.
        fence(Ordering::SeqCst);
        self.released.get().map_or(Ok(()), |why| Err(why.clone()))
    }

    fn place(&self, collective: &Collective, input: Input<'_>) -> Result<(Place, Option<SlotHold>), Error> {
        if !collective.has_input(self.me) {
            // Empty bytes in the message say that the result is to come the same way.
            let place = if self.memory.is_some() { Place::None } else { Place::Inline(Bytes::new()) };
            return Ok((place, None));
        }
        let (hold, part) = match (input, &self.memory) {
            (Input::Leased(part), _) => part,
            (Input::Bytes(bytes), Some(memory)) => memory.input(bytes)?,
            (Input::Bytes(bytes), None) => {
                return Ok((inline::place(bytes, self.claimed.inline_bytes_max)?, None));
            }
        };
        Ok((place_of(part).into(), Some(hold)))
    }

    fn pending_max(&self) -> usize {
        self.claimed.pending_max as usize
    }

    /// Says something over the ring if there is one, else on the stream.
    fn send(&self, message: client_message::Message, flush: Flush) -> Result<(), Error> {
        let Some(ring) = &self.ring else { return self.send_on_stream(message) };
        if ring.is_over() {
            return Err(self.stream_closed());
        }
        ring.send(&v1::ClientMessage { message: Some(message) }, flush)
    }

    /// Says on the stream what belongs there whether there is a ring or not: what tells of life and its end.
    pub(crate) fn send_on_stream(&self, message: client_message::Message) -> Result<(), Error> {
        use mpsc::error::TrySendError;
        self.outgoing.try_send(v1::ClientMessage { message: Some(message) }).map_err(|error| match error {
            TrySendError::Full(_) => Error::Limit {
                reason: format!(
                    "{} messages wait for the sidecar, which does not read; see whether it is alive",
                    self.outgoing.max_capacity()
                ),
            },
            TrySendError::Closed(_) => self.stream_closed(),
        })
    }

    /// Says what must not be lost, as other ranks would wait for ever: when the sidecar does not take it, the session ends.
    fn send_or_end(&self, message: client_message::Message) {
        let sent = self.send(message, Flush::Now);
        self.end_if_full(sent);
    }

    fn end_if_full(&self, sent: Result<(), Error>) {
        // Where it is the stream or the ring that is over the task knows better words.
        if let Err(full @ Error::Limit { .. }) = sent {
            self.end(&full);
            self.closing.notify_one();
        }
    }

    /// Why the queue is closed; the task keeps its own words for it as the session's end, a moment later at most.
    fn stream_closed(&self) -> Error {
        Error::Failure(sidecar_gone(self.directory.display(), "the session's stream is closed"))
    }

    /// From now on the sidecar may use the memory of results for others. Not so when only the epoch ends. The first reason
    /// stays.
    pub(crate) fn release_results(&self, why: &Error) {
        let _ = self.released.set(why.clone());
        fence(Ordering::SeqCst);
    }

    /// The failure with the record of the rank that failed, which comes with the first failure of its kind only.
    pub(crate) fn recorded(&self, message: Option<v1::Failure>) -> Failure {
        self.record.with(Failure::from(message.unwrap_or_default()))
    }

    /// Nothing can be submitted from now on, and every waiter is told why. The first reason stays.
    pub(crate) fn end(&self, why: &Error) {
        let entries = self.lock_table().end(why.clone());
        for Entry { waiter, output, .. } in entries {
            self.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(output);
            if let Some(waiter) = waiter {
                waiter.with(Err(why.clone()));
            }
        }
        self.completions.add();
        if let Some(ring) = &self.ring {
            ring.kick();
        }
    }

    /// A panic elsewhere leaves the table whole: each change is a single call.
    pub(crate) fn lock_table(&self) -> MutexGuard<'_, Table<Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lock_began(&self) -> MutexGuard<'_, Option<oneshot::Sender<Result<EpochView, Error>>>> {
        self.began.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lock_notices(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place_of(slot: Slot) -> OutputPlace {
    OutputPlace { segment: slot.segment.0, offset: slot.offset, bytes: slot.len }
}

/// Who records timelines.
const FIRST: Rank = Rank(0);
/// Messages waiting to be sent: a submission and a release or withdrawal for every request that may be pending, and room for
/// heartbeats and the farewell.
pub(crate) const OUTGOING_MAX: usize = 2 * ronde_wire::limits::PENDING_PER_SESSION_MAX + 64;
#[cfg(test)]
mod tests {
    use ronde_rpc::convert::SESSION_TOKEN_BYTES;

    use super::*;

    #[test]
    fn a_full_queue_ends_the_session_when_other_ranks_depend_on_the_message() {
        let claimed = Claimed {
            session_token: [0; SESSION_TOKEN_BYTES],
            protocol: 1,
            heartbeat_ms: 1_000,
            peer_timeout_ms: 10_000,
            arena_bytes_max: 1 << 20,
            inline_bytes_max: 1 << 20,
            pending_max: 10,
            ring_bytes: 0,
        };
        let (outgoing, _unread) = mpsc::channel(2);
        let session = Arc::new(Session::new(
            (PathBuf::new(), Rank(0)),
            outgoing,
            claimed,
            (None, None),
            Recorder::new(None),
            SessionOptions::default(),
        ));
        let draft = || session.draft(&Operation::barrier(None));
        let submitted = session.submit_from(draft().expect("open"), &[]).expect("room");
        drop(draft().expect("open"));
        assert!(session.over().is_none(), "there was room to abstain");
        let refused = session.submit_from(draft().expect("open"), &[]).expect_err("full");
        let over = session.over().expect("the other ranks cannot be told that this one takes no part");
        for error in [refused, over] {
            assert!(error.to_string().contains("2 messages wait for the sidecar, which does not read"), "{error}");
        }
        assert!(submitted.poll(), "it has failed with the session");
    }
}
