//! What `/status` says besides the engine's own picture: the job, the traffic, and the way to each peer.

use ronde_engine::Status;
use ronde_transport::first_suite;
use ronde_wire::JobName;
use serde::Serialize;

use super::Snapshot;

/// The page.
#[derive(Serialize)]
pub(super) struct StatusPage {
    job: JobName,
    version: &'static str,
    up_ms: u64,
    /// What all links run over.
    transport: &'static str,
    /// The first suite of the list that all sidecars of a release have alike, which is the one that they agree on.
    cipher: &'static str,
    traffic: Traffic,
    sessions: Sessions,
    /// Control links that are up.
    paths: Vec<Path>,
    #[serde(flatten)]
    engine: Status,
}

/// Workers that are attached, and how what they submit comes here.
#[derive(Serialize)]
struct Sessions {
    live: usize,
    over_ring: usize,
}

/// Of all ports since the start.
#[derive(Serialize)]
struct Traffic {
    sealed_bytes: u64,
    opened_bytes: u64,
    operations: u64,
}

#[derive(Serialize)]
struct Path {
    peer: u32,
    address: String,
    round_trip_us: u64,
    datagram_bytes: u16,
    packets_sent: u64,
    packets_lost: u64,
}

impl StatusPage {
    /// Puts the page together.
    pub(super) fn new(job: JobName, snapshot: Snapshot) -> Self {
        let ports = || snapshot.lanes.iter().map(|lane| lane.port).chain([snapshot.control]);
        let traffic = Traffic {
            sealed_bytes: ports().map(|port| port.sealed_bytes).sum(),
            opened_bytes: ports().map(|port| port.opened_bytes).sum(),
            operations: snapshot.engine.executed,
        };
        let whole = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        let path = |(peer, path): &(ronde_wire::SidecarIndex, ronde_transport::PathStats)| Path {
            peer: peer.0,
            address: path.peer_address.to_string(),
            round_trip_us: whole(path.round_trip.as_micros()),
            datagram_bytes: path.datagram_bytes,
            packets_sent: path.packets_sent,
            packets_lost: path.packets_lost,
        };
        Self {
            job,
            version: env!("CARGO_PKG_VERSION"),
            up_ms: whole(snapshot.up.as_millis()),
            transport: "QUIC",
            cipher: first_suite(),
            traffic,
            sessions: Sessions { live: snapshot.sessions, over_ring: snapshot.ring_sessions },
            paths: snapshot.paths.iter().map(path).collect(),
            engine: snapshot.status,
        }
    }
}
