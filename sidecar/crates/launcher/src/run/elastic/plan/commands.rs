//! Commands of the user: a host is drained, and the number of workers changes.

use super::super::exclusion::Time;
use super::{Plan, Worker, count};

/// Why a command cannot be executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Refusal {
    /// Workers have ended with status 0, so no other membership begins.
    Ending,
    /// The job was never given such a host.
    UnknownHost {
        /// Those that it knows.
        known: Vec<String>,
    },
    /// Fewer than `--min-np`.
    BelowMin {
        /// It.
        min: u32,
    },
    /// Fewer than the job needs to start, which it has not done.
    BelowFirst {
        /// How many it needs.
        first: u32,
    },
    /// More than `--max-np`.
    AboveMax {
        /// It.
        max: u32,
    },
    /// The membership has changed as often as `--reset-limit` allows.
    NoResets {
        /// It.
        limit: u32,
    },
}

/// What a drained host leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Drained {
    /// How many workers the host has now.
    pub(in super::super) workers: u32,
    /// Whether they stay until other hosts have slots, because too few workers would remain.
    pub(in super::super) waits: bool,
}

/// What another wanted number of workers leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Scaled {
    /// How many workers there are now.
    pub(in super::super) workers: u32,
    /// How many slots can be used now, those of the workers included.
    pub(in super::super) slots: u32,
}

impl Plan {
    /// Removes the workers of a host at their next commit and uses it no more, or uses it again.
    ///
    /// # Errors
    /// Why not.
    pub(in super::super) fn drain(&mut self, now: Time, name: &str, undo: bool) -> Result<Drained, Refusal> {
        self.check_changes()?;
        let Some(index) = self.hosts.iter().position(|host| host.name == name) else {
            return Err(Refusal::UnknownHost { known: self.hosts.iter().map(|host| host.name.clone()).collect() });
        };
        self.hosts[index].is_drained = !undo;
        self.stop_unwanted();
        let here = |worker: &&Worker| worker.host == index;
        let workers = count(self.workers.values().filter(here));
        let others = self.usable_count(now).saturating_sub(if undo { 0 } else { self.live_on(index) });
        let waits = !undo && workers > 0 && (others < self.bounds.min || self.none_stays());
        self.advance(now);
        Ok(Drained { workers, waits })
    }

    /// Changes the wanted number of workers.
    ///
    /// # Errors
    /// Why not.
    pub(in super::super) fn scale(&mut self, now: Time, workers: u32) -> Result<Scaled, Refusal> {
        self.check_changes()?;
        let (min, first, max) = (self.bounds.min, self.bounds.first, self.bounds.max);
        if workers < min {
            return Err(Refusal::BelowMin { min });
        }
        if workers < first && self.committed.is_none() {
            return Err(Refusal::BelowFirst { first });
        }
        if workers > max {
            return Err(Refusal::AboveMax { max });
        }
        let scaled = Scaled { workers: self.live_count(), slots: self.usable_count(now) };
        self.wanted_size = workers;
        self.stop_unwanted();
        self.advance(now);
        Ok(scaled)
    }

    fn check_changes(&self) -> Result<(), Refusal> {
        if self.is_over || self.finishing.is_some() {
            return Err(Refusal::Ending);
        }
        match self.bounds.reset_limit {
            Some(limit) if self.has_no_resets() => Err(Refusal::NoResets { limit }),
            _ => Ok(()),
        }
    }

    fn live_on(&self, host: usize) -> u32 {
        count(self.workers.iter().filter(|(number, worker)| worker.host == host && self.is_live(**number)))
    }

    /// Whether all workers with a rank are on hosts that they have to leave, so that nobody who stays has the state.
    fn none_stays(&self) -> bool {
        let mut seats = self.committed.iter().flat_map(|members| members.seats.iter());
        !seats.any(|seat| self.has_rank(seat.worker) && self.is_live(seat.worker) && self.is_wanted(seat.worker))
    }

    /// Stops new workers that are not wanted any more: they need no change to be removed. The youngest go first.
    pub(super) fn stop_unwanted(&mut self) {
        let is_new = |number: &u32| !self.has_rank(*number) && self.is_live(*number);
        let (lost, new): (Vec<u32>, Vec<u32>) =
            self.workers.keys().copied().filter(is_new).partition(|number| !self.is_wanted(*number));
        let seated = self.workers.keys().filter(|number| self.has_rank(**number) && self.is_wanted(**number));
        let wanted = self.wanted_size.saturating_add(self.spares());
        let room = wanted.saturating_sub(count(seated)) as usize;
        let unwanted: Vec<u32> = lost.into_iter().chain(new.into_iter().skip(room)).collect();
        unwanted.into_iter().for_each(|worker| self.stop_worker(worker));
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{Cluster, Source, bounds, seconds};
    use super::super::{Action, Bounds, Cause, Event};
    use super::*;

    #[test]
    fn the_workers_of_a_drained_host_leave_in_order_and_it_is_not_used_again() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        assert_eq!(cluster.drain("b", false), Ok(Drained { workers: 2, waits: false }));
        cluster.run_for(seconds(20));
        assert_eq!((cluster.ranks(), cluster.causes()), (vec![0, 1], vec![Cause::Start, Cause::Drained]));
        assert!(cluster.log.contains(&Action::DropAgent { agent: 1 }), "nothing is left there");
        cluster.list(&[2, 2]);
        cluster.run_for(seconds(1_000));
        assert_eq!((cluster.ranks(), cluster.ended), (vec![0, 1], None), "it is listed still");
        assert_eq!(cluster.drain("b", true), Ok(Drained { workers: 0, waits: false }));
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks(), [0, 1, 4, 5]);
    }

    #[test]
    fn a_drained_host_waits_for_others_when_too_few_would_remain() {
        let mut cluster = Cluster::running(bounds(4, 3, 4), &[2, 2]);
        assert_eq!(cluster.drain("b", false), Ok(Drained { workers: 2, waits: true }));
        cluster.run_for(seconds(100));
        assert_eq!(cluster.ranks(), [0, 1, 2, 3]);
        cluster.list(&[2, 2, 2]);
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks(), [0, 1, 4, 5]);
    }

    #[test]
    fn the_only_host_hands_the_state_over_in_the_room_that_there_is() {
        let mut cluster = Cluster::running(bounds(2, 2, 2), &[2, 2]);
        assert_eq!(cluster.drain("a", false), Ok(Drained { workers: 2, waits: true }));
        cluster.run_for(seconds(30));
        assert_eq!(cluster.ranks().len(), 2);
        assert!(!cluster.ranks().iter().any(|worker| [0, 1].contains(worker)), "{:?}", cluster.ranks());
    }

    #[test]
    fn new_workers_of_a_drained_host_are_stopped_at_once() {
        let mut cluster = Cluster::running(bounds(2, 2, 4), &[2]);
        cluster.silent.extend([2, 3].map(Source::Worker));
        cluster.list(&[2, 2]);
        cluster.run_for(seconds(5));
        assert_eq!(cluster.workers.len(), 4);
        assert_eq!(cluster.drain("b", false), Ok(Drained { workers: 2, waits: false }));
        cluster.run_for(seconds(5));
        assert_eq!((cluster.workers.len(), cluster.ranks()), (2, vec![0, 1]));
    }

    #[test]
    fn a_job_with_a_drained_host_waits_rather_than_ends() {
        let mut cluster = Cluster::running(Bounds { has_discovery: false, ..bounds(4, 2, 4) }, &[2, 2]);
        assert!(cluster.drain("b", false).is_ok());
        cluster.run_for(seconds(20));
        cluster.end_worker(0, false);
        cluster.silent.insert(Source::Worker(4));
        for worker in 4..7 {
            cluster.silent.insert(Source::Worker(worker));
            cluster.run_for(seconds(1));
            cluster.end_worker(worker, false);
        }
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ended, None, "the user can undo it");
        assert!(cluster.drain("b", true).is_ok());
        cluster.run_for(seconds(20));
        assert!(cluster.ranks().len() >= 2 && cluster.ended.is_none(), "{:?}", cluster.ended);
    }

    #[test]
    fn fewer_workers_are_reached_by_the_youngest_leaving() {
        let mut cluster = Cluster::running(bounds(4, 1, 8), &[2, 2]);
        assert_eq!(cluster.scale(2), Ok(Scaled { workers: 4, slots: 4 }));
        cluster.run_for(seconds(20));
        assert_eq!((cluster.ranks(), cluster.causes()), (vec![0, 1], vec![Cause::Start, Cause::Scaled]));
        cluster.list(&[2, 2, 2]);
        cluster.run_for(seconds(100));
        assert_eq!(cluster.ranks(), [0, 1], "new hosts change nothing");
        assert_eq!(cluster.scale(5), Ok(Scaled { workers: 2, slots: 6 }));
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks(), [0, 1, 4, 5, 6]);
        cluster.end_worker(0, false);
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks().len(), 5, "losses are replaced up to that number");
    }

    #[test]
    fn new_workers_beyond_the_number_are_stopped_the_youngest_first() {
        let mut cluster = Cluster::running(bounds(2, 2, 8), &[2]);
        cluster.silent.extend((2..6).map(Source::Worker));
        cluster.list(&[2, 3]);
        cluster.run_for(seconds(5));
        assert_eq!(cluster.workers.len(), 5);
        assert!(cluster.scale(3).is_ok());
        cluster.deliver_all();
        assert_eq!(cluster.workers.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
        cluster.event(Event::Attached { worker: 2 });
        cluster.run_for(seconds(5));
        assert_eq!(cluster.ranks(), [0, 1, 2]);
    }

    #[test]
    fn what_does_not_fit_the_job_is_refused() {
        let mut cluster = Cluster::new(bounds(4, 2, 6));
        cluster.list(&[3, 2]);
        assert_eq!(cluster.scale(3), Err(Refusal::BelowFirst { first: 4 }));
        cluster.run_for(seconds(20));
        assert_eq!(cluster.scale(1), Err(Refusal::BelowMin { min: 2 }));
        assert_eq!(cluster.scale(7), Err(Refusal::AboveMax { max: 6 }));
        assert_eq!(cluster.drain("z", false), Err(Refusal::UnknownHost { known: vec!["a".into(), "b".into()] }));
        cluster.end_worker(0, true);
        assert_eq!((cluster.scale(3), cluster.drain("a", false)), (Err(Refusal::Ending), Err(Refusal::Ending)));
        let mut limited = Cluster::running(Bounds { reset_limit: Some(0), ..bounds(2, 1, 4) }, &[2]);
        assert_eq!(limited.scale(1), Err(Refusal::NoResets { limit: 0 }));
    }
}
