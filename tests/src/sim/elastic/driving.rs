//! The event loop: what happens to sidecars and workers.

use ronde_engine::{Action, Admission, Busy, Engine, EngineConfig, Event, Time};
use ronde_launcher::memberships::Event as Planned;
use ronde_wire::{
    Cause, Collective, DType, Epoch, Failure, Rank, ReduceOp, Request, RequestId, Seq, SetId, Shape, TensorName,
    WorkerNumber,
};

use super::checks::bit;
use super::host::{Host, HostSession, index, numbers_of, world_of};
use super::launcher::ToSidecar;
use super::net::Message;
use super::worker::WorkerState;
use super::{ElasticBug, ElasticReport, Happening, Launcher, Network, Oracle, Sim};

/// Random faults happen for so long, at most.
const FAULTS_US: u64 = 20_000_000;
/// Simulated time for which a calm job is watched; longer than every timeout.
const WATCH_US: u64 = 60_000_000;
/// The job has to train from then on.
const RECOVERED_US: u64 = 45_000_000;
const EVENTS_MAX: u64 = 3_000_000;
const TICK_US: u64 = 50_000;
/// How long a sidecar tries to connect.
const DIAL_US: u64 = 30_000_000;

impl Sim {
    pub(super) fn new(seed: u64, bug: Option<ElasticBug>, trace: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let calm_us = rng.u64(2_000_000..FAULTS_US);
        let mut sim = Self {
            rng,
            now_us: 0,
            queue: std::collections::BinaryHeap::new(),
            order: 0,
            hosts: Vec::new(),
            workers: Vec::new(),
            network: Network::default(),
            launcher: Launcher::new(seed),
            oracle: Oracle::default(),
            admitted: std::collections::BTreeMap::new(),
            bug,
            trace,
            report: ElasticReport::default(),
            next_request: 0,
            last_number: 0,
            calm_us,
            violation: None,
        };
        sim.begin();
        sim
    }

    /// Runs until the job was watched for long enough.
    pub(super) fn run(mut self) -> Result<ElasticReport, String> {
        let (mut events, mut before) = (0, None);
        while let Some(what) = self.pop() {
            events += 1;
            if before.is_none() && self.now_us > self.calm_us + RECOVERED_US {
                before = Some(self.workers.iter().map(|worker| worker.steps).collect::<Vec<u64>>());
            }
            if self.now_us > self.calm_us + WATCH_US {
                break;
            }
            self.happen(what);
            if let Some(violation) = self.violation.take() {
                return Err(format!("at {} us: {violation}", self.now_us));
            }
            if events > EVENTS_MAX {
                return Err(format!("at {} us: {EVENTS_MAX} events", self.now_us));
            }
        }
        self.check_liveness(&before.unwrap_or_default())?;
        Ok(self.report)
    }

    /// Everybody who lives trains.
    fn check_liveness(&self, before: &[u64]) -> Result<(), String> {
        if self.launcher.plan.is_changing() {
            return Err(format!("the membership after {} was not committed", self.last_number));
        }
        let living: Vec<u32> = (0..).take(self.workers.len()).filter(|worker| self.lives(*worker)).collect();
        let mut seated = self.launcher.current().workers();
        seated.sort_unstable();
        if living != seated {
            return Err(format!("workers {living:?} live, but the last membership has {seated:?}"));
        }
        for worker in living {
            let (now, then) = (self.workers[worker as usize].steps, before.get(worker as usize).copied().unwrap_or(0));
            if now < then + 3 {
                return Err(format!("worker {worker} made {} steps after everything was calm", now - then));
            }
        }
        Ok(())
    }

    pub(super) fn lives(&self, worker: u32) -> bool {
        let worker = &self.workers[worker as usize];
        worker.alive && self.hosts.get(worker.host).is_none_or(|host| host.alive)
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Tick { host } => self.tick(host),
            Happening::Deliver { from, to, link } => self.deliver(from, to, link),
            Happening::Connect { from, to, membership, deadline_us } => self.connect(from, to, membership, deadline_us),
            Happening::LinkGone { host, peer, membership } => self.link_gone(host, peer, membership),
            Happening::Executed { host, epoch, seq } => self.on(host, Event::Executed { epoch, seq }),
            Happening::Cancelled { host, epoch, last } => self.on(host, Event::Cancelled { epoch, last }),
            Happening::Released { host, epoch } => {
                self.hosts[host].releasing.remove(&epoch);
                self.progress(host);
            }
            Happening::LanesEntered { host, membership } => {
                if self.hosts[host].alive && self.hosts[host].rules.lane_entered(membership) {
                    self.report_soon(2_000, Planned::Entered { sidecar: index(host).0, membership });
                }
            }
            Happening::ToSidecar { host, message } => self.handle_launcher(host, message),
            Happening::ToLauncher { message } => self.launch(&message),
            Happening::Act { worker, session } => self.act(worker, session),
            Happening::Completed { worker, session, request, result } => {
                self.completed(worker, session, request, result);
            }
            Happening::Begun { worker, session } => self.begun(worker, session),
            Happening::Ended { worker, session } => {
                if self.is_current(worker, session) {
                    self.leave(worker);
                }
            }
            Happening::Change { worker, session } => {
                if self.is_current(worker, session) {
                    self.workers[worker as usize].leaves = true;
                }
            }
            Happening::SessionOver { worker, session, orderly } => self.session_over(worker, session, orderly),
            Happening::Fault => self.fault(),
        }
    }

    fn engine_time(&self) -> Time {
        Time(self.now_us + 1)
    }

    /// An event of a sidecar's engine, if it lives.
    pub(super) fn on(&mut self, host: usize, event: Event) {
        if self.hosts[host].alive {
            let now = self.engine_time();
            self.hosts[host].engine.handle_event(now, event);
            self.progress(host);
        }
    }

    /// Performs the engine's actions, and enters the next membership when it can.
    pub(super) fn progress(&mut self, host: usize) {
        if !self.hosts[host].alive {
            return;
        }
        while let Some(action) = self.hosts[host].engine.poll_action() {
            self.perform(host, action);
        }
        let (now, hasty) = (self.engine_time(), self.bug == Some(ElasticBug::EnterWithinEpoch));
        let of = &mut self.hosts[host];
        let here = of.running.is_some() || !of.engine.is_idle() || !of.releasing.is_empty();
        let busy = Busy { here: here && !hasty, for_others: !of.engine.is_drained() && !hasty };
        if of.rules.poll_enter(now, busy, 1) {
            self.enter(host);
        }
    }

    fn enter(&mut self, host: usize) {
        let now = self.engine_time();
        let Some((seats, world)) = self.hosts[host].next.take() else { return };
        self.log(|| format!("sidecar {host} enters membership {}: {:?}", seats.number, seats.seats));
        for peer in self.network.peers(host) {
            let membership = self.network.link(host, peer).map_or(0, |(_, membership)| membership);
            self.network.close(host, peer);
            self.within(3_000, Happening::LinkGone { host: peer, peer: host, membership });
        }
        let of = &mut self.hosts[host];
        of.end_membership();
        of.running = None;
        if self.bug == Some(ElasticBug::ForgottenEpoch) {
            let config = EngineConfig { control_fan_out: 2, ..EngineConfig::new(index(host), world) };
            of.engine = Engine::new(config, now);
        } else {
            of.engine.enter(now, world, Epoch::before_membership(seats.number));
        }
        self.within(1_000, Happening::LanesEntered { host, membership: seats.number });
        self.progress(host);
    }

    fn tick(&mut self, host: usize) {
        if !self.hosts[host].alive {
            return;
        }
        self.after(TICK_US, Happening::Tick { host });
        let ranks: Vec<Rank> = self.hosts[host].sessions.values().filter_map(|session| session.rank).collect();
        let now = self.engine_time();
        let engine = &mut self.hosts[host].engine;
        ranks.into_iter().for_each(|rank| engine.handle_event(now, Event::RankAlive { rank }));
        if engine.poll_timeout().is_some_and(|at| at <= now) {
            engine.handle_timeout(now);
        }
        self.progress(host);
    }

    fn handle_launcher(&mut self, host: usize, message: ToSidecar) {
        if !self.hosts[host].alive {
            return;
        }
        self.log(|| format!("launcher to sidecar {host}: {message:?}"));
        match message {
            ToSidecar::Change(seats) => {
                let (world, membership) = (world_of(&seats), seats.number);
                let changed = self.hosts[host].rules.change(index(host), membership, numbers_of(&seats), &world);
                if let Err(reason) = changed {
                    return self.violate(format!("sidecar {host} refuses membership {membership}: {reason}"));
                }
                self.hosts[host].next = Some((seats, world));
                self.report_soon(2_000, Planned::Prepared { sidecar: index(host).0, membership });
            }
            ToSidecar::Enter(number) => {
                if self.bug == Some(ElasticBug::NeverEnter) && host == 0 || !self.hosts[host].rules.release(number) {
                    return;
                }
                let active = self.hosts[host].sessions.iter().filter(|(_, session)| session.rank.is_some());
                let active: Vec<(u32, u64)> = active.map(|(worker, session)| (*worker, session.number)).collect();
                for (worker, session) in active {
                    self.notify(worker, Happening::Change { worker, session });
                }
                self.progress(host);
            }
            ToSidecar::Commit(number) => {
                if self.hosts[host].rules.commit(number) {
                    self.open_links(host);
                    let waiting: Vec<u32> = self.hosts[host].sessions.keys().copied().collect();
                    waiting.into_iter().for_each(|worker| self.attach(host, worker));
                    self.progress(host);
                }
            }
        }
    }

    // === Links ===

    fn open_links(&mut self, host: usize) {
        if let Some(parent) = self.hosts[host].engine.control_parent() {
            self.dial(host, parent.index());
        }
    }

    fn dial(&mut self, from: usize, to: usize) {
        if self.hosts[from].engine.control_parent() == Some(index(to)) && self.hosts[from].dialling.insert(to) {
            let (membership, deadline_us) = (self.hosts[from].rules.number(), self.now_us + DIAL_US);
            self.within(2_000, Happening::Connect { from, to, membership, deadline_us });
        }
    }

    fn connect(&mut self, from: usize, to: usize, membership: u64, deadline_us: u64) {
        let dialler = &self.hosts[from];
        if !dialler.alive || dialler.rules.number() != membership || !dialler.dialling.contains(&to) {
            return;
        }
        let again = Happening::Connect { from, to, membership, deadline_us };
        if self.now_us > deadline_us {
            self.hosts[from].dialling.remove(&to);
            return self.on(from, Event::LinkDown { peer: index(to), reason: "no answer".to_owned() });
        }
        if let Some(until) = self.network.cut_until(from, to, self.now_us) {
            return self.after(until - self.now_us, again);
        }
        if !self.hosts[to].alive {
            return self.after(200_000, again);
        }
        self.hosts[from].dialling.remove(&to);
        if self.hosts[to].rules.number() != membership && self.bug != Some(ElasticBug::EarlyCommit) {
            return self.on(from, Event::LinkDown { peer: index(to), reason: "another membership".to_owned() });
        }
        self.network.open(from, to, membership);
        for (at, peer) in [(from, to), (to, from)] {
            self.on(at, Event::LinkUp { peer: index(peer), lanes: 1 });
            for message in self.hosts[at].outbox.remove(&peer).unwrap_or_default() {
                self.send((at, peer), message);
            }
        }
    }

    fn send(&mut self, (from, to): (usize, usize), message: Message) {
        let delay_us = self.rng.u64(50..3_000);
        let start_us = self.network.cut_until(from, to, self.now_us).unwrap_or(self.now_us);
        match self.network.send((from, to), message.clone(), start_us + delay_us) {
            Some((at_us, link)) => self.after(at_us - self.now_us, Happening::Deliver { from, to, link }),
            None => {
                self.hosts[from].outbox.entry(to).or_default().push(message);
                self.dial(from, to);
            }
        }
    }

    fn deliver(&mut self, from: usize, to: usize, link: u64) {
        if let Some((epoch, seq, message)) = self.network.take((from, to), link) {
            self.on(to, Event::Control { from: index(from), epoch, seq, message });
        }
    }

    fn link_gone(&mut self, host: usize, peer: usize, membership: u64) {
        let is_same = self.hosts[host].rules.number() == membership;
        if is_same && self.network.link(host, peer).is_none() {
            self.on(host, Event::LinkDown { peer: index(peer), reason: "closed".to_owned() });
        }
    }

    // === Actions of engines ===

    fn perform(&mut self, host: usize, action: Action) {
        match action {
            Action::Send { to, epoch, seq, message } => self.send((host, to.index()), (epoch, seq, message)),
            Action::EpochBegan { epoch } => self.epoch_began(host, epoch),
            Action::EpochEnded { epoch, .. } => self.epoch_ended(host, epoch),
            Action::Admit(admission) => self.admit(host, &admission),
            Action::Cancel { epoch, last, .. } => self.within(500, Happening::Cancelled { host, epoch, last }),
            Action::Complete { rank, request, outcome } => {
                let done = outcome.ok().map(|completion| (completion.epoch, completion.seq));
                self.complete(host, rank, request, done);
            }
            Action::Disconnect { peer, reason } => {
                self.violate(format!("sidecar {host} calls {peer} a violator: {reason}"));
            }
            Action::EndSession { rank, .. } => self.violate(format!("sidecar {host} takes {rank} for dead")),
            Action::Commit { .. }
            | Action::SetForgotten { .. }
            | Action::Notice { .. }
            | Action::Hung { .. }
            | Action::Autotuned(_) => {}
        }
    }

    fn epoch_began(&mut self, host: usize, epoch: Epoch) {
        let membership = self.hosts[host].rules.number();
        self.log(|| format!("sidecar {host} begins {epoch} in membership {membership}"));
        if let Err(what) = self.oracle.begin(epoch, membership) {
            self.violate(what);
        }
        self.report.epochs += u64::from(self.hosts[host].engine.control_parent().is_none());
        self.hosts[host].running = Some(epoch);
        let mut begun = Vec::new();
        for (worker, session) in &mut self.hosts[host].sessions {
            if session.rank.is_some() {
                session.in_epoch = true;
                begun.push((*worker, session.number));
            }
        }
        for (worker, session) in begun {
            self.notify(worker, Happening::Begun { worker, session });
        }
    }

    fn epoch_ended(&mut self, host: usize, epoch: Epoch) {
        self.log(|| format!("sidecar {host} ends {epoch}"));
        self.hosts[host].running = None;
        self.hosts[host].releasing.insert(epoch);
        self.within(1_000, Happening::Released { host, epoch });
        let ended = self.hosts[host].sessions.iter().filter(|(_, session)| session.in_epoch);
        for (worker, session) in ended.map(|(worker, session)| (*worker, session.number)).collect::<Vec<_>>() {
            self.notify(worker, Happening::Ended { worker, session });
        }
    }

    fn admit(&mut self, host: usize, admission: &Admission) {
        let (epoch, seq) = (admission.epoch, admission.seq);
        // A contribution stays until its operation is over, even if its worker has left.
        let requests = admission.tensors.iter().flat_map(|tensor| &tensor.requests);
        let worker = |request: &RequestId| self.hosts[host].requests.get(request).map(|(worker, _)| *worker);
        let bits = requests.filter_map(|of| worker(&of.request)).fold(0, |bits, worker| bits | bit(worker));
        let members: Vec<usize> = admission.topology.members.iter().map(|member| member.sidecar.index()).collect();
        let (contributions, admitted) = self.admitted.entry((epoch, seq)).or_default();
        admitted.push(host);
        if admission.is_eager() {
            let bytes = admission.contributions.iter().flatten().filter_map(|bytes| bytes.as_ref().try_into().ok());
            *contributions |= bytes.map(u64::from_le_bytes).fold(0, |bits, of| bits | of);
            self.within(300, Happening::Executed { host, epoch, seq });
            return;
        }
        *contributions |= bits;
        if members.iter().all(|member| admitted.contains(member)) {
            for host in members {
                self.within(2_000, Happening::Executed { host, epoch, seq });
            }
        }
    }

    fn complete(&mut self, host: usize, rank: Rank, request: RequestId, done: Option<(Epoch, Seq)>) {
        let Some((worker, session)) = self.hosts[host].requests.remove(&request) else {
            return self.violate(format!("{request} of {rank} is answered twice on sidecar {host}"));
        };
        let result = done.map(|operation| self.admitted.get(&operation).map_or(0, |(bits, _)| *bits));
        if let (Some(operation), Some(bits)) = (done, result)
            && let Err(what) = self.oracle.result(operation, self.hosts[host].rules.number(), bits)
        {
            self.violate(format!("worker {worker}, {rank}: {what}"));
        }
        self.notify(worker, Happening::Completed { worker, session, request, result });
    }

    // === Workers ===

    /// Sends a worker a message, after all earlier ones.
    fn notify(&mut self, worker: u32, what: Happening) {
        let at_us = self.now_us + self.rng.u64(10..1_500);
        let last = &mut self.workers[worker as usize].last_us;
        *last = (*last).max(at_us);
        let delay_us = *last - self.now_us;
        self.after(delay_us, what);
    }

    fn is_current(&self, worker: u32, session: u64) -> bool {
        let of = &self.workers[worker as usize];
        self.lives(worker) && of.session == session && of.state != WorkerState::Away
    }

    fn act(&mut self, worker: u32, session: u64) {
        let of = &self.workers[worker as usize];
        if !self.lives(worker) || of.session != session {
            return;
        }
        match of.state {
            WorkerState::Away => self.claim(worker),
            WorkerState::Claimed => {}
            WorkerState::Training => self.submit(worker),
        }
    }

    fn claim(&mut self, worker: u32) {
        let of = &mut self.workers[worker as usize];
        let before = of.session;
        self.session_over(worker, before, true);
        let of = &mut self.workers[worker as usize];
        of.session += 1;
        (of.state, of.request, of.step, of.leaves) = (WorkerState::Claimed, None, 0, false);
        let (host, number) = (of.host, of.session);
        self.hosts[host].sessions.insert(worker, HostSession { number, rank: None, in_epoch: false });
        self.report_soon(2_000, Planned::Attached { worker });
        self.attach(host, worker);
        self.progress(host);
    }

    fn attach(&mut self, host: usize, worker: u32) {
        let of = &mut self.hosts[host];
        let stale = of.last_ranks.get(&worker).copied().filter(|_| self.bug == Some(ElasticBug::StaleRank));
        let Some(open) = of.rules.open_rank(WorkerNumber(worker)) else { return };
        let rank = stale.unwrap_or(open);
        let Some(session) = of.sessions.get_mut(&worker).filter(|session| !session.in_epoch && session.rank.is_none())
        else {
            return;
        };
        session.rank = Some(rank);
        of.last_ranks.insert(worker, rank);
        let membership = of.rules.number();
        let now = Time(self.now_us + 1);
        of.engine.handle_event(now, Event::RankAttached { rank });
        self.report_soon(2_000, Planned::Seated { worker, membership });
    }

    fn begun(&mut self, worker: u32, session: u64) {
        if self.is_current(worker, session) {
            self.workers[worker as usize].state = WorkerState::Training;
            self.within(2_000, Happening::Act { worker, session });
        }
    }

    fn submit(&mut self, worker: u32) {
        self.next_request += 1;
        let request = RequestId(self.next_request);
        let of = &mut self.workers[worker as usize];
        of.request = Some(request);
        let (host, number, step) = (of.host, of.session, of.step);
        let Some(session) = self.hosts[host].sessions.get(&worker).filter(|session| session.number == number) else {
            return;
        };
        // A session of an earlier membership is ignored; its worker receives the end.
        let Some(rank) = session.rank else { return };
        let what = request_of(step);
        let contribution = match self.hosts[host].engine.contribution_bytes(rank, &what) {
            0 => Vec::new(),
            _ => bit(worker).to_le_bytes().to_vec(),
        };
        self.hosts[host].requests.insert(request, (worker, number));
        self.on(host, Event::Submitted { rank, request, what, contribution: contribution.into() });
    }

    fn completed(&mut self, worker: u32, session: u64, request: RequestId, result: Option<u64>) {
        if !self.is_current(worker, session) || self.workers[worker as usize].request != Some(request) {
            return;
        }
        let of = &mut self.workers[worker as usize];
        if result.is_none() || of.leaves {
            return self.leave(worker);
        }
        (of.step, of.steps) = (of.step + 1, of.steps + 1);
        self.report.steps += 1;
        let pause_us = self.rng.u64(1_000..30_000);
        self.after(pause_us, Happening::Act { worker, session });
    }

    /// The worker closes its session, and returns.
    fn leave(&mut self, worker: u32) {
        let of = &mut self.workers[worker as usize];
        let session = of.session;
        of.state = WorkerState::Away;
        self.notify(worker, Happening::SessionOver { worker, session, orderly: true });
        let pause_us = self.rng.u64(2_000..80_000);
        self.after(pause_us, Happening::Act { worker, session });
    }

    pub(super) fn session_over(&mut self, worker: u32, session: u64, orderly: bool) {
        let host = self.workers[worker as usize].host;
        if !self.hosts.get(host).is_some_and(|host| host.alive) {
            return;
        }
        let Some(of) = self.hosts[host].sessions.get(&worker).copied().filter(|of| of.number == session) else {
            return;
        };
        self.hosts[host].sessions.remove(&worker);
        if let Some(rank) = of.rank {
            let cause = if orderly { Cause::ShutDown } else { Cause::RankLost };
            let failure = Failure::new(cause, format!("{rank} has left")).with_rank(rank);
            self.on(host, Event::RankLeft { rank, failure });
        }
    }

    /// Starts a sidecar within a membership.
    pub(super) fn start_host(&mut self, host: usize, seats: &super::launcher::Seats) {
        let now = self.engine_time();
        // One with a lower index may start later, or never.
        while self.hosts.len() <= host {
            self.hosts.push(Host::new(self.hosts.len(), &super::launcher::Seats::of(self.hosts.len()), now));
        }
        self.hosts[host] = Host::new(host, seats, now);
        self.after(TICK_US, Happening::Tick { host });
    }
}

/// The all-reduce of a step: small ones travel eagerly.
fn request_of(step: u64) -> Request {
    let elements = if step.is_multiple_of(2) { 1 } else { 2_000 };
    let name = TensorName::new(format!("step.{}", step % 8)).expect("a name");
    let shape = Shape::new(vec![elements]).expect("a shape");
    let name = if elements == 1 { name } else { TensorName::new(format!("large.{}", step % 8)).expect("a name") };
    Request::new(SetId::WORLD, name, Collective::AllReduce { op: ReduceOp::Sum }, DType::I64, shape)
}
