//! Scatter in one round: the root sends to all members at once. A message from one rank to another is a scatter over the
//! two of them. [`super::linear_gather`] explains why it is not a tree.
//!
//! The *block* of a member is the result of its ranks, tensor by tensor and rank by rank. The bucket holds blocks in member
//! order. Sub-schedule `c` moves chunk `c` of every block. The root has a register for each member.
//!
//! Closed form, with `B(i)` the elements of block `i`: 1 round when a member other than the root's gets an element. The
//! root's member `m` sends `E - B(m)` elements, the others 0. Nothing is reduced.

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
    let all: u64 = blocks.iter().sum();
    let mut sent_bytes = vec![0; blocks.len()];
    sent_bytes[root] = inputs.bytes(all - blocks[root]);
    Predicted { sent_bytes, ..linear_predicted(inputs, &blocks) }
}

/// The rounds of one sub-schedule; `chunks[i]` is its chunk of block `i`, for which the root uses register `i`.
fn rounds(me: Member, root: Member, chunks: &[Span]) -> Vec<Round> {
    let own = chunks[me.index()];
    let (mut first, mut second) = (Round::default(), Round::default());
    if me != root {
        first.receive(root, Register(0), own);
        second.publish(Register(0), own);
        return trimmed(vec![first, second]);
    }
    for ((other, register), &chunk) in (0..).map(Member).zip((0..).map(Register)).zip(chunks) {
        first.contribute(register, chunk);
        if other == root {
            first.publish(register, chunk);
        } else {
            first.send(other, register, chunk);
        }
    }
    trimmed(vec![first])
}
