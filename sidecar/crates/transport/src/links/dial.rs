//! Links to peers: a connection, a hello, and again with growing pauses until the start timeout.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ronde_wire::control::{self, Hello, Refusal};
use ronde_wire::{Frame, FrameKind, SidecarIndex};
use tokio::time::{sleep, timeout};

use super::closing::{CloseCode, Ending};
use super::connection::{Connection, ReadStop};
use super::link::{self, Wire};
use super::proof::Proof;
use super::race::Course;
use super::state::Shared;
use crate::hello;
use crate::port::DownReason;

/// Makes the link that the owner asked for and runs it, or tells the owner why there is none.
pub(super) async fn dial(shared: Arc<Shared>, peer: SidecarIndex, generation: u64) {
    let mut last = "no attempt was finished".to_owned();
    let start_timeout = shared.options.start_timeout;
    let (wire, hello) = match timeout(start_timeout, dial_until_final(&shared, peer, &mut last)).await {
        Ok(Ok(made)) => made,
        Ok(Err(reason)) => return shared.link_down(peer, generation, reason),
        Err(_) => {
            let text = format!("{peer} did not answer within {} s: {last}", start_timeout.as_secs_f32());
            return shared.link_down(peer, generation, DownReason::Lost(text));
        }
    };
    match shared.bring_up_dialled(generation, &wire, hello) {
        Some(installed) => link::run(shared, wire, installed).await,
        None => wire.connection.close(CloseCode::Closed, "the link is not wanted any more"),
    }
}

/// Why an attempt made no link.
pub(super) enum Failure {
    /// Trying again does not help.
    Final(DownReason),
    /// The peer may not be there yet.
    Again(String),
}

async fn dial_until_final(
    shared: &Arc<Shared>,
    peer: SidecarIndex,
    last: &mut String,
) -> Result<(Wire, Hello), DownReason> {
    let mut course = Course::new(shared, peer);
    let (mut pause, mut patience) = (PAUSE_FIRST, PATIENCE_FIRST);
    loop {
        match course.run(shared, patience).await {
            Ok(made) => match greet(shared, peer, made, &shared.hello).await {
                Ok(made) => return Ok(made),
                Err(Failure::Final(reason)) => return Err(reason),
                Err(Failure::Again(text)) => *last = text,
            },
            Err(Some(reason)) => return Err(reason),
            Err(None) => *last = course.words(),
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_LAST);
        patience = (patience * 2).min(PATIENCE_LAST);
    }
}

/// Says hello on a connection that is the peer's, and reads its answer.
pub(super) async fn greet(
    shared: &Shared,
    peer: SidecarIndex,
    (connection, proof): (Connection, Proof),
    own: &Hello,
) -> Result<(Wire, Hello), Failure> {
    let address = connection.remote_address();
    let failed = |ending: Ending| shared.dial_failure(peer, address, ending);
    let (mut send, mut recv) = connection.open().await.map_err(failed)?;
    if link::write_hello(&mut send, own).await.is_err() {
        return Err(failed(connection.closed().await));
    }
    let answer = match link::read_frame(&mut recv, link::admit_first).await {
        Ok(frame) => frame,
        Err(ReadStop::Lost(ending)) => return Err(failed(ending)),
        Err(ReadStop::Finished) => return Err(failed(connection.closed().await)),
        Err(ReadStop::Violation(text)) => {
            connection.close(CloseCode::Protocol, &text);
            return Err(Failure::Final(DownReason::Protocol(text)));
        }
    };
    let hello = shared.judge_answer(peer, address, &answer).map_err(|(code, text, reason)| {
        connection.close(code, &text);
        Failure::Final(reason)
    })?;
    Ok((Wire { connection, send, recv, peer, proof }, hello))
}

impl Shared {
    /// The peer's hello, or how to close the connection and what to tell the owner.
    fn judge_answer(
        &self,
        peer: SidecarIndex,
        address: SocketAddr,
        answer: &Frame,
    ) -> Result<Hello, (CloseCode, String, DownReason)> {
        let violation = |text: String| (CloseCode::Protocol, text.clone(), DownReason::Protocol(text));
        let kind = answer.header.kind;
        if kind == FrameKind::Refusal {
            let refusal: Refusal = control::decode(kind, &answer.payload).map_err(|e| violation(e.to_string()))?;
            self.note_refusal(address, &refusal.reason);
            let reason = Ending::RefusedThere(refusal.reason).down_reason(peer);
            return Err((CloseCode::Closed, "refused".to_owned(), reason));
        }
        let hello: Hello = control::decode(kind, &answer.payload).map_err(|e| violation(e.to_string()))?;
        match hello::refusal(&self.hello, &hello, peer, self.known_incarnation(peer), true) {
            None => Ok(hello),
            Some(text) => {
                self.note_refusal(address, &text);
                Err((CloseCode::Refused, text.clone(), Ending::RefusedHere(text).down_reason(peer)))
            }
        }
    }

    fn dial_failure(&self, peer: SidecarIndex, address: SocketAddr, ending: Ending) -> Failure {
        match self.judge_ending(peer, address, ending) {
            Failure::Again(text) => Failure::Again(format!("{address}: {text}")),
            last @ Failure::Final(_) => last,
        }
    }

    /// What a connection that this side dialled and that has ended means for the link.
    pub(super) fn judge_ending(&self, peer: SidecarIndex, address: SocketAddr, ending: Ending) -> Failure {
        let Some(text) = ending.refusal() else { return Failure::Again(ending.down_reason(peer).to_string()) };
        self.note_refusal(address, text);
        Failure::Final(ending.down_reason(peer))
    }
}

const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LAST: Duration = Duration::from_millis(500);
/// How long a handshake may take before another is tried: a peer whose socket was not yet bound lost the first datagram.
const PATIENCE_FIRST: Duration = Duration::from_millis(400);
const PATIENCE_LAST: Duration = Duration::from_secs(5);
