//! Open sessions over gRPC-Web: calls of Say find their session by its token; the session ends with the answer to Open.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_wire::{Rank, limits};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use crate::session::outgoing::OutgoingStream;

/// The open sessions by token.
#[derive(Clone, Default)]
pub(super) struct Sessions {
    open: Arc<Mutex<HashMap<Bytes, Arc<Session>>>>,
}

/// The channel for a worker's messages, call by call.
pub(super) type Inbox = mpsc::Sender<Result<Vec<v1::ClientMessage>, Status>>;

/// The messages of a channel, one by one.
pub(super) struct Messages {
    calls: mpsc::Receiver<Result<Vec<v1::ClientMessage>, Status>>,
    /// The rest of the last call.
    rest: std::vec::IntoIter<v1::ClientMessage>,
}

/// Creates the channel of a session.
pub(super) fn inbox() -> (Inbox, Messages) {
    let (sender, calls) = mpsc::channel(INBOX_CALLS_MAX);
    (sender, Messages { calls, rest: Vec::new().into_iter() })
}

impl Stream for Messages {
    type Item = Result<v1::ClientMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(message) = self.rest.next() {
                return Poll::Ready(Some(Ok(message)));
            }
            match ready!(self.calls.poll_recv(context)) {
                Some(Ok(messages)) => self.rest = messages.into_iter(),
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                None => return Poll::Ready(None),
            }
        }
    }
}

/// An open session.
pub(super) struct Session {
    rank: Rank,
    inbox: Inbox,
    /// The number of the last call that was received.
    received: tokio::sync::Mutex<u64>,
}

impl Sessions {
    /// Returns the session of a token, for the worker of its rank.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn of(&self, token: &Bytes, caller: Rank) -> Result<Arc<Session>, Status> {
        let session = self.lock().get(token).cloned();
        // Another rank's session does not exist for this one.
        session.filter(|session| session.rank == caller).ok_or_else(|| {
            Status::not_found("no session of this token and rank is open here; it has ended: Open another one")
        })
    }

    /// Returns whether a rank has an open session.
    pub(super) fn has(&self, rank: Rank) -> bool {
        self.lock().values().any(|session| session.rank == rank)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Bytes, Arc<Session>>> {
        // Every change is a single insert or remove.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Receives a call: all of its messages or none, each call once, in order.
    ///
    /// # Errors
    /// When the call is not received; the status is the reason.
    pub(super) async fn receive(&self, number: u64, messages: Vec<v1::ClientMessage>) -> Result<(), Status> {
        check(&messages)?;
        let mut received = self.received.lock().await;
        if number == 0 || number > *received + 1 {
            let expected = *received + 1;
            return Err(Status::failed_precondition(format!(
                "call {number} arrived where {expected} was expected; number calls from 1 and make one after the other"
            )));
        }
        if number <= *received || messages.is_empty() {
            *received = number.max(*received);
            return Ok(());
        }
        // Reserve room first: then nothing waits, so a call that is cancelled is not received.
        let place = self.inbox.reserve().await;
        place.map_err(|_| Status::not_found("the session has ended; Open another one"))?.send(Ok(messages));
        *received = number;
        Ok(())
    }
}

/// Refuses messages that are not allowed in a call.
fn check(messages: &[v1::ClientMessage]) -> Result<(), Status> {
    if messages.len() > limits::WEB_MESSAGES_MAX {
        let reason =
            format!("{} messages in one call; at most {} are allowed", messages.len(), limits::WEB_MESSAGES_MAX);
        return Err(Status::invalid_argument(reason));
    }
    for message in messages {
        match &message.message {
            Some(client_message::Message::RingReady(_)) => {
                return Err(Status::invalid_argument(
                    "RingReady is not supported over gRPC-Web, where there is no shared memory",
                ));
            }
            Some(client_message::Message::Claim(_)) => {
                return Err(Status::invalid_argument("Claim is not allowed within a session; call Open with it"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The stream of messages to a worker. Dropping it, as when its connection ends, ends the session.
pub(super) struct MessageStream {
    outgoing: OutgoingStream,
    rank: Rank,
    sessions: Sessions,
    /// The worker's channel, until the session has a token.
    inbox: Option<Inbox>,
    token: Option<Bytes>,
}

impl MessageStream {
    /// Forwards outgoing messages, and registers the session once its claim is accepted.
    pub(super) fn new(sessions: &Sessions, rank: Rank, inbox: Inbox, outgoing: OutgoingStream) -> Self {
        Self { outgoing, rank, sessions: sessions.clone(), inbox: Some(inbox), token: None }
    }

    fn open(&mut self, claimed: &v1::Claimed, inbox: Inbox) {
        let session = Arc::new(Session { rank: self.rank, inbox, received: tokio::sync::Mutex::new(0) });
        self.sessions.lock().insert(claimed.session_token.clone(), session);
        self.token = Some(claimed.session_token.clone());
    }
}

impl Stream for MessageStream {
    type Item = Result<v1::ServerMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(Pin::new(&mut self.outgoing).poll_next(context));
        if let Some(Ok(v1::ServerMessage { message: Some(server_message::Message::Claimed(claimed)) })) = &next
            && let Some(inbox) = self.inbox.take()
        {
            self.open(claimed, inbox);
        }
        Poll::Ready(next)
    }
}

impl Drop for MessageStream {
    fn drop(&mut self) {
        let session = self.token.as_ref().and_then(|token| self.sessions.lock().remove(token));
        let unread = self.outgoing.unread();
        if let Some(session) = session.filter(|_| unread > 0) {
            let reason =
                format!("its connection ended with {unread} messages that it has not read; it must read continuously");
            // Without room, its last messages are received, and its end is noticed.
            let _ = session.inbox.try_send(Err(Status::aborted(reason)));
        }
    }
}

/// Calls of a worker queued for the control thread, each of at most [`limits::WEB_BODY_BYTES_MAX`] bytes.
const INBOX_CALLS_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;
    use crate::session::outgoing::{Outgoing, outgoing};

    const ME: Rank = Rank(2);
    const TOKEN: &[u8] = &[9; 16];

    fn message(message: client_message::Message) -> v1::ClientMessage {
        v1::ClientMessage { message: Some(message) }
    }

    fn release(request: u64) -> v1::ClientMessage {
        message(client_message::Message::Release(v1::Release { request }))
    }

    struct Opened {
        sessions: Sessions,
        messages: MessageStream,
        sender: Outgoing,
        inbox: Messages,
    }

    /// A session whose claim was accepted.
    async fn opened() -> Opened {
        let (sender, outgoing) = outgoing(8);
        let (inbox, incoming) = inbox();
        let sessions = Sessions::default();
        let mut messages = MessageStream::new(&sessions, ME, inbox, outgoing);
        let claimed = v1::Claimed { session_token: TOKEN.into(), ..Default::default() };
        let claimed = v1::ServerMessage { message: Some(server_message::Message::Claimed(claimed)) };
        assert!(sender.try_send(Ok(claimed)));
        let Some(Ok(v1::ServerMessage { message: Some(server_message::Message::Claimed(claimed)) })) =
            messages.next().await
        else {
            panic!("not passed on");
        };
        assert_eq!(claimed.session_token, TOKEN);
        Opened { sessions, messages, sender, inbox: incoming }
    }

    #[tokio::test]
    async fn a_session_exists_from_its_claim_to_the_end_of_its_call() {
        let Opened { sessions, messages, sender, mut inbox } = opened().await;
        assert!(sessions.has(ME) && !sessions.has(Rank(3)));
        let session = sessions.of(&TOKEN.into(), ME).expect("open");
        assert!(sessions.of(&TOKEN.into(), Rank(3)).is_err(), "another rank's");
        assert!(sessions.of(&vec![8; 16].into(), ME).is_err(), "another token");
        drop((messages, session));
        assert!(sessions.of(&TOKEN.into(), ME).is_err() && !sessions.has(ME), "over");
        assert!(inbox.next().await.is_none(), "its reader notices");
        assert!(sender.watch().is_some_and(|watch| watch.is_open()), "and ends the session");
    }

    /// A connection that cannot be written to ends, which is not its worker's doing.
    #[tokio::test]
    async fn a_worker_that_does_not_read_is_reported() {
        let Opened { messages, sender, mut inbox, .. } = opened().await;
        for request in 0..3 {
            let done = server_message::Message::Completed(v1::Completed { request, ..Default::default() });
            assert!(sender.try_send(Ok(v1::ServerMessage { message: Some(done) })));
        }
        drop(messages);
        let status = inbox.next().await.expect("the reason").expect_err("which is none of the worker's messages");
        assert!(status.message().contains("3 messages that it has not read"), "{status}");
        assert!(inbox.next().await.is_none());
    }

    #[tokio::test]
    async fn calls_are_received_once_and_in_order() {
        let mut opened = opened().await;
        let session = opened.sessions.of(&TOKEN.into(), ME).expect("open");
        session.receive(1, vec![release(10), release(11)]).await.expect("the first");
        session.receive(1, vec![release(10), release(11)]).await.expect("the first again");
        session.receive(2, vec![]).await.expect("nothing at all");
        session.receive(3, vec![release(12)]).await.expect("the third");
        for wrong in [0, 5, u64::MAX] {
            let status = session.receive(wrong, vec![release(13)]).await.expect_err("out of turn");
            assert!(status.message().contains("where 4 was expected"), "{status}");
        }
        drop(session);
        drop(opened.messages);
        let mut received = Vec::new();
        while let Some(message) = opened.inbox.next().await {
            received.push(message.expect("a message"));
        }
        assert_eq!(received, [release(10), release(11), release(12)]);
    }

    #[tokio::test]
    async fn ring_and_claim_messages_are_rejected_together_with_their_batch() {
        let mut opened = opened().await;
        let session = opened.sessions.of(&TOKEN.into(), ME).expect("open");
        let elsewhere = [
            (vec![release(1), message(client_message::Message::RingReady(v1::RingReady {}))], "RingReady"),
            (vec![release(1), message(client_message::Message::Claim(v1::Claim::default()))], "Claim"),
            (vec![release(1); limits::WEB_MESSAGES_MAX + 1], "at most 1024"),
        ];
        for (messages, words) in elsewhere {
            let status = session.receive(1, messages).await.expect_err(words);
            assert!(status.message().contains(words), "{status}");
        }
        session.receive(1, vec![release(7)]).await.expect("the first that is received");
        assert_eq!(opened.inbox.next().await.expect("it").expect("a message"), release(7));
    }
}
