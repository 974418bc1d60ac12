//! Decides the memberships of an elastic job. Pure: events in, actions out; the time is an argument.
//!
//! A *change* leads from one committed membership to the next one, in stages:
//!
//! | stage | what happens | what ends it |
//! |---|---|---|
//! | preparing | sidecars get the next membership (Change), new ones their first (Join); training continues | all have answered |
//! | starting | the processes of new workers start; training continues | all have attached, and there are enough |
//! | entering | sidecars leave the current membership when its epoch is over (Enter) | all have answered |
//! | committed | sidecars connect, workers get their ranks (Commit) | |
//!
//! There is at most one change at a time, and only the newest can be committed: one that lost a member is replaced by a
//! change with a higher number. Losses do not wait for new workers: the survivors enter a membership at once, together
//! with new workers that have attached already; others follow in the next change. Survivors keep their order, so rank 0 is
//! the oldest one. Neither workers' numbers nor sidecars' indices are used twice.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | deadlines, workers, the end |
//! | `types.rs` | events and actions |
//! | `hosts.rs` | which slots are used: agents, sidecars, exclusion |
//! | `change.rs` | the stages of a change |
//! | `commands.rs` | commands of the user: drain a host, change the number of workers |
//! | `preemption.rs` | hosts that are about to be taken away |
//! | `spares.rs` | workers that wait for a loss |
//! | `status.rs` | what users may know of the state |
//! | `attach.rs` | workers that others wait for: new ones that start, and old ones that come back |
//! | `unreachable.rs` | sidecars that do not reach each other |

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use super::exclusion::{CooldownRange, Time};
pub(super) use commands::Refusal;
use hosts::Host;
pub use types::{Action, Bounds, Cause, End, Event, Members, Notice, Seat, WorkerEnd};

mod attach;
mod change;
mod commands;
pub(super) mod hosts;
mod preemption;
mod spares;
mod status;
mod types;
mod unreachable;

/// A worker.
#[derive(Clone, Debug)]
struct Worker {
    host: usize,
    slot: usize,
    sidecar: u32,
    agent: u32,
    state: WorkerState,
    /// The last membership in which it took its rank; 0 before the first.
    seated: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerState {
    /// It has a number and a slot, but no process.
    Planned,
    /// Its process runs since this time.
    Started(Time),
    /// It waits for a membership or has one; its process runs since this time.
    Attached(Time),
    /// It was ordered to end.
    Stopping,
}

/// A sidecar.
#[derive(Clone, Debug)]
struct Sidecar {
    host: usize,
    agent: u32,
    state: SidecarState,
    /// When it has to have answered, and what.
    due: Option<(Time, &'static str)>,
    /// The membership that it joined with or entered last.
    entered: u64,
    /// The membership that it answered last.
    prepared: u64,
    /// Whether a committed membership had it.
    was_committed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SidecarState {
    Starting,
    Bound,
    Joined,
    Serving,
    Closing,
}

/// A change of the membership.
#[derive(Clone, Debug)]
struct Change {
    members: Rc<Members>,
    stage: Stage,
    cause: Cause,
    since: Time,
    /// Whether it only starts spare workers, and is never entered.
    is_for_spares: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Preparing,
    Starting,
    Entering,
}

/// The state of a job's memberships.
#[derive(Debug)]
pub struct Plan {
    bounds: Bounds,
    /// How many workers the job is to have, if there are slots.
    wanted_size: u32,
    /// All hosts that were ever listed, in the order in which they were.
    hosts: Vec<Host>,
    sidecars: BTreeMap<u32, Sidecar>,
    workers: BTreeMap<u32, Worker>,
    committed: Option<Rc<Members>>,
    /// The membership before that one.
    previous: Option<Rc<Members>>,
    /// Workers without a session, with the membership in which their last one ended.
    left: BTreeMap<u32, u64>,
    change: Option<Change>,
    /// Since when a worker that was there before waits in the committed membership for others to come back.
    returned_since: Option<Time>,
    /// The first loss since the last commit, and when.
    loss: Option<(Cause, Time)>,
    /// Whether sidecars were released for a change that was not committed, so that the epoch is over.
    is_released: bool,
    /// Since when there are new workers or slots that no change contains.
    ready_since: Option<Time>,
    /// Since when there is no sufficient membership.
    short_since: Option<Time>,
    /// What the last notice about waiting reported.
    reported: Option<(u32, u32)>,
    first_attached: Option<Time>,
    /// Since when workers end with status 0, and the first one.
    finishing: Option<(Time, u32)>,
    resets: u32,
    /// When a notice about workers that do not leave their epoch is due.
    enter_notice: Option<Time>,
    /// What sidecars do not reach in the committed membership.
    unreachable: unreachable::Unreachable,
    next_number: u64,
    next_worker: u32,
    next_sidecar: u32,
    next_agent: u32,
    is_over: bool,
    actions: VecDeque<Action>,
}

impl Plan {
    /// A job without hosts.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            wanted_size: bounds.max,
            bounds,
            hosts: Vec::new(),
            sidecars: BTreeMap::new(),
            workers: BTreeMap::new(),
            committed: None,
            previous: None,
            left: BTreeMap::new(),
            change: None,
            returned_since: None,
            loss: None,
            is_released: false,
            ready_since: None,
            short_since: Some(Time::ZERO),
            reported: None,
            first_attached: None,
            finishing: None,
            resets: 0,
            enter_notice: None,
            unreachable: unreachable::Unreachable::default(),
            next_number: 1,
            next_worker: 0,
            next_sidecar: 0,
            next_agent: 0,
            is_over: false,
            actions: VecDeque::new(),
        }
    }

    /// Handles an event.
    pub fn handle(&mut self, now: Time, event: Event) {
        if self.is_over {
            return;
        }
        match event {
            Event::Tick => {}
            Event::Hosts(listed) => self.list(listed),
            Event::AgentUp { agent } => self.agent_up(agent),
            Event::AgentLost { agent } => self.agent_lost(now, agent),
            Event::Bound { sidecar } => self.answered(sidecar, SidecarState::Starting, SidecarState::Bound),
            Event::Serving { sidecar } => self.serving(sidecar),
            Event::SidecarLost { sidecar } => self.sidecar_lost(now, sidecar),
            Event::Prepared { sidecar, membership } => self.prepared(sidecar, membership),
            Event::Entered { sidecar, membership } => self.entered(now, sidecar, membership),
            Event::Attached { worker } => self.attached(now, worker),
            Event::Seated { worker, membership } => self.seated(now, worker, membership),
            Event::Left { worker } => drop(self.left.insert(worker, self.number())),
            Event::WorkerEnded { worker, how } => self.worker_ended(now, worker, how),
            Event::Hung { sidecar, worker, membership } => self.hung(now, sidecar, worker, membership),
            Event::Unreachable { sidecar, peer, membership } => self.unreachable(now, sidecar, peer, membership),
            Event::Linked { sidecar, peer } => self.linked(sidecar, peer),
            Event::Preempted { agent, worker } => self.preempted(now, agent, worker),
        }
        self.advance(now);
    }

    /// What to do next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Event::Tick`] is due.
    pub fn deadline(&self, now: Time) -> Option<Time> {
        if self.is_over {
            return None;
        }
        let sidecars = self.sidecars.values().filter_map(|sidecar| sidecar.due.map(|(due, _)| due));
        let workers = self.workers.iter().filter_map(|(number, worker)| self.attach_due(*number, worker));
        let hosts = self.hosts.iter().flat_map(|host| host.deadlines(now));
        let gathered =
            self.change.is_none().then_some(self.ready_since).flatten().map(|since| since + self.gather_wait());
        let short = self.short_since.map(|since| since + self.bounds.elastic_timeout);
        let reported = self.short_since.filter(|_| self.reported.is_none()).map(|since| since + NOTICE_WAIT);
        let finishing = self.finishing_due();
        let single =
            [gathered, short, reported, finishing, self.enter_notice, self.unreachable.due()].into_iter().flatten();
        let all = sidecars.chain(workers).chain(hosts).chain(single.filter(|due| *due > now));
        all.min()
    }

    /// The membership that was committed last.
    pub fn committed(&self) -> Option<&Rc<Members>> {
        self.committed.as_ref()
    }

    /// Whether a change is under way.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    fn advance(&mut self, now: Time) {
        self.check_deadlines(now);
        // Each round that does something sends messages or starts processes, which are bounded; it ends when none does.
        loop {
            let before = self.progress();
            self.check_end(now);
            if self.is_over || self.finishing.is_some() {
                return;
            }
            self.drive(now);
            self.fill(now);
            self.begin(now);
            self.tidy(now);
            if self.progress() == before {
                break;
            }
        }
        self.check_shortage(now);
    }

    /// What every step of the loop above changes.
    fn progress(&self) -> (usize, u64, Option<Stage>, usize) {
        let stage = self.change.as_ref().map(|change| change.stage);
        (self.actions.len(), self.next_number, stage, self.workers.len())
    }

    fn check_deadlines(&mut self, now: Time) {
        let due = self.sidecars.iter().filter(|(_, sidecar)| sidecar.due.is_some_and(|(due, _)| due <= now));
        let silent: Vec<(u32, &'static str)> =
            due.filter_map(|(index, sidecar)| sidecar.due.map(|(_, awaited)| (*index, awaited))).collect();
        for (sidecar, awaited) in silent {
            self.actions.push_back(Action::Notice(Notice::Silent { sidecar, awaited }));
            self.give_up_sidecar(now, sidecar, CooldownRange::HOST);
        }
        self.check_agents(now);
        self.check_notices(now);
        self.check_workers(now);
        self.check_unreachable(now);
        if self.enter_notice.is_some_and(|due| due <= now) {
            self.enter_notice = None;
            if let Some(change) = self.change.as_ref().filter(|change| change.stage == Stage::Entering) {
                let membership = change.members.number;
                self.actions.push_back(Action::Notice(Notice::NotEntered { membership }));
            }
        }
        if let (Some((_, worker)), true) = (self.finishing, self.finishing_due().is_some_and(|due| due <= now)) {
            self.end(End::NeverJoined { worker });
        }
    }

    /// When those give up that wait for a worker that has ended without joining.
    fn finishing_due(&self) -> Option<Time> {
        let (since, _) = self.finishing.filter(|_| self.committed.is_none())?;
        let waits = self.workers.values().any(|worker| matches!(worker.state, WorkerState::Attached(_)));
        waits.then_some(since + self.bounds.attach_timeout)
    }

    /// The number of the committed membership; 0 before the first.
    fn number(&self) -> u64 {
        self.committed.as_ref().map_or(0, |members| members.number)
    }

    fn worker_ended(&mut self, now: Time, number: u32, how: WorkerEnd) {
        let success = how == WorkerEnd::Success;
        let Some(worker) = self.workers.remove(&number) else { return };
        self.hosts[worker.host].slots[worker.slot].worker = None;
        let (WorkerState::Started(since) | WorkerState::Attached(since)) = worker.state else { return };
        if self.is_leaving(number) {
            return;
        }
        let is_committed = self.committed.as_ref().is_some_and(|members| members.contains(number));
        if self.finishing.is_some() || (success && (is_committed || self.committed.is_none())) {
            if success {
                self.finish(now, number);
            } else {
                self.loss.get_or_insert((Cause::Worker(number), now));
            }
            return;
        }
        match how {
            WorkerEnd::Terminated => self.preempted(now, worker.agent, Some(number)),
            _ => self.strike_slot(now, &worker, now.saturating_sub(since)),
        }
        self.note_loss(now, Cause::Worker(number), is_committed);
    }

    /// Whether a worker is being removed: the sidecars of the others have been released without it.
    fn is_leaving(&self, worker: u32) -> bool {
        let is_in = |members: &Members| members.contains(worker);
        let entering = self.change.as_ref().filter(|change| change.stage == Stage::Entering);
        entering.is_some_and(|change| !is_in(&change.members)) && self.committed.as_ref().is_some_and(|old| is_in(old))
    }

    /// Records why the next membership follows. Losses of new workers do not disturb those that train.
    fn note_loss(&mut self, now: Time, cause: Cause, disturbs: bool) {
        if disturbs || self.committed.is_none() {
            self.loss.get_or_insert((cause, now));
            self.short_since.get_or_insert(now);
        }
    }

    /// A worker has ended with status 0: no further membership begins, and workers that have none are stopped.
    fn finish(&mut self, now: Time, worker: u32) {
        self.finishing.get_or_insert((now, worker));
        self.drop_change();
        let Some(committed) = self.committed.clone() else { return };
        self.stop_others(&committed);
        // Its session ended in the membership before, so workers that came with this one would wait for it.
        let ended_before = self.left.get(&worker).is_some_and(|number| *number < committed.number);
        if let Some(previous) = self.previous.clone().filter(|_| ended_before) {
            self.stop_others(&previous);
        }
    }

    /// Stops the workers that a membership does not have.
    fn stop_others(&mut self, members: &Members) {
        let others: Vec<u32> = self.workers.keys().copied().filter(|worker| !members.contains(*worker)).collect();
        others.into_iter().for_each(|worker| self.stop_worker(worker));
    }

    /// Orders a worker to end; forgets it when it has no process.
    fn stop_worker(&mut self, number: u32) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        match worker.state {
            WorkerState::Stopping => {}
            WorkerState::Planned => {
                self.hosts[worker.host].slots[worker.slot].worker = None;
                self.workers.remove(&number);
            }
            WorkerState::Started(_) | WorkerState::Attached(_) => {
                worker.state = WorkerState::Stopping;
                self.actions.push_back(Action::StopWorker { worker: number });
            }
        }
    }

    fn is_live(&self, worker: u32) -> bool {
        self.workers.get(&worker).is_some_and(|worker| worker.state != WorkerState::Stopping)
    }

    /// Workers that have not been ordered to end.
    fn live_count(&self) -> u32 {
        count(self.workers.values().filter(|worker| worker.state != WorkerState::Stopping))
    }

    /// How many workers the next membership needs.
    fn needed(&self) -> u32 {
        if self.committed.is_some() { self.bounds.min } else { self.bounds.first }
    }

    fn check_end(&mut self, now: Time) {
        if self.is_over {
            return;
        }
        if self.finishing.is_some() {
            if self.workers.is_empty() {
                self.end(self.loss.map_or(End::Success, |(cause, _)| End::Failed(cause)));
            }
            return;
        }
        let Some((cause, _)) = self.loss else { return };
        let goes_on = match &self.committed {
            Some(members) => members.seats.iter().any(|seat| self.is_live(seat.worker)),
            // Nobody has a state that is worth waiting for, so a job whose start fails everywhere ends at once.
            None => self.usable_count(now) > 0 || !self.hosts.iter().any(Host::is_listed),
        };
        if !goes_on {
            self.end(End::Failed(cause));
        }
    }

    /// Ends a job that has had too few slots for too long, or cannot have more.
    fn check_shortage(&mut self, now: Time) {
        let Some(since) = self.short_since else { return };
        let (have, needed) = (self.usable_count(now), self.needed());
        let cause = self.loss.map(|(cause, _)| cause);
        let can_grow =
            self.bounds.has_discovery || self.hosts.iter().any(|host| host.is_drained || host.leaving.is_some());
        let is_hopeless = !self.hosts.is_empty() && !can_grow && self.potential() < needed;
        if self.is_over || (have >= needed && !is_hopeless) {
            return;
        }
        if is_hopeless || now.saturating_sub(since) >= self.bounds.elastic_timeout {
            // What fails everywhere from the start is the reason, not the slots that are left out because of it.
            let start_failed = cause.filter(|_| is_hopeless && self.committed.is_none());
            return self.end(start_failed.map_or(End::TooFew { have, needed, cause }, End::Failed));
        }
        let is_reported = self.reported == Some((have, needed));
        if !is_reported && (self.reported.is_some() || now.saturating_sub(since) >= NOTICE_WAIT) {
            self.reported = Some((have, needed));
            self.actions.push_back(Action::Notice(Notice::Waiting { have, needed }));
        }
    }

    fn end(&mut self, end: End) {
        self.is_over = true;
        self.actions.push_back(Action::End(end));
    }
}

fn count(items: impl Iterator) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

/// How long there may be too few slots before users are notified.
const NOTICE_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod cluster;
#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;
