//! The gRPC service on rpc.sock: parses workers' messages into checked types and passes them to the driver.
//!
//! Each session has one task here, which reads its stream and its ring. It decides nothing: the driver owns sessions.

mod reader;
mod timeline;

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use ronde_rpc::v1;
use ronde_rpc::v1::ronde_server::{Ronde, RondeServer};
use ronde_wire::limits;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use crate::session::command::{Access, SessionCommand};
use crate::session::segments::Segments;
use crate::session::worker_uids::WorkerUids;
use crate::timeline::BATCHES_MAX;
use reader::Reader;

/// A worker's stream of messages.
pub(crate) type Incoming = Pin<Box<dyn Stream<Item = Result<v1::ClientMessage, Status>> + Send + Sync>>;

/// The service.
pub(crate) struct Service {
    /// The channel to the driver.
    commands: mpsc::Sender<SessionCommand>,
    /// The table to which sessions attach their rings.
    segments: Segments,
    /// The answer to `Describe`.
    pub(crate) description: v1::Description,
    /// The users of workers.
    uids: Arc<WorkerUids>,
    /// How long a reader spins for a ring's next message before it parks on the bell.
    spin: Duration,
}

impl Service {
    /// Creates a service that serves no socket yet.
    ///
    /// `sidecars` is their number in the job. Readers spin only in a job of one sidecar: an answer from another sidecar
    /// takes longer, and meanwhile the data threads need the core (docs/adr/0015).
    pub(crate) fn new(
        (commands, segments): (mpsc::Sender<SessionCommand>, Segments),
        description: v1::Description,
        uids: WorkerUids,
        sidecars: usize,
    ) -> Self {
        let spin = if sidecars == 1 { SPIN } else { Duration::ZERO };
        Self { commands, segments, description, uids: Arc::new(uids), spin }
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

    /// Spawns a task that reads a session; returns the stream of messages for its worker.
    pub(crate) fn open_session(
        &self,
        access: Access,
        incoming: Incoming,
    ) -> mpsc::Receiver<Result<v1::ServerMessage, Status>> {
        let outgoing_max = if access == Access::Web { WEB_OUTGOING_MAX } else { OUTGOING_MAX };
        let (outgoing, receiver) = mpsc::channel(outgoing_max);
        let job = self.description.job.clone();
        let (commands, segments, uids) = (self.commands.clone(), self.segments.clone(), Arc::clone(&self.uids));
        tokio::spawn(Reader { job, commands, segments, uids, incoming, access, spin: self.spin }.run(outgoing));
        receiver
    }

    fn check_uid<T>(&self, request: &Request<T>) -> Result<u32, Status> {
        let info = request.extensions().get::<UdsConnectInfo>();
        let credentials = info.and_then(|info| info.peer_cred);
        let uid = credentials.map(|credentials| credentials.uid());
        match uid {
            Some(uid) => self.uids.check(uid).map(|()| uid).map_err(Status::permission_denied),
            None => Err(Status::permission_denied("the system does not report the uid of the worker")),
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
        let outgoing = self.open_session(Access::Socket { uid }, Box::pin(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
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

/// How long a reader spins for a ring's next message: a worker that calls again immediately does so in half of it.
const SPIN: Duration = Duration::from_micros(50);
/// Messages queued for one worker: a completion for each pending request, and room for the rest.
pub(crate) const OUTGOING_MAX: usize = limits::PENDING_PER_SESSION_MAX + 1_024;
/// The same over gRPC-Web, where fewer requests may be pending, each with a result in parts.
const WEB_OUTGOING_MAX: usize = limits::WEB_PENDING_MAX * (1 + limits::INLINE_BYTES_MAX / PART_BYTES) + 1_024;
/// Names, shapes and framing around inline bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// HTTP/2 flow control for inline bytes; messages without them are small.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// Bytes of one part of an inline result: the most that the control thread copies at once.
pub(crate) const PART_BYTES: usize = 64 << 10;
