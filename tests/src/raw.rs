//! A raw worker on `rpc.sock`: it sends any message, in any order, or does not read.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::ronde_client::RondeClient;
use ronde_rpc::v1::server_message;
use ronde_rpc::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, paths, ring, v1};
use ronde_shm::ring::{Pushed, RingEnd, Wait, WorkerRing};
use ronde_shm::{MemClient, MemClientConfig, SessionToken};
use ronde_wire::WorkerNumber;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use crate::cluster::PATIENCE;

/// A session whose messages the test writes.
#[derive(Debug)]
pub struct RawSession {
    directory: PathBuf,
    outgoing: mpsc::Sender<v1::ClientMessage>,
    received: Receiver<Result<server_message::Message, String>>,
    kept: Vec<server_message::Message>,
}

/// How a session behaves besides the messages of the test.
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    /// Whether it sends heartbeats.
    pub heartbeats: bool,
    /// Whether it reads its messages.
    pub reads: bool,
}

/// The options of a worker that follows the protocol.
pub const WELL_BEHAVED: SessionOptions = SessionOptions { heartbeats: true, reads: true };

impl RawSession {
    /// Opens a stream and sends this message first, if there is one.
    #[must_use]
    pub fn open(directory: &Path, first: Option<client_message::Message>, options: SessionOptions) -> Self {
        let (outgoing, messages) = mpsc::channel(MESSAGES_MAX);
        let (sender, received) = sync_channel(INBOX_MAX);
        if first.is_some() {
            // The channel is new: there is room.
            let _ = outgoing.try_send(v1::ClientMessage { message: first });
        }
        let (socket, beats) = (paths::rpc_socket(directory), outgoing.clone().downgrade());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a thread can have a runtime");
            runtime.block_on(async {
                let listening = receive(&socket, messages, &sender, options.reads);
                tokio::select! {
                    ended = listening => drop(sender.send(Err(ended))),
                    () = beat(beats), if options.heartbeats => {}
                }
            });
        });
        Self { directory: directory.to_owned(), outgoing, received, kept: Vec::new() }
    }

    /// Claims a rank with its token and waits for the answer.
    ///
    /// # Errors
    /// When the claim is refused.
    pub fn claim(directory: &Path, job: &str, rank: u32, options: SessionOptions) -> Result<(Self, v1::Claimed)> {
        let first = Some(client_message::Message::Claim(claim(directory, job, rank)?));
        let mut session = Self::open(directory, first, options);
        let claimed = session.await_message("the answer to its claim", |received| match received {
            server_message::Message::Claimed(claimed) => Some(claimed.clone()),
            _ => None,
        })?;
        Ok((session, claimed))
    }

    /// [`RawSession::claim`], again while the sidecar has not read the end of the rank's last session.
    ///
    /// # Errors
    /// When it is refused for another reason, or for this one too long.
    pub fn claim_when_free(
        directory: &Path,
        job: &str,
        rank: u32,
        options: SessionOptions,
    ) -> Result<(Self, v1::Claimed)> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Self::claim(directory, job, rank, options) {
                Err(error) if format!("{error:#}").contains("claimed by a live session") => {
                    ensure!(Instant::now() < deadline, "rank {rank} is not free within {PATIENCE:?}: {error:#}");
                    std::thread::sleep(CLAIM_PAUSE);
                }
                claimed => return claimed,
            }
        }
    }

    /// Waits until the epoch has begun.
    ///
    /// # Errors
    /// When it does not.
    pub fn await_epoch(&mut self) -> Result<()> {
        self.await_message("the epoch", |received| {
            matches!(received, server_message::Message::EpochBegan(_)).then_some(())
        })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// When the stream is over.
    pub fn send(&self, message: client_message::Message) -> Result<()> {
        self.outgoing.blocking_send(v1::ClientMessage { message: Some(message) }).context("the stream is over")
    }

    /// Waits for a message; others are kept for later waits.
    ///
    /// # Errors
    /// When the stream ends before, with its status, or none comes in time.
    pub fn await_message<T>(&mut self, what: &str, find: impl Fn(&server_message::Message) -> Option<T>) -> Result<T> {
        if let Some(index) = self.kept.iter().position(|received| find(received).is_some()) {
            return find(&self.kept.remove(index)).context("it was found a moment ago");
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.received.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Ok(received)) => match find(&received) {
                    Some(found) => return Ok(found),
                    None => self.keep(received),
                },
                Ok(Err(status)) => bail!("waited for {what}; the stream ended: {status}"),
                Err(RecvTimeoutError::Timeout) => bail!("waited {PATIENCE:?} for {what}; received {:?}", self.kept),
                Err(RecvTimeoutError::Disconnected) => bail!("waited for {what}; the stream is over"),
            }
        }
    }

    /// Waits for the failure of a request; returns its reason.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn await_failed(&mut self, request: u64) -> Result<v1::Failure> {
        self.await_message(&format!("the failure of request {request}"), |received| match received {
            server_message::Message::Failed(failed) if failed.request == request => failed.failure.clone(),
            _ => None,
        })
    }

    /// Waits until the stream is over; returns its status.
    ///
    /// # Errors
    /// When it is not in time.
    pub fn await_end(&mut self) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.received.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Ok(received)) => self.keep(received),
                Ok(Err(status)) => return Ok(status),
                Err(_) => bail!("waited {PATIENCE:?} for the end of the stream; received {:?}", self.kept),
            }
        }
    }

    /// Opens `mem.sock`.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn memory(&self) -> Result<MemClient> {
        let config = MemClientConfig { timeout: PATIENCE, result_bytes_max: 1 << 40 };
        Ok(MemClient::connect(&paths::mem_socket(&self.directory), config)?)
    }

    /// Attaches a ring and waits until the sidecar uses it.
    ///
    /// # Errors
    /// When it does not.
    pub fn take_ring(&mut self, claimed: &v1::Claimed) -> Result<RawRing> {
        let ring = WorkerRing::create(claimed.ring_bytes)?;
        let memory = File::from(ring.fd().try_clone_to_owned()?);
        let end = self.memory()?.ring(&session_token(claimed)?, ring)?;
        self.send(client_message::Message::RingReady(v1::RingReady {}))?;
        self.await_message("the ring", |received| {
            matches!(received, server_message::Message::RingTaken(_)).then_some(())
        })?;
        Ok(RawRing { memory, end, kept: Vec::new() })
    }

    fn keep(&mut self, received: server_message::Message) {
        if !matches!(received, server_message::Message::Alive(_)) {
            self.kept.push(received);
        }
    }
}

/// A ring in which the test writes every byte.
#[derive(Debug)]
pub struct RawRing {
    /// The memory.
    pub memory: File,
    /// The worker's end.
    pub end: RingEnd,
    kept: Vec<server_message::Message>,
}

impl RawRing {
    /// Writes a message and wakes the sidecar.
    ///
    /// # Errors
    /// When there is no room.
    pub fn send(&mut self, message: client_message::Message) -> Result<()> {
        self.write(message)?;
        self.end.producer.wake();
        Ok(())
    }

    /// Writes a message and wakes nobody.
    ///
    /// # Errors
    /// When there is no room.
    pub fn write(&mut self, message: client_message::Message) -> Result<()> {
        let mut bytes = Vec::new();
        ring::encode(&v1::ClientMessage { message: Some(message) }, &mut bytes);
        ensure!(self.end.producer.push(&bytes)? == Pushed::Done, "the ring is full");
        Ok(())
    }

    /// Waits for a message; others are kept for later waits.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn await_message<T>(&mut self, what: &str, find: impl Fn(&server_message::Message) -> Option<T>) -> Result<T> {
        if let Some(index) = self.kept.iter().position(|received| find(received).is_some()) {
            return find(&self.kept.remove(index)).context("it was found a moment ago");
        }
        let (deadline, mut bytes) = (Instant::now() + PATIENCE, Vec::new());
        while Instant::now() < deadline {
            if self.end.consumer.pop(&mut bytes)? {
                let message: v1::ServerMessage = ring::decode(&bytes)?;
                let received = message.message.context("the sidecar sends no empty messages")?;
                match find(&received) {
                    Some(found) => return Ok(found),
                    None => self.kept.push(received),
                }
            } else if self.end.consumer.arm(Wait::Futex)? {
                self.end.consumer.sleep(deadline.saturating_duration_since(Instant::now()));
            }
        }
        bail!("waited {PATIENCE:?} for {what}; received {:?}", self.kept)
    }
}

/// Builds a valid claim of a rank.
///
/// # Errors
/// When its token cannot be read.
pub fn claim(directory: &Path, job: &str, rank: u32) -> Result<v1::Claim> {
    let token = std::fs::read(paths::token_file(directory, WorkerNumber(rank)))?;
    Ok(v1::Claim {
        job: job.to_owned(),
        worker: rank,
        token: token.into(),
        protocol_min: PROTOCOL_VERSION_MIN,
        protocol_max: PROTOCOL_VERSION,
        client: "raw".to_owned(),
        pid: std::process::id(),
    })
}

/// The token of a session, for `mem.sock`.
///
/// # Errors
/// When it is malformed.
pub fn session_token(claimed: &v1::Claimed) -> Result<SessionToken> {
    let bytes: [u8; 16] = claimed.session_token[..].try_into().context("a session token has 16 bytes")?;
    ensure!(bytes != [0; 16], "a session token is drawn at random");
    Ok(SessionToken::from_bytes(bytes))
}

async fn receive(
    socket: &Path,
    messages: mpsc::Receiver<v1::ClientMessage>,
    sender: &SyncSender<Result<server_message::Message, String>>,
    reads: bool,
) -> String {
    let endpoint = match Endpoint::try_from(format!("unix://{}", socket.display())) {
        // h2 closes a connection on which more small messages wait to be read than fit into half of its window. One that is
        // not read is left to the sidecar, which has filled the window of the stream before that.
        Ok(endpoint) => {
            endpoint.initial_connection_window_size(CONNECTION_WINDOW).initial_stream_window_size(STREAM_WINDOW)
        }
        Err(error) => return error.to_string(),
    };
    let channel = match endpoint.connect().await {
        Ok(channel) => channel,
        Err(error) => return error.to_string(),
    };
    let mut client = RondeClient::new(channel).max_encoding_message_size(usize::MAX);
    let mut incoming = match client.session(ReceiverStream::new(messages)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return status.message().to_owned(),
    };
    loop {
        match incoming.message().await {
            Ok(Some(message)) => {
                match sender.try_send(Ok(message.message.expect("the sidecar sends no empty messages"))) {
                    Ok(()) => {}
                    Err(TrySendError::Full(_)) => return "the test does not read its messages".to_owned(),
                    Err(TrySendError::Disconnected(_)) => return "the test has ended".to_owned(),
                }
            }
            Ok(None) => return "the sidecar ended the stream".to_owned(),
            Err(status) => return status.message().to_owned(),
        }
        if !reads {
            // The stream stays open, but is not read.
            return std::future::pending().await;
        }
    }
}

/// Sends heartbeats for as long as the test holds the session.
async fn beat(outgoing: mpsc::WeakSender<v1::ClientMessage>) {
    let mut interval = tokio::time::interval(Duration::from_millis(ronde_wire::limits::SESSION_HEARTBEAT_MS));
    loop {
        interval.tick().await;
        let Some(outgoing) = outgoing.upgrade() else { return };
        // A full queue contains enough signs of life.
        let _ = outgoing
            .try_send(v1::ClientMessage { message: Some(client_message::Message::Heartbeat(v1::Heartbeat {})) });
    }
}

/// Half of it has room for the overhead of all messages that fill the other window: 256 bytes each, of 7.
const CONNECTION_WINDOW: u32 = 16 << 20;
const STREAM_WINDOW: u32 = 64 << 10;
const MESSAGES_MAX: usize = 1_024;
const CLAIM_PAUSE: Duration = Duration::from_millis(5);
const INBOX_MAX: usize = 262_144;

/// Requests a timeline with this token, and returns the sidecar's reply.
///
/// # Errors
/// The status of a refusal, or another error.
pub fn ask_for_timeline(directory: &Path, session_token: &[u8]) -> Result<v1::TimelineBatch> {
    let endpoint = Endpoint::try_from(format!("unix://{}", paths::rpc_socket(directory).display()))?;
    let request = v1::TimelineRequest { session_token: session_token.to_vec().into(), mark_cycles: false };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut client = RondeClient::new(endpoint.connect().await?);
        let mut incoming = client.timeline(tokio_stream::iter([request])).await?.into_inner();
        let first = tokio::time::timeout(PATIENCE, incoming.message()).await.context("no answer arrived")??;
        first.context("the sidecar ended it without an answer")
    })
}
