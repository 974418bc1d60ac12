//! The symbolic checker: proves the plans of all members together, for one bucket, without data.
//!
//! | file | proves |
//! |---|---|
//! | `layout` | layouts are equal and map every input and output element exactly once |
//! | `shape` | every span, register and peer exists and fits; steps are valid for the kind of work and inside or outside of a prelude |
//! | `transfers` | sends match receives in peer, sub-schedule, round, span, form and lane; bytes and rounds equal the closed form |
//! | `values`, `registers` | each contribution counts exactly once, in member order; every target gets each element once, and all ranks of a common result end with the same expression; no stale value is read, no value is written twice |
//! | `reducers` | codecs: sources and owners encode once, plain values are never sent, all members decode; n-ary: all ranks' values at once, in order; preludes: every element of every rank is measured once, and all members conclude from the same measures before they reduce |
//! | `lanes` | plans complete on FIFO lanes, alone and with another plan, in adversarial schedules |
//!
//! **Why one schedule is enough for values.** Only a sub-schedule's own rounds access its registers, in order, and a transfer
//! connects equal rounds of two members. So every schedule that completes moves the same values, and the checker runs the
//! one in which all members step together. Matching implies that it completes with rendezvous transfers, without any
//! buffer: the least advanced members wait only for members in the same round.
//!
//! Values are expression trees over ranks, and equal trees share a node. Spans are cut into elementary intervals at all
//! borders that occur, so the cost depends on the schedule and not on the number of elements.

mod expression;
mod lanes;
mod layout;
mod reducers;
mod registers;
mod shape;
mod transfers;
mod values;
mod violation;

use ronde_wire::{Member, Rank, SetTopology, Tuning};

pub use lanes::{Delivery, Explored, Schedule, check_interleaved, explore};
pub use violation::{PlanPosition, Violation};

use crate::algorithms::Predicted;
use crate::plan::{Form, Plan, Span, Target, Work, WorkKind};
use crate::planner::predicted;
use expression::{Expression, Expressions};

/// The proven properties of plans that passed.
#[derive(Debug)]
pub struct Proof {
    /// Rounds with transfers, from the first to the last one, in the longest sub-schedule.
    pub rounds: u32,
    /// Bytes that each member sends.
    pub sent_bytes: Vec<u64>,
    /// Bytes that each member reduces.
    pub reduced_bytes: Vec<u64>,
    /// By member, the spans that it measures in a prelude, in order; empty without one.
    pub measured: Vec<Vec<Span>>,
    results: Vec<Run>,
    expressions: Expressions,
}

impl Proof {
    /// Returns how the elements of a target's result tensor are computed: runs with the same expression, in order.
    /// Ranks are `r0`, `r1` ...; a reduction is `(left right)`, one of all ranks at once `{r0 r1}`, a finished value
    /// `[value]`, and one that came out of a codec `<value>`.
    #[must_use]
    pub fn result(&self, tensor: u32, target: Target) -> Vec<(Span, String)> {
        let wanted = |run: &&Run| run.tensor == tensor && run.target == target;
        let mut runs: Vec<Run> = self.results.iter().filter(wanted).copied().collect();
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
    target: Target,
    output: Span,
    value: Expression,
}

/// Proves the plans of all members, in member order, for one bucket.
///
/// # Errors
/// The first [`Violation`].
pub fn check(topology: &SetTopology, work: &Work, tuning: &Tuning, plans: &[Plan]) -> Result<Proof, Violation> {
    if plans.len() != topology.len() {
        return Err(Violation::Plans { given: plans.len(), members: topology.len() });
    }
    let bucket = Bucket { topology, work, tuning, plans };
    layout::check(&bucket)?;
    let form = predicted(topology, work, tuning).map_err(Violation::Inputs)?;
    shape::check(&bucket)?;
    transfers::check_matching(&bucket)?;
    let computed = values::check(&bucket)?;
    transfers::check_closed_form(&bucket, &form)?;
    explore(&[plans], Delivery::Rendezvous, &[Schedule::Fair, Schedule::NewestFirst])?;
    explore(&[plans], Delivery::Backpressure, &Schedule::few(plans.len()))?;
    let measured = computed.measured.iter().map(|measured| measured.spans.to_vec()).collect();
    let Predicted { rounds, sent_bytes, reduced_bytes, .. } = form;
    let (results, expressions) = (computed.results, computed.expressions);
    Ok(Proof { rounds, sent_bytes, reduced_bytes, measured, results, expressions })
}

/// The inputs of the checker.
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

    /// Whether values pass a codec: with one member nothing is sent.
    fn is_coded(&self) -> bool {
        self.work.kind.is_coded() && self.plans.len() > 1
    }

    /// The number of a member's measures.
    fn measures_of(&self, member: Member) -> u64 {
        match self.work.kind {
            WorkKind::AllReduceTwoPass { measures } => self.ranks_of(member).len() as u64 * u64::from(measures),
            WorkKind::AllReduceAdaptive => (self.topology.size() * (self.topology.size() + 1) / 2) as u64,
            _ => 0,
        }
    }

    /// Bytes of a span in a form, sent by a member.
    fn bytes(&self, member: Member, span: Span, form: Form) -> u64 {
        let element = u64::from(self.work.element_bytes);
        if let (Form::Encoded, WorkKind::AllReduceByBlocks { encoded_bytes, .. }) = (form, &self.work.kind) {
            // An upper bound: the codec chooses the length.
            return if span.is_empty() { 0 } else { u64::from(*encoded_bytes) };
        }
        let each = match (form, &self.work.kind) {
            (Form::Encoded, WorkKind::AllReduceCoded { encoded_bytes }) => u64::from(*encoded_bytes),
            (Form::Values | Form::Encoded, _) => element,
            (Form::EachRank, _) => element * self.ranks_of(member).len() as u64,
            (Form::Measures, _) => MEASURE_BYTES,
        };
        span.len.saturating_mul(each)
    }

    /// The number of sub-schedules, equal in all plans once the shape is checked.
    fn sub_schedules(&self) -> usize {
        self.plans[0].sub_schedules.len()
    }

    /// The most rounds that a member has in a sub-schedule.
    fn rounds(&self, sub_schedule: usize) -> usize {
        self.plans.iter().map(|plan| plan.sub_schedules[sub_schedule].rounds.len()).max().unwrap_or(0)
    }
}

/// A measure is an f64.
const MEASURE_BYTES: u64 = 8;
