//! The operations that ranks perform together.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::Rank;

/// How elements of several ranks become one. The numbers are Horovod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum divided by the number of ranks of the set; integers truncate toward zero.
    Average = 0,
    /// The sum.
    Sum = 1,
    /// Adaptive summation (Maleki et al., 2020).
    Adasum = 2,
    /// The least element; IEEE 754-2019 `minimum`, so NaN wins.
    Min = 3,
    /// The greatest element; IEEE 754-2019 `maximum`, so NaN wins.
    Max = 4,
    /// The product.
    Product = 5,
}

impl ReduceOp {
    /// The name that users see.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Average => "average",
            Self::Sum => "sum",
            Self::Adasum => "adasum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a request asks for. All collectives have their number from the first version of the wire on; an engine refuses
/// by name what it does not perform yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank gets the reduction of all contributions.
    AllReduce {
        /// How elements are combined.
        op: ReduceOp,
    },
    /// Every rank gets the concatenation of all contributions along the first dimension, in rank order.
    AllGather,
    /// Every rank gets its share of rows of the reduction.
    ReduceScatter {
        /// How elements are combined.
        op: ReduceOp,
    },
    /// Every rank gets the contribution of the root.
    Broadcast {
        /// The global rank whose tensor is sent.
        root: Rank,
    },
    /// Every rank sends a slice of rows to every other.
    AllToAll {
        /// Rows for each rank of the set, in rank order.
        splits: Vec<u64>,
    },
    /// The root gets the reduction.
    Reduce {
        /// How elements are combined.
        op: ReduceOp,
        /// The global rank that gets the result.
        root: Rank,
    },
    /// The root gets the concatenation.
    Gather {
        /// The global rank that gets the result.
        root: Rank,
    },
    /// Every rank gets its rows of the root's tensor.
    Scatter {
        /// The global rank whose tensor is cut.
        root: Rank,
    },
    /// One rank hands its tensor to another.
    Send {
        /// The receiving global rank.
        to: Rank,
        /// Distinguishes messages between the same two ranks.
        tag: u32,
    },
    /// The other side of [`Collective::Send`].
    Recv {
        /// The sending global rank.
        from: Rank,
        /// Distinguishes messages between the same two ranks.
        tag: u32,
    },
    /// Nobody passes before everybody has come.
    Barrier,
    /// The rank has no more tensors and takes part with zeros until all have joined.
    Join,
}

impl Collective {
    /// The name in messages and logs: upper case, as Horovod's users know it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "ALLREDUCE",
            Self::AllGather => "ALLGATHER",
            Self::ReduceScatter { .. } => "REDUCESCATTER",
            Self::Broadcast { .. } => "BROADCAST",
            Self::AllToAll { .. } => "ALLTOALL",
            Self::Reduce { .. } => "REDUCE",
            Self::Gather { .. } => "GATHER",
            Self::Scatter { .. } => "SCATTER",
            Self::Send { .. } => "SEND",
            Self::Recv { .. } => "RECV",
            Self::Barrier => "BARRIER",
            Self::Join => "JOIN",
        }
    }

    /// The reduction, where there is one.
    #[must_use]
    pub const fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op } | Self::ReduceScatter { op } | Self::Reduce { op, .. } => Some(*op),
            _ => None,
        }
    }

    /// The root, where there is one.
    #[must_use]
    pub const fn root(&self) -> Option<Rank> {
        match self {
            Self::Broadcast { root } | Self::Reduce { root, .. } | Self::Gather { root } | Self::Scatter { root } => {
                Some(*root)
            }
            _ => None,
        }
    }
}
