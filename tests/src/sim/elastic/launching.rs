//! Carries out what the launcher's plan decides, and what breaks.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use ronde_launcher::memberships::{Action, Event, Members, Notice, WorkerEnd};

use super::launcher::{Seats, ToLauncher, ToSidecar};
use super::worker::Worker;
use super::{ElasticBug, Happening, Sim};

/// Contributions are bits, so nothing is killed or added from here on. Workers that are lost before are replaced.
const WORKERS_MANY: usize = 45;
const CUT_US: std::ops::Range<u64> = 100_000..4_000_000;

impl Sim {
    /// Starts the job: one to three hosts with one to three workers each.
    pub(super) fn begin(&mut self) {
        for _ in 0..self.rng.usize(1..=3) {
            let slots = self.rng.u32(1..=3);
            self.launcher.add_host(slots);
        }
        self.list();
        self.within(500_000, Happening::Fault);
    }

    /// The plan gets the list of hosts.
    fn list(&mut self) {
        let listed = self.launcher.listed.clone();
        self.plan(Event::Hosts(listed));
    }

    /// The launcher handles a message.
    pub(super) fn launch(&mut self, message: &ToLauncher) {
        self.log(|| format!("to the launcher: {message:?}"));
        match message {
            ToLauncher::Plan(event) => {
                if let (Some(ElasticBug::EarlyCommit), Event::Entered { sidecar, membership }) = (self.bug, event) {
                    self.order_to(*sidecar as usize, ToSidecar::Commit(*membership));
                }
                self.plan(event.clone());
            }
            ToLauncher::HostFound { slots } => {
                self.launcher.add_host(*slots);
                self.list();
            }
            ToLauncher::SlotFound { host } => {
                self.launcher.add_slot(*host);
                self.list();
            }
        }
    }

    fn plan(&mut self, event: Event) {
        let now = Duration::from_micros(self.now_us);
        self.launcher.plan.handle(now, event);
        while let Some(action) = self.launcher.plan.poll_action() {
            self.log(|| format!("the plan: {action:?}"));
            self.execute(action);
        }
        let due = self.launcher.plan.deadline(now).map(|due| u64::try_from(due.as_micros()).unwrap_or(u64::MAX));
        let due = due.map(|due| due.max(self.now_us) + 1);
        let is_sooner = |due: &u64| self.launcher.tick_us.is_none_or(|tick| *due < tick || tick <= self.now_us);
        if let Some(due) = due.filter(is_sooner) {
            self.launcher.tick_us = Some(due);
            self.after(due - self.now_us, Happening::ToLauncher { message: ToLauncher::Plan(Event::Tick) });
        }
    }

    fn execute(&mut self, action: Action) {
        match action {
            Action::StartAgent { agent, host } => {
                self.launcher.agents.insert(agent, host);
                self.report_soon(100_000, Event::AgentUp { agent });
            }
            Action::DropAgent { agent } => self.drop_agent(agent),
            Action::StartSidecar { sidecar, agent } => {
                self.launcher.agent_of.insert(sidecar as usize, agent);
                self.report_soon(100_000, Event::Bound { sidecar });
            }
            Action::CloseSidecar { sidecar } => self.close_sidecar(sidecar as usize),
            Action::Join { sidecar, members } => {
                self.note(&members);
                self.launcher.started.insert(sidecar as usize);
                self.start_host(sidecar as usize, &Seats::from(&*members));
                self.report_soon(3_000, Event::Serving { sidecar });
            }
            Action::Change { sidecar, members } => {
                self.note(&members);
                self.order_to(sidecar as usize, ToSidecar::Change(Seats::from(&*members)));
            }
            Action::Enter { sidecar, membership, .. } => self.order_to(sidecar as usize, ToSidecar::Enter(membership)),
            Action::Commit { sidecar, membership } => self.order_to(sidecar as usize, ToSidecar::Commit(membership)),
            Action::StartWorker { worker, sidecar, .. } => self.start_worker(worker, sidecar as usize),
            Action::StopWorker { worker } | Action::KillWorker { worker } => self.end_worker(worker),
            Action::Notice(notice) => self.notice(notice),
            Action::End(end) => self.violate(format!("the job ends: {end:?}")),
        }
    }

    fn note(&mut self, members: &Rc<Members>) {
        let workers: Vec<u32> = members.seats.iter().map(|seat| seat.worker).collect();
        self.oracle.note_membership(members.number, &workers);
    }

    /// The plan receives an event after a random delay.
    pub(super) fn report_soon(&mut self, most_us: u64, event: Event) {
        self.within(most_us, Happening::ToLauncher { message: ToLauncher::Plan(event) });
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Committed { members, .. } => {
                self.log(|| format!("membership {} is committed: {:?}", members.number, members.seats));
                self.report.memberships += 1;
                self.report.replaced += members.number - self.last_number - 1;
                self.last_number = members.number;
            }
            // Timeouts are longer than all delays and cuts.
            Notice::Silent { .. }
            | Notice::SilentAgent { .. }
            | Notice::NotAttached { .. }
            | Notice::NotReturned { .. } => {
                self.violate(format!("the launcher gives up: {notice:?}"));
            }
            _ => {}
        }
    }

    fn start_worker(&mut self, worker: u32, sidecar: usize) {
        // Workers that were planned and never started have a number, too.
        while self.workers.len() <= worker as usize {
            self.workers.push(Worker { alive: false, ..Worker::new(sidecar) });
        }
        self.workers[worker as usize] = Worker::new(sidecar);
        self.report.added += 1;
        let session = self.workers[worker as usize].session;
        self.within(200_000, Happening::Act { worker, session });
    }

    /// The process of a worker ends; the sidecar and the launcher learn of it in any order.
    fn end_worker(&mut self, worker: u32) {
        let of = &mut self.workers[worker as usize];
        of.alive = false;
        let session = of.session;
        self.within(300_000, Happening::SessionOver { worker, session, orderly: false });
        self.report_soon(300_000, Event::WorkerEnded { worker, how: WorkerEnd::Failure });
    }

    /// A sidecar ends because nobody needs it.
    fn close_sidecar(&mut self, host: usize) {
        self.end_host(host);
        self.report_soon(100_000, Event::SidecarLost { sidecar: u32::try_from(host).expect("few sidecars") });
    }

    fn drop_agent(&mut self, agent: u32) {
        self.launcher.agents.remove(&agent);
        let of_agent = self.launcher.agent_of.iter().filter(|(_, of)| **of == agent);
        let sidecars: Vec<usize> = of_agent.map(|(sidecar, _)| *sidecar).collect();
        sidecars.into_iter().for_each(|sidecar| self.end_host(sidecar));
    }

    /// Sends a sidecar a message, after all earlier ones.
    fn order_to(&mut self, host: usize, message: ToSidecar) {
        let at_us = self.now_us + self.rng.u64(20..3_000);
        let last = self.launcher.last_us.entry(host).or_default();
        *last = (*last).max(at_us);
        let delay_us = *last - self.now_us;
        self.after(delay_us, Happening::ToSidecar { host, message });
    }

    // === Faults ===

    /// Something breaks or is added, and something else will.
    pub(super) fn fault(&mut self) {
        if self.now_us > self.calm_us || self.workers.len() >= WORKERS_MANY {
            return;
        }
        self.within(2_500_000, Happening::Fault);
        let living: Vec<u32> = (0..).take(self.workers.len()).filter(|worker| self.lives(*worker)).collect();
        let hosts: BTreeSet<usize> = living.iter().map(|worker| self.workers[*worker as usize].host).collect();
        let hosts: Vec<usize> = hosts.into_iter().filter(|host| self.launcher.started.contains(host)).collect();
        match self.rng.u32(0..11) {
            0..=3 if living.len() > 1 => {
                let worker = living[self.rng.usize(..living.len())];
                if self.keeps_state(|other, _| other != worker) {
                    self.kill_worker(worker);
                }
            }
            4 | 5 if hosts.len() > 1 => {
                let host = hosts[self.rng.usize(..hosts.len())];
                if self.keeps_state(|_, other| other != host) {
                    self.kill_host(host);
                }
            }
            6 | 7 if hosts.len() > 1 => {
                let (a, b) = (hosts[self.rng.usize(..hosts.len())], hosts[self.rng.usize(..hosts.len())]);
                let until_us = self.now_us + self.rng.u64(CUT_US);
                if a != b {
                    self.log(|| format!("sidecars {a} and {b} are cut off from each other until {until_us} us"));
                    self.network.cut(a, b, until_us);
                }
            }
            10 if hosts.len() > 1 => {
                let host = hosts[self.rng.usize(..hosts.len())];
                let agent = self.launcher.agent_of.get(&host).copied();
                if let Some(agent) = agent.filter(|agent| self.keeps_state(|_, other| !self.is_of(*agent, other))) {
                    self.preempt(agent);
                }
            }
            8 if !hosts.is_empty() => {
                let host = hosts[self.rng.usize(..hosts.len())];
                self.within(100_000, Happening::ToLauncher { message: ToLauncher::SlotFound { host } });
            }
            _ => {
                let slots = self.rng.u32(1..=2);
                self.within(100_000, Happening::ToLauncher { message: ToLauncher::HostFound { slots } });
            }
        }
    }

    /// Whether a worker that has the state of the training lives and remains: without one the job ends. A new worker has it
    /// after its first step.
    fn keeps_state(&self, remains: impl Fn(u32, usize) -> bool) -> bool {
        let seats = self.launcher.current().seats;
        let has_state = |worker: u32| self.lives(worker) && self.workers[worker as usize].steps > 0;
        let stays = |host: usize| !self.launcher.leaving.iter().any(|agent| self.is_of(*agent, host));
        seats.iter().any(|(worker, host)| has_state(*worker) && stays(*host) && remains(*worker, *host))
    }

    fn is_of(&self, agent: u32, host: usize) -> bool {
        self.launcher.agent_of.get(&host) == Some(&agent)
    }

    /// A host gets a notice: its workers leave in order, or are lost with it when its time is over.
    fn preempt(&mut self, agent: u32) {
        if self.launcher.agents.contains_key(&agent) && self.launcher.leaving.insert(agent) {
            self.log(|| format!("agent {agent} gets a notice"));
            self.report.notices += 1;
            self.report_soon(10_000, Event::Preempted { agent, worker: None });
        }
    }

    fn kill_worker(&mut self, worker: u32) {
        self.log(|| format!("worker {worker} is killed"));
        self.report.crashes.0 += 1;
        self.end_worker(worker);
    }

    fn kill_host(&mut self, host: usize) {
        self.log(|| format!("sidecar {host} is killed"));
        self.report.crashes.1 += 1;
        self.end_host(host);
        self.report_soon(300_000, Event::SidecarLost { sidecar: u32::try_from(host).expect("few sidecars") });
    }

    /// A sidecar ends, and its links with it.
    fn end_host(&mut self, host: usize) {
        let Some(of) = self.hosts.get_mut(host) else { return };
        of.alive = false;
        for peer in self.network.peers(host) {
            let membership = self.network.link(host, peer).map_or(0, |(_, membership)| membership);
            self.network.close(host, peer);
            self.within(300_000, Happening::LinkGone { host: peer, peer: host, membership });
        }
    }
}
