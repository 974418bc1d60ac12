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

use super::auth::LinkAuth;
use super::close::CloseCode;
use super::connection::{ConnectError, Connection};
use super::dial::DialError;
use super::state::Shared;
use crate::port::DownReason;

/// The addresses of a peer, and what became of the attempts at them.
pub(super) struct AddressRace {
    peer: SidecarIndex,
    addresses: Vec<SocketAddr>,
    last_errors: Vec<(SocketAddr, String)>,
}

impl AddressRace {
    /// Addresses in the order in which they are tried. The one at which the peer was reached before is the first.
    pub(super) fn new(shared: &Shared, peer: SidecarIndex) -> Self {
        let mut addresses = shared.peers.get(&peer).cloned().unwrap_or_default();
        let known = shared.routes.to(peer);
        addresses.sort_by_key(|address| known != Some(address.ip().to_canonical()));
        Self { peer, addresses, last_errors: Vec::new() }
    }

    /// Tries all addresses once, each for as long as `handshake_timeout`; the first connection that is the peer's is kept.
    ///
    /// # Errors
    /// `Some` reason when trying again does not help, since no address is left.
    pub(super) async fn run(
        &mut self,
        shared: &Arc<Shared>,
        handshake_timeout: Duration,
    ) -> Result<(Connection, LinkAuth), Option<DownReason>> {
        let (mut attempts, mut reason) = (JoinSet::new(), None);
        let mut waiting = self.addresses.clone().into_iter();
        loop {
            if let Some(address) = waiting.next() {
                attempts.spawn(attempt(Arc::clone(shared), self.peer, address, handshake_timeout));
            }
            tokio::select! {
                Some(ended) = attempts.join_next() => match ended {
                    Ok((_, Ok(made))) => {
                        close_losers(attempts);
                        return Ok(made);
                    }
                    Ok((address, Err(failure))) => reason = more_specific(reason, self.record_failure(address, failure)),
                    Err(error) => tracing::error!(%error, "an attempt to connect ended by itself"),
                },
                () = sleep(ATTEMPT_DELAY), if waiting.len() > 0 => {}
                else => break,
            }
        }
        Err(if self.addresses.is_empty() { reason.or_else(|| Some(self.no_address())) } else { None })
    }

    /// What was last heard from each address, for people.
    pub(super) fn last_errors(&self) -> String {
        if self.last_errors.is_empty() {
            return "no attempt was finished".to_owned();
        }
        let texts: Vec<String> = self.last_errors.iter().map(|(address, text)| format!("{address}: {text}")).collect();
        texts.join("; ")
    }

    fn record_failure(&mut self, address: SocketAddr, failure: DialError) -> Option<DownReason> {
        let (text, reason) = match failure {
            DialError::Retry(text) => (text, None),
            DialError::Permanent(reason) => {
                self.addresses.retain(|other| *other != address);
                (reason.to_string(), Some(reason))
            }
        };
        match self.last_errors.iter_mut().find(|(of, _)| *of == address) {
            Some((_, last)) => *last = text,
            None => self.last_errors.push((address, text)),
        }
        reason
    }

    fn no_address(&self) -> DownReason {
        DownReason::Lost(format!("no address of {} is known", self.peer))
    }
}

/// A refusal says more than an address that cannot be dialled.
fn more_specific(one: Option<DownReason>, other: Option<DownReason>) -> Option<DownReason> {
    if matches!(one, Some(DownReason::Refused(_))) { one } else { other.or(one) }
}

/// A connection that is the peer's.
type AttemptResult = Result<(Connection, LinkAuth), DialError>;

async fn attempt(
    shared: Arc<Shared>,
    peer: SidecarIndex,
    address: SocketAddr,
    handshake_timeout: Duration,
) -> (SocketAddr, AttemptResult) {
    (address, connect(&shared, peer, address, handshake_timeout).await)
}

async fn connect(
    shared: &Shared,
    peer: SidecarIndex,
    address: SocketAddr,
    handshake_timeout: Duration,
) -> AttemptResult {
    let local = |text: String| DialError::Permanent(DownReason::Lost(text));
    let identity = shared.identity();
    match timeout(handshake_timeout, shared.endpoints.connect(shared.carrier(), &identity, peer, address)).await {
        Ok(Ok(connection)) => {
            let auth = LinkAuth::of(&connection, identity).map_err(|error| local(error.to_string()))?;
            Ok((connection, auth))
        }
        Ok(Err(ConnectError::Local(text))) => Err(local(text)),
        Ok(Err(ConnectError::NoAnswer(text))) => Err(DialError::Retry(text)),
        Ok(Err(ConnectError::Closed(reason))) => Err(shared.classify_close(peer, address, reason)),
        Err(_) => Err(DialError::Retry("no answer".to_owned())),
    }
}

/// Nothing was said on the other connections yet, so that the peer has nothing to take back.
fn close_losers(mut attempts: JoinSet<(SocketAddr, AttemptResult)>) {
    while let Some(ended) = attempts.try_join_next() {
        if let Ok((_, Ok((connection, _)))) = ended {
            connection.close(CloseCode::Closed, "another address of the peer was faster");
        }
    }
    // Dropped with the set, those that are not finished close by themselves.
}

/// Before the next address is tried beside those that have not answered. Hosts of a cluster are near: the first address
/// has long answered when it can, and a dead one costs no more than this.
const ATTEMPT_DELAY: Duration = Duration::from_millis(100);
