//! What both parts of an engine, participant and coordinator, share: settings, time, links, counters and the two queues
//! of what they want done.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ronde_wire::{Control, Epoch, Rank, Seq, SetId, SidecarIndex};

use super::config::EngineConfig;
use super::liveness::Links;
use super::sets::SetView;
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
    /// Settings that were brought into order, in words.
    pub(crate) notes: Vec<String>,
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

impl Context {
    pub(crate) fn new(config: EngineConfig, now: Time) -> Self {
        let notes = config.notes();
        let config = config.in_order();
        let sidecars = config.world.sidecars();
        let peers = sidecars.iter().copied().filter(|s| *s != config.me);
        Self {
            coordinator: config.world.coordinator(),
            now,
            links: Links::new(peers, now),
            stats: Stats::default(),
            selections: VecDeque::new(),
            notes,
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

    /// The view of a set of the world, made when it is first asked for: a world may have many large sets that nobody uses.
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
