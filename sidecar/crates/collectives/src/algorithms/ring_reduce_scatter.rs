//! Reduce-scatter on a ring, with blocks of any length: the first half of [`super::ring_allreduce`], where a member ends
//! with the block of its own ranks. P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", JPDC 69 (2009).
//!
//! The *block* of a member is the result of its ranks, tensor by tensor and rank by rank. The bucket holds blocks in member
//! order. Block `i` starts at member `i + 1` and goes once around, while every member adds its contribution as the right
//! operand. It is complete at member `i`, which finishes it. In round `r` a member sends block `m - r - 1` and receives block
//! `m - r - 2`. Sub-schedule `c` does this with chunk `c` of every block.
//!
//! Closed form, with `B(i)` the elements of block `i`: `n - 1` rounds when there is an element. Member `m` sends `E - B(m)`
//! elements and reduces `E - B(m - 1)`.
//!
//! An element's order of reduction depends on the member that gets it, hence on topology and its tensor's counts only.

use ronde_wire::Member;

use super::{Predicted, back, block_lens, neighbours, number, plan_of_blocks, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Span};

/// The two registers alternate: a block received into one is sent from it in the next round.
const EVEN: Register = Register(0);
const ODD: Register = Register(1);
/// This member's contribution until it is reduced into the received block.
const OWN: Register = Register(2);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let (layout, blocks) = Layout::member_major(inputs);
    plan_of_blocks(inputs, layout, &blocks, |chunks| rounds(me.index(), chunks))
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let blocks = block_lens(inputs);
    let all: u64 = blocks.iter().sum();
    if all == 0 {
        return Predicted::idle(members);
    }
    Predicted {
        rounds: number(members as u64 - 1),
        sent_bytes: (0..members).map(|m| inputs.bytes(all - blocks[m])).collect(),
        reduced_bytes: (0..members).map(|m| inputs.bytes(all - blocks[back(m, 1, members)])).collect(),
        longest_block: blocks.into_iter().max().unwrap_or(0),
        chunk_transfers: number(members as u64 - 1),
        ..Predicted::idle(members)
    }
}

/// The rounds of one sub-schedule; `chunks[i]` is its chunk of block `i`.
fn rounds(me: usize, chunks: &[Span]) -> Vec<Round> {
    let members = chunks.len();
    let (previous, next) = neighbours(me, members);
    let mut rounds = vec![Round::default(); members];
    for (index, round) in rounds.iter_mut().enumerate() {
        let (held, free) = if index % 2 == 0 { (EVEN, ODD) } else { (ODD, EVEN) };
        let block = chunks[back(me, index + 1, members)];
        if index == 0 {
            round.contribute(held, block);
        } else {
            round.contribute(OWN, block);
            round.reduce(held, OWN, held, block);
        }
        if index + 1 < members {
            round.send(next, held, block);
            round.receive(previous, free, chunks[back(me, index + 2, members)]);
        } else {
            round.finish(held, block);
            round.publish(held, block);
        }
    }
    trimmed(rounds)
}
