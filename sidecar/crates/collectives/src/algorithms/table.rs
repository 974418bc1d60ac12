//! The table of algorithms. Planner, cost model, checker and tests all read it: a new algorithm is one file in this folder
//! and one line here. (A new name also needs a variant of [`ronde_wire::Algorithm`], because orders carry it.)

use ronde_wire::{Algorithm, Member};

use super::{
    Predicted, binomial_broadcast, binomial_reduce, direct, dissemination, halving_doubling, linear_gather,
    linear_scatter, local, pairwise_alltoall, recursive_doubling, ring_allgather, ring_allreduce, ring_reduce_scatter,
};
use crate::inputs::Inputs;
use crate::plan::{Plan, WorkKind as Kind};

/// A row of the table: one implementation of one algorithm.
pub struct Entry {
    /// The name that a tuning carries. Several rows may share one, for different kinds of work.
    pub algorithm: Algorithm,
    /// The numbers of members that it supports.
    supports: fn(members: usize) -> bool,
    /// The kinds of work that it performs.
    performs: fn(kind: &Kind) -> bool,
    /// Returns one member's plan.
    pub(crate) plan: fn(me: Member, inputs: &Inputs<'_>) -> Plan,
    /// Returns the closed form of all members' plans.
    pub(crate) predicted: fn(inputs: &Inputs<'_>) -> Predicted,
}

/// A row, from algorithm, supported numbers of members, kinds of work, and the module with `plan` and `predicted`.
macro_rules! entry {
    ($algorithm:ident, $supports:expr, $performs:expr, $module:ident) => {
        Entry {
            algorithm: Algorithm::$algorithm,
            supports: $supports,
            performs: $performs,
            plan: $module::plan,
            predicted: $module::predicted,
        }
    };
}

/// All algorithms. Where several perform the same work, [`crate::algorithm_of`] chooses the cheapest one; of equal ones it
/// chooses the first.
pub const TABLE: &[Entry] = &[
    entry!(Local, one, |_| true, local),
    entry!(RecursiveDoubling, several, |kind| matches!(kind, Kind::AllReduce), recursive_doubling),
    entry!(HalvingDoubling, several, |kind| matches!(kind, Kind::AllReduce), halving_doubling),
    entry!(Ring, several, |kind| matches!(kind, Kind::AllReduce), ring_allreduce),
    entry!(Direct, several, |kind| kind.is_coded() || kind.is_nary(), direct),
    entry!(Ring, several, |kind| matches!(kind, Kind::ReduceScatter), ring_reduce_scatter),
    entry!(BinomialTree, several, |kind| matches!(kind, Kind::Reduce { .. }), binomial_reduce),
    entry!(BinomialTree, several, |kind| matches!(kind, Kind::Broadcast { .. }), binomial_broadcast),
    entry!(Ring, several, |kind| matches!(kind, Kind::AllGather), ring_allgather),
    entry!(Linear, several, |kind| matches!(kind, Kind::Gather { .. }), linear_gather),
    entry!(Linear, several, |kind| matches!(kind, Kind::Scatter { .. }), linear_scatter),
    entry!(Pairwise, several, |kind| matches!(kind, Kind::AllToAll), pairwise_alltoall),
    entry!(Dissemination, several, |kind| matches!(kind, Kind::Barrier), dissemination),
];

const fn one(members: usize) -> bool {
    members <= 1
}

const fn several(members: usize) -> bool {
    members > 1
}

impl Entry {
    /// Whether this implementation performs a kind of work over so many members.
    #[must_use]
    pub fn performs(&self, kind: &Kind, members: usize) -> bool {
        (self.supports)(members) && (self.performs)(kind)
    }
}

/// The algorithms that perform a kind of work over so many members, in the order of the table.
pub fn performing(kind: &Kind, members: usize) -> impl Iterator<Item = Algorithm> + '_ {
    TABLE.iter().filter(move |entry| entry.performs(kind, members)).map(|entry| entry.algorithm)
}

/// The implementation of an algorithm for a kind of work over so many members.
pub(crate) fn find(algorithm: Algorithm, kind: &Kind, members: usize) -> Option<&'static Entry> {
    TABLE.iter().find(|entry| entry.algorithm == algorithm && entry.performs(kind, members))
}
