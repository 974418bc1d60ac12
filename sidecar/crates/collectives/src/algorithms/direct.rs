//! All-reduce in two stages without forwarding: shards go to their owners, results come from their owners.
//!
//! It serves codecs, which must not be applied again at each hop: H. Tang et al., "1-bit Adam: communication efficient
//! large-scale training with Adam's convergence speed", ICML 2021, describe this compressed all-reduce. It also serves
//! reducers that need all ranks' values of an element at once, such as the median (D. Yin et al., "Byzantine-robust
//! distributed learning: towards optimal statistical rates", ICML 2018) or Adasum (see [`super::direct_prelude`]): for them
//! partial results have no meaning.
//!
//! Every tensor is cut into `n` shards as for a ring, and member `i` owns shard `i`. Sub-schedule `c` moves chunk `c` of
//! every shard. `k(m)` is the number of ranks of member `m`, `N` that of the set.
//!
//! ```text
//! round 0    contribute to all shards (coded: encode each); send each to its owner, receive this member's one from all
//! round 1    reduce this member's shard (coded: decode each, reduce in member order), finish, coded: encode; send to all
//! round 2    coded: decode; publish all shards
//! ```
//!
//! With a codec the owner also encodes and decodes its own contribution and result: every contribution is rounded alike,
//! and all ranks end with equal bits. An n-ary contribution holds each rank's values, so a chunk has up to `max k` times
//! fewer elements. Where the reducer measures first, sub-schedule 0 is a [prelude](super::direct_prelude).
//!
//! Closed form, with `P(i)` the elements of shard `i`: 2 rounds when there is an element. Member `m` sends `E - P(m)` elements
//! (n-ary: `k(m)` values of each), then `P(m)` elements `n - 1` times; with a codec both in encoded bytes. It reduces
//! `(n - 1) P(m)` elements (n-ary: `N P(m)`). A sub-schedule holds up to `2 n` chunks.
//!
//! A codec of blocks must get the same blocks in any bucket. *By blocks*, therefore, sub-schedule `c` carries one block of
//! one tensor: the next `block_elements` elements of that tensor's shard. There are as many sub-schedules as blocks in the
//! first shard, and `B` of them in shard `i` are not empty. Member `m` sends at most the bytes of an encoded block times the
//! blocks of all others' shards, and `n - 1` times those of its own.
//!
//! An element's order of reduction is always that of the members (n-ary: of the ranks).

use ronde_wire::Member;

use super::{Predicted, direct_prelude, member, number, shard_lens, trimmed};
use crate::inputs::Inputs;
use crate::plan::{Form, Layout, Plan, Register, Round, Span, Step, Transfer, WorkKind};

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let (layout, shards) = Layout::shard_major(&inputs.counts(), inputs.members_count());
    let count = predicted(inputs).chunks_per_block(inputs.chunk_elements);
    let stages = Stages { me: me.index(), form: contributed_form(inputs) };
    let mut sub_schedules = match inputs.work.kind {
        WorkKind::AllReduceByBlocks { block_elements, .. } => {
            let mut blocks = blocks(inputs, &shards, u64::from(block_elements)).into_iter();
            inputs.sub_schedules(count, |_| stages.rounds(&blocks.next().expect("as many as the closed form says")))
        }
        _ => inputs.sub_schedules(count, |index| {
            let chunks: Vec<Span> = shards.iter().map(|shard| shard.split(count, index)).collect();
            stages.rounds(&chunks)
        }),
    };
    let prelude = inputs.has_prelude();
    if prelude {
        sub_schedules.insert(0, direct_prelude::sub_schedule(me, inputs, &shards));
    }
    Plan { layout, sub_schedules, window: inputs.window(), prelude }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    let all = inputs.work.elements();
    if all == 0 {
        return Predicted::idle(members);
    }
    let n_ary = contributed_form(inputs) == Form::EachRank;
    let others = inputs.members_count() - 1;
    let shards = shard_lens(inputs);
    let blocks = block_counts(inputs);
    let all_blocks: u64 = blocks.iter().sum();
    let sent = |(member, (shard, ranks)): (usize, (&u64, u64))| {
        if let WorkKind::AllReduceByBlocks { encoded_bytes, .. } = inputs.work.kind {
            return (all_blocks - blocks[member] + blocks[member] * others) * u64::from(encoded_bytes);
        }
        let contributed = (all - shard) * if n_ary { ranks } else { 1 };
        sent_bytes(inputs, contributed + shard * others)
    };
    let operands = if n_ary { inputs.topology.size() as u64 } else { others };
    let prelude = direct_prelude::predicted(inputs, &shards);
    let of_members = shards.iter().zip(ranks_of(inputs)).enumerate();
    Predicted {
        rounds: prelude.rounds.max(2),
        sent_bytes: of_members.map(sent).zip(prelude.sent_bytes).map(|(a, b)| a + b).collect(),
        reduced_bytes: shards.iter().map(|shard| inputs.bytes(shard * operands)).collect(),
        longest_block: shards[0],
        fixed_chunks: blocks.first().copied(),
        values_each: if n_ary { ranks_of(inputs).max().unwrap_or(1) } else { 1 },
        preludes: u32::from(inputs.has_prelude()),
        chunk_transfers: number(2 * others),
        held_chunks: number(2 * inputs.members_count()),
        ..Predicted::idle(members)
    }
}

/// The register for a member's contribution to this member's shard.
pub(super) fn incoming(peer: usize) -> Register {
    Register(u16::try_from(peer).expect("members are at most SIDECARS_MAX, checked by the planner"))
}

/// The register for the contribution to another member's shard, then for that shard's result. That of this member's own
/// shard is free.
pub(super) fn outgoing(peer: usize, members: usize) -> Register {
    incoming(members + peer)
}

/// All other members, nearest first, so that not all start with the same one.
pub(super) fn others(me: usize, members: usize) -> impl Iterator<Item = usize> {
    (1..members).map(move |distance| (me + distance) % members)
}

/// The number of ranks of each member.
pub(super) fn ranks_of(inputs: &Inputs<'_>) -> impl Iterator<Item = u64> {
    inputs.topology.members.iter().map(|member| member.ranks.len() as u64)
}

impl Round {
    /// Loads the contribution to all shards' chunks and sends each to its owner.
    pub(super) fn contribute_to_owners(&mut self, me: usize, chunks: &[Span], form: Form) {
        let members = chunks.len();
        for (shard, &span) in chunks.iter().enumerate() {
            let register = if shard == me { incoming(me) } else { outgoing(shard, members) };
            if form == Form::Encoded {
                self.contribute(register, span);
                self.step(span, Step::Encode { register, span });
            } else {
                self.contribute_each(register, span);
            }
        }
        for peer in others(me, members) {
            let (to, span) = (member(peer), chunks[peer]);
            self.transfer(span, Transfer::Send { to, from: outgoing(peer, members), span, form });
            let (from, span) = (member(peer), chunks[me]);
            self.transfer(span, Transfer::Receive { from, into: incoming(peer), span, form });
        }
    }
}

/// The rounds of all sub-schedules except a prelude.
struct Stages {
    me: usize,
    /// The representation of contributions.
    form: Form,
}

impl Stages {
    /// The rounds of one sub-schedule; `chunks[i]` is its chunk of shard `i`.
    fn rounds(&self, chunks: &[Span]) -> Vec<Round> {
        let mut rounds = vec![Round::default(); 3];
        rounds[0].contribute_to_owners(self.me, chunks, self.form);
        let result = self.reduce(&mut rounds[1], chunks);
        let form = if self.form == Form::Encoded { Form::Encoded } else { Form::Values };
        for peer in others(self.me, chunks.len()) {
            let (to, span) = (member(peer), chunks[self.me]);
            rounds[1].transfer(span, Transfer::Send { to, from: result, span, form });
            let (from, span) = (member(peer), chunks[peer]);
            rounds[1].transfer(span, Transfer::Receive { from, into: outgoing(peer, chunks.len()), span, form });
        }
        for (shard, &span) in chunks.iter().enumerate() {
            let register = if shard == self.me { result } else { outgoing(shard, chunks.len()) };
            if form == Form::Encoded {
                rounds[2].step(span, Step::Decode { register, span });
            }
            rounds[2].publish(register, span);
        }
        trimmed(rounds)
    }

    /// Reduces and finishes this member's shard; returns the register with the result.
    fn reduce(&self, round: &mut Round, chunks: &[Span]) -> Register {
        let (members, span) = (chunks.len(), chunks[self.me]);
        if self.form == Form::EachRank {
            let result = outgoing(self.me, members);
            round.reduce_all(incoming(0), result, span);
            round.finish(result, span);
            return result;
        }
        let result = incoming(0);
        for peer in 0..members {
            let register = incoming(peer);
            round.step(span, Step::Decode { register, span });
            if peer > 0 {
                round.reduce(result, register, result, span);
            }
        }
        round.finish(result, span);
        round.step(span, Step::Encode { register: result, span });
        result
    }
}

fn contributed_form(inputs: &Inputs<'_>) -> Form {
    if inputs.work.kind.is_coded() { Form::Encoded } else { Form::EachRank }
}

/// For each sub-schedule its block of each shard, for work by blocks: tensor by tensor, from the first element of the
/// tensor's shard on.
fn blocks(inputs: &Inputs<'_>, shards: &[Span], block_elements: u64) -> Vec<Vec<Span>> {
    let members = inputs.members_count();
    let mut starts: Vec<u64> = shards.iter().map(|shard| shard.start).collect();
    let mut blocks = Vec::new();
    for len in inputs.counts() {
        let whole = Span { start: 0, len };
        let lens: Vec<u64> = (0..members).map(|shard| whole.split(members, shard).len).collect();
        for block in 0..lens[0].div_ceil(block_elements) {
            let of_shard = |(start, len): (&u64, &u64)| {
                let skipped = (block * block_elements).min(*len);
                Span { start: start + skipped, len: block_elements.min(len - skipped) }
            };
            blocks.push(starts.iter().zip(&lens).map(of_shard).collect());
        }
        starts.iter_mut().zip(&lens).for_each(|(start, len)| *start += len);
    }
    blocks
}

/// The number of non-empty blocks of each shard; empty for other kinds of work.
fn block_counts(inputs: &Inputs<'_>) -> Vec<u64> {
    let WorkKind::AllReduceByBlocks { block_elements, .. } = inputs.work.kind else { return Vec::new() };
    let members = inputs.members_count();
    let of_shard = |shard| {
        let blocks = |len| Span { start: 0, len }.split(members, shard).len.div_ceil(u64::from(block_elements));
        inputs.counts().into_iter().map(blocks).sum()
    };
    (0..members).map(of_shard).collect()
}

/// The bytes that so many values take in transfers.
fn sent_bytes(inputs: &Inputs<'_>, values: u64) -> u64 {
    match inputs.work.kind {
        WorkKind::AllReduceCoded { encoded_bytes } => values * u64::from(encoded_bytes),
        _ => inputs.bytes(values),
    }
}
