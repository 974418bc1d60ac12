//! Engines of several sidecars, connected by FIFO wires that deliver on request.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use ronde_wire::{
    Cause, Collective, Control, DType, Epoch, Failure, ProcessSet, Rank, ReduceOp, Request, RequestId, Seq, SetId,
    Shape, SidecarIndex, TensorName, World,
};

use crate::autotune::AutotuneSample;
use crate::engine::{Engine, EngineConfig};
use crate::event::{Action, Admission, Completion, Event, Time};

pub(super) type Outcome = Result<Completion, Failure>;
type Wire = VecDeque<(Epoch, Seq, Control)>;

/// Engines, the wires between them, and their recorded actions.
pub(super) struct Cluster {
    pub(super) world: World,
    pub(super) engines: Vec<Engine>,
    pub(super) now: Time,
    wires: BTreeMap<(usize, usize), Wire>,
    /// Whether admitted operations are executed at once.
    pub(super) executes: bool,
    pub(super) admitted: Vec<Vec<std::sync::Arc<Admission>>>,
    pub(super) unexecuted: Vec<(usize, Epoch, Seq)>,
    pub(super) committed: Vec<(usize, Seq)>,
    pub(super) forgotten: Vec<(usize, SetId)>,
    pub(super) completed: Vec<(Rank, RequestId, Outcome)>,
    pub(super) began: Vec<(usize, Epoch)>,
    pub(super) ended: Vec<(usize, Epoch, Failure)>,
    /// Reports of ranks that hang: the sidecar that reports, the rank, the text.
    pub(super) hung: Vec<(usize, Rank, String)>,
    /// Samples of searches, by sidecar.
    pub(super) samples: Vec<(usize, AutotuneSample)>,
    pub(super) notices: Vec<(usize, Vec<SidecarIndex>, Vec<Rank>, String)>,
    pub(super) disconnects: Vec<(usize, SidecarIndex, String)>,
    pub(super) sessions_ended: Vec<(Rank, Failure)>,
    /// Stopped sidecars: they receive and send nothing, and get no time.
    pub(super) stopped: Vec<bool>,
    next_request: u64,
}

impl Cluster {
    /// Engines for a placement (`placement[rank]` is the sidecar); nothing has attached.
    pub(super) fn new(placement: &[u32]) -> Self {
        let world = World::new(placement.iter().copied().map(SidecarIndex).collect()).expect("a world");
        Self::of(world, |config| config)
    }

    pub(super) fn with_sets(placement: &[u32], sets: &[&[u32]]) -> Self {
        let all: Vec<u32> = (0..).take(placement.len()).collect();
        let sets = std::iter::once(all.as_slice()).chain(sets.iter().copied());
        let sets = (0..)
            .zip(sets)
            .map(|(id, ranks)| ProcessSet { id: SetId(id), ranks: ranks.iter().copied().map(Rank).collect() });
        let placement = placement.iter().copied().map(SidecarIndex).collect();
        Self::of(World::with_sets(placement, sets.collect()).expect("a world"), |config| config)
    }

    pub(super) fn of(world: World, adjust: impl Fn(EngineConfig) -> EngineConfig) -> Self {
        let now = Time(1_000_000);
        let engine = |me| {
            Engine::new(
                adjust(EngineConfig { eager_bytes: 0, ..EngineConfig::new(SidecarIndex(me), world.clone()) }),
                now,
            )
        };
        let count = world.sidecars().len();
        Self {
            engines: (0..).map(engine).take(count).collect(),
            now,
            wires: BTreeMap::new(),
            executes: true,
            admitted: vec![Vec::new(); count],
            unexecuted: Vec::new(),
            committed: Vec::new(),
            forgotten: Vec::new(),
            completed: Vec::new(),
            began: Vec::new(),
            ended: Vec::new(),
            hung: Vec::new(),
            samples: Vec::new(),
            notices: Vec::new(),
            disconnects: Vec::new(),
            sessions_ended: Vec::new(),
            stopped: vec![false; count],
            next_request: 0,
            world,
        }
    }

    /// All ranks attach and the epoch begins.
    pub(super) fn started(mut self) -> Self {
        self.connect();
        self.attach_all();
        self.run();
        self
    }

    pub(super) fn connect(&mut self) {
        for (a, b) in self.pairs() {
            self.event(a, Event::LinkUp { peer: index(b), lanes: 1 });
        }
    }

    pub(super) fn attach_all(&mut self) {
        for rank in (0..).map(Rank).take(self.world.size()) {
            self.attach(rank);
        }
    }

    pub(super) fn attach(&mut self, rank: Rank) {
        self.event(self.home(rank), Event::RankAttached { rank });
    }

    pub(super) fn close_session(&mut self, rank: u32) {
        self.leave(rank, Failure::new(Cause::ShutDown, "the worker said goodbye"));
    }

    pub(super) fn leave(&mut self, rank: u32, failure: Failure) {
        self.event(self.home(Rank(rank)), Event::RankLeft { rank: Rank(rank), failure });
    }

    pub(super) fn submit(&mut self, rank: u32, what: Request) -> RequestId {
        self.next_request += 1;
        let request = RequestId(self.next_request);
        let home = self.home(Rank(rank));
        let due = self.engines[home].contribution_bytes(Rank(rank), &what);
        let contribution = Bytes::from(vec![rank.to_le_bytes()[0]; due]);
        self.event(home, Event::Submitted { rank: Rank(rank), request, what, contribution });
        request
    }

    pub(super) fn submit_all(&mut self, what: &Request) -> Vec<RequestId> {
        (0..).take(self.world.size()).map(|rank| self.submit(rank, what.clone())).collect()
    }

    pub(super) fn withdraw(&mut self, rank: u32, request: RequestId) {
        let reason = "the deadline of 3 s passed".to_owned();
        self.event(self.home(Rank(rank)), Event::Withdrawn { rank: Rank(rank), request, reason });
    }

    pub(super) fn control(&mut self, to: usize, from: u32, (epoch, seq): (u64, u64), message: Control) {
        let (epoch, seq) = (Epoch(epoch), Seq(seq));
        self.event(to, Event::Control { from: SidecarIndex(from), epoch, seq, message });
    }

    pub(super) fn event(&mut self, sidecar: usize, event: Event) {
        self.engines[sidecar].handle_event(self.now, event);
    }

    /// Delivers and executes until nothing is left, without advancing time.
    pub(super) fn run(&mut self) {
        for _ in 0..100_000 {
            self.drain_all();
            let wire = self.wires.iter().find(|(_, wire)| !wire.is_empty()).map(|(wire, _)| *wire);
            match wire {
                Some(wire) => self.deliver(wire),
                None => return,
            }
        }
        panic!("the cluster does not come to rest");
    }

    /// Advances time in steps of 10 ms and calls every engine whose timer is due.
    pub(super) fn advance(&mut self, ms: u64) {
        for _ in 0..ms / 10 {
            self.now = self.now.plus_ms(10);
            self.wake_all();
            self.run();
        }
    }

    /// Advances time without calling any engine.
    pub(super) fn jump(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
    }

    pub(super) fn wake_all(&mut self) {
        for sidecar in 0..self.engines.len() {
            let due = self.engines[sidecar].poll_timeout().is_some_and(|at| at <= self.now);
            if due && !self.stopped[sidecar] {
                self.engines[sidecar].handle_timeout(self.now);
            }
        }
    }

    /// Advances time until a sidecar checks whether a rank waits out of the order of a schedule. False when none will.
    pub(super) fn pass_patience(&mut self) -> bool {
        let live = self.engines.iter().zip(&self.stopped).filter(|(_, stopped)| !**stopped);
        let Some(at) = live.filter_map(|(engine, _)| engine.participant.invalidation_deadline()).min() else {
            return false;
        };
        self.now = self.now.max(at);
        self.wake_all();
        true
    }

    /// Wires that have something to deliver.
    pub(super) fn loaded(&self) -> Vec<(usize, usize)> {
        self.wires.iter().filter(|(_, wire)| !wire.is_empty()).map(|(wire, _)| *wire).collect()
    }

    pub(super) fn wire_len(&self, wire: (usize, usize)) -> usize {
        self.wires.get(&wire).map_or(0, VecDeque::len)
    }

    /// The number under which a sidecar lets a child join.
    pub(super) fn generation(&self, parent: usize, child: usize) -> u64 {
        self.engines[parent].context.relay.generation_of(index(child)).unwrap_or_default()
    }

    /// Delivers the oldest message of a wire.
    pub(super) fn deliver(&mut self, (from, to): (usize, usize)) {
        let Some((epoch, seq, message)) = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front) else { return };
        if !self.stopped[to] {
            self.event(to, Event::Control { from: index(from), epoch, seq, message });
        }
    }

    pub(super) fn execute(&mut self, position: usize) {
        let (sidecar, epoch, seq) = self.unexecuted.remove(position);
        if !self.stopped[sidecar] {
            self.event(sidecar, Event::Executed { epoch, seq });
        }
    }

    /// Executes the oldest unexecuted operation of a sidecar.
    pub(super) fn execute_on(&mut self, sidecar: usize) {
        let position = self.unexecuted.iter().position(|(at, ..)| *at == sidecar);
        self.execute(position.expect("an operation was admitted there"));
    }

    /// Executes an operation on all members once all have admitted it: none has its result without the others.
    fn execute_complete(&mut self, epoch: Epoch, seq: Seq) {
        if !self.is_admitted_by_all(epoch, seq) {
            return;
        }
        while let Some(at) = self.unexecuted.iter().position(|(_, e, s)| (*e, *s) == (epoch, seq)) {
            let sidecar = self.unexecuted[at].0;
            self.execute(at);
            self.drain(sidecar);
        }
    }

    fn is_admitted_by_all(&self, epoch: Epoch, seq: Seq) -> bool {
        let of = |admission: &&std::sync::Arc<Admission>| (admission.epoch, admission.seq) == (epoch, seq);
        let admitted: Vec<_> = self.admitted.iter().filter_map(|list| list.iter().rev().find(of)).collect();
        let members = admitted.first().map_or(0, |admission| admission.topology.members.len());
        admitted.len() >= members || admitted.iter().all(|admission| admission.is_eager())
    }

    /// The unexecuted operations that all members have admitted; no other one can end.
    pub(super) fn executable(&self) -> Vec<usize> {
        let positions = 0..self.unexecuted.len();
        let is_admitted = |at: &usize| self.is_admitted_by_all(self.unexecuted[*at].1, self.unexecuted[*at].2);
        positions.filter(is_admitted).collect()
    }

    pub(super) fn execute_all(&mut self) {
        while !self.unexecuted.is_empty() {
            self.execute(0);
        }
        self.run();
    }

    pub(super) fn drain_all(&mut self) {
        for sidecar in 0..self.engines.len() {
            self.drain(sidecar);
        }
    }

    /// Cuts a link: messages on it are lost, and both ends get an event.
    pub(super) fn cut(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            self.wires.remove(&(from, to));
            self.event(to, Event::LinkDown { peer: index(from), reason: "connection reset".to_owned() });
        }
    }

    /// Changes the messages on a wire.
    pub(super) fn tamper(&mut self, wire: (usize, usize), change: impl Fn(&mut Seq, &mut Control)) {
        for (_, seq, message) in self.wires.entry(wire).or_default() {
            change(seq, message);
        }
    }

    /// The outcome of a request; panics unless it has exactly one.
    pub(super) fn outcome(&self, rank: u32, request: RequestId) -> &Outcome {
        let mut found = self.completed.iter().filter(|(r, id, _)| (*r, *id) == (Rank(rank), request));
        let (_, _, outcome) = found.next().unwrap_or_else(|| panic!("{request} of rank {rank} has no answer"));
        assert!(found.next().is_none(), "{request} of rank {rank} has two answers");
        outcome
    }

    pub(super) fn failure(&self, rank: u32, request: RequestId) -> &Failure {
        self.outcome(rank, request).as_ref().expect_err("a failure")
    }

    pub(super) fn is_pending(&self, request: RequestId) -> bool {
        !self.completed.iter().any(|(_, id, _)| *id == request)
    }

    /// The failure that all requests have in common.
    pub(super) fn common_failure(&self, requests: &[RequestId]) -> &Failure {
        let failures: Vec<&Failure> = (0..).zip(requests).map(|(rank, request)| self.failure(rank, *request)).collect();
        assert!(failures.iter().all(|failure| *failure == failures[0]), "{failures:#?}");
        failures[0]
    }

    pub(super) fn all_completed(&self, requests: &[RequestId]) -> bool {
        (0..).zip(requests).all(|(rank, request)| self.outcome(rank, *request).is_ok())
    }

    /// Names of the tensors of each operation admitted at a sidecar.
    pub(super) fn buckets(&self, sidecar: usize) -> Vec<Vec<&str>> {
        self.admitted[sidecar].iter().map(|a| a.tensors.iter().map(|tensor| tensor.name.as_str()).collect()).collect()
    }

    pub(super) fn home(&self, rank: Rank) -> usize {
        self.world.sidecar_of(rank).expect("a rank of the world").index()
    }

    /// Loses what is under way between all sidecars.
    pub(super) fn drop_wires(&mut self) {
        self.wires.clear();
    }

    /// Pairs of sidecars of the world that are not stopped.
    pub(super) fn live_pairs(&self) -> Vec<(usize, usize)> {
        self.pairs().into_iter().filter(|(a, b)| !self.stopped[*a] && !self.stopped[*b]).collect()
    }

    fn pairs(&self) -> Vec<(usize, usize)> {
        let count = self.engines.len();
        (0..count).flat_map(|a| (0..count).map(move |b| (a, b))).filter(|(a, b)| a != b).collect()
    }

    fn drain(&mut self, sidecar: usize) {
        while let Some(action) = self.engines[sidecar].poll_action() {
            self.perform(sidecar, action);
        }
    }

    fn perform(&mut self, sidecar: usize, action: Action) {
        match action {
            Action::Send { to, epoch, seq, message } => {
                assert_ne!(to.index(), sidecar, "a message to itself");
                if !self.stopped[sidecar] {
                    self.wires.entry((sidecar, to.index())).or_default().push_back((epoch, seq, message));
                }
            }
            Action::EpochBegan { epoch } => self.began.push((sidecar, epoch)),
            Action::EpochEnded { epoch, failure } => self.ended.push((sidecar, epoch, failure)),
            Action::Admit(admission) => {
                let (epoch, seq) = (admission.epoch, admission.seq);
                self.admitted[sidecar].push(admission);
                self.unexecuted.push((sidecar, epoch, seq));
                if self.executes {
                    self.execute_complete(epoch, seq);
                }
            }
            Action::Cancel { epoch, last, dropped } => {
                self.unexecuted.retain(|(at, _, seq)| *at != sidecar || !dropped.contains(seq));
                self.event(sidecar, Event::Cancelled { epoch, last });
            }
            Action::Commit { seq, .. } => self.committed.push((sidecar, seq)),
            Action::SetForgotten { set } => self.forgotten.push((sidecar, set)),
            Action::Complete { rank, request, outcome } => {
                assert_eq!(self.home(rank), sidecar, "a completion for another sidecar's rank");
                self.completed.push((rank, request, outcome));
            }
            Action::Autotuned(sample) => self.samples.push((sidecar, sample)),
            Action::Hung { rank, text } => self.hung.push((sidecar, rank, text)),
            Action::Notice { sidecars, ranks, text } => self.notices.push((sidecar, sidecars, ranks, text)),
            Action::Disconnect { peer, reason } => self.disconnects.push((sidecar, peer, reason)),
            Action::EndSession { rank, failure } => self.sessions_ended.push((rank, failure)),
        }
    }
}

pub(super) fn index(sidecar: usize) -> SidecarIndex {
    SidecarIndex(u32::try_from(sidecar).expect("few sidecars"))
}

pub(super) fn name(name: &str) -> TensorName {
    TensorName::new(name).expect("a name")
}

pub(super) fn request(tensor: &str, collective: Collective, shape: &[u64]) -> Request {
    Request::new(SetId::WORLD, name(tensor), collective, DType::F32, Shape::new(shape.to_vec()).expect("a shape"))
}

pub(super) fn sum(tensor: &str, shape: &[u64]) -> Request {
    request(tensor, Collective::AllReduce { op: ReduceOp::Sum }, shape)
}
