//! Newtypes for every number and name that travels, so that a rank cannot be passed as a sidecar.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::limits;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $label:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, "{}"), self.0)
            }
        }
    };
}

number!(
    /// A worker's number in the job's world, as in MPI and Horovod: `0..world size`.
    Rank(u32), "rank "
);
number!(
    /// A worker's number within the job; never reused within a job. It stays while membership, and with it the rank,
    /// changes. In a job that is not elastic it is the rank.
    WorkerNumber(u32), "worker "
);
number!(
    /// A sidecar's number within the job; an index is never reused within a job.
    SidecarIndex(u32), "sidecar "
);
number!(
    /// The position of a sidecar among the sidecars that host ranks of one process set, by ascending sidecar index.
    Member(u32), "member "
);
number!(
    /// A process set; 0 is the set of all ranks.
    SetId(u32), "process set "
);
number!(
    /// One of the parallel FIFO channels between two sidecars.
    Lane(u16), "lane "
);
/// A period of constant membership; begins when all ranks have attached and ends when one leaves or dies.
///
/// In an elastic job the upper 32 bits are the number of the membership, so that no two epochs of a job have the same
/// number, whoever survives. Such an epoch is written as "epoch 4.1".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The number before the first epoch of a membership of an elastic job.
    #[must_use]
    pub const fn before_membership(membership: u64) -> Self {
        Self(membership << 32)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 >> 32, self.0 & u64::from(u32::MAX)) {
            (0, epoch) => write!(f, "epoch {epoch}"),
            (membership, epoch) => write!(f, "epoch {membership}.{epoch}"),
        }
    }
}

number!(
    /// The job-wide number that the coordinator gives to every ordered operation; starts at 1 in each epoch.
    Seq(u64), "operation "
);
number!(
    /// The number that a worker gives to one submitted request, unique within its session.
    RequestId(u64), "request "
);
number!(
    /// Distinguishes two processes of a sidecar with the same index; drawn at random when the process starts.
    Incarnation(u64), "incarnation "
);

/// An ordered operation: its number within its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct OpId {
    /// The epoch.
    pub epoch: Epoch,
    /// The number within the epoch; 0 for none.
    pub seq: Seq,
}

impl SetId {
    /// The set of all ranks.
    pub const WORLD: Self = Self(0);
}

impl Member {
    /// The position as an index into [`crate::SetTopology::members`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Rank {
    /// The rank as an index into per-rank tables.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl SidecarIndex {
    /// The index as an index into per-sidecar tables.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A name that breaks the rules of its type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A tensor name is empty or longer than [`limits::NAME_BYTES_MAX`].
    #[error("a tensor name has 1 to {max} bytes of UTF-8, not {len}", max = limits::NAME_BYTES_MAX)]
    TensorLength {
        /// The length that was given, in bytes.
        len: usize,
    },
    /// A job name has characters that are not allowed in a certificate's URI, or the wrong length.
    #[error("a job name has 1 to {max} characters of a-z, 0-9, '-', '_' and '.', not {given:?}", max = limits::JOB_NAME_BYTES_MAX)]
    Job {
        /// The given name, truncated to a printable length.
        given: String,
    },
}

/// The name by which ranks agree on an operation: 1 to [`limits::NAME_BYTES_MAX`] bytes of UTF-8. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TensorName(Arc<str>);

impl TensorName {
    /// Checks and wraps a name.
    ///
    /// # Errors
    /// [`NameError::TensorLength`] when the name is empty or too long.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, NameError> {
        let name = name.into();
        if name.is_empty() || name.len() > limits::NAME_BYTES_MAX {
            return Err(NameError::TensorLength { len: name.len() });
        }
        Ok(Self(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TensorName {
    type Error = NameError;
    fn try_from(name: String) -> Result<Self, NameError> {
        Self::new(name)
    }
}

impl From<TensorName> for String {
    fn from(name: TensorName) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a job, to which its certificates and sessions are bound.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct JobName(Arc<str>);

impl JobName {
    /// Checks and wraps a job name: it must be usable as a path segment of a URI and of a file name.
    ///
    /// # Errors
    /// [`NameError::Job`] when it is empty, too long, or has other characters than `a-z 0-9 - _ .`.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, NameError> {
        let name = name.into();
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        let dots_only = name.chars().all(|c| c == '.');
        if name.is_empty() || name.len() > limits::JOB_NAME_BYTES_MAX || dots_only || !name.chars().all(allowed) {
            return Err(NameError::Job { given: name.chars().take(limits::JOB_NAME_BYTES_MAX).collect() });
        }
        Ok(Self(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for JobName {
    type Error = NameError;
    fn try_from(name: String) -> Result<Self, NameError> {
        Self::new(name)
    }
}

impl From<JobName> for String {
    fn from(name: JobName) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
