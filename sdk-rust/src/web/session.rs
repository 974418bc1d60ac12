//! A session: the state that a client's calls and its tasks share, on one thread.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{Claimed, Completion, EpochView, Place, Submission, v1};
use ronde_wire::{Collective, Failure, Rank, Request, RequestId, SetId};
use tokio::sync::{Notify, mpsc, oneshot};

use super::handle::{Answer, Handle, ResultData};
use crate::error::{Error, sidecar_gone};
use crate::inline;
use crate::operation::{Label, Operation};
use crate::record::FirstRecord;
use crate::table::Table;

/// What calls and tasks share.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) me: Rank,
    pub(super) url: String,
    pub(super) claimed: Claimed,
    pub(super) operation_timeout: Option<Duration>,
    table: RefCell<Table<Entry>>,
    /// What waits to be said; `None` when nothing is any more.
    outgoing: RefCell<Option<mpsc::Sender<v1::ClientMessage>>>,
    began: RefCell<Option<oneshot::Sender<Result<EpochView, Error>>>>,
    notices: RefCell<VecDeque<String>>,
    record: FirstRecord,
    /// Heartbeats since the sidecar has said anything.
    unanswered: Cell<u32>,
    /// Told when nothing is heard any more.
    pub(super) over: Notify,
}

/// A request that is pending.
#[derive(Debug)]
struct Entry {
    collective: Collective,
    /// `None` once it has gone.
    waiter: Option<oneshot::Sender<Result<ResultData, Error>>>,
    /// The result, as far as it has come.
    parts: Vec<u8>,
}

impl Session {
    /// A session, and what it says.
    pub(super) fn new(
        (url, me): (String, Rank),
        claimed: Claimed,
        operation_timeout: Option<Duration>,
        began: oneshot::Sender<Result<EpochView, Error>>,
    ) -> (Rc<Self>, mpsc::Receiver<v1::ClientMessage>) {
        // A submission and a withdrawal for each request, and room for heartbeats and the farewell.
        let (outgoing, queue) = mpsc::channel(2 * claimed.pending_max as usize + 64);
        let session = Self {
            me,
            url,
            claimed,
            operation_timeout,
            table: RefCell::new(Table::new(me)),
            outgoing: RefCell::new(Some(outgoing)),
            began: RefCell::new(Some(began)),
            notices: RefCell::default(),
            record: FirstRecord::default(),
            unanswered: Cell::new(0),
            over: Notify::new(),
        };
        (Rc::new(session), queue)
    }

    /// Submits an operation. When it is refused here once it has its name, the other ranks are told that this one takes no
    /// part.
    pub(super) fn submit(self: &Rc<Self>, operation: &Operation<'_>) -> Result<Handle, Error> {
        let what = self.open_table()?.names.request(operation)?;
        self.hand_over(what, operation)
    }

    /// Submits operations that become ready together.
    pub(super) fn submit_group(
        self: &Rc<Self>,
        label: Label<'_>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let requests = self.open_table()?.names.group(label, operations)?;
        let mut rest = requests.into_iter().zip(operations);
        let mut handles = Vec::with_capacity(operations.len());
        for (what, operation) in rest.by_ref() {
            match self.hand_over(what, operation) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    rest.for_each(|(what, _)| self.abstain(what, "its call was given up"));
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    fn hand_over(self: &Rc<Self>, what: Request, operation: &Operation<'_>) -> Result<Handle, Error> {
        let refused = match self.submission(&what, operation) {
            Ok((request, message, answer)) => match self.send(client_message::Message::Submit(message)) {
                Ok(()) => return Ok(Handle::new(Rc::clone(self), request, (what.name, what.collective), answer)),
                Err(error) => {
                    self.table.borrow_mut().remove(request);
                    error
                }
            },
            Err(error) => error,
        };
        self.abstain(what, &refused.to_string());
        Err(refused)
    }

    fn submission(&self, what: &Request, operation: &Operation<'_>) -> Result<(RequestId, v1::Submit, Answer), Error> {
        // Empty bytes in the message say that the result is to come the same way.
        let bytes = if what.collective.has_input(self.me) { operation.bytes() } else { &[] };
        let place = inline::place(bytes, self.claimed.inline_bytes_max)?;
        let (waiter, answer) = oneshot::channel();
        let entry = Entry { collective: what.collective.clone(), waiter: Some(waiter), parts: Vec::new() };
        let request = self.table.borrow_mut().insert(entry, self.claimed.pending_max as usize)?;
        let (plugin, site) = (operation.plugin.clone(), operation.site.clone());
        let message = Submission { request, what: what.clone(), plugin, place, output: None, site }.into_message();
        Ok((request, message, answer))
    }

    /// This rank takes no part in an operation that others may wait for.
    fn abstain(&self, what: Request, reason: &str) {
        let (name, process_set, group) = (what.name.into(), what.set.0, what.group.map(v1::Group::from));
        self.send_or_end(client_message::Message::Abstain(v1::Abstain {
            name,
            process_set,
            reason: reason.to_owned(),
            group,
        }));
    }

    /// The waiter of a request has gone. Does nothing when it has been answered, nor for a join, which cannot be taken back.
    pub(super) fn withdraw(&self, request: RequestId, reason: &str) {
        let leave = |entry: &mut Entry| (entry.waiter.take(), entry.collective == Collective::Join);
        let left = self.table.borrow_mut().entry_mut(request).map(leave);
        if let Some((_, false)) = left {
            self.send_or_end(client_message::Message::Withdraw(v1::Withdraw {
                request: request.0,
                reason: reason.to_owned(),
            }));
        }
    }

    /// A sign of life, and a look at the sidecar's.
    pub(super) fn heartbeat(&self) {
        let (unanswered, every) = (self.unanswered.get() + 1, u64::from(self.claimed.heartbeat_ms));
        if u64::from(unanswered) * every > u64::from(self.claimed.peer_timeout_ms) + every {
            let seconds = f64::from(self.claimed.peer_timeout_ms) / 1_000.0;
            self.end(&self.gone(&format!("it has been silent for {seconds:.1} s, the peer timeout")));
            return;
        }
        self.unanswered.set(unanswered);
        // A full queue means that the sidecar does not read; it will not miss this one.
        let _ = self.send(client_message::Message::Heartbeat(v1::Heartbeat {}));
    }

    /// Ends the session in order; everybody who still waits gets [`Error::Closed`].
    pub(super) fn close(&self, reason: &str) {
        // Fails when the session has ended, and then there is nobody to part from.
        let _ = self.send(client_message::Message::Goodbye(v1::Goodbye { reason: reason.to_owned() }));
        self.finish(&Error::Closed);
    }

    /// Nothing is said or heard any more, and every waiter is told why. The first reason stays.
    pub(super) fn end(&self, why: &Error) {
        self.finish(why);
        self.over.notify_one();
    }

    /// Nothing is said from now on, but what was said before still goes out.
    fn finish(&self, why: &Error) {
        drop(self.outgoing.borrow_mut().take());
        self.fail(why);
    }

    /// Nothing can be submitted any more, and every waiter is told why.
    fn fail(&self, why: &Error) {
        let entries = self.table.borrow_mut().end(why.clone());
        for waiter in entries.into_iter().filter_map(|entry| entry.waiter) {
            // Whoever has gone needs no answer, here and below.
            let _ = waiter.send(Err(why.clone()));
        }
        self.report_begin(Err(self.why_over().unwrap_or_else(|| why.clone())));
    }

    /// Whether nothing is said any more.
    pub(super) fn is_closed(&self) -> bool {
        self.outgoing.borrow().is_none()
    }

    /// Why nothing can be submitted any more, if so.
    pub(super) fn why_over(&self) -> Option<Error> {
        self.table.borrow().over().cloned()
    }

    /// Whether there is such a set, as far as this rank has heard.
    pub(super) fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        Ok(self.open_table()?.names.knows(set))
    }

    /// Messages of the sidecar for people that nobody has seen yet.
    pub(super) fn take_notices(&self) -> Vec<String> {
        self.notices.borrow_mut().drain(..).collect()
    }

    /// The end of a session whose sidecar is not there any more.
    pub(super) fn gone(&self, how: &str) -> Error {
        Error::Failure(sidecar_gone(&self.url, how))
    }

    // === What the sidecar says ===

    /// Hears one message.
    ///
    /// # Errors
    /// [`Error::Protocol`] for one that ends the session.
    pub(super) fn receive(&self, message: v1::ServerMessage) -> Result<(), Error> {
        self.unanswered.set(0);
        match message.message {
            Some(server_message::Message::Completed(message)) => self.complete(message)?,
            Some(server_message::Message::ResultPart(part)) => self.add_part(&part)?,
            Some(server_message::Message::Failed(message)) => {
                let failure = self.recorded(message.failure);
                let entry = self.table.borrow_mut().remove(RequestId(message.request));
                if let Some(waiter) = entry.and_then(|entry| entry.waiter) {
                    let _ = waiter.send(Err(failure.into()));
                }
            }
            Some(server_message::Message::EpochEnded(message)) => {
                self.fail(&Error::Failure(self.recorded(message.failure)))
            }
            Some(server_message::Message::EpochBegan(message)) => {
                let view = EpochView::parse(&message).map_err(|error| Error::protocol(&error))?;
                self.table.borrow_mut().names.begin(view.size);
                self.report_begin(Ok(view));
            }
            Some(server_message::Message::Notice(notice)) => {
                tracing::warn!(target: "ronde", "{}", notice.text);
                let mut notices = self.notices.borrow_mut();
                notices.truncate(NOTICES_MAX - 1);
                notices.push_back(notice.text);
            }
            // A second answer to the claim says nothing new; a ring there is not; an empty message is a later version's.
            Some(
                server_message::Message::Claimed(_)
                | server_message::Message::Alive(_)
                | server_message::Message::RingTaken(_),
            )
            | None => {}
        }
        Ok(())
    }

    fn complete(&self, message: v1::Completed) -> Result<(), Error> {
        let completion = Completion::parse(message).map_err(|error| Error::protocol(&error))?;
        let entry = {
            let mut table = self.table.borrow_mut();
            let entry = table.remove(completion.request);
            if let Some(entry) = &entry {
                // Before the waiter hears of it and goes on with the next operation.
                table.names.learn(&entry.collective, &completion.detail);
            }
            entry
        };
        if completion.result != Place::None || completion.in_output {
            let reason = format!("the result of {} lies in memory that this session does not have", completion.request);
            return Err(Error::Protocol { reason });
        }
        // One that nobody waits for any more is of no use.
        if let Some(Entry { waiter: Some(waiter), parts, .. }) = entry {
            let _ = waiter.send(Ok(ResultData { completion, bytes: parts }));
        }
        Ok(())
    }

    fn add_part(&self, part: &v1::ResultPart) -> Result<(), Error> {
        let mut table = self.table.borrow_mut();
        let Some(entry) = table.entry_mut(RequestId(part.request)) else { return Ok(()) };
        let limit = self.claimed.inline_bytes_max;
        if (entry.parts.len() + part.data.len()) as u64 > limit {
            return Err(Error::Protocol { reason: format!("a result in parts is over inline_bytes_max = {limit}") });
        }
        entry.parts.extend_from_slice(&part.data);
        Ok(())
    }

    fn recorded(&self, message: Option<v1::Failure>) -> Failure {
        self.record.with(Failure::from(message.unwrap_or_default()))
    }

    fn report_begin(&self, outcome: Result<EpochView, Error>) {
        if let Some(began) = self.began.borrow_mut().take() {
            // Nobody listens when `connect` was given up.
            let _ = began.send(outcome);
        }
    }

    // === What is said ===

    fn send(&self, message: client_message::Message) -> Result<(), Error> {
        use mpsc::error::TrySendError;
        let outgoing = self.outgoing.borrow();
        let Some(outgoing) = &*outgoing else { return Err(self.why_over().unwrap_or(Error::Closed)) };
        outgoing.try_send(v1::ClientMessage { message: Some(message) }).map_err(|error| match error {
            TrySendError::Full(_) => Error::Limit {
                reason: format!(
                    "{} messages wait for the sidecar, which does not read; see whether it is alive",
                    outgoing.max_capacity()
                ),
            },
            TrySendError::Closed(_) => self.gone("nothing can be said to it"),
        })
    }

    /// Says what must not be lost, as other ranks would wait for ever: when the sidecar does not take it, the session ends.
    fn send_or_end(&self, message: client_message::Message) {
        if let Err(full @ Error::Limit { .. }) = self.send(message) {
            self.end(&full);
        }
    }

    fn open_table(&self) -> Result<RefMut<'_, Table<Entry>>, Error> {
        let table = self.table.borrow_mut();
        let over = table.over().cloned();
        over.map_or(Ok(table), Err)
    }
}

/// Notices kept for the program; further ones replace the newest.
const NOTICES_MAX: usize = 64;
