//! Measures how fast two ports on loopback transfer 1 MiB chunks, in one direction and in both, in GB/s per direction.
//!
//! Each port has its own thread, as lanes do. Environment variables set the options to compare:
//! `TRANSPORT` (quic or tls), `MTU` (upper bound of discovery), `CONTROL` (cubic or bbr), `WINDOW` (initial, bytes),
//! `RECEIVE` (receive window, bytes), `ACKS` (threshold), `SECONDS`, `CHUNK` (bytes).
//!
//! ```text
//! MTU=8952 CONTROL=cubic cargo run --release -p ronde-transport --example throughput
//! ```

#![allow(clippy::unwrap_used, reason = "an example ends on any failure")]

use std::collections::HashMap;
use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use ronde_transport::quic::{QuicCongestion, QuicOptions};
use ronde_transport::{
    BoundPort, Identity, JobCa, KeyRequest, LinkOptions, LocalHello, NetworkPort, Outgoing, Port, PortEvent, Role,
    SocketOptions, TrustDomain, Validity, next_event,
};
use ronde_wire::control::{Purpose, Transport};
use ronde_wire::frame::{Chunk, ChunkHeader};
use ronde_wire::limits::CHUNK_BYTES_MAX;
use ronde_wire::{Epoch, Incarnation, JobName, Lane, Seq, SidecarIndex};

fn main() {
    let ca = JobCa::generate(job(), TrustDomain::new("bench.example").unwrap(), day()).unwrap();
    for (name, senders) in [("one way", 1), ("both ways", 2)] {
        let rates = run(&ca, senders);
        let [one, two] = rates.map(|rate| rate.received_gb);
        let seconds = rates.map(|rate| rate.seconds).into_iter().fold(0.0, f64::max);
        let busy = rates.map(|rate| rate.processor_seconds).into_iter().fold(0.0, f64::max);
        println!(
            "{name}: received {:.2} and {:.2} GB/s; {:.2} GB in each second of the busier thread's processor",
            one / seconds,
            two / seconds,
            (one + two) / busy
        );
    }
}

#[derive(Clone, Copy)]
struct Rate {
    received_gb: f64,
    seconds: f64,
    processor_seconds: f64,
}

/// Lets the first `senders` of two ports send for a while. Returns what each receives.
fn run(ca: &JobCa, senders: u32) -> [Rate; 2] {
    let bound: Vec<_> = (0..2)
        .map(|_| {
            NetworkPort::bind(
                SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
                transport(),
                PURPOSE,
                &SocketOptions::default(),
            )
            .unwrap()
        })
        .collect();
    let peers: HashMap<_, _> = (0..).map(SidecarIndex).zip(bound.iter().map(|b| vec![b.local_addr()])).collect();
    let threads: Vec<_> = (0..)
        .zip(bound)
        .map(|(me, bound)| {
            let (identity, peers) = (identity(ca, me), peers.clone());
            thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(talk(me, me < senders, bound, identity, peers))
            })
        })
        .collect();
    let rates: Vec<Rate> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    [rates[0], rates[1]]
}

async fn talk(
    me: u32,
    sends: bool,
    bound: BoundPort,
    identity: Arc<Identity>,
    peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
) -> Rate {
    let hello = LocalHello {
        job: job(),
        incarnation: Incarnation(1),
        purpose: PURPOSE,
        early_credit_bytes: 0,
        lanes: 1,
        membership: 1,
    };
    let mut port = bound.start(identity, &hello, peers, options()).unwrap();
    let peer = SidecarIndex(1 - me);
    port.open(peer, if me == 0 { Role::Dial } else { Role::Await });
    let data = Bytes::from(vec![7; setting("CHUNK", CHUNK_BYTES_MAX)]);
    let header = ChunkHeader { lane: Lane(0), sub_schedule: 0, round: 0, start: 0, len: 0 };
    let chunk = Chunk { epoch: Epoch(1), seq: Seq(1), early: false, header, data };
    let seconds: f64 = setting("SECONDS", 3.0);
    let (mut received, mut since, mut started) = (0_u64, Instant::now(), None::<Instant>);
    let mut processor = processor_seconds();
    loop {
        let left = started.map_or(10.0, |at| seconds + WARM_UP - at.elapsed().as_secs_f64());
        if left <= 0.0 {
            break;
        }
        match tokio::time::timeout(Duration::from_secs_f64(left), next_event(&mut port)).await {
            Ok(PortEvent::Up { .. }) => {
                started = Some(Instant::now());
                for _ in 0..if sends { CHUNKS_IN_FLIGHT } else { 0 } {
                    port.send(peer, Outgoing::Chunk(chunk.clone())).unwrap();
                }
            }
            Ok(PortEvent::Sent { chunks, .. }) => {
                for _ in 0..chunks {
                    port.send(peer, Outgoing::Chunk(chunk.clone())).unwrap();
                }
            }
            Ok(PortEvent::Frame { frame, .. }) => {
                if started.is_some_and(|at| at.elapsed().as_secs_f64() < WARM_UP) {
                    (received, since, processor) = (0, Instant::now(), processor_seconds());
                } else {
                    received += frame.payload.len() as u64;
                }
            }
            Ok(PortEvent::Down { reason, .. }) => panic!("{reason}"),
            Ok(PortEvent::StreamSent { .. }) => unreachable!("it sends chunks only"),
            Err(_) => break,
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    let received_gb = received as f64 / 1e9;
    let processor_seconds = processor_seconds() - processor;
    let rate = Rate { received_gb, seconds: since.elapsed().as_secs_f64(), processor_seconds };
    println!("  sidecar {me}: {:?}", port.path(peer).unwrap());
    // Both stop at about the same time: a link that closes earlier would fail the other's measurement.
    tokio::time::sleep(Duration::from_secs(1)).await;
    rate
}

/// The processor time of this thread, which is more reliable than wall time on a busy machine.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or_default() / 1e9
}

fn options() -> LinkOptions {
    let defaults = QuicOptions::default();
    let quic = QuicOptions {
        mtu_upper_bound: setting("MTU", defaults.mtu_upper_bound),
        congestion: if setting("CONTROL", String::new()) == "bbr" { QuicCongestion::Bbr } else { defaults.congestion },
        initial_window_bytes: setting("WINDOW", defaults.initial_window_bytes),
        window_bytes: setting("RECEIVE", defaults.window_bytes),
        ack_threshold: setting("ACKS", defaults.ack_threshold),
        ..defaults
    };
    LinkOptions { quic, ..LinkOptions::default() }
}

fn transport() -> Transport {
    if setting("TRANSPORT", String::new()) == "tls" { Transport::Tls } else { Transport::Quic }
}

fn setting<T: FromStr>(name: &str, default: T) -> T {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn identity(ca: &JobCa, me: u32) -> Arc<Identity> {
    let request = KeyRequest::generate().unwrap();
    let certificate = ca.issue(request.request_pem(), SidecarIndex(me), day()).unwrap();
    let id = ca.id_of(SidecarIndex(me));
    Arc::new(request.into_identity(&certificate, ca.ca_certificate_pem(), id).unwrap())
}

fn day() -> Validity {
    Validity::starting(SystemTime::now(), Duration::from_secs(86_400))
}

fn job() -> JobName {
    JobName::new("bench").unwrap()
}

const PURPOSE: Purpose = Purpose::Data(Lane(0));
const CHUNKS_IN_FLIGHT: usize = 16;
/// Seconds for path MTU discovery and for the congestion window to grow.
const WARM_UP: f64 = 1.0;
