//! Layouts are equal on all members and map each element of inputs and results exactly once.

use ronde_wire::Rank;

use super::{Bucket, Violation};
use crate::plan::{Slice, Source, Span, WorkKind};

pub(super) fn check(bucket: &Bucket<'_>) -> Result<(), Violation> {
    let layout = &bucket.plans[0].layout;
    if let Some((member, _)) = bucket.members().find(|(_, plan)| plan.layout != *layout) {
        return Err(Violation::LayoutsDiffer { member });
    }
    let mut end = 0;
    for (index, slice) in layout.slices.iter().enumerate() {
        let problem = if slice.span.start != end {
            Some("does not begin where the one before ends")
        } else if slice.span.is_empty() {
            Some("is empty")
        } else {
            mapping_problem(bucket, slice)
        };
        if let Some(problem) = problem {
            return Err(Violation::Slice { slice: index, problem });
        }
        end = slice.span.end();
    }
    if end != layout.elements {
        return Err(Violation::Slice { slice: layout.slices.len(), problem: "is missing before the bucket's end" });
    }
    check_tiling(bucket)
}

fn mapping_problem(bucket: &Bucket<'_>, slice: &Slice) -> Option<&'static str> {
    let Some(counts) = bucket.work.tensors.get(slice.tensor as usize) else {
        return Some("belongs to no tensor of the work");
    };
    let (source, count, before) = match (&bucket.work.kind, slice.source) {
        (WorkKind::AllReduce, _) => (Source::EveryRank, counts[0], 0),
        (WorkKind::Broadcast { root }, _) => (Source::One(*root), counts[0], 0),
        (WorkKind::AllGather, Source::One(rank)) => {
            let (count, before) = place(bucket, counts, rank)?;
            (Source::One(rank), count, before)
        }
        _ => return Some("has a source that this work does not have"),
    };
    if slice.source != source {
        return Some("has the wrong source");
    }
    if slice.input_start.checked_add(slice.span.len).is_none_or(|end| end > count) {
        return Some("reaches over the end of its input");
    }
    (slice.output_start != before + slice.input_start).then_some("maps input and result differently from the work")
}

/// A rank's own count and those before it; `None` when it is not in the set.
fn place(bucket: &Bucket<'_>, counts: &[u64], rank: Rank) -> Option<(u64, u64)> {
    let position = bucket.topology.ranks().binary_search(&rank).ok()?;
    Some((counts[position], counts[..position].iter().sum()))
}

/// Each result tensor is covered without gap or overlap; so is each input, because the two maps are shifts.
fn check_tiling(bucket: &Bucket<'_>) -> Result<(), Violation> {
    let slices = &bucket.plans[0].layout.slices;
    for (tensor, counts) in bucket.work.tensors.iter().enumerate() {
        let mut spans: Vec<Span> = slices
            .iter()
            .filter(|slice| slice.tensor as usize == tensor)
            .map(|slice| Span { start: slice.output_start, len: slice.span.len })
            .collect();
        spans.sort_unstable();
        let mut end = 0;
        for span in spans {
            if span.start != end {
                return Err(Violation::Tiling { tensor, element: end.min(span.start) });
            }
            end = span.end();
        }
        if end != counts.iter().sum::<u64>() {
            return Err(Violation::Tiling { tensor, element: end });
        }
    }
    Ok(())
}
