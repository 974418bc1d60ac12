//! Broadcast along a binomial tree, pipelined by chunks. The tree is folklore; see R. Thakur, R. Rabenseifner and W.
//! Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
//!
//! Vocabulary: the *place* `v = (m - root's member) mod n` of a member counts from the root. In round `k` every place
//! below `2^k` sends to place `v + 2^k` if there is one, so place `v > 0` receives in round `floor(log2 v)`. Strand `c`
//! sends part `c` of the bucket down the tree; strands overlap.
//!
//! Closed form: `ceil(log2 n)` rounds when there is an element. A member sends `E` elements for each `k` with
//! `2^k > v` and `v + 2^k < n`: the root `E ceil(log2 n)`. Nothing is reduced.

use ronde_wire::{Member, Rank};

use super::{Predicted, member, trimmed};
use crate::plan::{Layout, Plan, Register, Round, Source, Span, WorkKind};
use crate::planner::Inputs;

const VALUE: Register = Register(0);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let root = root(inputs);
    let layout = Layout::in_order(&inputs.counts(), Source::One(root));
    let whole = Span { start: 0, len: layout.elements };
    let count = inputs.strand_count(whole.len);
    let tree = Tree::new(inputs, root);
    let strands = inputs.strands(count, |index| rounds(&tree, me.index(), whole.part(count, index)));
    Plan { layout, strands, window: inputs.window(), prelude: false }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let elements = inputs.work.elements();
    if elements == 0 {
        return Predicted::idle(members);
    }
    let tree = Tree::new(inputs, root(inputs));
    let sent = |m: usize| {
        let children = (0..tree.depth).filter(|&k| tree.child(tree.place(m), k).is_some());
        inputs.bytes(elements) * children.count() as u64
    };
    Predicted {
        rounds: tree.depth,
        sent_bytes: (0..members).map(sent).collect(),
        reduced_bytes: vec![0; members],
        longest_block: elements,
    }
}

struct Tree {
    members: usize,
    root: usize,
    depth: u32,
}

impl Tree {
    fn new(inputs: &Inputs<'_>, root: Rank) -> Self {
        let members = inputs.members();
        let root = inputs.topology.member_of(root).expect("the planner checked that the root is in the set").index();
        Self { members, root, depth: members.next_power_of_two().ilog2() }
    }

    fn place(&self, me: usize) -> usize {
        (me + self.members - self.root) % self.members
    }

    fn member_at(&self, place: usize) -> Member {
        member((place + self.root) % self.members)
    }

    /// The place to which another sends in a round, if it does.
    fn child(&self, place: usize, round: u32) -> Option<usize> {
        let child = place + (1 << round);
        (place < (1 << round) && child < self.members).then_some(child)
    }
}

fn rounds(tree: &Tree, me: usize, span: Span) -> Vec<Round> {
    let place = tree.place(me);
    let mut rounds = vec![Round::default(); tree.depth as usize + 1];
    let held = match place.checked_ilog2() {
        None => {
            rounds[0].contribute(VALUE, span);
            0
        }
        Some(round) => {
            let parent = tree.member_at(place - (1 << round));
            rounds[round as usize].receive(parent, VALUE, span);
            round as usize + 1
        }
    };
    rounds[held].publish(VALUE, span);
    for round in 0..tree.depth {
        if let Some(child) = tree.child(place, round) {
            rounds[round as usize].send(tree.member_at(child), VALUE, span);
        }
    }
    trimmed(rounds)
}

fn root(inputs: &Inputs<'_>) -> Rank {
    match inputs.work.kind {
        WorkKind::Broadcast { root } => root,
        _ => unreachable!("the planner gives this algorithm broadcasts only"),
    }
}
