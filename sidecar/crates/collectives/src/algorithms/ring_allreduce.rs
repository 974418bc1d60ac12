//! All-reduce on a ring: reduce-scatter, then all-gather. P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
//! algorithms for clusters of workstations", JPDC 69 (2009).
//!
//! Every tensor is cut into `n` shards, the first `count % n` of them one element longer; shard `i` of the bucket is shard
//! `i` of all its tensors. Shard `i` starts at member `i` and goes once around the ring, while every member adds its
//! contribution as the right operand. It is complete at its *owner*, member `i - 1`, which finishes it (average, postscale)
//! once. Then it goes around a second time. Sub-schedule `c` does this with chunk `c` of every shard.
//!
//! ```text
//! round r < n-1          send shard m - r, receive shard m - r - 1      (reduce-scatter)
//! round r = n-1 + g      send shard m + 1 - g, receive shard m - g      (all-gather)
//! ```
//!
//! Closed form, with `P(i)` the elements of shard `i`: 2 (n - 1) rounds when there is an element. Member `m` sends
//! `2 E - P(m + 1) - P(m + 2)` elements (it keeps the shard that it owns in the first half, and the one that it gets last
//! in the second) and reduces `E - P(m)`.
//!
//! An element's order of reduction depends on its shard, hence on `n` and its tensor's count only.

use ronde_wire::Member;

use super::{Predicted, back, neighbours, number, plan_of_blocks, shard_lens, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Span};

/// Alternates with [`EVEN`]: a shard received into one is sent from it in the next round.
const ODD: Register = Register(0);
const EVEN: Register = Register(1);
/// This member's contribution until it is reduced into the received shard.
const OWN: Register = Register(2);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let (layout, shards) = Layout::shard_major(&inputs.counts(), inputs.members_count());
    plan_of_blocks(inputs, layout, &shards, |chunks| rounds(me.index(), chunks))
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let shards = shard_lens(inputs);
    let all: u64 = shards.iter().sum();
    if all == 0 {
        return Predicted::idle(members);
    }
    let len = |shard: usize| shards[shard % members];
    Predicted {
        rounds: number(2 * members as u64 - 2),
        sent_bytes: (0..members).map(|m| inputs.bytes(2 * all - len(m + 1) - len(m + 2))).collect(),
        reduced_bytes: (0..members).map(|m| inputs.bytes(all - len(m))).collect(),
        longest_block: len(0),
        chunk_transfers: number(2 * members as u64 - 2),
        ..Predicted::idle(members)
    }
}

/// The rounds of one sub-schedule; `chunks[i]` is its chunk of shard `i`.
fn rounds(me: usize, chunks: &[Span]) -> Vec<Round> {
    let members = chunks.len();
    let (previous, next) = neighbours(me, members);
    let halves = 2 * (members - 1);
    let mut rounds = vec![Round::default(); halves + 1];
    for (index, round) in rounds.iter_mut().enumerate() {
        let (held, free) = if index % 2 == 0 { (EVEN, ODD) } else { (ODD, EVEN) };
        let gathered = (index + 1).checked_sub(members);
        let outgoing = match gathered {
            None => chunks[back(me, index, members)],
            Some(hops) => chunks[back(me + 1, hops, members)],
        };
        match gathered {
            None | Some(0) => add_own(round, held, outgoing, index == 0),
            Some(_) => {}
        }
        if gathered == Some(0) {
            round.finish(held, outgoing);
        }
        if gathered.is_some() {
            round.publish(held, outgoing);
        }
        if index < halves {
            let incoming = match gathered {
                None => chunks[back(me, index + 1, members)],
                Some(hops) => chunks[back(me, hops, members)],
            };
            round.send(next, held, outgoing);
            round.receive(previous, free, incoming);
        }
    }
    trimmed(rounds)
}

/// Adds this member's contribution to the shard in `held` as the right operand; the first member only loads it.
fn add_own(round: &mut Round, held: Register, span: Span, first: bool) {
    if first {
        round.contribute(held, span);
    } else {
        round.contribute(OWN, span);
        round.reduce(held, OWN, held, span);
    }
}
