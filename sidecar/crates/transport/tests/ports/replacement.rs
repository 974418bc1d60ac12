//! Connections that are replaced because of renewed certificates, while frames flow.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ronde_transport::{
    DownReason, Identity, JobCa, KeyRequest, LinkOptions, NetworkPort, Outgoing, Port, PortEvent, Role, Validity,
    bundle,
};
use ronde_wire::control::{Hello, Purpose, Transport};
use ronde_wire::frame::Chunk;
use ronde_wire::{Frame, FrameKind, Incarnation, Seq, SidecarIndex};

use crate::harness::raw::{self, ALPN, RawCa};
use crate::harness::{
    self, CONTROL, LANE, START_TIMEOUT, any_event, ca, chunk, control, down, frame, heartbeat, hour, identity, issue,
    job, local, options, trust_domain, until, up,
};

harness::over_both!(
    no_frame_is_lost_doubled_or_overtaken_while_connections_are_replaced,
    a_close_during_a_replacement_arrives_after_sent_frames,
    a_link_outlives_its_first_certificates,
    an_authority_is_changed_step_by_step_under_a_link,
    a_link_ends_when_the_peers_authority_is_removed,
);

const ZERO: SidecarIndex = SidecarIndex(0);
const ONE: SidecarIndex = SidecarIndex(1);

/// Sidecar 0, which dialled, and sidecar 1.
async fn pair(
    over: Transport,
    purpose: Purpose,
    identities: [std::sync::Arc<Identity>; 2],
    options: LinkOptions,
) -> [NetworkPort; 2] {
    let bound = [harness::bind_for(over, purpose), harness::bind_for(over, purpose)];
    let peers: HashMap<_, _> =
        (0..).map(SidecarIndex).zip(bound.iter().map(|bound| vec![bound.local_addr()])).collect();
    let mut ports = Vec::new();
    for (me, (bound, identity)) in (0..).zip(bound.into_iter().zip(identities)) {
        ports.push(bound.start(identity, &local(me, purpose), peers.clone(), options.clone()).expect("starts"));
    }
    let [mut zero, mut one] = <[NetworkPort; 2]>::try_from(ports).expect("two");
    zero.open(ONE, Role::Dial);
    up(&mut zero, 1).await;
    up(&mut one, 0).await;
    [zero, one]
}

async fn usual(over: Transport, purpose: Purpose) -> [NetworkPort; 2] {
    pair(over, purpose, [identity(ZERO), identity(ONE)], options(START_TIMEOUT)).await
}

/// Numbered chunks in both directions, and the progress of each.
#[derive(Default)]
struct Traffic {
    given: [u64; 2],
    left: [u64; 2],
    come: [u64; 2],
}

impl Traffic {
    /// Keeps both directions busy until `enough`. Every chunk must arrive once, in order, and complete.
    async fn run(&mut self, ports: &mut [NetworkPort; 2], enough: impl Fn(&Self, &[NetworkPort; 2]) -> bool) {
        while !enough(self, ports) {
            for (at, port) in ports.iter_mut().enumerate() {
                while self.given[at] - self.come[1 - at] < 40 {
                    let to = SidecarIndex(u32::try_from(1 - at).expect("0 or 1"));
                    port.send(to, Outgoing::Chunk(message(self.given[at]))).expect("below the bound");
                    self.given[at] += 1;
                }
            }
            let [zero, one] = &mut *ports;
            let (at, event) = tokio::select! {
                event = any_event(zero) => (0, event),
                event = any_event(one) => (1, event),
            };
            self.take(at, event);
        }
    }

    fn take(&mut self, at: usize, event: PortEvent) {
        match event {
            PortEvent::Frame { frame, .. } => {
                let expected = message(self.come[at]);
                assert_eq!(Chunk::from_frame(frame).expect("a chunk"), expected, "number {} at {at}", self.come[at]);
                self.come[at] += 1;
            }
            PortEvent::Sent { chunks, .. } => self.left[at] += u64::from(chunks),
            other => panic!("{other:?} at {at}"),
        }
    }
}

fn message(number: u64) -> Chunk {
    let length = usize::try_from(number * 7_919 % 30_000).expect("small");
    chunk(number, Bytes::from(vec![number.to_le_bytes()[0]; length]))
}

fn replaced(ports: &[NetworkPort; 2], times: u64) -> bool {
    ports.iter().all(|port| port.stats().links_replaced >= times)
}

async fn no_frame_is_lost_doubled_or_overtaken_while_connections_are_replaced(over: Transport) {
    let mut ports = usual(over, LANE).await;
    let mut traffic = Traffic::default();
    for round in 1..=6 {
        // Renews the dialler's certificate, the acceptor's, and both at once.
        let fresh = [identity(ZERO), identity(ONE)];
        let changed: &[usize] = [&[0][..], &[1], &[0, 1]][round % 3];
        for at in changed {
            ports[*at].install_identity(fresh[*at].clone()).expect("the same sidecar's");
        }
        let shown = |ports: &[NetworkPort; 2]| {
            let [here, there] = [ports[0].security(ONE).expect("up"), ports[1].security(ZERO).expect("up")];
            assert_eq!((here.key_exchange, here.suite), ("X25519MLKEM768", "TLS_AES_128_GCM_SHA256"));
            let both = [(0, &here.own), (1, &here.peer), (0, &there.peer), (1, &there.own)];
            both.into_iter().filter(|(of, _)| changed.contains(of)).all(|(of, seen)| seen.serial == fresh[of].serial())
        };
        traffic.run(&mut ports, |_, ports| replaced(ports, round as u64) && shown(ports)).await;
        let enough = traffic.come.map(|come| come + 300);
        traffic.run(&mut ports, |traffic, _| traffic.come[0] > enough[0] && traffic.come[1] > enough[1]).await;
    }
    // All chunks in flight arrive, and each was reported as sent.
    let Traffic { given, .. } = traffic;
    while traffic.come[1] < given[0] || traffic.come[0] < given[1] || traffic.left != given {
        let [zero, one] = &mut ports;
        let (at, event) = tokio::select! {
            event = any_event(zero) => (0, event),
            event = any_event(one) => (1, event),
        };
        traffic.take(at, event);
    }
    assert!(given.iter().all(|given| *given > 2_000), "{given:?}");
    assert!(ports.iter().all(|port| port.stats().links_opened == 1 && port.stats().refusals == 0));
}

/// Closes one side at every step of a replacement: what it sent before arrives, and then its reason.
async fn a_close_during_a_replacement_arrives_after_sent_frames(over: Transport) {
    for steps in 0..60 {
        for closes in [0, 1] {
            let mut ports = usual(over, CONTROL).await;
            let changes = steps % 2;
            let fresh = identity(SidecarIndex(u32::try_from(changes).expect("0 or 1")));
            ports[changes].install_identity(fresh).expect("the same sidecar's");
            let peer = SidecarIndex(u32::try_from(1 - closes).expect("0 or 1"));
            for number in 0..20 {
                ports[closes].send(peer, control(number)).expect("below the bound");
                if number * 3 < steps as u64 {
                    for _ in 0..steps {
                        tokio::task::yield_now().await;
                    }
                }
            }
            ports[closes].close(peer, "enough");
            let hearer = &mut ports[1 - closes];
            let from = u32::try_from(closes).expect("0 or 1");
            for number in 0..20 {
                assert_eq!(frame(hearer, from).await, heartbeat(number));
            }
            assert_eq!(down(hearer, from).await, DownReason::ClosedByPeer("enough".to_owned()));
        }
    }
}

async fn a_link_outlives_its_first_certificates(over: Transport) {
    // Later than a busy machine takes to open and to replace the link.
    let end = SystemTime::now() + Duration::from_secs(15);
    let soon = || Validity { not_before: end - Duration::from_secs(60), not_after: end };
    let brief = [ZERO, ONE].map(|of| issue(ca(), of, soon(), ca()));
    let mut ports = pair(over, CONTROL, brief, options(START_TIMEOUT)).await;
    for (port, of) in ports.iter().zip([ZERO, ONE]) {
        port.install_identity(identity(of)).expect("the same sidecar's");
    }
    until(|| ports[0].security(ONE).is_some_and(|seen| seen.peer.not_after.as_secs() > seconds(end) + 60)).await;
    // Long enough for the first certificates to expire; expiry has a resolution of one second.
    for number in 0.. {
        ports[0].send(ONE, control(number)).expect("there is a link");
        assert_eq!(frame(&mut ports[1], 0).await, heartbeat(number));
        if SystemTime::now() > end + Duration::from_millis(1_500) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(ports.iter().all(|port| port.stats().links_opened == 1));
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).expect("later").as_secs()
}

/// An identity issued by one authority that accepts several.
fn by(ca: &JobCa, of: SidecarIndex, accepted: &[&JobCa]) -> std::sync::Arc<Identity> {
    let pems: Vec<&str> = accepted.iter().map(|ca| ca.ca_certificate_pem()).collect();
    let roots = bundle(&pems, &ca.id_of(of)).expect("authorities of one job");
    let key = KeyRequest::generate().expect("a key");
    let certificate = ca.issue(key.request_pem(), of, hour()).expect("a certificate");
    std::sync::Arc::new(key.into_identity(&certificate, &roots, ca.id_of(of)).expect("an identity"))
}

async fn an_authority_is_changed_step_by_step_under_a_link(over: Transport) {
    let (old, new) = (ca(), JobCa::generate(job(), trust_domain(), hour()).expect("an authority"));
    let mut ports = usual(over, LANE).await;
    let mut traffic = Traffic::default();
    let steps: [(&JobCa, &[&JobCa]); 3] = [(old, &[old, &new]), (&new, &[&new, old]), (&new, &[&new])];
    for (issuer, accepted) in steps {
        for at in 0..2 {
            let of = SidecarIndex(u32::try_from(at).expect("0 or 1"));
            let fresh = by(issuer, of, accepted);
            ports[at].install_identity(fresh.clone()).expect("the same sidecar's");
            let peer = SidecarIndex(1 - of.0);
            let shown = |_: &Traffic, ports: &[NetworkPort; 2]| {
                ports[at].security(peer).is_some_and(|seen| seen.own.serial == fresh.serial())
            };
            traffic.run(&mut ports, shown).await;
        }
    }
    let enough = traffic.come.map(|come| come + 100);
    traffic.run(&mut ports, |traffic, _| traffic.come[0] > enough[0] && traffic.come[1] > enough[1]).await;
    assert!(ports.iter().all(|port| port.stats().links_opened == 1));
}

async fn a_link_ends_when_the_peers_authority_is_removed(over: Transport) {
    let new = JobCa::generate(job(), trust_domain(), hour()).expect("an authority");
    for drops in [0, 1] {
        let brief = LinkOptions { untrusted_grace: Duration::from_millis(300), ..options(START_TIMEOUT) };
        let both = [ca(), &new];
        let mut ports = pair(over, CONTROL, [by(ca(), ZERO, &both), by(ca(), ONE, &both)], brief).await;
        let of = SidecarIndex(u32::try_from(drops).expect("0 or 1"));
        ports[drops].install_identity(by(&new, of, &[&new])).expect("the same sidecar's");
        let DownReason::Refused(reason) = down(&mut ports[drops], 1 - of.0).await else { panic!("not refused") };
        assert!(reason.contains("not accepted any more: the certificate is not signed by an authority"), "{reason}");
    }
}

/// A port of sidecar 0 with a link that a raw QUIC client has dialled as sidecar 1.
struct AttackScene {
    ca: RawCa,
    port: NetworkPort,
    link: (quinn::Connection, quinn::SendStream, quinn::RecvStream),
    hello: Hello,
}

impl AttackScene {
    async fn new() -> Self {
        let ca = RawCa::new();
        let peers = HashMap::from([(ONE, Vec::new())]);
        let started =
            harness::bind(Transport::Quic).start(ca.identity(0), &local(0, CONTROL), peers, options(START_TIMEOUT));
        let mut port = started.expect("starts");
        let hello = local(1, CONTROL).hello(ONE);
        let link = raw::greet(port.local_addr(), ca.good(1), &hello).await;
        up(&mut port, 1).await;
        Self { ca, port, link, hello }
    }

    /// Offers a connection with this hello and returns why it is rejected.
    async fn offer_in_vain(&mut self, hello: &Hello) -> String {
        let connection =
            raw::dial(self.port.local_addr(), Some(self.ca.good(1)), ALPN).await.expect("good credentials");
        let (mut send, recv) = connection.open_bi().await.expect("one stream is allowed");
        send.write_all(&raw::first_frame(hello)).await.expect("an open stream");
        let reason = raw::reason(&connection.closed().await);
        drop(recv);
        reason
    }

    async fn still_works(&mut self) {
        self.link.1.write_all(&bytes_of(7)).await.expect("an open stream");
        assert_eq!(frame(&mut self.port, 1).await, heartbeat(7));
    }
}

fn bytes_of(number: u64) -> Vec<u8> {
    let frame = heartbeat(number);
    [&frame.header.encode()[..], &frame.payload].concat()
}

/// Connections of this process with the port of `address`, counted by sockets. Closed ones that the kernel still knows have no
/// inode.
fn open_sockets(address: SocketAddr) -> usize {
    let port = format!(":{:04X}", address.port());
    let tables =
        ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(|path| std::fs::read_to_string(path).expect("procfs"));
    let rows = tables.iter().flat_map(|table| table.lines().skip(1));
    rows.filter(|row| {
        let fields: Vec<&str> = row.split_whitespace().collect();
        let is_listening = fields[3] == "0A";
        !is_listening && fields[9] != "0" && (fields[1].ends_with(&port) || fields[2].ends_with(&port))
    })
    .count()
}

#[tokio::test]
async fn a_replaced_connection_leaves_no_socket_open() {
    let mut ports = usual(Transport::Tls, LANE).await;
    let both_ends = 2;
    let address = ports[1].local_addr();
    assert_eq!(open_sockets(address), both_ends);
    let mut traffic = Traffic::default();
    ports[0].install_identity(identity(ZERO)).expect("the same sidecar's");
    traffic.run(&mut ports, |_, ports| replaced(ports, 1)).await;
    let enough = traffic.come.map(|come| come + 300);
    traffic.run(&mut ports, |traffic, _| traffic.come[0] > enough[0] && traffic.come[1] > enough[1]).await;
    until(|| open_sockets(address) == both_ends).await;
}

#[tokio::test]
async fn a_restarted_sidecar_does_not_pass_for_a_replacement() {
    let mut scene = AttackScene::new().await;
    let reborn = Hello { incarnation: Incarnation(5), replaces: true, ..scene.hello.clone() };
    let reason = scene.offer_in_vain(&reborn).await;
    assert!(reason.contains("was incarnation 1001 before and is incarnation 5 now"), "{reason}");
    scene.still_works().await;
}

#[tokio::test]
async fn a_replacement_that_is_offered_and_not_used_changes_nothing() {
    let mut scene = AttackScene::new().await;
    let replaces = Hello { replaces: true, ..scene.hello.clone() };
    for _ in 0..3 {
        let (offered, send, recv) = raw::greet(scene.port.local_addr(), scene.ca.good(1), &replaces).await;
        scene.still_works().await;
        offered.close(3_u32.into(), b"not needed");
        drop((send, recv));
    }
    scene.still_works().await;
    assert_eq!(scene.port.stats().links_replaced, 0);
}

#[tokio::test]
async fn old_connections_that_the_peer_keeps_open_are_bounded() {
    let mut scene = AttackScene::new().await;
    let replaces = Hello { replaces: true, ..scene.hello.clone() };
    let mut open = Vec::new();
    for times in 1..=4 {
        let (connection, send, recv) = raw::greet(scene.port.local_addr(), scene.ca.good(1), &replaces).await;
        let (old, mut old_send, old_recv) = std::mem::replace(&mut scene.link, (connection, send, recv));
        old_send.finish().expect("an open stream");
        until(|| scene.port.stats().links_replaced == times).await;
        scene.still_works().await;
        open.push((old, old_recv));
    }
    let reason = scene.offer_in_vain(&replaces).await;
    assert_eq!(reason, "the connection is being replaced already; try again later");
    scene.still_works().await;
    drop(open);
}

#[tokio::test]
async fn a_renew_frame_from_the_dialler_is_a_protocol_violation() {
    let mut scene = AttackScene::new().await;
    let renew = Frame::renew();
    assert_eq!((renew.header.kind, renew.header.seq), (FrameKind::Renew, Seq(0)));
    scene.link.1.write_all(&renew.header.encode()).await.expect("an open stream");
    let DownReason::Protocol(reason) = down(&mut scene.port, 1).await else { panic!("no violation") };
    assert_eq!(reason, "only the side that was dialled may ask for a replacement");
}
