//! The report of an elastic job.

use serde::Serialize;

use super::super::failure::Failure;
use super::super::report::{HostReport, Report, SidecarReport};
use super::job::ElasticJob;

/// The report of a membership.
#[derive(Clone, Debug, Serialize)]
pub(in super::super) struct MembershipReport {
    /// Its number.
    pub(super) number: u64,
    /// When it was committed, in seconds since the start of the launcher.
    pub(super) began_s: f64,
    /// How many ranks it had.
    pub(super) ranks: usize,
    /// The worker of each rank.
    pub(super) workers: Vec<u32>,
    /// Why it replaced the one before.
    pub(super) cause: String,
    /// From the loss that it followed until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) recovery_s: Option<f64>,
}

impl ElasticJob<'_> {
    /// The report: ranks of hosts and sidecars are those of the last membership.
    pub(super) fn report(&self, failure: Option<&Failure>, exit: u8) -> Report {
        let last = self.plan.committed();
        let ranks_of = |sidecar: u32| -> Vec<u32> {
            let seats = last.iter().flat_map(|members| members.seats.iter());
            (0..).zip(seats).filter(|(_, seat)| seat.sidecar == sidecar).map(|(rank, _)| rank).collect()
        };
        let sidecars: Vec<SidecarReport> = self
            .table
            .sidecars
            .iter()
            .map(|(index, facts)| SidecarReport {
                sidecar: *index,
                host: self.table.host_of_sidecar(*index),
                ranks: ranks_of(*index),
                summary: facts.summary.clone(),
            })
            .collect();
        let mut hosts: Vec<HostReport> = Vec::new();
        for sidecar in sidecars.iter().filter(|sidecar| !sidecar.ranks.is_empty()) {
            match hosts.iter_mut().find(|host| host.host == sidecar.host) {
                Some(host) => host.ranks.extend(&sidecar.ranks),
                None => hosts.push(HostReport { host: sidecar.host.clone(), ranks: sidecar.ranks.clone() }),
            }
        }
        Report {
            job: self.settings.job.to_string(),
            ranks: last.map_or(0, |members| u32::try_from(members.seats.len()).unwrap_or(u32::MAX)),
            hosts,
            sidecars,
            seconds: self.began.elapsed().as_secs_f64(),
            exit,
            failure: failure.map(ToString::to_string),
            code: failure.map(|failure| failure.code().to_string()),
            starter_output: Vec::new(),
            memberships: self.memberships.clone(),
        }
    }
}
