//! The scripts of workers, and the faults.

use std::sync::Arc;

use fastrand::Rng;
use ronde_engine::{EnginePhase, Event};
use ronde_wire::{Cause, Collective, Epoch, Failure, Rank, RequestId, SetId};

use super::checks::{Property, Violated, violated};
use super::cluster::Cluster;
use super::fake_plugins::Kept;
use super::faults::Fault;
use super::host::Command;
use super::item::{ANY_SOURCE_TAGS, Added, InjectedError, Kind};
use super::schedule::SimEvent;
use super::worker::{Part, Rate, State};
use super::workload::Workload;

/// Workers.
impl Cluster {
    /// Continues a worker's script: it claims its rank, submits more requests, or shuts down.
    pub(super) fn step(&mut self, rank: Rank, session: u32) {
        let worker = &mut self.workers[rank.index()];
        if worker.session != session || !worker.alive {
            return;
        }
        let host = worker.host;
        if !self.hosts[host].alive {
            self.schedule.after(50_000, SimEvent::Step { rank, session });
            return;
        }
        match &mut worker.state {
            // A driver performs the engine's actions before it handles new sessions: a session after the begin of an
            // epoch does not take part in it.
            State::Detached if self.hosts[host].draining => {
                self.schedule.after(50, SimEvent::Step { rank, session });
            }
            State::Detached => {
                worker.state = State::Waiting;
                self.note(|| format!("{rank} attaches"));
                self.handle_event(host, Event::RankAttached { rank });
            }
            State::Waiting => {}
            State::Active(_) => self.ask_for_some(rank, session),
        }
    }

    /// A worker withdraws a request, if it still waits for it.
    pub(super) fn withdraw(&mut self, rank: Rank, session: u32) {
        let worker = &mut self.workers[rank.index()];
        if worker.session != session || !self.hosts[worker.host].alive {
            return;
        }
        let host = worker.host;
        if let Some(request) = worker.part().and_then(|part| part.regrets.pop_front()) {
            self.note(|| format!("{rank} withdraws {request}"));
            let reason = "its deadline has passed".to_owned();
            self.handle_event(host, Event::Withdrawn { rank, request, reason });
        }
    }

    /// Begins an epoch for the waiting ranks of a sidecar.
    pub(super) fn epoch_began(&mut self, host: usize, epoch: Epoch) -> Result<(), Violated> {
        let me = self.hosts[host].index;
        self.note(|| format!("{me}: {epoch} begins"));
        if self.hosts[host].lanes.iter().any(|lane| lane.epoch >= epoch) {
            return violated(Property::CurrentEpoch, format!("{epoch} begins on {me} after a newer one"));
        }
        if me == self.setup.world.coordinator() {
            self.oracle.epoch_begins(epoch);
            self.began += 1;
            self.progress_us = self.schedule.now_us();
            self.schedule_faults();
        }
        // Codec state lasts for one epoch.
        self.hosts[host].kept = Kept::default();
        self.send_to_lanes(host, &Command::Epoch(epoch));
        let workload = self.workload(epoch);
        for index in 0..self.workers.len() {
            let worker = &mut self.workers[index];
            if worker.host != host || !matches!(worker.state, State::Waiting) {
                continue;
            }
            let (rank, session) = (worker.rank, worker.session);
            let mut todo: Vec<usize> = workload.of(rank).collect();
            self.rng.shuffle(&mut todo);
            let orderly = !workload.wild || self.rng.u8(..3) > 0;
            put_in_turn(&mut self.rng, &workload, &mut todo, orderly);
            let rate = [Rate::Burst, Rate::Steady, Rate::Steady, Rate::Slow][self.rng.usize(..4)];
            worker.state = State::Active(Part::new(Arc::clone(&workload), todo, rate, orderly));
            let delay_us = self.rng.u64(..if rate == Rate::Slow { 20_000 } else { 500 });
            self.schedule.after(delay_us, SimEvent::Step { rank, session });
        }
        Ok(())
    }

    /// Ends an epoch: the ranks of a sidecar that took part attach again after a while.
    pub(super) fn detach_all(&mut self, host: usize) {
        for index in 0..self.workers.len() {
            if self.workers[index].host == host && matches!(self.workers[index].state, State::Active(_)) {
                let delay_us = self.rng.u64(..5_000);
                self.restart_session(index, delay_us);
            }
        }
    }

    /// Delivers an answer to a worker.
    pub(super) fn item_is_over(&mut self, rank: Rank, (epoch, item): (Epoch, usize), set: Option<SetId>) {
        let worker = &mut self.workers[rank.index()];
        let session = worker.session;
        if let Some(part) = worker.part().filter(|part| part.workload.epoch == epoch) {
            part.is_over(item);
            part.added.extend(set.map(|set| (item, set)));
            let delay_us = self.rng.u64(..200);
            self.schedule.after(delay_us, SimEvent::Step { rank, session });
        }
    }

    /// Ends the session of a worker whose heartbeats stopped, as the engine requests.
    pub(super) fn end_session(&mut self, rank: Rank, failure: &Failure) -> Result<(), Violated> {
        let worker = &mut self.workers[rank.index()];
        let until_us = worker.hung_until_us;
        if self.schedule.now_us() >= until_us + 5_000_000 {
            return violated(Property::Culprit, format!("the session of {rank} is ended: {failure}"));
        }
        if worker.alive {
            worker.alive = false;
            worker.session += 1;
            worker.state = State::Detached;
            self.schedule.at(until_us, SimEvent::StartWorker { rank });
        }
        Ok(())
    }

    fn ask_for_some(&mut self, rank: Rank, session: u32) {
        let rate = self.workers[rank.index()].part().map_or(Rate::Steady, |part| part.rate);
        let at_once = if rate == Rate::Burst { u8::MAX } else { self.rng.u8(1..=5) };
        for _ in 0..at_once {
            let next = self.workers[rank.index()].part().and_then(Part::next);
            match next {
                Some(item) => self.ask(rank, session, item),
                None => {
                    self.leave_if_done(rank);
                    return;
                }
            }
        }
        let slower = if rate == Rate::Slow { 10 } else { 1 };
        let delay_us = [5, 100, 1_500][self.rng.usize(..3)] * slower;
        self.schedule.after(self.rng.u64(..delay_us), SimEvent::Step { rank, session });
    }

    fn ask(&mut self, rank: Rank, session: u32, item: usize) {
        let host = self.workers[rank.index()].host;
        let Some(part) = self.workers[rank.index()].part() else { return };
        let workload = Arc::clone(&part.workload);
        let asked = &workload.items[item];
        let (mut what, name) = (asked.request(rank, &part.added), asked.name.clone());
        let (set, group) = (what.set, what.group.clone());
        if asked.injected == InjectedError::Refused(rank) {
            part.is_over(item);
            self.note(|| format!("{rank} is refused {name} of {set}"));
            let reason = "the tensor is too strange".to_owned();
            let members = match what.collective {
                Collective::AddSetOfMembers { ranks } => ranks,
                _ => Vec::new(),
            };
            self.handle_event(host, Event::Refused { rank, set, name, group, members, reason });
            return;
        }
        let given = self.sabotage.as_mut().map_or(item, |sabotage| sabotage.hands_over(rank, &workload, item));
        if given != item {
            let other = workload.items[given].request(rank, &Added::new());
            (what.dtype, what.shape) = (other.dtype, other.shape);
        }
        self.next_request += 1;
        let request = RequestId(self.next_request);
        if asked.injected == InjectedError::Withdrawn(rank) {
            part.regrets.push_back(request);
            let delay_us = self.rng.u64(..2_000);
            self.schedule.after(delay_us, SimEvent::Withdraw { rank, session });
        }
        self.note(|| format!("{rank} asks for item {item}, {name} of {set}, as {request}"));
        self.oracle.asked(rank, request, &workload, item);
        self.hosts[host].inputs.insert((rank, request), Arc::new(workload.input(given, rank)));
        // A second receive from any source has no name in common with the first: it waits for a second message.
        let from_any = matches!(asked.kind, Kind::Message(_, ANY_SOURCE_TAGS..));
        let unharmed = asked.injected == InjectedError::None && asked.excuse.is_none() && !from_any;
        let plain = unharmed && asked.is_performed() && !asked.too_large;
        let again = (plain && self.rng.u8(..64) == 0).then(|| what.clone());
        let contribution = self.hosts[host].contribution(rank, request, &what);
        self.handle_event(host, Event::Submitted { rank, request, what, contribution });
        if let Some(what) = again {
            let first = request;
            self.next_request += 1;
            let request = RequestId(self.next_request);
            self.note(|| format!("{rank} asks for item {item} twice, as {request}"));
            self.oracle.asked_twice(rank, request, &workload, item);
            let contribution = self.hosts[host].contribution(rank, first, &what);
            self.handle_event(host, Event::Submitted { rank, request, what, contribution });
        }
    }

    fn leave_if_done(&mut self, rank: Rank) {
        let Some(part) = self.workers[rank.index()].part() else { return };
        if part.workload.leaver != Some(rank) || !part.has_asked_all() || self.oracle.is_waiting(rank) {
            return;
        }
        self.note(|| format!("{rank} shuts down"));
        let failure = Failure::new(Cause::ShutDown, "the worker has shut down");
        let host = self.workers[rank.index()].host;
        let delay_us = self.rng.u64(..5_000);
        self.restart_session(rank.index(), delay_us);
        self.handle_event(host, Event::RankLeft { rank, failure });
    }

    fn restart_session(&mut self, index: usize, delay_us: u64) {
        let worker = &mut self.workers[index];
        worker.session += 1;
        worker.state = State::Detached;
        let (rank, session) = (worker.rank, worker.session);
        self.schedule.after(delay_us, SimEvent::Step { rank, session });
    }
}

/// Faults.
impl Cluster {
    /// Schedules the next faults.
    pub(super) fn schedule_faults(&mut self) {
        for (after_us, fault) in self.faults.next(&mut self.rng) {
            self.schedule.after(after_us, SimEvent::Break(fault));
        }
    }

    /// Applies a fault, unless its target is broken already.
    pub(super) fn break_something(&mut self, fault: Fault) {
        self.faults.happens();
        let now_us = self.schedule.now_us();
        let possible = match fault {
            Fault::CrashHost { host, .. } | Fault::Pause { host, .. } => self.is_running(host),
            Fault::CrashWorker { rank, .. } | Fault::HangWorker { rank, .. } => {
                let worker = &self.workers[rank.index()];
                worker.alive && now_us >= worker.hung_until_us && self.is_running(worker.host)
            }
            Fault::Cut { .. } => true,
        };
        if !possible {
            return;
        }
        self.note(|| format!("{fault:?}"));
        self.faults.note(now_us, fault, &self.setup.world, &self.sidecars);
        match fault {
            Fault::CrashHost { host, seen, for_us } => self.crash_host(host, seen, for_us),
            Fault::CrashWorker { rank, for_us } => self.crash_worker(rank, for_us),
            Fault::HangWorker { rank, for_us } => self.workers[rank.index()].hung_until_us = now_us + for_us,
            Fault::Cut { a, b, for_us } => self.network.cut(&mut self.schedule, a, b, for_us),
            Fault::Pause { host, for_us } => self.hosts[host].paused_until_us = now_us + for_us,
        }
    }

    /// Restarts a sidecar as a new process without state.
    pub(super) fn start_host(&mut self, host: usize) {
        let (me, life) = (self.hosts[host].index, self.hosts[host].life);
        self.note(|| format!("{me} starts again"));
        self.network.break_all(&mut self.schedule, &mut self.rng, host, "replaced by a new process");
        self.hosts[host] = self.setup.host(me, life, self.schedule.now());
    }

    /// Restarts a worker.
    pub(super) fn start_worker(&mut self, rank: Rank) {
        let worker = &mut self.workers[rank.index()];
        if !worker.alive {
            worker.alive = true;
            self.restart_session(rank.index(), 0);
        }
    }

    fn is_running(&self, host: usize) -> bool {
        self.hosts[host].alive && self.schedule.now_us() >= self.hosts[host].paused_until_us
    }

    /// Ends a sidecar's process: its workers lose their sessions and expect no answers.
    fn crash_host(&mut self, host: usize, seen: bool, for_us: u64) {
        self.hosts[host].alive = false;
        self.hosts[host].life += 1;
        if seen {
            self.network.break_all(&mut self.schedule, &mut self.rng, host, "its process has ended");
        } else {
            self.network.fall_silent(&mut self.schedule, host);
        }
        self.expect_notification();
        self.oracle.forget(&self.setup.world.ranks_of(self.hosts[host].index));
        for index in 0..self.workers.len() {
            if self.workers[index].host == host && self.workers[index].alive {
                self.restart_session(index, 50_000);
            }
        }
        self.schedule.after(for_us, SimEvent::StartHost { host });
    }

    /// Expects that every member of an epoch is notified of the end of a process within a time.
    fn expect_notification(&mut self) {
        let (now, since_us) = (self.schedule.now(), self.schedule.now_us());
        for (host, process) in self.hosts.iter().enumerate().filter(|(_, process)| process.alive) {
            let status = process.engine.status(now);
            if status.phase != EnginePhase::Waiting {
                let (life, epoch) = (process.life, status.epoch);
                self.schedule.after(NOTIFICATION_US, SimEvent::Overdue { host, life, epoch, since_us });
            }
        }
    }

    /// Checks that a process was notified; skipped while others could not receive or were stopped.
    pub(super) fn check_notified(&self, host: usize, life: u32, epoch: Epoch, since_us: u64) -> Result<(), Violated> {
        let (process, status) = (&self.hosts[host], self.hosts[host].engine.status(self.schedule.now()));
        let same = process.alive && process.life == life && status.epoch == epoch;
        if same && status.phase != EnginePhase::Waiting && self.faults.deaf_until_us <= since_us {
            let text = format!("{} still takes part in {epoch}, of which a sidecar has ended", process.index);
            return violated(Property::InTime, text);
        }
        Ok(())
    }

    fn crash_worker(&mut self, rank: Rank, for_us: u64) {
        let worker = &mut self.workers[rank.index()];
        worker.alive = false;
        worker.session += 1;
        worker.state = State::Detached;
        let host = worker.host;
        let failure = Failure::new(Cause::RankLost, "the worker's session broke");
        self.handle_event(host, Event::RankLeft { rank, failure });
        self.schedule.after(for_us, SimEvent::StartWorker { rank });
    }
}

/// Orders items: those of a loop come in the loop's order, but for a swap now and then if the rank is not orderly.
fn put_in_turn(rng: &mut Rng, workload: &Workload, todo: &mut [usize], orderly: bool) {
    let turn = |item: usize| workload.items[item].turn;
    let mut items: Vec<usize> = todo.iter().copied().filter(|item| turn(*item).is_some()).collect();
    items.sort_by_key(|item| turn(*item));
    let careless = !orderly && rng.bool();
    for at in 1..items.len() {
        if careless && rng.u8(..24) == 0 {
            items.swap(at - 1, at);
        }
    }
    let mut items = items.into_iter();
    for place in todo.iter_mut().filter(|place| turn(**place).is_some()) {
        *place = items.next().unwrap_or(*place);
    }
}

/// The peer timeout, and the round trip with all delays.
const NOTIFICATION_US: u64 = 7_000_000;
