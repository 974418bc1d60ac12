//! All-gather on a ring, with blocks of any length: the second half of [`super::ring_allreduce`], where every member
//! begins with the block of its own ranks. R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
//! communication operations in MPICH", IJHPCA 19 (2005).
//!
//! The *block* of a member is the contribution of its ranks, tensor by tensor and rank by rank. The bucket holds blocks in
//! member order, results hold them in rank order; the layout maps one to the other. In round `r` a member sends block
//! `m - r` and receives block `m - r - 1`. Sub-schedule `c` does this with chunk `c` of every block.
//!
//! Closed form, with `B(i)` the elements of block `i`: `n - 1` rounds when there is an element. Member `m` sends
//! `E - B(m + 1)` elements. Nothing is reduced.

use ronde_wire::Member;

use super::{Predicted, back, block_lens, neighbours, number, plan_of_blocks, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Span};

/// The two registers alternate: a block received into one is sent from it in the next round.
const EVEN: Register = Register(0);
const ODD: Register = Register(1);

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
        sent_bytes: (0..members).map(|m| inputs.bytes(all - blocks[(m + 1) % members])).collect(),
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
        let outgoing = chunks[back(me, index, members)];
        if index == 0 {
            round.contribute(held, outgoing);
        }
        round.publish(held, outgoing);
        if index + 1 < members {
            round.send(next, held, outgoing);
            round.receive(previous, free, chunks[back(me, index + 1, members)]);
        }
    }
    trimmed(rounds)
}
