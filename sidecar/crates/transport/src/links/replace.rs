//! The dialler's part in replacing a connection: when, and how the next one is made.

use std::time::Duration;

use ronde_wire::SidecarIndex;
use ronde_wire::control::Hello;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::closing::Unused;
use super::connection::{Attempt, Connection};
use super::dial::{self, Failure};
use super::link::Wire;
use super::proof::Proof;
use super::state::Shared;

/// Makes the next connection of a link as soon as one of the two sides has other certificates: this one, which is seen
/// by `proof`, or the peer, which asks. Tries again with growing pauses; the link's own end is the last moment.
pub(super) async fn next_connection(
    shared: &Shared,
    peer: SidecarIndex,
    current: &Connection,
    proof: &Proof,
    asked: &Notify,
) -> Wire {
    let mut pause = PAUSE_FIRST;
    let mut is_due = !std::sync::Arc::ptr_eq(&proof.own, &shared.identity());
    loop {
        if !is_due {
            asked.notified().await;
            pause = PAUSE_FIRST;
        }
        let made = match timeout(ATTEMPT_TIMEOUT, attempt(shared, peer, current, proof)).await {
            Ok(made) => made,
            Err(_) => Err("no answer in time".to_owned()),
        };
        match made {
            Ok(Some(wire)) => return wire,
            // The peer has asked before its next certificate was in place, or again for what was done.
            Ok(None) => is_due = false,
            Err(reason) => {
                tracing::warn!(%peer, purpose = ?shared.hello.purpose, reason, "the connection is not replaced yet");
                is_due = true;
            }
        }
        // Also behind what was not needed: a peer that asks all the time is not listened to all the time.
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_LAST);
    }
}

/// `None` when both sides still have the certificates of the connection that there is.
async fn attempt(
    shared: &Shared,
    peer: SidecarIndex,
    current: &Connection,
    proof: &Proof,
) -> Result<Option<Wire>, String> {
    let identity = shared.identity();
    let connecting = shared.endpoints.connect(shared.carrier(), &identity, peer, current.remote_address());
    let connection = connecting.await.map_err(|failed| match failed {
        Attempt::Local(text) | Attempt::Unanswered(text) => text,
        Attempt::Ended(ending) => ending.down_reason(peer).to_string(),
    })?;
    let fresh = Proof::of(&connection, identity).map_err(|error| error.to_string())?;
    let unused = Unused::new(connection.clone());
    if !fresh.differs_from(proof) {
        return Ok(None);
    }
    let hello = Hello { replaces: true, ..shared.hello.clone() };
    match dial::greet(shared, peer, (connection, fresh), &hello).await {
        Ok((wire, _)) => {
            unused.keep();
            Ok(Some(wire))
        }
        Err(Failure::Again(text)) => Err(text),
        Err(Failure::Final(reason)) => Err(reason.to_string()),
    }
}

const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_LAST: Duration = Duration::from_secs(30);
