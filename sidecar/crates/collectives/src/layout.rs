//! The three ways to lay tensors into a bucket.

use ronde_wire::SetTopology;

use crate::plan::{Layout, Slice, Source, Span, Target};

impl Layout {
    /// Tensor behind tensor, whole.
    pub(crate) fn in_order(counts: &[u64], source: Source) -> Self {
        let mut layout = Self::default();
        for (tensor, &count) in (0..).zip(counts) {
            layout.push(tensor, source, Span { start: 0, len: count }, 0);
        }
        layout
    }

    /// Piece 0 of every tensor, then piece 1 of every tensor, and so on; every tensor is cut into the same number of
    /// pieces. Returns the spans of the pieces as well.
    pub(crate) fn piece_major(counts: &[u64], pieces: u64) -> (Self, Vec<Span>) {
        let mut layout = Self::default();
        let mut spans = Vec::new();
        for piece in 0..pieces {
            let start = layout.elements;
            for (tensor, &count) in (0..).zip(counts) {
                let part = Span { start: 0, len: count }.part(pieces, piece);
                layout.push(tensor, Source::EveryRank, part, part.start);
            }
            spans.push(Span { start, len: layout.elements - start });
        }
        (layout, spans)
    }

    /// The blocks of member 0's ranks, then those of member 1's ranks, and so on. `tensors` has a count for each rank in
    /// rank order of the set, which also orders the results. Returns the spans of the members as well.
    pub(crate) fn member_major(topology: &SetTopology, tensors: &[Vec<u64>]) -> (Self, Vec<Span>) {
        let order = topology.ranks();
        let starts: Vec<Vec<u64>> = tensors.iter().map(|counts| running_sums(counts)).collect();
        let mut layout = Self::default();
        let mut spans = Vec::new();
        for member in &topology.members {
            let start = layout.elements;
            for (tensor, counts) in (0..).zip(tensors) {
                for &rank in &member.ranks {
                    let position = order.partition_point(|other| *other < rank);
                    let whole = Span { start: 0, len: counts[position] };
                    layout.push(tensor, Source::One(rank), whole, starts[tensor as usize][position]);
                }
            }
            spans.push(Span { start, len: layout.elements - start });
        }
        (layout, spans)
    }

    fn push(&mut self, tensor: u32, source: Source, input: Span, output_start: u64) {
        if input.is_empty() {
            return;
        }
        let span = Span { start: self.elements, len: input.len };
        self.elements = span.end();
        self.slices.push(Slice {
            span,
            tensor,
            source,
            target: Target::EveryRank,
            input_start: input.start,
            output_start,
        });
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
