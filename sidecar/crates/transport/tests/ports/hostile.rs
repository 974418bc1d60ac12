//! Malicious peers over QUIC: the port keeps serving the others.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use ronde_transport::{DownReason, Port, PortEvent, Role};
use ronde_wire::control::{Purpose, Transport};
use ronde_wire::{Epoch, FrameHeader, FrameKind, Seq, SidecarIndex};

use crate::harness::raw::{self, ALPN, RawCa};
use crate::harness::{self, AttackScene, CONTROL, LANE, START_TIMEOUT, down, event, local, options, up};

/// Sends bytes instead of a hello and returns the port's close reason.
async fn send_before_hello(scene: &AttackScene, bytes: &[u8]) -> String {
    let connection = raw::dial(scene.at(), Some(scene.ca.good(2)), ALPN).await.expect("good credentials");
    let (mut send, recv) = connection.open_bi().await.expect("one stream is allowed");
    // The port may close the connection while this is being written.
    let _ = send.write_all(bytes).await;
    let _ = send.finish();
    let reason = raw::reason(&connection.closed().await);
    drop(recv);
    reason
}

/// Sends bytes after a valid hello. The port must end the link as a violation, whose text this returns.
async fn send_after_hello(scene: &mut AttackScene, purpose: Purpose, bytes: &[u8]) -> String {
    let hello = local(2, purpose).hello(SidecarIndex(2));
    let (connection, mut send, recv) = raw::greet(scene.at(), scene.ca.good(2), &hello).await;
    up(&mut scene.target, 2).await;
    let _ = send.write_all(bytes).await;
    let _ = send.finish();
    let reason = down(&mut scene.target, 2).await;
    let DownReason::Protocol(text) = reason else { panic!("{reason:?} is no violation") };
    assert_eq!(raw::reason(&connection.closed().await), text);
    drop(recv);
    text
}

fn header(kind: FrameKind, length: u32) -> [u8; 28] {
    FrameHeader { kind, flags: 0, length, epoch: Epoch(1), seq: Seq(1) }.encode()
}

#[tokio::test]
async fn invalid_hellos_are_rejected() {
    let mut scene = AttackScene::new(Transport::Quic, CONTROL).await;
    assert!(send_before_hello(&scene, &[0xAA; 64]).await.contains("a frame begins with"));
    assert!(send_before_hello(&scene, b"RND").await.contains("within a header, after 3 bytes"));
    assert_eq!(send_before_hello(&scene, b"").await, "the stream ended without a hello");
    assert!(send_before_hello(&scene, &header(FrameKind::Control, 0)).await.contains("is Control, not a hello"));
    assert!(
        send_before_hello(&scene, &header(FrameKind::Hello, 1 << 20)).await.contains("at most 8192 bytes, not 1048576")
    );
    assert!(send_before_hello(&scene, &header(FrameKind::Hello, u32::MAX)).await.contains("not 4294967295"));
    let undecodable = [&header(FrameKind::Hello, 4)[..], &[0xFF; 4]].concat();
    assert!(send_before_hello(&scene, &undecodable).await.contains("does not decode"));
    let refusal = [&header(FrameKind::Refusal, 1)[..], &[0]].concat();
    assert!(send_before_hello(&scene, &refusal).await.contains("is Refusal, not a hello"));
    scene.still_works().await;
}

#[tokio::test]
async fn invalid_frames_end_only_their_link() {
    let mut scene = AttackScene::new(Transport::Quic, CONTROL).await;
    assert!(send_after_hello(&mut scene, CONTROL, &[0xAA; 64]).await.contains("a frame begins with"));
    assert!(
        send_after_hello(&mut scene, CONTROL, &header(FrameKind::Control, u32::MAX)).await.contains("not 4294967295")
    );
    let truncated = [&header(FrameKind::Control, 100)[..], &[0; 99]].concat();
    assert!(send_after_hello(&mut scene, CONTROL, &truncated).await.contains("after 99 of 100 bytes"));
    assert!(send_after_hello(&mut scene, CONTROL, &truncated[..27]).await.contains("within a header, after 27 bytes"));
    let mut other_version = header(FrameKind::Control, 0);
    other_version[4] = 9;
    assert!(send_after_hello(&mut scene, CONTROL, &other_version).await.contains("wire version 9"));
    scene.still_works().await;
}

#[tokio::test]
async fn a_chunk_without_its_header_ends_its_link() {
    let mut scene = AttackScene::new(Transport::Quic, LANE).await;
    let short = [&header(FrameKind::Chunk, 5)[..], &[0; 5]].concat();
    assert!(send_after_hello(&mut scene, LANE, &short).await.contains("less than a chunk's header"));
    assert!(send_after_hello(&mut scene, LANE, &header(FrameKind::Control, 0)).await.contains("does not belong"));
}

#[tokio::test]
async fn random_bytes_of_a_peer_do_not_disturb_other_links() {
    let mut scene = AttackScene::new(Transport::Quic, CONTROL).await;
    let mut random = Random(7);
    for _ in 0..20 {
        let hello = local(2, CONTROL).hello(SidecarIndex(2));
        let (connection, mut send, _recv) = raw::greet(scene.at(), scene.ca.good(2), &hello).await;
        up(&mut scene.target, 2).await;
        // Valid frames with a few flipped bytes get further than random bytes.
        let mut bytes: Vec<u8> =
            (0..8).flat_map(|n| [&header(FrameKind::Control, 16)[..], &[n; 16]].concat()).collect();
        for _ in 0..3 {
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        let _ = send.write_all(&bytes).await;
        let _ = send.finish();
        connection.close(1_u32.into(), b"bye");
        loop {
            match event(&mut scene.target).await {
                PortEvent::Down { .. } => break,
                PortEvent::Frame { from: SidecarIndex(2), .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    scene.still_works().await;
}

#[tokio::test]
async fn random_datagrams_do_not_disturb_the_port() {
    let mut scene = AttackScene::new(Transport::Quic, CONTROL).await;
    let socket = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let mut random = Random(3);
    for round in 0..3_000 {
        let length = random.below(1_400);
        let mut datagram: Vec<u8> = (0..length).map(|_| random.byte()).collect();
        // Every other datagram resembles the first one of a QUIC version 1 connection.
        if round % 2 == 0 && length > 20 {
            datagram[..7].copy_from_slice(&[0xC0, 0, 0, 0, 1, 8, random.byte()]);
            datagram.resize(1_200, 0);
        }
        socket.send_to(&datagram, scene.at()).await.expect("loopback");
    }
    scene.still_works().await;
    let hello = local(2, CONTROL).hello(SidecarIndex(2));
    let link = raw::greet(scene.at(), scene.ca.good(2), &hello).await;
    up(&mut scene.target, 2).await;
    drop(link);
}

#[tokio::test]
async fn idle_connections_do_not_block_handshakes() {
    harness::once_within(PLACE_WAIT, time_to_a_place_beside_idle_connections).await;
}

async fn time_to_a_place_beside_idle_connections() -> Duration {
    let mut scene = AttackScene::new(Transport::Quic, CONTROL).await;
    let hello = local(2, CONTROL).hello(SidecarIndex(2));
    // More connections than there are places, which have shown a certificate and then fall silent. From the half on
    // senders must validate their address; those that find no place are refused.
    let mut silent = Vec::new();
    for _ in 0..SILENT_CONNECTIONS {
        silent.extend(raw::dial(scene.at(), Some(scene.ca.good(2)), ALPN).await);
    }
    assert!(silent.len() >= HANDSHAKES_MAX, "only {} connections", silent.len());
    let began = Instant::now();
    // A peer at another address gets in at once.
    let elsewhere = raw::greet_from(ELSEWHERE, scene.at(), scene.ca.good(2), &hello).await.expect("a place");
    up(&mut scene.target, 2).await;
    drop(elsewhere);
    assert!(matches!(event(&mut scene.target).await, PortEvent::Down { .. }));
    // One at the same address does when it tries again, as peers do, long before the connections time out.
    let link = loop {
        match raw::greet_from(HERE, scene.at(), scene.ca.good(2), &hello).await {
            Ok(link) => break link,
            Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
        }
        assert!(began.elapsed() < PLACE_WAIT_MAX, "no place after {PLACE_WAIT_MAX:?}");
    };
    let time = began.elapsed();
    up(&mut scene.target, 2).await;
    scene.still_works().await;
    drop((silent, link));
    time
}

/// The port's places for handshakes.
const HANDSHAKES_MAX: usize = 256;
const SILENT_CONNECTIONS: usize = HANDSHAKES_MAX + 44;
/// Connections time out after 10 s, which would make room in any case.
const PLACE_WAIT: Duration = Duration::from_secs(5);
const PLACE_WAIT_MAX: Duration = Duration::from_secs(60);
const RETRY_PAUSE: Duration = Duration::from_millis(100);
const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

#[tokio::test]
async fn a_process_that_is_gone_is_noticed() {
    let ca = RawCa::new();
    let (here, there) = (harness::bind(Transport::Quic), harness::bind(Transport::Quic));
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
        // Without its runtime the port sends nothing, not even a close frame, before the socket closes.
        drop(runtime);
        drop(port);
    });
    let mut port = here.start(ca.identity(0), &local(0, CONTROL), peers, options(START_TIMEOUT)).expect("starts");
    port.open(SidecarIndex(1), Role::Dial);
    up(&mut port, 1).await;
    is_up.send(()).expect("the other side waits");
    assert_eq!(down(&mut port, 1).await, DownReason::PortUnreachable);
    process.join().expect("ended well");
}

/// A deterministic generator (xorshift64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("below a usize")
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[3]
    }
}
