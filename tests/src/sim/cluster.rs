//! The simulated cluster: its state, and the event loop.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use ronde_collectives::CostModel;
use ronde_engine::{AutotuneSettings, EngineConfig, RunAhead};
use ronde_wire::{Epoch, Invalidation, ProcessSet, Rank, SetId, SidecarIndex, World};

use super::checks::{Counts, Oracle, Property, Results, Violated, violated};
use super::faults::Faults;
use super::host::Host;
use super::hostile::Hostile;
use super::link::Network;
use super::saboteur::{Sabotage, Saboteur};
use super::schedule::{Schedule, SimEvent};
use super::worker::Worker;
use super::workload::{Loops, Recipe, Workload};

/// The options of a run, besides its seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Prints events.
    pub trace: bool,
    /// Plants a bug.
    pub saboteur: Option<Saboteur>,
    /// One epoch without faults, with floats whose sums depend on the order of addition. Delays, chunking and fusion
    /// follow the number, everything else the seed: results have to be equal for all numbers.
    pub floats_variant: Option<u64>,
}

/// The figures of a run without a violation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Epochs that began.
    pub epochs: usize,
    /// Requests with results.
    pub successes: u64,
    /// Requests that failed as they had to.
    pub failures: u64,
    /// Events.
    pub events: u64,
    /// Simulated time, in microseconds.
    pub virtual_us: u64,
    /// Chunks sent, and those of them that were sent before the receiver was known to be ready.
    pub chunks: u64,
    /// Those of them that were sent before the receiver was known to be ready.
    pub early_chunks: u64,
    /// Tensors of operations with several of them.
    pub fused: u64,
    /// Admissions of operations with so many sub-schedules that some have to wait for others.
    pub piped: u64,
    /// Samples of searches for better settings.
    pub tuned: u64,
    /// Whether the planted bug had an opportunity.
    pub sabotaged: bool,
    /// How often each situation was met.
    pub met: Counts,
    /// Results, when they are to be compared between runs.
    pub results: Results,
}

/// The configuration of all sidecars.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) world: World,
    pub(super) lanes: u16,
    pub(super) grant_bytes: u64,
    fusion_threshold_bytes: u64,
    chunk_bytes: Option<u32>,
    autotune: Option<AutotuneSettings>,
    buckets_in_flight: usize,
    eager_bytes: u32,
    run_ahead: Option<RunAhead>,
    control_fan_out: usize,
    cost: CostModel,
    recipe: Recipe,
    /// Whether one of the sidecars is hostile.
    is_hostile: bool,
}

pub(super) struct Cluster {
    pub(super) schedule: Schedule,
    pub(super) rng: Rng,
    pub(super) setup: Setup,
    /// The sidecars' indices by position.
    pub(super) sidecars: Vec<SidecarIndex>,
    pub(super) hosts: Vec<Host>,
    pub(super) workers: Vec<Worker>,
    pub(super) network: Network,
    pub(super) oracle: Oracle,
    pub(super) faults: Faults,
    pub(super) sabotage: Option<Sabotage>,
    pub(super) hostile: Option<Hostile>,
    pub(super) began: usize,
    pub(super) progress_us: u64,
    pub(super) next_request: u64,
    pub(super) report: Report,
    pub(super) trace: bool,
    finished_us: Option<u64>,
    workloads: BTreeMap<Epoch, Arc<Workload>>,
}

/// Simulated time after the last repair within which everything has to complete.
const PATIENCE_US: u64 = 90_000_000;
/// Simulated time for which a finished cluster is watched.
const WATCH_US: u64 = 300_000;
/// A run that takes more is not getting anywhere.
const EVENTS_MAX: u64 = 5_000_000;

/// Longer than anything takes that is not stalled, faults included.
const STALL_SHUTDOWN_MS: u64 = 12_000;
const STALL_WARNING_MS: u64 = 3_000;
/// Of so many seeds one has a hostile sidecar.
const HOSTILE_ONE_IN: u64 = 4;

impl Cluster {
    pub(super) fn new(seed: u64, options: &Options) -> Self {
        let mut fixed = Rng::with_seed(seed);
        let variant = options.floats_variant.unwrap_or_default();
        let mut rng = Rng::with_seed(seed ^ (variant + 1).wrapping_mul(0x5851_F42D_4C95_7F2D));
        let setup = Setup::new(seed, &mut fixed, &mut rng, options);
        let world = &setup.world;
        let sidecars = world.sidecars();
        let home = |rank: Rank| {
            let sidecar = world.sidecar_of(rank).expect("a rank of the world");
            sidecars.binary_search(&sidecar).expect("a sidecar of the world")
        };
        let workers = (0..).map(Rank).take(world.size()).map(|rank| Worker::new(rank, home(rank))).collect();
        let mut network = Network::new(&mut rng);
        let faults = match options.saboteur {
            Some(Saboteur::StaleEpoch) => {
                network.late_one_in = 4;
                Faults::quick_crashes(&mut fixed, world)
            }
            Some(Saboteur::ForgottenLoss) => Faults::one_long_crash(&mut fixed, world),
            Some(_) => Faults::none(),
            None if options.floats_variant.is_some() || setup.is_hostile => Faults::none(),
            None => Faults::new(&mut fixed, world),
        };
        let hostile = setup.is_hostile.then(|| Hostile::new(&mut fixed, world));
        let (mut faults, mut oracle) = (faults, Oracle::default());
        if let Some(hostile) = &hostile {
            faults.expect(hostile.index(), hostile.ranks());
            oracle.unchecked_through = Some(Epoch(u64::MAX));
        }
        let sabotage = options.saboteur.map(|saboteur| Sabotage::new(saboteur, world.coordinator(), fixed.u32(..4)));
        let schedule = Schedule::default();
        let hosts = sidecars.iter().map(|me| setup.host(*me, 0, schedule.now())).collect();
        Self {
            schedule,
            rng,
            sidecars,
            hosts,
            workers,
            network,
            oracle,
            faults,
            sabotage,
            hostile,
            began: 0,
            progress_us: 0,
            next_request: 0,
            report: Report::default(),
            trace: options.trace,
            finished_us: None,
            workloads: BTreeMap::new(),
            setup,
        }
    }

    /// Runs until all work is done or something is wrong.
    pub(super) fn run(mut self) -> Result<Report, Violated> {
        for index in 0..self.workers.len() {
            let (rank, delay_us) = (self.workers[index].rank, self.rng.u64(..2_000));
            self.schedule.after(delay_us, SimEvent::Step { rank, session: 0 });
        }
        if let Some(hostile) = &self.hostile {
            let (host, delay_us) = (hostile.host(), self.rng.u64(..5_000));
            self.schedule.after(delay_us, SimEvent::Intrude { host, life: 0 });
        }
        while let Some(event) = self.schedule.pop() {
            let now_us = self.schedule.now_us();
            self.report.events += 1;
            if self.finished_us.is_some_and(|at_us| now_us > at_us + WATCH_US) {
                if self.is_done() {
                    return self.finish();
                }
                // The end of a process was noticed late, and the work has started again.
                self.finished_us = None;
            }
            let patience_us = self.progress_us.max(self.faults.mended_us) + PATIENCE_US;
            if now_us > patience_us || self.report.events > EVENTS_MAX {
                break;
            }
            self.dispatch(event)?;
            self.note_end();
        }
        let attached = self.workers.iter().filter(|worker| worker.is_content()).count();
        let workers = self.workers.len();
        let text = format!(
            "at {} s {attached} of {workers} ranks have submitted everything; {}",
            self.schedule.now_us() / 1_000_000,
            self.oracle.waiting()
        );
        violated(Property::Liveness, text)
    }

    /// The workload of an epoch, the same for all ranks.
    pub(super) fn workload(&mut self, epoch: Epoch) -> Arc<Workload> {
        let setup = &self.setup;
        let new = || Arc::new(Workload::new(&setup.recipe, &setup.world, epoch));
        Arc::clone(self.workloads.entry(epoch).or_insert_with(new))
    }

    pub(super) fn note(&self, what: impl FnOnce() -> String) {
        if self.trace {
            let now_us = self.schedule.now_us();
            eprintln!("{:>4}.{:06} {}", now_us / 1_000_000, now_us % 1_000_000, what());
        }
    }

    fn dispatch(&mut self, event: SimEvent) -> Result<(), Violated> {
        if let Some(until_us) = self.paused_until(event) {
            self.schedule.at(until_us, event);
            return Ok(());
        }
        match event {
            SimEvent::Deliver { direction, generation } => self.deliver(direction, generation)?,
            SimEvent::Connect { connection, generation, give_up_us } => {
                let both_live = self.hosts[connection.low].alive && self.hosts[connection.high].alive;
                let attempt = (connection, generation, give_up_us);
                self.network.connect(&mut self.schedule, &mut self.rng, attempt, both_live);
            }
            SimEvent::Expire { connection, generation } => {
                self.network.expire(&mut self.schedule, &mut self.rng, connection, generation);
            }
            SimEvent::Sent { direction, generation } => self.sent(direction, generation),
            SimEvent::Drain { host, .. } => self.drain(host)?,
            SimEvent::Timeout { host, .. } => self.timeout(host),
            SimEvent::Command { host, lane, .. } => self.command(host, lane),
            SimEvent::Report { host, lane, .. } => self.handle_report(host, lane),
            SimEvent::Work { host, lane, .. } => self.work(host, lane)?,
            SimEvent::Step { rank, session } => self.step(rank, session),
            SimEvent::Withdraw { rank, session } => self.withdraw(rank, session),
            SimEvent::Intrude { host, life } => self.intrude(host, life),
            SimEvent::Break(fault) => self.break_something(fault),
            SimEvent::StartHost { host } => self.start_host(host),
            SimEvent::StartWorker { rank } => self.start_worker(rank),
            SimEvent::Overdue { host, life, epoch, since_us } => self.check_notified(host, life, epoch, since_us)?,
        }
        Ok(())
    }

    /// Until when the process of an event is stopped; events of earlier lives end here, too.
    fn paused_until(&mut self, event: SimEvent) -> Option<u64> {
        let host = match event {
            SimEvent::Drain { host, life }
            | SimEvent::Intrude { host, life }
            | SimEvent::Timeout { host, life }
            | SimEvent::Command { host, life, .. }
            | SimEvent::Report { host, life, .. }
            | SimEvent::Work { host, life, .. } => {
                if self.hosts[host].life != life {
                    return Some(u64::MAX);
                }
                host
            }
            SimEvent::Deliver { direction, .. } => direction.to,
            SimEvent::Sent { direction, .. } => direction.from,
            SimEvent::Step { rank, .. } | SimEvent::Withdraw { rank, .. } => {
                let worker = &self.workers[rank.index()];
                if self.schedule.now_us() < worker.hung_until_us {
                    return Some(worker.hung_until_us);
                }
                worker.host
            }
            _ => return None,
        };
        let until_us = self.hosts[host].paused_until_us;
        (self.schedule.now_us() < until_us).then_some(until_us)
    }

    /// Notes when all ranks have submitted everything and got their answers, and nothing will break any more.
    fn note_end(&mut self) {
        let done = self.finished_us.is_none() && self.is_done();
        if done && self.faults.are_over(self.schedule.now_us()) {
            self.finished_us = Some(self.schedule.now_us());
        } else if done {
            self.schedule_faults();
        }
    }

    fn is_done(&self) -> bool {
        let waits = |worker: &Worker| self.oracle.is_waiting(worker.rank);
        self.workers.iter().all(Worker::is_content) && !self.workers.iter().any(waits)
    }

    /// Checks that nothing is left when all work is done.
    fn finish(mut self) -> Result<Report, Violated> {
        for host in &self.hosts {
            let stats = host.engine.stats();
            let mut met = |what, count| *self.oracle.met.entry(what).or_default() += count;
            met("announced again", stats.announced_again);
            met("schedules", stats.schedules_issued);
            met("scheduled operations", stats.scheduled_operations);
            met("cancelled operations", stats.cancelled_operations);
            for (cause, count) in Invalidation::ALL.into_iter().zip(stats.schedules_withdrawn) {
                met(withdrawal(cause), count);
            }
            for (number, lane) in host.lanes.iter().enumerate() {
                let left = lane.executor.private_bytes();
                if left.registers + left.parked + left.early > 0 {
                    let text = format!("lane {number} of {} holds {left:?} when all is done", host.index);
                    return violated(Property::Bounds, text);
                }
                self.report.chunks += lane.executor.stats().chunks_sent;
                self.report.early_chunks += lane.executor.stats().chunks_sent_early;
            }
        }
        self.report.epochs = self.began;
        self.report.successes = self.oracle.successes;
        self.report.failures = self.oracle.failures;
        self.report.virtual_us = self.schedule.now_us();
        self.report.sabotaged = self.sabotage.as_ref().is_some_and(|sabotage| sabotage.struck);
        self.report.met = self.oracle.met;
        self.report.results = self.oracle.results;
        Ok(self.report)
    }
}

/// The situation of an invalidated schedule.
fn withdrawal(cause: Invalidation) -> &'static str {
    match cause {
        Invalidation::Order => "invalidated for the order",
        Invalidation::Request => "invalidated for another request",
        Invalidation::Refusal => "invalidated for a refusal",
        Invalidation::Delay => "invalidated for a delay",
        Invalidation::WorkerExit => "invalidated for a worker exit",
        Invalidation::Tuning => "invalidated for other settings",
    }
}

impl Setup {
    /// `fixed` determines what results depend on, `rng` what they must not depend on.
    fn new(seed: u64, fixed: &mut Rng, rng: &mut Rng, options: &Options) -> Self {
        let world = world(fixed);
        let is_plain = options.saboteur.is_none() && options.floats_variant.is_none();
        let is_hostile = is_plain && seed % HOSTILE_ONE_IN == 3 && world.sidecars().len() > 1;
        let floats = options.floats_variant.is_some() || options.saboteur == Some(Saboteur::UnroundedOwner);
        let cost = CostModel {
            alpha_us: [0.5, 5.0, 60.0][fixed.usize(..3)],
            beta_us_per_byte: [1e-4, 1e-3, 1e-2][fixed.usize(..3)],
            gamma_us_per_byte: 1e-4,
        };
        let leavers_until = Epoch(if floats || options.saboteur.is_some() { 0 } else { fixed.u64(..3) });
        let stalls = fixed.u8(..4) == 0 && options.saboteur.is_none() && !is_hostile;
        let saboteur = options.saboteur;
        let small = fixed.u8(..5) == 0 && !floats && options.saboteur.is_none();
        // A part of what the bits depend on.
        let eager_bytes = [0, 0, 40, 4_096][fixed.usize(..4)];
        let result_bytes_max = if small { 30_000 } else { u64::MAX };
        let loops = match saboteur {
            Some(saboteur) if saboteur.schedules() || saboteur.commits() => Loops::Only,
            Some(_) => Loops::None,
            None => [Loops::None, Loops::Some, Loops::Only][fixed.usize(..3)],
        };
        let often = RunAhead { setbacks_max: 0, ..RunAhead::default() };
        let run_ahead = match loops {
            Loops::None => Some(RunAhead::default()).filter(|_| saboteur.is_none()),
            _ if saboteur.is_some() => Some(often),
            _ => [None, Some(RunAhead::default()), Some(often), Some(often)][rng.usize(..4)],
        };
        let injected = !floats && saboteur.is_none_or(|saboteur| !saboteur.schedules());
        let recipe =
            Recipe { seed, leavers_until, any_floats: floats, injected, stalls, result_bytes_max, loops, saboteur };
        // From a generator of its own, so that an older seed still leads to the run that it led to.
        let mut tuning = Rng::with_seed(seed ^ TUNING_SEED ^ options.floats_variant.unwrap_or(0) << 32);
        let (chunk_bytes, autotune) = (tuning.bool().then_some(4_096), tuning.bool().then(|| autotune(&mut tuning)));
        Self {
            world,
            chunk_bytes: chunk_bytes.filter(|_| saboteur.is_none()),
            autotune: autotune.filter(|_| saboteur.is_none()),
            lanes: rng.u16(1..=3),
            grant_bytes: [0, 54, 400, 6_000, 4 << 20][rng.usize(..5)],
            fusion_threshold_bytes: [0, 2_000, 64 << 20][rng.usize(..3)],
            buckets_in_flight: rng.usize(1..=3),
            eager_bytes,
            run_ahead,
            control_fan_out: match saboteur {
                // The others find messages as the children of the coordinator receive them.
                Some(saboteur) if !saboteur.relays() => 8,
                // A relay may forge messages of the coordinator, which nothing can detect.
                None if is_hostile => 8,
                _ => [1, 2, 2, 3, 8][rng.usize(..if saboteur.is_some() { 3 } else { 5 })],
            },
            cost,
            recipe,
            is_hostile,
        }
    }

    pub(super) fn host(&self, me: SidecarIndex, life: u32, now: ronde_engine::Time) -> Host {
        let config = EngineConfig {
            lanes: self.lanes,
            fusion_threshold_bytes: self.fusion_threshold_bytes,
            chunk_bytes: self.chunk_bytes,
            autotune: self.autotune.clone(),
            buckets_in_flight: self.buckets_in_flight,
            eager_bytes: self.eager_bytes,
            run_ahead: self.run_ahead,
            control_fan_out: self.control_fan_out,
            cost: self.cost,
            result_bytes_max: self.recipe.result_bytes_max,
            stall_warning_ms: if self.recipe.stalls { STALL_WARNING_MS } else { 60_000 },
            stall_shutdown_ms: if self.recipe.stalls { STALL_SHUTDOWN_MS } else { 0 },
            ..EngineConfig::new(me, self.world.clone())
        };
        Host::new(config, self.grant_bytes, life, now)
    }
}

/// A search that changes values often. They must not change a bit.
fn autotune(rng: &mut Rng) -> AutotuneSettings {
    AutotuneSettings {
        warmup_samples: rng.usize(0..=1),
        steps_per_sample: 1,
        samples_max: rng.usize(1..=6),
        seed: rng.u64(..),
        ..AutotuneSettings::default()
    }
}

const TUNING_SEED: u64 = 0x7475_6e65;

/// One to seven sidecars with gaps between their indices, one to eight ranks, up to three more process sets.
fn world(rng: &mut Rng) -> World {
    let count = [1, 2, 2, 3, 3, 4, 5, 7][rng.usize(..8)];
    let mut index = 0;
    let sidecars: Vec<SidecarIndex> = (0..count)
        .map(|_| {
            index += rng.u32(1..=2);
            SidecarIndex(index)
        })
        .collect();
    let mut placement = sidecars.clone();
    placement.extend((0..rng.usize(0..=8 - count)).map(|_| sidecars[rng.usize(..count)]));
    rng.shuffle(&mut placement);
    let ranks: Vec<Rank> = (0..).map(Rank).take(placement.len()).collect();
    let mut sets = vec![ProcessSet { id: SetId::WORLD, ranks: ranks.clone() }];
    for id in 1..=rng.u32(0..=3) {
        let mut some: Vec<Rank> = ranks.iter().copied().filter(|_| rng.bool()).collect();
        if some.is_empty() {
            some = vec![ranks[rng.usize(..ranks.len())]];
        }
        sets.push(ProcessSet { id: SetId(id * 3), ranks: some });
    }
    World::with_sets(placement, sets).expect("a small world within all limits")
}
