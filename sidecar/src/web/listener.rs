//! Accepts connections and reads requests: every wait and every length is bounded before the input is trusted.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::request::Parts;
use axum::http::{Request, Response, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ronde_rpc::v1::ronde_web_server::RondeWebServer;
use ronde_rpc::web::check_body;
use ronde_transport::MutualTls;
use ronde_wire::limits;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tonic::Status;
use tonic::body::Body;
use tonic_web::{GrpcWebLayer, GrpcWebService};
use tower::{Layer, Service};

use super::calls::Calls;
use super::gate::{Caller, Entry, Gate, Refusal, has_session_messages};
use super::sessions::Sessions;
use super::shares::{Occupied, Shares};

/// The state that all connections share.
pub(super) struct Endpoint {
    gate: Gate,
    calls: GrpcWebService<RondeWebServer<Calls>>,
    sessions: Sessions,
    tls: Option<Arc<MutualTls>>,
    shares: Shares,
}

impl Endpoint {
    /// Answers calls that the gate accepts; without TLS if `tls` is `None`.
    pub(super) fn new(gate: Gate, calls: Calls, tls: Option<Arc<MutualTls>>) -> Self {
        let (sessions, shares) = (calls.sessions().clone(), Shares::new(gate.ranks()));
        let calls = RondeWebServer::new(calls)
            .max_decoding_message_size(limits::WEB_BODY_BYTES_MAX)
            .max_encoding_message_size(STATUS_BYTES_MAX);
        Self { gate, calls: GrpcWebLayer::new().layer(calls), sessions, tls, shares }
    }

    async fn answer(&self, request: Request<Incoming>, occupied: &Occupied) -> Response<Body> {
        let (head, body) = request.into_parts();
        let answer = match self.gate.judge(&head) {
            Ok(Entry::Preflight) => return self.gate.allow(&head),
            Ok(Entry::Call(caller)) => self.call(caller, &head, body, occupied).await,
            Err(refusal) => Err(refusal),
        };
        let answer = answer.unwrap_or_else(|refusal| refused(refusal, &head));
        self.gate.open_to_page(&head, answer)
    }

    /// Reads a call's body within the share of its rank, and answers it. No body is waited for while it has a turn that
    /// calls of other ranks wait for.
    async fn call(
        &self,
        Caller(rank): Caller,
        head: &Parts,
        body: Incoming,
        occupied: &Occupied,
    ) -> Result<Response<Body>, Refusal> {
        if !self.shares.identify(occupied, rank) {
            return Err(busy(format!("{rank} has as many connections as it may; close some")));
        }
        let reading = timeout(BODY_TIMEOUT, self.shares.body(rank)).await.ok().flatten();
        let _reading = reading.ok_or_else(|| {
            busy(format!("{} calls of {rank} are being read; try again", limits::WEB_BODIES_PER_RANK_MAX))
        })?;
        let body = read(body).await?;
        let in_session = has_session_messages(head) && self.sessions.has(rank);
        let turn = timeout(TURN_TIMEOUT, self.shares.decoding(in_session)).await.ok().flatten();
        let _turn = turn.ok_or_else(|| busy("too many calls are being decoded; try again".to_owned()))?;
        let mut call = Request::from_parts(head.clone(), Body::new(Full::new(body)));
        call.extensions_mut().insert(Caller(rank));
        let Ok(answer) = self.calls.clone().call(call).await;
        Ok(answer)
    }
}

/// Reads a body completely and checks that it may be decoded.
async fn read(body: Incoming) -> Result<Bytes, Refusal> {
    let collected = timeout(BODY_TIMEOUT, Limited::new(body, limits::WEB_BODY_BYTES_MAX).collect()).await;
    let collected = collected.map_err(|_| {
        let reason = format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs());
        Refusal::new(StatusCode::REQUEST_TIMEOUT, Status::deadline_exceeded(reason))
    })?;
    let body = collected.map_err(|error| match error.is::<LengthLimitError>() {
        true => Refusal::too_large(),
        false => malformed(format!("the body broke: {error}")),
    })?;
    let body = body.to_bytes();
    check_body(&body).map_err(|error| malformed(error.to_string()))?;
    Ok(body)
}

fn busy(reason: String) -> Refusal {
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, Status::unavailable(reason))
}

fn malformed(reason: String) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, Status::invalid_argument(reason))
}

fn refused(refusal: Refusal, head: &Parts) -> Response<Body> {
    tracing::info!(path = head.uri.path(), ?refusal, "a request to the gRPC-Web listener is refused");
    refusal.answer(head)
}

/// Accepts connections forever.
///
/// # Errors
/// When the runtime does not accept the listener.
pub(super) async fn run(listener: std::net::TcpListener, endpoint: Arc<Endpoint>) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => start(&endpoint, stream, peer),
            // An error of the process or the system, such as too many open files, which other connections may free.
            Err(error) => {
                tracing::warn!(%error, "gRPC-Web: accepting failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn start(endpoint: &Arc<Endpoint>, stream: TcpStream, peer: SocketAddr) {
    let Some((occupied, evicted)) = endpoint.shares.enter(peer.ip()) else { return };
    let endpoint = Arc::clone(endpoint);
    tokio::spawn(async move {
        let served = tokio::select! {
            served = connection(endpoint, stream, Arc::clone(&occupied)) => served,
            () = occupied.is_evicted(evicted) => Err("another one needs its place: it has carried no token".to_owned()),
        };
        if let Err(reason) = served {
            tracing::info!(%peer, reason, "a connection to the gRPC-Web listener ends");
        }
    });
}

/// Serves a connection to its end, at the latest until a certificate expires.
async fn connection(endpoint: Arc<Endpoint>, stream: TcpStream, occupied: Arc<Occupied>) -> Result<(), String> {
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let Some(tls) = endpoint.tls.clone() else { return requests(endpoint, stream, occupied).await };
    let accepted = match timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
        Ok(accepted) => accepted.map_err(|error| format!("TLS: {error}"))?,
        Err(_) => return Err(format!("TLS: no handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())),
    };
    match timeout(accepted.valid_for, requests(endpoint, accepted.stream, occupied)).await {
        Ok(served) => served,
        Err(_) => Err(format!("a certificate, {}'s or this sidecar's, is not valid any more", accepted.peer)),
    }
}

async fn requests(
    endpoint: Arc<Endpoint>,
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    occupied: Arc<Occupied>,
) -> Result<(), String> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let answer = move |request| {
        let (endpoint, occupied) = (Arc::clone(&endpoint), Arc::clone(&occupied));
        async move { Ok::<_, Infallible>(endpoint.answer(request, &occupied).await) }
    };
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(limits::WEB_HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(Box::pin(stream)), service_fn(answer))
        .await
        .map_err(|error| error.to_string())
}

/// How long a client may take for its part of the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may be idle between two calls, and a head may take to arrive. Clients that keep connections
/// open close them before that.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a body may take to arrive, and wait until it is read.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a complete body may wait until it is decoded.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may accept nothing of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);
/// The pause after an error that an immediate retry would meet again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const HEADERS_MAX: usize = 64;
/// The largest answer, a status page; parts of results are small.
const STATUS_BYTES_MAX: usize = 16 << 20;
