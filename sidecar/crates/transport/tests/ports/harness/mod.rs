//! Shared parts of this crate's tests: a job with its authority, ports of all transports, and waiting for events.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod raw;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ronde_transport::{
    BoundPort, DownReason, Identity, JobCa, KeyRequest, LinkOptions, LocalHello, MemoryMesh, NetworkPort, Outgoing,
    Port, PortEvent, Role, SocketOptions, TrustDomain, Validity, next_event,
};
use ronde_wire::control::{Carrier, Control, Hello, Purpose, Transport};
use ronde_wire::frame::{Chunk, ChunkHeader};
use ronde_wire::{Epoch, Frame, Incarnation, JobName, Lane, Seq, SidecarIndex};
use tokio::net::TcpSocket;

use raw::RawCa;

pub(crate) const CONTROL: Purpose = Purpose::Control;
pub(crate) const LANE: Purpose = Purpose::Data(Lane(3));

/// A sidecar whose address is known to all others, but that never comes.
pub(crate) const ABSENT: SidecarIndex = SidecarIndex(900);

/// Creates ports that know each other, one for each sidecar and hello.
pub(crate) type Maker = fn(&[(SidecarIndex, Hello)], Duration) -> World;

pub(crate) struct World {
    pub(crate) ports: Vec<Box<dyn Port>>,
    /// Creates another port of a sidecar that the others know, as after a restart.
    pub(crate) again: Box<dyn Fn(SidecarIndex, Hello) -> Box<dyn Port>>,
    /// Keeps the address of [`ABSENT`] from other processes.
    absent: Option<Box<dyn Send>>,
}

pub(crate) fn memory(hellos: &[(SidecarIndex, Hello)], start_timeout: Duration) -> World {
    let mesh = MemoryMesh::new(job(), start_timeout);
    // All ports of a list connect to each other, whatever purpose their hellos claim.
    let purpose = hellos[0].1.purpose;
    let again = move |at, hello| -> Box<dyn Port> { Box::new(mesh.port_with_hello(at, purpose, hello)) };
    let ports = hellos.iter().map(|(at, hello)| again(*at, hello.clone())).collect();
    World { ports, again: Box::new(again), absent: None }
}

pub(crate) fn quic(hellos: &[(SidecarIndex, Hello)], start_timeout: Duration) -> World {
    network(Transport::Quic, hellos, start_timeout)
}

pub(crate) fn tls(hellos: &[(SidecarIndex, Hello)], start_timeout: Duration) -> World {
    network(Transport::Tls, hellos, start_timeout)
}

fn network(transport: Transport, hellos: &[(SidecarIndex, Hello)], start_timeout: Duration) -> World {
    let purpose = hellos[0].1.purpose;
    let bind = move || bind_for(transport, purpose);
    let bound: Vec<_> = hellos.iter().map(|_| bind()).collect();
    let mut peers: HashMap<_, _> =
        hellos.iter().zip(&bound).map(|((at, _), bound)| (*at, vec![bound.local_addr()])).collect();
    let (absent, address) = unanswered(transport, purpose);
    peers.insert(ABSENT, vec![address]);
    let start = move |bound: BoundPort, at, hello| -> Box<dyn Port> {
        let port = bound.start_with_hello(identity(at), hello, peers.clone(), options(start_timeout));
        Box::new(port.expect("a good identity"))
    };
    let ports = bound.into_iter().zip(hellos).map(|(bound, (at, hello))| start(bound, *at, hello.clone())).collect();
    World { ports, again: Box::new(move |at, hello| start(bind(), at, hello)), absent: Some(absent) }
}

/// A bound port at which nothing answers: QUIC's packets are not read, and TCP's connections are refused.
fn unanswered(transport: Transport, purpose: Purpose) -> (Box<dyn Send>, SocketAddr) {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    match transport.carrier(purpose) {
        Carrier::Quic => {
            let socket = UdpSocket::bind(any).expect("a free port");
            let address = socket.local_addr().expect("bound");
            (Box::new(socket), address)
        }
        Carrier::Tls => {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind(any).expect("a free port");
            let address = socket.local_addr().expect("bound");
            (Box::new(socket), address)
        }
    }
}

/// Runs each test over QUIC and over TLS.
#[allow(unused_macros, reason = "each test binary uses a part of it")]
macro_rules! over_both {
    ($($test:ident),+ $(,)?) => {
        mod quic { $(#[tokio::test] async fn $test() { super::$test(ronde_wire::control::Transport::Quic).await; })+ }
        mod tls { $(#[tokio::test] async fn $test() { super::$test(ronde_wire::control::Transport::Tls).await; })+ }
    };
}
#[allow(unused_imports, reason = "each test binary uses a part of it")]
pub(crate) use over_both;

/// The bound sockets of a control port.
pub(crate) fn bind(over: Transport) -> BoundPort {
    bind_for(over, CONTROL)
}

pub(crate) fn bind_for(transport: Transport, purpose: Purpose) -> BoundPort {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    NetworkPort::bind(any, transport, purpose, &SocketOptions::default()).expect("a free port")
}

pub(crate) fn options(start_timeout: Duration) -> LinkOptions {
    LinkOptions { start_timeout, ..LinkOptions::default() }
}

pub(crate) fn job() -> JobName {
    JobName::new("night-run").expect("a good name")
}

pub(crate) fn trust_domain() -> TrustDomain {
    TrustDomain::new("test.example").expect("a good name")
}

pub(crate) fn ca() -> &'static JobCa {
    static CA: OnceLock<JobCa> = OnceLock::new();
    CA.get_or_init(|| JobCa::generate(job(), trust_domain(), hour()).expect("an authority"))
}

pub(crate) fn hour() -> Validity {
    Validity::starting(SystemTime::now(), Duration::from_secs(3_600))
}

/// The identity of a sidecar of the job, valid for an hour.
pub(crate) fn identity(sidecar: SidecarIndex) -> Arc<Identity> {
    issue(ca(), sidecar, hour(), ca())
}

/// An identity that `ca` issues and that accepts those of `root`.
pub(crate) fn issue(ca: &JobCa, sidecar: SidecarIndex, validity: Validity, root: &JobCa) -> Arc<Identity> {
    let request = KeyRequest::generate().expect("a key");
    let certificate = ca.issue(request.request_pem(), sidecar, validity).expect("a certificate");
    Arc::new(request.into_identity(&certificate, root.ca_certificate_pem(), ca.id_of(sidecar)).expect("an identity"))
}

pub(crate) fn local(sidecar: u32, purpose: Purpose) -> LocalHello {
    let incarnation = Incarnation(1_000 + u64::from(sidecar));
    LocalHello { job: job(), incarnation, purpose, early_credit_bytes: 4_096, lanes: 2, membership: 1 }
}

pub(crate) fn hello(sidecar: u32, purpose: Purpose) -> (SidecarIndex, Hello) {
    (SidecarIndex(sidecar), local(sidecar, purpose).hello(SidecarIndex(sidecar)))
}

/// The next event other than `Sent`. The timeout fails a test that hangs.
pub(crate) async fn event(port: &mut dyn Port) -> PortEvent {
    loop {
        match any_event(port).await {
            PortEvent::Sent { .. } | PortEvent::StreamSent { .. } => {}
            event => return event,
        }
    }
}

pub(crate) async fn any_event(port: &mut dyn Port) -> PortEvent {
    tokio::time::timeout(Duration::from_secs(60), next_event(port)).await.expect("an event")
}

/// Waits for a state that the port's tasks reach without an event.
pub(crate) async fn until(reached: impl Fn() -> bool) {
    let poll = async {
        while !reached() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), poll).await.expect("the state is reached");
}

/// Attempts something until it takes less than a limit, three times at most: a busy machine makes some attempts slow.
pub(crate) async fn once_within(limit: Duration, attempt: impl AsyncFn() -> Duration) {
    let mut took = Vec::new();
    for _ in 0..3 {
        let time = attempt().await;
        if time < limit {
            return;
        }
        took.push(time);
    }
    panic!("it takes {took:?}, never less than {limit:?}");
}

pub(crate) async fn up(port: &mut dyn Port, from: u32) -> Hello {
    match event(port).await {
        PortEvent::Up { peer, hello } if peer == SidecarIndex(from) => *hello,
        other => panic!("{other:?} instead of up from {from}"),
    }
}

pub(crate) async fn down(port: &mut dyn Port, from: u32) -> DownReason {
    match event(port).await {
        PortEvent::Down { peer, reason } if peer == SidecarIndex(from) => reason,
        other => panic!("{other:?} instead of down from {from}"),
    }
}

pub(crate) async fn frame(port: &mut dyn Port, from: u32) -> Frame {
    match event(port).await {
        PortEvent::Frame { from: sender, frame } if sender == SidecarIndex(from) => frame,
        other => panic!("{other:?} instead of a frame from {from}"),
    }
}

/// The next frame, or why the link closed.
pub(crate) async fn frame_or_down(port: &mut dyn Port) -> Result<Frame, DownReason> {
    match event(port).await {
        PortEvent::Frame { frame, .. } => Ok(frame),
        PortEvent::Down { reason, .. } => Err(reason),
        other => panic!("{other:?} instead of a frame or down"),
    }
}

/// Two ports with an open link; the first one dialled.
pub(crate) async fn pair(make: Maker, purpose: Purpose) -> (Box<dyn Port>, Box<dyn Port>) {
    let mut ports = make(&[hello(0, purpose), hello(1, purpose)], START_TIMEOUT).ports;
    let (mut one, mut two) = (ports.remove(0), ports.remove(0));
    one.open(SidecarIndex(1), Role::Dial);
    two.open(SidecarIndex(0), Role::Await);
    up(&mut *one, 1).await;
    up(&mut *two, 0).await;
    (one, two)
}

pub(crate) fn heartbeat(sent_us: u64) -> Frame {
    Control::Heartbeat { sent_us, echo_us: 0, held_us: 0 }.into_frame(Epoch(1), Seq(sent_us))
}

pub(crate) fn control(sent_us: u64) -> Outgoing {
    Outgoing::Frame(heartbeat(sent_us))
}

pub(crate) fn chunk(seq: u64, data: Bytes) -> Chunk {
    let header = ChunkHeader { lane: Lane(3), sub_schedule: 1, round: 2, start: 8, len: data.len() as u64 };
    Chunk { epoch: Epoch(1), seq: Seq(seq), early: false, header, data }
}

pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Sidecars 0 and 1 with a link, and an authority for credentials to attack sidecar 0.
pub(crate) struct AttackScene {
    pub(crate) ca: RawCa,
    pub(crate) target: NetworkPort,
    pub(crate) friend: NetworkPort,
}

impl AttackScene {
    pub(crate) async fn new(over: Transport, purpose: Purpose) -> Self {
        let ca = RawCa::new();
        let (target, friend) = (bind_for(over, purpose), bind_for(over, purpose));
        let addresses = [vec![target.local_addr()], vec![friend.local_addr()], Vec::new()];
        let peers: HashMap<_, _> = (0..).map(SidecarIndex).zip(addresses).collect();
        let start = |bound: BoundPort, me| {
            bound.start(ca.identity(me), &local(me, purpose), peers.clone(), options(START_TIMEOUT)).expect("starts")
        };
        let (mut target, mut friend) = (start(target, 0), start(friend, 1));
        friend.open(SidecarIndex(0), Role::Dial);
        up(&mut target, 1).await;
        up(&mut friend, 0).await;
        Self { ca, target, friend }
    }

    pub(crate) fn at(&self) -> SocketAddr {
        self.target.local_addr()
    }

    /// Checks that the link from before the attack still carries frames in both directions.
    pub(crate) async fn still_works(&mut self) {
        self.friend.send(SidecarIndex(0), control(1)).expect("there is a link");
        assert_eq!(frame(&mut self.target, 1).await, heartbeat(1));
        self.target.send(SidecarIndex(1), control(2)).expect("there is a link");
        assert_eq!(frame(&mut self.friend, 0).await, heartbeat(2));
    }
}
