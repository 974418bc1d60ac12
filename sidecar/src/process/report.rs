//! The report of `ronde sidecar --report`, and the error with which a sidecar ends.

use std::path::Path;

use anyhow::Context;
use ronde_bootstrap::codes::{Code, coded, error_with_code};
use ronde_bootstrap::messages::Summary;
use ronde_wire::SidecarIndex;

/// Writes the report atomically, so that a reader never sees a part of it.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn write(path: &Path, me: SidecarIndex, summary: &Summary, failure: Option<&str>) -> anyhow::Result<()> {
    let fresh = path.with_extension("new");
    let text = serde_json::json!({ "sidecar": me.0, "summary": summary, "failure": failure });
    let written = std::fs::write(&fresh, format!("{text}\n")).and_then(|()| std::fs::rename(&fresh, path));
    let path = path.display();
    written.with_context(|| format!("cannot write the report {path}")).context(Code::ReportUnwritable)
}

/// Turns the failure of the job into an error. A report that could not be written adds a line to it, and is the error
/// itself when the job has not failed.
///
/// # Errors
/// When the job has failed or the report was not written.
pub(super) fn outcome(failure: Option<String>, written: anyhow::Result<()>) -> anyhow::Result<()> {
    let Some(mut text) = failure else { return written };
    if let Err(error) = written {
        text = Code::SidecarCannotGoOn.mark(&text);
        text.push_str(&format!("\n{}", coded(&error, Code::ReportUnwritable)));
    }
    Err(error_with_code(text, Code::SidecarCannotGoOn))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text and the exit status of a sidecar that ends with a result.
    fn ending(result: anyhow::Result<()>) -> Option<(String, u8)> {
        let code = Code::SidecarCannotGoOn;
        result.err().map(|error| (coded(&error, code), Code::of_error(&error, code).exit_status()))
    }

    #[test]
    fn a_report_that_cannot_be_written_does_not_hide_the_failure() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (written, missing) = (directory.path().join("a.json"), directory.path().join("none/a.json"));
        let end = |path: &Path, failure: Option<&str>| {
            let result = write(path, SidecarIndex(0), &Summary::default(), failure);
            ending(outcome(failure.map(str::to_owned), result))
        };
        let unwritten = format!("cannot write the report {}: No such file", missing.display());

        assert_eq!(end(&written, None), None);
        let (text, status) = end(&missing, None).expect("the report is missing");
        assert!(text.starts_with(&unwritten) && text.ends_with(" [RONDE-E211]"), "{text}");
        assert_eq!(status, 73);

        let failure = Some("rank 1 was killed");
        assert_eq!(end(&written, failure), Some(("rank 1 was killed [RONDE-E402]".to_owned(), 69)));
        let (text, status) = end(&missing, failure).expect("the job has failed");
        let (first, second) = text.split_once('\n').expect("two lines");
        assert_eq!((first, status), ("rank 1 was killed [RONDE-E402]", 69));
        assert!(second.starts_with(&unwritten) && second.ends_with(" [RONDE-E211]"), "{text}");

        let (text, _) = end(&missing, Some("peer 1 did not connect [RONDE-E406]")).expect("the job has failed");
        assert!(text.starts_with("peer 1 did not connect [RONDE-E406]\ncannot write"), "{text}");
    }
}
