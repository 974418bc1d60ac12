//! A job of 1,024 sidecars in one thread: what a start and the first operations cost each of them.

#![forbid(unsafe_code)]

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use ronde_collectives::CostModel;
use ronde_collectives::plan::Transfer;
use ronde_engine::{Action, Admission, Engine, EngineConfig, Event, Time};
use ronde_wire::limits::{CONTROL_FAN_OUT, SIDECARS_MAX};
use ronde_wire::{
    Algorithm, Collective, Control, DType, Epoch, Rank, ReduceOp, Request, RequestId, Seq, SetId, Shape, SidecarIndex,
    TensorName, World,
};

/// What a start of so many sidecars may cost each of them in handshakes: twice the binary logarithm of their number.
const HANDSHAKES_MAX: usize = 2 * SIDECARS_MAX.ilog2() as usize;

#[test]
fn a_start_of_1024_sidecars_needs_few_handshakes_each() {
    let mut job = Job::of(SIDECARS_MAX);
    job.start();
    let control = job.handshakes();
    println!("control links: at most {} a sidecar, {} at the coordinator", most(&control), control[0]);
    assert_eq!(job.begun, SIDECARS_MAX);
    assert!(most(&control) <= CONTROL_FAN_OUT + 1 && control[0] == CONTROL_FAN_OUT, "{control:?}");

    job.all_reduce("small", 1, Algorithm::RecursiveDoubling);
    job.all_reduce("large", 4 << 20, Algorithm::Ring);

    let all = job.handshakes();
    println!("with recursive doubling and a ring: at most {} a sidecar", most(&all));
    assert!(most(&all) <= HANDSHAKES_MAX, "{} handshakes; {HANDSHAKES_MAX} are allowed", most(&all));
}

fn most(counts: &[usize]) -> usize {
    counts.iter().copied().max().unwrap_or_default()
}

/// Engines, and wires between them that are opened by the first message.
struct Job {
    engines: Vec<Engine>,
    control: BTreeSet<(usize, usize)>,
    data: BTreeSet<(usize, usize)>,
    travelling: VecDeque<(usize, Event)>,
    begun: usize,
    completed: usize,
    /// The algorithm of each frame with an order that the coordinator has sent.
    orders: Vec<Algorithm>,
}

impl Job {
    /// One rank on each sidecar.
    fn of(count: usize) -> Self {
        let placement = (0..).map(SidecarIndex).take(count).collect();
        let world = World::new(placement).expect("within the limits");
        let cost = CostModel { alpha_us: 0.1, ..CostModel::default() };
        let engine =
            |me| Engine::new(EngineConfig { cost, eager_bytes: 0, ..EngineConfig::new(me, world.clone()) }, Time(0));
        Self {
            engines: (0..).map(SidecarIndex).take(count).map(engine).collect(),
            control: BTreeSet::new(),
            data: BTreeSet::new(),
            travelling: VecDeque::new(),
            begun: 0,
            completed: 0,
            orders: Vec::new(),
        }
    }

    /// All ranks attach; the links that are opened at the start are, and others where something is sent.
    fn start(&mut self) {
        for at in 0..self.engines.len() {
            if let Some(parent) = self.engines[at].control_parent() {
                self.open(at, parent.index());
            }
            self.tell(at, Event::RankAttached { rank: rank(at) });
        }
        self.run();
    }

    /// One operation of all ranks. The coordinator sends its order once for each branch of the tree.
    fn all_reduce(&mut self, name: &str, elements: u64, algorithm: Algorithm) {
        let completed = self.completed;
        self.orders.clear();
        for at in 0..self.engines.len() {
            let what = Request::new(
                SetId::WORLD,
                TensorName::new(name).expect("a name"),
                Collective::AllReduce { op: ReduceOp::Sum },
                DType::F32,
                Shape::new(vec![elements]).expect("a shape"),
            );
            let (rank, request, contribution) = (rank(at), RequestId(elements), Bytes::new());
            self.tell(at, Event::Submitted { rank, request, what, contribution });
        }
        self.run();
        assert_eq!(self.completed - completed, self.engines.len());
        assert_eq!(self.orders, vec![algorithm; CONTROL_FAN_OUT]);
    }

    fn handshakes(&self) -> Vec<usize> {
        let mut counts = vec![0; self.engines.len()];
        for (a, b) in self.control.iter().chain(&self.data) {
            counts[*a] += 1;
            counts[*b] += 1;
        }
        counts
    }

    fn tell(&mut self, at: usize, event: Event) {
        self.engines[at].handle_event(Time(0), event);
        while let Some(action) = self.engines[at].poll_action() {
            self.perform(at, action);
        }
    }

    fn run(&mut self) {
        while let Some((to, event)) = self.travelling.pop_front() {
            self.tell(to, event);
        }
    }

    fn perform(&mut self, at: usize, action: Action) {
        match action {
            Action::Send { to, epoch, seq, message } => self.send(at, to.index(), (epoch, seq), message),
            Action::EpochBegan { .. } => self.begun += 1,
            Action::Admit(admission) => self.admit(at, &admission),
            Action::Complete { outcome, .. } => {
                assert!(outcome.is_ok(), "{outcome:?}");
                self.completed += 1;
            }
            other => panic!("{at} wants {other:?}"),
        }
    }

    fn send(&mut self, from: usize, to: usize, (epoch, seq): (Epoch, Seq), message: Control) {
        self.open(from, to);
        if let Control::Descending { message, .. } = &message
            && let (0, Ok(Control::Order(order))) = (from, message.open())
        {
            self.orders.push(order.tuning.algorithm);
        }
        self.travelling.push_back((to, Event::Control { from: index(from), epoch, seq, message }));
    }

    fn open(&mut self, a: usize, b: usize) {
        if self.control.insert((a.min(b), a.max(b))) {
            self.travelling.push_back((a, Event::LinkUp { peer: index(b), lanes: 1 }));
            self.travelling.push_back((b, Event::LinkUp { peer: index(a), lanes: 1 }));
        }
    }

    /// An executor opens a link to everybody whom its part of the plan names.
    fn admit(&mut self, at: usize, admission: &Admission) {
        let rounds = admission.plan.strands.iter().flat_map(|strand| &strand.rounds);
        for transfer in rounds.flat_map(|round| &round.transfers) {
            let (Transfer::Send { to: peer, .. } | Transfer::Receive { from: peer, .. }) = transfer;
            let peer = admission.topology.sidecar(*peer).index();
            self.data.insert((at.min(peer), at.max(peer)));
        }
        let (epoch, seq) = (admission.epoch, admission.seq);
        self.travelling.push_back((at, Event::Executed { epoch, seq }));
    }
}

fn rank(at: usize) -> Rank {
    Rank(index(at).0)
}

fn index(at: usize) -> SidecarIndex {
    SidecarIndex(u32::try_from(at).expect("few sidecars"))
}
