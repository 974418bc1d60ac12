//! A fake sidecar of one rank: it serves the contract over real sockets in a temporary directory, and echoes tensors.
//!
//! Its behaviour depends on the name of a request, so that tests can choose it: see [`Server::submit`].

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ronde::{Cause, Failure, JobName, Options, Rank};
use ronde_rpc::convert::TOKEN_BYTES;
use ronde_rpc::v1::ronde_server::{Ronde, RondeServer};
use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{Claim, Claimed, Completion, EpochView, OutputPlace, Place, Submission, paths, ring, v1};
use ronde_shm::ring::{Bell, Consumer, PeerRing, Producer, Pushed, RingEnd, Wait};
use ronde_shm::{
    MemHost, OwnedSegment, PciAddress, SegmentId, ServeOutcome, SessionToken, Share, WorkerSegment, serve_one,
};
use ronde_wire::{Collective, Detail, Epoch, PluginCall, RequestId, Seq, SetId};
use tokio::io::AsyncReadExt;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// A fake sidecar; it dies when dropped.
pub(crate) struct Fake {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) log: Arc<Mutex<Vec<String>>>,
    is_silent: Arc<AtomicBool>,
    server: Option<tokio::runtime::Runtime>,
}

/// The settings of a fake sidecar.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) arena_bytes_max: u64,
    pub(crate) pending_max: u32,
    /// The number of ranks, of which the client is the first.
    pub(crate) size: u32,
    /// Whether the epoch begins.
    pub(crate) begins: bool,
    pub(crate) peer_timeout_ms: u32,
    /// Whether it supports rings.
    pub(crate) rings: bool,
    /// Requests with this word in their name are never answered.
    pub(crate) never: &'static str,
    /// How many segments are exchanged over a connection before the sidecar closes it.
    pub(crate) exchanges_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            arena_bytes_max: 64 << 20,
            pending_max: 1_000,
            size: 1,
            begins: true,
            peer_timeout_ms: 60_000,
            rings: true,
            never: "never",
            exchanges_max: usize::MAX,
        }
    }
}

impl Fake {
    pub(crate) fn start(settings: Settings) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let server = server.expect("a runtime");
        std::fs::write(paths::token_file(directory.path(), ronde_wire::WorkerNumber(RANK.0)), [7; TOKEN_BYTES])
            .expect("a token file");
        let shared = Arc::new(Shared::default());
        let (log, is_silent) = (Arc::clone(&shared.log), Arc::clone(&shared.is_silent));
        serve_memory(directory.path(), Arc::clone(&shared), settings.exchanges_max);
        let socket = paths::rpc_socket(directory.path());
        server.block_on(async {
            let listener = UnixListener::bind(socket).expect("a socket");
            let service = RondeServer::new(Service { shared, settings });
            tokio::spawn(
                tonic::transport::Server::builder()
                    .add_service(service)
                    .serve_with_incoming(UnixListenerStream::new(listener)),
            );
        });
        Self { directory, log, is_silent, server: Some(server) }
    }

    pub(crate) fn options(&self) -> Options {
        let job = JobName::new("test").expect("a name");
        let mut options = Options::new(self.directory.path(), job, RANK);
        options.connect_timeout = Duration::from_secs(20);
        options
    }

    /// Answers no heartbeat from now on.
    pub(crate) fn fall_silent(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    /// Stops the sidecar abruptly.
    pub(crate) fn die(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }

    /// The messages that the sidecar has received, one or two words for each.
    pub(crate) fn received(&self) -> Vec<String> {
        self.log.lock().expect("the log").clone()
    }

    /// Waits until it has received a message; fails after 60 s.
    pub(crate) fn wait_for(&self, word: &str) {
        self.wait_until(word, |received| received.iter().any(|received| received == word));
    }

    /// Waits until it has received what is asked for; fails after 60 s.
    pub(crate) fn wait_until(&self, what: &str, is_received: impl Fn(&[String]) -> bool) {
        let start = Instant::now();
        while !is_received(&self.received()) {
            assert!(start.elapsed() < PATIENCE, "{what} has not been received, but {:?}", self.received());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.die();
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const RANK: Rank = Rank(0);
const SESSION_TOKEN: [u8; 16] = [5; 16];
/// The segment of all results, which is used as a ring.
const RESULT_SEGMENT: u32 = 9;
const RESULT_BYTES: usize = 32 << 20;
const RING_BYTES: u64 = 64 << 10;

#[derive(Default)]
struct Shared {
    inputs: Mutex<HashMap<u32, WorkerSegment>>,
    results: Mutex<Results>,
    ring: Mutex<Option<RingEnd>>,
    log: Arc<Mutex<Vec<String>>>,
    is_silent: Arc<AtomicBool>,
}

#[derive(Default)]
struct Results {
    segment: Option<Arc<OwnedSegment>>,
    used: u64,
}

impl Shared {
    fn note(&self, word: impl Into<String>) {
        self.log.lock().expect("the log").push(word.into());
    }

    fn result_segment(&self) -> Arc<OwnedSegment> {
        let mut results = self.results.lock().expect("results");
        let make = || Arc::new(OwnedSegment::create("fake", RESULT_BYTES, Share::ReadOnlyForOthers).expect("memory"));
        Arc::clone(results.segment.get_or_insert_with(make))
    }

    fn read(&self, place: &Place) -> Vec<u8> {
        match place {
            Place::Arena { segment, offset, bytes } => {
                let inputs = self.inputs.lock().expect("inputs");
                let mut data = vec![0; usize::try_from(*bytes).expect("small")];
                inputs[segment].copy_to(*offset, &mut data).expect("an attached segment");
                data
            }
            Place::Inline(data) => data.to_vec(),
            // It has no GPUs.
            Place::None | Place::Device { .. } => Vec::new(),
        }
    }

    fn write_output(&self, output: OutputPlace, data: &[u8]) {
        let inputs = self.inputs.lock().expect("inputs");
        inputs[&output.segment].copy_from(output.offset, data).expect("an attached segment");
    }

    fn write(&self, data: &[u8]) -> Place {
        let segment = self.result_segment();
        let offset = {
            let mut results = self.results.lock().expect("results");
            let offset = if results.used + data.len() as u64 > RESULT_BYTES as u64 { 0 } else { results.used };
            results.used = offset + data.len() as u64;
            offset
        };
        segment.copy_from(offset, data).expect("room");
        Place::Arena { segment: RESULT_SEGMENT, offset, bytes: data.len() as u64 }
    }
}

fn serve_memory(directory: &Path, shared: Arc<Shared>, exchanges_max: usize) {
    let socket: PathBuf = paths::mem_socket(directory);
    let listener = StdUnixListener::bind(socket).expect("a socket");
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let mut host = Host(Arc::clone(&shared));
            std::thread::spawn(move || {
                let mut exchanges = 0;
                while exchanges < exchanges_max {
                    match serve_one(&stream, &mut host) {
                        Ok(ServeOutcome::Granted(_)) => exchanges += 1,
                        Ok(ServeOutcome::Refused { .. } | ServeOutcome::Idle) => {}
                        _ => break,
                    }
                }
            });
        }
    });
}

struct Host(Arc<Shared>);

impl MemHost for Host {
    fn reserve(&mut self, token: &SessionToken, _: SegmentId, _: u64) -> Result<(), String> {
        if token.to_bytes() == SESSION_TOKEN { Ok(()) } else { Err("unknown token".to_owned()) }
    }

    fn release(&mut self, _: &SessionToken, _: SegmentId) {}

    fn attach(&mut self, _: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String> {
        self.0.inputs.lock().expect("inputs").insert(segment.0, mapped);
        Ok(())
    }

    fn result(&mut self, _: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String> {
        if segment.0 == RESULT_SEGMENT { Ok(self.0.result_segment()) } else { Err("no such segment".to_owned()) }
    }

    fn reserve_ring(&mut self, token: &SessionToken, _: u64) -> Result<(), String> {
        if token.to_bytes() == SESSION_TOKEN { Ok(()) } else { Err("unknown token".to_owned()) }
    }

    fn release_ring(&mut self, _: &SessionToken) {}

    fn ring(&mut self, _: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String> {
        let bell = Bell::over(bell).map_err(|error| error.to_string())?;
        *self.0.ring.lock().expect("the ring") = Some(ring.into_end(bell));
        Ok(())
    }

    fn device(&mut self, _: &SessionToken, _: SegmentId, _: (u64, PciAddress), _: OwnedFd) -> Result<(), String> {
        Err("no GPUs".to_owned())
    }
}

struct Service {
    shared: Arc<Shared>,
    settings: Settings,
}

#[tonic::async_trait]
impl Ronde for Service {
    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<v1::Description>, Status> {
        Ok(Response::new(v1::Description::default()))
    }

    type TimelineStream = Pin<Box<dyn Stream<Item = Result<v1::TimelineBatch, Status>> + Send>>;

    async fn timeline(
        &self,
        _: Request<Streaming<v1::TimelineRequest>>,
    ) -> Result<Response<Self::TimelineStream>, Status> {
        Err(Status::unimplemented("this sidecar records nothing"))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::ServerMessage, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::ClientMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (outgoing, receiver) = mpsc::channel(10_000);
        let mut server = Server {
            shared: Arc::clone(&self.shared),
            settings: self.settings.clone(),
            outgoing,
            held: Vec::new(),
            epoch: 1,
            ring: None,
        };
        let mut incoming = request.into_inner();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    message = incoming.message() => match message {
                        Ok(Some(message)) => server.receive_if_any(message).await,
                        Ok(None) | Err(_) => break,
                    },
                    () = rung(server.ring.as_mut()) => {}
                }
                server.read_ring().await;
            }
            server.read_ring().await;
            server.shared.note("closed");
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// One session.
struct Server {
    shared: Arc<Shared>,
    settings: Settings,
    outgoing: mpsc::Sender<Result<v1::ServerMessage, Status>>,
    /// Submissions that are answered later.
    held: Vec<Submission>,
    epoch: u64,
    ring: Option<OpenRing>,
}

/// A ring in use.
struct OpenRing {
    producer: Producer,
    consumer: Consumer,
    listening: tokio::net::UnixStream,
}

/// Describes the plugin of a request: its parameters, the reduction and the codec.
fn plugin_text(plugin: &PluginCall, what: &ronde_wire::Request) -> String {
    let given: Vec<String> = plugin.parameters.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    let op = what.collective.reduce_op().map_or("nothing", |op| op.name());
    format!("plugin {}{} for {op}, codec {}", plugin.name, given.concat(), what.codec)
}

async fn rung(ring: Option<&mut OpenRing>) {
    let Some(ring) = ring else { return std::future::pending().await };
    if !matches!(ring.listening.read(&mut [0; 64]).await, Ok(1..)) {
        // The end of the stream follows.
        std::future::pending::<()>().await;
    }
}

impl Server {
    fn open_ring(&mut self) {
        let ring = self.shared.ring.lock().expect("the ring").take();
        let RingEnd { producer, consumer, bell } = ring.expect("attached before RingReady");
        let listening = bell.listen().expect("a descriptor");
        let listening = tokio::net::UnixStream::from_std(listening).expect("a runtime");
        self.ring = Some(OpenRing { producer, consumer, listening });
        self.shared.note("ring");
    }

    async fn read_ring(&mut self) {
        let mut bytes = Vec::new();
        while let Some(ring) = &mut self.ring {
            if ring.consumer.pop(&mut bytes).expect("the client keeps the ring in order") {
                self.receive_if_any(ring::decode(&bytes).expect("a message")).await;
            } else if ring.consumer.arm(Wait::Bell).expect("in order") {
                return;
            }
        }
    }

    async fn receive_if_any(&mut self, message: v1::ClientMessage) {
        if let Some(message) = message.message {
            self.receive(message).await;
        }
    }

    async fn receive(&mut self, message: client_message::Message) {
        match message {
            client_message::Message::Claim(claim) => self.claim(&claim).await,
            client_message::Message::Submit(message) => {
                let submission = Submission::parse(message, RANK).expect("the client submits nothing that is refused");
                self.shared.note(format!("submit {}", submission.what.name));
                if let Some(plugin) = &submission.plugin {
                    self.shared.note(plugin_text(plugin, &submission.what));
                }
                self.submit(submission).await;
            }
            client_message::Message::Withdraw(message) => {
                self.shared.note("withdraw");
                self.fail(RequestId(message.request), Failure::new(Cause::Refused, "withdrawn")).await;
            }
            client_message::Message::Release(_) => self.shared.note("release"),
            client_message::Message::Abstain(message) => {
                let group = message.group.map(|group| format!(" of {} of {}", group.size, group.name));
                let (set, name) = (message.process_set, message.name);
                self.shared.note(format!("abstain {set} {name}{}", group.unwrap_or_default()));
            }
            client_message::Message::Heartbeat(_) => {
                self.shared.note("heartbeat");
                if !self.shared.is_silent.load(Ordering::Relaxed) {
                    self.send_on_stream(server_message::Message::Alive(v1::Alive {})).await;
                }
            }
            client_message::Message::Goodbye(_) => self.shared.note("goodbye"),
            client_message::Message::GpuUse(_) => self.shared.note("GPU use"),
            client_message::Message::RingReady(_) => {
                self.send(server_message::Message::RingTaken(v1::RingTaken {})).await;
                self.open_ring();
            }
        }
    }

    async fn claim(&mut self, message: &v1::Claim) {
        let claim = Claim::parse(message).expect("a claim in order");
        if claim.token.as_bytes() != [7; TOKEN_BYTES] {
            // The client may have gone already.
            let _ = self.outgoing.send(Err(Status::permission_denied("the token does not belong to rank 0"))).await;
            return;
        }
        self.shared.note("claim");
        let claimed = Claimed {
            session_token: SESSION_TOKEN,
            protocol: 1,
            heartbeat_ms: 10,
            peer_timeout_ms: self.settings.peer_timeout_ms,
            arena_bytes_max: self.settings.arena_bytes_max,
            inline_bytes_max: 1 << 20,
            pending_max: self.settings.pending_max,
            ring_bytes: if self.settings.rings { RING_BYTES } else { 0 },
            device_bytes_max: 0,
        };
        self.send(server_message::Message::Claimed(claimed.into_message())).await;
        if self.settings.begins {
            let view = EpochView {
                epoch: Epoch(self.epoch),
                rank: RANK,
                size: self.settings.size,
                local_rank: 0,
                local_size: 1,
                cross_rank: 0,
                cross_size: self.settings.size,
                membership: 1,
                homogeneous: true,
            };
            self.send(server_message::Message::EpochBegan(view.into_message())).await;
        } else {
            let text = "waiting for rank 3 of sidecar 1".to_owned();
            self.send(server_message::Message::Notice(v1::Notice { text, ..Default::default() })).await;
        }
    }

    /// `hold`: answers when `flush` comes, last one first. [`Settings::never`]: does not answer. `mismatch`: fails. `end`: ends the epoch.
    /// `short`: answers with too few bytes. All others: echoes.
    async fn submit(&mut self, submission: Submission) {
        let name = submission.what.name.as_str().to_owned();
        let word = |word: &str| name.contains(word);
        if word("hold") {
            self.held.push(submission);
        } else if word(self.settings.never) {
            // Stays pending.
        } else if word("flush") {
            while let Some(held) = self.held.pop() {
                self.complete(held).await;
            }
            self.complete(submission).await;
        } else if word("mismatch") {
            let failure = Failure::new(Cause::Mismatch, "rank 1 has shape [2]").with_rank(Rank(1));
            self.fail(submission.request, failure.with_tensor(submission.what.name)).await;
        } else if word("end") {
            let failure = Failure::new(Cause::RankLost, "rank 2 was killed").with_rank(Rank(2));
            self.fail(submission.request, failure.clone()).await;
            let ended = v1::EpochEnded { epoch: self.epoch, failure: Some((&failure).into()) };
            self.send(server_message::Message::EpochEnded(ended)).await;
        } else if word("short") {
            let result = self.shared.write(&[1]);
            self.finish(submission, result).await;
        } else {
            self.complete(submission).await;
        }
    }

    async fn complete(&mut self, submission: Submission) {
        let data = self.shared.read(&submission.place);
        if let Some(output) = submission.output.filter(|output| output.bytes == data.len() as u64) {
            self.shared.write_output(output, &data);
            return self.finish_in(submission, Place::None, true).await;
        }
        let result = match submission.place {
            Place::Arena { .. } => self.shared.write(&data),
            Place::None | Place::Device { .. } => Place::None,
            Place::Inline(_) => {
                for part in data.chunks(100_000) {
                    let part = v1::ResultPart { request: submission.request.0, data: part.to_vec().into() };
                    self.send(server_message::Message::ResultPart(part)).await;
                }
                Place::None
            }
        };
        self.finish(submission, result).await;
    }

    async fn finish(&mut self, submission: Submission, result: Place) {
        self.finish_in(submission, result, false).await;
    }

    async fn finish_in(&mut self, submission: Submission, result: Place, in_output: bool) {
        let (request, epoch, seq) = (submission.request, Epoch(self.epoch), Seq(1));
        let (dtype, shape) = (submission.what.dtype, submission.what.shape);
        let detail = match submission.what.collective {
            Collective::AllToAll { splits } => Detail::Splits(splits),
            Collective::Join => Detail::LastJoined(RANK),
            Collective::AddSet { .. } | Collective::AddSetOfMembers { .. } => Detail::Set(SetId(7)),
            Collective::RemoveSet { set: SetId(7) } => Detail::Set(SetId(7)),
            _ => Detail::None,
        };
        let completion = Completion { request, epoch, seq, dtype, shape, result, in_output, detail };
        self.send(server_message::Message::Completed(completion.into_message())).await;
    }

    async fn fail(&mut self, request: RequestId, failure: Failure) {
        self.send(server_message::Message::Failed(v1::Failed { request: request.0, failure: Some((&failure).into()) }))
            .await;
    }

    /// Sends over the ring, if there is one, and waits for room.
    async fn send(&mut self, message: server_message::Message) {
        let Some(ring) = &mut self.ring else { return self.send_on_stream(message).await };
        let mut bytes = Vec::new();
        ring::encode(&v1::ServerMessage { message: Some(message) }, &mut bytes);
        while ring.producer.push(&bytes).expect("the client keeps the ring in order") == Pushed::Full {
            tokio::task::yield_now().await;
        }
        ring.producer.wake();
    }

    async fn send_on_stream(&mut self, message: server_message::Message) {
        // The client may have gone already.
        let _ = self.outgoing.send(Ok(v1::ServerMessage { message: Some(message) })).await;
    }
}
