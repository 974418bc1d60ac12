//! Spare workers: they have started and attached, and wait for a loss.
//!
//! A worker gets its token with a membership that has it. So a change with the spare workers is prepared and their processes
//! start, as for new workers; when they have attached, it is dropped instead of entered. The next change after a loss takes
//! them like any new worker that has attached, without waiting for a process to start.

use super::super::exclusion::Time;
use super::{Action, Cause, Change, Notice, Plan, Seat, WorkerState};

impl Plan {
    /// How many spare workers there should be. They have no use before the first membership.
    pub(super) fn spares(&self) -> u32 {
        if self.committed.is_some() { self.bounds.spares } else { 0 }
    }

    /// Begins a change that starts missing spare workers in free slots. `waiting` is how many workers wait already.
    pub(super) fn begin_spares(
        &mut self,
        now: Time,
        mut seats: Vec<Seat>,
        waiting: usize,
        ready: Vec<(usize, usize, u32)>,
    ) {
        let missing = (self.spares() as usize).saturating_sub(waiting);
        if missing == 0 || ready.is_empty() {
            return;
        }
        seats.extend(ready.into_iter().take(missing).map(|place| self.plan_worker(place)));
        self.begin_change(now, seats, Cause::Added, now);
        if let Some(change) = &mut self.change {
            change.is_for_spares = true;
        }
    }

    /// Drops the change when its spare workers have attached.
    pub(super) fn note_spares(&mut self, change: &Change) {
        let spares = change.members.seats.iter().filter(|seat| !self.has_rank(seat.worker));
        let spares: Vec<u32> = spares.map(|seat| seat.worker).collect();
        let has_attached = |worker: &u32| {
            self.workers.get(worker).is_some_and(|worker| matches!(worker.state, WorkerState::Attached(_)))
        };
        if spares.iter().all(has_attached) {
            self.drop_change();
            self.actions.push_back(Action::Notice(Notice::Spares { workers: spares }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{Cluster, Source, bounds, seconds};
    use super::super::{Action, Bounds, Cause, End, Event, Notice};

    fn with_spares(spares: u32, slots: &[u32]) -> Cluster {
        let mut cluster = Cluster::running(Bounds { spares, ..bounds(3, 1, 3) }, slots);
        cluster.run_for(seconds(20));
        cluster
    }

    #[test]
    fn a_spare_worker_enters_with_the_first_change_after_a_loss() {
        let mut cluster = with_spares(1, &[4]);
        assert_eq!((cluster.ranks(), cluster.workers.len()), (vec![0, 1, 2], 4), "it has no rank");
        assert!(cluster.log.contains(&Action::Notice(Notice::Spares { workers: vec![3] })));
        let entered = |action: &Action| matches!(action, Action::Enter { .. });
        assert!(!cluster.log.iter().any(entered), "nobody was disturbed for it");
        let then = cluster.now;
        cluster.silent.insert(Source::Worker(4));
        cluster.end_worker(1, false);
        cluster.deliver_all();
        assert_eq!((cluster.ranks(), cluster.now), (vec![0, 2, 3], then));
        assert_eq!(cluster.causes(), [Cause::Start, Cause::Worker(1)]);
        cluster.event(Event::Attached { worker: 4 });
        cluster.run_for(seconds(200));
        assert_eq!((cluster.ranks(), cluster.workers.len()), (vec![0, 2, 3], 4), "the slot gets another spare worker");
    }

    #[test]
    fn spare_workers_on_another_host_replace_a_lost_one() {
        let mut cluster = with_spares(3, &[3, 3]);
        assert_eq!((cluster.ranks(), cluster.workers.len()), (vec![0, 1, 2], 6));
        cluster.scale(2).expect("it fits");
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks(), [0, 1]);
        cluster.scale(3).expect("it fits");
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks().len(), 3);
        cluster.end_worker(1, false);
        cluster.deliver_all();
        assert_eq!(cluster.ranks().len(), 3, "at once");
    }

    #[test]
    fn without_a_free_slot_there_is_no_spare_worker() {
        let cluster = with_spares(2, &[3]);
        assert_eq!((cluster.ranks(), cluster.workers.len()), (vec![0, 1, 2], 3));
    }

    #[test]
    fn a_loss_does_not_wait_for_a_spare_worker_that_starts() {
        let mut cluster = Cluster::running(Bounds { spares: 1, ..bounds(3, 1, 3) }, &[4]);
        cluster.silent.insert(Source::Worker(3));
        cluster.run_for(seconds(5));
        assert_eq!(cluster.workers.len(), 4);
        cluster.end_worker(0, false);
        cluster.deliver_all();
        assert_eq!(cluster.ranks()[..2], [1, 2]);
    }

    #[test]
    fn spare_workers_that_fail_are_replaced_and_end_with_the_job() {
        let mut cluster = with_spares(1, &[4]);
        cluster.end_worker(3, false);
        cluster.run_for(seconds(20));
        assert_eq!((cluster.ranks(), cluster.workers.len()), (vec![0, 1, 2], 4));
        [0, 1, 2].into_iter().for_each(|worker| cluster.end_worker(worker, true));
        cluster.deliver_all();
        assert_eq!(cluster.ended, Some(End::Success));
    }

    #[test]
    fn a_job_whose_workers_with_the_state_are_lost_ends() {
        let mut cluster = with_spares(1, &[3, 1]);
        cluster.end_agent(0);
        assert_eq!(cluster.ended, Some(End::Failed(Cause::Agent(0))));
    }
}
