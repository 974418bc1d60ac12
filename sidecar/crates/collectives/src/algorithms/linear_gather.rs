//! Gather in one round: all members send to the root at once.
//!
//! A tree would send forwarded bytes several times, and the root receives every byte once in any case. For the few members
//! of typical gathers one round is also the fastest. Linear gather is folklore; R. Thakur and R. Rabenseifner (2005)
//! use it for long messages.
//!
//! The *block* of a member is the contribution of its ranks, tensor by tensor and rank by rank. The bucket holds blocks in
//! member order. Sub-schedule `c` moves chunk `c` of every block. The root has a register for each member.
//!
//! Closed form, with `B(i)` the elements of block `i`: 1 round when a member other than the root's has an element. Member
//! `m` sends `B(m)` elements, the root's member 0. Nothing is reduced.

use ronde_wire::Member;

use super::{Predicted, block_lens, linear_predicted, plan_of_blocks, root_member, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Span};

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let (layout, blocks) = Layout::member_major(inputs);
    let root = root_member(inputs);
    plan_of_blocks(inputs, layout, &blocks, |chunks| rounds(me, root, chunks))
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let blocks = block_lens(inputs);
    let root = root_member(inputs).index();
    let sent_bytes = (0..).zip(&blocks).map(|(m, block)| if m == root { 0 } else { inputs.bytes(*block) }).collect();
    Predicted { sent_bytes, ..linear_predicted(inputs, &blocks) }
}

/// The rounds of one sub-schedule; `chunks[i]` is its chunk of block `i`, for which the root uses register `i`.
fn rounds(me: Member, root: Member, chunks: &[Span]) -> Vec<Round> {
    let own = chunks[me.index()];
    let mut first = Round::default();
    if me != root {
        first.contribute(Register(0), own);
        first.send(root, Register(0), own);
        return trimmed(vec![first]);
    }
    let mut second = Round::default();
    for ((other, register), &chunk) in (0..).map(Member).zip((0..).map(Register)).zip(chunks) {
        if other == root {
            first.contribute(register, chunk);
            first.publish(register, chunk);
        } else {
            first.receive(other, register, chunk);
            second.publish(register, chunk);
        }
    }
    trimmed(vec![first, second])
}
