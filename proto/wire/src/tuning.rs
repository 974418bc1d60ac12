//! The inputs of a plan that the coordinator chooses at run time and sends in the order.

use std::fmt;

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
