//! A hostile sidecar, not that of the coordinator: besides what its engine sends, it sends control messages of every kind
//! in its own name, changed copies of those that others send. After a while an honest process takes its place.
//!
//! Meanwhile its own ranks' operations may fail or give wrong results, so results are not checked. Everything else is: no
//! engine panics, every request gets exactly one answer, honest sidecars admit the same operations in the same order and
//! never break off with each other, and whatever ends an epoch is blamed on the hostile one.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use ronde_wire::control::{Announcement, Intent, decode, encode};
use ronde_wire::{
    Activity, Cause, Collective, Control, DType, Enclosed, Epoch, Failure, FrameKind, Invalidation, ProcessSet, Rank,
    ReduceOp, Request, Seq, SetId, Shape, SidecarIndex, TensorName, World, set_of_members_name,
};

use super::checks::{Property, Violated, violated};
use super::cluster::Cluster;
use super::faults::Fault;
use super::link::{ConnectionId, Direction, Message, Plane};
use super::schedule::SimEvent;

/// The hostile sidecar of a run.
#[derive(Debug)]
pub(super) struct Hostile {
    host: usize,
    index: SidecarIndex,
    ranks: BTreeSet<Rank>,
    /// The ranks of the job.
    size: usize,
    /// Messages that it has yet to send.
    left: u32,
    /// The usual pause between two of them is up to this.
    pause_us: u64,
    /// The last message of each kind that anyone has sent.
    last: BTreeMap<&'static str, (Seq, Control)>,
}

impl Hostile {
    /// Draws one of the sidecars but the coordinator's.
    pub(super) fn new(rng: &mut Rng, world: &World) -> Self {
        let sidecars = world.sidecars();
        let others: Vec<usize> = (0..sidecars.len()).filter(|at| sidecars[*at] != world.coordinator()).collect();
        let host = others[rng.usize(..others.len())];
        let pause_us = [50, 1_000, 20_000][rng.usize(..3)];
        let samples = samples(world).into_iter().map(|message| (message.kind(), (Seq(1), message)));
        let ranks = world.ranks_of(sidecars[host]).into_iter().collect();
        Self {
            host,
            index: sidecars[host],
            ranks,
            size: world.size(),
            left: rng.u32(20..200),
            pause_us,
            last: samples.collect(),
        }
    }

    pub(super) fn host(&self) -> usize {
        self.host
    }

    pub(super) fn index(&self) -> SidecarIndex {
        self.index
    }

    pub(super) fn ranks(&self) -> &BTreeSet<Rank> {
        &self.ranks
    }

    /// Whether a failure leads to it.
    pub(super) fn is_named(&self, failure: &Failure) -> bool {
        let rank = failure.rank.is_some_and(|rank| self.ranks.contains(&rank));
        rank || failure.sidecar == Some(self.index) || failure.reason.contains(&self.index.to_string())
    }

    /// Remembers a message that somebody sends.
    pub(super) fn observe(&mut self, seq: Seq, message: &Control) {
        self.last.insert(message.kind(), (seq, message.clone()));
    }

    /// Draws a message, for an epoch in most cases.
    fn draw(&self, rng: &mut Rng, epoch: Epoch) -> (Epoch, Seq, Control) {
        let kind = Control::KINDS[rng.usize(..Control::KINDS.len())];
        let (seq, message) = self.last.get(kind).cloned().unwrap_or((Seq(0), Control::Done));
        let message = match rng.u8(..8) {
            0 => self.of_sets(rng),
            1 | 2 => message,
            _ => distorted(rng, &message),
        };
        let seq = [seq.0, seq.0, seq.0, seq.0.saturating_add(1), rng.u64(..6), any_end(rng)][rng.usize(..6)];
        let other = [0, epoch.0.saturating_sub(1), epoch.0.saturating_add(1), any_end(rng)][rng.usize(..4)];
        (Epoch(if rng.u8(..6) == 0 { other } else { epoch.0 }), Seq(seq), message)
    }

    /// Announcements about process sets that members form: requests for lists that nobody else knows of, refusals and
    /// withdrawals of requests that were never made. Most are well formed; names are those of honest ranks, too.
    fn of_sets(&self, rng: &mut Rng) -> Control {
        let own: Vec<Rank> = self.ranks.iter().copied().collect();
        let announcement = |rng: &mut Rng| {
            let rank = own[rng.usize(..own.len())];
            let mut ranks: Vec<Rank> =
                (0..).map(Rank).take(self.size).filter(|other| *other == rank || rng.u8(..3) == 0).collect();
            if rng.u8(..16) == 0 {
                ranks = [Vec::new(), vec![rank, rank], vec![Rank(99)]][rng.usize(..3)].clone();
            }
            let name = set_of_members_name(["shared", "own"][rng.usize(..2)]).expect("a short name");
            let set = if rng.u8(..16) == 0 { SetId(1) } else { SetId::WORLD };
            let intent = match rng.u8(..3) {
                0 => {
                    let shape = Shape::new(vec![0]).expect("a shape");
                    Intent::Ready(Request::new(set, name, Collective::AddSetOfMembers { ranks }, DType::U8, shape))
                }
                1 => Intent::VoidSet { name, ranks, failure: Failure::new(Cause::Refused, "no") },
                _ => Intent::VoidSet { name, ranks, failure: Failure::new(Cause::TimedOut, "late") },
            };
            Announcement::new(rank, intent)
        };
        Control::Announce { announcements: (0..rng.u8(1..4)).map(|_| announcement(rng)).collect() }
    }
}

impl Cluster {
    /// The hostile sidecar sends its next message; after the last one its process ends.
    pub(super) fn intrude(&mut self, host: usize, life: u32) {
        let Some(hostile) = &mut self.hostile else { return };
        if hostile.left == 0 {
            let crash = Fault::CrashHost { host, seen: true, for_us: 1_000 };
            let newest =
                self.hosts[self.position(self.setup.world.coordinator())].engine.status(self.schedule.now()).epoch;
            self.oracle.unchecked_through = Some(newest);
            self.break_something(crash);
            return;
        }
        hostile.left -= 1;
        let (me, pause_us) = (hostile.index, self.rng.u64(1..=hostile.pause_us));
        let now = self.hosts[host].engine.status(self.schedule.now()).epoch;
        let (epoch, seq, message) = hostile.draw(&mut self.rng, now);
        let to = match self.rng.u8(..8) {
            0 => (host + self.rng.usize(1..self.hosts.len())) % self.hosts.len(),
            _ => self.position(self.setup.world.coordinator()),
        };
        *self.oracle.met.entry(message.kind()).or_default() += 1;
        for kind in set_kinds(&message) {
            *self.oracle.met.entry(kind).or_default() += 1;
        }
        self.note(|| format!("hostile {me} to position {to}: {epoch}, {seq}, {message:?}"));
        let direction = Direction { plane: Plane::Control, from: host, to };
        let message = Message::Control(epoch, seq, message);
        self.network.send(&mut self.schedule, &mut self.rng, direction, message);
        self.schedule.after(pause_us, SimEvent::Intrude { host, life });
    }

    /// A sidecar breaks off with another one, one of which has to be hostile.
    pub(super) fn break_off(&mut self, host: usize, peer: SidecarIndex, reason: &str) -> Result<(), Violated> {
        let (me, peer) = (self.hosts[host].index, self.position(peer));
        if !self.hostile.as_ref().is_some_and(|hostile| [host, peer].contains(&hostile.host)) {
            let peer = self.hosts[peer].index;
            return violated(Property::Protocol, format!("{me} disconnects {peer}: {reason}"));
        }
        self.note(|| format!("{me} breaks off with position {peer}: {reason}"));
        *self.oracle.met.entry("hostile messages refused").or_default() += 1;
        let id = ConnectionId { plane: Plane::Control, low: host.min(peer), high: host.max(peer) };
        self.network.break_link(&mut self.schedule, &mut self.rng, id, "it was broken off");
        Ok(())
    }
}

/// What a message announces about process sets that members form.
fn set_kinds(message: &Control) -> Vec<&'static str> {
    let Control::Announce { announcements } = message else { return Vec::new() };
    let kind = |announcement: &Announcement| match &announcement.intent {
        Intent::VoidSet { .. } => Some("hostile refusals of sets"),
        Intent::Ready(request) if matches!(request.collective, Collective::AddSetOfMembers { .. }) => {
            Some("hostile requests for sets")
        }
        _ => None,
    };
    announcements.iter().filter_map(kind).collect()
}

/// The message with a few bytes changed, if that is one.
fn distorted(rng: &mut Rng, message: &Control) -> Control {
    let bytes = encode(message);
    for _ in 0..TRIES {
        let mut changed = bytes.to_vec();
        for _ in 0..rng.u8(1..=3) {
            let at = rng.usize(..changed.len());
            changed[at] = [changed[at] ^ (1 << rng.u8(..8)), rng.u8(..4), 0x7f, 0xff][rng.usize(..4)];
        }
        if let Ok(message) = decode(FrameKind::Control, &changed) {
            return message;
        }
    }
    message.clone()
}

fn any_end(rng: &mut Rng) -> u64 {
    [u64::MAX, u64::MAX - 1, u64::MAX / 2, 1 << 40][rng.usize(..4)]
}

const TRIES: u32 = 16;

/// A message of every kind, for those that nobody sends.
fn samples(world: &World) -> Vec<Control> {
    let (rank, sidecar, set) = (Rank(0), world.coordinator(), SetId::WORLD);
    let name = |name| TensorName::new(name).expect("a name");
    let failure = Failure::new(Cause::Refused, "no");
    let (reason, refusal) = (failure.reason.clone(), failure.clone());
    let shape = Shape::new(vec![4]).expect("a shape");
    let request = Request::new(set, name("t"), Collective::AllReduce { op: ReduceOp::Sum }, DType::F32, shape);
    let announcements = vec![Announcement::new(rank, Intent::Ready(request))];
    let activity = Activity { rank, silent_ms: None, last_call: None, pending: 1, oldest: None };
    let done = Enclosed::new(&Control::Done);
    let completed = vec![(set, Seq(1))];
    vec![
        Control::Heartbeat { sent_us: 1, echo_us: 0, held_us: 0 },
        Control::Attached { ranks: vec![rank] },
        Control::Left { rank, failure: failure.clone() },
        Control::Unreachable { sidecar, reason: reason.clone() },
        Control::EpochBegin { world: world.clone(), eager_bytes: 0 },
        Control::EpochEnd { failure: failure.clone() },
        Control::Announce { announcements },
        Control::Reject { set, name: name("t"), failure: failure.clone(), excused: Vec::new() },
        Control::SetAdded { name: name("t"), set: ProcessSet { id: SetId(1), ranks: vec![rank] } },
        Control::SetRemoved { name: name("t"), set },
        Control::SetForgotten { set: SetId(3) },
        Control::AllJoined { set: SetId::WORLD, name: name("t"), last: rank },
        Control::Done,
        Control::Failed { failure: failure.clone() },
        Control::Suspects { sidecars: vec![sidecar], ranks: vec![rank] },
        Control::SuspectRanks { ranks: vec![rank] },
        Control::AskActivity { ranks: vec![rank] },
        Control::Activities { activities: vec![activity] },
        Control::Ascending { generation: 1, ascents: Vec::new() },
        Control::Descending { to: None, message: done },
        Control::PathUp { generation: 1 },
        Control::PathDown { sidecar, reason: reason.clone() },
        Control::Welcome { sidecar, generation: 1 },
        Control::Expel { sidecar, reason },
        Control::Silent { sidecars: vec![(sidecar, 700)] },
        Control::Schedule { number: 1, buckets: Vec::new(), patience_us: 1_000 },
        Control::Invalidated { number: 1, invalidation: Invalidation::Delay },
        Control::Withdraw { number: 1 },
        Control::Frozen { number: 1, admitted: Seq(1), completed: completed.clone() },
        Control::Resume { number: 1, last: Seq(1), completed },
        Control::Performed { failure: Some(failure.clone()) },
        Control::Commit { failure: Some(failure) },
        Control::Matched { set, receive: name("t"), message: name("t") },
        Control::SetRefused { name: name("add_process_set.members.t"), ranks: vec![rank], failure: refusal },
    ]
}
