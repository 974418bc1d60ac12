//! What passes between a session and the engine's answers: the check of a submission, the delivery of a result.

use ronde_engine::Completion;
use ronde_rpc::convert::{EpochView, Place, Refused, Submission};
use ronde_rpc::v1;
use ronde_rpc::v1::server_message::Message;
use ronde_shm::SegmentId;
use ronde_wire::{Cause, Collective, Epoch, Failure, Rank, RequestId, SetId, SidecarIndex, World, limits};

use crate::memory::Input;
use crate::operations::{Operations, ResultId};
use crate::segments::Segments;
use crate::sessions::{Held, Pending, Session};

/// Checks a submission against its session: the place must exist and the limits must leave room.
pub(crate) fn accept(
    session: &mut Session,
    segments: &Segments,
    submission: Submission,
    (result_bytes_max, ranks): (u64, u64),
) -> Result<Submission, Refused> {
    let refuse = |reason: String| Refused {
        request: submission.request,
        set: submission.what.set,
        name: Some(submission.what.name.clone()),
        group: submission.what.group.clone(),
        reason,
    };
    if session.pending.contains_key(&submission.request) || session.held.contains_key(&submission.request) {
        // The name belongs to another request of this number, which stays valid: nobody else is told.
        let reason = format!("{} is in use; number requests once", submission.request);
        return Err(Refused { name: None, ..refuse(reason) });
    }
    if session.pending.len() >= limits::PENDING_PER_SESSION_MAX {
        return Err(refuse(format!(
            "{} requests are pending; the limit PENDING_PER_SESSION_MAX is {}; wait for some first",
            session.pending.len(),
            limits::PENDING_PER_SESSION_MAX
        )));
    }
    let input = match &submission.place {
        Place::None => Input::None,
        Place::Inline(data) => Input::Inline(data.clone()),
        Place::Arena { segment, offset, bytes } => {
            let mapped = segments.input(&session.token, SegmentId(*segment));
            let mapped =
                mapped.ok_or_else(|| refuse(format!("segment {segment} is not attached; attach it on mem.sock")))?;
            if offset.checked_add(*bytes).is_none_or(|end| end > mapped.len()) {
                return Err(refuse(format!(
                    "bytes {offset} to {offset}+{bytes} lie outside segment {segment} of {} bytes",
                    mapped.len()
                )));
            }
            Input::Arena { segment: mapped, offset: *offset, bytes: *bytes }
        }
    };
    let result_bytes = expected_result_bytes(session.rank, &submission);
    let gathered_bytes = result_bytes.saturating_mul(ranks);
    let gathers = matches!(submission.what.collective, Collective::AllGather | Collective::Gather { .. });
    let inline = matches!(submission.place, Place::Inline(_));
    if inline && gathers && gathered_bytes > limits::INLINE_BYTES_MAX as u64 {
        return Err(refuse(format!(
            "a result of about {gathered_bytes} bytes does not fit into messages, which take {}; use shared memory",
            limits::INLINE_BYTES_MAX
        )));
    }
    if session.result_bytes + result_bytes > result_bytes_max {
        return Err(refuse(format!(
            "{result_bytes} bytes of result exceed arena_bytes_max = {result_bytes_max}: {} are pending or not released; raise it (--arena-mb) or keep fewer tensors in flight",
            session.result_bytes
        )));
    }
    session.result_bytes += result_bytes;
    session.pending.insert(submission.request, Pending { input, result_bytes });
    Ok(submission)
}

/// What a result takes as far as the request tells: results that hang on other ranks' tensors count by the contribution
/// until they are there.
fn expected_result_bytes(me: Rank, submission: &Submission) -> u64 {
    match submission.what.collective {
        Collective::Send { .. } => 0,
        Collective::Reduce { root, .. } | Collective::Gather { root } if root != me => 0,
        _ => submission.place.bytes().unwrap_or(0),
    }
}

/// Tells a worker where its result lies, or sends it in parts when the contribution came inside a message.
pub(crate) fn deliver(session: &mut Session, operations: &mut Operations, request: RequestId, completion: Completion) {
    let inline = session.is_inline(request);
    let Some(pending) = session.pending.remove(&request) else {
        operations.release(result_id(session.rank, &completion));
        return;
    };
    let result = result_id(session.rank, &completion);
    let mut place = Place::None;
    match operations.result(result) {
        None => session.result_bytes -= pending.result_bytes,
        Some(slot) if inline && slot.slot.len > limits::INLINE_BYTES_MAX as u64 => {
            let reason = format!(
                "the result has {} bytes, but one that travels inside messages has at most {}; use shared memory",
                slot.slot.len,
                limits::INLINE_BYTES_MAX
            );
            session.result_bytes -= pending.result_bytes;
            operations.release(result);
            send_failed(session, request, &Failure::new(Cause::Refused, reason).with_rank(session.rank));
            return;
        }
        Some(slot) if inline => {
            let mut offset = 0;
            while offset < slot.slot.len {
                let part = PART_BYTES.min(slot.slot.len - offset);
                let mut data = vec![0; usize::try_from(part).unwrap_or(0)];
                if let Err(error) = slot.segment.copy_to(slot.slot.offset + offset, &mut data) {
                    tracing::error!(%error, "a result cannot be read; this is a bug in ronde");
                }
                session.send(Message::ResultPart(v1::ResultPart { request: request.0, data: data.into() }));
                offset += part;
            }
            session.result_bytes -= pending.result_bytes;
            operations.release(result);
        }
        Some(slot) => {
            let (segment, offset, bytes) = (slot.slot.segment.0, slot.slot.offset, slot.slot.len);
            place = Place::Arena { segment, offset, bytes };
            // What is really held counts: a gathered result is larger than the contribution.
            session.result_bytes = session.result_bytes - pending.result_bytes + bytes;
            session.held.insert(request, Held { result, result_bytes: bytes });
        }
    }
    let Completion { epoch, seq, dtype, shape, detail, .. } = completion;
    let message = ronde_rpc::Completion { request, epoch, seq, dtype, shape, result: place, detail };
    session.send(Message::Completed(message.into_message()));
}

/// The result that a rank's completion speaks of.
pub(crate) fn result_id(rank: Rank, completion: &Completion) -> ResultId {
    let Completion { epoch, seq, tensor, own, .. } = *completion;
    ResultId { epoch, seq, tensor, rank: own.then_some(rank) }
}

/// Tells a worker that a request has failed.
pub(crate) fn send_failed(session: &mut Session, request: RequestId, failure: &Failure) {
    session.send(Message::Failed(v1::Failed { request: request.0, failure: Some(failure.into()) }));
}

/// A rank's own view of the world: its place among the ranks of its sidecar and among the sidecars.
pub(crate) fn epoch_view(world: &World, me: SidecarIndex, rank: Rank, epoch: Epoch) -> EpochView {
    let topology = world.topology(SetId::WORLD);
    let members = topology.as_ref().map_or(&[][..], |t| t.members.as_slice());
    let local = members.iter().find(|m| m.sidecar == me).map_or(&[][..], |m| m.ranks.as_slice());
    let local_rank = local.iter().position(|r| *r == rank).unwrap_or(0);
    let peers: Vec<_> = members.iter().filter(|m| m.ranks.len() > local_rank).collect();
    let cross_rank = peers.iter().position(|m| m.sidecar == me).unwrap_or(0);
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    EpochView {
        epoch,
        rank,
        size: count(world.size()),
        local_rank: count(local_rank),
        local_size: count(local.len()),
        cross_rank: count(cross_rank),
        cross_size: count(peers.len()),
        homogeneous: members.iter().all(|m| m.ranks.len() == local.len()),
    }
}

/// Bytes of one part of an inline result: what the control thread may copy at once.
const PART_BYTES: u64 = 64 << 10;
