//! The symbolic checker: proves the plans of all members together, for one bucket, without data.
//!
//! | file | proves |
//! |---|---|
//! | `layout` | layouts are equal and map every input and output element exactly once |
//! | `transfers` | sends match receives in peer, strand, round, span and lane; bytes and rounds equal the closed form |
//! | `values` | each contribution counts exactly once, in member order; all ranks end with the same expression; nothing stale is read, nothing is written twice |
//! | `lanes` | plans complete on FIFO lanes, alone and with another plan, in adversarial schedules |
//!
//! **Why one schedule is enough for values.** The registers of a strand are touched by its own rounds only, in order, and
//! a transfer connects two equal rounds of two members. So every schedule that completes moves the same values, and the
//! checker runs the one in which all members step together. That it completes with rendezvous transfers, without any
//! buffer, follows from the matching: the members that are least advanced wait for nobody who is not there as well.
//!
//! Values are expression trees over ranks, equal trees are one node, and spans are cut into elementary intervals at all
//! borders that occur, so the effort depends on the schedule and not on the number of elements.

mod expression;
mod lanes;
mod layout;
mod transfers;
mod values;
mod violation;

use ronde_wire::{Member, Rank, SetTopology, Tuning};

pub use lanes::{Delivery, Explored, Schedule, check_interleaved, explore};
pub use violation::{At, Violation};

use crate::plan::{Plan, Span, Work};
use crate::planner::predicted;
use expression::{Expression, Expressions};

/// What holds for plans that passed.
#[derive(Debug)]
pub struct Proof {
    /// Rounds with transfers, from the first to the last one, in the longest strand.
    pub rounds: u32,
    /// Bytes that each member sends.
    pub sent_bytes: Vec<u64>,
    results: Vec<Run>,
    expressions: Expressions,
}

impl Proof {
    /// How the elements of a result tensor are computed: runs of elements with the same expression, in order. Ranks are
    /// `r0`, `r1` ...; a reduction is `(left right)`, a finished value `[value]`.
    #[must_use]
    pub fn result(&self, tensor: u32) -> Vec<(Span, String)> {
        let mut runs: Vec<Run> = self.results.iter().filter(|run| run.tensor == tensor).copied().collect();
        runs.sort_unstable_by_key(|run| run.output);
        runs.dedup_by(|next, run| {
            let joins = run.output.end() == next.output.start && run.value == next.value;
            if joins {
                run.output.len += next.output.len;
            }
            joins
        });
        runs.iter().map(|run| (run.output, self.expressions.text(run.value))).collect()
    }
}

/// Elements of a result tensor with one expression.
#[derive(Clone, Copy, Debug)]
struct Run {
    tensor: u32,
    output: Span,
    value: Expression,
}

/// Proves the plans of all members, in member order, for one bucket.
///
/// # Errors
/// The first [`Violation`] that is found.
pub fn check(topology: &SetTopology, work: &Work, tuning: &Tuning, plans: &[Plan]) -> Result<Proof, Violation> {
    if plans.len() != topology.len() {
        return Err(Violation::Plans { given: plans.len(), members: topology.len() });
    }
    let bucket = Bucket { topology, work, tuning, plans };
    layout::check(&bucket)?;
    transfers::check_shape(&bucket)?;
    transfers::check_matching(&bucket)?;
    let (results, expressions) = values::check(&bucket)?;
    let form = predicted(topology, work, tuning).map_err(Violation::Inputs)?;
    let (rounds, sent_bytes) = transfers::check_closed_form(&bucket, &form)?;
    explore(&[plans], Delivery::Rendezvous, &[Schedule::Fair, Schedule::NewestFirst])?;
    explore(&[plans], Delivery::WhenStarted, &Schedule::few(plans.len()))?;
    Ok(Proof { rounds, sent_bytes, results, expressions })
}

/// What is checked.
#[derive(Clone, Copy)]
struct Bucket<'a> {
    topology: &'a SetTopology,
    work: &'a Work,
    tuning: &'a Tuning,
    plans: &'a [Plan],
}

impl Bucket<'_> {
    fn members(&self) -> impl Iterator<Item = (Member, &Plan)> {
        (0..).map(Member).zip(self.plans)
    }

    fn ranks_of(&self, member: Member) -> &[Rank] {
        &self.topology.members[member.index()].ranks
    }

    /// The number of strands, equal in all plans once the shape is checked.
    fn strands(&self) -> usize {
        self.plans[0].strands.len()
    }

    /// The rounds of the longest part of a strand.
    fn rounds(&self, strand: usize) -> usize {
        self.plans.iter().map(|plan| plan.strands[strand].rounds.len()).max().unwrap_or(0)
    }
}
