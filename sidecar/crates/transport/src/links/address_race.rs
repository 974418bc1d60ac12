//! Dials a peer's addresses in parallel, each a little after the one before, until one connection authenticates as the
//! peer (as Happy Eyeballs, RFC 8305, does).
//!
//! A host may have addresses that others cannot reach, or that also exist on other hosts: the bridge for containers is
//! 172.17.0.1 on most of them. The handshake verifies the peer's certificate, so no other host can win.

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

/// A peer's addresses and the last error of each.
pub(super) struct AddressRace {
    peer: SidecarIndex,
    addresses: Vec<SocketAddr>,
    last_errors: Vec<(SocketAddr, String)>,
}

impl AddressRace {
    /// The addresses in dialling order; the address at which the peer was last reached comes first.
    pub(super) fn new(shared: &Shared, peer: SidecarIndex) -> Self {
        let mut addresses = shared.addresses(peer).unwrap_or_default();
        let known = shared.routes.to(peer);
        addresses.sort_by_key(|address| known != Some(address.ip().to_canonical()));
        Self { peer, addresses, last_errors: Vec::new() }
    }

    /// Dials all addresses once, each for at most `handshake_timeout`, and returns the first connection that
    /// authenticates.
    ///
    /// # Errors
    /// `Some` reason if a retry is pointless because no address is left, `None` otherwise.
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
                    Err(error) => tracing::error!(%error, "the task of a connection attempt failed"),
                },
                () = sleep(ATTEMPT_DELAY), if waiting.len() > 0 => {}
                else => break,
            }
        }
        Err(if self.addresses.is_empty() { reason.or_else(|| Some(self.no_address())) } else { None })
    }

    /// The last error of each address, as text.
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

/// Prefers a refusal to any other reason: it says more than an address that cannot be dialled.
fn more_specific(one: Option<DownReason>, other: Option<DownReason>) -> Option<DownReason> {
    if matches!(one, Some(DownReason::Refused(_))) { one } else { other.or(one) }
}

/// An authenticated connection, or why there is none.
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

/// Closes the other connections. Nothing was sent on them, so the peer has nothing to undo.
fn close_losers(mut attempts: JoinSet<(SocketAddr, AttemptResult)>) {
    while let Some(ended) = attempts.try_join_next() {
        if let Ok((_, Ok((connection, _)))) = ended {
            connection.close(CloseCode::Closed, "another address of the peer was faster");
        }
    }
    // Dropping the set aborts the unfinished attempts.
}

/// Delay before the next address is dialled while earlier ones have not answered. Hosts of a cluster answer within this
/// time if they can; an unreachable address costs no more than this.
const ATTEMPT_DELAY: Duration = Duration::from_millis(100);
