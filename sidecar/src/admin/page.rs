//! The `/status` page: the engine's state, the job, the traffic, and the path to each peer.

use ronde_engine::Status;
use ronde_shm::PciAddress;
use ronde_transport::{CertificateFacts, LinkSecurity, PathStats, utc};
use ronde_wire::control::Purpose;
use ronde_wire::{JobName, Lane, Rank, SidecarIndex};
use serde::Serialize;

use crate::driver::GpuState;
use crate::driver::snapshot::Snapshot;
use crate::session::gpu_use::GpuUse;

/// The page.
#[derive(Serialize)]
pub(super) struct StatusPage {
    job: JobName,
    version: &'static str,
    up_ms: u64,
    /// The transport setting.
    transport: &'static str,
    traffic: Traffic,
    sessions: Sessions,
    /// Connections of NCCL's net plugin.
    nccl: Nccl,
    plugins: Plugins,
    /// Absent unless GPUs were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<Gpu>,
    /// How each local worker uses each GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gpu_levels: Vec<GpuLevels>,
    /// Control links that are up.
    paths: Vec<Path>,
    #[serde(flatten)]
    engine: Status,
}

/// The attached workers, and how their submissions arrive.
#[derive(Serialize)]
struct Sessions {
    live: usize,
    over_ring: usize,
}

/// Connections of NCCL's net plugin, and their bytes since the start.
#[derive(Serialize)]
struct Nccl {
    connections: usize,
    sent_bytes: u64,
    received_bytes: u64,
}

/// What plugins have done since the start.
#[derive(Serialize)]
struct Plugins {
    /// Spans of tensors that they worked on, and those of them that failed.
    spans: u64,
    faults: u64,
    /// Time of all lanes in plugins.
    time_us: u64,
    /// State that codecs keep between operations, such as residuals.
    state_bytes: u64,
}

/// What the sidecar does on GPUs.
#[derive(Serialize)]
struct Gpu {
    /// Why they are not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
    gpus: usize,
    /// The version of NCCL.
    nccl: String,
    /// Device memory that workers share with the sidecar.
    imported_bytes: u64,
    /// Operations that NCCL performed, that it performed within this host only, and whose tensors were copied to the host.
    nccl_operations: u64,
    two_level_operations: u64,
    copied_operations: u64,
    /// Collectives of NCCL whose communicators were aborted.
    aborted: u64,
}

impl Gpu {
    fn of(snapshot: &Snapshot) -> Option<Self> {
        let stats = snapshot.gpu_stats();
        let (unavailable, gpus, nccl) = match &snapshot.gpus {
            GpuState::Off => return None,
            GpuState::Unavailable(reason) => (Some(reason.clone()), 0, String::new()),
            GpuState::Used { gpus, nccl: (major, minor, patch) } => (None, *gpus, format!("{major}.{minor}.{patch}")),
        };
        Some(Self {
            unavailable,
            gpus,
            nccl,
            imported_bytes: snapshot.device_bytes,
            nccl_operations: stats.nccl,
            two_level_operations: stats.two_levels,
            copied_operations: stats.copied,
            aborted: stats.aborted,
        })
    }
}

/// How a worker uses a GPU: operations on it by level.
#[derive(Serialize)]
struct GpuLevels {
    rank: u32,
    /// Where it is on the bus.
    gpu: String,
    levels: Vec<Level>,
}

/// Operations that took one path.
#[derive(Serialize)]
struct Level {
    /// 2 if NCCL reduced within the host, and ronde between hosts; else 1.
    level: u8,
    /// What carries the bytes of the GPU.
    transport: String,
    operations: u64,
    /// Of this rank's contributions.
    bytes: u64,
}

impl GpuLevels {
    fn of((rank, gpu, used): &(Rank, PciAddress, GpuUse)) -> Self {
        let number = used.nccl_version;
        let nccl = format!("NCCL {}.{}.{}", number / 10_000, number / 100 % 100, number % 100);
        let levels = [
            (1, "host memory".to_owned(), used.copied),
            (2, format!("{nccl} within the host"), used.two_levels),
            (1, "device memory, by the sidecar".to_owned(), used.shared),
        ];
        let levels = levels.into_iter().filter(|(.., used)| used.operations > 0);
        let levels = levels.map(|(level, transport, used)| Level {
            level,
            transport,
            operations: used.operations,
            bytes: used.bytes,
        });
        Self { rank: rank.0, gpu: gpu.to_string(), levels: levels.collect() }
    }
}

/// Totals of all ports since the start.
#[derive(Serialize)]
struct Traffic {
    sealed_bytes: u64,
    opened_bytes: u64,
    operations: u64,
    /// Bytes of tensors: read from local contributions, and written as results.
    contributed_bytes: u64,
    published_bytes: u64,
}

impl Traffic {
    fn of(snapshot: &Snapshot) -> Self {
        let ports = || snapshot.lanes.iter().map(|lane| lane.port).chain([snapshot.control]);
        let executors = || snapshot.lanes.iter().map(|lane| lane.executor).chain([snapshot.inline]);
        Self {
            sealed_bytes: ports().map(|port| port.sealed_bytes).sum(),
            opened_bytes: ports().map(|port| port.opened_bytes).sum(),
            operations: snapshot.engine.executed,
            contributed_bytes: executors().map(|executor| executor.contributed_bytes).sum(),
            published_bytes: executors().map(|executor| executor.published_bytes).sum(),
        }
    }
}

#[derive(Serialize)]
struct Path {
    peer: u32,
    /// The path of control messages.
    carrier: &'static str,
    /// The path of data.
    data_carrier: &'static str,
    address: String,
    /// Encrypted bytes of the control link and of all lanes, since the connections were made.
    sent_bytes: u64,
    received_bytes: u64,
    /// Absent where the connection does not measure it.
    #[serde(flatten)]
    measured: Option<Measured>,
    #[serde(flatten)]
    security: Option<Security>,
}

/// What a QUIC connection measures of its path.
#[derive(Serialize)]
struct Measured {
    round_trip_us: u64,
    datagram_bytes: u16,
    packets_sent: u64,
    packets_lost: u64,
}

/// How a link is encrypted and authenticated.
#[derive(Serialize)]
struct Security {
    /// The cipher suite: the only one that both sides offer and accept.
    cipher: &'static str,
    /// The key exchange group: likewise.
    key_exchange: &'static str,
    /// The certificate that this side presented when the link's connection was made.
    certificate: Certificate,
    /// The certificate that the peer presented.
    peer_certificate: Certificate,
}

impl Security {
    fn of(security: &LinkSecurity) -> Self {
        Self {
            cipher: security.suite,
            key_exchange: security.key_exchange,
            certificate: Certificate::of(&security.own),
            peer_certificate: Certificate::of(&security.peer),
        }
    }
}

/// A certificate of a link's connection.
#[derive(Serialize)]
struct Certificate {
    serial: String,
    until: String,
}

impl Certificate {
    fn of(facts: &CertificateFacts) -> Self {
        Self { serial: facts.serial.clone(), until: utc(facts.not_after) }
    }
}

impl Path {
    fn of(peer: SidecarIndex, path: &PathStats, snapshot: &Snapshot) -> Self {
        let security = snapshot.security.iter().find(|(other, _)| *other == peer).map(|(_, found)| found);
        let lanes = || snapshot.lanes.iter().flat_map(|lane| &lane.paths).filter(|(other, _)| *other == peer);
        let measured = path.quic.as_ref().map(|quic| Measured {
            round_trip_us: whole(quic.round_trip.as_micros()),
            datagram_bytes: quic.datagram_bytes,
            packets_sent: quic.packets_sent,
            packets_lost: quic.packets_lost,
        });
        Self {
            peer: peer.0,
            carrier: path.carrier.as_str(),
            data_carrier: snapshot.transport.carrier(Purpose::Data(Lane(0))).as_str(),
            address: path.peer_address.to_string(),
            sent_bytes: path.sent_bytes + lanes().map(|(_, lane)| lane.sent_bytes).sum::<u64>(),
            received_bytes: path.received_bytes + lanes().map(|(_, lane)| lane.received_bytes).sum::<u64>(),
            measured,
            security: security.map(Security::of),
        }
    }
}

impl StatusPage {
    /// Builds the page.
    pub(super) fn new(job: JobName, snapshot: &Snapshot) -> Self {
        let streams = snapshot.streams();
        Self {
            job,
            version: env!("CARGO_PKG_VERSION"),
            up_ms: whole(snapshot.up.as_millis()),
            transport: snapshot.transport.as_str(),
            traffic: Traffic::of(snapshot),
            nccl: Nccl {
                connections: streams.open,
                sent_bytes: streams.sent_bytes,
                received_bytes: streams.received_bytes,
            },
            plugins: Plugins {
                spans: snapshot.plugins.spans,
                faults: snapshot.plugins.faults,
                time_us: whole(snapshot.plugins.time.as_micros()),
                state_bytes: snapshot.plugins.state_bytes,
            },
            sessions: Sessions { live: snapshot.sessions, over_ring: snapshot.ring_sessions },
            gpu: Gpu::of(snapshot),
            gpu_levels: snapshot.gpu_uses.0.iter().map(GpuLevels::of).collect(),
            paths: snapshot.paths.iter().map(|(peer, path)| Path::of(*peer, path, snapshot)).collect(),
            engine: snapshot.status.clone(),
        }
    }
}

fn whole(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
