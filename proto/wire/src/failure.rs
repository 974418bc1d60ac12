//! Why an operation, a session or an epoch ended: the failure that every waiter gets, with its culprit.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{Rank, SidecarIndex, TensorName};
use crate::limits;
use crate::record::{Record, head, printable};

/// How the reason of an epoch begins that ended because tensors waited for longer than the limit of `stall_shutdown`. The
/// coordinator writes it, and sidecars distinguish such an end from one that a rank has asked for.
pub const STALL_SHUTDOWN: &str = "ronde has been shut down: tensors have waited";

/// What a worker writes into the reason of a request that it withdraws because its operation timeout has passed. Its sidecar
/// distinguishes such a request from one that the program has cancelled.
pub const OPERATION_TIMEOUT: &str = "the operation timeout of this rank";

/// The kind of a failure. It determines whether the job continues and which exception a user sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// Ranks disagree about a named operation. The operation fails on all of them; the job continues.
    Mismatch,
    /// A rank's request was refused or withdrawn. The operation fails on all ranks; the job continues.
    Refused,
    /// A worker died or went silent. The epoch ends.
    RankLost,
    /// A sidecar died or went silent. The epoch ends.
    SidecarLost,
    /// A rank shut down in an orderly way while others had operations pending. The epoch ends.
    ShutDown,
    /// A rank waited longer than its deadline; nothing else failed.
    TimedOut,
    /// An invariant of ronde itself broke. The epoch ends.
    Bug,
}

/// The party at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Blame {
    /// The callers' programs.
    Caller,
    /// Another process or host.
    Peer,
    /// ronde.
    Bug,
}

impl Cause {
    /// The party at fault.
    #[must_use]
    pub const fn blame(self) -> Blame {
        match self {
            Self::Mismatch | Self::Refused | Self::ShutDown | Self::TimedOut => Blame::Caller,
            Self::RankLost | Self::SidecarLost => Blame::Peer,
            Self::Bug => Blame::Bug,
        }
    }

    /// Whether the epoch, and with it every pending operation, ends.
    #[must_use]
    pub const fn ends_epoch(self) -> bool {
        match self {
            Self::Mismatch | Self::Refused | Self::TimedOut => false,
            Self::RankLost | Self::SidecarLost | Self::ShutDown | Self::Bug => true,
        }
    }
}

/// A failure with its culprit. The text says what happened, where, and what to do; all ranks get the same text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind.
    pub cause: Cause,
    /// The rank at fault or lost, where it is known.
    pub rank: Option<Rank>,
    /// The sidecar at fault or lost, where it is known.
    pub sidecar: Option<SidecarIndex>,
    /// The operation concerned, if there is one.
    pub tensor: Option<TensorName>,
    /// The text for users; at most [`limits::REASON_BYTES_MAX`] bytes.
    pub reason: String,
    /// How a rank failed and what it did last, where that is known.
    pub record: Option<Arc<Record>>,
}

impl Failure {
    /// A failure without culprit; add one with the `with_` methods.
    #[must_use]
    pub fn new(cause: Cause, reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        let mut end = reason.len().min(limits::REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        reason.truncate(end);
        Self { cause, rank: None, sidecar: None, tensor: None, reason, record: None }
    }

    /// The failure with its texts truncated to the limits; for failures from the network.
    #[must_use]
    pub fn within_limits(self) -> Self {
        let reason = Self::new(self.cause, self.reason).reason;
        let record = self.record.map(|record| Arc::new(Arc::unwrap_or_clone(record).within_limits()));
        Self { reason, record, ..self }
    }

    /// A reason as one log line: truncated to the limit, without control characters.
    #[must_use]
    pub fn line(reason: &str) -> String {
        head(&printable(reason), limits::REASON_BYTES_MAX).to_owned()
    }

    /// Whether the epoch ended because tensors waited for too long, rather than because a rank has shut down.
    #[must_use]
    pub fn is_stall(&self) -> bool {
        self.cause == Cause::ShutDown && self.reason.starts_with(STALL_SHUTDOWN)
    }

    /// Adds the record of the rank.
    #[must_use]
    pub fn with_record(mut self, record: Option<Arc<Record>>) -> Self {
        self.record = record;
        self
    }

    /// Names the rank.
    #[must_use]
    pub fn with_rank(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Names the sidecar.
    #[must_use]
    pub fn with_sidecar(mut self, sidecar: SidecarIndex) -> Self {
        self.sidecar = Some(sidecar);
        self
    }

    /// Names the operation.
    #[must_use]
    pub fn with_tensor(mut self, tensor: TensorName) -> Self {
        self.tensor = Some(tensor);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        self.record.as_ref().map_or(Ok(()), |record| record.fmt(f))
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_no_shutdown_by_a_rank() {
        let stall = format!("{STALL_SHUTDOWN} for some ranks for more than 3.0 seconds");
        assert!(Failure::new(Cause::ShutDown, stall.clone()).is_stall());
        assert!(!Failure::new(Cause::ShutDown, format!("rank 1 has left; {stall}")).is_stall());
        assert!(!Failure::new(Cause::TimedOut, stall).is_stall());
    }

    #[test]
    fn a_log_line_is_short_and_has_no_control_characters() {
        assert_eq!(Failure::line("it\nlogged: \x1b[2J"), "it\\nlogged: \\u{1b}[2J");
        let long = Failure::line(&"\u{e9}\r".repeat(10_000));
        assert!(long.len() <= limits::REASON_BYTES_MAX && long.starts_with("\u{e9}\\r\u{e9}"), "{long}");
    }
}
