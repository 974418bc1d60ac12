//! Two engines, of which sidecar 0 has rank 0 and thus the coordinator, and sidecar 1 has rank 1. Their workers follow a
//! script, each as far as its sidecar answers.

use std::collections::BTreeSet;
use std::sync::Arc;

use ronde_engine::{Action, Admission, Engine, EngineConfig, Event, Time};
use ronde_wire::control::encode;
use ronde_wire::{
    AnySource, Codec, Collective, Control, DType, Epoch, Frame, FrameKind, Pair as Message, PluginUse, PluginWork,
    Rank, ReduceOp, Request, RequestId, Seq, SetId, Shape, SidecarIndex, TensorName, World, limits,
    set_of_members_name,
};

const NOW: Time = Time(1_000_000);
/// Actions that one engine may want after so few messages.
const ACTIONS_MAX: usize = 10_000;
/// Equal steps at the beginning of the script, more than it takes until they are scheduled.
const STEPS: usize = 5;
/// Requests of one rank that are pending at a time: those of a step.
const PENDING_MAX: usize = 3;

/// Performs an operation that arrived with all its inputs.
pub(crate) type Performer = fn(SidecarIndex, &Arc<Admission>);

/// The two engines.
pub(crate) struct Pair {
    engines: [Engine; 2],
    /// For each rank, the rest of its script and the names of its pending requests.
    scripts: [Vec<Request>; 2],
    pending: [BTreeSet<(RequestId, TensorName)>; 2],
    next_request: u64,
    sent: Vec<(usize, Epoch, Seq, Control)>,
    answered: BTreeSet<(Rank, RequestId)>,
    good: usize,
    admitted: usize,
    ended: Vec<String>,
    performer: Performer,
}

impl Pair {
    /// At the beginning of an epoch; the first requests of the script are pending.
    pub(crate) fn started(performer: Performer) -> Self {
        let world = World::new(vec![SidecarIndex(0), SidecarIndex(1)]).expect("a world");
        let engine = |me| Engine::new(EngineConfig::new(SidecarIndex(me), world.clone()), NOW);
        let mut pair = Self {
            engines: [engine(0), engine(1)],
            scripts: [Vec::new(), Vec::new()],
            pending: Default::default(),
            next_request: 0,
            sent: Vec::new(),
            answered: BTreeSet::new(),
            good: 0,
            admitted: 0,
            ended: Vec::new(),
            performer,
        };
        for (me, peer) in [(0, 1), (1, 0)] {
            pair.event(me, Event::LinkUp { peer: SidecarIndex(peer), lanes: 1 });
        }
        for (me, rank) in [(0, 0), (1, 1)] {
            pair.event(me, Event::RankAttached { rank: Rank(rank) });
        }
        pair.deliver_all();
        pair.sent.clear();
        pair.scripts = [0, 1].map(script);
        (0..2).for_each(|me| pair.submit(me));
        pair
    }

    /// Runs the whole script, and returns all messages that it takes.
    pub(crate) fn honest(performer: Performer) -> Vec<(usize, Epoch, Seq, Control)> {
        let requests = script(0).len() + script(1).len();
        let mut pair = Self::started(performer);
        let all = pair.deliver_all();
        assert_eq!((pair.good, pair.answered.len()), (requests, requests), "{:?}", pair.ended);
        let scheduled = pair.engines.each_ref().map(|engine| engine.stats().scheduled_operations);
        assert!(scheduled.iter().all(|operations| *operations > 0), "nothing is scheduled: {scheduled:?}");
        all
    }

    pub(crate) fn deliver(&mut self, to: usize, epoch: Epoch, seq: Seq, message: Control) {
        let from = SidecarIndex(if to == 0 { 1 } else { 0 });
        self.event(to, Event::Control { from, epoch, seq, message });
        self.submit(to);
    }

    /// The outcome of an input.
    pub(crate) fn seen(&self, at: usize) -> impl std::fmt::Debug + use<> {
        let status = self.engines[at].status(NOW);
        let scheduled = self.engines[at].stats().scheduled_operations;
        let kind = |count: usize| "x".repeat(count.min(5));
        (kind(self.admitted), kind(self.good), scheduled > 0, self.ended.clone(), format!("{:?}", status.phase))
    }

    /// Submits the next requests of a rank's script.
    fn submit(&mut self, me: usize) {
        loop {
            let pending = &self.pending[me];
            let is_free = |request: &Request| !pending.iter().any(|(_, name)| *name == request.name);
            if pending.len() >= PENDING_MAX || !self.scripts[me].first().is_some_and(is_free) {
                return;
            }
            let (rank, what) = (Rank(if me == 0 { 0 } else { 1 }), self.scripts[me].remove(0));
            self.next_request += 1;
            let request = RequestId(self.next_request);
            self.pending[me].insert((request, what.name.clone()));
            let contribution = vec![1; self.engines[me].contribution_bytes(rank, &what)].into();
            self.event(me, Event::Submitted { rank, request, what, contribution });
        }
    }

    /// Delivers messages until none is left; returns all of them.
    fn deliver_all(&mut self) -> Vec<(usize, Epoch, Seq, Control)> {
        let mut all = Vec::new();
        for _ in 0..1_000 {
            let sent = std::mem::take(&mut self.sent);
            if sent.is_empty() {
                return all;
            }
            for (to, epoch, seq, message) in sent {
                all.push((to, epoch, seq, message.clone()));
                self.deliver(to, epoch, seq, message);
            }
        }
        panic!("the engines do not stop sending");
    }

    fn event(&mut self, me: usize, event: Event) {
        self.engines[me].handle_event(NOW, event);
        for _ in 0..ACTIONS_MAX {
            let Some(action) = self.engines[me].poll_action() else { return };
            self.perform(me, action);
        }
        panic!("an engine wants more than {ACTIONS_MAX} actions");
    }

    fn perform(&mut self, me: usize, action: Action) {
        match action {
            Action::Send { to, epoch, seq, message } => {
                assert!(encode(&message).len() <= limits::CONTROL_FRAME_BYTES_MAX, "a message that fits no frame");
                self.sent.push((to.index(), epoch, seq, message));
            }
            Action::Admit(admission) => {
                self.admitted += 1;
                let (epoch, seq) = (admission.epoch, admission.seq);
                if admission.is_eager() {
                    (self.performer)(SidecarIndex(if me == 0 { 0 } else { 1 }), &admission);
                }
                self.engines[me].handle_event(NOW, Event::Executed { epoch, seq });
            }
            Action::Cancel { epoch, last, .. } => {
                self.engines[me].handle_event(NOW, Event::Cancelled { epoch, last });
            }
            Action::Complete { rank, request, outcome } => {
                assert_eq!(rank.0 as usize, me, "an answer to a rank that is not here");
                assert!(self.answered.insert((rank, request)), "{request} of {rank} is answered twice");
                self.pending[me].retain(|(pending, _)| *pending != request);
                self.good += usize::from(outcome.is_ok());
            }
            Action::EpochEnded { failure, .. } => self.ended.push(failure.reason),
            Action::Disconnect { reason, .. } => self.ended.push(reason),
            Action::EpochBegan { .. }
            | Action::Commit { .. }
            | Action::Notice { .. }
            | Action::Hung { .. }
            | Action::Autotuned(_) => {}
            Action::SetForgotten { .. } | Action::EndSession { .. } => {}
        }
    }
}

/// The messages to one of them, as frames.
pub(crate) fn frames_to(to: usize, messages: &[(usize, Epoch, Seq, Control)]) -> Vec<u8> {
    let of = |(_, epoch, seq, message): &(usize, Epoch, Seq, Control)| {
        let frame = Frame::new(FrameKind::Control, *epoch, *seq, encode(message));
        [&frame.header.encode()[..], &frame.payload].concat()
    };
    messages.iter().filter(|(receiver, ..)| *receiver == to).flat_map(of).collect()
}

/// What a rank submits: equal steps of small tensors, which travel with their announcements, and one that does not; then
/// what ends their schedule; an operation with a plugin, which is committed; a message that is received from any rank;
/// and a set of both.
fn script(rank: u32) -> Vec<Request> {
    let sum = |name: &str, elements: u64| {
        let name = TensorName::new(name).expect("a name");
        let shape = Shape::new(vec![elements]).expect("a shape");
        Request::new(SetId::WORLD, name, Collective::AllReduce { op: ReduceOp::Sum }, DType::F32, shape)
    };
    let step = || [sum("grad.1", 3), sum("grad.2", 16), sum("grad.3", 100_000)];
    let work = PluginWork::Codec { block_elements: 64, encoded_bytes: 300 };
    let plugin = PluginUse { name: "topk".into(), version: "1.0.0".into(), digest: [7; 32], parameters: vec![1], work };
    let coded = Request { codec: Codec::Plugin, plugin: Some(Arc::new(plugin)), ..sum("coded", 8) };
    let nothing = Shape::new(vec![0]).expect("a shape");
    let name = set_of_members_name("both").expect("a short name");
    let both = Collective::AddSetOfMembers { ranks: vec![Rank(1), Rank(0)] };
    let formed = Request::new(SetId::WORLD, name, both, DType::U8, nothing.clone());
    let message = if rank == 0 {
        let name = Message { from: Rank(0), to: Rank(1) }.message_name(9, 0);
        Request { name, collective: Collective::Send { to: Rank(1), tag: 9 }, ..sum("message", 4) }
    } else {
        let name = AnySource { to: Rank(1), tag: 9 }.receive_name(0);
        Request::new(SetId::WORLD, name, Collective::RecvAny { tag: 9 }, DType::U8, nothing)
    };
    (0..STEPS).flat_map(|_| step()).chain([sum("other", 100_000), coded, message, formed]).collect()
}
