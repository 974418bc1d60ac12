//! [`Plan`]: what one rank does for an operation in two levels. Pure: ranges of bytes and descriptions of collectives.
//!
//! An operation has a buffer on the GPU. In the first phase the ranks of a host exchange by NCCL, then the ranks with the same
//! position on all hosts (a *shard group*) perform a collective of ronde on their part of the buffer, and in the second phase
//! the ranks of a host exchange again. All ranks compute their plans from the same request and the same [`Layout`].

use std::ops::Range;

use ronde_gpu::nccl::ReduceOp as InsideOp;
use ronde_gpu::nccl::collective::{Collective as Inside, ElementType, Reduction};
use ronde_wire::{Codec, Collective, DType, Rank, ReduceOp, Request};

use super::layout::Layout;
use super::scaling::{Scales, scales};

/// The steps of a rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// The bytes of the buffer; at least 1.
    pub(super) buffer_bytes: usize,
    /// Copies from the contribution to the buffer, before all else: the bytes, and where they go.
    pub(super) copies: Vec<(Range<usize>, usize)>,
    /// The first phase.
    pub(super) first: Option<Phase>,
    /// The collective between hosts.
    pub(super) shard: Option<Shard>,
    /// The second phase.
    pub(super) second: Option<Phase>,
    /// Whether any rank has a second phase, so that all agree on its order.
    pub(super) has_second: bool,
    /// Where the result is in the buffer, piece by piece.
    pub(super) result: Vec<Range<usize>>,
}

/// A collective of NCCL.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Phase {
    pub(super) collective: Inside,
    pub(super) source: Place,
    pub(super) target: Range<usize>,
    pub(super) dtype: ElementType,
    pub(super) reduction: Reduction,
}

/// Bytes that a step reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// This rank's contribution.
    Input,
    /// A part of the buffer.
    Buffer(Range<usize>),
}

/// A collective of ronde in the shard group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shard {
    /// What this rank contributes; `None` if it only receives.
    pub(super) source: Option<Place>,
    /// Where the result goes. It may have fewer bytes than the place.
    pub(super) target: Range<usize>,
    pub(super) collective: Collective,
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    pub(super) postscale: f64,
    pub(super) codec: Codec,
}

/// Whether a request may be performed in two levels, as far as all ranks with the same arguments agree without more. `bytes_min`
/// is the least contribution for which it pays.
pub(super) fn is_eligible(request: &Request, bytes_min: u64) -> bool {
    let bytes = request.shape.elements() * request.dtype.size_bytes() as u64;
    let is_large = bytes >= bytes_min.max(1);
    let reduces = |op: &ReduceOp| element_of(request.dtype).is_some_and(|dtype| reduces_inside(request, *op, dtype));
    if request.plugin.is_some() {
        return false;
    }
    match &request.collective {
        Collective::AllReduce { op } => is_large && reduces(op),
        Collective::ReduceScatter { op } => is_large && reduces(op),
        Collective::Broadcast { .. } => is_large,
        // Contributions may have different lengths, so a rank cannot know whether the others' are large.
        Collective::AllGather => bytes_min == 0,
        _ => false,
    }
}

/// Whether NCCL reduces these elements as ronde does. Integers are averaged and scaled by ronde only, which truncates once.
fn reduces_inside(request: &Request, op: ReduceOp, dtype: ElementType) -> bool {
    let is_plain = request.prescale.to_bits() == ONE && request.postscale.to_bits() == ONE;
    match op {
        ReduceOp::Sum => is_plain || dtype.mantissa_bits().is_some(),
        ReduceOp::Average => dtype.mantissa_bits().is_some(),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => is_plain,
        _ => false,
    }
}

/// The bits of a scale that changes nothing.
const ONE: u64 = 1.0_f64.to_bits();

/// NCCL's type of elements, if it has one. Of bool and 16-bit integers it has none.
fn element_of(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::U8 => Some(ElementType::U8),
        DType::I8 => Some(ElementType::I8),
        DType::I32 => Some(ElementType::I32),
        DType::I64 => Some(ElementType::I64),
        DType::F16 => Some(ElementType::F16),
        DType::Bf16 => Some(ElementType::Bf16),
        DType::F32 => Some(ElementType::F32),
        DType::F64 => Some(ElementType::F64),
        _ => None,
    }
}

impl Plan {
    /// The plan of a request that [is eligible](is_eligible); `None` when its scales cannot be applied with this layout.
    pub(super) fn of(request: &Request, layout: &Layout) -> Option<Self> {
        let elements = usize::try_from(request.shape.elements()).ok()?;
        let bytes = elements.checked_mul(request.dtype.size_bytes())?;
        match request.collective {
            Collective::AllReduce { op } => Self::all_reduce(&Reduced::of(request, op, layout)?, elements, layout),
            Collective::ReduceScatter { op } => {
                Self::reduce_scatter(&Reduced::of(request, op, layout)?, request, layout)
            }
            Collective::Broadcast { root } => Self::broadcast(root, bytes, layout),
            Collective::AllGather => Self::all_gather(request.dtype, bytes, layout),
            _ => None,
        }
    }

    fn all_reduce(reduced: &Reduced, elements: usize, layout: &Layout) -> Option<Self> {
        let (dtype, width, local) = (reduced.dtype, reduced.dtype.bytes(), layout.local());
        let bytes = elements * width;
        let result = whole(bytes);
        if layout.hosts() == 1 {
            let first = reduced.phase(Inside::AllReduce, Place::Input, 0..bytes);
            let (copies, shard, second) = (Vec::new(), None, None);
            return Some(Self { buffer_bytes: bytes, copies, first, shard, second, has_second: false, result });
        }
        let chunk = elements.div_ceil(local);
        let buffer_bytes = chunk.checked_mul(local)?.checked_mul(width)?;
        let mine = part(layout.index, chunk * width);
        // Contributions that the ranks of a host do not divide are padded.
        let is_padded = buffer_bytes != bytes;
        let copies = if is_padded { vec![(0..bytes, 0)] } else { Vec::new() };
        let source = if is_padded { Place::Buffer(0..buffer_bytes) } else { Place::Input };
        let first = reduced.phase(Inside::ReduceScatter, source, mine.clone());
        let shard = reduced.shard(Collective::AllReduce { op: reduced.op }, mine.clone(), vec![chunk as u64]);
        let gather = Phase {
            collective: Inside::AllGather,
            source: Place::Buffer(mine),
            target: 0..buffer_bytes,
            dtype,
            reduction: Reduction::NONE,
        };
        Some(Self { buffer_bytes, copies, first, shard: Some(shard), second: Some(gather), has_second: true, result })
    }

    fn reduce_scatter(reduced: &Reduced, request: &Request, layout: &Layout) -> Option<Self> {
        let rows = usize::try_from(*request.shape.dimensions().first()?).ok()?;
        let row = usize::try_from(request.shape.elements()).ok()?.checked_div(rows)?;
        let width = reduced.dtype.bytes();
        let (ranks, hosts) = (layout.ranks(), layout.hosts());
        let piece = rows.div_ceil(ranks) * row;
        let (piece_bytes, row_bytes) = (piece * width, row * width);
        let buffer_bytes = piece_bytes.checked_mul(ranks)?;
        // The rows of each rank, in the order of the buffer: by position on the host, then by host.
        let slots = (0..layout.local()).flat_map(|index| layout.group(index));
        let copies = slots.enumerate().map(|(slot, position)| {
            let (start, end) = share(rows, ranks, position);
            (start * row_bytes..end * row_bytes, slot * piece_bytes)
        });
        let copies: Vec<_> = copies.filter(|(range, _)| !range.is_empty()).collect();
        let mine = part(layout.index, hosts * piece_bytes);
        let first = reduced.phase(Inside::ReduceScatter, Place::Buffer(0..buffer_bytes), mine.clone());
        let (start, end) = share(rows, ranks, layout.position());
        let result = std::iter::once(mine.start..mine.start + (end - start) * row_bytes).collect();
        let shard = (hosts > 1).then(|| {
            let shape = vec![hosts as u64, piece as u64];
            let target = mine.start..mine.start + piece_bytes;
            let collective = Collective::ReduceScatter { op: reduced.op };
            Shard { target, ..reduced.shard(collective, mine, shape) }
        });
        Some(Self { buffer_bytes, copies, first, shard, second: None, has_second: false, result })
    }

    fn broadcast(root: Rank, bytes: usize, layout: &Layout) -> Option<Self> {
        let (root_host, root_index) = layout.find(root)?;
        let is_with_root = layout.host == root_host;
        let source =
            if (layout.host, layout.index) == (root_host, root_index) { Place::Input } else { Place::Buffer(0..bytes) };
        let inside = Inside::Broadcast { root: u32::try_from(root_index).ok()? };
        let send = phase_of_bytes(inside, source, 0..bytes);
        let result = whole(bytes);
        if layout.hosts() == 1 {
            let (copies, shard, second) = (Vec::new(), None, None);
            return Some(Self {
                buffer_bytes: bytes,
                copies,
                first: Some(send),
                shard,
                second,
                has_second: false,
                result,
            });
        }
        let chunk = bytes.div_ceil(layout.local());
        let buffer_bytes = chunk.checked_mul(layout.local())?;
        let mine = part(layout.index, chunk);
        let shard = Shard {
            source: is_with_root.then(|| Place::Buffer(mine.clone())),
            target: mine.clone(),
            collective: Collective::Broadcast { root: layout.rank_at(root_host, layout.index)? },
            dtype: DType::U8,
            shape: vec![chunk as u64],
            postscale: 1.0,
            codec: Codec::None,
        };
        let gather = phase_of_bytes(Inside::AllGather, Place::Buffer(mine), 0..buffer_bytes);
        let (first, second) = if is_with_root { (Some(send), None) } else { (None, Some(gather)) };
        let copies = Vec::new();
        Some(Self { buffer_bytes, copies, first, shard: Some(shard), second, has_second: true, result })
    }

    fn all_gather(dtype: DType, bytes: usize, layout: &Layout) -> Option<Self> {
        let (hosts, ranks) = (layout.hosts(), layout.ranks());
        let buffer_bytes = bytes.checked_mul(ranks)?;
        let copies = Vec::new();
        if hosts == 1 {
            let first = Some(phase_of_bytes(Inside::AllGather, Place::Input, 0..buffer_bytes));
            let (shard, second, result) = (None, None, whole(buffer_bytes));
            return Some(Self { buffer_bytes, copies, first, shard, second, has_second: false, result });
        }
        let mine = part(layout.index, hosts * bytes);
        let shard = Shard {
            source: Some(Place::Input),
            target: mine.clone(),
            collective: Collective::AllGather,
            dtype,
            shape: vec![1, (bytes / dtype.size_bytes()) as u64],
            postscale: 1.0,
            codec: Codec::None,
        };
        let second = Some(phase_of_bytes(Inside::AllGather, Place::Buffer(mine), 0..buffer_bytes));
        // Where each rank's part is: by position on the host, then by host.
        let mut at = vec![0; ranks];
        for (slot, position) in (0..layout.local()).flat_map(|index| layout.group(index)).enumerate() {
            at[position] = slot;
        }
        let result = at.into_iter().map(|slot| part(slot, bytes)).collect();
        let (first, shard) = (None, Some(shard));
        Some(Self { buffer_bytes, copies, first, shard, second, has_second: true, result })
    }
}

/// How a request reduces.
struct Reduced {
    dtype: ElementType,
    wire_dtype: DType,
    op: ReduceOp,
    inside: InsideOp,
    scales: Scales,
    codec: Codec,
}

impl Reduced {
    fn of(request: &Request, op: ReduceOp, layout: &Layout) -> Option<Self> {
        let dtype = element_of(request.dtype)?;
        let inside = match op {
            ReduceOp::Sum | ReduceOp::Average => InsideOp::Sum,
            ReduceOp::Min => InsideOp::Min,
            ReduceOp::Max => InsideOp::Max,
            ReduceOp::Product => InsideOp::Product,
            _ => return None,
        };
        let given = (request.prescale, request.postscale);
        let scales = scales(op, dtype, given, (layout.local(), layout.hosts()))?;
        Some(Self { dtype, wire_dtype: request.dtype, op, inside, scales, codec: request.codec })
    }

    fn phase(&self, collective: Inside, source: Place, target: Range<usize>) -> Option<Phase> {
        let reduction = Reduction { op: self.inside, factor: self.scales.inside };
        Some(Phase { collective, source, target, dtype: self.dtype, reduction })
    }

    fn shard(&self, collective: Collective, mine: Range<usize>, shape: Vec<u64>) -> Shard {
        let codec = if matches!(collective, Collective::AllReduce { .. }) { self.codec } else { Codec::None };
        let (source, dtype, postscale) = (Some(Place::Buffer(mine.clone())), self.wire_dtype, self.scales.between);
        Shard { source, target: mine, collective, dtype, shape, postscale, codec }
    }
}

fn phase_of_bytes(collective: Inside, source: Place, target: Range<usize>) -> Phase {
    Phase { collective, source, target, dtype: ElementType::U8, reduction: Reduction::NONE }
}

/// The result at the start of the buffer.
fn whole(bytes: usize) -> Vec<Range<usize>> {
    std::iter::once(0..bytes).collect()
}

/// The part with a number of a buffer of equal parts.
fn part(number: usize, bytes: usize) -> Range<usize> {
    number * bytes..(number + 1) * bytes
}

/// The rows of a rank: the first ones get one more where they do not divide.
fn share(rows: usize, ranks: usize, position: usize) -> (usize, usize) {
    let (each, more) = (rows / ranks, rows % ranks);
    let start = position * each + position.min(more);
    (start, start + each + usize::from(position < more))
}

#[cfg(test)]
mod tests;
