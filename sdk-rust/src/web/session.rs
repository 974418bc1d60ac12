//! [`Session`]: the state that a client's calls and its tasks share, on one thread.
//!
//! Requests are kept in [`Pending`], as in the native session. Messages wait in a queue for the task that sends them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{Claimed, Completion, Place, Submission, v1};
use ronde_wire::{Rank, Request, RequestId};
use tokio::sync::{Notify, mpsc};

use super::handle::{Handle, WebResult};
use crate::error::{Error, queue_full, sidecar_gone};
use crate::inline;
use crate::operation::{Label, Operation};
use crate::pending::{Entry, Event, PartsLimit, Pending, abstention};
use crate::promise::Promise;

/// A worker's session with its sidecar over gRPC-Web.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) url: String,
    pub(super) claimed: Claimed,
    pub(super) operation_timeout: Option<Duration>,
    pub(super) pending: Pending<(), WebResult>,
    /// `None` when nothing is sent any more.
    outgoing: RefCell<Option<mpsc::Sender<v1::ClientMessage>>>,
    /// Heartbeats since the last message of the sidecar.
    unanswered: Cell<u32>,
    /// Notified when no message is received any more.
    pub(super) over: Notify,
}

impl Session {
    /// A session, and the queue of its messages.
    pub(super) fn new(
        (url, me): (String, Rank),
        claimed: Claimed,
        operation_timeout: Option<Duration>,
    ) -> (Rc<Self>, mpsc::Receiver<v1::ClientMessage>) {
        // A submission and a withdrawal for each request, and room for heartbeats and the Goodbye.
        let (outgoing, queue) = mpsc::channel(2 * claimed.pending_max as usize + 64);
        let parts_limit = PartsLimit { bytes: claimed.inline_bytes_max, setting: "inline_bytes_max" };
        let session = Self {
            url,
            pending: Pending::new(me, &claimed, parts_limit),
            claimed,
            operation_timeout,
            outgoing: RefCell::new(Some(outgoing)),
            unanswered: Cell::new(0),
            over: Notify::new(),
        };
        (Rc::new(session), queue)
    }

    /// Submits an operation. When it is rejected here after it has a name, the other ranks learn that this rank takes no
    /// part.
    pub(super) fn submit(self: &Rc<Self>, operation: &Operation<'_>) -> Result<Handle, Error> {
        let request = self.pending.open()?.names.request(operation)?;
        self.send_submission(request, operation)
    }

    /// Submits operations that become ready together.
    pub(super) fn submit_group(
        self: &Rc<Self>,
        label: Label<'_>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        let requests = self.pending.open()?.names.group(label, operations)?;
        let mut rest = requests.into_iter().zip(operations);
        let mut handles = Vec::with_capacity(operations.len());
        for (request, operation) in rest.by_ref() {
            match self.send_submission(request, operation) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    rest.for_each(|(request, _)| self.send_or_end(abstention(request, "its call was cancelled")));
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    fn send_submission(self: &Rc<Self>, request: Request, operation: &Operation<'_>) -> Result<Handle, Error> {
        let error = match self.submission(&request, operation) {
            Ok((id, message, promise)) => match self.send(Message::Submit(message)) {
                Ok(()) => return Ok(Handle::new(Rc::clone(self), id, (request.name, request.collective), promise)),
                Err(error) => {
                    self.pending.remove(id);
                    error
                }
            },
            Err(error) => error,
        };
        self.send_or_end(abstention(request, &error.to_string()));
        Err(error)
    }

    fn submission(
        &self,
        what: &Request,
        operation: &Operation<'_>,
    ) -> Result<(RequestId, v1::Submit, Promise<WebResult>), Error> {
        // Empty bytes in the message request the result inside messages, too.
        let bytes = if what.collective.has_input(self.pending.me()) { operation.bytes() } else { &[] };
        let place = inline::place(bytes, self.claimed.inline_bytes_max)?;
        let (request, promise) = self.pending.insert(what, ())?;
        let (plugin, site) = (operation.plugin.clone(), operation.site.clone());
        let message = Submission { request, what: what.clone(), plugin, place, output: None, site }.into_message();
        Ok((request, message, promise))
    }

    /// Withdraws a request whose waiter has gone. Does nothing when it has been answered, nor for a join.
    pub(super) fn withdraw(&self, request: RequestId, reason: &str) {
        if let Some(withdrawal) = self.pending.withdraw(request, reason) {
            self.send_or_end(withdrawal);
        }
    }

    /// Sends a heartbeat, unless the sidecar has been silent for the peer timeout.
    pub(super) fn heartbeat(&self) {
        let (unanswered, interval_ms) = (self.unanswered.get() + 1, u64::from(self.claimed.heartbeat_ms));
        if u64::from(unanswered) * interval_ms > u64::from(self.claimed.peer_timeout_ms) + interval_ms {
            let seconds = f64::from(self.claimed.peer_timeout_ms) / 1_000.0;
            self.end(&self.gone(&format!("it has been silent for {seconds:.1} s, the peer timeout")));
            return;
        }
        self.unanswered.set(unanswered);
        // A full queue means that the sidecar does not read. It will not miss this heartbeat.
        let _ = self.send(Message::Heartbeat(v1::Heartbeat {}));
    }

    /// Closes the session in order. Every waiter gets [`Error::Closed`].
    pub(super) fn close(&self, reason: &str) {
        // Fails when the session has ended. Then there is no one to notify.
        let _ = self.send(Message::Goodbye(v1::Goodbye { reason: reason.to_owned() }));
        self.stop_sending(&Error::Closed);
    }

    /// Ends the session: nothing is sent or received any more, and every waiter gets `why`. The first reason stays.
    pub(super) fn end(&self, why: &Error) {
        self.stop_sending(why);
        self.over.notify_one();
    }

    /// Closes the queue. Messages in it are still sent.
    fn stop_sending(&self, why: &Error) {
        drop(self.outgoing.borrow_mut().take());
        self.pending.end(why, drop);
    }

    /// Whether nothing is sent any more.
    pub(super) fn is_closed(&self) -> bool {
        self.outgoing.borrow().is_none()
    }

    /// The error when the sidecar is gone.
    pub(super) fn gone(&self, how: &str) -> Error {
        Error::Failure(sidecar_gone(&self.url, how))
    }

    /// Handles a message of the sidecar.
    ///
    /// # Errors
    /// [`Error::Protocol`] for a message that ends the session.
    pub(super) fn receive(&self, message: v1::ServerMessage) -> Result<(), Error> {
        self.unanswered.set(0);
        match self.pending.receive(message)? {
            Event::Handled => {}
            Event::Completed(completion, entry) => return Self::complete(completion, entry),
            Event::Failed(failure, entry) => {
                if let Some(waiter) = entry.waiter {
                    waiter.with(Err(failure.into()));
                }
            }
            Event::EpochEnded(failure) | Event::SessionEnded(failure) => {
                self.pending.end(&Error::Failure(failure), drop);
            }
        }
        Ok(())
    }

    fn complete(completion: Completion, entry: Option<Entry<(), WebResult>>) -> Result<(), Error> {
        if completion.result != Place::None || completion.in_output {
            let reason = format!("the result of {} is in memory that this session does not have", completion.request);
            return Err(Error::Protocol { reason });
        }
        if let Some(Entry { waiter: Some(waiter), parts, .. }) = entry {
            waiter.with(Ok(WebResult { completion, bytes: parts }));
        }
        Ok(())
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        use mpsc::error::TrySendError;
        let outgoing = self.outgoing.borrow();
        let Some(outgoing) = &*outgoing else { return Err(self.pending.over().unwrap_or(Error::Closed)) };
        outgoing.try_send(v1::ClientMessage { message: Some(message) }).map_err(|error| match error {
            TrySendError::Full(_) => queue_full(outgoing.max_capacity()),
            TrySendError::Closed(_) => self.gone("messages can no longer be sent to it"),
        })
    }

    /// Sends a message that other ranks depend on: when the queue is full, the session ends.
    fn send_or_end(&self, message: Message) {
        if let Err(full @ Error::Limit { .. }) = self.send(message) {
            self.end(&full);
        }
    }
}
