//! Validates submissions against their session, and delivers results to it.

use std::sync::Arc;

use ronde_engine::Completion;
use ronde_rpc::convert::{EpochView, OutputPlace, Place, Refused, SegmentKind, Submission};
use ronde_rpc::v1;
use ronde_rpc::v1::server_message::Message;
use ronde_shm::{SegmentId, WorkerSegment};
use ronde_wire::{Cause, Collective, Epoch, Failure, Rank, RequestId, SetId, SidecarIndex, World, limits};

use crate::operation::table::Operations;
use crate::session::gpus::DevicePart;
use crate::session::outgoing::InlineResult;
use crate::session::request::{ArenaPart, Input, Output, ResultId};
use crate::session::segments::Segments;
use crate::session::table::{HeldResult, Pending, Session};

/// The limits of a session's results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResultBounds {
    /// Bytes of results that pending and held requests may take: `arena_bytes_max`.
    pub(crate) bytes_max: u64,
    /// The number of ranks of the submission's set; 0 for an unknown set.
    pub(crate) set_ranks: u64,
}

/// Validates a submission against its session: its locations must exist and the limits must leave room.
pub(crate) fn accept(
    session: &mut Session,
    segments: &Segments,
    submission: Submission,
    bounds: ResultBounds,
) -> Result<Submission, Refused> {
    let refuse = |reason: String| Refused::of(submission.request, submission.what.clone(), reason);
    if session.pending.contains_key(&submission.request) || session.held.contains_key(&submission.request) {
        // The name belongs to another request with this number, which stays valid: no other rank is notified.
        let reason = format!("{} is in use; use each number only once", submission.request);
        return Err(Refused { name: None, ..refuse(reason) });
    }
    let (pending, (pending_max, limit)) = (session.pending.len(), session.access.pending_max());
    if pending >= pending_max {
        let reason = format!("{pending} requests are pending; the limit {limit} is {pending_max}; wait for some first");
        return Err(refuse(reason));
    }
    let message_bytes = check_message(session, &submission).map_err(refuse)?;
    let input = match &submission.place {
        Place::None => Input::None,
        Place::Inline(data) => Input::Inline(data.clone()),
        Place::Arena { segment, offset, bytes } => {
            let segment = attached(session, segments, (*segment, *offset, *bytes)).map_err(refuse)?;
            Input::Arena { segment, offset: *offset, bytes: *bytes }
        }
        Place::Device { segment, offset, bytes } => {
            Input::Device(device_part(session, segments, (*segment, *offset, *bytes)).map_err(refuse)?)
        }
    };
    let output = submission.output.map(|output| check_output(session, segments, output, &submission));
    let output = output.transpose().map_err(|reason| refuse(format!("the output: {reason}")))?;
    let result_bytes = check_result(session, &submission, bounds).map_err(refuse)?;
    let pending = Pending { input, output, in_output: false, operation: None, result_bytes, message_bytes };
    session.add_pending(submission.request, pending);
    Ok(submission)
}

/// Returns the bytes of the sidecar's own memory that a request takes until it is over, if the session has room for them.
fn check_message(session: &Session, submission: &Submission) -> Result<u64, String> {
    let (held, most) = (session.message_bytes, limits::MESSAGE_BYTES_PER_SESSION_MAX);
    let bytes = message_bytes(submission);
    if held.saturating_add(bytes) > most {
        return Err(format!(
            "{bytes} bytes inside messages exceed MESSAGE_BYTES_PER_SESSION_MAX = {most}: {held} are pending, or results that were not read; wait for some requests first, or use shared memory"
        ));
    }
    Ok(bytes)
}

/// The bytes of an input that came inside its message, and of the request's names and lists.
fn message_bytes(Submission { what, plugin, place, site, .. }: &Submission) -> u64 {
    let inline = if let Place::Inline(data) = place { data.len() } else { 0 };
    let group = what.group.as_ref().map_or(0, |group| group.name.as_str().len());
    let listed = match &what.collective {
        Collective::AllToAll { splits } => size_of_val(splits.as_slice()),
        Collective::AddSet { ranks } | Collective::AddSetOfMembers { ranks } => size_of_val(ranks.as_slice()),
        _ => 0,
    };
    let parameters = plugin.as_ref().map_or(0, |call| call.parameters.len());
    let dimensions = size_of_val(what.shape.dimensions());
    let texts = what.name.as_str().len() + group + site.as_ref().map_or(0, String::len);
    (inline + texts + listed + dimensions + parameters * limits::PLUGIN_NAME_BYTES_MAX) as u64
}

/// Returns the segment of a location, after checking that it exists and contains these bytes.
fn attached(
    session: &Session,
    segments: &Segments,
    (segment, offset, bytes): (u32, u64, u64),
) -> Result<Arc<WorkerSegment>, String> {
    let mapped = segments.input(&session.token, SegmentId(segment));
    let mapped = mapped.ok_or_else(|| format!("segment {segment} is not attached; attach it on mem.sock"))?;
    if offset.checked_add(bytes).is_none_or(|end| end > mapped.len()) {
        let len = mapped.len();
        return Err(format!("bytes {offset} to {offset}+{bytes} are outside of segment {segment} of {len} bytes"));
    }
    Ok(mapped)
}

/// Returns the location that a worker named for its result.
fn check_output(
    session: &Session,
    segments: &Segments,
    output: OutputPlace,
    submission: &Submission,
) -> Result<Output, String> {
    let OutputPlace { kind, segment, offset, bytes } = output;
    match known_result_bytes(session.rank, submission) {
        Some(wanted) if wanted != bytes => {
            return Err(format!("it has {bytes} bytes, but the result will have {wanted}"));
        }
        _ => {}
    }
    let place = (segment, offset, bytes);
    match kind {
        SegmentKind::Device => device_part(session, segments, place).map(Output::Device),
        SegmentKind::Arena => {
            let segment = attached(session, segments, place)?;
            Ok(Output::Arena(ArenaPart { segment, offset, bytes }))
        }
    }
}

/// Returns the location in a session's device memory, after checking that it exists and contains these bytes.
fn device_part(
    session: &Session,
    segments: &Segments,
    (segment, offset, bytes): (u32, u64, u64),
) -> Result<DevicePart, String> {
    // What is so small travels with control messages, which have no time for a device.
    if bytes <= limits::EAGER_BYTES_MAX as u64 {
        let least = limits::EAGER_BYTES_MAX;
        return Err(format!("{bytes} bytes in device memory; operations there have more than {least}"));
    }
    let imported = segments.device(&session.token, SegmentId(segment));
    let imported =
        imported.ok_or_else(|| format!("segment {segment} of device memory is not imported; pass it on mem.sock"))?;
    if offset.checked_add(bytes).is_none_or(|end| end > imported.bytes() as u64) {
        let length = imported.bytes();
        return Err(format!(
            "bytes {offset} to {offset}+{bytes} are outside of segment {segment} of {length} bytes of device memory"
        ));
    }
    Ok(DevicePart { segment: imported, offset, bytes })
}

/// Returns the bytes of the result if the request determines them.
fn known_result_bytes(me: Rank, submission: &Submission) -> Option<u64> {
    match submission.what.collective {
        Collective::AllReduce { .. } | Collective::Broadcast { .. } => submission.place.bytes(),
        Collective::Reduce { root, .. } if root == me => submission.place.bytes(),
        _ => None,
    }
}

/// Returns the bytes that the result counts for, if the session has room for them.
fn check_result(session: &Session, submission: &Submission, bounds: ResultBounds) -> Result<u64, String> {
    let ResultBounds { bytes_max, set_ranks } = bounds;
    let held = session.result_bytes;
    let result_bytes = expected_result_bytes(session.rank, submission);
    let gathered_bytes = result_bytes.saturating_mul(set_ranks);
    let collective = &submission.what.collective;
    let gathers = matches!(collective, Collective::AllGather | Collective::Gather { .. });
    let inline = matches!(submission.place, Place::Inline(_));
    if inline && gathers && gathered_bytes > limits::INLINE_BYTES_MAX as u64 {
        return Err(format!(
            "a result of about {gathered_bytes} bytes does not fit into messages, whose limit is {}; use shared memory",
            limits::INLINE_BYTES_MAX
        ));
    }
    if held.saturating_add(result_bytes) > bytes_max {
        return Err(format!(
            "{result_bytes} bytes of result exceed arena_bytes_max = {bytes_max}: {held} are pending or not released; raise it (--arena-mb) or keep fewer tensors in flight"
        ));
    }
    if held >= bytes_max && depends_on_others(session.rank, collective) {
        let kind = collective.name();
        return Err(format!(
            "the result of {kind} has a size that only other ranks know, and {held} bytes of results, which are pending or not released, have reached arena_bytes_max = {bytes_max}; raise it (--arena-mb) or keep fewer tensors in flight"
        ));
    }
    Ok(result_bytes)
}

/// Returns whether the size of the result depends on other ranks' tensors, which the request does not describe.
fn depends_on_others(me: Rank, collective: &Collective) -> bool {
    match collective {
        Collective::AllGather | Collective::AllToAll { .. } => true,
        Collective::Recv { .. } | Collective::RecvAny { .. } => true,
        Collective::Gather { root } => *root == me,
        Collective::Scatter { root } => *root != me,
        _ => false,
    }
}

/// Returns the bytes that a result counts for at submission: a result that depends on other ranks' tensors counts as
/// the contribution until it exists.
fn expected_result_bytes(me: Rank, submission: &Submission) -> u64 {
    match submission.what.collective {
        // The result goes to the worker's own memory, which has its own limit.
        _ if submission.output.is_some() && known_result_bytes(me, submission).is_some() => 0,
        Collective::Send { .. } => 0,
        Collective::Reduce { root, .. } | Collective::Gather { root } if root != me => 0,
        _ => submission.place.bytes().unwrap_or(0),
    }
}

/// Notifies a worker of its result's location, or sends the result in parts if the contribution came inside a message.
pub(crate) fn deliver(session: &mut Session, operations: &mut Operations, request: RequestId, completion: Completion) {
    let inline = session.is_inline(request);
    let Some(pending) = session.remove_pending(request) else {
        operations.release(result_id(session.rank, &completion), session.rank);
        return;
    };
    let result = result_id(session.rank, &completion);
    let mut place = Place::None;
    match operations.result(result, session.rank) {
        None => {}
        Some(slot) if inline && let Err(reason) = check_inline_result(session, slot.slot.len) => {
            operations.release(result, session.rank);
            send_failed(session, request, &Failure::new(Cause::Refused, reason).with_rank(session.rank));
            return;
        }
        Some(slot) if inline => {
            let (offset, bytes, segment) = (slot.slot.offset, slot.slot.len, Arc::clone(&slot.segment));
            session.send_result(InlineResult { request, result, segment, offset, end: offset + bytes, bytes });
        }
        Some(slot) => {
            let (segment, offset, bytes) = (slot.slot.segment.0, slot.slot.offset, slot.slot.len);
            place = Place::Arena { segment, offset, bytes };
            // Count the actual bytes: a gathered result is larger than the contribution.
            session.result_bytes += bytes;
            session.held.insert(request, HeldResult { result, result_bytes: bytes });
        }
    }
    let Completion { epoch, seq, dtype, shape, detail, .. } = completion;
    let in_output = pending.in_output;
    let message = ronde_rpc::Completion { request, epoch, seq, dtype, shape, result: place, in_output, detail };
    session.send(Message::Completed(message.into_message()));
    if inline {
        send_waiting(session, operations);
    }
}

/// Checks that a result can travel inside messages, and that the session has room for it until it is read.
fn check_inline_result(session: &Session, bytes: u64) -> Result<(), String> {
    let (most_each, most) = (limits::INLINE_BYTES_MAX as u64, limits::MESSAGE_BYTES_PER_SESSION_MAX);
    if bytes > most_each {
        return Err(format!(
            "the result has {bytes} bytes, but one that travels inside messages has at most {most_each}; use shared memory"
        ));
    }
    let held = session.message_bytes;
    if held.saturating_add(bytes) > most {
        return Err(format!(
            "the result of {bytes} bytes exceeds MESSAGE_BYTES_PER_SESSION_MAX = {most}: {held} bytes of requests and of results that were not read are held; read results sooner, or use shared memory"
        ));
    }
    Ok(())
}

/// Sends what waits for room on its path to the worker, as far as there is room, and releases the results that were sent.
pub(crate) fn send_waiting(session: &mut Session, operations: &mut Operations) {
    for sent in session.flush() {
        operations.release(sent, session.rank);
    }
}

/// Ends a failed request. Without an entry the request is of an earlier session; its number may be another request's
/// now.
pub(crate) fn fail(session: &mut Session, request: RequestId, failure: &Failure) {
    if session.remove_pending(request).is_some() {
        send_failed(session, request, failure);
    }
}

/// Returns the result that a rank's completion refers to.
pub(crate) fn result_id(rank: Rank, completion: &Completion) -> ResultId {
    let Completion { epoch, seq, tensor, own, .. } = *completion;
    ResultId { epoch, seq, tensor, rank: own.then_some(rank) }
}

/// Notifies a worker that a request has failed.
///
/// Many requests may fail for the same reason, whose record is sent once.
pub(crate) fn send_failed(session: &mut Session, request: RequestId, failure: &Failure) {
    let is_sent =
        matches!((&session.sent_record, &failure.record), (Some(sent), Some(record)) if Arc::ptr_eq(sent, record));
    let mut message = v1::Failure::from(failure);
    if is_sent {
        message.record = None;
    } else if failure.record.is_some() {
        session.sent_record.clone_from(&failure.record);
    }
    session.send(Message::Failed(v1::Failed { request: request.0, failure: Some(message) }));
}

/// Builds a rank's view of the world: its position among the ranks of its sidecar and among the sidecars.
pub(crate) fn epoch_view(world: &World, me: SidecarIndex, (rank, membership): (Rank, u64), epoch: Epoch) -> EpochView {
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
        membership,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use bytes::Bytes;
    use ronde_rpc::RankToken;
    use ronde_rpc::convert::TOKEN_BYTES;
    use ronde_shm::SessionToken;
    use ronde_wire::{Codec, DType, ReduceOp, Request, Shape, TensorName, WorkerNumber};

    use super::*;
    use crate::session::command::Access;
    use crate::session::outgoing::outgoing;
    use crate::session::table::Sessions;

    const ME: Rank = Rank(0);

    /// A session of rank 0 that submits one request after another.
    struct TestSession {
        sessions: Sessions,
        bounds: ResultBounds,
        requests: u64,
    }

    impl TestSession {
        fn new(bytes_max: u64, set_ranks: u64) -> Self {
            let token = RankToken::new(&[1; TOKEN_BYTES]).expect("a token");
            let mut sessions = Sessions::new(HashMap::from([(WorkerNumber(ME.0), token)]));
            let access = (Access::Socket { uid: 0 }, outgoing(1).0);
            let worker = WorkerNumber(ME.0);
            let id = sessions.claim(worker, &token, SessionToken::from_bytes([2; 16]), access).expect("a session");
            sessions.seat(id, ME);
            Self { sessions, bounds: ResultBounds { bytes_max, set_ranks }, requests: 0 }
        }

        /// Returns why the request is refused, if it is.
        fn refusal(&mut self, collective: Collective, bytes: usize) -> Option<String> {
            self.requests += 1;
            let place = if bytes > 0 { Place::Inline(Bytes::from(vec![0; bytes])) } else { Place::None };
            let what = Request {
                set: SetId::WORLD,
                name: TensorName::new(format!("t.{}", self.requests)).expect("a name"),
                collective,
                dtype: DType::U8,
                shape: Shape::new(vec![bytes as u64]).expect("a shape"),
                prescale: 1.0,
                postscale: 1.0,
                codec: Codec::None,
                plugin: None,
                group: None,
            };
            let submission =
                Submission { request: RequestId(self.requests), what, plugin: None, place, output: None, site: None };
            let session = self.sessions.of_rank(ME).expect("it lives");
            accept(session, &Segments::default(), submission, self.bounds).err().map(|refused| refused.reason)
        }
    }

    #[test]
    fn results_of_unknown_size_are_refused_once_the_limit_is_reached() {
        let (me, other) = (ME, Rank(1));
        let unknown = || {
            [
                Collective::Recv { from: other, tag: 0 },
                Collective::RecvAny { tag: 0 },
                Collective::Scatter { root: other },
                Collective::AllGather,
                Collective::Gather { root: me },
                Collective::AllToAll { splits: vec![0, 0] },
            ]
        };
        let mut asking = TestSession::new(100, 2);
        assert_eq!(asking.refusal(Collective::AllReduce { op: ReduceOp::Sum }, 99), None);
        for collective in unknown() {
            assert_eq!(asking.refusal(collective, 0), None);
        }
        assert_eq!(asking.refusal(Collective::AllReduce { op: ReduceOp::Sum }, 1), None);
        for collective in unknown() {
            let kind = collective.name();
            let reason = asking.refusal(collective, 0).expect("the limit is reached");
            for words in [kind, "100 bytes of results", "arena_bytes_max = 100", "--arena-mb"] {
                assert!(reason.contains(words), "{reason:?} lacks {words:?}");
            }
        }
        for nothing in [
            Collective::Barrier,
            Collective::Join,
            Collective::Send { to: other, tag: 0 },
            Collective::Gather { root: other },
            Collective::Reduce { op: ReduceOp::Sum, root: other },
        ] {
            assert_eq!(asking.refusal(nothing, 0), None);
        }
    }

    #[test]
    fn requests_inside_messages_count_until_they_are_over() {
        let mut asking = TestSession::new(u64::MAX, 2);
        let sum = || Collective::AllReduce { op: ReduceOp::Sum };
        // With their names and shapes they are a little more than a mebibyte each.
        let fit = limits::MESSAGE_BYTES_PER_SESSION_MAX / limits::INLINE_BYTES_MAX as u64 - 1;
        for _ in 0..fit {
            assert_eq!(asking.refusal(sum(), limits::INLINE_BYTES_MAX), None);
        }
        let reason = asking.refusal(sum(), limits::INLINE_BYTES_MAX).expect("the limit is reached");
        assert!(reason.contains("MESSAGE_BYTES_PER_SESSION_MAX = 67108864"), "{reason}");
        // Requests without inputs count as well.
        let splits = vec![0; limits::RANKS_MAX];
        let refused = (0..100).find_map(|_| asking.refusal(Collective::AllToAll { splits: splits.clone() }, 0));
        assert!(refused.is_some_and(|reason| reason.contains("MESSAGE_BYTES_PER_SESSION_MAX")));
        let session = asking.sessions.of_rank(ME).expect("it lives");
        session.remove_pending(RequestId(1)).expect("it is pending");
        assert_eq!(asking.refusal(sum(), limits::INLINE_BYTES_MAX - 4_096), None);
    }

    #[test]
    fn inline_gathers_count_only_the_ranks_of_their_set() {
        let half = limits::INLINE_BYTES_MAX / 2;
        assert_eq!(TestSession::new(u64::MAX, 2).refusal(Collective::AllGather, half), None);
        let reason = TestSession::new(u64::MAX, 3).refusal(Collective::AllGather, half).expect("three halves");
        assert!(reason.contains("does not fit into messages"), "{reason}");
    }
}
