//! Outgoing links: connects, exchanges hellos, and retries with exponential backoff until the start timeout.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ronde_wire::control::{self, Hello, Refusal};
use ronde_wire::{Frame, FrameKind, SidecarIndex};
use tokio::time::{sleep, timeout};

use super::address_race::AddressRace;
use super::auth::LinkAuth;
use super::close::{CloseCode, CloseReason};
use super::connection::{Connection, ReadStop};
use super::link::{self, LinkStream};
use super::state::Shared;
use crate::hello;
use crate::port::DownReason;

/// Opens the link that the owner asked for and runs it, or reports to the owner why it could not be opened.
pub(super) async fn dial(shared: Arc<Shared>, peer: SidecarIndex, generation: u64) {
    let mut last = "no attempt was finished".to_owned();
    let start_timeout = shared.options.start_timeout;
    let (stream, hello) = match timeout(start_timeout, dial_with_retries(&shared, peer, &mut last)).await {
        Ok(Ok(made)) => made,
        Ok(Err(reason)) => return shared.report_down(peer, generation, reason),
        Err(_) => {
            let text = format!("{peer} did not answer within {} s: {last}", start_timeout.as_secs_f32());
            return shared.report_down(peer, generation, DownReason::Unanswered(text));
        }
    };
    match shared.bring_up_dialled(generation, &stream, hello) {
        Some(installed) => link::run(shared, stream, installed).await,
        None => stream.connection.close(CloseCode::Closed, "the link is not wanted any more"),
    }
}

/// Why an attempt opened no link.
pub(super) enum DialError {
    /// A retry is pointless.
    Permanent(DownReason),
    /// The peer may not be running yet.
    Retry(String),
}

async fn dial_with_retries(
    shared: &Arc<Shared>,
    peer: SidecarIndex,
    last: &mut String,
) -> Result<(LinkStream, Hello), DownReason> {
    let mut race = AddressRace::new(shared, peer);
    let (mut backoff, mut handshake_timeout) = (BACKOFF_MIN, HANDSHAKE_TIMEOUT_MIN);
    loop {
        match race.run(shared, handshake_timeout).await {
            Ok(made) => match exchange_hellos(shared, peer, made, &shared.hello()).await {
                Ok(made) => return Ok(made),
                Err(DialError::Permanent(reason)) => return Err(reason),
                Err(DialError::Retry(text)) => *last = text,
            },
            Err(Some(reason)) => return Err(reason),
            Err(None) => *last = race.last_errors(),
        }
        sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
        handshake_timeout = (handshake_timeout * 2).min(HANDSHAKE_TIMEOUT_MAX);
    }
}

/// Sends a hello on an authenticated connection and reads the peer's answer.
pub(super) async fn exchange_hellos(
    shared: &Shared,
    peer: SidecarIndex,
    (connection, auth): (Connection, LinkAuth),
    own: &Hello,
) -> Result<(LinkStream, Hello), DialError> {
    let address = connection.remote_address();
    let failed = |reason: CloseReason| shared.to_dial_error(peer, address, reason);
    let (mut send, mut recv) = connection.open().await.map_err(failed)?;
    if link::write_hello(&mut send, own).await.is_err() {
        return Err(failed(connection.closed().await));
    }
    let answer = match link::read_frame(&mut recv, link::check_first_header).await {
        Ok(frame) => frame,
        Err(ReadStop::Lost(reason)) => return Err(failed(reason)),
        Err(ReadStop::Finished) => return Err(failed(connection.closed().await)),
        Err(ReadStop::Violation(text)) => {
            connection.close(CloseCode::Protocol, &text);
            return Err(DialError::Permanent(DownReason::Protocol(text)));
        }
    };
    let hello = shared.check_reply(peer, address, &answer).map_err(|(code, text, reason)| {
        connection.close(code, &text);
        DialError::Permanent(reason)
    })?;
    Ok((LinkStream { connection, send, recv, peer, auth }, hello))
}

impl Shared {
    /// Returns the peer's hello, or how to close the connection and which reason to report to the owner.
    fn check_reply(
        &self,
        peer: SidecarIndex,
        address: SocketAddr,
        answer: &Frame,
    ) -> Result<Hello, (CloseCode, String, DownReason)> {
        let violation = |text: String| (CloseCode::Protocol, text.clone(), DownReason::Protocol(text));
        let kind = answer.header.kind;
        if kind == FrameKind::Refusal {
            let refusal: Refusal = control::decode(kind, &answer.payload).map_err(|e| violation(e.to_string()))?;
            self.record_refusal(address, &refusal.reason);
            let reason = CloseReason::RefusedByPeer(refusal.reason).down_reason(peer);
            return Err((CloseCode::Closed, "refused".to_owned(), reason));
        }
        let hello: Hello = control::decode(kind, &answer.payload).map_err(|e| violation(e.to_string()))?;
        match hello::refusal(&self.hello(), &hello, peer, self.known_incarnation(peer), true) {
            None => Ok(hello),
            Some(text) => {
                self.record_refusal(address, &text);
                Err((CloseCode::Refused, text.clone(), CloseReason::RefusedLocally(text).down_reason(peer)))
            }
        }
    }

    fn to_dial_error(&self, peer: SidecarIndex, address: SocketAddr, reason: CloseReason) -> DialError {
        match self.classify_close(peer, address, reason) {
            DialError::Retry(text) => DialError::Retry(format!("{address}: {text}")),
            last @ DialError::Permanent(_) => last,
        }
    }

    /// Classifies the close of a connection that this side dialled.
    pub(super) fn classify_close(&self, peer: SidecarIndex, address: SocketAddr, reason: CloseReason) -> DialError {
        let Some(text) = reason.refusal() else { return DialError::Retry(reason.down_reason(peer).to_string()) };
        self.record_refusal(address, text);
        DialError::Permanent(reason.down_reason(peer))
    }
}

const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// Timeout of the first handshake. It is short because a peer whose socket was not bound yet has lost the first
/// datagram.
const HANDSHAKE_TIMEOUT_MIN: Duration = Duration::from_millis(400);
const HANDSHAKE_TIMEOUT_MAX: Duration = Duration::from_secs(5);
