//! The algorithms, one file each. In all of them `n` is the number of members, `m` this member, `p` the largest power of
//! two that is not above `n`, and `E` the elements of the bucket.
//!
//! | file | work | rounds | elements sent by a member |
//! |---|---|---|---|
//! | [`local`] | everything, one member | 0 | 0 |
//! | [`ring_allreduce`] | all-reduce | 2 (n - 1) | about 2 E (n - 1) / n |
//! | [`recursive_doubling`] | all-reduce | log2 p, and 2 when n > p | up to E (log2 p + 1) |
//! | [`binomial_broadcast`] | broadcast | ceil(log2 n) | up to E ceil(log2 n), at the root |
//! | [`ring_allgather`] | all-gather | n - 1 | E less the block of member m + 1 |
//! | [`dissemination`] | barrier | ceil(log2 n) | 0, in ceil(log2 n) tokens |

pub mod binomial_broadcast;
pub mod dissemination;
pub mod local;
pub mod recursive_doubling;
pub mod ring_allgather;
pub mod ring_allreduce;

use ronde_wire::Member;

use crate::plan::{Form, Register, Round, Span, Step, Transfer};

/// What the closed form of an algorithm says about all members' plans. The checker compares it with the plans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Predicted {
    /// Rounds with transfers, from the first to the last one, in the longest strand.
    pub rounds: u32,
    /// Bytes that each member sends.
    pub sent_bytes: Vec<u64>,
    /// Bytes that each member combines with others: the spans of its reduce steps.
    pub reduced_bytes: Vec<u64>,
    /// Elements of the longest block that strands cut into chunks.
    pub longest_block: u64,
}

impl Predicted {
    /// The number of strands when a chunk has up to so many elements.
    #[must_use]
    pub fn strands(&self, chunk_elements: u64) -> u64 {
        self.longest_block.div_ceil(chunk_elements)
    }

    /// Nothing to send anywhere.
    fn idle(members: usize) -> Self {
        Self { rounds: 0, sent_bytes: vec![0; members], reduced_bytes: vec![0; members], longest_block: 0 }
    }
}

/// Steps that are left out when there is nothing to do; only a barrier has transfers of empty spans.
impl Round {
    fn contribute(&mut self, into: Register, span: Span) {
        self.step(span, Step::Contribute { into, span });
    }

    fn reduce(&mut self, left: Register, right: Register, into: Register, span: Span) {
        self.step(span, Step::Reduce { left, right, into, span });
    }

    fn finish(&mut self, register: Register, span: Span) {
        self.step(span, Step::Finish { register, span });
    }

    fn publish(&mut self, from: Register, span: Span) {
        self.step(span, Step::Publish { from, span });
    }

    fn send(&mut self, to: Member, from: Register, span: Span) {
        self.transfer(span, Transfer::Send { to, from, span, form: Form::Values });
    }

    fn receive(&mut self, from: Member, into: Register, span: Span) {
        self.transfer(span, Transfer::Receive { from, into, span, form: Form::Values });
    }

    fn step(&mut self, span: Span, step: Step) {
        if !span.is_empty() {
            self.steps.push(step);
        }
    }

    fn transfer(&mut self, span: Span, transfer: Transfer) {
        if !span.is_empty() {
            self.transfers.push(transfer);
        }
    }
}

/// Trailing empty rounds say nothing.
fn trimmed(mut rounds: Vec<Round>) -> Vec<Round> {
    while rounds.last().is_some_and(|round| round.steps.is_empty() && round.transfers.is_empty()) {
        rounds.pop();
    }
    rounds
}

fn member(index: usize) -> Member {
    Member(u32::try_from(index).expect("members are at most SIDECARS_MAX, checked by the planner"))
}

/// The members before and behind one on the ring.
fn neighbours(me: usize, members: usize) -> (Member, Member) {
    (member((me + members - 1) % members), member((me + 1) % members))
}

/// `a - b` on the ring, for `b` up to twice the number of members.
fn back(a: usize, b: usize, members: usize) -> usize {
    (a + 2 * members - b) % members
}
