//! The gRPC service on rpc.sock: parses what workers say into checked types and hands it to the driver.
//!
//! Each session has one task here, which reads its stream and its ring. It decides nothing: the driver owns sessions.

mod reader;
mod timeline;

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use ronde_rpc::convert::{Claim, Refused, Submission};
use ronde_rpc::v1;
use ronde_rpc::v1::ronde_server::{Ronde, RondeServer};
use ronde_shm::SessionToken;
use ronde_transport::Identity;
use ronde_wire::{Group, RequestId, SetId, TensorName, limits};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use crate::admin::Snapshot;
use crate::delivery::PART_BYTES;
use crate::ring::RingOut;
use crate::segments::Segments;
use crate::sessions::{Outgoing, SessionId};
use crate::timeline::{BATCHES_MAX, Batches, RecordingId};
use reader::Reader;
use ronde_bootstrap::messages::WorkerExited;

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
    /// Something is known of plugins that requests wait for.
    PluginsAnswered,
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
    /// A worker has attached a ring: what it is told from now on goes there.
    Ring {
        /// Whose.
        session: SessionId,
        /// The ring's outgoing direction.
        ring: Box<RingOut>,
    },
    /// A worker has made room in its ring.
    Room {
        /// Whose.
        session: SessionId,
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
    /// The process of a worker has ended.
    WorkerExited(WorkerExited),
    /// A worker wants to record what happens.
    Record(RecordRequest),
    /// A worker records no longer.
    EndRecording(RecordingId),
    /// For status and metrics.
    Snapshot(oneshot::Sender<Snapshot>),
}

/// A claim with everything that the driver needs to decide.
pub(crate) struct ClaimRequest {
    /// What the worker said.
    pub(crate) claim: Claim,
    /// How it came.
    pub(crate) way: Way,
    /// The version that both speak.
    pub(crate) protocol: u32,
    /// A fresh token for the session.
    pub(crate) session_token: SessionToken,
    /// Where messages for the worker go.
    pub(crate) outgoing: Outgoing,
    /// The decision.
    pub(crate) reply: oneshot::Sender<Result<SessionId, Status>>,
}

/// How a worker came to the sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Over rpc.sock; its process is of this uid, as the kernel says, and may share memory.
    Socket {
        /// The uid.
        uid: u32,
    },
    /// Over gRPC-Web: everything travels inside messages.
    Web,
}

impl Way {
    /// The uid of a process that may share memory with this one.
    pub(crate) fn uid(self) -> Option<u32> {
        if let Self::Socket { uid } = self { Some(uid) } else { None }
    }
}

/// What a worker says.
pub(crate) type Incoming = Pin<Box<dyn Stream<Item = Result<v1::ClientMessage, Status>> + Send + Sync>>;

/// What is needed to record for a worker.
pub(crate) struct RecordRequest {
    /// Of the session whose worker asks.
    pub(crate) session_token: SessionToken,
    /// Whether the coordinator's orders are marked.
    pub(crate) mark_cycles: bool,
    /// Where batches go.
    pub(crate) batches: Batches,
    /// The decision.
    pub(crate) reply: oneshot::Sender<Result<RecordingId, Status>>,
}

/// The service.
pub(crate) struct Service {
    /// To the driver.
    pub(crate) commands: mpsc::Sender<Command>,
    /// Where sessions attach their rings.
    segments: Segments,
    /// What `Describe` answers.
    pub(crate) description: v1::Description,
    /// Who may claim.
    allowed_uids: BTreeSet<u32>,
    /// How long a ring's next message is looked for before its bell is waited for.
    look: Duration,
}

impl Service {
    /// A service that serves no socket yet.
    ///
    /// `sidecars` is how many the job has. The thread looks only where there is no other one: an answer from elsewhere takes
    /// longer, and meanwhile the core belongs to the data threads (docs/adr/0015).
    pub(crate) fn new(
        (commands, segments): (mpsc::Sender<Command>, Segments),
        description: v1::Description,
        allowed_uids: BTreeSet<u32>,
        sidecars: usize,
    ) -> Self {
        let look = if sidecars == 1 { LOOK } else { Duration::ZERO };
        Self { commands, segments, description, allowed_uids, look }
    }

    /// Serves on a socket until the task is dropped.
    ///
    /// # Errors
    /// When the socket cannot be bound, or the server fails.
    pub(crate) fn bind(
        self: Arc<Self>,
        socket: &Path,
    ) -> anyhow::Result<impl Future<Output = Result<(), tonic::transport::Error>> + use<>> {
        let listener = UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let server = RondeServer::from_arc(self)
            .max_decoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES)
            .max_encoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES);
        Ok(tonic::transport::Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(STREAM_WINDOW_BYTES)
            .add_service(server)
            .serve_with_incoming(UnixListenerStream::new(listener)))
    }

    /// Reads a session in a task of its own; gives what its worker is told.
    pub(crate) fn attend(&self, way: Way, incoming: Incoming) -> mpsc::Receiver<Result<v1::ServerMessage, Status>> {
        let outgoing_max = if way == Way::Web { WEB_OUTGOING_MAX } else { OUTGOING_MAX };
        let (outgoing, receiver) = mpsc::channel(outgoing_max);
        let job = self.description.job.clone();
        let (commands, segments) = (self.commands.clone(), self.segments.clone());
        tokio::spawn(Reader { job, commands, segments, incoming, way, look: self.look }.run(outgoing));
        receiver
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
        let told = self.attend(Way::Socket { uid }, Box::pin(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(told))))
    }

    type TimelineStream = Pin<Box<dyn Stream<Item = Result<v1::TimelineBatch, Status>> + Send>>;

    async fn timeline(
        &self,
        request: Request<Streaming<v1::TimelineRequest>>,
    ) -> Result<Response<Self::TimelineStream>, Status> {
        self.check_uid(&request)?;
        let (batches, receiver) = mpsc::channel(BATCHES_MAX);
        tokio::spawn(timeline::serve(self.commands.clone(), request.into_inner(), batches));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// How long a ring's next message is looked for: a worker that calls again at once does so within half of it.
const LOOK: Duration = Duration::from_micros(50);
/// Messages waiting for one worker: a completion for each pending request, and room for the rest.
pub(crate) const OUTGOING_MAX: usize = limits::PENDING_PER_SESSION_MAX + 1_024;
/// The same for a worker over gRPC-Web, which may have fewer requests pending, each with a result in parts.
const WEB_OUTGOING_MAX: usize = limits::WEB_PENDING_MAX * (1 + limits::INLINE_BYTES_MAX / PART_BYTES) + 1_024;
/// Names, shapes and framing around inline bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// HTTP/2 flow control for inline bytes; messages without them are small.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
