//! Reduce along a binomial tree, pipelined by chunks. The tree is folklore; see R. Thakur, R. Rabenseifner and W. Gropp,
//! "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
//!
//! The *position* `v = (m - root's member) mod n` of a member counts from the root. In round `k` the positions `v` with
//! `v mod 2^(k+1) = 2^k` send the reduction of positions `v..v + 2^k` to position `v - 2^k`, which uses it as the right
//! operand. So operands are in member order from the root on. Sub-schedule `c` reduces chunk `c` of the bucket.
//!
//! Closed form: `ceil(log2 n)` rounds when there is an element. Every member but the root sends `E` elements. A member
//! reduces `E` for each `k` with `v mod 2^(k+1) = 0` and `v + 2^k < n`: the root `E ceil(log2 n)`.
//!
//! The order of reduction is the same for every element and depends on the root.

use ronde_wire::Member;

use super::binomial_tree::BinomialTree;
use super::{Predicted, root_of, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Source, Span, Target};

/// The partial reduction of this member.
const SUM: Register = Register(0);
/// The partial reduction received from a child.
const REST: Register = Register(1);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let target = Target::One(root_of(inputs));
    let layout = Layout::in_order(&inputs.counts(), Source::EveryRank, target);
    let whole = Span { start: 0, len: layout.elements };
    let count = inputs.sub_schedule_count(whole.len);
    let tree = BinomialTree::new(inputs);
    let sub_schedules = inputs.sub_schedules(count, |index| rounds(&tree, me.index(), whole.split(count, index)));
    Plan { layout, sub_schedules, window: inputs.window(), prelude: false }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let elements = inputs.work.elements();
    if elements == 0 {
        return Predicted::idle(members);
    }
    let tree = BinomialTree::new(inputs);
    let all = inputs.bytes(elements);
    let reduced = |m: usize| all * children(&tree, tree.position_of(m)).count() as u64;
    Predicted {
        rounds: tree.depth,
        sent_bytes: (0..members).map(|m| if tree.position_of(m) == 0 { 0 } else { all }).collect(),
        reduced_bytes: (0..members).map(reduced).collect(),
        longest_block: elements,
        chunk_transfers: tree.depth,
        ..Predicted::idle(members)
    }
}

/// The rounds in which children send to a position.
fn children(tree: &BinomialTree, position: usize) -> impl Iterator<Item = u32> {
    let own = if position == 0 { tree.depth } else { position.trailing_zeros() };
    let members = tree.members;
    (0..own).filter(move |round| position + (1 << round) < members)
}

fn rounds(tree: &BinomialTree, me: usize, span: Span) -> Vec<Round> {
    let position = tree.position_of(me);
    let mut rounds = vec![Round::default(); tree.depth as usize + 1];
    rounds[0].contribute(SUM, span);
    for round in children(tree, position) {
        let index = round as usize;
        rounds[index].receive(tree.member_at(position + (1 << round)), REST, span);
        rounds[index + 1].reduce(SUM, REST, SUM, span);
    }
    if position == 0 {
        let last = &mut rounds[tree.depth as usize];
        last.finish(SUM, span);
        last.publish(SUM, span);
    } else {
        let round = position.trailing_zeros();
        rounds[round as usize].send(tree.member_at(position - (1 << round)), SUM, span);
    }
    trimmed(rounds)
}
