//! Simulates a job of 1,024 sidecars in one thread, and bounds the cost of a start and of the first operations.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use nix::time::{ClockId, clock_gettime};
use ronde_collectives::CostModel;
use ronde_collectives::plan::Transfer;
use ronde_engine::{Action, Admission, Engine, EngineConfig, Event, Time};
use ronde_wire::control::encode;
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::limits::{CONTROL_FAN_OUT, SIDECARS_MAX};
use ronde_wire::{
    Algorithm, Collective, Control, DType, Epoch, Rank, ReduceOp, Request, RequestId, Seq, SetId, Shape, SidecarIndex,
    TensorName, World,
};

/// The limit of handshakes of each sidecar at a start: twice the binary logarithm of the number of sidecars.
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

/// The limit of bytes of control messages of a sidecar, sent and received, in a repeated step.
const STEP_BYTES_MAX: usize = 64;

#[test]
fn steps_of_1024_sidecars_that_repeat_are_not_negotiated() {
    let cost = steps(SIDECARS_MAX, 8);
    assert!(cost.negotiated_bytes > STEP_BYTES_MAX, "{cost:?}");
    assert!(cost.bytes <= STEP_BYTES_MAX && cost.messages == 0, "{cost:?}");
}

/// `cargo test -p ronde-tests --test scale -- --ignored --nocapture` measures steps of 200 tensors, for the table in
/// docs/SCALE.md.
#[test]
#[ignore = "measures for minutes"]
fn the_cost_of_a_step_of_200_tensors() {
    for sidecars in [2, 8, 32, 64, 128, 256, 512, SIDECARS_MAX] {
        let cost = steps(sidecars, TENSORS);
        let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
        let StepCost { coordinator_negotiated, engine_negotiated, bytes, coordinator, engine, .. } = cost;
        let times = [coordinator_negotiated, engine_negotiated, coordinator, engine].map(ms);
        let [negotiated, all_negotiated, scheduled, all_scheduled] = times;
        println!(
            "{} {negotiated} | {all_negotiated} | {bytes} | {scheduled} | {all_scheduled} |",
            row(sidecars, &cost)
        );
    }
}

/// Tensors of a step in docs/SCALE.md, each an operation of its own.
const TENSORS: u64 = 200;

/// The columns that are the same in each run.
fn row(sidecars: usize, cost: &StepCost) -> String {
    let StepCost { negotiated_messages, negotiated_all_bytes, negotiated_bytes, coordinator_bytes, .. } = cost;
    format!(
        "| {sidecars} | {negotiated_messages} | {negotiated_all_bytes} | {negotiated_bytes} | {coordinator_bytes} |"
    )
}

/// The control traffic on the page is that of the engine, at the sizes that take seconds.
#[test]
fn the_document_has_the_measured_control_traffic() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/SCALE.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    for sidecars in [2, 8, 32, 64] {
        let row = row(sidecars, &steps(sidecars, TENSORS));
        assert!(page.contains(&row), "docs/SCALE.md has no row that begins with\n{row}");
    }
}

/// The cost of a step.
#[derive(Debug)]
struct StepCost {
    /// Control messages of the second step, of all sidecars together.
    negotiated_messages: usize,
    /// Their bytes, each counted once.
    negotiated_all_bytes: usize,
    /// The most bytes of a sidecar in it, sent and received.
    negotiated_bytes: usize,
    /// Those of the coordinator.
    coordinator_bytes: usize,
    /// The same in a step that is repeated for long, and such messages of all sidecars together.
    bytes: usize,
    messages: usize,
    /// The processor time of the coordinator's engine for either.
    coordinator_negotiated: Duration,
    coordinator: Duration,
    /// The mean of all engines.
    engine_negotiated: Duration,
    engine: Duration,
}

/// Runs steps of this many tensors, each a separate operation, until they cost the same.
fn steps(sidecars: usize, tensors: u64) -> StepCost {
    let mut job = Job::of(sidecars);
    job.start();
    job.step(tensors);
    job.measured = Measured::default();
    job.step(tensors);
    let negotiated = std::mem::take(&mut job.measured);
    job.step(tensors);
    job.measured = Measured::default();
    for _ in 0..REPEATED {
        job.step(tensors);
    }
    let repeated = &job.measured;
    let (negotiated_bytes, all_bytes) = (negotiated.most_bytes(), repeated.most_bytes());
    let (count, steps) = (u32::try_from(sidecars).expect("few"), u32::try_from(REPEATED).expect("few"));
    StepCost {
        negotiated_messages: negotiated.messages,
        negotiated_all_bytes: negotiated.bytes.values().sum::<usize>() / 2,
        negotiated_bytes,
        coordinator_bytes: negotiated.bytes.get(&0).copied().unwrap_or_default(),
        bytes: all_bytes.div_ceil(REPEATED),
        messages: repeated.messages,
        coordinator_negotiated: negotiated.coordinator,
        coordinator: repeated.coordinator / steps,
        engine_negotiated: negotiated.engines / count,
        engine: repeated.engines / (count * steps),
    }
}

/// Steps over which a cost is averaged.
const REPEATED: usize = 5;

/// The cost of control messages and of the coordinator so far.
#[derive(Default)]
struct Measured {
    /// By sidecar, sent and received.
    bytes: BTreeMap<usize, usize>,
    messages: usize,
    coordinator: Duration,
    engines: Duration,
}

impl Measured {
    fn most_bytes(&self) -> usize {
        self.bytes.values().copied().max().unwrap_or_default()
    }
}

fn most(counts: &[usize]) -> usize {
    counts.iter().copied().max().unwrap_or_default()
}

/// Engines and their links, which the first message opens.
struct Job {
    engines: Vec<Engine>,
    control: BTreeSet<(usize, usize)>,
    data: BTreeSet<(usize, usize)>,
    travelling: VecDeque<(usize, Event)>,
    begun: usize,
    completed: usize,
    /// The algorithm of each frame with an order that the coordinator has sent.
    orders: Vec<Algorithm>,
    measured: Measured,
}

impl Job {
    /// One rank on each sidecar.
    fn of(count: usize) -> Self {
        let placement = (0..).map(SidecarIndex).take(count).collect();
        let world = World::new(placement).expect("within the limits");
        let cost = CostModel { alpha_us: 0.1, ..CostModel::default() };
        let engine = |me| {
            Engine::new(
                EngineConfig {
                    cost,
                    eager_bytes: 0,
                    fusion_threshold_bytes: 0,
                    ..EngineConfig::new(me, world.clone())
                },
                Time(0),
            )
        };
        Self {
            engines: (0..).map(SidecarIndex).take(count).map(engine).collect(),
            control: BTreeSet::new(),
            data: BTreeSet::new(),
            travelling: VecDeque::new(),
            begun: 0,
            completed: 0,
            orders: Vec::new(),
            measured: Measured::default(),
        }
    }

    /// Attaches all ranks: opens the links of the start, and others where something is sent.
    fn start(&mut self) {
        for at in 0..self.engines.len() {
            if let Some(parent) = self.engines[at].control_parent() {
                self.open(at, parent.index());
            }
            self.handle_event(at, Event::RankAttached { rank: rank(at) });
        }
        self.run();
    }

    /// One operation of all ranks. The coordinator sends its order once for each branch of the tree.
    fn all_reduce(&mut self, name: &str, elements: u64, algorithm: Algorithm) {
        let completed = self.completed;
        self.orders.clear();
        for at in 0..self.engines.len() {
            let what = sum(name, elements);
            let (rank, request, contribution) = (rank(at), RequestId(elements), Bytes::new());
            self.handle_event(at, Event::Submitted { rank, request, what, contribution });
        }
        self.run();
        assert_eq!(self.completed - completed, self.engines.len());
        assert_eq!(self.orders, vec![algorithm; CONTROL_FAN_OUT]);
    }

    /// Submits as many tensors on all ranks, with the names of the last step.
    fn step(&mut self, tensors: u64) {
        let completed = self.completed;
        // The coordinator last: the memory of the last step, which all share here, is in order again by then.
        for at in (1..self.engines.len()).chain([0]) {
            for tensor in 0..tensors {
                let what = sum(&format!("grad.{tensor}"), 1);
                let (rank, request, contribution) = (rank(at), RequestId(tensor), Bytes::new());
                self.handle(at, Event::Submitted { rank, request, what, contribution });
            }
            self.perform_all(at);
        }
        self.run();
        assert_eq!(self.completed - completed, self.engines.len() * usize::try_from(tensors).expect("few"));
    }

    fn handshakes(&self) -> Vec<usize> {
        let mut counts = vec![0; self.engines.len()];
        for (a, b) in self.control.iter().chain(&self.data) {
            counts[*a] += 1;
            counts[*b] += 1;
        }
        counts
    }

    fn handle_event(&mut self, at: usize, event: Event) {
        self.handle(at, event);
        self.perform_all(at);
    }

    fn handle(&mut self, at: usize, event: Event) {
        let began = cpu_time();
        self.engines[at].handle_event(Time(0), event);
        self.took(at, began);
    }

    fn perform_all(&mut self, at: usize) {
        loop {
            let began = cpu_time();
            let action = self.engines[at].poll_action();
            self.took(at, began);
            match action {
                Some(action) => self.perform(at, action),
                None => return,
            }
        }
    }

    fn took(&mut self, at: usize, began: Duration) {
        let elapsed = cpu_time().saturating_sub(began);
        self.measured.engines += elapsed;
        if at == 0 {
            self.measured.coordinator += elapsed;
        }
    }

    fn run(&mut self) {
        while let Some((to, event)) = self.travelling.pop_front() {
            self.handle_event(to, event);
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
        let bytes = HEADER_BYTES + encode(&message).len();
        for end in [from, to] {
            *self.measured.bytes.entry(end).or_default() += bytes;
        }
        self.measured.messages += 1;
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

    /// An executor opens a link to every peer of its part of the plan.
    fn admit(&mut self, at: usize, admission: &Admission) {
        let rounds = admission.plan.sub_schedules.iter().flat_map(|sub_schedule| &sub_schedule.rounds);
        for transfer in rounds.flat_map(|round| &round.transfers) {
            let (Transfer::Send { to: peer, .. } | Transfer::Receive { from: peer, .. }) = transfer;
            let peer = admission.topology.sidecar(*peer).index();
            self.data.insert((at.min(peer), at.max(peer)));
        }
        let (epoch, seq) = (admission.epoch, admission.seq);
        self.travelling.push_back((at, Event::Executed { epoch, seq }));
    }
}

/// The processor time of this thread, which no other load changes.
fn cpu_time() -> Duration {
    Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has this clock"))
}

fn sum(name: &str, elements: u64) -> Request {
    Request::new(
        SetId::WORLD,
        TensorName::new(name).expect("a name"),
        Collective::AllReduce { op: ReduceOp::Sum },
        DType::F32,
        Shape::new(vec![elements]).expect("a shape"),
    )
}

fn rank(at: usize) -> Rank {
    Rank(index(at).0)
}

fn index(at: usize) -> SidecarIndex {
    SidecarIndex(u32::try_from(at).expect("few sidecars"))
}
