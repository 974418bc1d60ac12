//! The stages of a change, from the next membership to its commit.

use std::rc::Rc;
use std::time::Duration;

use super::super::exclusion::Time;
use super::{Action, Cause, Change, End, Members, Notice, Plan, Seat, SidecarState, Stage, Worker, WorkerState, count};

impl Plan {
    /// Moves a sidecar from one state to the next.
    pub(super) fn answered(&mut self, index: u32, from: SidecarState, to: SidecarState) {
        if let Some(sidecar) = self.sidecars.get_mut(&index).filter(|sidecar| sidecar.state == from) {
            (sidecar.state, sidecar.due) = (to, None);
        }
    }

    pub(super) fn serving(&mut self, index: u32) {
        self.answered(index, SidecarState::Joined, SidecarState::Serving);
        if let Some(sidecar) = self.sidecars.get_mut(&index).filter(|sidecar| sidecar.prepared == 0) {
            sidecar.prepared = sidecar.entered;
        }
    }

    pub(super) fn prepared(&mut self, index: u32, membership: u64) {
        let current = self.change.as_ref().map(|change| change.members.number);
        if let Some(sidecar) = self.sidecars.get_mut(&index).filter(|sidecar| sidecar.state == SidecarState::Serving) {
            sidecar.prepared = sidecar.prepared.max(membership);
            if Some(membership) == current {
                sidecar.due = None;
            }
        }
    }

    pub(super) fn entered(&mut self, now: Time, index: u32, membership: u64) {
        let Some(sidecar) = self.sidecars.get_mut(&index).filter(|sidecar| sidecar.state == SidecarState::Serving)
        else {
            return;
        };
        sidecar.entered = sidecar.entered.max(membership);
        let Some(change) = self.change.as_ref().filter(|change| change.members.number == membership) else { return };
        if change.stage != Stage::Entering {
            return;
        }
        sidecar.due = None;
        // The epoch is over for all, so the others enter soon.
        for other in change.members.sidecars() {
            if let Some(other) = self.sidecars.get_mut(&other).filter(|other| other.entered != membership) {
                other.due.get_or_insert((now + self.bounds.answer_timeout, ENTER));
            }
        }
    }

    /// Takes the change to its next stage, or drops it when a member was lost.
    pub(super) fn drive(&mut self, now: Time) {
        let Some(change) = self.change.clone() else { return };
        if !change.members.seats.iter().all(|seat| self.is_seated(*seat)) {
            self.is_released |= change.stage == Stage::Entering;
            self.drop_change();
            return;
        }
        let number = change.members.number;
        let sidecars = change.members.sidecars();
        let all = |done: fn(&super::Sidecar, u64) -> bool| {
            sidecars.iter().all(|index| self.sidecars.get(index).is_some_and(|sidecar| done(sidecar, number)))
        };
        match change.stage {
            Stage::Preparing if all(|sidecar, number| sidecar.prepared >= number) => self.start_workers(now, &change),
            Stage::Starting if change.is_for_spares => self.note_spares(&change),
            Stage::Starting if self.can_enter(&change.members) => self.enter(now, &change),
            Stage::Entering if all(|sidecar, number| sidecar.entered == number) => self.commit(&change),
            _ => {}
        }
    }

    /// Forgets a change. What its sidecars were to answer they do not have to answer any more.
    pub(super) fn drop_change(&mut self) {
        if let Some(change) = self.change.take() {
            for sidecar in change.members.sidecars() {
                let known = self.sidecars.get_mut(&sidecar);
                known
                    .filter(|known| known.state == SidecarState::Serving)
                    .into_iter()
                    .for_each(|known| known.due = None);
            }
        }
        self.enter_notice = None;
    }

    fn is_seated(&self, seat: Seat) -> bool {
        let is_open = |sidecar: &super::Sidecar| sidecar.state != SidecarState::Closing;
        self.is_live(seat.worker) && self.sidecars.get(&seat.sidecar).is_some_and(is_open)
    }

    fn start_workers(&mut self, now: Time, change: &Change) {
        for seat in &change.members.seats {
            let Some(worker) = self.workers.get_mut(&seat.worker) else { continue };
            if worker.state == WorkerState::Planned {
                worker.state = WorkerState::Started(now);
                let members = Rc::clone(&change.members);
                let (worker, sidecar, is_spare) = (seat.worker, seat.sidecar, change.is_for_spares);
                self.actions.push_back(Action::StartWorker { worker, sidecar, members, is_spare });
            }
        }
        self.set_stage(Stage::Starting);
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(change) = &mut self.change {
            change.stage = stage;
        }
    }

    /// Whether there are enough workers and all new ones have attached.
    fn can_enter(&self, members: &Members) -> bool {
        let waits = |seat: &Seat| {
            let worker = self.workers.get(&seat.worker);
            self.has_rank(seat.worker) || worker.is_some_and(|worker| matches!(worker.state, WorkerState::Attached(_)))
        };
        count(members.seats.iter()) >= self.needed() && members.seats.iter().all(waits)
    }

    fn enter(&mut self, now: Time, change: &Change) {
        let members = &change.members;
        let (added, removed) = self.committed.as_ref().map_or((count(members.seats.iter()), 0), |before| {
            (members.count_without(before), before.count_without(members))
        });
        // Workers end an undisturbed epoch when they commit their state; how long that takes is theirs to decide.
        let is_over = self.loss.is_some() || self.is_released || self.committed.is_none();
        for index in members.sidecars() {
            let Some(sidecar) = self.sidecars.get_mut(&index).filter(|sidecar| sidecar.entered != members.number)
            else {
                continue;
            };
            sidecar.due = is_over.then_some((now + self.bounds.answer_timeout, ENTER));
            let membership = members.number;
            self.actions.push_back(Action::Enter { sidecar: index, membership, added, removed });
        }
        self.enter_notice = (!is_over).then_some(now + ENTER_NOTICE_WAIT);
        self.set_stage(Stage::Entering);
    }

    fn commit(&mut self, change: &Change) {
        let members = Rc::clone(&change.members);
        let is_first = self.committed.is_none();
        let (cause, since) = self.loss.filter(|_| !is_first).unwrap_or((change.cause, change.since));
        for index in members.sidecars() {
            if let Some(sidecar) = self.sidecars.get_mut(&index) {
                sidecar.was_committed = true;
                self.actions.push_back(Action::Commit { sidecar: index, membership: members.number });
            }
        }
        self.drop_change();
        self.actions.push_back(Action::Notice(Notice::Committed { members: Rc::clone(&members), cause, since }));
        let before = self.committed.replace(Rc::clone(&members));
        self.previous.clone_from(&before);
        self.resets += u32::from(before.is_some());
        (self.loss, self.is_released, self.short_since, self.reported) = (None, false, None, None);
        self.returned_since = None;
        self.unreachable = super::unreachable::Unreachable::default();
        if self.has_no_resets() {
            self.stop_others(&members);
        }
        let gone = before.iter().flat_map(|before| before.seats.iter().filter(|seat| !members.contains(seat.worker)));
        gone.for_each(|seat| self.stop_worker(seat.worker));
        self.close_left_out(&members);
    }

    /// A sidecar that was in a membership does not return in a later one.
    fn close_left_out(&mut self, members: &Members) {
        let takes_part = members.sidecars();
        let left = self.sidecars.iter().filter(|(index, sidecar)| sidecar.was_committed && !takes_part.contains(index));
        let left: Vec<u32> = left.map(|(index, _)| *index).collect();
        for index in left {
            let served = |(_, worker): &(&u32, &Worker)| worker.sidecar == index;
            let workers: Vec<u32> = self.workers.iter().filter(served).map(|(number, _)| *number).collect();
            workers.into_iter().for_each(|worker| self.stop_worker(worker));
            self.close_sidecar(index);
        }
    }

    /// Begins the next change, if there is a reason.
    pub(super) fn begin(&mut self, now: Time) {
        if self.is_over || self.finishing.is_some() {
            return;
        }
        if self.is_disturbed() {
            return self.begin_after_loss(now);
        }
        let is_held = self.change.as_ref().is_some_and(|change| {
            change.stage == Stage::Starting && count(change.members.seats.iter()) < self.needed()
        });
        if self.change.is_none() || is_held {
            self.begin_with_new(now, is_held);
        }
    }

    /// Whether the current epoch is over and no change follows.
    fn is_disturbed(&self) -> bool {
        let Some(committed) = &self.committed else { return false };
        let has_lost = committed.seats.iter().any(|seat| !self.is_live(seat.worker));
        match &self.change {
            None => has_lost || self.is_released,
            // A change that contains nobody who is lost goes on when its sidecars have been released; before that it may
            // wait for new workers, for which survivors do not wait.
            Some(change) if change.stage == Stage::Entering => false,
            Some(change) => has_lost && !self.is_of_survivors(change),
        }
    }

    /// Whether a change waits for nobody but sidecars, or waits because there are too few workers.
    fn is_of_survivors(&self, change: &Change) -> bool {
        let waits = change.members.seats.iter().any(|seat| {
            let worker = self.workers.get(&seat.worker);
            !self.has_rank(seat.worker) && !worker.is_some_and(|w| matches!(w.state, WorkerState::Attached(_)))
        });
        !waits || self.survivors().len() < self.bounds.min as usize
    }

    /// The seats of the committed membership whose workers are not lost.
    fn survivors(&self) -> Vec<Seat> {
        let seats = self.committed.iter().flat_map(|members| members.seats.iter());
        seats.filter(|seat| self.is_seated(**seat)).copied().collect()
    }

    /// New workers without a seat in the committed membership whose sidecar is ready, the oldest first.
    fn newcomers(&self) -> Vec<(Seat, bool)> {
        let is_ready = |worker: &Worker| {
            let sidecar = self.sidecars.get(&worker.sidecar);
            sidecar.is_some_and(|sidecar| matches!(sidecar.state, SidecarState::Bound | SidecarState::Serving))
        };
        let has_seat = |worker: u32| self.committed.as_ref().is_some_and(|members| members.contains(worker));
        let new = self.workers.iter().filter(|(number, worker)| {
            worker.state != WorkerState::Stopping && !has_seat(**number) && is_ready(worker)
        });
        new.map(|(number, worker)| {
            let seat = Seat { worker: *number, sidecar: worker.sidecar };
            (seat, matches!(worker.state, WorkerState::Attached(_)))
        })
        .collect()
    }

    fn begin_after_loss(&mut self, now: Time) {
        let (cause, since) = self.loss.unwrap_or((Cause::Removed, now));
        if let Some(limit) = self.bounds.reset_limit.filter(|limit| self.resets >= *limit) {
            return self.end(End::ResetLimit { limit, cause });
        }
        let mut seats = self.survivors();
        let attached = self.newcomers().into_iter().filter(|(_, has_attached)| *has_attached).map(|(seat, _)| seat);
        seats.extend(attached.filter(|seat| self.is_serving(seat.sidecar)));
        seats.truncate(self.wanted_size as usize);
        self.begin_change(now, seats, cause, since);
    }

    fn is_serving(&self, sidecar: u32) -> bool {
        self.sidecars.get(&sidecar).is_some_and(|sidecar| sidecar.state == SidecarState::Serving)
    }

    /// Begins a change that adds or removes workers, while those of the current membership train.
    fn begin_with_new(&mut self, now: Time, is_held: bool) {
        let mut seats = self.survivors();
        let mut wanted: Vec<Seat> = seats.iter().filter(|seat| self.is_wanted(seat.worker)).copied().collect();
        wanted.truncate(self.wanted_size as usize);
        let new: Vec<Seat> = self.newcomers().into_iter().map(|(seat, _)| seat).collect();
        let ready = self.ready(now);
        let held = self.change.as_ref().filter(|_| is_held).map(|change| Rc::clone(&change.members));
        let is_new = |seat: &&Seat| held.as_ref().is_none_or(|held| !held.contains(seat.worker));
        let adds = new.iter().any(|seat| is_new(&seat)) || !ready.is_empty();
        self.ready_since = if adds { self.ready_since.or(Some(now)) } else { None };
        let is_gathered = adds && self.is_gathered(now);
        if wanted.is_empty() && seats.len() >= self.wanted_size as usize && seats.len() > 1 && is_gathered {
            // There is no room for others beside those that have to go: the oldest one alone hands over the state.
            wanted.push(seats[0]);
        }
        let later = wanted.len() + new.len() + ready.len();
        // Hosts that are about to disappear train on until others replace them and have the job's state.
        let removes = !is_held && !wanted.is_empty() && wanted.len() < seats.len() && later >= self.bounds.min as usize;
        let is_enough = self.committed.is_some() || later >= self.bounds.first as usize;
        if !is_enough || !(removes || is_gathered) || self.has_no_resets() {
            return;
        }
        let kept = if removes { wanted.len() } else { seats.len() };
        let mut room = (self.wanted_size as usize).saturating_sub(kept);
        if !removes && !is_held && room == 0 {
            return self.begin_spares(now, seats, new.len(), ready);
        }
        let cause = self.cause_of_change(adds && room > 0, &seats);
        if removes {
            seats = wanted;
        }
        let (cause, since) = self.loss.unwrap_or((cause, now));
        seats.extend(new.into_iter().take(room));
        room = (self.wanted_size as usize).saturating_sub(seats.len());
        seats.extend(ready.into_iter().take(room).map(|place| self.plan_worker(place)));
        self.begin_change(now, seats, cause, since);
    }

    /// Why a membership follows one of these seats.
    fn cause_of_change(&self, adds: bool, seats: &[Seat]) -> Cause {
        let mut hosts = seats.iter().filter_map(|seat| Some(&self.hosts[self.workers.get(&seat.worker)?.host]));
        match &self.committed {
            None => Cause::Start,
            Some(_) if hosts.clone().any(|host| host.leaving.is_some()) => Cause::Preempted,
            Some(_) if hosts.any(|host| host.is_drained) => Cause::Drained,
            Some(_) if adds => Cause::Added,
            Some(_) if seats.iter().all(|seat| self.is_wanted(seat.worker)) => Cause::Scaled,
            Some(_) => Cause::Removed,
        }
    }

    /// Whether all that is about to be ready is, or was waited for long enough.
    fn is_gathered(&self, now: Time) -> bool {
        let waited = self.ready_since.is_some_and(|since| now.saturating_sub(since) >= self.gather_wait());
        waited
            || !(self.is_starting(now) || self.sidecars.values().any(|sidecar| sidecar.state == SidecarState::Joined))
    }

    /// How long a change waits for hosts that are about to be ready.
    pub(super) fn gather_wait(&self) -> Duration {
        if self.committed.is_some() { GATHER_WAIT } else { FIRST_GATHER_WAIT }
    }

    /// Whether `--reset-limit` is reached.
    pub(super) fn has_no_resets(&self) -> bool {
        self.committed.is_some() && self.bounds.reset_limit.is_some_and(|limit| self.resets >= limit)
    }

    pub(super) fn plan_worker(&mut self, (host, slot, sidecar): (usize, usize, u32)) -> Seat {
        let worker = self.next_worker;
        self.next_worker += 1;
        let agent = self.sidecars.get(&sidecar).map_or(u32::MAX, |sidecar| sidecar.agent);
        self.workers.insert(worker, Worker { host, slot, sidecar, agent, state: WorkerState::Planned, seated: 0 });
        self.hosts[host].slots[slot].worker = Some(worker);
        Seat { worker, sidecar }
    }

    pub(super) fn begin_change(&mut self, now: Time, seats: Vec<Seat>, cause: Cause, since: Time) {
        self.drop_change();
        self.ready_since = None;
        if seats.is_empty() {
            return;
        }
        let members = Rc::new(Members { number: self.next_number, seats });
        self.next_number += 1;
        for index in members.sidecars() {
            let Some(sidecar) = self.sidecars.get_mut(&index) else { continue };
            let members = Rc::clone(&members);
            if sidecar.state == SidecarState::Bound {
                (sidecar.state, sidecar.entered) = (SidecarState::Joined, members.number);
                sidecar.due = Some((now + self.bounds.start_timeout, "to serve"));
                self.actions.push_back(Action::Join { sidecar: index, members });
            } else {
                sidecar.due = Some((now + self.bounds.answer_timeout, "to prepare the next membership"));
                self.actions.push_back(Action::Change { sidecar: index, members });
            }
        }
        self.change = Some(Change { members, stage: Stage::Preparing, cause, since, is_for_spares: false });
    }
}

/// What is awaited of a sidecar that has been released.
const ENTER: &str = "to leave the last membership";
/// How long a change waits for other hosts that are about to be ready.
const GATHER_WAIT: Duration = Duration::from_secs(1);
/// The same for the first membership.
const FIRST_GATHER_WAIT: Duration = Duration::from_secs(10);
/// How long workers may train on before a notice names what new workers wait for.
const ENTER_NOTICE_WAIT: Duration = Duration::from_secs(60);
