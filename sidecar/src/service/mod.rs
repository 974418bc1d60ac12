//! The gRPC service on rpc.sock: parses what workers say into checked types and hands it to the driver.
//!
//! Each session has one task here, which reads its stream. It decides nothing: the driver owns sessions.

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use anyhow::Context;
use ronde_rpc::convert::{Claim, Refused, Submission, group_from};
use ronde_rpc::v1::client_message::Message as ClientMessage;
use ronde_rpc::v1::ronde_server::{Ronde, RondeServer};
use ronde_rpc::{negotiate_protocol, v1};
use ronde_shm::SessionToken;
use ronde_transport::Identity;
use ronde_wire::{Group, Rank, RequestId, SetId, TensorName, limits};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use crate::admin::Snapshot;
use crate::runtime_dir::random_bytes;
use crate::sessions::{Outgoing, SessionId, WeakOutgoing};

/// What the service and the admin pages ask of the driver.
pub(crate) enum Command {
    /// A worker claims a rank.
    Claim(Box<ClaimRequest>),
    /// A worker submits a request; what cannot be parsed is answered and announced by the driver too.
    Submit {
        /// Whose.
        session: SessionId,
        /// What.
        submission: Box<Result<Submission, Refused>>,
    },
    /// A worker takes no part in what others may wait for.
    Abstain {
        /// Whose.
        session: SessionId,
        /// The process set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// The group that goes on without it.
        group: Option<Group>,
        /// Why.
        reason: String,
    },
    /// A fresh certificate for the links made from now on.
    Identity(Arc<Identity>),
    /// A worker no longer waits.
    Withdraw {
        /// Whose.
        session: SessionId,
        /// Which request.
        request: RequestId,
        /// Why.
        reason: String,
    },
    /// A result has been read.
    Release {
        /// Whose.
        session: SessionId,
        /// Which request's.
        request: RequestId,
    },
    /// A sign of life.
    Heartbeat {
        /// Whose.
        session: SessionId,
    },
    /// The session will end in order.
    Goodbye {
        /// Whose.
        session: SessionId,
        /// Why.
        reason: String,
    },
    /// The stream is over.
    Closed {
        /// Whose.
        session: SessionId,
        /// What was seen.
        reason: String,
    },
    /// For status and metrics.
    Snapshot(oneshot::Sender<Snapshot>),
}

/// A claim with everything that the driver needs to decide.
pub(crate) struct ClaimRequest {
    /// What the worker said.
    pub(crate) claim: Claim,
    /// The uid of its process, as the kernel says.
    pub(crate) uid: u32,
    /// The version that both speak.
    pub(crate) protocol: u32,
    /// A fresh token for the session.
    pub(crate) session_token: SessionToken,
    /// Where messages for the worker go.
    pub(crate) outgoing: Outgoing,
    /// The decision.
    pub(crate) reply: oneshot::Sender<Result<SessionId, Status>>,
}

/// The service.
pub(crate) struct Service {
    /// To the driver.
    pub(crate) commands: mpsc::Sender<Command>,
    /// What `Describe` answers.
    pub(crate) description: v1::Description,
    /// Who may claim.
    pub(crate) allowed_uids: BTreeSet<u32>,
}

impl Service {
    /// Serves on a socket until the task is dropped.
    ///
    /// # Errors
    /// When the socket cannot be bound, or the server fails.
    pub(crate) fn bind(
        self,
        socket: &Path,
    ) -> anyhow::Result<impl Future<Output = Result<(), tonic::transport::Error>> + use<>> {
        let listener = UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let server = RondeServer::new(self)
            .max_decoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES)
            .max_encoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES);
        Ok(tonic::transport::Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(STREAM_WINDOW_BYTES)
            .add_service(server)
            .serve_with_incoming(UnixListenerStream::new(listener)))
    }

    fn check_uid<T>(&self, request: &Request<T>) -> Result<u32, Status> {
        let info = request.extensions().get::<UdsConnectInfo>();
        let credentials = info.and_then(|info| info.peer_cred);
        let uid = credentials.map(|credentials| credentials.uid());
        match uid {
            Some(uid) if self.allowed_uids.contains(&uid) => Ok(uid),
            Some(uid) => Err(Status::permission_denied(format!(
                "uid {uid} may not use this sidecar; allowed are {:?}",
                self.allowed_uids
            ))),
            None => Err(Status::permission_denied("the system does not tell who connects")),
        }
    }
}

#[tonic::async_trait]
impl Ronde for Service {
    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Result<Response<v1::Description>, Status> {
        self.check_uid(&request)?;
        Ok(Response::new(self.description.clone()))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::ServerMessage, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::ClientMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let uid = self.check_uid(&request)?;
        let (outgoing, receiver) = mpsc::channel(OUTGOING_MAX);
        let job = self.description.job.clone();
        let reader = Reader { job, commands: self.commands.clone(), incoming: request.into_inner() };
        tokio::spawn(reader.run(uid, outgoing));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Reads one session's stream.
struct Reader {
    job: String,
    commands: mpsc::Sender<Command>,
    incoming: Streaming<v1::ClientMessage>,
}

impl Reader {
    async fn run(mut self, uid: u32, outgoing: Outgoing) {
        let claimed = match tokio::time::timeout(CLAIM_TIMEOUT, self.claim(uid, &outgoing)).await {
            Ok(claimed) => claimed,
            Err(_) => Err(Status::deadline_exceeded("no claim came; the first message of a session is a Claim")),
        };
        let (session, rank) = match claimed {
            Ok(claimed) => claimed,
            Err(status) => {
                tracing::warn!(uid, reason = status.message(), "a claim is refused");
                // A worker that does not wait for the answer does not need it.
                let _ = outgoing.send(Err(status)).await;
                return;
            }
        };
        // The session holds the only sender that counts: when the driver closes it, nobody reads on for it.
        let alive = outgoing.downgrade();
        drop(outgoing);
        let reason = self.read_all((session, rank), &alive).await;
        self.tell(Command::Closed { session, reason }).await;
    }

    async fn claim(&mut self, uid: u32, outgoing: &Outgoing) -> Result<(SessionId, Rank), Status> {
        let first = self.incoming.message().await?.and_then(|message| message.message);
        let Some(ClientMessage::Claim(claim)) = first else {
            return Err(Status::failed_precondition("the first message of a session is a Claim"));
        };
        let claim = Claim::parse(&claim).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let rank = claim.rank;
        if claim.job.as_str() != self.job {
            let reason =
                format!("this sidecar serves job {}, not {}; check RONDE_JOB and RONDE_SOCKET", self.job, claim.job);
            return Err(Status::failed_precondition(reason));
        }
        let (min, max) = claim.protocols;
        let protocol = negotiate_protocol(min, max).map_err(|error| Status::failed_precondition(error.to_string()))?;
        let token = random_bytes().map_err(|error| Status::internal(error.to_string()))?;
        let (reply, answer) = oneshot::channel();
        let request = ClaimRequest {
            claim,
            uid,
            protocol,
            session_token: SessionToken::from_bytes(token),
            outgoing: outgoing.clone(),
            reply,
        };
        self.tell(Command::Claim(Box::new(request))).await;
        let session = answer.await.map_err(|_| Status::unavailable("the sidecar is ending"))??;
        Ok((session, rank))
    }

    /// Reads until the stream ends; says how it ended.
    async fn read_all(&mut self, (session, rank): (SessionId, Rank), alive: &WeakOutgoing) -> String {
        while alive.upgrade().is_some() {
            let message = match self.incoming.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return "its process closed the session".to_owned(),
                Err(status) => return format!("its session broke ({})", status.message()),
            };
            let command = match message.message {
                Some(ClientMessage::Submit(submit)) => {
                    Command::Submit { session, submission: Box::new(Submission::parse(submit, rank)) }
                }
                Some(ClientMessage::Withdraw(m)) => {
                    Command::Withdraw { session, request: RequestId(m.request), reason: m.reason }
                }
                Some(ClientMessage::Release(m)) => Command::Release { session, request: RequestId(m.request) },
                Some(ClientMessage::Heartbeat(_)) => Command::Heartbeat { session },
                Some(ClientMessage::Goodbye(m)) => Command::Goodbye { session, reason: m.reason },
                Some(ClientMessage::Claim(_)) => return "it claimed twice in one session".to_owned(),
                // Nobody waits for a name that is none.
                Some(ClientMessage::Abstain(m)) => match abstention(session, m) {
                    Some(command) => command,
                    None => continue,
                },
                // A message of a later protocol version: it was not negotiated, so it may be ignored.
                None => continue,
            };
            self.tell(command).await;
        }
        "the sidecar ended its session".to_owned()
    }

    async fn tell(&self, command: Command) {
        // When the driver is gone the process is ending; its streams close by themselves.
        let _ = self.commands.send(command).await;
    }
}

/// `None` for a name that is none. A group that is none has no tensors that could go on.
fn abstention(session: SessionId, message: v1::Abstain) -> Option<Command> {
    let name = TensorName::new(message.name).ok()?;
    let group = message.group.and_then(|group| group_from(group).ok());
    Some(Command::Abstain { session, set: SetId(message.process_set), name, group, reason: message.reason })
}

/// Messages waiting for one worker: a completion for each pending request, and room for the rest.
const OUTGOING_MAX: usize = limits::PENDING_PER_SESSION_MAX + 1_024;
/// Names, shapes and framing around inline bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// HTTP/2 flow control for inline bytes; messages without them are small.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// How long a stream may stay without a claim.
const CLAIM_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
