//! The `/status` page: the engine's state, the job, the traffic, and the path to each peer.

use ronde_engine::Status;
use ronde_transport::{CertificateFacts, LinkSecurity, PathStats, utc};
use ronde_wire::control::{Purpose, Transport};
use ronde_wire::{JobName, Lane, SidecarIndex};
use serde::Serialize;

use crate::driver::snapshot::Snapshot;

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

/// Totals of all ports since the start.
#[derive(Serialize)]
struct Traffic {
    sealed_bytes: u64,
    opened_bytes: u64,
    operations: u64,
}

#[derive(Serialize)]
struct Path {
    peer: u32,
    /// The path of control messages.
    carrier: &'static str,
    /// The path of data.
    data_carrier: &'static str,
    address: String,
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
    fn of(peer: SidecarIndex, path: &PathStats, transport: Transport, security: Option<&LinkSecurity>) -> Self {
        let measured = path.quic.as_ref().map(|quic| Measured {
            round_trip_us: whole(quic.round_trip.as_micros()),
            datagram_bytes: quic.datagram_bytes,
            packets_sent: quic.packets_sent,
            packets_lost: quic.packets_lost,
        });
        Self {
            peer: peer.0,
            carrier: path.carrier.as_str(),
            data_carrier: transport.carrier(Purpose::Data(Lane(0))).as_str(),
            address: path.peer_address.to_string(),
            measured,
            security: security.map(Security::of),
        }
    }
}

impl StatusPage {
    /// Builds the page.
    pub(super) fn new(job: JobName, snapshot: Snapshot) -> Self {
        let ports = || snapshot.lanes.iter().map(|lane| lane.port).chain([snapshot.control]);
        let traffic = Traffic {
            sealed_bytes: ports().map(|port| port.sealed_bytes).sum(),
            opened_bytes: ports().map(|port| port.opened_bytes).sum(),
            operations: snapshot.engine.executed,
        };
        let security =
            |of: SidecarIndex| snapshot.security.iter().find(|(peer, _)| *peer == of).map(|(_, found)| found);
        Self {
            job,
            version: env!("CARGO_PKG_VERSION"),
            up_ms: whole(snapshot.up.as_millis()),
            transport: snapshot.transport.as_str(),
            traffic,
            sessions: Sessions { live: snapshot.sessions, over_ring: snapshot.ring_sessions },
            paths: snapshot
                .paths
                .iter()
                .map(|(peer, path)| Path::of(*peer, path, snapshot.transport, security(*peer)))
                .collect(),
            engine: snapshot.status,
        }
    }
}

fn whole(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
