//! Serves one recording: requests it from the driver, and notifies the driver when the worker stops.

use std::sync::Arc;

use ronde_rpc::v1;
use ronde_shm::SessionToken;
use tokio::sync::{mpsc, oneshot};
use tonic::{Status, Streaming};

use super::reader::CLAIM_TIMEOUT;
use crate::session::command::{RecordRequest, SessionCommand};
use crate::session::gate::Place;
use crate::timeline::{Batches, RecordingId};

/// Serves a worker that records.
pub(super) async fn serve(
    commands: mpsc::Sender<SessionCommand>,
    mut incoming: Streaming<v1::TimelineRequest>,
    batches: Batches,
    place: Arc<Place>,
) {
    let begun = match tokio::time::timeout(CLAIM_TIMEOUT, begin(&commands, &mut incoming, &batches)).await {
        Ok(begun) => begun,
        Err(_) => Err(Status::deadline_exceeded("no request arrived; the first message must name its session")),
    };
    let recording = match begun {
        Ok(recording) => recording,
        Err(status) => {
            // The worker may be gone.
            drop(batches.send(Err(status)).await);
            return;
        }
    };
    let _claim = place.claim();
    // The driver holds the only strong sender, and ends the stream by dropping it.
    let alive = batches.downgrade();
    drop(batches);
    // A worker sends nothing more; a broken stream is an end, too.
    while let (Ok(Some(_)), Some(_)) = (incoming.message().await, alive.upgrade()) {}
    // Without a driver the process is ending; its streams close by themselves.
    drop(commands.send(SessionCommand::EndRecording(recording)).await);
}

async fn begin(
    commands: &mpsc::Sender<SessionCommand>,
    incoming: &mut Streaming<v1::TimelineRequest>,
    batches: &Batches,
) -> Result<RecordingId, Status> {
    let first = incoming.message().await?;
    let request = first.ok_or_else(|| Status::failed_precondition("the first message must name its session"))?;
    let token: [u8; 16] = request.session_token.as_ref().try_into().map_err(|_| {
        Status::invalid_argument(format!("session_token has {} bytes, not 16", request.session_token.len()))
    })?;
    let (reply, answer) = oneshot::channel();
    let request = RecordRequest {
        session_token: SessionToken::from_bytes(token),
        mark_cycles: request.mark_cycles,
        batches: batches.clone(),
        reply,
    };
    let ending = || Status::unavailable("the sidecar is ending");
    commands.send(SessionCommand::Record(request)).await.map_err(|_| ending())?;
    answer.await.map_err(|_| ending())?
}
