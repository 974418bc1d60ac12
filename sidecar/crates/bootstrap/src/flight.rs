//! Flight records: the newest operations of a sidecar and of its ranks, as sidecars write them and `ronde debug` reads them.
//!
//! A record is one JSON document. Its texts come from workers and, once it is a file, from anywhere: [`FlightRecord::parse`]
//! bounds them. It contains names, sizes, times and call sites, and never the contents of a tensor.

mod directory;
mod parse;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use directory::{add, default_directory, write};
pub use parse::Unreadable;

/// The format that this version writes and reads.
pub const VERSION: u32 = 1;
/// The value of the field `format`.
pub const FORMAT: &str = "ronde-flight-record";
/// The newest operations of each rank, and of each sidecar, that are kept.
pub const OPERATIONS_MAX: usize = 2_000;
/// The names that wait, and the process sets, that a record has at most.
pub const WAITING_MAX: usize = 100;
/// The end of the name of a file with a record.
pub const FILE_SUFFIX: &str = ".flight.json";
/// The most bytes of a file that is read.
pub const FILE_BYTES_MAX: u64 = 256 << 20;

/// Whether a sidecar records, and where it writes after a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FlightDirectory {
    /// It records and writes into [`default_directory`].
    #[default]
    Default,
    /// It records and writes into this directory.
    At(PathBuf),
    /// It does not record.
    Off,
}

impl FlightDirectory {
    /// Parses the option's value: a directory, or `off`.
    ///
    /// # Errors
    /// For an empty text.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("it is empty; give a directory, or off".to_owned()),
            "off" => Ok(Self::Off),
            path => Ok(Self::At(path.into())),
        }
    }

    /// The same with a path as seen from this process's directory.
    pub(crate) fn absolute(self) -> Self {
        match self {
            Self::At(path) => Self::At(std::path::absolute(&path).unwrap_or(path)),
            other => other,
        }
    }

    /// The directory of the records of a job; `None` if nothing is recorded.
    #[must_use]
    pub fn of_job(&self, job: &str) -> Option<PathBuf> {
        match self {
            Self::Off => None,
            Self::At(path) => Some(path.clone()),
            Self::Default => Some(default_directory().join(job)),
        }
    }
}

/// What one sidecar recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The job.
    pub job: String,
    /// The run of the job, a random text of the launcher: another run may have the same name. Empty without a launcher.
    pub run: String,
    /// The sidecar.
    pub sidecar: u32,
    /// When the record was made, in microseconds since the Unix epoch, by the clock of the sidecar's host. All other times
    /// are by the same clock.
    pub made_us: u64,
    /// The failure after which it was written; `None` for a record on demand.
    pub failure: Option<String>,
    /// The newest epoch that began.
    pub epoch: u64,
    /// When it began.
    pub epoch_began_us: u64,
    /// The sidecar of each rank of the job.
    pub placement: Vec<u32>,
    /// The process sets other than that of all ranks.
    pub sets: Vec<SetRecord>,
    /// The ranks that the sidecar serves.
    pub ranks: Vec<RankRecord>,
    /// The newest operations that the sidecar performed or performs, oldest first.
    pub operations: Vec<OperationRecord>,
    /// For each rank, how often it was the last to be ready; known to the coordinator only.
    pub last_to_be_ready: Vec<u64>,
    /// For each rank, the microseconds for which the others have waited for it; known to the coordinator only.
    pub waited_for_us: Vec<u64>,
    /// The names that wait for ranks, or that did when the epoch ended, oldest first; known to the coordinator only. Cut to a bounded number.
    pub waiting: Vec<WaitingRecord>,
}

/// A process set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetRecord {
    /// Its number.
    pub id: u32,
    /// Its ranks.
    pub ranks: Vec<u32>,
}

/// The newest requests of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRecord {
    /// The rank.
    pub rank: u32,
    /// How many it has submitted, those included that are not kept any more.
    pub submitted: u64,
    /// Those that are kept, oldest first.
    pub requests: Vec<RequestRecord>,
}

/// A request of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// The process set.
    pub set: u32,
    /// The name, as the ranks know it.
    pub name: String,
    /// The collective in lower case.
    pub collective: String,
    /// The bytes of the rank's input.
    pub bytes: u64,
    /// The place in the worker's program, as `file:line`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    /// The epoch in which it was submitted.
    pub epoch: u64,
    /// When the sidecar received it.
    pub submitted_us: u64,
    /// When it entered the negotiation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced_us: Option<u64>,
    /// When it was ordered, and as which operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordered: Option<OrderedRecord>,
    /// Whether the rank has withdrawn it, because of its operation timeout or because nothing waits for the result.
    #[serde(default, skip_serializing_if = "is_false")]
    pub withdrawn: bool,
    /// When and how it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<EndRecord>,
}

/// When a request was ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderedRecord {
    /// The number of the operation in its epoch.
    pub seq: u64,
    /// When.
    pub at_us: u64,
    /// Whether a schedule has admitted it: the ranks of this sidecar have submitted it, those of others maybe not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub scheduled: bool,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndRecord {
    /// When.
    pub at_us: u64,
    /// Why it failed; `None` if it completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailureRecord>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureRecord {
    /// The kind of failure.
    pub cause: String,
    /// The text for people, cut to its begin.
    pub reason: String,
    /// Whether the failure ended the epoch, so that all pending requests failed.
    pub ends_epoch: bool,
}

/// An operation of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationRecord {
    /// Its epoch.
    pub epoch: u64,
    /// Its number in the epoch.
    pub seq: u64,
    /// Whether a schedule has admitted it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub scheduled: bool,
    /// The name of its first tensor.
    pub name: String,
    /// How many tensors travel together.
    pub tensors: u32,
    /// When it was ordered here.
    pub ordered_us: u64,
    /// When it was handed to the threads that perform it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_us: Option<u64>,
    /// When all threads of this sidecar had done their parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub performed_us: Option<u64>,
    /// Why it was not performed, if it was not: dropped to be negotiated again, or the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// A name that waits for ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingRecord {
    /// The process set.
    pub set: u32,
    /// The name.
    pub name: String,
    /// The collective in lower case.
    pub collective: String,
    /// The ranks that have not announced it.
    pub missing: Vec<u32>,
    /// Since when the first rank waits.
    pub since_us: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// The files with records that a path leads to: itself, or those in the directory, sorted.
///
/// # Errors
/// When it cannot be read, or a directory holds none.
pub fn files(path: &Path) -> Result<Vec<PathBuf>, String> {
    let unreadable = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    if !std::fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).map_err(unreadable)?.flatten().map(|entry| entry.path());
    let is_record = |path: &PathBuf| path.to_string_lossy().ends_with(FILE_SUFFIX);
    let mut found: Vec<PathBuf> = entries.filter(is_record).collect();
    found.sort();
    if found.is_empty() {
        return Err(format!("{} holds no flight record (*{FILE_SUFFIX})", path.display()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
