//! Layouts: the orders in which a bucket holds the elements of its tensors.

use ronde_wire::Rank;

use crate::inputs::Inputs;
use crate::plan::{Layout, Slice, Source, Span, Target, WorkKind};

impl Layout {
    /// Whole tensors, one after the other.
    pub(crate) fn in_order(counts: &[u64], source: Source, target: Target) -> Self {
        let mut layout = Self::default();
        for (tensor, &count) in (0..).zip(counts) {
            layout.push(tensor, source, target, Extent { len: count, ..Extent::default() });
        }
        layout
    }

    /// Shard 0 of every tensor, then shard 1 of every tensor, and so on. Every rank contributes to all shards and gets all of
    /// them. Also returns the spans of the shards.
    pub(crate) fn shard_major(counts: &[u64], shards: u64) -> (Self, Vec<Span>) {
        let mut layout = Self::default();
        let mut spans = Vec::new();
        for shard in 0..shards {
            let start = layout.elements;
            for (tensor, &count) in (0..).zip(counts) {
                let own = Span { start: 0, len: count }.split(shards, shard);
                let extent = Extent { len: own.len, input_start: own.start, output_start: own.start };
                layout.push(tensor, Source::EveryRank, Target::EveryRank, extent);
            }
            spans.push(Span { start, len: layout.elements - start });
        }
        (layout, spans)
    }

    /// The blocks of member 0's ranks, then those of member 1's ranks, and so on, for work with a count for each rank. A
    /// block is the contribution of its rank to a gather or an all-gather, or its result of a scatter or a reduce-scatter.
    /// The tensor on the other side holds the blocks in rank order of the set. Also returns the spans of the members.
    pub(crate) fn member_major(inputs: &Inputs<'_>) -> (Self, Vec<Span>) {
        let order = inputs.topology.ranks();
        let tensors = &inputs.work.tensors;
        let starts: Vec<Vec<u64>> = tensors.iter().map(|counts| running_sums(counts)).collect();
        let mut layout = Self::default();
        let mut spans = Vec::new();
        for member in &inputs.topology.members {
            let start = layout.elements;
            for (tensor, counts) in (0..).zip(tensors) {
                for &rank in &member.ranks {
                    let position = order.partition_point(|other| *other < rank);
                    let (len, before) = (counts[position], starts[tensor as usize][position]);
                    let (source, target, extent) = ends(&inputs.work.kind, rank, len, before);
                    layout.push(tensor, source, target, extent);
                }
            }
            spans.push(Span { start, len: layout.elements - start });
        }
        (layout, spans)
    }

    /// The blocks from each member's ranks to each member's ranks, those of the lowest sender first. Also returns the spans
    /// of the pairs of members.
    pub(crate) fn pair_major(inputs: &Inputs<'_>) -> (Self, Vec<Span>) {
        let extents: Vec<PairExtents> =
            inputs.work.tensors.iter().map(|counts| PairExtents::new(inputs, counts)).collect();
        let order = inputs.topology.ranks();
        let positioned = |ranks: &[Rank]| -> Vec<(Rank, usize)> {
            ranks.iter().map(|rank| (*rank, order.partition_point(|other| other < rank))).collect()
        };
        let members: Vec<_> = inputs.topology.members.iter().map(|member| positioned(&member.ranks)).collect();
        let mut layout = Self::default();
        let mut spans = Vec::new();
        for (senders, receivers) in members.iter().flat_map(|a| members.iter().map(move |b| (a, b))) {
            let start = layout.elements;
            for (tensor, extents) in (0..).zip(&extents) {
                for (from, to) in senders.iter().flat_map(|from| receivers.iter().map(move |to| (from, to))) {
                    layout.push(tensor, Source::One(from.0), Target::One(to.0), extents.of(from.1, to.1));
                }
            }
            spans.push(Span { start, len: layout.elements - start });
        }
        (layout, spans)
    }

    fn push(&mut self, tensor: u32, source: Source, target: Target, extent: Extent) {
        let Extent { len, input_start, output_start } = extent;
        if len == 0 {
            return;
        }
        let span = Span { start: self.elements, len };
        self.elements = span.end();
        self.slices.push(Slice { span, tensor, source, target, input_start, output_start });
    }
}

/// The positions of a run of elements in the contributing tensor and in the result.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    len: u64,
    input_start: u64,
    output_start: u64,
}

/// The source, target and positions of a rank's block of `len` elements, after `before` elements of lower ranks.
fn ends(kind: &WorkKind, rank: Rank, len: u64, before: u64) -> (Source, Target, Extent) {
    let contributed = Extent { len, input_start: 0, output_start: before };
    let received = Extent { len, input_start: before, output_start: 0 };
    match *kind {
        WorkKind::Gather { root } => (Source::One(rank), Target::One(root), contributed),
        WorkKind::Scatter { root } => (Source::One(root), Target::One(rank), received),
        WorkKind::ReduceScatter => (Source::EveryRank, Target::One(rank), received),
        _ => (Source::One(rank), Target::EveryRank, contributed),
    }
}

/// The positions of an all-to-all's blocks in one tensor's inputs and results, by positions of ranks in the set.
struct PairExtents {
    size: usize,
    extents: Vec<Extent>,
}

impl PairExtents {
    fn new(inputs: &Inputs<'_>, counts: &[u64]) -> Self {
        let size = inputs.topology.size();
        let mut received = vec![0; size];
        let mut extents = Vec::with_capacity(counts.len());
        for row in counts.chunks_exact(size) {
            for ((&len, input_start), output_end) in row.iter().zip(running_sums(row)).zip(&mut received) {
                extents.push(Extent { len, input_start, output_start: *output_end });
                *output_end += len;
            }
        }
        Self { size, extents }
    }

    fn of(&self, from: usize, to: usize) -> Extent {
        self.extents[from * self.size + to]
    }
}

/// For each number, the sum of those before it.
fn running_sums(numbers: &[u64]) -> Vec<u64> {
    let mut sum = 0;
    let before = |number: &u64| {
        sum += number;
        sum - number
    };
    numbers.iter().map(before).collect()
}
