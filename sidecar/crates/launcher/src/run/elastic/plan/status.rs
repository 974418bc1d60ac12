//! What users may know of the state.

use super::super::exclusion::Time;
use super::hosts::Host;
use super::{Plan, Stage, Worker, WorkerState, count};
use crate::job::messages::{ExclusionStatus, HostStatus, JobStatus, NextMembership, WorkerActivity, WorkerStatus};

impl Plan {
    /// The state, without what the plan does not know: the job, processes, and past memberships.
    pub(in super::super) fn status(&self, now: Time) -> JobStatus {
        let mut workers: Vec<WorkerStatus> = self.workers.iter().map(|(of, worker)| self.worker(*of, worker)).collect();
        workers.sort_by_key(|worker| (worker.rank.is_none(), worker.rank, worker.worker));
        let next = self.change.as_ref().map(|change| NextMembership {
            number: change.members.number,
            ranks: count(change.members.seats.iter()),
            waits_for: self.waits_for(change.stage).to_owned(),
        });
        JobStatus {
            membership: self.number(),
            next,
            wanted: self.wanted_size,
            min: self.bounds.min,
            max: self.bounds.max,
            changes: self.resets,
            workers,
            hosts: self.hosts.iter().enumerate().map(|(index, host)| self.host(index, host)).collect(),
            exclusions: self.hosts.iter().flat_map(|host| exclusions(now, host)).collect(),
            ..JobStatus::default()
        }
    }

    fn waits_for(&self, stage: Stage) -> &'static str {
        match stage {
            Stage::Preparing => "sidecars to prepare it",
            Stage::Starting => "new workers to join",
            Stage::Entering if self.loss.is_none() && !self.is_released => "the others to commit their state",
            Stage::Entering => "sidecars to leave the last one",
        }
    }

    fn worker(&self, number: u32, worker: &Worker) -> WorkerStatus {
        let rank = self.committed.as_ref().and_then(|members| members.rank_of(number));
        let state = match worker.state {
            WorkerState::Planned => WorkerActivity::Planned,
            WorkerState::Started(_) => WorkerActivity::Starting,
            WorkerState::Stopping => WorkerActivity::Ending,
            WorkerState::Attached(_) if rank.is_none() => WorkerActivity::Waiting,
            WorkerState::Attached(_) if self.is_leaving(number) || !self.is_wanted(number) => WorkerActivity::Leaving,
            WorkerState::Attached(_) if worker.seated < self.number() => WorkerActivity::Returning,
            WorkerState::Attached(_) => WorkerActivity::Training,
        };
        let host = self.hosts[worker.host].name.clone();
        WorkerStatus { rank, worker: number, host, sidecar: worker.sidecar, pid: None, state }
    }

    fn host(&self, index: usize, host: &Host) -> HostStatus {
        let workers = count(self.workers.values().filter(|worker| worker.host == index));
        HostStatus { host: host.name.clone(), slots: host.listed, workers, drained: host.is_drained }
    }
}

fn exclusions(now: Time, host: &Host) -> Vec<ExclusionStatus> {
    let of_host = std::iter::once((None, &host.exclusion));
    let of_slots = (0..).map(Some).zip(host.slots.iter().map(|slot| &slot.exclusion));
    let excluded = of_host.chain(of_slots).filter(|(_, exclusion)| !exclusion.usable(now));
    excluded
        .map(|(slot, exclusion)| {
            let seconds = exclusion.usable_from(now).map(|from| (from - now).as_secs_f64());
            ExclusionStatus { host: host.name.clone(), slot, seconds }
        })
        .collect()
}
