//! All-to-all by pairwise exchange, with blocks of any length. R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
//! collective communication operations in MPICH", IJHPCA 19 (2005).
//!
//! *Block* `(a, b)` is what the ranks of member `a` send to those of member `b`, tensor by tensor. The bucket holds blocks in
//! order of senders. In round `r` a member sends its block for `m + r + 1` and receives the one from `m - r - 1`: each member
//! has one sender and one receiver in each round. It copies its block for itself in round 0. Sub-schedule `c` does this with
//! chunk `c` of every block.
//!
//! Closed form, with `B(a, b)` the elements of a block: as many rounds as the greatest distance over which there is an
//! element, up to `n - 1`. Member `m` sends the sum of `B(m, b)` over all others `b`. Nothing is reduced.

use ronde_wire::{Member, Rank};

use super::{Predicted, back, member, number, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Layout, Plan, Register, Round, Span};

/// This member's block for itself.
const OWN: Register = Register(0);
const OUTGOING: Register = Register(1);
const INCOMING: Register = Register(2);

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let (layout, blocks) = Layout::pair_major(inputs);
    let longest = blocks.iter().map(|block| block.len).max().unwrap_or(0);
    let count = inputs.sub_schedule_count(longest);
    let members = inputs.members();
    let sub_schedules = inputs.sub_schedules(count, |index| {
        let chunk = |from: usize, to: usize| blocks[from * members + to].split(count, index);
        rounds(me.index(), members, chunk)
    });
    Plan { layout, sub_schedules, window: inputs.window(), prelude: false }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let blocks = pair_lens(inputs);
    let block = |from: usize, to: usize| blocks[from * members + to];
    let used = |distance: &usize| (0..members).any(|from| block(from, (from + distance) % members) > 0);
    let rounds = (1..members).filter(used).max().unwrap_or(0);
    let sent = |m: usize| inputs.bytes((0..members).filter(|to| *to != m).map(|to| block(m, to)).sum());
    Predicted {
        rounds: number(rounds as u64),
        sent_bytes: (0..members).map(sent).collect(),
        longest_block: blocks.iter().copied().max().unwrap_or(0),
        chunk_transfers: number(rounds as u64),
        ..Predicted::idle(members)
    }
}

/// The lengths of the blocks sender by sender, without the layout.
fn pair_lens(inputs: &Inputs<'_>) -> Vec<u64> {
    let order = inputs.topology.ranks();
    let position = |rank: &Rank| order.partition_point(|other| other < rank);
    let places: Vec<Vec<usize>> =
        inputs.topology.members.iter().map(|member| member.ranks.iter().map(position).collect()).collect();
    let mut lens = Vec::with_capacity(places.len() * places.len());
    for (from, to) in places.iter().flat_map(|from| places.iter().map(move |to| (from, to))) {
        let rows = from.iter().flat_map(|row| to.iter().map(move |column| (row, column)));
        let pairs = rows.map(|(row, column)| row * order.len() + column);
        lens.push(pairs.map(|pair| inputs.work.tensors.iter().map(|counts| counts[pair]).sum::<u64>()).sum());
    }
    lens
}

/// The rounds of one sub-schedule; `chunk` gives its chunk of a block.
fn rounds(me: usize, members: usize, chunk: impl Fn(usize, usize) -> Span) -> Vec<Round> {
    let mut rounds = vec![Round::default(); members];
    rounds[0].contribute(OWN, chunk(me, me));
    rounds[0].publish(OWN, chunk(me, me));
    for distance in 1..members {
        let (to, from) = ((me + distance) % members, back(me, distance, members));
        rounds[distance - 1].contribute(OUTGOING, chunk(me, to));
        rounds[distance - 1].send(member(to), OUTGOING, chunk(me, to));
        rounds[distance - 1].receive(member(from), INCOMING, chunk(from, me));
        rounds[distance].publish(INCOMING, chunk(from, me));
    }
    trimmed(rounds)
}
