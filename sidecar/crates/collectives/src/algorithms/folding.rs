//! Folding of any number of members to a power of two, for [`super::recursive_doubling`] and [`super::halving_doubling`].

use ronde_wire::Member;

use super::member;

/// The members that fold and those of the core; [`super::recursive_doubling`] defines the terms.
pub(super) struct Folding {
    pub(super) excess: usize,
    /// `log2 p`.
    pub(super) doublings: u32,
}

pub(super) enum Role {
    Excess { neighbour: usize },
    Core { number: usize, folded: Option<usize> },
}

impl Folding {
    pub(super) fn new(members: usize) -> Self {
        let doublings = members.ilog2();
        Self { excess: members - (1 << doublings), doublings }
    }

    pub(super) fn role(&self, me: usize) -> Role {
        if me >= 2 * self.excess {
            Role::Core { number: me - self.excess, folded: None }
        } else if me.is_multiple_of(2) {
            Role::Core { number: me / 2, folded: Some(me + 1) }
        } else {
            Role::Excess { neighbour: me - 1 }
        }
    }

    pub(super) fn member_of(&self, number: usize) -> Member {
        member(if number < self.excess { 2 * number } else { number + self.excess })
    }

    /// The round of the first step among the core.
    pub(super) fn first(&self) -> usize {
        usize::from(self.excess > 0)
    }
}
