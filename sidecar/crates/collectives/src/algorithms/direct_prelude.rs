//! The prelude of a [direct](super::direct) all-reduce by a reducer that measures first: one sub-schedule that ends before
//! any other begins.
//!
//! *Two-pass*: every member measures the whole inputs of its own ranks, step by step, and sends only the measures. The mean
//! of tensors clipped to their median norm is such a reducer.
//!
//! *Adaptive*: the measures are the inner products of all pairs of ranks, which no member can compute alone. In each round
//! the members send each rank's values of a chunk of every shard to the shard's owner, which adds the products of the
//! previous chunk. Adasum is such a reducer: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020
//! (arXiv:2006.02924). It combines pairs of vectors along a tree, with coefficients from inner products of the operands.
//! All of them are linear combinations of the ranks' tensors, so this Gram matrix gives their inner products, and every
//! member computes each rank's weight in the result without another message.
//!
//! ```text
//! two-pass    rounds 0..c    measure chunk r of the local inputs
//! adaptive    rounds 0..c    measure chunk r - 1 of this member's shard; send chunk r of all shards to their owners
//! both        round c        (adaptive: measure the last chunk;) send the measures to all
//!             round c + 1    conclude
//! ```
//!
//! The size of these chunks does not depend on the tuning, as it fixes the order of sums in f64: at most
//! [`crate::inputs::MEASURED_BYTES`] of a rank's input, or for an adaptive prelude so much that `2 n` chunks fit
//! [`FLIGHT_BYTES_MAX`].
//!
//! Closed form, when there is an element: two-pass 1 round with transfers, adaptive `c + 1`. Member `m` sends `k(m)` numbers
//! for each measure to `n - 1` peers, or `N (N + 1) / 2` numbers to `n - 1` peers and before that `k(m)` values of each of
//! `E - P(m)` elements. A member holds the measures of all `n` members: 263 KiB each at the limit of 256 ranks.

use ronde_wire::{Lane, Member, limits};

use super::direct::{incoming, others, outgoing, ranks_of};
use super::{member, number};
use crate::cost::FLIGHT_BYTES_MAX;
use crate::inputs::Inputs;
use crate::plan::{Form, Register, Round, Span, Step, SubSchedule, Transfer, WorkKind};

/// Returns the prelude of one member; `shards` are the spans of all shards.
pub(super) fn sub_schedule(me: Member, inputs: &Inputs<'_>, shards: &[Span]) -> SubSchedule {
    let rounds = match inputs.work.kind {
        WorkKind::AllReduceAdaptive => adaptive(me.index(), inputs, shards),
        _ => two_pass(me.index(), inputs),
    };
    SubSchedule { lane: Lane(0), rounds }
}

/// The prelude's share of the closed form; zero without a prelude.
pub(super) struct PredictedPrelude {
    pub(super) rounds: u32,
    pub(super) sent_bytes: Vec<u64>,
}

pub(super) fn predicted(inputs: &Inputs<'_>, shards: &[u64]) -> PredictedPrelude {
    if !inputs.has_prelude() {
        return PredictedPrelude { rounds: 0, sent_bytes: vec![0; shards.len()] };
    }
    let others = inputs.members_count() - 1;
    let gathered = |m: usize| measures_of(inputs, m) * size_of::<f64>() as u64 * others;
    let mut sent_bytes: Vec<u64> = (0..shards.len()).map(gathered).collect();
    if inputs.work.kind != WorkKind::AllReduceAdaptive {
        return PredictedPrelude { rounds: 1, sent_bytes };
    }
    let all: u64 = shards.iter().sum();
    for ((sent, shard), ranks) in sent_bytes.iter_mut().zip(shards).zip(ranks_of(inputs)) {
        *sent += inputs.bytes((all - shard) * ranks);
    }
    PredictedPrelude { rounds: number(shards[0].div_ceil(measured_chunk_elements(inputs)) + 1), sent_bytes }
}

fn two_pass(me: usize, inputs: &Inputs<'_>) -> Vec<Round> {
    let whole = Span { start: 0, len: inputs.work.elements() };
    let count = whole.len.div_ceil(inputs.measured_elements(1));
    let measure = |index| {
        let measure = Step::MeasureOwn { into: incoming(me), span: whole.split(count, index) };
        Round { steps: vec![measure], transfers: Vec::new() }
    };
    let mut rounds: Vec<Round> = (0..count).map(measure).collect();
    rounds.push(Round::default());
    gather_and_conclude(me, inputs, incoming(0), &mut rounds);
    rounds
}

fn adaptive(me: usize, inputs: &Inputs<'_>, shards: &[Span]) -> Vec<Round> {
    let count = shards[0].len.div_ceil(measured_chunk_elements(inputs));
    // The gathered measures reuse the registers of sent contributions; this member's own one is always free.
    let (first, into) = (outgoing(0, shards.len()), outgoing(me, shards.len()));
    let mut rounds = vec![Round::default()];
    for index in 0..count {
        let chunks: Vec<Span> = shards.iter().map(|shard| shard.split(count, index)).collect();
        rounds.last_mut().expect("never empty").contribute_to_owners(me, &chunks, Form::EachRank);
        let mut next = Round::default();
        next.step(chunks[me], Step::MeasureAll { first: incoming(0), into, span: chunks[me] });
        rounds.push(next);
    }
    gather_and_conclude(me, inputs, first, &mut rounds);
    rounds
}

/// Appends an all-gather of the measures, into registers from `first` on, and the conclusion.
fn gather_and_conclude(me: usize, inputs: &Inputs<'_>, first: Register, rounds: &mut Vec<Round>) {
    let gathering = rounds.last_mut().expect("never empty");
    let measures = |m: usize| (Register(first.0 + incoming(m).0), Span { start: 0, len: measures_of(inputs, m) });
    for peer in others(me, inputs.members()) {
        let ((own, own_span), (into, span)) = (measures(me), measures(peer));
        let (peer, form) = (member(peer), Form::Measures);
        gathering.transfers.push(Transfer::Send { to: peer, from: own, span: own_span, form });
        gathering.transfers.push(Transfer::Receive { from: peer, into, span, form });
    }
    rounds.push(Round { steps: vec![Step::Conclude { first }], transfers: Vec::new() });
}

/// The number of measures of a member.
fn measures_of(inputs: &Inputs<'_>, m: usize) -> u64 {
    let ranks = inputs.topology.size() as u64;
    match inputs.work.kind {
        WorkKind::AllReduceTwoPass { measures } => u64::from(measures) * inputs.topology.members[m].ranks.len() as u64,
        _ => ranks * (ranks + 1) / 2,
    }
}

/// The elements of a chunk of an adaptive prelude; at least 1.
fn measured_chunk_elements(inputs: &Inputs<'_>) -> u64 {
    let (min, max) = (limits::CHUNK_BYTES_MIN as u64, limits::CHUNK_BYTES_MAX as u64);
    let chunk_bytes = (FLIGHT_BYTES_MAX / (2 * inputs.members_count())).clamp(min, max);
    let values_each = ranks_of(inputs).max().unwrap_or(1);
    (chunk_bytes / inputs.bytes(values_each)).max(1)
}
