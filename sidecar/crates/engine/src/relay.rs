//! The tree of control links with the coordinator at its root, along which each sidecar relays messages for the
//! sidecars below it. The engine sees a direct link between the coordinator and every sidecar.
//!
//! A *path* is a sidecar's route to the coordinator over the links above it. When one of these links is replaced, the
//! path is re-established from the top: the parent sends [`Control::PathUp`] with a number, the sidecar answers
//! [`Ascent::Joined`], the coordinator [`Control::Welcome`], and only then may the sidecars below join. Frames upwards
//! carry that number, and a sidecar drops messages before its welcome. So no message of an older path is mistaken for
//! one of the current path. The children of the coordinator need none of this: their link is their path.

pub(crate) mod tree;

mod ascent;
mod descent;
mod silence;

use std::collections::{BTreeMap, VecDeque};

use ronde_wire::{Ascent, Control, Epoch, Failure, OpId, Seq, SidecarIndex, SidecarSet};

use self::tree::Tree;
use crate::engine::Stats;
use crate::event::Action;

/// The relay of one sidecar.
#[derive(Debug)]
pub(crate) struct Relay {
    me: SidecarIndex,
    lanes: u16,
    tree: Tree,
    path: Path,
    parent_up: bool,
    children: BTreeMap<SidecarIndex, Child>,
    /// The newest number sent to a child.
    generation: u64,
    /// At the coordinator: the sidecars below its children that have joined.
    joined: SidecarSet,
    /// Items to send to the parent.
    ascents: Vec<Ascent>,
    /// The last known epoch of the coordinator; 0 for none.
    epoch: Epoch,
    silence: silence::Silence,
}

/// The state of a sidecar's path to the coordinator. Children of the coordinator have `Up` when they may relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Down,
    /// [`Ascent::Joined`] was sent with this number.
    Joining(u64),
    /// The coordinator has answered.
    Up(u64),
}

/// A link to a child.
#[derive(Debug, Default)]
struct Child {
    up: bool,
    /// The number with which the child may join.
    generation: Option<u64>,
}

/// An event of the tree for the engine.
#[derive(Debug)]
pub(crate) enum RelayEvent {
    /// There is a path between the coordinator and another sidecar: at the coordinator to any peer, elsewhere to the
    /// coordinator, whose number of lanes is unknown there.
    Up { peer: SidecarIndex, lanes: u16 },
    /// Paths are lost, because of one sidecar.
    Down { peers: Vec<SidecarIndex>, culprit: SidecarIndex, reason: String },
    /// A message.
    Message { from: SidecarIndex, id: OpId, message: Control },
    /// A sidecar that is no neighbour has broken the protocol; the text follows "it".
    Violation { peer: SidecarIndex, what: String },
    /// The coordinator requests that the link to a child is closed.
    Expel { child: SidecarIndex, reason: String },
}

/// The output of a relay.
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

    /// Whether there is a path to the coordinator. Always true for a child of the coordinator, even without a link:
    /// sending opens that link.
    pub(crate) fn is_joined(&self) -> bool {
        !self.is_deep() || matches!(self.path, Path::Up(_))
    }

    /// Whether the link to the parent has to be opened before anything can be sent.
    pub(crate) fn lacks_parent(&self) -> bool {
        self.is_deep() && !self.parent_up
    }

    /// Whether any child's link is open.
    pub(crate) fn has_children(&self) -> bool {
        self.children.values().any(|child| child.up)
    }

    /// Whether sidecars below may still need this relay, because the coordinator is busy with an epoch.
    pub(crate) fn is_needed(&self) -> bool {
        let relays = self.children.values().any(|child| child.generation.is_some());
        relays && !self.is_root() && self.epoch != Epoch(0)
    }

    /// At the coordinator: sets its current epoch.
    pub(crate) fn set_epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    /// The last known epoch of the coordinator; 0 for none.
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

    /// A link of the tree is lost.
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

    /// Handles a control message of a neighbour.
    ///
    /// # Errors
    /// How it breaks the protocol, as a text after "it".
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
            message if is_for_one_link(&message) => {
                Err("sends a message that its position in the tree does not allow".to_owned())
            }
            message if self.is_root() => Ok(vec![RelayEvent::Message { from, id, message }]),
            message if from_parent && !self.is_deep() => {
                self.epoch = id.epoch;
                self.receive_from_coordinator(out, id, message)
            }
            _ => Err("sends a message directly that must be relayed along the tree".to_owned()),
        }
    }

    /// Sends a message to the coordinator, which is another sidecar. It is lost when there is no path.
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

    /// Whether there are other sidecars between this one and the coordinator.
    fn is_deep(&self) -> bool {
        self.parent().is_some() && self.parent() != self.tree.root()
    }

    /// Lets a child join, if there is a path and the child needs one.
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

    /// At the coordinator: removes the joined sidecars of a subtree and returns them.
    fn take_joined(&mut self, top: SidecarIndex) -> Vec<SidecarIndex> {
        let lost = self.tree.subtree(top).and(&self.joined);
        self.joined = self.joined.without(&lost);
        lost.iter().collect()
    }

    /// The path to the coordinator is lost, for this sidecar and for those below.
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

/// Whether a message is about one link or path: neither to the coordinator nor from it.
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

const RENEWED: &str = "its control link was replaced";
