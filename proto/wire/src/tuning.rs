//! The inputs of a plan that the coordinator chooses at run time and sends in the order.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The algorithm of a plan. docs/ALGORITHMS.md gives costs and sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Algorithm {
    /// One member serves all ranks: local reduction or copy, nothing is sent.
    Local,
    /// Ring: reduce-scatter then all-gather for an all-reduce, either half alone for the other two.
    Ring,
    /// Recursive doubling on whole spans; excess members fold into a neighbour first.
    RecursiveDoubling,
    /// A binomial tree, pipelined by chunks.
    BinomialTree,
    /// Dissemination: in round k a token travels 2^k members ahead.
    Dissemination,
    /// Recursive halving, then recursive doubling; excess members fold into a neighbour first.
    HalvingDoubling,
    /// Pairwise exchange: in round r each member sends to the member r places ahead and receives from the one r places
    /// back.
    Pairwise,
    /// Everything to or from the root at once.
    Linear,
    /// Two stages without forwarding: pieces go to their owners, results come from their owners.
    Direct,
    /// Nothing is exchanged: the order carries the contributions of all ranks, and each member computes as if it served
    /// all of them.
    Eager,
}

impl Algorithm {
    /// The name in logs, metrics and reasons.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Ring => "ring",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::BinomialTree => "binomial-tree",
            Self::Dissemination => "dissemination",
            Self::HalvingDoubling => "halving-doubling",
            Self::Pairwise => "pairwise",
            Self::Linear => "linear",
            Self::Direct => "direct",
            Self::Eager => "eager",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a plan is divided. The order carries it; it is never chosen locally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tuning {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The largest chunk, in bytes: [`crate::limits::CHUNK_BYTES_MIN`] to [`crate::limits::CHUNK_BYTES_MAX`].
    pub chunk_bytes: u32,
    /// The number of lanes of the plan: 1 to [`crate::limits::LANES_MAX`].
    pub lanes: u16,
    /// Sub-schedules in flight at once on each lane: 1 to [`crate::limits::WINDOW_MAX`].
    pub window: u16,
}

/// A value that a search for the best tuning may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TuningParameter {
    /// The bytes of tensors that share a bucket.
    FusionThreshold,
    /// The chunk size.
    ChunkBytes,
    /// The most lanes of an operation.
    Lanes,
    /// The bytes of a contribution up to which operations are eager.
    EagerBytes,
    /// The sizes up to which algorithms with few rounds are chosen, by the latency of a round in the cost model.
    Algorithms,
    /// Whether an all-reduce first reduces the ranks of each sidecar.
    HierarchicalAllreduce,
}

impl TuningParameter {
    /// All parameters.
    pub const ALL: [Self; 6] = [
        Self::FusionThreshold,
        Self::ChunkBytes,
        Self::Lanes,
        Self::EagerBytes,
        Self::Algorithms,
        Self::HierarchicalAllreduce,
    ];

    /// The parameters whose values do not change a bit of a result.
    pub const KEEP_BITS: [Self; 3] = [Self::FusionThreshold, Self::ChunkBytes, Self::Lanes];

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FusionThreshold => "fusion-threshold",
            Self::ChunkBytes => "chunk-bytes",
            Self::Lanes => "lanes",
            Self::EagerBytes => "eager-bytes",
            Self::Algorithms => "algorithms",
            Self::HierarchicalAllreduce => "hierarchical-allreduce",
        }
    }
}

impl fmt::Display for TuningParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TuningParameter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let known = Self::ALL.into_iter().find(|parameter| parameter.name() == text.trim());
        known.ok_or_else(|| format!("there is no parameter {text:?}; there are {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_a_wrong_one_lists_the_others() {
        for parameter in TuningParameter::ALL {
            assert_eq!(parameter.name().parse(), Ok(parameter));
        }
        let error = "cycle-time".parse::<TuningParameter>().expect_err("no such parameter");
        assert!(error.contains("\"cycle-time\"; there are fusion-threshold, chunk-bytes"), "{error}");
    }
}
