//! A set with one member: all its ranks have the same sidecar, and nothing is sent.
//!
//! Each sub-schedule contributes, finishes and publishes one chunk, which bounds private memory as in every other algorithm.
//! A codec has no effect. An n-ary reduction holds the values of all ranks in one register, so a chunk has as many times
//! fewer elements. A prelude measures the whole input first, in spans of [`crate::inputs::MEASURED_BYTES`], so that the order
//! of its sums does not depend on the tuning.
//!
//! Closed form: 0 rounds, 0 bytes sent. An n-ary reduction reduces `E` elements of each rank, anything else 0 (the
//! contribution reduces local ranks).

use ronde_wire::{Lane, Member};

use super::{Predicted, root_of};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Source, Span, Step, SubSchedule, Target, WorkKind};

const OWN: Register = Register(0);
/// The result of an n-ary reduction.
const REDUCED: Register = Register(1);
/// The measures of a prelude so far.
const MEASURES: Register = Register(1);

pub(crate) fn plan(_me: Member, inputs: &Inputs<'_>) -> Plan {
    let layout = layout(inputs);
    let whole = Span { start: 0, len: layout.elements };
    let form = predicted(inputs);
    let count = form.chunks_per_block(inputs.chunk_elements);
    let mut sub_schedules =
        inputs.sub_schedules(count, |index| vec![chunk(&inputs.work.kind, whole.split(count, index))]);
    let prelude = inputs.has_prelude();
    if prelude {
        sub_schedules.insert(0, SubSchedule { lane: Lane(0), rounds: measuring(inputs, whole) });
    }
    Plan { layout, sub_schedules, window: inputs.window(), prelude }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let elements = inputs.work.elements();
    let idle = Predicted { longest_block: elements, ..Predicted::idle(inputs.members()) };
    if !inputs.work.kind.is_nary() {
        return idle;
    }
    let ranks = inputs.topology.size() as u64;
    Predicted {
        reduced_bytes: vec![inputs.bytes(elements) * ranks],
        values_each: ranks,
        preludes: u32::from(inputs.has_prelude()),
        ..idle
    }
}

fn layout(inputs: &Inputs<'_>) -> Layout {
    let (counts, every) = (inputs.counts(), Target::EveryRank);
    match inputs.work.kind {
        WorkKind::Broadcast { root } => Layout::in_order(&counts, Source::One(root), every),
        WorkKind::Reduce { .. } => Layout::in_order(&counts, Source::EveryRank, Target::One(root_of(inputs))),
        WorkKind::AllGather | WorkKind::Gather { .. } | WorkKind::Scatter { .. } | WorkKind::ReduceScatter => {
            Layout::member_major(inputs).0
        }
        WorkKind::AllToAll => Layout::pair_major(inputs).0,
        WorkKind::AllReduce
        | WorkKind::AllReduceCoded { .. }
        | WorkKind::AllReduceByBlocks { .. }
        | WorkKind::AllReduceNAry
        | WorkKind::AllReduceTwoPass { .. }
        | WorkKind::AllReduceAdaptive
        | WorkKind::Barrier => Layout::in_order(&counts, Source::EveryRank, every),
    }
}

fn chunk(kind: &WorkKind, span: Span) -> Round {
    let mut round = Round::default();
    if kind.is_nary() {
        round.contribute_each(OWN, span);
        round.reduce_all(OWN, REDUCED, span);
        round.finish(REDUCED, span);
        round.publish(REDUCED, span);
    } else {
        round.contribute(OWN, span);
        if kind.reduces() {
            round.finish(OWN, span);
        }
        round.publish(OWN, span);
    }
    round
}

/// The rounds of a prelude: each measures a span of the input, and the last one concludes.
fn measuring(inputs: &Inputs<'_>, whole: Span) -> Vec<Round> {
    let each_alone = matches!(inputs.work.kind, WorkKind::AllReduceTwoPass { .. });
    let values_each = if each_alone { 1 } else { inputs.topology.size() as u64 };
    let count = whole.len.div_ceil(inputs.measured_elements(values_each));
    let measure = |index| {
        let span = whole.split(count, index);
        let mut round = Round::default();
        if each_alone {
            round.steps.push(Step::MeasureOwn { into: MEASURES, span });
        } else {
            round.contribute_each(OWN, span);
            round.steps.push(Step::MeasureAll { first: OWN, into: MEASURES, span });
        }
        round
    };
    let mut rounds: Vec<Round> = (0..count).map(measure).collect();
    if count > 0 {
        rounds.push(Round { steps: vec![Step::Conclude { first: MEASURES }], transfers: Vec::new() });
    }
    rounds
}
