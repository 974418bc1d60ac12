//! Binomial trees: members are numbered from the root.

use ronde_wire::Member;

use super::{member, root_member};
use crate::inputs::Inputs;

/// A binomial tree over all members. The *position* of member `m` is `v = (m - root's member) mod n` (MPI libraries call it
/// relative or virtual rank).
pub(super) struct BinomialTree {
    pub(super) members: usize,
    /// `ceil(log2 n)`: the levels of a binomial tree.
    pub(super) depth: u32,
    root: usize,
}

impl BinomialTree {
    pub(super) fn new(inputs: &Inputs<'_>) -> Self {
        let members = inputs.members();
        let root = root_member(inputs).index();
        Self { members, depth: members.next_power_of_two().ilog2(), root }
    }

    pub(super) fn position_of(&self, me: usize) -> usize {
        (me + self.members - self.root) % self.members
    }

    pub(super) fn member_at(&self, position: usize) -> Member {
        member((position + self.root) % self.members)
    }
}
