//! A cluster for tests: it does what a plan orders, and checks each order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::commands::{Drained, Scaled};
use super::hosts::Listed;
use super::*;

/// Hosts, sidecars and workers, whose answers wait until they are delivered.
pub(super) struct Cluster {
    pub(super) plan: Plan,
    pub(super) now: Time,
    /// Answers, in the order in which each source sends them.
    pub(super) answers: Vec<(Source, Event)>,
    /// Answers to what these sources are ordered are lost.
    pub(super) silent: BTreeSet<Source>,
    /// All actions in order.
    pub(super) log: Vec<Action>,
    pub(super) agents: BTreeMap<u32, String>,
    pub(super) sidecars: BTreeMap<u32, Known>,
    /// The workers whose processes run, with their sidecars.
    pub(super) workers: BTreeMap<u32, u32>,
    attached: BTreeSet<u32>,
    all_workers: BTreeSet<u32>,
    numbers: BTreeMap<u64, Rc<Members>>,
    pub(super) ended: Option<End>,
}

/// Who sends an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    Agent(u32),
    Sidecar(u32),
    Worker(u32),
}

/// What a sidecar knows.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) agent: u32,
    joined: Option<u64>,
    next: Option<u64>,
    prepared: u64,
    entered: u64,
    released: bool,
    was_committed: bool,
}

pub(super) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) fn bounds(first: u32, min: u32, max: u32) -> Bounds {
    Bounds {
        first,
        min,
        max,
        elastic_timeout: seconds(600),
        reset_limit: None,
        cooldown: None,
        has_discovery: true,
        start_timeout: seconds(30),
        attach_timeout: seconds(100),
        answer_timeout: seconds(15),
        preemption_notice: seconds(30),
        replaces_stalled: false,
        spares: 0,
        local_max: 64,
        sidecars_max: 1_024,
        seed: 7,
    }
}

impl Cluster {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            plan: Plan::new(bounds),
            now: Time::ZERO,
            answers: Vec::new(),
            silent: BTreeSet::new(),
            log: Vec::new(),
            agents: BTreeMap::new(),
            sidecars: BTreeMap::new(),
            workers: BTreeMap::new(),
            attached: BTreeSet::new(),
            all_workers: BTreeSet::new(),
            numbers: BTreeMap::new(),
            ended: None,
        }
    }

    /// One with hosts `a`, `b`, ... of these slots, whose first membership is committed.
    pub(super) fn running(bounds: Bounds, slots: &[u32]) -> Self {
        let mut cluster = Self::new(bounds);
        cluster.list(slots);
        cluster.deliver_all();
        assert!(cluster.plan.committed().is_some(), "{:?}", cluster.log);
        cluster
    }

    pub(super) fn list(&mut self, slots: &[u32]) {
        let names = ('a'..='z').map(String::from);
        let listed = names.zip(slots).filter(|(_, slots)| **slots > 0);
        self.event(Event::Hosts(listed.map(|(name, slots)| Listed { name, slots: *slots }).collect()));
    }

    /// Hands the plan an event and executes what follows.
    pub(super) fn event(&mut self, event: Event) {
        if let Event::Attached { worker } = event {
            self.attached.insert(worker);
        }
        self.plan.handle(self.now, event);
        self.act();
    }

    pub(super) fn drain(&mut self, host: &str, undo: bool) -> Result<Drained, Refusal> {
        let drained = self.plan.drain(self.now, host, undo);
        self.act();
        drained
    }

    pub(super) fn scale(&mut self, workers: u32) -> Result<Scaled, Refusal> {
        let scaled = self.plan.scale(self.now, workers);
        self.act();
        scaled
    }

    fn act(&mut self) {
        while let Some(action) = self.plan.poll_action() {
            assert!(self.ended.is_none(), "{action:?} after the end");
            self.log.push(action.clone());
            self.execute(action);
        }
    }

    /// Delivers the answer at a position; earlier ones of the same source come first.
    pub(super) fn deliver(&mut self, position: usize) {
        let source = self.answers[position].0;
        let first = self.answers.iter().position(|(of, _)| *of == source).expect("there is one");
        let (_, event) = self.answers.remove(first);
        self.event(event);
    }

    /// Delivers all answers, without letting time pass.
    pub(super) fn deliver_all(&mut self) {
        for _ in 0..10_000 {
            if self.answers.is_empty() {
                return;
            }
            self.deliver(0);
        }
        panic!("the plan does not come to rest: {:?}", &self.log[self.log.len() - 50..]);
    }

    /// Lets time pass up to its next deadline, at most so long; returns whether there was one.
    pub(super) fn pass(&mut self, at_most: Duration) -> bool {
        let due = self.plan.deadline(self.now).map(|due| due.max(self.now));
        let until = self.now + at_most;
        self.now = due.filter(|due| *due < until).unwrap_or(until);
        self.event(Event::Tick);
        due.is_some_and(|due| due <= until)
    }

    /// Lets time pass and delivers all answers.
    pub(super) fn run_for(&mut self, duration: Duration) {
        let until = self.now + duration;
        self.deliver_all();
        for _ in 0..10_000 {
            if self.now >= until {
                return;
            }
            self.pass(until - self.now);
            self.deliver_all();
        }
        panic!("deadlines do not advance: {:?}", self.plan.deadline(self.now));
    }

    pub(super) fn end_worker(&mut self, worker: u32, success: bool) {
        let how = if success { WorkerEnd::Success } else { WorkerEnd::Failure };
        self.end_worker_by(worker, how);
    }

    pub(super) fn terminate_worker(&mut self, worker: u32) {
        self.end_worker_by(worker, WorkerEnd::Terminated);
    }

    fn end_worker_by(&mut self, worker: u32, how: WorkerEnd) {
        if self.workers.remove(&worker).is_some() {
            self.answers.retain(|(source, _)| *source != Source::Worker(worker));
            self.event(Event::WorkerEnded { worker, how });
        }
    }

    pub(super) fn end_sidecar(&mut self, sidecar: u32) {
        if self.sidecars.remove(&sidecar).is_some() {
            self.answers.retain(|(source, _)| *source != Source::Sidecar(sidecar));
            self.event(Event::SidecarLost { sidecar });
        }
    }

    pub(super) fn end_agent(&mut self, agent: u32) {
        if self.agents.contains_key(&agent) {
            self.forget_agent(agent);
            self.event(Event::AgentLost { agent });
        }
    }

    fn forget_agent(&mut self, agent: u32) {
        self.agents.remove(&agent);
        let sidecars: Vec<u32> =
            self.sidecars.iter().filter(|(_, known)| known.agent == agent).map(|(index, _)| *index).collect();
        self.sidecars.retain(|index, _| !sidecars.contains(index));
        let gone: Vec<u32> =
            self.workers.iter().filter(|(_, sidecar)| sidecars.contains(sidecar)).map(|(worker, _)| *worker).collect();
        self.workers.retain(|worker, _| !gone.contains(worker));
        self.answers.retain(|(source, _)| match source {
            Source::Agent(of) => *of != agent,
            Source::Sidecar(of) => !sidecars.contains(of),
            Source::Worker(of) => !gone.contains(of),
        });
    }

    fn answer(&mut self, source: Source, event: Event) {
        if !self.silent.contains(&source) {
            self.answers.push((source, event));
        }
    }

    fn execute(&mut self, action: Action) {
        match action {
            Action::StartAgent { agent, host } => {
                assert!(self.agents.insert(agent, host).is_none(), "agent {agent} starts twice");
                self.answer(Source::Agent(agent), Event::AgentUp { agent });
            }
            Action::DropAgent { agent } => self.forget_agent(agent),
            Action::StartSidecar { sidecar, agent } => {
                assert!(self.agents.contains_key(&agent), "sidecar {sidecar} has no agent");
                assert_eq!(self.log.iter().filter(|past| **past == Action::StartSidecar { sidecar, agent }).count(), 1);
                let known = Known {
                    agent,
                    joined: None,
                    next: None,
                    prepared: 0,
                    entered: 0,
                    released: false,
                    was_committed: false,
                };
                assert!(self.sidecars.insert(sidecar, known).is_none(), "sidecar {sidecar} starts twice");
                self.answer(Source::Sidecar(sidecar), Event::Bound { sidecar });
            }
            Action::CloseSidecar { sidecar } => {
                if self.sidecars.remove(&sidecar).is_some() {
                    self.answers.retain(|(source, _)| *source != Source::Sidecar(sidecar));
                    self.answers.push((Source::Sidecar(sidecar), Event::SidecarLost { sidecar }));
                }
            }
            Action::Join { sidecar, members } => self.join(sidecar, &members),
            Action::Change { sidecar, members } => self.change(sidecar, &members),
            Action::Enter { sidecar, membership, .. } => self.enter(sidecar, membership),
            Action::Commit { sidecar, membership } => self.commit(sidecar, membership),
            Action::StartWorker { worker, sidecar, members, is_spare: _ } => {
                assert!(self.all_workers.insert(worker), "worker {worker} starts twice");
                assert!(self.sidecars.contains_key(&sidecar) && members.contains(worker));
                assert!(self.sidecars[&sidecar].prepared >= members.number, "its token is not there");
                self.workers.insert(worker, sidecar);
                self.answer(Source::Worker(worker), Event::Attached { worker });
            }
            Action::StopWorker { worker } | Action::KillWorker { worker } => {
                if self.workers.remove(&worker).is_some() {
                    self.answers.retain(|(source, _)| *source != Source::Worker(worker));
                    self.answers.push((Source::Worker(worker), Event::WorkerEnded { worker, how: WorkerEnd::Failure }));
                }
            }
            Action::Notice(_) => {}
            Action::End(end) => self.ended = Some(end),
        }
    }

    fn join(&mut self, sidecar: u32, members: &Rc<Members>) {
        self.check(sidecar, members);
        let known = self.sidecars.get_mut(&sidecar).expect("it runs");
        assert!(known.joined.is_none(), "sidecar {sidecar} joins twice");
        (known.joined, known.entered, known.prepared) = (Some(members.number), members.number, members.number);
        self.answer(Source::Sidecar(sidecar), Event::Serving { sidecar });
    }

    fn change(&mut self, sidecar: u32, members: &Rc<Members>) {
        self.check(sidecar, members);
        let Some(known) = self.sidecars.get_mut(&sidecar) else { return };
        let last = known.joined.expect("a sidecar joins before a change");
        assert!(members.number > last.max(known.next.unwrap_or(0)).max(known.entered));
        (known.next, known.released, known.prepared) = (Some(members.number), false, members.number);
        self.answer(Source::Sidecar(sidecar), Event::Prepared { sidecar, membership: members.number });
    }

    /// Rules of every membership.
    fn check(&mut self, sidecar: u32, members: &Rc<Members>) {
        let is_new = !self.numbers.contains_key(&members.number);
        if is_new {
            assert!(self.numbers.keys().all(|number| *number < members.number), "numbers increase");
            self.numbers.insert(members.number, Rc::clone(members));
        }
        assert_eq!(&self.numbers[&members.number], members, "one membership for all");
        assert_eq!(self.numbers.keys().last(), Some(&members.number), "only the newest is sent");
        let workers: BTreeSet<u32> = members.seats.iter().map(|seat| seat.worker).collect();
        assert_eq!(workers.len(), members.seats.len(), "one seat for each worker");
        let most = self.plan.bounds.max + self.plan.bounds.spares;
        assert!(members.seats.len() <= most as usize, "{members:?}");
        assert!(members.seats.iter().any(|seat| seat.sidecar == sidecar), "{sidecar} has a worker");
        for seat in &members.seats {
            let served = members.seats.iter().filter(|other| other.sidecar == seat.sidecar).count();
            assert!(served <= self.plan.bounds.local_max, "{members:?}");
            if let Some(sidecar) = self.workers.get(&seat.worker) {
                assert_eq!(*sidecar, seat.sidecar, "a worker keeps its sidecar");
            }
        }
        let Some(before) = self.plan.committed() else { return };
        let old: Vec<u32> = before.seats.iter().map(|seat| seat.worker).filter(|old| members.contains(*old)).collect();
        let first: Vec<u32> = members.seats.iter().map(|seat| seat.worker).take(old.len()).collect();
        assert_eq!(old, first, "survivors come first, in their order");
        assert!(!old.is_empty(), "somebody has the state");
    }

    fn enter(&mut self, sidecar: u32, membership: u64) {
        let members = Rc::clone(&self.numbers[&membership]);
        assert_eq!(self.numbers.keys().last(), Some(&membership), "only the newest is entered");
        assert!(members.seats.len() <= self.plan.bounds.max as usize, "{members:?}");
        for other in members.sidecars() {
            if let Some(known) = self.sidecars.get(&other) {
                assert!(known.prepared >= membership, "all are prepared");
            }
        }
        let committed = self.plan.committed().cloned();
        for seat in members.seats.iter().filter(|seat| committed.as_ref().is_none_or(|old| !old.contains(seat.worker)))
        {
            assert!(self.attached.contains(&seat.worker), "new workers wait for their ranks");
        }
        assert!(members.seats.len() >= self.plan.needed() as usize, "there are enough");
        let Some(known) = self.sidecars.get_mut(&sidecar) else { return };
        assert!(known.next == Some(membership) && !known.released, "it was prepared, and is released once");
        (known.released, known.entered) = (true, membership);
        self.answer(Source::Sidecar(sidecar), Event::Entered { sidecar, membership });
    }

    fn commit(&mut self, sidecar: u32, membership: u64) {
        assert_eq!(self.numbers.keys().last(), Some(&membership), "only the newest is committed");
        let members = Rc::clone(&self.numbers[&membership]);
        for other in members.sidecars() {
            if let Some(known) = self.sidecars.get(&other) {
                assert_eq!(known.entered, membership, "all have entered");
            }
        }
        for known in self.sidecars.iter_mut().filter(|(index, _)| **index == sidecar).map(|(_, known)| known) {
            known.was_committed = true;
        }
        let here = members.seats.iter().filter(|seat| seat.sidecar == sidecar).map(|seat| seat.worker);
        for worker in here.filter(|worker| self.workers.contains_key(worker)).collect::<Vec<u32>>() {
            self.answer(Source::Worker(worker), Event::Seated { worker, membership });
        }
    }

    /// The workers of the committed membership, by rank.
    pub(super) fn ranks(&self) -> Vec<u32> {
        self.plan.committed().map_or_else(Vec::new, |members| members.seats.iter().map(|seat| seat.worker).collect())
    }

    /// Why each membership followed.
    pub(super) fn causes(&self) -> Vec<Cause> {
        let cause = |action: &Action| match action {
            Action::Notice(Notice::Committed { cause, .. }) => Some(*cause),
            _ => None,
        };
        self.log.iter().filter_map(cause).collect()
    }

    pub(super) fn number(&self) -> u64 {
        self.plan.committed().map_or(0, |members| members.number)
    }

    /// The actions since a position.
    pub(super) fn since(&self, position: usize) -> &[Action] {
        &self.log[position..]
    }
}
