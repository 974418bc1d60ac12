//! Layouts are equal on all members and map each element of inputs and results exactly once.

use std::collections::BTreeMap;

use ronde_wire::Rank;

use super::{Bucket, Violation};
use crate::plan::{Slice, Source, Span, Target, WorkKind};

pub(super) fn check(bucket: &Bucket<'_>) -> Result<(), Violation> {
    let layout = &bucket.plans[0].layout;
    if let Some((member, _)) = bucket.members().find(|(_, plan)| plan.layout != *layout) {
        return Err(Violation::LayoutsDiffer { member });
    }
    let blocks = Blocks::of(bucket);
    let mut end = 0;
    for (index, slice) in layout.slices.iter().enumerate() {
        let problem = if slice.span.start != end {
            Some("does not begin where the one before ends")
        } else if slice.span.is_empty() {
            Some("is empty")
        } else {
            problem(&blocks, slice)
        };
        if let Some(problem) = problem {
            return Err(Violation::Slice { slice: index, problem });
        }
        end = slice.span.end();
    }
    if end != layout.elements {
        return Err(Violation::Slice { slice: layout.slices.len(), problem: "is missing before the bucket's end" });
    }
    check_tiling(&blocks, &layout.slices)
}

/// The elements from a source to a target in a tensor: a run of the source's input and of the target's result.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    len: u64,
    input_start: u64,
    output_start: u64,
}

/// By tensor, source and target.
type Key = (usize, Option<Rank>, Option<Rank>);

/// All blocks of the work, by source and target.
struct Blocks {
    blocks: BTreeMap<Key, Block>,
}

impl Blocks {
    fn of(bucket: &Bucket<'_>) -> Self {
        let ranks = bucket.topology.ranks();
        let mut blocks = BTreeMap::new();
        for (tensor, counts) in bucket.work.tensors.iter().enumerate() {
            let mut ends = Ends::default();
            for (index, &len) in counts.iter().enumerate() {
                let (source, target) = ends_of(&bucket.work.kind, &ranks, index);
                let block = Block {
                    len,
                    input_start: ends.inputs.skip(source, len),
                    output_start: ends.results.skip(target, len),
                };
                blocks.insert((tensor, source, target), block);
            }
        }
        Self { blocks }
    }
}

/// The ends of the inputs and results of a tensor so far.
#[derive(Default)]
struct Ends {
    inputs: Running,
    results: Running,
}

#[derive(Default)]
struct Running {
    ends: BTreeMap<Option<Rank>, u64>,
}

impl Running {
    /// Returns the start of the next `len` elements of this tensor.
    fn skip(&mut self, of: Option<Rank>, len: u64) -> u64 {
        let end = self.ends.entry(of).or_default();
        *end += len;
        *end - len
    }
}

/// The source and target of the elements of a count; `None` is every rank.
fn ends_of(kind: &WorkKind, ranks: &[Rank], index: usize) -> (Option<Rank>, Option<Rank>) {
    match *kind {
        WorkKind::AllReduce
        | WorkKind::AllReduceCoded { .. }
        | WorkKind::AllReduceByBlocks { .. }
        | WorkKind::AllReduceNAry
        | WorkKind::AllReduceTwoPass { .. }
        | WorkKind::AllReduceAdaptive
        | WorkKind::Barrier => (None, None),
        WorkKind::Reduce { root } => (None, Some(root)),
        WorkKind::Broadcast { root } => (Some(root), None),
        WorkKind::ReduceScatter => (None, Some(ranks[index])),
        WorkKind::AllGather => (Some(ranks[index]), None),
        WorkKind::Gather { root } => (Some(ranks[index]), Some(root)),
        WorkKind::Scatter { root } => (Some(root), Some(ranks[index])),
        WorkKind::AllToAll => (Some(ranks[index / ranks.len()]), Some(ranks[index % ranks.len()])),
    }
}

fn key(slice: &Slice) -> Key {
    let source = match slice.source {
        Source::EveryRank => None,
        Source::One(rank) => Some(rank),
    };
    let target = match slice.target {
        Target::EveryRank => None,
        Target::One(rank) => Some(rank),
    };
    (slice.tensor as usize, source, target)
}

fn problem(blocks: &Blocks, slice: &Slice) -> Option<&'static str> {
    let Some(block) = blocks.blocks.get(&key(slice)) else {
        return Some("has a tensor, source or target that this work does not have");
    };
    let Some(offset) = slice.input_start.checked_sub(block.input_start) else {
        return Some("begins before the elements from its source to its target");
    };
    if offset.checked_add(slice.span.len).is_none_or(|end| end > block.len) {
        return Some("extends over the end of the elements from its source to its target");
    }
    (slice.output_start != block.output_start + offset).then_some("maps input and result differently from the work")
}

/// Checks that the slices cover each block without gap or overlap.
fn check_tiling(blocks: &Blocks, slices: &[Slice]) -> Result<(), Violation> {
    let mut spans: BTreeMap<Key, Vec<Span>> = BTreeMap::new();
    for slice in slices {
        spans.entry(key(slice)).or_default().push(Span { start: slice.output_start, len: slice.span.len });
    }
    for (key, block) in &blocks.blocks {
        let mut end = block.output_start;
        let mut spans = spans.remove(key).unwrap_or_default();
        spans.sort_unstable();
        let (tensor, source, target) = *key;
        let source_ranks = source.map_or(Source::EveryRank, Source::One);
        let target = target.map_or(Target::EveryRank, Target::One);
        let violation = |element| Violation::Tiling { tensor, source_ranks, target, element };
        for span in spans {
            if span.start != end {
                return Err(violation(end.min(span.start)));
            }
            end = span.end();
        }
        if end != block.output_start + block.len {
            return Err(violation(end));
        }
    }
    Ok(())
}
