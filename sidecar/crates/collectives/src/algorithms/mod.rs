//! The algorithms, one file each. In all of them `n` is the number of members, `m` this member, `p` the largest power of
//! two that is not above `n`, and `E` the elements of the bucket.
//!
//! | file | work | rounds | elements sent by a member |
//! |---|---|---|---|
//! | [`local`] | everything, one member | 0 | 0 |
//! | [`ring_allreduce`] | all-reduce | 2 (n - 1) | about 2 E (n - 1) / n |
//! | [`recursive_doubling`] | all-reduce | log2 p, and 2 when n > p | up to E (log2 p + 1) |
//! | [`halving_doubling`] | all-reduce | 2 log2 p, and 2 when n > p | about 2 E (p - 1) / p, and E when n > p |
//! | [`ring_reduce_scatter`] | reduce-scatter | n - 1 | E less its own block |
//! | [`binomial_reduce`] | reduce | ceil(log2 n) | E, the root 0 |
//! | [`binomial_broadcast`] | broadcast | ceil(log2 n) | up to E ceil(log2 n), at the root |
//! | [`ring_allgather`] | all-gather | n - 1 | E less the block of member m + 1 |
//! | [`linear_gather`] | gather | 1 | its own block, the root 0 |
//! | [`linear_scatter`] | scatter, messages | 1 | 0, the root E less its own block |
//! | [`pairwise_alltoall`] | all-to-all | n - 1 | what its ranks have for others |
//! | [`direct`] | coded all-reduce | 2 | E encoded less its own shard, and that n - 1 times |
//! | [`direct`], [`direct_prelude`] | n-ary, two-pass and adaptive all-reduce | 2, and those of a prelude | the same, first each rank's values; adaptive: those twice |
//! | [`dissemination`] | barrier | ceil(log2 n) | 0, in ceil(log2 n) tokens |

pub mod binomial_broadcast;
pub mod binomial_reduce;
mod binomial_tree;
pub mod direct;
pub mod direct_prelude;
pub mod dissemination;
mod folding;
pub mod halving_doubling;
pub mod linear_gather;
pub mod linear_scatter;
pub mod local;
pub mod pairwise_alltoall;
pub mod recursive_doubling;
pub mod ring_allgather;
pub mod ring_allreduce;
pub mod ring_reduce_scatter;
mod table;

pub(crate) use table::find;
pub use table::{Entry, TABLE, performing};

use ronde_wire::{Member, Rank};

use crate::inputs::Inputs;
use crate::plan::{Form, Layout, Plan, Register, Round, Span, Step, Transfer};

/// What the closed form of an algorithm says about all members' plans. The checker compares it with the plans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Predicted {
    /// Rounds with transfers, from the first to the last one, in the longest sub-schedule.
    pub rounds: u32,
    /// Bytes that each member sends.
    pub sent_bytes: Vec<u64>,
    /// Bytes that each member combines with others: the spans of its reduce steps, and those of its n-ary reductions once
    /// for each rank.
    pub reduced_bytes: Vec<u64>,
    /// Elements of the longest block that sub-schedules cut into chunks.
    pub longest_block: u64,
    /// Into how many chunks blocks are cut, where that does not hang on the size of a chunk.
    pub fixed_chunks: Option<u64>,
    /// Values that a register may hold for each element of its span: 1, or the most ranks that a member has where ranks'
    /// values stay apart. A chunk holds so many times fewer elements.
    pub values_each: u64,
    /// Sub-schedules that share the work on a part of each block, side by side.
    pub siblings: u32,
    /// Sub-schedules before those: 1 for a prelude.
    pub preludes: u32,
    /// Chunks that the busiest member sends or receives for a part of each block, siblings together.
    pub chunk_transfers: u32,
    /// Chunks that a sub-schedule may have to hold for its peers at once.
    pub held_chunks: u32,
}

impl Predicted {
    /// The number of sub-schedules when a chunk has up to so many elements.
    #[must_use]
    pub fn sub_schedules(&self, chunk_elements: u64) -> u64 {
        u64::from(self.preludes) + u64::from(self.siblings) * self.chunks_per_block(chunk_elements)
    }

    /// The number of chunks into which each block is cut when a chunk has up to so many elements.
    #[must_use]
    pub fn chunks_per_block(&self, chunk_elements: u64) -> u64 {
        self.fixed_chunks.unwrap_or_else(|| self.longest_block.div_ceil((chunk_elements / self.values_each).max(1)))
    }

    /// Nothing to send anywhere.
    pub(crate) fn idle(members: usize) -> Self {
        Self {
            rounds: 0,
            sent_bytes: vec![0; members],
            reduced_bytes: vec![0; members],
            longest_block: 0,
            fixed_chunks: None,
            values_each: 1,
            siblings: 1,
            preludes: 0,
            chunk_transfers: 0,
            held_chunks: 1,
        }
    }
}

/// Steps and transfers that are left out when there is nothing to do; only a barrier has transfers of empty spans.
impl Round {
    fn contribute(&mut self, into: Register, span: Span) {
        self.step(span, Step::Contribute { into, span });
    }

    fn contribute_each(&mut self, into: Register, span: Span) {
        self.step(span, Step::ContributeEach { into, span });
    }

    fn reduce_all(&mut self, first: Register, into: Register, span: Span) {
        self.step(span, Step::ReduceN { first, into, span });
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

/// A plan whose sub-schedule `c` does with part `c` of every block what `rounds` says of those chunks.
fn plan_of_blocks(
    inputs: &Inputs<'_>,
    layout: Layout,
    blocks: &[Span],
    rounds: impl Fn(&[Span]) -> Vec<Round>,
) -> Plan {
    let longest = blocks.iter().map(|block| block.len).max().unwrap_or(0);
    let count = inputs.sub_schedule_count(longest);
    let sub_schedules = inputs.sub_schedules(count, |index| {
        let chunks: Vec<Span> = blocks.iter().map(|block| block.split(count, index)).collect();
        rounds(&chunks)
    });
    Plan { layout, sub_schedules, window: inputs.window(), prelude: false }
}

/// Trailing empty rounds say nothing.
fn trimmed(mut rounds: Vec<Round>) -> Vec<Round> {
    while rounds.last().is_some_and(|round| round.steps.is_empty() && round.transfers.is_empty()) {
        rounds.pop();
    }
    rounds
}

/// The lengths of the shards, without the layout; the first is the longest.
fn shard_lens(inputs: &Inputs<'_>) -> Vec<u64> {
    let shards = inputs.members_count();
    let len_of = |shard| move |&len: &u64| Span { start: 0, len }.split(shards, shard).len;
    (0..shards).map(|shard| inputs.work.tensors.iter().flatten().map(len_of(shard)).sum()).collect()
}

/// The lengths of the members' blocks, without the layout.
fn block_lens(inputs: &Inputs<'_>) -> Vec<u64> {
    let order = inputs.topology.ranks();
    let of_rank = |rank: &Rank| {
        let position = order.partition_point(|other| other < rank);
        inputs.work.tensors.iter().map(|counts| counts[position]).sum::<u64>()
    };
    inputs.topology.members.iter().map(|member| member.ranks.iter().map(of_rank).sum()).collect()
}

/// The closed form of a round with the root, but for the bytes that are sent.
fn linear_predicted(inputs: &Inputs<'_>, blocks: &[u64]) -> Predicted {
    let members = blocks.len();
    let root = root_member(inputs).index();
    let travels = (0..members).any(|m| m != root && blocks[m] > 0);
    Predicted {
        rounds: u32::from(travels),
        longest_block: blocks.iter().copied().max().unwrap_or(0),
        chunk_transfers: number(members as u64 - 1),
        held_chunks: number(members as u64),
        ..Predicted::idle(members)
    }
}

/// A number of rounds or chunks, as a closed form holds it.
fn number(number: u64) -> u32 {
    number.try_into().unwrap_or(u32::MAX)
}

fn member(index: usize) -> Member {
    Member(u32::try_from(index).expect("members are at most SIDECARS_MAX, checked by the planner"))
}

/// The root of work that has one.
fn root_of(inputs: &Inputs<'_>) -> Rank {
    inputs.work.kind.root().expect("the planner gives this algorithm work with a root only")
}

/// The member that hosts the root.
fn root_member(inputs: &Inputs<'_>) -> Member {
    inputs.topology.member_of(root_of(inputs)).expect("the planner checked that the root is in the set")
}

/// The members before and behind one on the ring.
fn neighbours(me: usize, members: usize) -> (Member, Member) {
    (member((me + members - 1) % members), member((me + 1) % members))
}

/// `a - b` on the ring, for `b` up to twice the number of members.
fn back(a: usize, b: usize, members: usize) -> usize {
    (a + 2 * members - b) % members
}
