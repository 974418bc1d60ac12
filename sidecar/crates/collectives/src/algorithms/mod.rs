//! The algorithms, one file each. In all of them `n` is the number of members, `m` this member, `p` the largest power of
//! two that is not above `n`, and `E` the elements of the bucket. [`TABLE`] lists them for the planner; a new algorithm is
//! one file here and one line there.
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
//! | [`pairwise_alltoall`] | all-to-all | n - 1 | what its ranks send to those of others |
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

/// The closed form of an algorithm: what it predicts of all members' plans. The checker compares both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Predicted {
    /// Rounds with transfers, from the first to the last one, in the longest sub-schedule.
    pub rounds: u32,
    /// Bytes that each member sends.
    pub sent_bytes: Vec<u64>,
    /// Bytes that each member reduces: the spans of its reduce steps, and those of its n-ary reductions once per rank.
    pub reduced_bytes: Vec<u64>,
    /// Elements of the longest shard or block that sub-schedules cut into chunks.
    pub longest_block: u64,
    /// The number of chunks of each block, where it does not depend on the size of a chunk.
    pub fixed_chunks: Option<u64>,
    /// Values that a register may hold for each element of its span: 1, or the most ranks of a member where ranks' values
    /// stay separate. A chunk holds so many times fewer elements.
    pub values_each: u64,
    /// Sub-schedules that together move one chunk of each block.
    pub siblings: u32,
    /// Sub-schedules of a prelude: 1 or 0.
    pub preludes: u32,
    /// Chunks that the busiest member sends or receives for one chunk of each block, siblings together.
    pub chunk_transfers: u32,
    /// The most chunks that a sub-schedule holds for its peers at once.
    pub held_chunks: u32,
}

impl Predicted {
    /// The number of sub-schedules for chunks of at most so many elements.
    #[must_use]
    pub fn sub_schedules(&self, chunk_elements: u64) -> u64 {
        u64::from(self.preludes) + u64::from(self.siblings) * self.chunks_per_block(chunk_elements)
    }

    /// The number of chunks of each block for chunks of at most so many elements.
    #[must_use]
    pub fn chunks_per_block(&self, chunk_elements: u64) -> u64 {
        self.fixed_chunks.unwrap_or_else(|| self.longest_block.div_ceil((chunk_elements / self.values_each).max(1)))
    }

    /// The closed form of plans that send nothing.
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

/// Builders that omit steps and transfers of empty spans. Only a barrier has such transfers.
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

/// A plan whose sub-schedule `c` has the `rounds` of chunk `c` of every block.
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

/// Removes trailing empty rounds.
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

/// The closed form of a gather or scatter in one round, without the bytes sent.
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

/// Converts a number of rounds or chunks for a closed form.
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

/// The previous and the next member on the ring.
fn neighbours(me: usize, members: usize) -> (Member, Member) {
    (member((me + members - 1) % members), member((me + 1) % members))
}

/// `a - b` on the ring, for `b` up to twice the number of members.
fn back(a: usize, b: usize, members: usize) -> usize {
    (a + 2 * members - b) % members
}
