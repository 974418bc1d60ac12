//! Connects to the sidecar: the Unix socket, the gRPC channel, the claim of the rank, and the ring.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use ronde_rpc::v1::ronde_client::RondeClient;
use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{Claim, Claimed, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, RankToken, paths, v1};
use ronde_shm::ring::WorkerRing;
use ronde_shm::{ForkSafe, MemClient, MemClientConfig, SessionToken};
use ronde_wire::{WorkerNumber, limits};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::Stream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Streaming};
use tower::service_fn;

use crate::error::{Error, describe};
use crate::memory::EXCHANGE_TIMEOUT;
use crate::options::{Options, Transfer};
use crate::ring::Ring;
use crate::session::OUTGOING_MAX;

/// A claimed rank: the sidecar's answer, and both directions of the stream.
pub(crate) struct Attached {
    pub(crate) claimed: Claimed,
    pub(crate) outgoing: mpsc::Sender<v1::ClientMessage>,
    pub(crate) incoming: Streaming<v1::ServerMessage>,
    /// For calls besides the stream.
    pub(crate) client: RondeClient<Channel>,
}

/// Connects to the sidecar and claims the rank. Retries until the connect timeout while the sidecar is not there yet, and for
/// 2 s while an earlier session of the rank is still ending.
pub(crate) async fn attach(options: &Options, token: RankToken) -> Result<Attached, Error> {
    let deadline = Instant::now() + options.connect_timeout;
    let claim_deadline = deadline.min(Instant::now() + CLAIM_RETRY);
    let mut pause = PAUSE_MIN;
    loop {
        let refused = match timeout_at(deadline, attempt(options, token)).await {
            Ok(Ok(attached)) => return Ok(attached),
            Ok(Err(refused)) => refused,
            Err(_) => Refused::Unreachable(timed_out(options)),
        };
        let (until, error) = match refused {
            Refused::Final(error) => return Err(error),
            Refused::Held(error) => (claim_deadline, error),
            Refused::Unreachable(error) => (deadline, error),
        };
        if Instant::now() + pause >= until {
            return Err(error);
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Creates the session's ring and passes it over `mem.sock`, if both sides use one. Without a ring all messages travel on the
/// stream.
pub(crate) async fn attach_ring(options: &Options, claimed: &Claimed) -> Option<Ring> {
    let wanted = options.ring == crate::options::Ring::Auto && options.transfer == Transfer::Arena;
    if !wanted || claimed.ring_bytes == 0 {
        return None;
    }
    let token = SessionToken::from_bytes(claimed.session_token);
    let capacity = claimed.ring_bytes;
    let config = MemClientConfig { timeout: EXCHANGE_TIMEOUT, result_bytes_max: 0 };
    let socket = MemSocket::of(options);
    let attach = move || -> Result<Ring, Error> {
        Ok(socket.connect(config)?.ring(&token, WorkerRing::create(capacity)?).map(Ring::new)?)
    };
    match tokio::task::spawn_blocking(attach).await {
        Ok(Ok(ring)) => Some(ring),
        Ok(Err(error)) => {
            tracing::info!(target: "ronde", %error, "no ring: all messages travel on the session's stream");
            None
        }
        // The runtime is ending, and the session with it.
        Err(_) => None,
    }
}

/// Where segments are exchanged, and with which user's sidecar.
#[derive(Clone, Debug)]
pub(crate) struct MemSocket {
    directory: PathBuf,
    sidecar_uid: Option<u32>,
}

impl MemSocket {
    pub(crate) fn of(options: &Options) -> Self {
        Self { directory: options.socket_dir.clone(), sidecar_uid: options.sidecar_uid }
    }

    /// Connects, and checks the sidecar's user.
    pub(crate) fn connect(&self, config: MemClientConfig) -> Result<MemClient, Error> {
        let client = MemClient::connect(&paths::mem_socket(&self.directory), config)?;
        check_user(self.sidecar_uid, client.peer_credentials()?.uid, &self.directory)?;
        Ok(client)
    }
}

/// Why an attempt failed, which decides whether to retry.
enum Refused {
    Unreachable(Error),
    Held(Error),
    Final(Error),
}

async fn attempt(options: &Options, token: RankToken) -> Result<Attached, Refused> {
    let channel = channel(options).await?;
    let mut client = RondeClient::new(channel)
        .max_decoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES)
        .max_encoding_message_size(limits::INLINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES);
    let (outgoing, receiver) = mpsc::channel(OUTGOING_MAX);
    let claim =
        v1::ClientMessage { message: Some(client_message::Message::Claim(claim(options, token).into_message())) };
    // Cannot fail: the queue is new and has room for one message.
    let _ = outgoing.try_send(claim);
    let refuse = |status: &tonic::Status| refusal(options, status);
    let response = client.session(Outgoing { receiver, ended: false }).await.map_err(|status| refuse(&status))?;
    let mut incoming = response.into_inner();
    let first = incoming.message().await.map_err(|status| refuse(&status))?;
    let Some(server_message::Message::Claimed(claimed)) = first.and_then(|message| message.message) else {
        let reason = "its first message is not the answer to the claim".to_owned();
        return Err(Refused::Final(Error::Protocol { reason }));
    };
    let claimed = Claimed::parse(&claimed).map_err(|error| Refused::Final(Error::protocol(&error)))?;
    Ok(Attached { claimed, outgoing, incoming, client })
}

fn claim(options: &Options, token: RankToken) -> Claim {
    Claim {
        job: options.job.clone(),
        worker: options.worker.unwrap_or(WorkerNumber(options.rank.0)),
        token,
        protocols: (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION),
        client: options.client_name.clone(),
        pid: std::process::id(),
    }
}

async fn channel(options: &Options) -> Result<Channel, Refused> {
    let path = paths::rpc_socket(&options.socket_dir);
    let stream = GuardedStream::connect(&path).await.map_err(|error| {
        Refused::Unreachable(Error::Connect { directory: options.socket_dir.clone(), reason: error.to_string() })
    })?;
    let user = stream.peer_uid().map_err(|error| {
        Refused::Unreachable(Error::Connect { directory: options.socket_dir.clone(), reason: error.to_string() })
    })?;
    check_user(options.sidecar_uid, user, &options.socket_dir).map_err(Refused::Final)?;
    // A connector for one stream: a session does not survive its connection.
    let mut stream = Some(stream);
    let connector = service_fn(move |_: Uri| {
        let taken = stream.take().map(TokioIo::new);
        async move { taken.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    Endpoint::from_static("http://sidecar.invalid")
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(STREAM_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| {
            let reason = format!("it does not speak gRPC ({error})");
            Refused::Unreachable(Error::Connect { directory: options.socket_dir.clone(), reason })
        })
}

/// Checks the user of the sidecar, which the kernel reports for the connection itself: whoever may replace a directory on the
/// path to the socket can put another one in its place, at any time.
pub(crate) fn check_user(accepted: Option<u32>, found: u32, directory: &Path) -> Result<(), Error> {
    match accepted {
        Some(accepted) if accepted != found => {
            Err(Error::SidecarUser { directory: directory.to_owned(), found, accepted })
        }
        _ => Ok(()),
    }
}

/// Decides whether to retry a rejected claim.
fn refusal(options: &Options, status: &tonic::Status) -> Refused {
    let directory: PathBuf = options.socket_dir.clone();
    let claim = |reason: String| Error::Claim { directory: directory.clone(), rank: options.rank.0, reason };
    match status.code() {
        Code::AlreadyExists => Refused::Held(claim(describe(status))),
        Code::Unavailable | Code::Unknown | Code::Cancelled => {
            Refused::Unreachable(Error::Connect { directory: directory.clone(), reason: describe(status) })
        }
        _ => Refused::Final(claim(describe(status))),
    }
}

fn timed_out(options: &Options) -> Error {
    let reason = format!("no answer within {} s", options.connect_timeout.as_secs_f64());
    Error::Connect { directory: options.socket_dir.clone(), reason }
}

/// The client's direction of the stream; it ends after a Goodbye.
struct Outgoing {
    receiver: mpsc::Receiver<v1::ClientMessage>,
    ended: bool,
}

impl Stream for Outgoing {
    type Item = v1::ClientMessage;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let message = ready!(self.receiver.poll_recv(context));
        self.ended = matches!(
            message.as_ref().and_then(|m| m.message.as_ref()),
            Some(client_message::Message::Goodbye(_)) | None
        );
        Poll::Ready(message)
    }
}

/// A connection that forked children do not keep: they close their copy, and dropping this one shuts it down for all copies.
struct GuardedStream(ForkSafe<Connection>);

impl GuardedStream {
    async fn connect(path: &Path) -> io::Result<Self> {
        let stream = Connection(UnixStream::connect(path).await?);
        ForkSafe::with_fd(stream).map(Self).map_err(io::Error::other)
    }

    fn peer_uid(&self) -> io::Result<u32> {
        let connection = self.0.get().map_err(io::Error::other)?;
        connection.0.peer_cred().map(|credentials| credentials.uid())
    }

    fn stream(&mut self) -> io::Result<Pin<&mut UnixStream>> {
        self.0.get_mut().map(|connection| Pin::new(&mut connection.0)).map_err(io::Error::other)
    }
}

impl AsyncRead for GuardedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream()?.poll_read(context, buffer)
    }
}

impl AsyncWrite for GuardedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(context)
    }
}

struct Connection(UnixStream);

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Fails only when the peer has closed it already.
        let _ = socket2::SockRef::from(&self.0).shutdown(Shutdown::Both);
    }
}

/// Names, shapes and framing around inline bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// HTTP/2 flow control for inline results; messages without them are small.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// A sidecar that hangs is detected after the sum of these two; one that dies, at once.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// How long an earlier session of the same rank may take to end.
const CLAIM_RETRY: Duration = Duration::from_secs(2);
