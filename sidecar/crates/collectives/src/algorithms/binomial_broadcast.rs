//! Broadcast along a binomial tree, pipelined by chunks. The tree is folklore; see R. Thakur, R. Rabenseifner and W.
//! Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
//!
//! The *position* `v = (m - root's member) mod n` of a member counts from the root. In round `k` every position below
//! `2^k` sends to position `v + 2^k` if there is one, so position `v > 0` receives in round `floor(log2 v)`.
//! Sub-schedule `c` sends chunk `c` of the bucket down the tree.
//!
//! Closed form: `ceil(log2 n)` rounds when there is an element. A member sends `E` elements for each `k` with
//! `2^k > v` and `v + 2^k < n`: the root `E ceil(log2 n)`. Nothing is reduced.

use ronde_wire::Member;

use super::binomial_tree::BinomialTree;
use super::{Predicted, root_of, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Source, Span, Target};

const VALUE: Register = Register(0);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let root = root_of(inputs);
    let layout = Layout::in_order(&inputs.counts(), Source::One(root), Target::EveryRank);
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
    let sent = |m: usize| {
        let children = (0..tree.depth).filter(|&k| child(&tree, tree.position_of(m), k).is_some());
        inputs.bytes(elements) * children.count() as u64
    };
    Predicted {
        rounds: tree.depth,
        sent_bytes: (0..members).map(sent).collect(),
        longest_block: elements,
        chunk_transfers: tree.depth,
        ..Predicted::idle(members)
    }
}

fn rounds(tree: &BinomialTree, me: usize, span: Span) -> Vec<Round> {
    let position = tree.position_of(me);
    let mut rounds = vec![Round::default(); tree.depth as usize + 1];
    let held = match position.checked_ilog2() {
        None => {
            rounds[0].contribute(VALUE, span);
            0
        }
        Some(round) => {
            let parent = tree.member_at(position - (1 << round));
            rounds[round as usize].receive(parent, VALUE, span);
            round as usize + 1
        }
    };
    rounds[held].publish(VALUE, span);
    for round in 0..tree.depth {
        if let Some(child) = child(tree, position, round) {
            rounds[round as usize].send(tree.member_at(child), VALUE, span);
        }
    }
    trimmed(rounds)
}

/// The position to which `position` sends in a round, if any.
fn child(tree: &BinomialTree, position: usize, round: u32) -> Option<usize> {
    let child = position + (1 << round);
    (position < (1 << round) && child < tree.members).then_some(child)
}
