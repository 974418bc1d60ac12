//! The ways to lay tensors into a bucket.

use ronde_wire::Rank;

use crate::plan::{Layout, Slice, Source, Span, Target, WorkKind};
use crate::planner::Inputs;

impl Layout {
    /// Tensor behind tensor, whole.
    pub(crate) fn in_order(counts: &[u64], source: Source, target: Target) -> Self {
        let mut layout = Self::default();
        for (tensor, &count) in (0..).zip(counts) {
            layout.push(tensor, source, target, Extent { len: count, ..Extent::default() });
        }
        layout
    }

    /// Shard 0 of every tensor, then shard 1 of every tensor, and so on; every tensor is cut into the same number of
    /// shards. Every rank contributes to all of them and gets all of them. Returns the spans of the shards as well.
    pub(crate) fn shard_major(counts: &[u64], shards: u64) -> (Self, Vec<Span>) {
        let mut layout = Self::default();
        let mut spans = Vec::new();
        for shard in 0..shards {
            let start = layout.elements;
            for (tensor, &count) in (0..).zip(counts) {
                let part = Span { start: 0, len: count }.split(shards, shard);
                let extent = Extent { len: part.len, input_start: part.start, output_start: part.start };
                layout.push(tensor, Source::EveryRank, Target::EveryRank, extent);
            }
            spans.push(Span { start, len: layout.elements - start });
        }
        (layout, spans)
    }

    /// The blocks of member 0's ranks, then those of member 1's ranks, and so on, for work with a count for each rank. A
    /// block is what its rank contributes to a gather or an all-gather, or gets from a scatter or a reduce-scatter; on the
    /// other side blocks stand in rank order of the set. Returns the spans of the members as well.
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

    /// For each member as a sender and each one as a receiver: what the ranks of the one have for those of the other.
    /// Returns the spans of the pairs as well, those of the lowest sender first.
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

/// Where elements lie in a tensor that contributes them and in the result that they belong to.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    len: u64,
    input_start: u64,
    output_start: u64,
}

/// The two ends of a rank's block of `len` elements, with `before` elements in the blocks of lower ranks.
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

/// Where the blocks of an all-to-all lie in one tensor's inputs and results, by positions in the set.
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

/// The sum of the numbers before each one.
fn running_sums(numbers: &[u64]) -> Vec<u64> {
    let mut sum = 0;
    let before = |number: &u64| {
        sum += number;
        sum - number
    };
    numbers.iter().map(before).collect()
}
