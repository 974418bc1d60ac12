//! Workers for which others wait: new ones attach, and those of a committed membership come back for their ranks.

use super::super::exclusion::Time;
use super::{Action, Cause, Notice, Plan, Stage, Worker, WorkerState};

impl Plan {
    /// A worker has claimed its number.
    pub(super) fn attached(&mut self, now: Time, worker: u32) {
        self.left.remove(&worker);
        if let Some(worker) = self.workers.get_mut(&worker)
            && let WorkerState::Started(since) = worker.state
        {
            worker.state = WorkerState::Attached(since);
            self.first_attached.get_or_insert(now);
        }
    }

    /// A worker has its rank in a membership.
    pub(super) fn seated(&mut self, now: Time, number: u32, membership: u64) {
        let is_current = membership == self.number();
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let was_there = worker.seated > 0;
        worker.seated = worker.seated.max(membership);
        // New workers alone do not count: when the function is over, no other worker comes back, and none may be killed.
        if is_current && was_there {
            self.returned_since.get_or_insert(now);
        }
    }

    /// The coordinator has found a worker that hangs. It is replaced if the policy is on, it has a rank, and no other loss or
    /// change explains that it is late; so at most one is replaced in each membership.
    pub(super) fn hung(&mut self, now: Time, sidecar: u32, number: u32, membership: u64) {
        let Some(committed) = self.committed.as_ref().filter(|_| self.bounds.replaces_stalled) else { return };
        let is_coordinator = committed.seats.first().is_some_and(|seat| seat.sidecar == sidecar);
        let is_entering = self.change.as_ref().is_some_and(|change| change.stage == Stage::Entering);
        let is_disturbed = is_entering || self.is_released || self.loss.is_some() || self.finishing.is_some();
        let is_current = committed.number == membership && self.has_rank(number) && !is_disturbed;
        let Some(worker) = self.workers.get_mut(&number).filter(|_| is_coordinator && is_current) else { return };
        let WorkerState::Attached(since) = worker.state else { return };
        worker.state = WorkerState::Stopping;
        let worker = worker.clone();
        self.actions.push_back(Action::Notice(Notice::Hung { worker: number }));
        self.actions.push_back(Action::KillWorker { worker: number });
        self.strike_slot(now, &worker, now.saturating_sub(since));
        self.note_loss(now, Cause::Worker(number), true);
    }

    /// When a worker has to have attached. Before the first membership others have to wait for that first: a command may
    /// prepare its data for hours, or never join. One that is to come back has to when another one has.
    pub(super) fn attach_due(&self, number: u32, worker: &Worker) -> Option<Time> {
        let since = match (worker.state, &self.committed, self.first_attached) {
            (WorkerState::Started(since), Some(_), _) => since,
            (WorkerState::Started(since), None, Some(attached)) => since.max(attached),
            (WorkerState::Attached(_), Some(_), _) if self.is_awaited(number, worker) => self.returned_since?,
            _ => return None,
        };
        Some(since + self.bounds.attach_timeout)
    }

    /// Whether others wait for a worker of the committed membership that has not taken its rank there. Nobody does when
    /// the membership is about to be left.
    fn is_awaited(&self, number: u32, worker: &Worker) -> bool {
        let is_entering = self.change.as_ref().is_some_and(|change| change.stage == Stage::Entering);
        let is_over = is_entering || self.is_released || self.loss.is_some();
        worker.seated < self.number() && self.has_rank(number) && !is_over
    }

    #[cfg(test)]
    pub(super) fn has_come(&self, number: u32) -> bool {
        self.workers.get(&number).is_some_and(|worker| worker.seated == self.number())
    }

    #[cfg(test)]
    pub(super) fn waits_for_others(&self) -> bool {
        self.returned_since.is_some()
    }

    /// Gives up workers that have not attached or come back in time.
    pub(super) fn check_workers(&mut self, now: Time) {
        let is_late = |number: u32, worker: &Worker| self.attach_due(number, worker).is_some_and(|due| due <= now);
        let late = self.workers.iter().filter(|(number, worker)| is_late(**number, worker));
        let late: Vec<(u32, Worker)> = late.map(|(number, worker)| (*number, worker.clone())).collect();
        for (number, worker) in late {
            match worker.state {
                WorkerState::Attached(since) => {
                    let membership = self.number();
                    self.actions.push_back(Action::Notice(Notice::NotReturned { worker: number, membership }));
                    self.strike_slot(now, &worker, now.saturating_sub(since));
                    self.stop_worker(number);
                    self.note_loss(now, Cause::Worker(number), true);
                }
                _ => {
                    self.actions.push_back(Action::Notice(Notice::NotAttached { worker: number }));
                    // Its slot is not used for it again.
                    self.exclude_slot(now, &worker);
                    self.stop_worker(number);
                    self.note_loss(now, Cause::Worker(number), false);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{Cluster, Source, bounds, seconds};
    use super::super::{Action, Bounds, Cause, Event, Notice};

    fn not_returned(cluster: &Cluster) -> Vec<u32> {
        let notice = |action: &Action| match action {
            Action::Notice(Notice::NotReturned { worker, .. }) => Some(*worker),
            _ => None,
        };
        cluster.log.iter().filter_map(notice).collect()
    }

    #[test]
    fn a_worker_that_does_not_come_back_counts_as_lost() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        cluster.silent.insert(Source::Worker(1));
        cluster.end_worker(3, false);
        cluster.run_for(seconds(99));
        assert!(not_returned(&cluster).is_empty());
        cluster.run_for(seconds(3));
        assert_eq!(not_returned(&cluster), [1]);
        assert!(cluster.log.contains(&Action::StopWorker { worker: 1 }));
        assert_eq!(cluster.ranks(), [0, 2, 4, 5], "the others go on, and its slot is used again");
        let lost =
            |action: &Action| matches!(action, Action::Notice(Notice::Committed { cause: Cause::Worker(1), .. }));
        assert!(cluster.log.iter().any(lost), "{:?}", cluster.log);
        cluster.run_for(seconds(1_000));
        assert_eq!(not_returned(&cluster), [1], "those who came back may train for long");
    }

    #[test]
    fn nobody_is_lost_while_no_other_worker_has_come_back() {
        let mut cluster = Cluster::running(bounds(2, 1, 3), &[2]);
        cluster.silent.extend([0, 1].map(Source::Worker));
        cluster.list(&[2, 1]);
        cluster.run_for(seconds(1_000));
        assert_eq!(cluster.ranks(), [0, 1, 2]);
        assert!(not_returned(&cluster).is_empty(), "the function may be over: only a new worker waits");
    }

    #[test]
    fn the_time_begins_again_with_each_membership() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[4]);
        cluster.silent.insert(Source::Worker(1));
        cluster.end_worker(3, false);
        cluster.run_for(seconds(60));
        cluster.end_worker(2, false);
        cluster.run_for(seconds(60));
        assert!(not_returned(&cluster).is_empty());
        cluster.run_for(seconds(60));
        assert_eq!(not_returned(&cluster), [1]);
    }

    fn hung(cluster: &mut Cluster, sidecar: u32, worker: u32, membership: u64) -> bool {
        cluster.event(Event::Hung { sidecar, worker, membership });
        cluster.log.contains(&Action::KillWorker { worker })
    }

    #[test]
    fn a_worker_that_hangs_is_replaced() {
        let mut cluster = Cluster::running(Bounds { replaces_stalled: true, ..bounds(4, 2, 4) }, &[2, 2]);
        assert!(hung(&mut cluster, 0, 3, 1));
        assert!(!hung(&mut cluster, 0, 2, 1), "one at a time");
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks(), [0, 1, 2, 4]);
        let lost =
            |action: &Action| matches!(action, Action::Notice(Notice::Committed { cause: Cause::Worker(3), .. }));
        assert!(cluster.log.iter().any(lost), "{:?}", cluster.log);
        let number = cluster.number();
        assert!(hung(&mut cluster, 0, 0, number), "rank 0, too");
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks()[..3], [1, 2, 4]);
    }

    #[test]
    fn nobody_is_replaced_without_the_policy_or_for_an_old_or_foreign_report() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        assert!(!hung(&mut cluster, 0, 3, 1), "the policy is off");
        let mut cluster = Cluster::running(Bounds { replaces_stalled: true, ..bounds(4, 2, 4) }, &[2, 2]);
        assert!(!hung(&mut cluster, 1, 0, 1), "not the coordinator");
        assert!(!hung(&mut cluster, 0, 3, 0), "another membership");
        assert!(!hung(&mut cluster, 0, 9, 1), "no worker");
        cluster.end_worker(1, false);
        assert!(!hung(&mut cluster, 0, 3, 1), "it is late because another one is lost");
        cluster.run_for(seconds(20));
        cluster.list(&[2, 2, 2]);
        cluster.end_worker(0, true);
        let number = cluster.number();
        assert!(!hung(&mut cluster, 0, 3, number), "the job ends");
    }

    #[test]
    fn nobody_is_awaited_in_a_membership_that_is_over() {
        let mut cluster = Cluster::running(bounds(4, 3, 4), &[2, 1, 1]);
        cluster.silent.insert(Source::Worker(1));
        cluster.end_worker(3, false);
        cluster.run_for(seconds(20));
        cluster.list(&[2]);
        cluster.end_agent(1);
        cluster.end_agent(2);
        cluster.run_for(seconds(500));
        assert_eq!((not_returned(&cluster), cluster.ended), (Vec::new(), None), "all wait for slots");
    }
}
