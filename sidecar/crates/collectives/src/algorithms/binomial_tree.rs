//! Members counted from the root, for trees.

use ronde_wire::Member;

use super::{member, root_member};
use crate::inputs::Inputs;

/// The *position* `v = (m - root's member) mod n` of each member.
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
