//! A session: the state that a client's calls and its background task share, and that task.
//!
//! The task owns the incoming stream. It hands completions to their waiters, sends heartbeats, and when the stream or the
//! epoch ends it tells every waiter why, with the failure kept for those who come later.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use ronde_rpc::v1::client_message::Message as Say;
use ronde_rpc::v1::server_message::Message as Heard;
use ronde_rpc::{Claimed, Completion, EpochView, Place, Submission, v1};
use ronde_shm::ForkGuard;
use ronde_wire::{Collective, Detail, Failure, Rank, Request, RequestId, SetId};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};
use tonic::{Status, Streaming};

use crate::error::Error;
use crate::handle::{Arrived, Handle, sidecar_gone};
use crate::memory::{LeasedSlot, Memory};
use crate::operation::{Label, Operation};
use crate::promise::promise;
use crate::table::{Entry, Table};

/// What calls and the task share.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) fork_guard: ForkGuard,
    pub(crate) claimed: Claimed,
    /// `None` when tensors travel in messages.
    pub(crate) memory: Option<Arc<Memory>>,
    pub(crate) operation_timeout: Option<Duration>,
    directory: PathBuf,
    outgoing: mpsc::Sender<v1::ClientMessage>,
    me: Rank,
    table: Mutex<Table>,
    /// Why results in shared memory are no longer this session's: its stream has ended.
    released: OnceLock<Error>,
    notices: Mutex<VecDeque<String>>,
    closing: Notify,
}

/// An operation that has its name and is not submitted yet. Dropping it tells the other ranks that this one takes no part.
#[derive(Debug)]
pub(crate) struct Draft {
    session: Arc<Session>,
    /// `None` once it has been submitted or refused.
    what: Option<Request>,
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
    Leased(LeasedSlot),
    /// To be copied by the call.
    Bytes(&'a [u8]),
}

impl Session {
    pub(crate) fn new(
        (directory, me): (PathBuf, Rank),
        outgoing: mpsc::Sender<v1::ClientMessage>,
        claimed: Claimed,
        memory: Option<Arc<Memory>>,
        operation_timeout: Option<Duration>,
    ) -> Self {
        Self {
            fork_guard: ForkGuard::new(),
            claimed,
            memory,
            operation_timeout,
            directory,
            outgoing,
            me,
            table: Mutex::new(Table::new(me)),
            released: OnceLock::new(),
            notices: Mutex::default(),
            closing: Notify::new(),
        }
    }

    /// Checks an operation and gives it its name, which other ranks may wait for from here on.
    ///
    /// # Errors
    /// [`Error::Argument`], or why the session is over.
    pub(crate) fn draft(self: &Arc<Self>, operation: &Operation<'_>) -> Result<Draft, Error> {
        let what = self.open_table()?.names.request(operation)?;
        Ok(Draft { session: Arc::clone(self), what: Some(what) })
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
        let requests = self.open_table()?.names.group(label, operations)?;
        let draft = |what| Draft { session: Arc::clone(self), what: Some(what) };
        Ok(requests.into_iter().map(draft).collect())
    }

    /// Submits an operation. Copies the input; blocks only while the arena grows. When it is refused, the other ranks are
    /// told that this one does not take part.
    pub(crate) fn submit(self: &Arc<Self>, mut draft: Draft, input: Input<'_>) -> Result<Handle, Error> {
        let Some(what) = draft.what.as_ref() else { return Err(Error::Closed) };
        match self.hand_over(what, input) {
            Ok(handle) => {
                draft.what = None;
                Ok(handle)
            }
            Err(error) => Err(draft.refused(error)),
        }
    }

    fn hand_over(self: &Arc<Self>, what: &Request, input: Input<'_>) -> Result<Handle, Error> {
        self.fork_guard.check()?;
        self.lock_table().check_open(self.pending_max())?;
        let (place, input) = self.place(&what.collective, input)?;
        let (fulfil, promise) = promise();
        let entry =
            Entry { collective: what.collective.clone(), waiter: Some(fulfil), _input: input, parts: Vec::new() };
        let request = self.lock_table().insert(entry, self.pending_max())?;
        let message = Submission { request, what: what.clone(), place }.into_message();
        if let Err(error) = self.say(Say::Submit(message)) {
            self.lock_table().remove(request);
            return Err(error);
        }
        let (name, collective) = (what.name.clone(), what.collective.clone());
        Ok(Handle::new(Arc::clone(self), request, (name, collective), promise))
    }

    /// This rank takes no part in an operation that others may wait for.
    fn abstain(&self, what: Request, reason: &str) {
        if !self.fork_guard.is_child() {
            let (name, process_set, reason) = (what.name.into(), what.set.0, reason.to_owned());
            let group = what.group.map(v1::Group::from);
            self.say_or_end(Say::Abstain(v1::Abstain { name, process_set, reason, group }));
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

    fn open_table(&self) -> Result<MutexGuard<'_, Table>, Error> {
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
            self.say_or_end(Say::Withdraw(v1::Withdraw { request: request.0, reason: reason.to_owned() }));
        }
    }

    /// A result has been read.
    pub(crate) fn release(&self, request: RequestId) {
        if !self.fork_guard.is_child() {
            self.say_or_end(Say::Release(v1::Release { request: request.0 }));
        }
    }

    /// Ends the session in order; everybody who still waits gets [`Error::Closed`].
    pub(crate) fn close(&self, reason: &str) {
        if self.fork_guard.is_child() {
            return;
        }
        // First, as the farewell lets the sidecar lease the results' memory again.
        self.let_results_go(&Error::Closed);
        // Fails when the stream has ended, and then there is nobody to part from.
        let _ = self.say(Say::Goodbye(v1::Goodbye { reason: reason.to_owned() }));
        self.end(&Error::Closed);
        self.closing.notify_one();
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

    fn place(&self, collective: &Collective, input: Input<'_>) -> Result<(Place, Option<LeasedSlot>), Error> {
        if !collective.has_input(self.me) {
            // Empty bytes in the message say that the result is to come the same way.
            let place = if self.memory.is_some() { Place::None } else { Place::Inline(Bytes::new()) };
            return Ok((place, None));
        }
        let slot = match (input, &self.memory) {
            (Input::Leased(slot), _) => slot,
            (Input::Bytes(bytes), Some(memory)) => {
                let slot = memory.lease(bytes.len() as u64)?;
                slot.write(bytes)?;
                slot
            }
            (Input::Bytes(bytes), None) => return Ok((self.place_inline(bytes)?, None)),
        };
        let at = slot.slot();
        Ok((Place::Arena { segment: at.segment.0, offset: at.offset, bytes: at.len }, Some(slot)))
    }

    fn place_inline(&self, bytes: &[u8]) -> Result<Place, Error> {
        let limit = self.claimed.inline_bytes_max;
        if bytes.len() as u64 > limit {
            return Err(Error::Limit {
                reason: format!(
                    "a tensor of {} bytes is over inline_bytes_max = {limit}; use shared memory for large tensors",
                    bytes.len()
                ),
            });
        }
        Ok(Place::Inline(Bytes::copy_from_slice(bytes)))
    }

    fn pending_max(&self) -> usize {
        self.claimed.pending_max as usize
    }

    fn say(&self, message: Say) -> Result<(), Error> {
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
    fn say_or_end(&self, message: Say) {
        // Where it is the stream that has closed the task knows better words.
        if let Err(full @ Error::Limit { .. }) = self.say(message) {
            self.end(&full);
            self.closing.notify_one();
        }
    }

    /// Why the queue is closed; the task keeps its own words for it as the session's end, a moment later at most.
    fn stream_closed(&self) -> Error {
        Error::Failure(sidecar_gone(&self.directory, "the session's stream is closed"))
    }

    /// From now on the sidecar may use the memory of results for others. Not so when only the epoch ends. The first reason
    /// stays.
    fn let_results_go(&self, why: &Error) {
        let _ = self.released.set(why.clone());
        fence(Ordering::SeqCst);
    }

    /// Nothing can be submitted from now on, and every waiter is told why. The first reason stays.
    fn end(&self, why: &Error) {
        let entries = self.lock_table().end(why.clone());
        for waiter in entries.into_iter().filter_map(|entry| entry.waiter) {
            waiter.with(Err(why.clone()));
        }
    }

    /// A panic elsewhere leaves the table whole: each change is a single call.
    fn lock_table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_notices(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The background task of a session.
pub(crate) struct Listener {
    pub(crate) session: Arc<Session>,
    pub(crate) incoming: Streaming<v1::ServerMessage>,
    /// Told when the epoch begins, or why it does not.
    pub(crate) began: Option<oneshot::Sender<Result<EpochView, Error>>>,
}

impl Listener {
    /// Runs until the stream ends, or for a while after the session was closed.
    pub(crate) async fn run(mut self) {
        let session = Arc::clone(&self.session);
        let mut heartbeat = tokio::time::interval(Duration::from_millis(session.claimed.heartbeat_ms.into()));
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut closes_at: Option<Instant> = None;
        let mut silence = Silence::new(Duration::from_millis(session.claimed.peer_timeout_ms.into()));
        let why = loop {
            tokio::select! {
                biased;
                heard = self.incoming.message() => match heard {
                    Ok(Some(message)) => {
                        silence.broken();
                        if let Err(error) = self.hear(message) { break error }
                    }
                    Ok(None) => break self.gone("it ended the session"),
                    Err(status) => break self.gone(&describe(&status)),
                },
                _ = heartbeat.tick(), if closes_at.is_none() => {
                    if silence.is_too_long() {
                        let timeout = silence.timeout.as_secs_f64();
                        break self.gone(&format!("it has been silent for {timeout:.1} s, the peer timeout"));
                    }
                    // A full queue means that the sidecar does not read; it will not miss this one.
                    let _ = session.say(Say::Heartbeat(v1::Heartbeat {}));
                }
                () = session.closing.notified() => closes_at = Some(Instant::now() + CLOSE_TIMEOUT),
                () = sleep_until(closes_at) => break Error::Closed,
            }
        };
        self.session.let_results_go(&why);
        self.session.end(&why);
        self.tell_began(Err(self.session.over().unwrap_or(why)));
    }

    fn hear(&mut self, message: v1::ServerMessage) -> Result<(), Error> {
        match message.message {
            Some(Heard::Completed(message)) => return self.complete(message),
            Some(Heard::ResultPart(part)) => return self.add_part(&part),
            Some(Heard::Failed(message)) => {
                let failure = Failure::from(message.failure.unwrap_or_default());
                self.answer(RequestId(message.request), Err(failure.into()));
            }
            Some(Heard::EpochEnded(message)) => {
                let error = Error::Failure(Failure::from(message.failure.unwrap_or_default()));
                self.session.end(&error);
                self.tell_began(Err(error));
            }
            Some(Heard::EpochBegan(message)) => {
                let view = EpochView::parse(&message).map_err(|error| Error::protocol(&error))?;
                self.session.lock_table().names.begin(view.size);
                self.tell_began(Ok(view));
            }
            Some(Heard::Notice(notice)) => self.note(notice.text),
            // A second answer to the claim says nothing new; an empty message is one of a later version.
            Some(Heard::Claimed(_) | Heard::Alive(_)) | None => {}
        }
        Ok(())
    }

    fn complete(&self, message: v1::Completed) -> Result<(), Error> {
        let completion = Completion::parse(message).map_err(|error| Error::protocol(&error))?;
        let request = completion.request;
        let entry = {
            let mut table = self.session.lock_table();
            let entry = table.remove(request);
            if let Some(entry) = &entry {
                // Before the waiter hears of it and goes on with the next operation.
                learn(&mut table, &entry.collective, &completion.detail);
            }
            entry
        };
        let Some(entry) = entry else {
            // A result that came after its request ended is of no use, but must be given back.
            drop(Arrived::new(&self.session, completion, Vec::new()));
            return Ok(());
        };
        let arrived = Arrived::new(&self.session, completion, entry.parts);
        if let Some(waiter) = entry.waiter {
            waiter.with(Ok(arrived));
        }
        Ok(())
    }

    fn add_part(&self, part: &v1::ResultPart) -> Result<(), Error> {
        let mut table = self.session.lock_table();
        let Some(entry) = table.entry_mut(RequestId(part.request)) else { return Ok(()) };
        let limit = self.session.claimed.arena_bytes_max;
        if (entry.parts.len() + part.data.len()) as u64 > limit {
            return Err(Error::Protocol { reason: format!("a result in parts is over arena_bytes_max = {limit}") });
        }
        entry.parts.extend_from_slice(&part.data);
        Ok(())
    }

    fn answer(&self, request: RequestId, outcome: Result<Arrived, Error>) {
        let entry = self.session.lock_table().remove(request);
        if let Some(waiter) = entry.and_then(|entry| entry.waiter) {
            waiter.with(outcome);
        }
    }

    fn note(&self, text: String) {
        tracing::warn!(target: "ronde", "{text}");
        let mut notices = self.session.lock_notices();
        notices.truncate(NOTICES_MAX - 1);
        notices.push_back(text);
    }

    fn tell_began(&mut self, outcome: Result<EpochView, Error>) {
        if let Some(began) = self.began.take() {
            // Nobody listens when `connect` was given up.
            let _ = began.send(outcome);
        }
    }

    fn gone(&self, how: &str) -> Error {
        Error::Failure(sidecar_gone(&self.session.directory, how))
    }
}

/// Also when the task panics or its runtime is dropped, every waiter gets an answer.
impl Drop for Listener {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that does not exist there.
        if !self.session.fork_guard.is_child() {
            self.session.let_results_go(&Error::Closed);
            self.session.end(&Error::Closed);
        }
    }
}

/// For how long the sidecar has said nothing. Looked at with every heartbeat: when this process itself stood still, the
/// time between two looks tells, and the sidecar gets a fresh grace.
struct Silence {
    timeout: Duration,
    heard: Instant,
    looked: Instant,
}

impl Silence {
    fn new(timeout: Duration) -> Self {
        let now = Instant::now();
        Self { timeout, heard: now, looked: now }
    }

    fn broken(&mut self) {
        self.heard = Instant::now();
    }

    fn is_too_long(&mut self) -> bool {
        let now = Instant::now();
        if now - self.looked > OWN_PAUSE {
            self.heard = now;
        }
        self.looked = now;
        now - self.heard > self.timeout
    }
}

/// What a completed operation changes about sets and numbers.
fn learn(table: &mut Table, collective: &Collective, detail: &Detail) {
    match (collective, detail) {
        (Collective::AddSet { ranks }, Detail::Set(set)) => table.names.add_set(*set, ranks.clone()),
        // Without its number in the answer there was no such set to remove, or it is the one that stays.
        (Collective::RemoveSet { set }, Detail::Set(_)) if *set != SetId::WORLD => table.names.remove_set(*set),
        (Collective::Join, _) => table.names.all_joined(),
        _ => {}
    }
}

/// What a status tells a user, in one line.
pub(crate) fn describe(status: &Status) -> String {
    let cause = std::error::Error::source(status).map(|source| format!(" ({source})")).unwrap_or_default();
    format!("{}{cause}", status.message())
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Messages waiting to be sent: a submission and a release or withdrawal for every request that may be pending, and room for
/// heartbeats and the farewell.
pub(crate) const OUTGOING_MAX: usize = 2 * ronde_wire::limits::PENDING_PER_SESSION_MAX + 64;
/// Notices kept for the program; further ones replace the newest.
const NOTICES_MAX: usize = 64;
/// Two heartbeats that are further apart than this mean that this process stood still.
const OWN_PAUSE: Duration = Duration::from_secs(1);
/// How long to listen after the farewell.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use ronde_rpc::convert::SESSION_TOKEN_BYTES;

    use super::*;

    #[test]
    fn what_others_count_on_and_is_not_taken_ends_the_session() {
        let claimed = Claimed {
            session_token: [0; SESSION_TOKEN_BYTES],
            protocol: 1,
            heartbeat_ms: 1_000,
            peer_timeout_ms: 10_000,
            arena_bytes_max: 1 << 20,
            inline_bytes_max: 1 << 20,
            pending_max: 10,
        };
        let (outgoing, _unread) = mpsc::channel(2);
        let session = Arc::new(Session::new((PathBuf::new(), Rank(0)), outgoing, claimed, None, None));
        let draft = || session.draft(&Operation::barrier(None));
        let submitted = session.submit(draft().expect("open"), Input::Bytes(&[])).expect("room");
        drop(draft().expect("open"));
        assert!(session.over().is_none(), "there was room to abstain");
        let refused = session.submit(draft().expect("open"), Input::Bytes(&[])).expect_err("full");
        let over = session.over().expect("the other ranks cannot be told that this one takes no part");
        for error in [refused, over] {
            assert!(error.to_string().contains("2 messages wait for the sidecar, which does not read"), "{error}");
        }
        assert!(submitted.poll(), "it has failed with the session");
    }
}
