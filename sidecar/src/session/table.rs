//! The control thread's table of local workers' sessions: their ranks, their requests and results, and their outgoing
//! channels.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use ronde_rpc::v1::server_message::Message::{Alive, RingTaken};
use ronde_rpc::{RankToken, v1};
use ronde_shm::{PciAddress, SessionToken};
use ronde_wire::{Epoch, OpId, Rank, Record, RequestId, WorkerNumber};
use tonic::Status;

use crate::session::command::Access;
use crate::session::gpu_use::{GpuUse, SessionGpus};
use crate::session::outgoing::{InlineResult, Outgoing};
use crate::session::request::{Input, Output, ResultId};
use crate::session::ring::{NOT_READING, RingOut};
use crate::session::service::OUTGOING_MAX;

/// A session's number within this process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionId(pub u64);

/// A live session.
pub(crate) struct Session {
    /// Its number.
    pub(crate) id: SessionId,
    /// The worker that holds it.
    pub(crate) worker: WorkerNumber,
    /// How it takes part in the job.
    pub(crate) seat: Seat,
    /// Its rank, once it has been active.
    pub(crate) rank: Rank,
    /// The token that links mem.sock to it.
    pub(crate) token: SessionToken,
    /// How its worker connects.
    pub(crate) access: Access,
    /// `None` once the stream is over.
    outgoing: Option<Outgoing>,
    /// Results that wait for room on their path to the worker, and the messages after them, oldest first; at most
    /// [`OUTGOING_MAX`].
    waiting: VecDeque<Waiting>,
    /// The ring that replaces the stream, once the worker has requested it.
    ring: Option<RingOut>,
    /// Requests that are not over.
    pub(crate) pending: HashMap<RequestId, Pending>,
    /// Completed requests whose result is not released.
    pub(crate) held: HashMap<RequestId, HeldResult>,
    /// Bytes of results that pending and held requests may take.
    pub(crate) result_bytes: u64,
    /// Bytes that the sidecar holds in its own memory for pending requests, and of results that wait to be sent.
    pub(crate) message_bytes: u64,
    /// Why the worker shuts the session down; `None` if no shutdown was announced.
    pub(crate) shutdown_reason: Option<String>,
    /// The stream is over, but operations continue: see `crate::driver::worker_exits`.
    pub(crate) closing: Option<Closing>,
    /// The pid that the process reported; 0 for none.
    pub(crate) pid: u32,
    /// The record of a first failure that the worker has received.
    pub(crate) sent_record: Option<Arc<Record>>,
    /// The epoch that was running when it claimed its rank; that epoch's end does not concern it.
    pub(crate) claimed_during: Option<Epoch>,
    /// How its worker uses GPUs.
    pub(crate) gpus: SessionGpus,
    /// Why a message did not reach the worker.
    lost: Option<String>,
}

/// How a session takes part in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seat {
    /// Its worker waits for a membership that gives it a rank.
    Waiting,
    /// It has a rank of the current membership. `in_epoch`: it has received the begin of an epoch.
    Active { in_epoch: bool },
    /// It had a rank of an earlier membership, whose end it has received. Its worker claims its number again.
    Past,
}

/// A session whose stream is over.
pub(crate) struct Closing {
    /// How it ended.
    pub(crate) reason: String,
    /// When the other ranks are notified, unless the process has ended and its exit has yet to be reported.
    pub(crate) until: Instant,
    /// When they are notified at the latest.
    pub(crate) latest: Instant,
}

/// A request that is not over.
pub(crate) struct Pending {
    /// The contribution.
    pub(crate) input: Input,
    /// The location that the worker named for the result.
    pub(crate) output: Option<Output>,
    /// Whether the result is written there.
    pub(crate) in_output: bool,
    /// The operation whose lanes use these locations.
    pub(crate) operation: Option<OpId>,
    /// The bytes that its result counts against the session's limit.
    pub(crate) result_bytes: u64,
    /// The bytes of the sidecar's own memory that it counts against the session's limit.
    pub(crate) message_bytes: u64,
}

/// What waits for room on its path to a worker.
enum Waiting {
    Message(v1::server_message::Message),
    Result(InlineResult),
}

/// A result that a session holds.
pub(crate) struct HeldResult {
    /// The result.
    pub(crate) result: ResultId,
    /// The bytes that it counts against the session's limit.
    pub(crate) result_bytes: u64,
}

impl Session {
    /// The rank, if the session has one in the current membership.
    pub(crate) fn active_rank(&self) -> Option<Rank> {
        matches!(self.seat, Seat::Active { .. }).then_some(self.rank)
    }

    /// Whether the worker receives results inside messages: it sent its contribution that way.
    pub(crate) fn is_inline(&self, request: RequestId) -> bool {
        matches!(self.pending.get(&request).map(|p| &p.input), Some(Input::Inline(_)))
    }

    /// Adds a request.
    pub(crate) fn add_pending(&mut self, request: RequestId, pending: Pending) {
        self.result_bytes += pending.result_bytes;
        self.message_bytes += pending.message_bytes;
        self.pending.insert(request, pending);
    }

    /// Removes a request that is over, with what it counts.
    pub(crate) fn remove_pending(&mut self, request: RequestId) -> Option<Pending> {
        let pending = self.pending.remove(&request)?;
        self.result_bytes -= pending.result_bytes;
        self.message_bytes -= pending.message_bytes;
        Some(pending)
    }

    /// Queues a message for the worker. When that fails, for example because it does not read, the session [must
    /// end](Self::lost).
    pub(crate) fn send(&mut self, message: v1::server_message::Message) {
        if self.waiting.is_empty() {
            return self.send_now(message);
        }
        // After what waits, so that messages keep their order.
        match self.waiting.len() {
            ..OUTGOING_MAX => self.waiting.push_back(Waiting::Message(message)),
            _ => self.note(Err(NOT_READING.to_owned())),
        }
    }

    /// Queues a result that is sent in parts, and counts its bytes until all of them are [sent](Self::flush).
    pub(crate) fn send_result(&mut self, result: InlineResult) {
        self.result_bytes += result.bytes;
        self.message_bytes += result.bytes;
        self.waiting.push_back(Waiting::Result(result));
    }

    /// Sends what waits, as far as there is room. Returns the results whose last part was sent: their slots are not read
    /// any more.
    pub(crate) fn flush(&mut self) -> Vec<ResultId> {
        let flushed = self.ring.as_mut().map_or(Ok(()), RingOut::flush);
        self.note(flushed);
        let mut sent = Vec::new();
        while let Some(next) = self.waiting.pop_front() {
            match next {
                Waiting::Message(message) => self.send_now(message),
                Waiting::Result(mut result) => {
                    while !result.is_sent() && self.has_room_for_part() {
                        result.next_part().into_iter().for_each(|part| self.send_part(part));
                    }
                    if !result.is_sent() {
                        self.waiting.push_front(Waiting::Result(result));
                        break;
                    }
                    self.result_bytes -= result.bytes;
                    self.message_bytes -= result.bytes;
                    sent.push(result.result);
                }
            }
        }
        sent
    }

    /// Takes the results that were not sent, because the session is over.
    pub(crate) fn take_unsent(&mut self) -> impl Iterator<Item = ResultId> + use<> {
        let result = |waiting| if let Waiting::Result(result) = waiting { Some(result.result) } else { None };
        std::mem::take(&mut self.waiting).into_iter().filter_map(result)
    }

    /// Returns whether a part of a result can be sent. If not, the reader of the session reports when it can.
    fn has_room_for_part(&self) -> bool {
        match (&self.ring, &self.outgoing) {
            (Some(ring), _) => ring.has_room(),
            (None, Some(outgoing)) => outgoing.has_room_for_part(),
            // Nobody reads it.
            (None, None) => true,
        }
    }

    fn send_part(&mut self, part: v1::server_message::Message) {
        if let (None, Some(outgoing)) = (&self.ring, &self.outgoing) {
            outgoing.add_part();
        }
        self.send_now(part);
    }

    fn send_now(&mut self, message: v1::server_message::Message) {
        let message = v1::ServerMessage { message: Some(message) };
        if let Some(ring) = &mut self.ring {
            let sent = ring.send(message);
            self.note(sent);
        } else {
            self.send_on_stream(message);
        }
    }

    /// Answers a heartbeat, always on the stream.
    pub(crate) fn answer_heartbeat(&mut self) {
        self.send_on_stream(v1::ServerMessage { message: Some(Alive(v1::Alive {})) });
    }

    /// Sends messages over a ring from now on, and announces that on the stream.
    pub(crate) fn switch_to(&mut self, ring: RingOut) {
        self.send_on_stream(v1::ServerMessage { message: Some(RingTaken(v1::RingTaken {})) });
        self.ring = Some(ring);
    }

    /// Returns whether messages use a ring.
    pub(crate) fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Ends the sidecar's half of the stream, for which a client that shuts down waits.
    pub(crate) fn hang_up(&mut self) {
        self.outgoing = None;
    }

    /// Returns why a message could not be queued, if so.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    fn send_on_stream(&mut self, message: v1::ServerMessage) {
        // The reader reports a closed stream, because it knows how it ended.
        let Some(outgoing) = &self.outgoing else { return };
        if !outgoing.try_send(Ok(message)) {
            self.note(Err(NOT_READING.to_owned()));
        }
    }

    /// Notes why the session must end; the first reason counts.
    fn note(&mut self, sent: Result<(), String>) {
        if let Err(reason) = sent {
            self.lost.get_or_insert(reason);
        }
    }
}

/// The table: at most one live session for each local worker.
pub(crate) struct Sessions {
    tokens: HashMap<WorkerNumber, RankToken>,
    live: HashMap<SessionId, Session>,
    by_worker: HashMap<WorkerNumber, SessionId>,
    /// The active sessions.
    by_rank: HashMap<Rank, SessionId>,
    /// How sessions that are over have used GPUs.
    past_gpu_use: GpuUse,
    next: u64,
}

impl Sessions {
    /// Creates an empty table; `tokens` has the secret of each worker placed here.
    pub(crate) fn new(tokens: HashMap<WorkerNumber, RankToken>) -> Self {
        let (live, by_worker, by_rank, past_gpu_use) = Default::default();
        Self { tokens, live, by_worker, by_rank, past_gpu_use, next: 1 }
    }

    /// Admits a worker with this token.
    pub(crate) fn add_worker(&mut self, worker: WorkerNumber, token: RankToken) {
        self.tokens.insert(worker, token);
    }

    /// Admits a worker no longer. Returns whether it was admitted.
    pub(crate) fn remove_worker(&mut self, worker: WorkerNumber) -> bool {
        self.tokens.remove(&worker).is_some()
    }

    /// Returns whether a worker is placed here.
    pub(crate) fn admits(&self, worker: WorkerNumber) -> bool {
        self.tokens.contains_key(&worker)
    }

    /// Returns whether a token is that of a worker that is placed here.
    pub(crate) fn is_entitled(&self, worker: WorkerNumber, token: &RankToken) -> bool {
        self.tokens.get(&worker).is_some_and(|expected| expected == token)
    }

    /// Claims a worker's number for a process that presents its token.
    ///
    /// # Errors
    /// A status for the worker: it is not placed here, the token is wrong, or it has a live session.
    pub(crate) fn claim(
        &mut self,
        worker: WorkerNumber,
        token: &RankToken,
        session_token: SessionToken,
        (access, outgoing): (Access, Outgoing),
    ) -> Result<SessionId, Status> {
        let Some(expected) = self.tokens.get(&worker) else {
            return Err(Status::not_found(format!(
                "{worker} is not placed on this sidecar; check RONDE_RANK and RONDE_SOCKET"
            )));
        };
        if expected != token {
            return Err(Status::permission_denied(format!(
                "the token does not belong to {worker}; RONDE_TOKEN_FILE must name the file that this sidecar wrote for it"
            )));
        }
        if self.by_worker.contains_key(&worker) {
            return Err(Status::already_exists(format!(
                "{worker} is claimed by a live session; end that process first"
            )));
        }
        let id = SessionId(self.next);
        self.next += 1;
        let session = Session {
            id,
            worker,
            seat: Seat::Waiting,
            rank: Rank(worker.0),
            token: session_token,
            access,
            outgoing: Some(outgoing),
            waiting: VecDeque::new(),
            ring: None,
            pending: HashMap::new(),
            held: HashMap::new(),
            result_bytes: 0,
            message_bytes: 0,
            shutdown_reason: None,
            closing: None,
            pid: 0,
            sent_record: None,
            claimed_during: None,
            gpus: SessionGpus::default(),
            lost: None,
        };
        self.live.insert(id, session);
        self.by_worker.insert(worker, id);
        Ok(id)
    }

    /// Gives a session its rank of the current membership.
    pub(crate) fn seat(&mut self, id: SessionId, rank: Rank) {
        let Some(session) = self.live.get_mut(&id) else { return };
        (session.seat, session.rank) = (Seat::Active { in_epoch: false }, rank);
        self.by_rank.insert(rank, id);
    }

    /// Ends a membership: sessions that took part in an epoch of it are past, the others wait for the next one.
    pub(crate) fn end_membership(&mut self) {
        self.by_rank.clear();
        for session in self.live.values_mut() {
            if let Seat::Active { in_epoch } = session.seat {
                session.seat = if in_epoch { Seat::Past } else { Seat::Waiting };
            }
        }
    }

    /// Removes a session and its claim.
    pub(crate) fn close(&mut self, id: SessionId) -> Option<Session> {
        let session = self.live.remove(&id)?;
        self.past_gpu_use = self.past_gpu_use.plus(session.gpus.total());
        self.by_worker.remove(&session.worker);
        if session.active_rank().is_some() {
            self.by_rank.remove(&session.rank);
        }
        Some(session)
    }

    /// Returns a session by number.
    pub(crate) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.live.get_mut(&id)
    }

    /// Returns the session of a worker.
    pub(crate) fn of_worker(&mut self, worker: WorkerNumber) -> Option<&mut Session> {
        let id = self.by_worker.get(&worker)?;
        self.live.get_mut(id)
    }

    /// Returns the session that holds a rank.
    pub(crate) fn of_rank(&mut self, rank: Rank) -> Option<&mut Session> {
        let id = self.by_rank.get(&rank)?;
        self.live.get_mut(id)
    }

    fn pending_mut(&mut self, rank: Rank, request: RequestId) -> Option<&mut Pending> {
        self.of_rank(rank)?.pending.get_mut(&request)
    }

    /// Iterates over all live sessions.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.live.values_mut()
    }

    /// Returns the number of sessions that use a ring.
    pub(crate) fn with_ring(&self) -> usize {
        self.live.values().filter(|session| session.has_ring()).count()
    }

    /// How live sessions use GPUs, by rank.
    pub(crate) fn gpu_uses(&self) -> Vec<(Rank, PciAddress, GpuUse)> {
        let of = |session: &Session| -> Vec<_> {
            session.gpus.iter().map(|(gpu, used)| (session.rank, gpu, used)).collect()
        };
        let mut found: Vec<_> = self.live.values().flat_map(of).collect();
        found.sort_unstable_by_key(|(rank, gpu, _)| (*rank, *gpu));
        found
    }

    /// How all sessions since the start have used GPUs.
    pub(crate) fn gpu_total(&self) -> GpuUse {
        self.live.values().fold(self.past_gpu_use, |sum, session| sum.plus(session.gpus.total()))
    }

    /// Returns the number of sessions.
    pub(crate) fn len(&self) -> usize {
        self.live.len()
    }
}

impl Sessions {
    /// Returns the contribution of a request, and notes the operation whose lanes read it.
    pub(crate) fn input(&mut self, rank: Rank, request: RequestId, operation: OpId) -> Input {
        let Some(pending) = self.pending_mut(rank, request) else { return Input::None };
        pending.operation = Some(operation);
        pending.input.clone()
    }

    /// Returns the location that the rank named for a result of this many bytes. Marks that the result goes there, and
    /// notes the operation whose lanes write it.
    pub(crate) fn output(&mut self, rank: Rank, request: RequestId, bytes: u64, operation: OpId) -> Option<Output> {
        let pending = self.pending_mut(rank, request)?;
        let output = pending.output.clone().filter(|output| output.bytes() == bytes)?;
        (pending.in_output, pending.operation) = (true, Some(operation));
        Some(output)
    }
}

#[cfg(test)]
mod tests {
    use ronde_rpc::convert::TOKEN_BYTES;
    use ronde_rpc::v1::server_message::Message;
    use ronde_shm::{OwnedSegment, Share};
    use ronde_wire::Seq;
    use tokio_stream::StreamExt;

    use super::*;
    use crate::session::outgoing::{OutgoingStream, PART_BYTES, PARTS_MAX, outgoing};

    const ME: Rank = Rank(3);
    /// Twice as many parts as the queue takes, and a short one.
    const RESULT_BYTES: u64 = 2 * (PARTS_MAX * PART_BYTES) as u64 + 1;

    fn claimed() -> (Sessions, OutgoingStream) {
        let token = RankToken::new(&[1; TOKEN_BYTES]).expect("a token");
        let worker = WorkerNumber(ME.0);
        let mut sessions = Sessions::new(HashMap::from([(worker, token)]));
        let (outgoing, stream) = outgoing(1_000);
        let access = (Access::Socket { uid: 0 }, outgoing);
        let id = sessions.claim(worker, &token, SessionToken::from_bytes([2; 16]), access).expect("a session");
        sessions.seat(id, ME);
        (sessions, stream)
    }

    fn result(segment: &Arc<OwnedSegment>) -> InlineResult {
        let result = ResultId { epoch: Epoch(1), seq: Seq(7), tensor: 0, rank: None };
        let (offset, bytes) = (100, RESULT_BYTES);
        InlineResult { request: RequestId(5), result, segment: Arc::clone(segment), offset, end: offset + bytes, bytes }
    }

    fn segment() -> Arc<OwnedSegment> {
        let bytes = usize::try_from(2 * RESULT_BYTES).expect("small");
        Arc::new(OwnedSegment::create("result", bytes, Share::ReadOnlyForOthers).expect("memory"))
    }

    #[tokio::test]
    async fn a_result_leaves_its_slot_as_far_as_the_worker_reads_and_messages_keep_their_order() {
        let ((mut sessions, mut stream), segment) = (claimed(), segment());
        segment.copy_from(100, &vec![9; usize::try_from(RESULT_BYTES).expect("small")]).expect("inside");
        let session = sessions.of_rank(ME).expect("it lives");
        session.send_result(result(&segment));
        session.send(Message::Alive(v1::Alive {}));
        assert!(session.flush().is_empty() && stream.unread() == PARTS_MAX);
        assert_eq!((session.message_bytes, session.result_bytes), (RESULT_BYTES, RESULT_BYTES));
        let (mut read, mut sent) = (0, Vec::new());
        while sent.is_empty() {
            for _ in 0..PARTS_MAX {
                let Some(Ok(v1::ServerMessage { message: Some(Message::ResultPart(part)) })) = stream.next().await
                else {
                    panic!("a part comes before what was sent after it");
                };
                assert!(part.request == 5 && part.data.iter().all(|byte| *byte == 9));
                read += part.data.len() as u64;
            }
            sent = session.flush();
            assert!(stream.unread() <= PARTS_MAX + 1);
        }
        assert_eq!((sent.len(), session.message_bytes, session.result_bytes), (1, 0, 0));
        let mut last = Vec::new();
        while stream.unread() > 0 {
            last.extend(stream.next().await.expect("it is queued").expect("a message").message);
        }
        let [Message::ResultPart(part), Message::Alive(_)] = &last[..] else { panic!("{last:?}") };
        assert_eq!(read + part.data.len() as u64, RESULT_BYTES);
        assert!(session.take_unsent().next().is_none());
    }

    #[test]
    fn results_that_were_not_sent_are_given_back_at_the_end() {
        let ((mut sessions, _stream), segment) = (claimed(), segment());
        let session = sessions.of_rank(ME).expect("it lives");
        session.send_result(result(&segment));
        session.send_result(result(&segment));
        assert!(session.flush().is_empty());
        assert_eq!(session.take_unsent().count(), 2);
    }
}
