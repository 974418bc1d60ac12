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
use ronde_rpc::v1::ronde_server::{Ronde, RondeServer};
use ronde_rpc::{paths, v1};
use ronde_wire::limits;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::session::command::{Access, SessionCommand};
use crate::session::gate::{self, AcceptGate, Peer, Place};
use crate::session::memory_service::{self, StreamAccess};
use crate::session::outgoing::{OutgoingStream, PARTS_MAX, outgoing};
use crate::session::segments::Segments;
use crate::session::worker_uids::WorkerUids;
use crate::streams::StreamGate;
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
    /// Admits streams.
    streams: StreamGate,
    /// The answer to `Describe`.
    pub(crate) description: v1::Description,
    /// The users of workers.
    uids: Arc<WorkerUids>,
    /// Admits connections to rpc.sock.
    gate: AcceptGate,
    /// The same for mem.sock.
    memory_gate: AcceptGate,
    /// How long a reader spins for a ring's next message before it parks on the bell.
    spin: Duration,
}

impl Service {
    /// Creates a service that serves no socket yet.
    ///
    /// `sidecars` is their number in the job. Readers spin only in a job of one sidecar: an answer from another sidecar
    /// takes longer, and meanwhile the data threads need the core (docs/adr/0015).
    pub(crate) fn new(
        (commands, segments, streams): (mpsc::Sender<SessionCommand>, Segments, StreamGate),
        description: v1::Description,
        uids: WorkerUids,
        sidecars: usize,
    ) -> Self {
        let (spin, uids) = (if sidecars == 1 { SPIN } else { Duration::ZERO }, Arc::new(uids));
        let gate = |socket| AcceptGate::new(socket, uids.all().clone());
        let (gate, memory_gate) = (gate("rpc.sock"), gate("mem.sock"));
        Self { commands, segments, streams, description, uids, gate, memory_gate, spin }
    }

    /// Serves rpc.sock in this directory until the task is dropped, and mem.sock for as long as the process runs.
    ///
    /// # Errors
    /// When a socket cannot be bound, or the server fails.
    pub(crate) fn bind(
        self: Arc<Self>,
        directory: &Path,
    ) -> anyhow::Result<impl Future<Output = Result<(), tonic::transport::Error>> + use<>> {
        let socket = paths::rpc_socket(directory);
        let streams = StreamAccess { gate: self.streams.clone(), uids: Arc::clone(&self.uids) };
        let served = (self.segments.clone(), streams);
        memory_service::serve(&paths::mem_socket(directory), served, self.memory_gate.clone())?;
        let listener = UnixListener::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let (admitted, connections) = mpsc::channel(1);
        tokio::spawn(gate::accept(listener, self.gate.clone(), admitted));
        tokio::spawn(gate::keep_deadlines([self.gate.clone(), self.memory_gate.clone()]));
        let server = RondeServer::from_arc(self)
            .max_decoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES)
            .max_encoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES);
        Ok(tonic::transport::Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(STREAM_WINDOW_BYTES)
            .max_concurrent_streams(STREAMS_MAX)
            .add_service(server)
            .serve_with_incoming(ReceiverStream::new(connections)))
    }

    /// Spawns a task that reads a session; returns the stream of messages for its worker. `place` is that of its
    /// connection to rpc.sock.
    pub(crate) fn open_session(&self, access: Access, incoming: Incoming, place: Option<Arc<Place>>) -> OutgoingStream {
        let (outgoing, stream) = outgoing(if access == Access::Web { WEB_OUTGOING_MAX } else { OUTGOING_MAX });
        let job = self.description.job.clone();
        let (commands, segments, uids) = (self.commands.clone(), self.segments.clone(), Arc::clone(&self.uids));
        tokio::spawn(Reader { job, commands, segments, uids, incoming, access, place, spin: self.spin }.run(outgoing));
        stream
    }

    /// Returns the place of the connection that a call came over, if its user may call.
    fn check_peer<T>(&self, request: &Request<T>) -> Result<Arc<Place>, Status> {
        match request.extensions().get::<Peer>() {
            Some(Peer(place)) => {
                self.uids.check(place.uid()).map(|()| Arc::clone(place)).map_err(Status::permission_denied)
            }
            None => Err(Status::permission_denied("the call did not come over rpc.sock")),
        }
    }
}

#[tonic::async_trait]
impl Ronde for Service {
    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Result<Response<v1::Description>, Status> {
        self.check_peer(&request)?;
        Ok(Response::new(self.description.clone()))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::ServerMessage, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::ClientMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let place = self.check_peer(&request)?;
        let access = Access::Socket { uid: place.uid() };
        let outgoing = self.open_session(access, Box::pin(request.into_inner()), Some(place));
        Ok(Response::new(Box::pin(outgoing)))
    }

    type TimelineStream = Pin<Box<dyn Stream<Item = Result<v1::TimelineBatch, Status>> + Send>>;

    async fn timeline(
        &self,
        request: Request<Streaming<v1::TimelineRequest>>,
    ) -> Result<Response<Self::TimelineStream>, Status> {
        let place = self.check_peer(&request)?;
        let (batches, receiver) = mpsc::channel(BATCHES_MAX);
        tokio::spawn(timeline::serve(self.commands.clone(), request.into_inner(), batches, place));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// How long a reader spins for a ring's next message: a worker that calls again immediately does so in half of it.
const SPIN: Duration = Duration::from_micros(50);
/// Messages queued for one worker: a completion for each pending request, and room for the rest.
pub(crate) const OUTGOING_MAX: usize = limits::PENDING_PER_SESSION_MAX + 1_024;
/// The same over gRPC-Web, where fewer requests may be pending, and parts of results travel between.
const WEB_OUTGOING_MAX: usize = limits::WEB_PENDING_MAX + PARTS_MAX + 1_024;
/// Calls of one connection at a time: a session, a recording and a few questions.
const STREAMS_MAX: u32 = 8;
/// Names, shapes and framing around inline bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// HTTP/2 flow control for inline bytes; messages without them are small.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
