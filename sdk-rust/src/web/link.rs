//! The gRPC-Web calls of a session: one call opens it and streams the sidecar's messages; further calls send messages and
//! heartbeats.

use std::rc::Rc;
use std::time::Duration;

use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{Claim, Claimed, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, v1, web};
use ronde_wire::{WorkerNumber, limits};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::channel::Caller;
use super::options::Options;
use super::platform::{sleep, spawn, within};
use super::session::Session;
use crate::error::{Error, describe};

/// Opens a session. Retries until the connect timeout while the sidecar is not there yet, and for 2 s while an earlier session
/// of the rank is still ending.
pub(super) async fn open(caller: &Caller, options: &Options) -> Result<(Claimed, Streaming<v1::ServerMessage>), Error> {
    let (mut waited, mut pause) = (Duration::ZERO, PAUSE_MIN);
    loop {
        let refused = match within(options.connect_timeout, attempt(caller, options)).await {
            Some(Ok(opened)) => return Ok(opened),
            Some(Err(refused)) => refused,
            None => {
                let reason = format!("no answer within {} s", options.connect_timeout.as_secs_f64());
                return Err(Error::WebConnect { url: options.url.clone(), reason });
            }
        };
        let (patience, error) = match refused {
            Refused::Final(error) => return Err(error),
            Refused::Held(error) => (CLAIM_RETRY.min(options.connect_timeout), error),
            Refused::Unreachable(error) => (options.connect_timeout, error),
        };
        if waited + pause > patience {
            return Err(error);
        }
        sleep(pause).await;
        waited += pause;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Why an attempt failed, which decides whether to retry.
enum Refused {
    Unreachable(Error),
    Held(Error),
    Final(Error),
}

async fn attempt(caller: &Caller, options: &Options) -> Result<(Claimed, Streaming<v1::ServerMessage>), Refused> {
    let claim = Claim {
        job: options.job.clone(),
        worker: WorkerNumber(options.rank.0),
        token: options.token(),
        protocols: (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION),
        client: options.client_name.clone(),
        pid: options.pid,
    };
    let refuse = |status: &Status| refusal(options, status);
    let (mut client, request) = caller.call(claim.into_message());
    let mut incoming = client.open(request).await.map_err(|status| refuse(&status))?.into_inner();
    let first = incoming.message().await.map_err(|status| refuse(&status))?;
    let Some(server_message::Message::Claimed(claimed)) = first.and_then(|message| message.message) else {
        let reason = "its first message is not the answer to the claim".to_owned();
        return Err(Refused::Final(Error::Protocol { reason }));
    };
    let claimed = Claimed::parse(&claimed).map_err(|error| Refused::Final(Error::protocol(&error)))?;
    Ok((claimed, incoming))
}

fn refusal(options: &Options, status: &Status) -> Refused {
    let (url, reason) = (options.url.clone(), describe(status));
    let claim = |url, reason| Error::WebClaim { url, rank: options.rank.0, reason };
    match status.code() {
        Code::AlreadyExists => Refused::Held(claim(url, reason)),
        Code::Unavailable | Code::Unknown | Code::Cancelled => Refused::Unreachable(Error::WebConnect { url, reason }),
        _ => Refused::Final(claim(url, reason)),
    }
}

/// Spawns a session's tasks, which end with it.
pub(super) fn start(
    session: &Rc<Session>,
    caller: Caller,
    incoming: Streaming<v1::ServerMessage>,
    queue: mpsc::Receiver<v1::ClientMessage>,
    ended: tokio::sync::oneshot::Sender<()>,
) {
    spawn(send_queued(Rc::clone(session), caller, queue));
    spawn(send_heartbeats(Rc::clone(session)));
    let session = Rc::clone(session);
    spawn(async move {
        let why = listen(&session, incoming).await;
        session.end(&why);
        // The receiver is gone when the client was dropped without `close`.
        let _ = ended.send(());
    });
}

/// Receives until the session ends. Returns the reason.
async fn listen(session: &Session, mut incoming: Streaming<v1::ServerMessage>) -> Error {
    loop {
        let received = tokio::select! {
            biased;
            received = incoming.message() => received,
            () = session.over.notified() => return Error::Closed,
        };
        match received {
            Ok(Some(message)) => {
                if let Err(error) = session.receive(message) {
                    return error;
                }
            }
            Ok(None) => return session.gone("it ended the session"),
            Err(status) => return session.gone(&describe(&status)),
        }
    }
}

/// Sends heartbeats until the session is closed.
async fn send_heartbeats(session: Rc<Session>) {
    loop {
        sleep(Duration::from_millis(session.claimed.heartbeat_ms.into())).await;
        if session.is_closed() {
            return;
        }
        session.heartbeat();
    }
}

/// Sends queued messages in one call after the other, as many as fit into each; also those queued before the session ended.
async fn send_queued(session: Rc<Session>, caller: Caller, mut queue: mpsc::Receiver<v1::ClientMessage>) {
    let (mut number, mut carried) = (0, None);
    loop {
        let first = match carried.take() {
            Some(message) => message,
            None => match queue.recv().await {
                Some(message) => message,
                None => return,
            },
        };
        let (messages, left) = batch(first, || queue.try_recv().ok());
        carried = left;
        number += 1;
        let session_token = session.claimed.session_token.to_vec().into();
        let sent = call(&caller, v1::SayRequest { session_token, number, messages }).await;
        if let Err(reason) = sent {
            session.end(&session.gone(&reason));
            return;
        }
    }
}

/// Makes a call and retries it when its connection breaks. The sidecar discards a call number that it has received already.
async fn call(caller: &Caller, message: v1::SayRequest) -> Result<(), String> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let (mut client, request) = caller.call(message.clone());
        let broken = match within(SEND_TIMEOUT, client.say(request)).await {
            Some(Ok(_)) => return Ok(()),
            Some(Err(status)) if matches!(status.code(), Code::Unavailable | Code::Unknown) => describe(&status),
            Some(Err(status)) => return Err(describe(&status)),
            None => format!("no answer within {} s", SEND_TIMEOUT.as_secs()),
        };
        if attempt == SEND_ATTEMPTS {
            return Err(broken);
        }
        sleep(PAUSE_MAX).await;
    }
}

/// Batches a message with the queued ones that fit into the same call. Also returns the first one that does not fit.
fn batch(
    first: v1::ClientMessage,
    mut next: impl FnMut() -> Option<v1::ClientMessage>,
) -> (Vec<v1::ClientMessage>, Option<v1::ClientMessage>) {
    let mut bytes = web::element_bytes(&first);
    let mut messages = vec![first];
    while messages.len() < limits::WEB_MESSAGES_MAX
        && !matches!(messages.last().and_then(|last| last.message.as_ref()), Some(client_message::Message::Goodbye(_)))
        && let Some(message) = next()
    {
        bytes += web::element_bytes(&message);
        if bytes + CALL_BYTES > limits::WEB_BODY_BYTES_MAX {
            return (messages, Some(message));
        }
        messages.push(message);
    }
    (messages, None)
}

const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// How long an earlier session of the same rank may take to end.
const CLAIM_RETRY: Duration = Duration::from_secs(2);
/// How long the sidecar may take to answer a call.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
const SEND_ATTEMPTS: u32 = 3;
/// The bytes of a call besides its messages: the head of the frame, the session's token, the number.
const CALL_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn submit(bytes: usize) -> v1::ClientMessage {
        v1::ClientMessage {
            message: Some(client_message::Message::Submit(v1::Submit {
                name: "x".repeat(bytes),
                ..Default::default()
            })),
        }
    }

    fn calls(mut queue: std::collections::VecDeque<v1::ClientMessage>) -> Vec<usize> {
        let (mut calls, mut carried) = (Vec::new(), queue.pop_front());
        while let Some(first) = carried.take() {
            let (messages, left) = batch(first, || queue.pop_front());
            let bytes: usize = messages.iter().map(web::element_bytes).sum();
            assert!(bytes + CALL_BYTES <= limits::WEB_BODY_BYTES_MAX, "{bytes}");
            calls.push(messages.len());
            carried = left.or_else(|| queue.pop_front());
        }
        calls
    }

    #[test]
    fn a_call_carries_as_many_messages_as_fit() {
        assert_eq!(calls([submit(10)].into()), [1]);
        assert_eq!(calls((0..10).map(|_| submit(100_000)).collect()), [10]);
        assert_eq!(calls((0..25).map(|_| submit(100_000)).collect()), [11, 11, 3]);
        assert_eq!(calls((0..3).map(|_| submit(limits::INLINE_BYTES_MAX)).collect()), [1, 1, 1]);
        assert_eq!(calls((0..1_500).map(|_| submit(1)).collect()), [1_024, 476]);
    }

    #[test]
    fn nothing_is_sent_after_a_close_message() {
        let closing = v1::ClientMessage { message: Some(client_message::Message::Goodbye(v1::Goodbye::default())) };
        assert_eq!(calls([submit(1), closing, submit(1)].into()), [2, 1]);
    }
}
