//! Malicious and unauthenticated peers over TCP: the port keeps serving the others.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_transport::{DownReason, NetworkPort, Port, PortEvent, Role};
use ronde_wire::control::{Close, Purpose, Transport, decode};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{Epoch, FrameHeader, FrameKind, Seq, SidecarIndex};
use rustls::{ClientConnection, ServerConnection, StreamOwned};

use crate::harness::raw::{self, ALPN, Credentials, RawCa, bad_certificates};
use crate::harness::{self, AttackScene, CONTROL, LANE, START_TIMEOUT, down, event, local, options, until, up};

/// A raw TLS peer on its own thread.
struct Peer(StreamOwned<ClientConnection, TcpStream>);

impl Peer {
    fn dial(to: SocketAddr, credentials: Option<Credentials>, protocol: &[u8]) -> Self {
        Self::dial_by(to, raw::client(credentials, protocol))
    }

    fn dial_by(to: SocketAddr, config: rustls::ClientConfig) -> Self {
        Self::over(connect(to), config)
    }

    fn over(stream: TcpStream, config: rustls::ClientConfig) -> Self {
        let name = "anything".try_into().expect("a name");
        let tls = ClientConnection::new(Arc::new(config), name).expect("a configuration");
        let mut peer = Self(StreamOwned::new(tls, stream));
        // A rejected peer learns of it when it reads.
        while peer.0.conn.is_handshaking() && peer.0.conn.complete_io(&mut peer.0.sock).is_ok() {}
        peer
    }

    /// The reason in the port's close frame, or how the connection ends without one.
    fn reason(&mut self) -> String {
        loop {
            let mut header = [0; HEADER_BYTES];
            if let Err(error) = self.0.read_exact(&mut header) {
                return error.to_string();
            }
            let header = FrameHeader::decode(&header).expect("a frame of the port");
            let mut payload = vec![0; header.length as usize];
            self.0.read_exact(&mut payload).expect("a whole frame");
            if header.kind == FrameKind::Close {
                return decode::<Close>(FrameKind::Close, &payload).expect("a close").reason;
            }
        }
    }
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).expect("somebody listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    stream
}

/// Runs blocking code on a thread for it.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("it does not panic")
}

/// Sends bytes instead of a hello and returns the port's close reason.
async fn send_before_hello(scene: &AttackScene, bytes: &[u8]) -> String {
    let (to, credentials, bytes) = (scene.at(), scene.ca.good(2), bytes.to_vec());
    apart(move || {
        let mut peer = Peer::dial(to, Some(credentials), ALPN);
        peer.0.write_all(&bytes).expect("the port reads");
        peer.0.conn.send_close_notify();
        peer.0.flush().expect("the port reads");
        peer.reason()
    })
    .await
}

/// Sends a valid hello, and these bytes once it is answered.
async fn send_after_hello(scene: &mut AttackScene, purpose: Purpose, bytes: &[u8], ends: bool) -> Peer {
    let hello = raw::first_frame_over(Transport::Tls, &local(2, purpose).hello(SidecarIndex(2)));
    let (to, credentials, bytes) = (scene.at(), scene.ca.good(2), bytes.to_vec());
    let peer = apart(move || {
        let mut peer = Peer::dial(to, Some(credentials), ALPN);
        peer.0.write_all(&hello).expect("the port reads");
        let mut answer = [0; HEADER_BYTES];
        peer.0.read_exact(&mut answer).expect("the port answers");
        let answer = FrameHeader::decode(&answer).expect("a frame");
        assert_eq!(answer.kind, FrameKind::Hello);
        let mut rest = vec![0; answer.length as usize];
        peer.0.read_exact(&mut rest).expect("a whole hello");
        peer.0.write_all(&bytes).expect("the port reads");
        if ends {
            peer.0.conn.send_close_notify();
        }
        peer.0.flush().expect("the port reads");
        peer
    });
    let peer = peer.await;
    up(&mut scene.target, 2).await;
    peer
}

/// The violation that ends a link after these bytes. Both sides get the same text.
async fn violation(scene: &mut AttackScene, purpose: Purpose, bytes: &[u8]) -> String {
    let mut peer = send_after_hello(scene, purpose, bytes, true).await;
    let reason = down(&mut scene.target, 2).await;
    let DownReason::Protocol(text) = reason else { panic!("{reason:?} is no violation") };
    assert_eq!(apart(move || peer.reason()).await, text);
    text
}

fn header(kind: FrameKind, length: u32) -> [u8; HEADER_BYTES] {
    FrameHeader { kind, flags: 0, length, epoch: Epoch(1), seq: Seq(1) }.encode()
}

#[tokio::test]
async fn invalid_hellos_are_rejected() {
    let mut scene = AttackScene::new(Transport::Tls, CONTROL).await;
    assert!(send_before_hello(&scene, &[0xAA; 64]).await.contains("a frame begins with"));
    assert!(send_before_hello(&scene, b"RND").await.contains("within a header, after 3 bytes"));
    assert_eq!(send_before_hello(&scene, b"").await, "the stream ended without a hello");
    assert!(send_before_hello(&scene, &header(FrameKind::Control, 0)).await.contains("is Control, not a hello"));
    assert!(
        send_before_hello(&scene, &header(FrameKind::Hello, 1 << 20)).await.contains("at most 8192 bytes, not 1048576")
    );
    assert!(send_before_hello(&scene, &header(FrameKind::Hello, u32::MAX)).await.contains("not 4294967295"));
    scene.still_works().await;
}

#[tokio::test]
async fn invalid_frames_end_only_their_link() {
    let mut scene = AttackScene::new(Transport::Tls, CONTROL).await;
    assert!(violation(&mut scene, CONTROL, &[0xAA; 64]).await.contains("a frame begins with"));
    assert!(violation(&mut scene, CONTROL, &header(FrameKind::Control, u32::MAX)).await.contains("not 4294967295"));
    let truncated = [&header(FrameKind::Control, 100)[..], &[0; 99]].concat();
    assert!(violation(&mut scene, CONTROL, &truncated).await.contains("after 99 of 100 bytes"));
    assert!(violation(&mut scene, CONTROL, &truncated[..27]).await.contains("within a header, after 27 bytes"));
    let close = [&header(FrameKind::Close, 4)[..], &[0xFF; 4]].concat();
    let _peer = send_after_hello(&mut scene, CONTROL, &close, false).await;
    assert!(matches!(down(&mut scene.target, 2).await, DownReason::Protocol(text) if text.contains("does not decode")));
    scene.still_works().await;
}

#[tokio::test]
async fn a_chunk_without_its_header_ends_its_link() {
    let mut scene = AttackScene::new(Transport::Tls, LANE).await;
    let short = [&header(FrameKind::Chunk, 5)[..], &[0; 5]].concat();
    assert!(violation(&mut scene, LANE, &short).await.contains("less than a chunk's header"));
    assert!(violation(&mut scene, LANE, &header(FrameKind::Control, 0)).await.contains("does not belong"));
}

#[tokio::test]
async fn a_reset_connection_is_noticed_at_once() {
    let mut scene = AttackScene::new(Transport::Tls, CONTROL).await;
    for resets in [false, true] {
        let peer = send_after_hello(&mut scene, CONTROL, &[], false).await;
        let socket = socket2::SockRef::from(&peer.0.sock);
        socket.set_linger(resets.then_some(Duration::ZERO)).expect("a socket");
        drop(peer);
        let DownReason::Lost(text) = down(&mut scene.target, 2).await else { panic!("not lost") };
        assert!(text.contains(if resets { "reset" } else { "its process is gone" }), "{text}");
    }
    // A byte that is not a record of the session is never passed on.
    let peer = send_after_hello(&mut scene, CONTROL, &[], false).await;
    let mut socket = peer.0.sock.try_clone().expect("a socket");
    socket
        .write_all(&[23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20])
        .expect("open");
    let DownReason::Protocol(text) = down(&mut scene.target, 2).await else { panic!("it was let in") };
    assert!(text.contains("decrypt"), "{text}");
    scene.still_works().await;
}

#[tokio::test]
async fn random_bytes_do_not_disturb_the_port() {
    let mut scene = AttackScene::new(Transport::Tls, CONTROL).await;
    for seed in 1..=40_u8 {
        let to = scene.at();
        apart(move || {
            let mut stream = connect(to);
            let mut bytes: Vec<u8> =
                (0..2_000_u32).map(|n| n.wrapping_mul(u32::from(seed) * 2_654_435).to_le_bytes()[1]).collect();
            // Every other one resembles the first record of a handshake, of any length.
            if seed % 2 == 0 {
                bytes[..3].copy_from_slice(&[22, 3, 1]);
            }
            // The port may have closed the connection already.
            let _ = stream.write_all(&bytes).and_then(|()| stream.shutdown(Shutdown::Write));
            let _ = io::copy(&mut stream, &mut io::sink());
        })
        .await;
    }
    scene.still_works().await;
    assert_eq!(scene.target.stats().links_opened, 1);
    send_after_hello(&mut scene, CONTROL, &[], true).await;
}

/// The port has 256 places for handshakes.
const SILENT_CONNECTIONS: usize = 300;
/// Connections time out after 10 s, which would make room in any case.
const PLACE_WAIT: Duration = Duration::from_secs(5);
const PLACE_WAIT_MAX: Duration = Duration::from_secs(60);
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Connects from another address of this host.
fn connect_from_elsewhere(to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::from(([127, 0, 0, 2], 0)).into()).expect("an address of this host");
    socket.connect(&to.into()).expect("somebody listens");
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    stream
}

/// Sends a valid hello over a connection, and returns the peer when it is answered.
fn greeted(stream: TcpStream, credentials: Credentials) -> Option<Peer> {
    let hello = raw::first_frame_over(Transport::Tls, &local(2, CONTROL).hello(SidecarIndex(2)));
    let mut peer = Peer::over(stream, raw::client(Some(credentials), ALPN));
    peer.0.write_all(&hello).and_then(|()| peer.0.flush()).ok()?;
    let mut answer = [0; HEADER_BYTES];
    peer.0.read_exact(&mut answer).ok()?;
    assert_eq!(FrameHeader::decode(&answer).expect("a frame").kind, FrameKind::Hello);
    Some(peer)
}

#[tokio::test]
async fn idle_connections_do_not_block_handshakes_and_time_out() {
    harness::once_within(PLACE_WAIT, time_to_a_place_beside_idle_connections).await;
}

async fn time_to_a_place_beside_idle_connections() -> Duration {
    let mut scene = AttackScene::new(Transport::Tls, CONTROL).await;
    let to = scene.at();
    let mut silent: Vec<TcpStream> = apart(move || (0..SILENT_CONNECTIONS).map(|_| connect(to)).collect()).await;
    // A peer that sends a byte now and then gets no more time than the others.
    let mut slow = connect(to);
    slow.write_all(&[22]).expect("the port reads");
    silent.push(slow);
    let began = Instant::now();
    // A peer at another address gets in at once.
    let credentials = scene.ca.good(2);
    let elsewhere = apart(move || greeted(connect_from_elsewhere(to), credentials)).await.expect("a place");
    up(&mut scene.target, 2).await;
    drop(elsewhere);
    let _ = down(&mut scene.target, 2).await;
    // One at the same address does when it tries again, as peers do, long before the connections time out.
    let peer = loop {
        let credentials = scene.ca.good(2);
        match apart(move || greeted(connect(to), credentials)).await {
            Some(peer) => break peer,
            None => tokio::time::sleep(RETRY_PAUSE).await,
        }
        assert!(began.elapsed() < PLACE_WAIT_MAX, "no place after {PLACE_WAIT_MAX:?}");
    };
    let time = began.elapsed();
    up(&mut scene.target, 2).await;
    scene.still_works().await;
    drop(peer);
    apart(move || {
        for mut stream in silent {
            let mut answer = Vec::new();
            // The port closes the connection whatever it sends; the socket's own timeout would be another kind of
            // error.
            let ended = stream.read_to_end(&mut answer).map_err(|error| error.kind());
            assert!(!matches!(ended, Err(io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)), "{ended:?}");
        }
    })
    .await;
    time
}

/// A port of sidecar 0 that knows sidecar 1 at one address.
fn port(ca: &RawCa, peer: Option<SocketAddr>) -> NetworkPort {
    let peers = HashMap::from([(SidecarIndex(1), peer.into_iter().collect())]);
    let bound = harness::bind(Transport::Tls);
    bound.start(ca.identity(0), &local(0, CONTROL), peers, options(START_TIMEOUT)).expect("a good identity")
}

#[tokio::test]
async fn a_dialler_with_a_bad_certificate_is_refused() {
    let ca = RawCa::new();
    let mut port = port(&ca, None);
    let to = port.local_addr();
    let bad = bad_certificates(&ca).into_iter().map(|(_, credentials)| (Some(credentials), ALPN));
    let others = [(None, ALPN), (Some(ca.good(1)), &b"h3"[..]), (Some(ca.good(9)), ALPN)];
    for (refused, (credentials, protocol)) in (1..).zip(bad.chain(others)) {
        apart(move || {
            let mut peer = Peer::dial(to, credentials, protocol);
            // The hello may arrive too late.
            let _ = peer.0.write_all(&raw::first_frame_over(Transport::Tls, &local(1, CONTROL).hello(SidecarIndex(1))));
            peer.reason()
        })
        .await;
        until(|| port.stats().refusals == refused).await;
        assert_eq!(port.stats().links_opened, 0);
    }
    // A valid peer is still accepted.
    let credentials = ca.good(1);
    let hello = raw::first_frame_over(Transport::Tls, &local(1, CONTROL).hello(SidecarIndex(1)));
    let peer = apart(move || {
        let mut peer = Peer::dial(to, Some(credentials), ALPN);
        peer.0.write_all(&hello).and_then(|()| peer.0.flush()).expect("the port reads");
        peer
    });
    let _peer = peer.await;
    up(&mut port, 1).await;
}

/// The first message of a client whose newest version is TLS 1.2, with the extensions of such a client (RFC 5246,
/// 8422).
fn hello_of_tls_1_2() -> Vec<u8> {
    let extension = |number: u8, content: &[u8]| {
        let length = u8::try_from(content.len()).expect("short");
        [&[0, number, 0, length][..], content].concat()
    };
    let extensions = [
        // The curves P-256 and X25519, uncompressed points, ECDSA with P-256 and SHA-256.
        extension(10, &[0, 4, 0, 23, 0, 29]),
        extension(11, &[1, 0]),
        extension(13, &[0, 2, 4, 3]),
    ]
    .concat();
    let length = |bytes: &[u8]| u8::try_from(bytes.len()).expect("short");
    // Version, random number, no session, two cipher suites with ECDHE and AES-GCM, no compression.
    let suites = [0, 4, 0xc0, 0x2b, 0xc0, 0x2f];
    let body = [&[3, 3][..], &[7; 32], &[0], &suites, &[1, 0], &[0, length(&extensions)], &extensions].concat();
    let message = [&[1, 0, 0, length(&body)][..], &body].concat();
    [&[22, 3, 1, 0, length(&message)][..], &message].concat()
}

#[tokio::test]
async fn tls_before_1_3_is_refused() {
    let ca = RawCa::new();
    let port = port(&ca, None);
    let to = port.local_addr();
    let answer = apart(move || {
        let mut stream = connect(to);
        stream.write_all(&hello_of_tls_1_2()).expect("the port reads");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the port closes");
        answer
    });
    // A fatal alert: protocol_version (RFC 8446 section 6).
    let answer = answer.await;
    assert!(matches!(answer[..], [21, 3, _, 0, 2, 2, 70]), "{answer:?}");
    until(|| port.stats().refusals == 1).await;
    assert_eq!(port.stats().links_opened, 0);
}

#[tokio::test]
async fn another_key_exchange_or_suite_is_refused() {
    use rustls::crypto::aws_lc_rs::{cipher_suite, kx_group};

    let ca = RawCa::new();
    let port = port(&ca, None);
    let to = port.local_addr();
    let changes: [fn(&mut rustls::crypto::CryptoProvider); 3] = [
        |with| with.kx_groups = vec![kx_group::X25519],
        |with| with.kx_groups = vec![kx_group::SECP256R1],
        |with| with.cipher_suites = vec![cipher_suite::TLS13_CHACHA20_POLY1305_SHA256],
    ];
    for (refused, change) in (1..).zip(changes) {
        let mut cryptography = raw::provider().as_ref().clone();
        change(&mut cryptography);
        let config = raw::client_of(Arc::new(cryptography), Some(ca.good(1)), ALPN);
        let reason = apart(move || Peer::dial_by(to, config).reason()).await;
        assert!(reason.contains("alert"), "{reason}");
        until(|| port.stats().refusals == refused).await;
        assert_eq!(port.stats().links_opened, 0);
    }
}

#[tokio::test]
async fn an_acceptor_with_a_bad_certificate_is_refused() {
    let ca = RawCa::new();
    let another = ("sidecar/2's, expected spiffe://", ca.good(2));
    for (expected, credentials) in bad_certificates(&ca).into_iter().chain([another]) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let mut port = port(&ca, listener.local_addr().ok());
        port.open(SidecarIndex(1), Role::Dial);
        let there = apart(move || {
            let (mut socket, _) = listener.accept().expect("a dial");
            let mut tls = ServerConnection::new(Arc::new(raw::server(credentials))).expect("a configuration");
            let mut ended = Ok(());
            while tls.is_handshaking() && ended.is_ok() {
                ended = tls.complete_io(&mut socket).map(drop);
            }
            ended.expect_err("the port turns away").to_string()
        });
        let (there, here) = tokio::join!(there, down(&mut port, 1));
        let DownReason::Refused(here) = here else { panic!("{here:?} is no refusal") };
        assert!(here.starts_with("sidecar 1 is not accepted here: "), "{here}");
        assert!(here.contains(expected), "{here:?} does not say {expected:?}");
        assert!(there.contains("alert"), "{there}");
        assert_eq!(port.stats().refusals, 1);
    }
}

#[tokio::test]
async fn a_process_that_is_gone_is_noticed() {
    let ca = RawCa::new();
    let (here, there) = (harness::bind(Transport::Tls), harness::bind(Transport::Tls));
    let addresses = [vec![here.local_addr()], vec![there.local_addr()]];
    let peers: HashMap<_, _> = (0..).map(SidecarIndex).zip(addresses).collect();
    let (their_identity, their_peers) = (ca.identity(1), peers.clone());
    let (is_up, wait_until_up) = tokio::sync::oneshot::channel::<()>();
    let process = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let port = runtime.block_on(async {
            let started = there.start(their_identity, &local(1, CONTROL), their_peers, options(START_TIMEOUT));
            let port = started.expect("starts");
            wait_until_up.await.expect("the other side says so");
            port
        });
        // Without its runtime the port sends nothing, not even a close frame.
        drop(runtime);
        drop(port);
    });
    let mut port = here.start(ca.identity(0), &local(0, CONTROL), peers, options(START_TIMEOUT)).expect("starts");
    port.open(SidecarIndex(1), Role::Dial);
    up(&mut port, 1).await;
    is_up.send(()).expect("the other side waits");
    let PortEvent::Down { reason: DownReason::Lost(text), .. } = event(&mut port).await else { panic!("not lost") };
    assert_eq!(text, "its process is gone (the connection ended without a close frame)");
    process.join().expect("ended well");
}
