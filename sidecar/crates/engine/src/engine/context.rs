//! What both parts of an engine, participant and coordinator, share: settings, time, links, counters and the two queues
//! of what they want done.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ronde_wire::{Control, Epoch, Member, Rank, Seq, SetId, SetTopology, SidecarIndex};

use super::config::EngineConfig;
use super::liveness::Links;
use super::status::Stats;
use crate::event::{Action, Time};

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) config: EngineConfig,
    pub(crate) coordinator: SidecarIndex,
    /// The sidecars of the world, ascending.
    pub(crate) sidecars: Vec<SidecarIndex>,
    pub(crate) now: Time,
    pub(crate) links: Links,
    pub(crate) stats: Stats,
    /// Why the newest orders got their algorithms, newest last.
    pub(crate) selections: VecDeque<String>,
    pub(crate) actions: VecDeque<Action>,
    /// Messages of this sidecar to itself: the same code handles them as those of others.
    pub(crate) loopback: VecDeque<Envelope>,
    sets: BTreeMap<SetId, Arc<SetView>>,
}

/// How many reasons of selections are kept for the status page.
const SELECTIONS_MAX: usize = 8;

/// A control message with its frame's numbers.
#[derive(Debug)]
pub(crate) struct Envelope {
    pub(crate) epoch: Epoch,
    pub(crate) seq: Seq,
    pub(crate) message: Control,
}

/// A process set as this sidecar sees it.
#[derive(Debug)]
pub(crate) struct SetView {
    pub(crate) topology: SetTopology,
    /// All ranks of the set, ascending.
    pub(crate) ranks: Vec<Rank>,
    /// This sidecar's position among the members.
    pub(crate) me: Option<Member>,
    /// The ranks of the set that this sidecar serves, ascending.
    pub(crate) local_ranks: Vec<Rank>,
}

impl Context {
    pub(crate) fn new(config: EngineConfig, now: Time) -> Self {
        let config = config.in_order();
        let sidecars = config.world.sidecars();
        let peers = sidecars.iter().copied().filter(|s| *s != config.me);
        Self {
            coordinator: config.world.coordinator(),
            now,
            links: Links::new(peers, now),
            stats: Stats::default(),
            selections: VecDeque::new(),
            actions: VecDeque::new(),
            loopback: VecDeque::new(),
            sets: BTreeMap::new(),
            sidecars,
            config,
        }
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

    pub(crate) fn send(&mut self, to: SidecarIndex, epoch: Epoch, seq: Seq, message: Control) {
        if to == self.config.me {
            self.loopback.push_back(Envelope { epoch, seq, message });
        } else {
            self.actions.push_back(Action::Send { to, epoch, seq, message });
        }
    }

    /// The view of a set, made when it is first asked for: a world may have many large sets that nobody uses.
    pub(crate) fn set(&mut self, id: SetId) -> Option<Arc<SetView>> {
        if let Some(view) = self.sets.get(&id) {
            return Some(Arc::clone(view));
        }
        let topology = self.config.world.topology(id)?;
        let me = topology.member(self.config.me);
        let local_ranks = me.map(|me| topology.members[me.index()].ranks.clone()).unwrap_or_default();
        let view = Arc::new(SetView { ranks: topology.ranks(), me, local_ranks, topology });
        self.sets.insert(id, Arc::clone(&view));
        Some(view)
    }

    /// The view of a set that was asked for before.
    pub(crate) fn known_set(&self, id: SetId) -> Option<&SetView> {
        self.sets.get(&id).map(Arc::as_ref)
    }

    pub(crate) fn serves(&self, sidecar: SidecarIndex, rank: Rank) -> bool {
        self.config.world.sidecar_of(rank) == Some(sidecar)
    }
}

impl SetView {
    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.ranks.binary_search(&rank).is_ok()
    }

    /// The sidecar that reports operations of the set as done.
    pub(crate) fn first_member(&self) -> SidecarIndex {
        self.topology.members[0].sidecar
    }
}
