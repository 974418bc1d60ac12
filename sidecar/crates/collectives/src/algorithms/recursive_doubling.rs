//! All-reduce by recursive doubling for any number of members. R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
//! collective communication operations in MPICH", IJHPCA 19 (2005).
//!
//! `p` is the largest power of two up to `n`, `x = n - p` the *excess*. Members `0..2x` form pairs of neighbours: the odd
//! one *folds* its contribution into the even one and is idle until the even one sends it the result. The other `p`
//! members, the *core*, are numbered `0..p` in member order. In step `k` core member `v` exchanges whole spans with
//! `v xor 2^k`, and both compute `op(lower, higher)`. So every core member evaluates the same expression, and each
//! finishes its copy. Sub-schedule `c` does this with chunk `c` of the bucket.
//!
//! Closed form: `log2 p` rounds, and two more when there is an excess (rounds 0 and last). A core member sends
//! `E log2 p` elements and reduces as many; one that a neighbour folds into sends and reduces `E` more; an excess member
//! sends `E` and reduces nothing.
//!
//! The order of reduction is the same for every element.

use ronde_wire::Member;

use super::folding::{Folding, Role};
use super::{Predicted, member, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Source, Span, Target};

/// The partial reduction of this member.
const SUM: Register = Register(0);
/// The partial reduction of the partner.
const OTHER: Register = Register(1);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let layout = Layout::in_order(&inputs.counts(), Source::EveryRank, Target::EveryRank);
    let whole = Span { start: 0, len: layout.elements };
    let count = inputs.sub_schedule_count(whole.len);
    let folding = Folding::new(inputs.members());
    let sub_schedules = inputs.sub_schedules(count, |index| {
        let span = whole.split(count, index);
        match folding.role(me.index()) {
            Role::Excess { neighbour } => excess_rounds(&folding, neighbour, span),
            Role::Core { number, folded } => core_rounds(&folding, number, folded, span),
        }
    });
    Plan { layout, sub_schedules, window: inputs.window(), prelude: false }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let elements = inputs.work.elements();
    if elements == 0 {
        return Predicted::idle(members);
    }
    let folding = Folding::new(members);
    let all = inputs.bytes(elements);
    let exchanged = all * u64::from(folding.doublings);
    let bytes = |m: usize| match folding.role(m) {
        Role::Excess { .. } => (all, 0),
        Role::Core { folded: Some(_), .. } => (exchanged + all, exchanged + all),
        Role::Core { folded: None, .. } => (exchanged, exchanged),
    };
    let folds = if folding.excess > 0 { 2 } else { 0 };
    Predicted {
        rounds: folding.doublings + folds,
        sent_bytes: (0..members).map(|m| bytes(m).0).collect(),
        reduced_bytes: (0..members).map(|m| bytes(m).1).collect(),
        longest_block: elements,
        chunk_transfers: folding.doublings + folds,
        ..Predicted::idle(members)
    }
}

fn excess_rounds(folding: &Folding, neighbour: usize, span: Span) -> Vec<Round> {
    let mut rounds = vec![Round::default(); last(folding) + 2];
    rounds[0].contribute(SUM, span);
    rounds[0].send(member(neighbour), SUM, span);
    rounds[last(folding)].receive(member(neighbour), OTHER, span);
    rounds[last(folding) + 1].publish(OTHER, span);
    trimmed(rounds)
}

fn core_rounds(folding: &Folding, number: usize, folded: Option<usize>, span: Span) -> Vec<Round> {
    let mut rounds = vec![Round::default(); last(folding) + 1];
    rounds[0].contribute(SUM, span);
    if let Some(neighbour) = folded {
        rounds[0].receive(member(neighbour), OTHER, span);
        rounds[1].reduce(SUM, OTHER, SUM, span);
    }
    for step in 0..folding.doublings as usize {
        let index = folding.first() + step;
        let partner = number ^ (1 << step);
        rounds[index].send(folding.member_of(partner), SUM, span);
        rounds[index].receive(folding.member_of(partner), OTHER, span);
        let (left, right) = if partner > number { (SUM, OTHER) } else { (OTHER, SUM) };
        rounds[index + 1].reduce(left, right, SUM, span);
    }
    let last = &mut rounds[last(folding)];
    last.finish(SUM, span);
    last.publish(SUM, span);
    if let Some(neighbour) = folded {
        last.send(member(neighbour), SUM, span);
    }
    trimmed(rounds)
}

/// The round after the last doubling step.
fn last(folding: &Folding) -> usize {
    folding.first() + folding.doublings as usize
}
