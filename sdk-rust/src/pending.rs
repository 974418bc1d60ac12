//! [`Pending`]: the requests of a session that the sidecar has not answered, and all session state that does not depend on
//! how messages travel.
//!
//! The native session and the WebAssembly session share this type. Each adds its transport, the resources `R` that it keeps
//! for a request, and the kind of result `T` that it delivers.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{Claimed, Completion, EpochView, v1};
use ronde_wire::{Collective, Failure, Rank, Record, Request, RequestId, SetId};
use tokio::sync::oneshot;

use crate::error::Error;
use crate::naming::Names;
use crate::promise::{Fulfil, Promise, promise};

/// Pending requests, operation names, process sets, the begin and end of the epoch, and notices.
#[derive(Debug)]
pub(crate) struct Pending<R, T> {
    me: Rank,
    pending_max: usize,
    parts_limit: PartsLimit,
    table: Mutex<Table<R, T>>,
    first_record: FirstRecord,
    notices: Mutex<VecDeque<String>>,
    /// The newest change of the membership that the program has not taken.
    #[cfg(not(target_arch = "wasm32"))]
    change: Mutex<Option<MembershipChange>>,
    #[cfg(not(target_arch = "wasm32"))]
    view: OnceLock<EpochView>,
    /// Receives the view when the epoch begins, or why it does not.
    begun: Mutex<Option<oneshot::Sender<BeginOutcome>>>,
}

/// The membership of an elastic job is about to change: the launcher adds or removes workers. End the epoch soon, by
/// closing the client and connecting again; the new client has its rank of the next membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MembershipChange {
    /// The number of the next membership.
    pub membership: u64,
    /// How many workers it adds.
    pub added: u32,
    /// How many workers it removes.
    pub removed: u32,
}

/// The view of an epoch that has begun, or why none has.
pub(crate) type BeginOutcome = Result<EpochView, Error>;

/// The bound of a result that arrives in parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartsLimit {
    pub(crate) bytes: u64,
    /// The setting that bounds it.
    pub(crate) setting: &'static str,
}

/// Names and pending requests, which change together under one lock.
#[derive(Debug)]
pub(crate) struct Table<R, T> {
    /// Names and process sets.
    pub(crate) names: Names,
    entries: HashMap<RequestId, Entry<R, T>>,
    over: Option<Error>,
    last: u64,
}

/// A pending request.
#[derive(Debug)]
pub(crate) struct Entry<R, T> {
    set: SetId,
    collective: Collective,
    /// `None` once the waiter has withdrawn.
    pub(crate) waiter: Option<Fulfil<T>>,
    /// The parts of the result that have arrived.
    pub(crate) parts: Vec<u8>,
    stage: Stage,
    /// What the session keeps until the sidecar answers.
    pub(crate) resources: R,
}

/// How far a request is on its way to the sidecar.
#[derive(Debug)]
enum Stage {
    /// Sent.
    Sent,
    /// Being sent.
    #[cfg(not(target_arch = "wasm32"))]
    Sending(Request),
    /// Not sent yet: its input, or that of an earlier request, is on its way from a device.
    #[cfg(not(target_arch = "wasm32"))]
    Held(Request),
    /// Performed in two levels, by other requests: the sidecar does not know it.
    #[cfg(not(target_arch = "wasm32"))]
    Apart(Request),
}

impl Stage {
    fn is_apart(&self) -> bool {
        #[cfg(not(target_arch = "wasm32"))]
        return matches!(self, Self::Apart(_));
        #[cfg(target_arch = "wasm32")]
        false
    }
}

/// What is left to do for the session after a message of the sidecar.
#[derive(Debug)]
pub(crate) enum Event<R, T> {
    /// Nothing.
    Handled,
    /// Deliver a result. There is no entry when the request ended earlier.
    Completed(Completion, Option<Entry<R, T>>),
    /// Deliver the failure of one request.
    Failed(Failure, Entry<R, T>),
    /// End the session: the epoch is over, and the sidecar's lanes use none of its memory any more.
    EpochEnded(Failure),
    /// End the session, while lanes may still use its memory.
    SessionEnded(Failure),
}

impl<R, T> Pending<R, T> {
    /// A session without requests, before its epoch has begun.
    pub(crate) fn new(me: Rank, claimed: &Claimed, parts_limit: PartsLimit) -> Self {
        Self {
            me,
            pending_max: claimed.pending_max as usize,
            parts_limit,
            table: Mutex::new(Table { names: Names::new(me), entries: HashMap::new(), over: None, last: 0 }),
            first_record: FirstRecord::default(),
            notices: Mutex::default(),
            #[cfg(not(target_arch = "wasm32"))]
            change: Mutex::default(),
            #[cfg(not(target_arch = "wasm32"))]
            view: OnceLock::new(),
            begun: Mutex::default(),
        }
    }

    /// This rank.
    pub(crate) fn me(&self) -> Rank {
        self.me
    }

    /// The table, while the session is open.
    ///
    /// # Errors
    /// Why the session is over.
    pub(crate) fn open(&self) -> Result<MutexGuard<'_, Table<R, T>>, Error> {
        let table = lock(&self.table);
        let over = table.over.clone();
        over.map_or(Ok(table), Err)
    }

    /// Checks that one more request may be pending, before the input is copied to shared memory.
    ///
    /// # Errors
    /// Those of [`Pending::insert`].
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn check_room(&self) -> Result<(), Error> {
        lock(&self.table).check_room(self.pending_max)
    }

    /// Adds a request. Returns its number and the promise of its result.
    ///
    /// # Errors
    /// Why the session is over, or [`Error::Limit`] when `pending_max` requests are pending.
    pub(crate) fn insert(&self, request: &Request, resources: R) -> Result<(RequestId, Promise<T>), Error> {
        self.insert_at(request, Stage::Sent, resources)
    }

    fn insert_at(&self, request: &Request, stage: Stage, resources: R) -> Result<(RequestId, Promise<T>), Error> {
        let (fulfil, promise) = promise();
        let (set, collective) = (request.set, request.collective.clone());
        let (waiter, parts) = (Some(fulfil), Vec::new());
        let entry = Entry { set, collective, waiter, parts, stage, resources };
        let mut table = lock(&self.table);
        table.check_room(self.pending_max)?;
        table.last += 1;
        let request = RequestId(table.last);
        table.entries.insert(request, entry);
        Ok((request, promise))
    }

    /// Removes a request that could not be sent.
    pub(crate) fn remove(&self, request: RequestId) {
        // Dropped after the lock is released: this wakes the waiter.
        let removed = lock(&self.table).entries.remove(&request);
        drop(removed);
    }

    /// Removes the waiter of a request. Returns the message to send, if there is one: not for a request that has been
    /// answered, nor for a join, which cannot be withdrawn. A held request is removed, and its message is an abstention.
    pub(crate) fn withdraw(&self, request: RequestId, reason: &str) -> Option<client_message::Message> {
        // Declared first, so that it is dropped after the lock is released: this wakes the waiter.
        let _waiter;
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&request)?;
        _waiter = entry.waiter.take();
        if entry.collective == Collective::Join {
            return None;
        }
        match &entry.stage {
            Stage::Sent => {}
            // `end_send` withdraws it.
            #[cfg(not(target_arch = "wasm32"))]
            Stage::Sending(_) => return None,
            #[cfg(not(target_arch = "wasm32"))]
            Stage::Held(what) => {
                let message = abstention(what.clone(), reason);
                let removed = table.entries.remove(&request);
                drop(table);
                drop(removed);
                return Some(message);
            }
            // Who performs it notices, and notifies the other ranks if they can still be.
            #[cfg(not(target_arch = "wasm32"))]
            Stage::Apart(_) => {
                let removed = table.entries.remove(&request);
                drop(table);
                drop(removed);
                return None;
            }
        }
        drop(table);
        Some(withdrawal(request, reason))
    }

    /// Handles the part of a message that is the same for all sessions.
    ///
    /// # Errors
    /// [`Error::Protocol`] for a message that ends the session.
    pub(crate) fn receive(&self, message: v1::ServerMessage) -> Result<Event<R, T>, Error> {
        use server_message::Message;
        match message.message {
            Some(Message::Completed(message)) => return self.complete(message),
            Some(Message::ResultPart(part)) => self.add_part(&part)?,
            Some(Message::Failed(message)) => {
                let failure = self.with_record(message.failure);
                let entry = lock(&self.table).entries.remove(&RequestId(message.request));
                return Ok(entry.map_or(Event::Handled, |entry| Event::Failed(failure, entry)));
            }
            Some(Message::EpochEnded(message)) => {
                let failure = self.with_record(message.failure);
                return Ok(if message.epoch == 0 { Event::SessionEnded(failure) } else { Event::EpochEnded(failure) });
            }
            Some(Message::EpochBegan(message)) => {
                let view = EpochView::parse(&message).map_err(|error| Error::protocol(&error))?;
                lock(&self.table).names.begin(view.size);
                #[cfg(not(target_arch = "wasm32"))]
                let _ = self.view.set(view);
                self.report_begin(Ok(view));
            }
            Some(Message::Notice(notice)) => self.note(notice.text),
            #[cfg(not(target_arch = "wasm32"))]
            Some(Message::MembershipChange(change)) => self.note_change(change),
            #[cfg(target_arch = "wasm32")]
            Some(Message::MembershipChange(_)) => {}
            // Sessions handle RingTaken themselves. A second Claimed adds nothing. `None` is a message of a later version.
            Some(Message::Claimed(_) | Message::Alive(_) | Message::RingTaken(_)) | None => {}
        }
        Ok(Event::Handled)
    }

    fn complete(&self, message: v1::Completed) -> Result<Event<R, T>, Error> {
        let completion = Completion::parse(message).map_err(|error| Error::protocol(&error))?;
        let mut table = lock(&self.table);
        let entry = table.entries.remove(&completion.request);
        if let Some(entry) = &entry {
            // Before the waiter is woken and submits its next operation.
            table.names.apply_completion(entry.set, &entry.collective, &completion.detail);
        }
        drop(table);
        Ok(Event::Completed(completion, entry))
    }

    fn add_part(&self, part: &v1::ResultPart) -> Result<(), Error> {
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get_mut(&RequestId(part.request)) else { return Ok(()) };
        let PartsLimit { bytes: limit, setting } = self.parts_limit;
        if (entry.parts.len() + part.data.len()) as u64 > limit {
            return Err(Error::Protocol { reason: format!("a result in parts is over {setting} = {limit}") });
        }
        entry.parts.extend_from_slice(&part.data);
        Ok(())
    }

    fn note(&self, text: String) {
        // The Python package takes notices by themselves, and all other warnings from its subscriber.
        tracing::warn!(target: "ronde::notice", "{text}");
        let mut notices = lock(&self.notices);
        notices.truncate(NOTICES_MAX - 1);
        notices.push_back(text);
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn note_change(&self, change: v1::MembershipChange) {
        let v1::MembershipChange { membership, added, removed } = change;
        *lock(&self.change) = Some(MembershipChange { membership, added, removed });
    }

    /// The newest change of the membership since the last call. Elastic jobs have no workers over gRPC-Web.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn take_change(&self) -> Option<MembershipChange> {
        lock(&self.change).take()
    }

    /// The sidecar's notices since the last call.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        lock(&self.notices).drain(..).collect()
    }

    /// The failure with the record of the rank that failed, which the sidecar sends only with the first failure.
    fn with_record(&self, message: Option<v1::Failure>) -> Failure {
        self.first_record.add_to(Failure::from(message.unwrap_or_default()))
    }

    /// Ends the session: every waiter gets `why`, and no request is accepted any more. The first reason stays. `retire` gets
    /// the resources of each request before its waiter is woken.
    ///
    /// After an orderly shutdown, requests that are performed apart from the sidecar stay: who performs them completes or
    /// fails them.
    pub(crate) fn end(&self, why: &Error, mut retire: impl FnMut(R)) {
        let (entries, first) = {
            let mut table = lock(&self.table);
            let first = table.over.get_or_insert_with(|| why.clone()).clone();
            let ended = table.entries.extract_if(|_, entry| !(why.is_shutdown() && entry.stage.is_apart()));
            (ended.collect::<Vec<_>>(), first)
        };
        for (_, Entry { waiter, resources, .. }) in entries {
            retire(resources);
            if let Some(waiter) = waiter {
                waiter.with(Err(first.clone()));
            }
        }
        self.report_begin(Err(first));
    }

    /// Why the session is over, if it is.
    pub(crate) fn over(&self) -> Option<Error> {
        lock(&self.table).over.clone()
    }

    /// Registers for the begin of the epoch.
    pub(crate) fn on_begin(&self) -> oneshot::Receiver<BeginOutcome> {
        let (sender, receiver) = oneshot::channel();
        *lock(&self.begun) = Some(sender);
        receiver
    }

    fn report_begin(&self, outcome: BeginOutcome) {
        if let Some(begun) = lock(&self.begun).take() {
            // The receiver is gone when `connect` was cancelled.
            let _ = begun.send(outcome);
        }
    }

    /// The outcome of a wait for the begin of the epoch; `None` when it lasted as long as `waited`.
    pub(crate) fn begin_outcome(
        &self,
        received: Option<Result<BeginOutcome, oneshot::error::RecvError>>,
        waited: Duration,
    ) -> BeginOutcome {
        match received {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(self.over().unwrap_or(Error::Closed)),
            None => {
                let missing = self.take_notices().pop().unwrap_or_else(|| {
                    "other ranks have not attached; check that all workers and sidecars of the job are running"
                        .to_owned()
                });
                Err(Error::Start { waited, missing })
            }
        }
    }
}

/// Requests that are inserted before they can be sent, because an input is on its way from a device.
#[cfg(not(target_arch = "wasm32"))]
impl<R, T> Pending<R, T> {
    /// [`Pending::insert`] for a held request.
    ///
    /// # Errors
    /// Those of [`Pending::insert`].
    pub(crate) fn insert_held(&self, request: &Request, resources: R) -> Result<(RequestId, Promise<T>), Error> {
        self.insert_at(request, Stage::Held(request.clone()), resources)
    }

    /// Lets a held request be performed apart from the sidecar, or takes it back. Returns whether it still has a waiter.
    pub(crate) fn set_apart(&self, request: RequestId, is_apart: bool) -> bool {
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get_mut(&request) else { return false };
        if let Stage::Held(what) | Stage::Apart(what) = &entry.stage {
            let what = what.clone();
            entry.stage = if is_apart { Stage::Apart(what) } else { Stage::Held(what) };
        }
        true
    }

    /// The message that withdraws a sent request whose waiter stays: the sidecar's answer is the result if the operation was
    /// ordered before. `None` for a request that has been answered.
    pub(crate) fn withdrawal_of(&self, request: RequestId, reason: &str) -> Option<client_message::Message> {
        let table = lock(&self.table);
        table.entries.contains_key(&request).then(|| withdrawal(request, reason))
    }

    /// Takes a request that is not sent out of its group, whose members have become ready together.
    pub(crate) fn leave_group(&self, request: RequestId) {
        let mut table = lock(&self.table);
        let stage = table.entries.get_mut(&request).map(|entry| &mut entry.stage);
        if let Some(Stage::Held(what) | Stage::Apart(what)) = stage {
            what.group = None;
        }
    }

    /// Whether a request still has a waiter.
    pub(crate) fn is_pending(&self, request: RequestId) -> bool {
        lock(&self.table).entries.contains_key(&request)
    }

    /// Delivers the outcome of a request that was performed apart. Returns its resources, unless it was withdrawn or the
    /// session is over.
    pub(crate) fn complete_apart(&self, request: RequestId, outcome: Result<T, Error>) -> Option<R> {
        // Dropped after the lock is released.
        let removed = lock(&self.table).entries.remove(&request);
        let Entry { waiter, resources, .. } = removed?;
        if let Some(waiter) = waiter {
            waiter.with(outcome);
        }
        Some(resources)
    }

    /// The epoch, once it has begun.
    pub(crate) fn view(&self) -> Option<EpochView> {
        self.view.get().copied()
    }

    /// Begins to send a held request; `add` adds what the sidecar will use. Returns `None` when the request was withdrawn or
    /// the session is over.
    pub(crate) fn begin_send(&self, request: RequestId, add: impl FnOnce(&mut R)) -> Option<Request> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&request)?;
        let Stage::Held(what) = &entry.stage else { return None };
        let what = what.clone();
        entry.stage = Stage::Sending(what.clone());
        add(&mut entry.resources);
        Some(what)
    }

    /// The request has been sent. Returns the message that withdraws it, if its waiter has gone meanwhile.
    pub(crate) fn end_send(&self, request: RequestId) -> Option<client_message::Message> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&request)?;
        entry.stage = Stage::Sent;
        let is_withdrawn = entry.waiter.is_none() && entry.collective != Collective::Join;
        is_withdrawn.then(|| withdrawal(request, WITHDRAWN_EARLY))
    }

    /// Removes a request that is not sent. Its waiter gets the error. Returns the request, of which the other ranks have to be
    /// notified, and its resources; `None` when it was withdrawn or the session is over.
    pub(crate) fn fail_held(&self, request: RequestId, error: &Error) -> Option<(Request, R)> {
        let removed = lock(&self.table).entries.remove(&request);
        let Entry { waiter, resources, stage, .. } = removed?;
        if let Some(waiter) = waiter {
            waiter.with(Err(error.clone()));
        }
        match stage {
            Stage::Held(what) | Stage::Sending(what) | Stage::Apart(what) => Some((what, resources)),
            Stage::Sent => None,
        }
    }
}

impl<R, T> Table<R, T> {
    fn check_room(&self, pending_max: usize) -> Result<(), Error> {
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        if self.entries.len() >= pending_max {
            return Err(Error::Limit {
                reason: format!(
                    "{pending_max} requests are pending, the most that a session may have; wait for some first"
                ),
            });
        }
        Ok(())
    }
}

fn withdrawal(request: RequestId, reason: &str) -> client_message::Message {
    client_message::Message::Withdraw(v1::Withdraw { request: request.0, reason: reason.to_owned() })
}

/// The message that this rank takes no part in an operation that other ranks may wait for.
pub(crate) fn abstention(request: Request, reason: &str) -> client_message::Message {
    let (name, process_set, group) = (request.name.into(), request.set.0, request.group.map(v1::Group::from));
    client_message::Message::Abstain(v1::Abstain { name, process_set, reason: reason.to_owned(), group })
}

/// The record of the rank that failed first. The sidecar sends it only with the first failure.
#[derive(Debug, Default)]
struct FirstRecord(OnceLock<Arc<Record>>);

impl FirstRecord {
    /// Keeps the record of a failure, or adds the kept record to a failure that needs it.
    fn add_to(&self, mut failure: Failure) -> Failure {
        if let Some(record) = &failure.record {
            // An epoch ends once in a session, so a record that is there already belongs to the same failure.
            let _ = self.0.set(Arc::clone(record));
        } else if failure.cause.ends_epoch() {
            failure.record = self.0.get().cloned().filter(|record| failure.rank == Some(record.rank));
        }
        failure
    }
}

/// Ignores poisoning: a panic elsewhere leaves these values whole, because each change is a single call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a request is withdrawn that lost its waiter while it was being sent.
#[cfg(not(target_arch = "wasm32"))]
const WITHDRAWN_EARLY: &str = "its handle was dropped, or its operation timeout passed, while it was being submitted";
/// Notices kept for the program; a further one replaces the newest.
const NOTICES_MAX: usize = 64;
