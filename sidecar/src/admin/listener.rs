//! Accepts connections to the admin pages. Anybody who reaches the port may connect, so their number and the time of each are
//! bounded.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ronde_transport::{Evicted, HandshakePermit, Handshakes};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

/// The connections at a time, without those of streams. While there are as many, a new one replaces the oldest.
const CONNECTIONS_MAX: usize = 64;
/// How long the head of a request may take to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a reader may accept nothing of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection may take, if its answer is no stream.
const CONNECTION_MAX: Duration = Duration::from_secs(60);
/// How long a viewer may take to read the rest of a stream that has ended.
const REST_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after an error that an immediate retry would meet again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The largest head of a request: a browser sends its cookies of other servers on this host.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;

/// An extension of an answer that is a stream, whose number something else bounds: it lasts until the sender is dropped.
#[derive(Clone)]
pub(super) struct Streamed(pub(super) watch::Receiver<()>);

/// Accepts connections forever.
pub(super) async fn run(listener: TcpListener, router: Router) {
    let places = Handshakes::new("admin pages", CONNECTIONS_MAX, Duration::ZERO);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => start(&places, stream, peer, router.clone()),
            // An error of the process or the system, such as too many open files, which other connections may free.
            Err(error) => {
                tracing::warn!(%error, "the admin pages: accepting failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn start(places: &Handshakes, stream: TcpStream, peer: SocketAddr, router: Router) {
    let Some((permit, evicted)) = places.admit(peer.ip()) else { return };
    tokio::spawn(async move {
        let nodelay = stream.set_nodelay(true).map_err(|error| error.to_string());
        let served = match nodelay {
            Ok(()) => serve(stream, router, Place::new(permit), evicted).await,
            Err(error) => Err(error),
        };
        if let Err(reason) = served {
            tracing::debug!(%peer, reason, "a connection to the admin pages ends");
        }
    });
}

/// What a connection occupies.
#[derive(Clone)]
struct Place(Arc<Mutex<Held>>);

enum Held {
    /// One of the places of all connections.
    Common { _permit: HandshakePermit },
    /// The place of a stream, until that has ended.
    Stream(watch::Receiver<()>),
}

impl Place {
    fn new(permit: HandshakePermit) -> Self {
        Self(Arc::new(Mutex::new(Held::Common { _permit: permit })))
    }

    /// Frees the common place: the answer is this stream.
    fn set_stream(&self, Streamed(ended): Streamed) {
        *self.lock() = Held::Stream(ended);
    }

    fn stream(&self) -> Option<watch::Receiver<()>> {
        match &*self.lock() {
            Held::Common { .. } => None,
            Held::Stream(ended) => Some(ended.clone()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Every change is a single assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the connection has to end; returns why.
    async fn is_over(&self, evicted: Evicted) -> String {
        let reason = tokio::select! {
            _ = evicted => "another one needs its place".to_owned(),
            () = sleep(CONNECTION_MAX) => format!("it has taken {} s", CONNECTION_MAX.as_secs()),
        };
        // The permit is dropped, too, when the answer is a stream.
        let Some(mut ended) = self.stream() else { return reason };
        while ended.changed().await.is_ok() {}
        sleep(REST_TIMEOUT).await;
        "the rest of its stream is not read".to_owned()
    }
}

/// Serves one request, within the bounds of its place.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    router: Router,
    place: Place,
    evicted: Evicted,
) -> Result<(), String> {
    tokio::select! {
        served = request(stream, router, place.clone()) => served,
        reason = place.is_over(evicted) => Err(reason),
    }
}

/// Serves one request: a connection that waits for the next one would keep a place.
async fn request(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    router: Router,
    place: Place,
) -> Result<(), String> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let answer = move |request: Request<Incoming>| {
        let (router, place) = (router.clone(), place.clone());
        async move {
            let answer = router.oneshot(request).await;
            if let Some(streamed) = answer.as_ref().ok().and_then(|answer| answer.extensions().get::<Streamed>()) {
                place.set_stream(streamed.clone());
            }
            answer
        }
    };
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(Box::pin(stream)), service_fn(answer))
        .await
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use axum::Extension;
    use axum::body::Body;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::JoinHandle;
    use tokio::time::Instant;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// A connection to pages with a small one, a large one, and a stream that lasts until `ended` is dropped.
    fn connect(places: &Handshakes, ended: &watch::Sender<()>) -> (DuplexStream, JoinHandle<Result<(), String>>) {
        let streamed = Streamed(ended.subscribe());
        let router = Router::new()
            .route("/", get(|| async { "small" }))
            .route("/large", get(|| async { vec![b'1'; 1 << 20] }))
            .route(
                "/stream",
                get(|| async { (Extension(streamed), Body::from_stream(tokio_stream::pending::<Chunk>())) }),
            );
        let (client, server) = duplex(1 << 10);
        let (permit, evicted) = places.admit(HERE).expect("a place");
        (client, tokio::spawn(serve(server, router, Place::new(permit), evicted)))
    }

    type Chunk = Result<bytes::Bytes, std::convert::Infallible>;

    fn places(most: usize) -> Handshakes {
        Handshakes::new("admin pages", most, Duration::ZERO)
    }

    async fn ask(client: &mut DuplexStream, path: &str) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: sidecar\r\n\r\n");
        client.write_all(request.as_bytes()).await.expect("it reads");
    }

    /// What arrives to the end of the connection.
    async fn rest(client: &mut DuplexStream) -> String {
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.expect("an answer");
        answer
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_give_way_to_a_reader_and_end_after_a_while() {
        let (ended, _) = watch::channel(());
        let places = places(CONNECTIONS_MAX);
        let mut idle: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| connect(&places, &ended)).collect();
        let (mut client, served) = connect(&places, &ended);
        ask(&mut client, "/").await;
        let answer = rest(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("small"), "{answer}");
        assert!(answer.to_ascii_lowercase().contains("connection: close"), "{answer}");
        assert_eq!(served.await.expect("no panic"), Ok(()));
        let oldest = idle.remove(0).1.await.expect("no panic");
        assert_eq!(oldest, Err("another one needs its place".to_owned()));
        let newest = idle.pop().expect("many").1.await.expect("no panic");
        assert!(
            newest.is_err_and(|reason| reason != "another one needs its place"),
            "its head has not arrived in time"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stalls_or_reads_too_slowly_is_closed() {
        let (ended, _) = watch::channel(());
        let places = places(CONNECTIONS_MAX);
        let (mut stalls, served) = connect(&places, &ended);
        ask(&mut stalls, "/large").await;
        let reason = served.await.expect("no panic").expect_err("it reads nothing");
        assert!(!reason.contains("it has taken"), "{reason}");
        assert!(rest(&mut stalls).await.len() < 1 << 20, "the answer is not complete");
        let (mut slow, served) = connect(&places, &ended);
        ask(&mut slow, "/large").await;
        while !served.is_finished() {
            let mut part = [0; 1 << 9];
            let _ = slow.read(&mut part).await.expect("a part");
            sleep(WRITE_TIMEOUT / 2).await;
        }
        assert_eq!(served.await.expect("no panic"), Err("it has taken 60 s".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_keeps_no_common_place_and_ends_with_its_sender() {
        let (ended, _) = watch::channel(());
        let places = places(1);
        let (mut client, served) = connect(&places, &ended);
        ask(&mut client, "/stream").await;
        let mut head = [0; 12];
        client.read_exact(&mut head).await.expect("the begin of an answer");
        assert_eq!(&head, b"HTTP/1.1 200");
        for _ in 0..3 {
            let (mut reader, _) = connect(&places, &ended);
            ask(&mut reader, "/").await;
            assert!(rest(&mut reader).await.ends_with("small"));
        }
        sleep(2 * CONNECTION_MAX).await;
        assert!(!served.is_finished(), "neither the other readers nor the time end it");
        let began = Instant::now();
        drop(ended);
        assert_eq!(served.await.expect("no panic"), Err("the rest of its stream is not read".to_owned()));
        assert_eq!(began.elapsed(), REST_TIMEOUT);
    }
}
