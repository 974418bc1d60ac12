//! A sidecar: an engine, the rules of memberships, and the sessions of its workers.

use std::collections::{BTreeMap, BTreeSet};

use ronde_engine::{Engine, EngineConfig, Memberships, Time};
use ronde_wire::{Epoch, Rank, RequestId, SidecarIndex, WorkerNumber, World};

use super::launcher::Seats;
use super::net::Message;

/// A sidecar by its index.
pub(super) struct Host {
    pub(super) alive: bool,
    pub(super) engine: Engine,
    pub(super) rules: Memberships,
    /// The membership that is entered next, and its world.
    pub(super) next: Option<(Seats, World)>,
    /// The sessions of its workers.
    pub(super) sessions: BTreeMap<u32, HostSession>,
    pub(super) running: Option<Epoch>,
    /// Ended epochs whose memory the lanes use.
    pub(super) releasing: BTreeSet<Epoch>,
    /// Requests without an answer.
    pub(super) requests: BTreeMap<RequestId, (u32, u64)>,
    /// Messages that wait for a link.
    pub(super) outbox: BTreeMap<usize, Vec<Message>>,
    /// Peers that it dials.
    pub(super) dialling: BTreeSet<usize>,
    /// The last rank of each worker, for [`super::ElasticBug::StaleRank`].
    pub(super) last_ranks: BTreeMap<u32, Rank>,
}

/// A session.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostSession {
    pub(super) number: u64,
    /// Its rank in the current membership.
    pub(super) rank: Option<Rank>,
    /// Whether it takes part in an epoch, or did.
    pub(super) in_epoch: bool,
}

pub(super) fn world_of(seats: &Seats) -> World {
    let placement = seats.seats.iter().map(|(_, host)| index(*host)).collect();
    World::new(placement).expect("few ranks")
}

pub(super) fn numbers_of(seats: &Seats) -> Vec<WorkerNumber> {
    seats.workers().into_iter().map(WorkerNumber).collect()
}

pub(super) fn index(host: usize) -> SidecarIndex {
    SidecarIndex(u32::try_from(host).expect("few hosts"))
}

impl Host {
    /// A sidecar that starts within this membership, which is not committed.
    pub(super) fn new(me: usize, seats: &Seats, now: Time) -> Self {
        let config = EngineConfig {
            control_fan_out: 2,
            epochs_after: Epoch::before_membership(seats.number),
            ..EngineConfig::new(index(me), world_of(seats))
        };
        Self {
            alive: true,
            engine: Engine::new(config, now),
            rules: Memberships::new(seats.number, numbers_of(seats), false),
            next: None,
            sessions: BTreeMap::new(),
            running: None,
            releasing: BTreeSet::new(),
            requests: BTreeMap::new(),
            outbox: BTreeMap::new(),
            dialling: BTreeSet::new(),
            last_ranks: BTreeMap::new(),
        }
    }

    /// The end of a membership: sessions that took part in an epoch are past, the others wait.
    pub(super) fn end_membership(&mut self) {
        self.sessions.values_mut().for_each(|session| session.rank = None);
        self.outbox.clear();
        self.dialling.clear();
    }
}
