//! `--report`: a job's placement, traffic and outcome as JSON.

use std::path::Path;
use std::{fs, io};

use anyhow::Context;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde::Serialize;

use ronde_bootstrap::codes::Code;
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
    pub(super) starter_output: Vec<String>,
    /// The committed memberships of an elastic job.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) memberships: Vec<MembershipReport>,
}

/// Checks before anything starts that the report can be written, without writing: another launcher may check the same file.
///
/// # Errors
/// When it cannot be written.
pub(super) fn check(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let checked = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(Errno::EISDIR),
        Ok(_) => access(path, AccessFlags::W_OK),
        // A link to a file that is not there.
        Err(_) if fs::symlink_metadata(path).is_ok() => Ok(()),
        Err(_) => {
            // With the dot, the parent has to be a directory, and the one of a bare name is the current one.
            let parent = path.parent().unwrap_or(path).join(".");
            access(&parent, AccessFlags::W_OK | AccessFlags::X_OK)
        }
    };
    checked.map_err(io::Error::from).with_context(|| unwritable(path)).context(Code::ReportUnwritable)
}

fn unwritable(path: &Path) -> String {
    format!("cannot write the report {}", path.display())
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
        fs::write(path, text).with_context(|| unwritable(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_of_a_report_leaves_the_folder_as_it_was() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("report");
        check(None).and_then(|()| check(Some(&path))).expect("it can be written");
        assert!(!path.exists(), "it was not there");
        fs::write(&path, "before").expect("ours");
        check(Some(&path)).expect("it can be written");
        assert_eq!(fs::read_to_string(&path).expect("it is there"), "before");
        check(Some(Path::new("/dev/null"))).expect("a device takes it");
        check(Some(Path::new("report-of-a-test"))).expect("a bare name is in the current directory");
        std::os::unix::fs::symlink("/no/such/file", directory.path().join("link")).expect("ours");
        check(Some(&directory.path().join("link"))).expect("it may be made by then");
        for wrong in [directory.path().to_owned(), directory.path().join("missing/report"), path.join("report")] {
            let error = check(Some(&wrong)).expect_err("it cannot be written");
            let text = format!("cannot write the report {}: ", wrong.display());
            assert!(ronde_bootstrap::codes::coded(&error, Code::Bug).starts_with(&text), "{error:?}");
            assert_eq!(Code::of_error(&error, Code::Bug), Code::ReportUnwritable);
        }
    }
}
