//! All-reduce by recursive halving and doubling for any number of members. R. Rabenseifner, "Optimization of collective
//! reduction operations", ICCS 2004.
//!
//! Excess, neighbours, core and fold are as in [`super::recursive_doubling`]. The bucket is cut into `p` shards, and core
//! member `v` owns shard `v`. In halving step `k` core member `v` sends to `v xor 2^k` those shards that both have reduced
//! and whose owner agrees with the other one in bit `k`; both compute `op(lower, higher)`. After `log2 p` steps every owner
//! has its complete shard and finishes it once. The doubling steps reverse the halving steps.
//!
//! The original exchanges several shards in one step; here each shard moves separately. Sub-schedules `p c + i` for all `i`
//! are *siblings*: each reduces chunk `c` of shard `i` along a binomial tree to the owner and broadcasts the result back.
//! With a window of `p` sub-schedules the siblings' rounds coincide.
//!
//! Closed form, with `P(i)` the elements of shard `i` and `S(v)` the sum of `P(i)` over all steps `k` and all `i` that agree
//! with `v` in bits `0..=k`: `2 log2 p` rounds, and two more when there is an excess (the first and the last). Core member
//! `v` sends `E - P(v) + S(v)` elements and reduces `S(v)`; one that a neighbour folds into sends and reduces `E` more; an
//! excess member sends `E` and reduces nothing.
//!
//! The order of reduction is the same for every element, and that of recursive doubling: the two give the same bits.

use ronde_wire::Member;

use super::folding::{Folding, Role};
use super::{Predicted, member, number, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Source, Span, Target};

/// The partial reduction of this member, then the finished shard.
const SUM: Register = Register(0);
/// The partial reduction of the partner.
const OTHER: Register = Register(1);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let layout = Layout::in_order(&inputs.counts(), Source::EveryRank, Target::EveryRank);
    let whole = Span { start: 0, len: layout.elements };
    let folding = Folding::new(inputs.members());
    let shards = shards(&folding);
    let chunks = inputs.sub_schedule_count(whole.split(shards, 0).len);
    let sub_schedules = inputs.sub_schedules(shards * chunks, |index| {
        let shard = index % shards;
        let span = whole.split(shards, shard).split(chunks, index / shards);
        match folding.role(me.index()) {
            Role::Excess { neighbour } => excess_rounds(&folding, neighbour, span),
            Role::Core { number, folded } => core_rounds(&folding, Core { number, folded, owner: shard }, span),
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
    let shards = shards(&folding);
    let shard = |index: u64| Span { start: 0, len: elements }.split(shards, index).len;
    let agreeing = |v: u64, step: u32| agreeing(elements, shards, v, 2 << step);
    let bytes = |m: usize| match folding.role(m) {
        Role::Excess { .. } => (elements, 0),
        Role::Core { number, folded } => {
            let v = number as u64;
            let kept: u64 = (0..folding.doublings).map(|step| agreeing(v, step)).sum();
            let more = if folded.is_some() { elements } else { 0 };
            (elements - shard(v) + kept + more, kept + more)
        }
    };
    let (folds, folded) = if folding.excess > 0 { (2, shards) } else { (0, 0) };
    Predicted {
        rounds: 2 * folding.doublings + folds,
        sent_bytes: (0..members).map(|m| inputs.bytes(bytes(m).0)).collect(),
        reduced_bytes: (0..members).map(|m| inputs.bytes(bytes(m).1)).collect(),
        longest_block: shard(0),
        siblings: number(shards),
        chunk_transfers: number(2 * shards - 2 + folded),
        ..Predicted::idle(members)
    }
}

/// The elements of all shards `i` with `i mod modulus = v mod modulus`. The first `elements % shards` are one longer.
fn agreeing(elements: u64, shards: u64, v: u64, modulus: u64) -> u64 {
    let (each, longer, first) = (elements / shards, elements % shards, v % modulus);
    shards / modulus * each + longer.saturating_sub(first).div_ceil(modulus)
}

/// A core member in a sub-schedule of the shard that `owner` owns.
#[derive(Clone, Copy)]
struct Core {
    number: usize,
    folded: Option<usize>,
    owner: u64,
}

impl Core {
    /// Whether it agrees with the owner in the bits below `bits`, so that it takes part in the following steps.
    fn agrees(self, bits: u32) -> bool {
        (self.number as u64 ^ self.owner).trailing_zeros() >= bits
    }
}

fn shards(folding: &Folding) -> u64 {
    1 << folding.doublings
}

/// The round after the last doubling step.
fn last(folding: &Folding) -> usize {
    folding.first() + 2 * folding.doublings as usize
}

fn excess_rounds(folding: &Folding, neighbour: usize, span: Span) -> Vec<Round> {
    let mut rounds = vec![Round::default(); last(folding) + 2];
    rounds[0].contribute(SUM, span);
    rounds[0].send(member(neighbour), SUM, span);
    rounds[last(folding)].receive(member(neighbour), OTHER, span);
    rounds[last(folding) + 1].publish(OTHER, span);
    trimmed(rounds)
}

fn core_rounds(folding: &Folding, core: Core, span: Span) -> Vec<Round> {
    let mut rounds = vec![Round::default(); last(folding) + 1];
    rounds[0].contribute(SUM, span);
    if let Some(neighbour) = core.folded {
        rounds[0].receive(member(neighbour), OTHER, span);
        rounds[1].reduce(SUM, OTHER, SUM, span);
    }
    for step in (0..folding.doublings).filter(|step| core.agrees(*step)) {
        halving_step(folding, core, step, span, &mut rounds[folding.first() + step as usize..]);
    }
    let complete = folding.first() + folding.doublings as usize;
    if core.number as u64 == core.owner {
        rounds[complete].finish(SUM, span);
        rounds[complete].publish(SUM, span);
    }
    for step in (0..folding.doublings).filter(|step| core.agrees(*step)) {
        let index = complete + (folding.doublings - 1 - step) as usize;
        let partner = folding.member_of(core.number ^ (1 << step));
        if core.agrees(step + 1) {
            rounds[index].send(partner, SUM, span);
        } else {
            rounds[index].receive(partner, SUM, span);
            rounds[index + 1].publish(SUM, span);
        }
    }
    if let Some(neighbour) = core.folded {
        rounds[last(folding)].send(member(neighbour), SUM, span);
    }
    trimmed(rounds)
}

/// Sends the shard to the partner, or receives and reduces the partner's; `rounds` starts with the step's round.
fn halving_step(folding: &Folding, core: Core, step: u32, span: Span, rounds: &mut [Round]) {
    let partner = core.number ^ (1 << step);
    if core.agrees(step + 1) {
        rounds[0].receive(folding.member_of(partner), OTHER, span);
        let (left, right) = if partner > core.number { (SUM, OTHER) } else { (OTHER, SUM) };
        rounds[1].reduce(left, right, SUM, span);
    } else {
        rounds[0].send(folding.member_of(partner), SUM, span);
    }
}
