//! `--report`: a job's placement, traffic and outcome as JSON.

use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use ronde_bootstrap::messages::Summary;

use super::elastic::MembershipReport;
use super::failure::Failure;

/// The whole report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The job.
    pub(super) job: String,
    /// The number of ranks.
    pub(super) ranks: u32,
    /// The hosts with ranks.
    pub(super) hosts: Vec<HostReport>,
    /// By sidecar index.
    pub(super) sidecars: Vec<SidecarReport>,
    /// From the start of the launcher to the end of the last process.
    pub(super) seconds: f64,
    /// The launcher's exit code.
    pub(super) exit: u8,
    /// The failure, if the exit code is not 0.
    pub(super) failure: Option<String>,
    /// Its error code, which `ronde explain` explains.
    pub(super) code: Option<String>,
    /// The last lines that the command of `--starter` wrote to standard error.
    #[serde(rename = "starter_said")]
    pub(super) starter_output: Vec<String>,
    /// The committed memberships of an elastic job.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) memberships: Vec<MembershipReport>,
}

/// The report of a host.
#[derive(Debug, Serialize)]
pub(super) struct HostReport {
    /// Its name as given.
    pub(super) host: String,
    /// Its ranks.
    pub(super) ranks: Vec<u32>,
}

/// The report of a sidecar.
#[derive(Debug, Serialize)]
pub(super) struct SidecarReport {
    /// Its index.
    pub(super) sidecar: u32,
    /// Its host's name.
    pub(super) host: String,
    /// Its ranks.
    pub(super) ranks: Vec<u32>,
    /// Its summary; absent when it could not send one.
    pub(super) summary: Option<Summary>,
}

impl Report {
    /// Notes a failure after all else.
    pub(super) fn fail(&mut self, failure: &Failure) {
        self.exit = failure.exit_code();
        (self.failure, self.code) = (Some(failure.to_string()), Some(failure.code().to_string()));
    }

    /// Writes the report to a file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(self).context("a report is always JSON")?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("cannot write the report {}", path.display()))
    }
}
