//! Reads one session: turns a worker's messages, from its stream and its ring, into commands for the driver.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use ronde_rpc::convert::{Claim, Submission, group_from};
use ronde_rpc::v1::client_message;
use ronde_rpc::{negotiate_protocol, v1};
use ronde_shm::SessionToken;
use ronde_wire::{Rank, RequestId, SetId, TensorName, WorkerNumber, limits};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tonic::{Code as GrpcStatus, Status};

use super::Incoming;
use crate::session::command::{Access, ClaimRequest, SessionCommand};
use crate::session::directory::random_bytes;
use crate::session::gate::Place;
use crate::session::gpu_use::GpuUse;
use crate::session::outgoing::{Outgoing, OutgoingWatch};
use crate::session::ring::RingIn;
use crate::session::segments::Segments;
use crate::session::table::SessionId;
use crate::session::worker_uids::WorkerUids;

/// The reader of one session's stream and ring.
pub(super) struct Reader {
    pub(super) job: String,
    pub(super) commands: mpsc::Sender<SessionCommand>,
    pub(super) segments: Segments,
    pub(super) uids: Arc<WorkerUids>,
    pub(super) incoming: Incoming,
    pub(super) access: Access,
    /// The place of its connection to rpc.sock, which the session claims.
    pub(super) place: Option<Arc<Place>>,
    /// How long it spins for a ring's next message.
    pub(super) spin: Duration,
}

impl Reader {
    pub(super) async fn run(mut self, outgoing: Outgoing) {
        let claimed = match tokio::time::timeout(CLAIM_TIMEOUT, self.claim(&outgoing)).await {
            Ok(claimed) => claimed,
            Err(_) => Err(Status::deadline_exceeded("no claim arrived; the first message of a session is a Claim")),
        };
        let claimed = match claimed {
            Ok(claimed) => claimed,
            Err(status) => {
                // A worker that connects again claims its rank until its last session has ended here.
                if status.code() == GrpcStatus::AlreadyExists {
                    tracing::info!(access = ?self.access, reason = status.message(), "a claim waits");
                } else {
                    tracing::warn!(access = ?self.access, reason = status.message(), "a claim is refused");
                }
                outgoing.send(Err(status)).await;
                return;
            }
        };
        let _claim = self.place.as_ref().map(Place::claim);
        // The session holds the only strong sender: when the driver closes it, the reader ends.
        let Some(alive) = outgoing.watch() else { return };
        drop(outgoing);
        let reason = self.read_all(&claimed, &alive).await;
        self.send(SessionCommand::Closed { session: claimed.session, reason }).await;
    }

    async fn claim(&mut self, outgoing: &Outgoing) -> Result<Claimed, Status> {
        let first = self.incoming.next().await.transpose()?.and_then(|message| message.message);
        let Some(client_message::Message::Claim(claim)) = first else {
            return Err(Status::failed_precondition("the first message of a session is a Claim"));
        };
        let claim = Claim::parse(&claim).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let worker = claim.worker;
        if claim.job.as_str() != self.job {
            let reason =
                format!("this sidecar serves job {}, not {}; check RONDE_JOB and RONDE_SOCKET", self.job, claim.job);
            return Err(Status::failed_precondition(reason));
        }
        self.uids.check_claim(Rank(worker.0), self.access).map_err(Status::permission_denied)?;
        let (min, max) = claim.protocols;
        let protocol = negotiate_protocol(min, max).map_err(|error| Status::failed_precondition(error.to_string()))?;
        let token = random_bytes().map_err(|error| Status::internal(error.to_string()))?;
        let token = SessionToken::from_bytes(token);
        let (reply, answer) = oneshot::channel();
        let access = self.access;
        let request = ClaimRequest { claim, access, protocol, session_token: token, outgoing: outgoing.clone(), reply };
        self.send(SessionCommand::Claim(Box::new(request))).await;
        let session = answer.await.map_err(|_| Status::unavailable("the sidecar is ending"))??;
        Ok(Claimed { session, worker, rank: OnceLock::new(), token })
    }

    /// Reads until the stream ends; returns how it ended. Messages that the worker wrote to its ring before that come
    /// first.
    async fn read_all(&mut self, claimed: &Claimed, alive: &OutgoingWatch) -> String {
        let mut ring = None;
        let reason = match self.read_on(claimed, alive, &mut ring).await {
            Ok(reason) => reason,
            Err(broken) => return broken,
        };
        let Some(mut ring) = ring else { return reason };
        // At most one ring full of messages was there when the stream ended.
        for _ in 0..limits::RING_BYTES {
            match ring.pop() {
                Ok(Some(message)) => {
                    if let Err(reason) = self.pass_on(claimed, message).await {
                        return reason;
                    }
                }
                Ok(None) => return reason,
                Err(broken) => return broken,
            }
        }
        reason
    }

    /// Reads stream and ring in turns.
    ///
    /// # Errors
    /// When the worker broke the protocol; the text is the reason.
    async fn read_on(
        &mut self,
        claimed: &Claimed,
        alive: &OutgoingWatch,
        ring: &mut Option<RingIn>,
    ) -> Result<String, String> {
        while alive.is_open() {
            let waits = match ring {
                Some(ring) => self.read_ring(claimed, ring).await?,
                None => true,
            };
            tokio::select! {
                biased;
                message = self.incoming.next() => match message {
                    Some(Ok(v1::ClientMessage { message: Some(client_message::Message::RingReady(_)) })) => {
                        *ring = Some(self.open_ring(claimed).await?);
                    }
                    Some(Ok(message)) => drop(self.pass_on(claimed, detached(message)).await?),
                    None => return Ok("its process closed the session".to_owned()),
                    Some(Err(status)) => return Ok(format!("its session broke ({})", status.message())),
                },
                () = rung(ring), if waits => {
                    if ring.as_ref().is_some_and(RingIn::is_awaited) {
                        self.send(SessionCommand::Room { session: claimed.session }).await;
                    }
                }
                // A result waits for room in the stream, or the driver may have closed the session.
                () = alive.changed(), if waits => self.send(SessionCommand::Room { session: claimed.session }).await,
                // There is more in the ring, or will be soon; other sessions have their turn first.
                () = tokio::task::yield_now(), if !waits => {}
            }
        }
        Ok("the sidecar ended its session".to_owned())
    }

    /// Reads the messages in the ring, up to a bound. Returns whether the ring is empty and the reader may park on the
    /// bell. While it spins for the next message it does not park, but yields its core.
    async fn read_ring(&self, claimed: &Claimed, ring: &mut RingIn) -> Result<bool, String> {
        for _ in 0..AT_ONCE {
            match ring.pop()? {
                Some(message) => {
                    if self.pass_on(claimed, message).await? {
                        ring.expect_next();
                    }
                }
                None if ring.is_spinning() => {
                    std::thread::yield_now();
                    return Ok(false);
                }
                None => return ring.arm().map_err(|error| error.to_string()),
            }
        }
        Ok(false)
    }

    async fn open_ring(&self, claimed: &Claimed) -> Result<RingIn, String> {
        let attached = self.segments.take_ring(&claimed.token);
        let attached = attached.ok_or("it sent RingReady without a ring attached, or sent it twice")?;
        let (incoming, outgoing) = attached.open(self.spin)?;
        self.send(SessionCommand::Ring { session: claimed.session, ring: Box::new(outgoing) }).await;
        Ok(incoming)
    }

    /// Passes a message to the driver. Returns whether the worker may receive its answer, and send the next message,
    /// very soon.
    ///
    /// # Errors
    /// When the message ends the session; the text is the reason.
    async fn pass_on(&self, claimed: &Claimed, message: v1::ClientMessage) -> Result<bool, String> {
        let session = claimed.session;
        let mut soon = false;
        let command = match message.message {
            Some(client_message::Message::Submit(submit)) => {
                let rank = self.rank_of(claimed);
                let submission = Submission::parse(submit, rank);
                let submission = match self.access {
                    Access::Socket { .. } => submission,
                    Access::Web => submission.and_then(|submission| submission.inline_only(rank)),
                };
                soon = true;
                SessionCommand::Submit { session, submission: Box::new(submission) }
            }
            Some(client_message::Message::Withdraw(m)) => {
                SessionCommand::Withdraw { session, request: RequestId(m.request), reason: m.reason }
            }
            Some(client_message::Message::Release(m)) => {
                SessionCommand::Release { session, request: RequestId(m.request) }
            }
            Some(client_message::Message::Heartbeat(_)) => SessionCommand::Heartbeat { session },
            Some(client_message::Message::GpuUse(m)) => {
                SessionCommand::GpuUse { session, used: Box::new(GpuUse::parse(&m)?) }
            }
            Some(client_message::Message::Goodbye(m)) => SessionCommand::ShutDown { session, reason: m.reason },
            Some(client_message::Message::Claim(_)) => return Err("it claimed twice in one session".to_owned()),
            Some(client_message::Message::RingReady(_)) => {
                return Err("it sent RingReady outside of its stream".to_owned());
            }
            // No rank waits for an invalid name.
            Some(client_message::Message::Abstain(m)) => match abstention(session, m) {
                Some(command) => command,
                None => return Ok(false),
            },
            // A message of a later protocol version: it was not negotiated, so it may be ignored.
            None => return Ok(false),
        };
        self.send(command).await;
        Ok(soon)
    }

    /// The rank of a session, which it gets once. A worker submits nothing before that; the driver ignores one that does.
    fn rank_of(&self, claimed: &Claimed) -> Rank {
        if let Some(rank) = claimed.rank.get() {
            return *rank;
        }
        match (self.access, self.segments.rank_of(&claimed.token)) {
            (Access::Socket { .. }, Some(rank)) => *claimed.rank.get_or_init(|| rank),
            _ => Rank(claimed.worker.0),
        }
    }

    async fn send(&self, command: SessionCommand) {
        // Without a driver the process is ending; its streams close by themselves.
        let _ = self.commands.send(command).await;
    }
}

/// The state of a session once its claim is accepted.
struct Claimed {
    session: SessionId,
    worker: WorkerNumber,
    /// Its rank, once it has one.
    rank: OnceLock<Rank>,
    token: SessionToken,
}

/// Waits for the ring's bell; forever without a ring.
async fn rung(ring: &mut Option<RingIn>) {
    match ring {
        Some(ring) => ring.rung().await,
        None => std::future::pending().await,
    }
}

/// Copies an inline input out of the buffer that its message was received in: a few bytes of a pending request would keep
/// all of the buffer. Messages in a ring have been copied already.
fn detached(mut message: v1::ClientMessage) -> v1::ClientMessage {
    if let Some(client_message::Message::Submit(submit)) = &mut message.message
        && let Some(v1::Place { place: Some(v1::place::Place::Inline(data)) }) = &mut submit.input
    {
        *data = Bytes::copy_from_slice(data);
    }
    message
}

/// Builds an abstention; `None` for an invalid name. An invalid group has no tensors that could continue.
fn abstention(session: SessionId, message: v1::Abstain) -> Option<SessionCommand> {
    let name = TensorName::new(message.name).ok()?;
    let group = message.group.and_then(|group| group_from(group).ok());
    Some(SessionCommand::Abstain { session, set: SetId(message.process_set), name, group, reason: message.reason })
}

/// Messages of one ring that are read before other sessions have their turn.
const AT_ONCE: usize = 64;
/// How long a stream may stay without a claim.
pub(super) const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);
