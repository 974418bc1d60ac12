//! Which of a peer's addresses is answered first: all are tried, one a little behind the other, until one has proved to be
//! the peer.
//!
//! A host has addresses that nobody else can reach, and some that stand for other hosts elsewhere: a bridge for containers
//! is 172.17.0.1 on most hosts. The handshake asks for the peer's certificate, so whoever else answers cannot win.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ronde_wire::SidecarIndex;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::closing::CloseCode;
use super::connection::{Attempt, Connection};
use super::dial::Failure;
use super::proof::Proof;
use super::state::Shared;
use crate::port::DownReason;

/// The addresses of a peer, and what became of the attempts at them.
pub(super) struct Course {
    peer: SidecarIndex,
    live: Vec<SocketAddr>,
    words: Vec<(SocketAddr, String)>,
}

impl Course {
    /// Addresses in the order in which they are tried. The one at which the peer was reached before is the first.
    pub(super) fn new(shared: &Shared, peer: SidecarIndex) -> Self {
        let mut live = shared.peers.get(&peer).cloned().unwrap_or_default();
        let known = shared.routes.to(peer);
        live.sort_by_key(|address| known != Some(address.ip().to_canonical()));
        Self { peer, live, words: Vec::new() }
    }

    /// Tries all addresses once, each for as long as `patience`; the first connection that is the peer's is kept.
    ///
    /// # Errors
    /// `Some` reason when trying again does not help, since no address is left.
    pub(super) async fn run(
        &mut self,
        shared: &Arc<Shared>,
        patience: Duration,
    ) -> Result<(Connection, Proof), Option<DownReason>> {
        let (mut attempts, mut told) = (JoinSet::new(), None);
        let mut waiting = self.live.clone().into_iter();
        loop {
            if let Some(address) = waiting.next() {
                attempts.spawn(attempt(Arc::clone(shared), self.peer, address, patience));
            }
            tokio::select! {
                Some(ended) = attempts.join_next() => match ended {
                    Ok((_, Ok(made))) => {
                        end_others(attempts);
                        return Ok(made);
                    }
                    Ok((address, Err(failure))) => told = more_telling(told, self.note(address, failure)),
                    Err(error) => tracing::error!(%error, "an attempt to connect ended by itself"),
                },
                () = sleep(BETWEEN), if waiting.len() > 0 => {}
                else => break,
            }
        }
        Err(if self.live.is_empty() { told.or_else(|| Some(self.no_address())) } else { None })
    }

    /// What was last heard from each address, for people.
    pub(super) fn words(&self) -> String {
        if self.words.is_empty() {
            return "no attempt was finished".to_owned();
        }
        let texts: Vec<String> = self.words.iter().map(|(address, text)| format!("{address}: {text}")).collect();
        texts.join("; ")
    }

    fn note(&mut self, address: SocketAddr, failure: Failure) -> Option<DownReason> {
        let (text, reason) = match failure {
            Failure::Again(text) => (text, None),
            Failure::Final(reason) => {
                self.live.retain(|live| *live != address);
                (reason.to_string(), Some(reason))
            }
        };
        match self.words.iter_mut().find(|(of, _)| *of == address) {
            Some((_, said)) => *said = text,
            None => self.words.push((address, text)),
        }
        reason
    }

    fn no_address(&self) -> DownReason {
        DownReason::Lost(format!("no address of {} is known", self.peer))
    }
}

/// A refusal says more than an address that cannot be dialled.
fn more_telling(one: Option<DownReason>, other: Option<DownReason>) -> Option<DownReason> {
    if matches!(one, Some(DownReason::Refused(_))) { one } else { other.or(one) }
}

/// A connection that is the peer's.
type Made = Result<(Connection, Proof), Failure>;

async fn attempt(
    shared: Arc<Shared>,
    peer: SidecarIndex,
    address: SocketAddr,
    patience: Duration,
) -> (SocketAddr, Made) {
    (address, connect(&shared, peer, address, patience).await)
}

async fn connect(shared: &Shared, peer: SidecarIndex, address: SocketAddr, patience: Duration) -> Made {
    let local = |text: String| Failure::Final(DownReason::Lost(text));
    let identity = shared.identity();
    match timeout(patience, shared.endpoints.connect(shared.carrier(), &identity, peer, address)).await {
        Ok(Ok(connection)) => {
            let proof = Proof::of(&connection, identity).map_err(|error| local(error.to_string()))?;
            Ok((connection, proof))
        }
        Ok(Err(Attempt::Local(text))) => Err(local(text)),
        Ok(Err(Attempt::Unanswered(text))) => Err(Failure::Again(text)),
        Ok(Err(Attempt::Ended(ending))) => Err(shared.judge_ending(peer, address, ending)),
        Err(_) => Err(Failure::Again("no answer".to_owned())),
    }
}

/// Nothing was said on the other connections yet, so that the peer has nothing to take back.
fn end_others(mut attempts: JoinSet<(SocketAddr, Made)>) {
    while let Some(ended) = attempts.try_join_next() {
        if let Ok((_, Ok((connection, _)))) = ended {
            connection.close(CloseCode::Closed, "another address of the peer was faster");
        }
    }
    // Dropped with the set, those that are not finished close by themselves.
}

/// Before the next address is tried beside those that have not answered. Hosts of a cluster are near: the first address
/// has long answered when it can, and a dead one costs no more than this.
const BETWEEN: Duration = Duration::from_millis(100);
