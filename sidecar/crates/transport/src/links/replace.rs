//! The dialler's side of replacing a link's connection: when to replace it, and how to make the next one.

use std::time::Duration;

use ronde_wire::SidecarIndex;
use ronde_wire::control::Hello;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::auth::LinkAuth;
use super::close::CloseIfUnused;
use super::connection::{ConnectError, Connection};
use super::dial::{self, DialError};
use super::link::LinkStream;
use super::state::Shared;

/// Makes the next connection of a link once this side's identity differs from `auth` or the peer asks for it. Retries
/// with exponential backoff until the link ends.
pub(super) async fn next_connection(
    shared: &Shared,
    peer: SidecarIndex,
    current: &Connection,
    auth: &LinkAuth,
    requested: &Notify,
) -> LinkStream {
    let mut backoff = BACKOFF_MIN;
    let mut is_due = !std::sync::Arc::ptr_eq(&auth.own, &shared.identity());
    loop {
        if !is_due {
            requested.notified().await;
            backoff = BACKOFF_MIN;
        }
        let made = match timeout(ATTEMPT_TIMEOUT, attempt(shared, peer, current, auth)).await {
            Ok(made) => made,
            Err(_) => Err("the peer did not answer in time".to_owned()),
        };
        match made {
            Ok(Some(stream)) => return stream,
            // The peer's next certificate is not installed yet, or the request repeats one that was served.
            Ok(None) => is_due = false,
            Err(reason) => {
                tracing::warn!(%peer, purpose = ?shared.hello.purpose, reason, "the connection is not replaced yet");
                is_due = true;
            }
        }
        // Also after an unneeded attempt, so that a peer cannot trigger attempts at any rate.
        sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Returns `None` if both sides would present the same certificates as on the current connection.
async fn attempt(
    shared: &Shared,
    peer: SidecarIndex,
    current: &Connection,
    auth: &LinkAuth,
) -> Result<Option<LinkStream>, String> {
    let identity = shared.identity();
    let connecting = shared.endpoints.connect(shared.carrier(), &identity, peer, current.remote_address());
    let connection = connecting.await.map_err(|failed| match failed {
        ConnectError::Local(text) | ConnectError::NoAnswer(text) => text,
        ConnectError::Closed(reason) => reason.down_reason(peer).to_string(),
    })?;
    let fresh = LinkAuth::of(&connection, identity).map_err(|error| error.to_string())?;
    let unused = CloseIfUnused::new(connection.clone());
    if !fresh.differs_from(auth) {
        return Ok(None);
    }
    let hello = Hello { replaces: true, ..shared.hello() };
    match dial::exchange_hellos(shared, peer, (connection, fresh), &hello).await {
        Ok((stream, _)) => {
            unused.keep();
            Ok(Some(stream))
        }
        Err(DialError::Retry(text)) => Err(text),
        Err(DialError::Permanent(reason)) => Err(reason.to_string()),
    }
}

const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
