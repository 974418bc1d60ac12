//! The control links between sidecars, a tree with the coordinator at its root, and what each sidecar passes on over them
//! for those below it. To the engine it looks as if the coordinator had a link to everybody.
//!
//! A *way* is what a sidecar has to the coordinator over the links above it. It is made anew from the top whenever one of
//! them is: the parent says [`Control::PathUp`] with a number, the sidecar answers [`Ascent::Joined`], the coordinator
//! [`Control::Welcome`], and only then does the sidecar let those below it join. Frames upwards carry that number, and
//! what a sidecar hears before it is welcome is not for it: so nothing from an older way is ever taken for something from
//! the present one. The children of the coordinator need none of this for themselves, a link is their way.

pub(crate) mod tree;

mod ascent;
mod descent;
mod silence;

use std::collections::{BTreeMap, VecDeque};

use ronde_wire::{Ascent, Control, Epoch, Failure, OpId, Seq, SidecarIndex, SidecarSet};

use self::tree::Tree;
use crate::engine::Stats;
use crate::event::Action;

/// One sidecar's part of the tree.
#[derive(Debug)]
pub(crate) struct Relay {
    me: SidecarIndex,
    lanes: u16,
    tree: Tree,
    path: Path,
    parent_up: bool,
    children: BTreeMap<SidecarIndex, Child>,
    /// The newest number given to a child.
    generation: u64,
    /// At the coordinator: those below its children who have joined.
    joined: SidecarSet,
    /// On their way up.
    ascents: Vec<Ascent>,
    /// The epoch that the coordinator was busy with when it was last heard; 0 for none.
    epoch: Epoch,
    silence: silence::Silence,
}

/// What a sidecar has to the coordinator. Children of the coordinator have `Up` when they may relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Down,
    /// The coordinator was told under this number.
    Joining(u64),
    /// It has answered.
    Up(u64),
}

/// A link to a child.
#[derive(Debug, Default)]
struct Child {
    up: bool,
    /// Under which number it may join.
    generation: Option<u64>,
}

/// What has come out of the tree.
#[derive(Debug)]
pub(crate) enum RelayEvent {
    /// There is a way between the coordinator and this sidecar: at the coordinator from any other one, elsewhere from the
    /// coordinator, whose lanes are not known there.
    Up { peer: SidecarIndex, lanes: u16 },
    /// Ways are gone, because of one sidecar.
    Down { peers: Vec<SidecarIndex>, culprit: SidecarIndex, reason: String },
    /// A message.
    Message { from: SidecarIndex, id: OpId, message: Control },
    /// A sidecar that is no neighbour has broken the protocol, in words that follow "it".
    Violation { peer: SidecarIndex, what: String },
    /// The coordinator wants the link to a child closed.
    Expel { child: SidecarIndex, reason: String },
}

/// Where a relay puts what it sends.
pub(crate) struct RelayOutput<'a> {
    pub(crate) actions: &'a mut VecDeque<Action>,
    pub(crate) stats: &'a mut Stats,
}

impl RelayOutput<'_> {
    fn send(&mut self, to: SidecarIndex, epoch: Epoch, seq: Seq, message: Control) {
        self.actions.push_back(Action::Send { to, epoch, seq, message });
    }
}

impl Relay {
    pub(crate) fn new(tree: Tree, me: SidecarIndex, lanes: u16) -> Self {
        let children = tree.branches().iter().map(|branch| (branch.child, Child::default())).collect();
        Self {
            me,
            lanes,
            tree,
            path: Path::Down,
            parent_up: false,
            children,
            generation: 0,
            joined: SidecarSet::EMPTY,
            ascents: Vec::new(),
            epoch: Epoch(0),
            silence: silence::Silence::default(),
        }
    }

    /// The sidecar above this one, `None` at the coordinator.
    pub(crate) fn parent(&self) -> Option<SidecarIndex> {
        self.tree.parent()
    }

    pub(crate) fn children(&self) -> impl Iterator<Item = SidecarIndex> {
        self.children.keys().copied()
    }

    /// Whether a control link joins this sidecar to another.
    pub(crate) fn is_neighbour(&self, peer: SidecarIndex) -> bool {
        self.parent() == Some(peer) || self.children.contains_key(&peer)
    }

    /// Whether what the coordinator says arrives here. True without any link where that would be a link to the coordinator
    /// itself: such a link is opened by sending.
    pub(crate) fn is_joined(&self) -> bool {
        !self.is_deep() || matches!(self.path, Path::Up(_))
    }

    /// Whether nothing can be sent before the link to the parent is open, which nobody has asked for yet.
    pub(crate) fn lacks_parent(&self) -> bool {
        self.is_deep() && !self.parent_up
    }

    /// Whether any child's link is open.
    pub(crate) fn has_children(&self) -> bool {
        self.children.values().any(|child| child.up)
    }

    /// Whether those below may still need this sidecar, because the coordinator, another one, is busy with an epoch.
    pub(crate) fn is_needed(&self) -> bool {
        let relays = self.children.values().any(|child| child.generation.is_some());
        relays && !self.is_root() && self.epoch != Epoch(0)
    }

    /// At the coordinator: what it is busy with now.
    pub(crate) fn set_epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    /// The epoch that the coordinator was busy with when it was last heard; 0 for none.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    #[cfg(test)]
    pub(crate) fn generation_of(&self, child: SidecarIndex) -> Option<u64> {
        self.children.get(&child)?.generation
    }

    /// A link of the tree is open.
    pub(crate) fn link_up(&mut self, out: &mut RelayOutput<'_>, peer: SidecarIndex, lanes: u16) -> Vec<RelayEvent> {
        if self.parent() == Some(peer) {
            let mut events = self.lose_path(out, peer, RENEWED);
            self.parent_up = true;
            if !self.is_deep() {
                events.push(RelayEvent::Up { peer, lanes });
            }
            return events;
        }
        let Some(child) = self.children.get_mut(&peer) else { return Vec::new() };
        let renewed = std::mem::replace(&mut child.up, true) && child.generation.is_some();
        let mut events = if renewed { self.lose_child(peer, RENEWED) } else { Vec::new() };
        self.open_branch(out, peer);
        if self.is_root() {
            events.push(RelayEvent::Up { peer, lanes });
        }
        events
    }

    /// A link of the tree is gone.
    pub(crate) fn link_down(&mut self, out: &mut RelayOutput<'_>, peer: SidecarIndex, reason: &str) -> Vec<RelayEvent> {
        if self.parent() == Some(peer) {
            self.parent_up = false;
            let mut events = self.lose_path(out, peer, reason);
            if !self.is_deep() {
                events.push(RelayEvent::Down { peers: vec![peer], culprit: peer, reason: reason.to_owned() });
            }
            return events;
        }
        match self.children.get_mut(&peer) {
            Some(child) => child.up = false,
            None => return Vec::new(),
        }
        self.lose_child(peer, reason)
    }

    /// A frame of a neighbour.
    ///
    /// # Errors
    /// How it breaks the protocol, in words that follow "it".
    pub(crate) fn receive(
        &mut self,
        out: &mut RelayOutput<'_>,
        from: SidecarIndex,
        id: OpId,
        message: Control,
    ) -> Result<Vec<RelayEvent>, String> {
        let from_parent = self.parent() == Some(from);
        if !from_parent && !self.children.contains_key(&from) {
            return Err("sends control messages over a link that the job does not have; start all sidecars with the \
                        same configuration"
                .to_owned());
        }
        match message {
            Control::Ascending { generation, ascents } if !from_parent => self.ascend(out, from, generation, ascents),
            Control::Descending { to, message } if from_parent => self.descend(out, id, to, &message),
            Control::PathUp { generation } if from_parent => Ok(self.path_up(out, id.epoch, generation)),
            Control::PathDown { sidecar, reason } if from_parent => self.path_down(out, sidecar, &reason),
            Control::Silent { sidecars } => self.receive_silence(from, sidecars).map(|()| Vec::new()),
            Control::Heartbeat { .. } => {
                if from_parent {
                    self.epoch = id.epoch;
                }
                Ok(vec![RelayEvent::Message { from, id, message }])
            }
            message if is_for_one_link(&message) => Err("sends what its place on the tree does not allow".to_owned()),
            message if self.is_root() => Ok(vec![RelayEvent::Message { from, id, message }]),
            message if from_parent && !self.is_deep() => {
                self.epoch = id.epoch;
                self.receive_from_coordinator(out, id, message)
            }
            _ => Err("sends by itself what has to be passed on along the tree".to_owned()),
        }
    }

    /// Says to the coordinator, which is not this sidecar. Lost when there is no way.
    pub(crate) fn send_up(&mut self, out: &mut RelayOutput<'_>, epoch: Epoch, seq: Seq, message: Control) {
        match self.parent() {
            Some(parent) if !self.is_deep() => out.send(parent, epoch, seq, message),
            _ if matches!(self.path, Path::Up(_)) => self.enclose(epoch, seq, &message),
            _ => {}
        }
    }

    fn is_root(&self) -> bool {
        self.parent().is_none()
    }

    /// Whether other sidecars lie between this one and the coordinator.
    fn is_deep(&self) -> bool {
        self.parent().is_some() && self.parent() != self.tree.root()
    }

    /// Lets a child join, where that is possible and there is a use for it.
    fn open_branch(&mut self, out: &mut RelayOutput<'_>, child: SidecarIndex) {
        let relays = self.tree.branch(child).is_some_and(|branch| branch.relays);
        let open = if self.is_root() { relays } else { matches!(self.path, Path::Up(_)) };
        let Some(link) = self.children.get_mut(&child).filter(|link| link.up && open) else { return };
        self.generation += 1;
        link.generation = Some(self.generation);
        out.send(child, self.epoch, Seq(0), Control::PathUp { generation: self.generation });
    }

    fn open_branches(&mut self, out: &mut RelayOutput<'_>) {
        for child in self.children().collect::<Vec<_>>() {
            self.open_branch(out, child);
        }
    }

    fn lose_child(&mut self, child: SidecarIndex, reason: &str) -> Vec<RelayEvent> {
        let generation = self.children.get_mut(&child).and_then(|link| link.generation.take());
        self.silence.forget(child);
        let reason = cut(reason);
        if !self.is_root() {
            if generation.is_some() && matches!(self.path, Path::Up(_)) {
                self.ascents.push(Ascent::Lost { sidecar: child, reason });
            }
            return Vec::new();
        }
        let mut peers = vec![child];
        peers.extend(self.take_joined(child));
        vec![RelayEvent::Down { peers, culprit: child, reason }]
    }

    /// At the coordinator: those below a sidecar, and itself, who had joined and have not any more.
    fn take_joined(&mut self, top: SidecarIndex) -> Vec<SidecarIndex> {
        let lost = self.tree.subtree(top).and(&self.joined);
        self.joined = self.joined.without(&lost);
        lost.iter().collect()
    }

    /// There is no way to the coordinator any more, neither for this sidecar nor for those below.
    fn lose_path(&mut self, out: &mut RelayOutput<'_>, culprit: SidecarIndex, reason: &str) -> Vec<RelayEvent> {
        let before = std::mem::replace(&mut self.path, Path::Down);
        self.ascents.clear();
        self.silence.forget_above();
        self.epoch = Epoch(0);
        let reason = cut(reason);
        for (child, link) in &mut self.children {
            if link.generation.take().is_some() {
                let down = Control::PathDown { sidecar: culprit, reason: reason.clone() };
                out.send(*child, Epoch(0), Seq(0), down);
            }
        }
        match (before, self.tree.root()) {
            (Path::Up(_), Some(root)) if self.is_deep() => {
                vec![RelayEvent::Down { peers: vec![root], culprit, reason }]
            }
            _ => Vec::new(),
        }
    }
}

/// Messages about one link or way: neither for the coordinator nor from it.
fn is_for_one_link(message: &Control) -> bool {
    matches!(
        message,
        Control::Heartbeat { .. }
            | Control::Ascending { .. }
            | Control::Descending { .. }
            | Control::PathUp { .. }
            | Control::PathDown { .. }
            | Control::Silent { .. }
    )
}

/// A reason within its limit.
fn cut(reason: &str) -> String {
    Failure::new(ronde_wire::Cause::SidecarLost, reason).reason
}

const RENEWED: &str = "its control link was made anew";
