//! Whom a job's failure is blamed on, from the tables. Pure.

use std::collections::BTreeSet;

use super::super::failure::{Failure, LinkStatus, has_first_line};
use super::super::outcome::{self, Losses, RankReport, RootCause};
use super::super::shell::Trouble;
use super::{State, WorkerState};
use crate::envelope::Status;

impl State {
    /// What ended the job after a worker has failed, with those of its last lines that have arrived.
    pub(in super::super) fn worker_failure(&self) -> Option<Failure> {
        let first_failed = self.first_failed?;
        match self.root_cause()? {
            RootCause::Sidecar(sidecar) => {
                let status = self.sidecars[sidecar as usize].exited?;
                Some(self.sidecar_failure(sidecar, status))
            }
            RootCause::Host(host) => Some(self.host_failure(host, self.hosts[host].closed?)),
            RootCause::LeftEarly(rank) => {
                let worker = &self.workers[rank as usize];
                Some(Failure::LeftEarly {
                    rank,
                    host: self.host_name(self.host_of_rank(rank)),
                    status: worker.exited.filter(|_| !worker.is_stopped),
                    operations: worker.operations,
                    last_call: worker.last_call.clone(),
                    stderr_tail: worker.stderr_tail.clone().unwrap_or_default(),
                    follower: self.workers[first_failed as usize].exited?,
                })
            }
            RootCause::Rank(rank) => {
                let worker = &self.workers[rank as usize];
                Some(Failure::Worker {
                    rank,
                    host: self.host_name(self.host_of_rank(rank)),
                    status: worker.exited?,
                    command: self.command.clone(),
                    last_call: worker.last_call.clone(),
                    stderr_tail: worker.stderr_tail.clone().unwrap_or_default(),
                })
            }
        }
    }

    /// The text below the failure that ended the job: the numbers of operations, and who failed besides.
    pub(in super::super) fn consequences(&self, failure: &Failure) -> String {
        let cause = match failure {
            Failure::Worker { rank, .. } => RootCause::Rank(*rank),
            Failure::LeftEarly { rank, .. } => RootCause::LeftEarly(*rank),
            Failure::Sidecar { sidecar, .. } => RootCause::Sidecar(*sidecar),
            // It names the host by its text, which the lines about others do not need.
            Failure::Lost { .. } => RootCause::Host(0),
            _ => return String::new(),
        };
        let reports = self.reports();
        let counts = outcome::operations(&reports).filter(|_| matches!(cause, RootCause::LeftEarly(_)));
        let counts = counts.map(|counts| format!("\noperations: {counts}")).unwrap_or_default();
        let others = outcome::others(&reports, cause).into_iter().map(|line| format!("\n{line}"));
        counts + &others.collect::<String>()
    }

    /// Why sidecars could not continue, besides what the failure has: each reason once, with the first sidecar. The second value
    /// is the number of further reasons.
    pub(in super::super) fn other_fatal_reasons(&self, failure: Option<&Failure>) -> (Vec<(u32, String)>, usize) {
        let printed = failure.map(ToString::to_string).unwrap_or_default();
        let fatal = (0..).zip(&self.sidecars).filter_map(|(sidecar, state)| Some((sidecar, state.fatal.clone()?)));
        let mut seen = BTreeSet::new();
        let is_new = |(_, reason): &(u32, String)| !has_first_line(&printed, reason) && seen.insert(reason.clone());
        let mut others: Vec<(u32, String)> = fatal.filter(is_new).collect();
        let more = others.len().saturating_sub(FATAL_REASONS_MAX);
        others.truncate(FATAL_REASONS_MAX);
        (others, more)
    }

    fn root_cause(&self) -> Option<RootCause> {
        Some(outcome::root_cause(&self.reports(), self.first_failed?, &self.losses()))
    }

    fn losses(&self) -> Losses {
        let sidecars = (0..).zip(&self.sidecars).filter(|(_, sidecar)| sidecar.is_lost);
        let hosts = self.hosts.iter().enumerate().filter(|(_, host)| host.is_lost);
        Losses {
            sidecars: sidecars.map(|(sidecar, _)| sidecar).collect(),
            hosts: hosts.map(|(host, _)| host).collect(),
        }
    }

    fn reports(&self) -> Vec<RankReport> {
        let report = |(rank, worker): (u32, &WorkerState)| RankReport {
            left: self.left.iter().position(|left| *left == rank),
            status: worker.exited,
            is_stopped: worker.is_stopped,
            operations: worker.operations,
            stderr_tail: worker.stderr_tail.clone().unwrap_or_default(),
        };
        (0..).zip(&self.workers).map(report).collect()
    }

    pub(super) fn sidecar_failure(&self, sidecar: u32, status: Status) -> Failure {
        let host = self.placement.host_of_sidecar(sidecar as usize).to_owned();
        let log_tail = self.sidecars[sidecar as usize].log.lines();
        Failure::Sidecar { sidecar, served: self.served(sidecar), host, status, log_tail }
    }

    pub(super) fn host_failure(&self, host: usize, status: Status) -> Failure {
        let state = &self.hosts[host];
        let status = LinkStatus { remote: state.remote, status };
        let (greeted, stderr_tail) = (state.hello.is_some(), state.stderr.lines());
        let trouble = Trouble::of(Some(status.status), &stderr_tail).filter(|_| status.remote);
        let (host, placed) = (self.host_name(host), self.placement.ranks_of_host(host));
        if greeted {
            Failure::Lost { host, placed, status, stderr_tail }
        } else {
            Failure::Unreachable { host, placed, status, trouble, stderr_tail }
        }
    }

    /// Whether the failed worker, its last call and its last lines are known.
    pub(in super::super) fn worker_failure_is_complete(&self) -> bool {
        let has_exited = |rank: &u32| self.workers[*rank as usize].exited.is_some();
        let sidecar_runs = |rank: u32| {
            let sidecar = self.placement.sidecars.iter().position(|place| place.ranks.contains(&rank));
            sidecar.is_some_and(|sidecar| self.sidecars[sidecar].exited.is_none() && self.sidecars[sidecar].started)
        };
        let sidecar_noted_it = |rank: u32| self.workers[rank as usize].noted || !sidecar_runs(rank);
        let is_drained = |rank: u32| self.workers[rank as usize].stderr_tail.is_some() && sidecar_noted_it(rank);
        // A process that exits slowly, such as an interpreter that runs exit handlers, may end after those that failed
        // because it left.
        let is_known = match self.root_cause() {
            // Its error may come before the news of the sidecar that it has lost.
            Some(RootCause::Rank(rank)) => is_drained(rank) && !outcome::misses_a_sidecar(&self.reports(), rank),
            Some(RootCause::LeftEarly(_) | RootCause::Sidecar(_) | RootCause::Host(_)) => {
                self.first_failed.is_some_and(is_drained)
            }
            None => false,
        };
        self.left_before_the_first_failed().iter().all(has_exited) && is_known
    }

    fn left_before_the_first_failed(&self) -> &[u32] {
        let end = self.left.iter().position(|rank| Some(*rank) == self.first_failed);
        &self.left[..end.unwrap_or(self.left.len())]
    }
}

/// How many reasons of sidecars are printed besides that of the job's end.
const FATAL_REASONS_MAX: usize = 32;
