//! What `ronde job` and the launcher of an elastic job send each other: one JSON object in a line each way.

use serde::{Deserialize, Serialize};

/// To the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// How is the job?
    Status,
    /// Let the workers of a host leave, and do not use it any more.
    Drain {
        /// Its name, as the job knows it.
        host: String,
        /// Use it again instead.
        undo: bool,
    },
    /// Change the wanted number of workers.
    Scale {
        /// It.
        workers: u32,
    },
}

/// From the launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// How the job is.
    Status(Box<JobStatus>),
    /// The command is executed.
    Done {
        /// What follows, for people.
        text: String,
    },
    /// The command cannot be executed.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
}

/// The state of an elastic job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JobStatus {
    /// Its name.
    pub(crate) job: String,
    /// The process of its launcher.
    pub(crate) launcher_pid: u32,
    /// The time since the launcher's start, in seconds.
    pub(crate) seconds: f64,
    /// The number of the committed membership; 0 before the first.
    pub(crate) membership: u64,
    /// The change that is under way.
    pub(crate) next: Option<NextMembership>,
    /// How many workers the job is to have.
    pub(crate) wanted: u32,
    /// `--min-np`.
    pub(crate) min: u32,
    /// `--max-np`.
    pub(crate) max: u32,
    /// How often the membership has changed.
    pub(crate) changes: u32,
    /// The workers, by rank; those without a rank follow.
    pub(crate) workers: Vec<WorkerStatus>,
    /// The hosts, in the order in which the job got them.
    pub(crate) hosts: Vec<HostStatus>,
    /// What is left out after failures.
    pub(crate) exclusions: Vec<ExclusionStatus>,
    /// The memberships until now.
    pub(crate) memberships: Vec<PastMembership>,
}

/// A membership that is not committed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NextMembership {
    /// Its number.
    pub(crate) number: u64,
    /// How many ranks it has.
    pub(crate) ranks: u32,
    /// What it waits for.
    pub(crate) waits_for: String,
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerStatus {
    /// Its rank in the committed membership.
    pub(crate) rank: Option<u32>,
    /// Its number.
    pub(crate) worker: u32,
    /// Its host.
    pub(crate) host: String,
    /// Its sidecar.
    pub(crate) sidecar: u32,
    /// Its process on its host.
    pub(crate) pid: Option<u32>,
    /// What it does.
    pub(crate) state: WorkerActivity,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerActivity {
    /// It is about to be started.
    Planned,
    /// Its process runs, and has not joined yet.
    Starting,
    /// It waits for a membership that has it.
    Waiting,
    /// It has a rank in the membership, which it has not taken yet.
    Returning,
    /// It has taken its rank.
    Training,
    /// It has a rank, and leaves at its next commit.
    Leaving,
    /// It was ordered to end.
    Ending,
}

/// A host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostStatus {
    /// Its name.
    pub(crate) host: String,
    /// How many slots it has; 0 when it is not listed any more.
    pub(crate) slots: u32,
    /// How many workers it has.
    pub(crate) workers: u32,
    /// Whether it is drained.
    pub(crate) drained: bool,
}

/// A host or slot that is left out after failures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExclusionStatus {
    /// The host.
    pub(crate) host: String,
    /// The slot; the whole host without one.
    pub(crate) slot: Option<u32>,
    /// For how many seconds from now; for the rest of the job without a number.
    pub(crate) seconds: Option<f64>,
}

/// A membership that was committed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PastMembership {
    /// Its number.
    pub(crate) number: u64,
    /// When it was committed, in seconds since the launcher's start.
    pub(crate) began_s: f64,
    /// How many ranks it had.
    pub(crate) ranks: usize,
    /// Why it replaced the one before.
    pub(crate) cause: String,
}

/// The most bytes of an answer: 4,096 workers and as many hosts, and the last memberships.
pub(crate) const ANSWER_BYTES_MAX: u64 = 16 << 20;
