//! The state that participant and coordinator share: settings, time, links, counters, and the queues of actions and
//! local messages.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ronde_wire::{Control, Epoch, OpId, Rank, Seq, SetId, SidecarIndex, SidecarSet, World};

use super::calibration::Calibration;
use super::config::EngineConfig;
use super::links::{Link, Links};
use super::sets::SetView;
use super::stats::Stats;
use super::status::LinkStatus;
use super::tuning::Tuner;
use crate::event::{Action, Time};
use crate::relay::tree::Tree;
use crate::relay::{Relay, RelayOutput};
use crate::trace::Traces;

/// The shared state of an engine.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) config: EngineConfig,
    /// The search for better settings, at the coordinator.
    pub(crate) tuner: Tuner,
    /// The measurement of the cost model, at the coordinator if it was asked for.
    pub(crate) calibration: Option<Calibration>,
    pub(crate) coordinator: SidecarIndex,
    /// The sidecars of the world, ascending.
    pub(crate) sidecars: Vec<SidecarIndex>,
    /// The same sidecars as a set.
    pub(crate) all_sidecars: SidecarSet,
    pub(crate) now: Time,
    pub(crate) relay: Relay,
    pub(crate) links: Links,
    pub(crate) stats: Stats,
    /// The reasons for the algorithms of the newest orders, newest last.
    pub(crate) selections: VecDeque<String>,
    /// Descriptions of adjusted settings.
    pub(crate) notes: Vec<String>,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) traces: Traces,
    /// Messages of this sidecar to itself, which the same code handles as remote ones.
    pub(crate) loopback: VecDeque<Envelope>,
    sets: BTreeMap<SetId, Arc<SetView>>,
}

/// How many reasons of selections are kept for the status page.
const SELECTIONS_MAX: usize = 8;

/// A control message with its frame's numbers.
#[derive(Debug)]
pub(crate) struct Envelope {
    pub(crate) id: OpId,
    pub(crate) message: Control,
}

impl Context {
    /// The control links to neighbours on the tree.
    pub(crate) fn link_status(&self, now: Time) -> Vec<LinkStatus> {
        let neighbours = self.links.iter().filter(|(peer, _)| self.relay.is_neighbour(*peer));
        let status = |(peer, link): (SidecarIndex, &Link)| LinkStatus {
            peer,
            up: link.up,
            silent_ms: now.ms_since(link.last_seen),
            round_trip_us: link.round_trip_us,
            clock_offset_us: link.clock_offset_us,
        };
        neighbours.map(status).collect()
    }

    pub(crate) fn new(config: EngineConfig, now: Time) -> Self {
        let notes = config.notes();
        let config = config.in_order();
        let sidecars = config.world.sidecars();
        let (me, coordinator) = (config.me, config.world.coordinator());
        let tuner = Tuner::new(&config, me == coordinator);
        let relay = Relay::new(Tree::new(&sidecars, coordinator, me, config.control_fan_out), me, config.lanes);
        // The coordinator tracks all sidecars, every other sidecar only its neighbours in the tree.
        let is_known = |peer: &SidecarIndex| *peer != me && (me == coordinator || relay.is_neighbour(*peer));
        let links = Links::new(sidecars.iter().copied().filter(is_known), now);
        Self {
            coordinator,
            now,
            links,
            relay,
            all_sidecars: sidecars.iter().copied().collect(),
            stats: Stats::default(),
            selections: VecDeque::new(),
            notes,
            actions: VecDeque::new(),
            traces: Traces::default(),
            loopback: VecDeque::new(),
            sets: BTreeMap::new(),
            sidecars,
            tuner,
            calibration: config.measured_gamma_us_per_byte.filter(|_| me == coordinator).map(Calibration::new),
            config,
        }
    }

    /// Replaces the world, and with it all links and their tree.
    pub(crate) fn enter(&mut self, world: World) {
        let mut config = EngineConfig { world, ..self.config.clone() };
        let tuner = std::mem::take(&mut self.tuner).restarted(&mut config);
        let next = Self { tuner, ..Self::new(config, self.now) };
        let before = std::mem::replace(self, next);
        (self.stats, self.selections, self.traces) = (before.stats, before.selections, before.traces);
    }

    pub(crate) fn me(&self) -> SidecarIndex {
        self.config.me
    }

    pub(crate) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(crate) fn note_selection(&mut self, reason: String) {
        if self.selections.len() == SELECTIONS_MAX {
            self.selections.pop_front();
        }
        self.selections.push_back(reason);
    }

    /// Sends a message to the coordinator.
    pub(crate) fn send_up(&mut self, epoch: Epoch, seq: Seq, message: Control) {
        if self.coordinator == self.config.me {
            self.loopback.push_back(Envelope { id: OpId { epoch, seq }, message });
            return;
        }
        let (relay, mut out) = self.relay();
        relay.send_up(&mut out, epoch, seq, message);
        if self.relay.lacks_parent() {
            self.open_parent_link();
        }
    }

    /// Sends a message of the coordinator to some or all sidecars.
    pub(crate) fn send_down(&mut self, to: &SidecarSet, epoch: Epoch, seq: Seq, message: Control) {
        let (relay, mut out) = self.relay();
        let id = OpId { epoch, seq };
        relay.send_down(&mut out, to, id, &message);
        if to.contains(self.config.me) {
            self.loopback.push_back(Envelope { id, message });
        }
    }

    /// Opens the missing link to the parent: sending any message does that.
    pub(crate) fn open_parent_link(&mut self) {
        let Some(parent) = self.relay.parent() else { return };
        self.heartbeat(parent, Epoch(0));
    }

    pub(crate) fn heartbeat(&mut self, peer: SidecarIndex, epoch: Epoch) {
        self.stats.heartbeats += 1;
        let message = self.links.heartbeat(peer, self.now);
        self.actions.push_back(Action::Send { to: peer, epoch, seq: Seq(0), message });
    }

    /// The tree of control links, and its output.
    pub(crate) fn relay(&mut self) -> (&mut Relay, RelayOutput<'_>) {
        (&mut self.relay, RelayOutput { actions: &mut self.actions, stats: &mut self.stats })
    }

    /// For how long a sidecar has been silent, as observed by this one or, for a sidecar that is no neighbour, by its
    /// neighbours.
    pub(crate) fn silent_ms(&self, peer: SidecarIndex) -> u64 {
        if self.relay.is_neighbour(peer) { self.links.silent_ms(peer, self.now) } else { self.relay.silent_ms(peer) }
    }

    /// Restarts all liveness timers: an epoch begins, or this process itself was paused.
    pub(crate) fn rebase(&mut self) {
        self.links.rebase(self.now);
        self.relay.rebase();
    }

    /// The view of a set of the world, built on first use: a world may have many large unused sets.
    pub(crate) fn world_set(&mut self, id: SetId) -> Option<Arc<SetView>> {
        if let Some(view) = self.sets.get(&id) {
            return Some(Arc::clone(view));
        }
        let view = Arc::new(SetView::new(self.config.me, self.config.world.topology(id)?));
        self.sets.insert(id, Arc::clone(&view));
        Some(view)
    }

    pub(crate) fn serves(&self, sidecar: SidecarIndex, rank: Rank) -> bool {
        self.config.world.sidecar_of(rank) == Some(sidecar)
    }
}
