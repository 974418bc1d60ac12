//! One member: all ranks sit in one place, nothing is sent.
//!
//! Each strand contributes, finishes and publishes one chunk; strands bound private memory as in every other algorithm.
//!
//! Closed form: 0 rounds, 0 bytes sent, 0 bytes reduced (local ranks are reduced by the contribution).

use super::Predicted;
use crate::plan::{Layout, Plan, Register, Round, Source, Span, WorkKind};
use crate::planner::Inputs;

const OWN: Register = Register(0);

pub(crate) fn plan(inputs: &Inputs<'_>) -> Plan {
    let layout = match inputs.work.kind {
        WorkKind::AllReduce => Layout::in_order(&inputs.counts(), Source::EveryRank),
        WorkKind::Broadcast { root } => Layout::in_order(&inputs.counts(), Source::One(root)),
        WorkKind::AllGather => Layout::member_major(inputs.topology, &inputs.work.tensors).0,
        _ => Layout::default(),
    };
    let whole = Span { start: 0, len: layout.elements };
    let count = inputs.strand_count(whole.len);
    let strands = inputs.strands(count, |index| {
        let span = whole.part(count, index);
        let mut round = Round::default();
        round.contribute(OWN, span);
        if inputs.work.kind == WorkKind::AllReduce {
            round.finish(OWN, span);
        }
        round.publish(OWN, span);
        vec![round]
    });
    Plan { layout, strands, window: inputs.window(), prelude: false }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    Predicted { longest_block: inputs.work.elements(), ..Predicted::idle(inputs.members()) }
}
