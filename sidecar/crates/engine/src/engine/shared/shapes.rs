//! The shapes of an operation's tensors, by collective: element counts for the plan, shapes of the results.

use ronde_collectives::plan::{Span, Work, WorkKind};
use ronde_wire::control::OrderedTensor;
use ronde_wire::{Codec, Collective, DType, Detail, Pair, PluginUse, PluginWork, Rank, ReduceOp, Request, Shape};

use super::sets::SetView;

/// The kind of work of a collective; `None` when it is completed without an operation, or does not support this codec.
pub(crate) fn work_kind(
    collective: &Collective,
    dtype: DType,
    codec: Codec,
    plugin: Option<&PluginUse>,
    pair: Option<Pair>,
) -> Option<WorkKind> {
    if let Some(plugin) = plugin {
        let takes = matches!(collective, Collective::AllReduce { op } if plugin.goes_with(*op));
        return (takes && (codec == Codec::Plugin) == plugin.work.is_codec()).then(|| work_of_plugin(plugin.work));
    }
    if codec != Codec::None {
        let encoded_bytes = u32::try_from(codec.encoded_bytes(dtype)?).ok()?;
        let coded = WorkKind::AllReduceCoded { encoded_bytes };
        return matches!(collective, Collective::AllReduce { op } if has_codecs(*op)).then_some(coded);
    }
    Some(match collective {
        Collective::AllReduce { op: ReduceOp::Median } => WorkKind::AllReduceNAry,
        // The sum of squares.
        Collective::AllReduce { op: ReduceOp::ClippedMean } => WorkKind::AllReduceTwoPass { measures: 1 },
        Collective::AllReduce { op: ReduceOp::Adasum } => WorkKind::AllReduceAdaptive,
        Collective::AllReduce { op: ReduceOp::Plugin } => return None,
        Collective::AllReduce { .. } => WorkKind::AllReduce,
        Collective::ReduceScatter { .. } => WorkKind::ReduceScatter,
        Collective::Reduce { root, .. } => WorkKind::Reduce { root: *root },
        Collective::Broadcast { root } => WorkKind::Broadcast { root: *root },
        Collective::AllGather => WorkKind::AllGather,
        Collective::Gather { root } => WorkKind::Gather { root: *root },
        Collective::Scatter { root } => WorkKind::Scatter { root: *root },
        Collective::AllToAll { .. } => WorkKind::AllToAll,
        Collective::Barrier => WorkKind::Barrier,
        // A scatter over two ranks, all of it for the receiver.
        Collective::Send { .. } => WorkKind::Scatter { root: pair?.from },
        _ => return None,
    })
}

const fn work_of_plugin(work: PluginWork) -> WorkKind {
    match work {
        PluginWork::Codec { block_elements, encoded_bytes } => {
            WorkKind::AllReduceByBlocks { block_elements, encoded_bytes }
        }
        PluginWork::Pairwise => WorkKind::AllReduce,
        PluginWork::NAry => WorkKind::AllReduceNAry,
        PluginWork::TwoPass { measures } => WorkKind::AllReduceTwoPass { measures },
        PluginWork::Adaptive => WorkKind::AllReduceAdaptive,
    }
}

/// Reductions whose contributions may be encoded.
pub(crate) fn has_codecs(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Sum | ReduceOp::Average)
}

/// The work of a plan: the order's tensors as element counts. They are meaningful only after [`Results::of`] has found
/// a valid shape for every result.
pub(crate) fn work(kind: WorkKind, dtype: DType, view: &SetView, tensors: &[OrderedTensor]) -> Work {
    let tensors = if kind == WorkKind::Barrier {
        Vec::new()
    } else {
        tensors.iter().map(|tensor| counts(&kind, view, tensor)).collect()
    };
    Work { element_bytes: element_bytes(dtype), tensors, kind }
}

/// Bytes of one element: 1 to 8.
pub(crate) fn element_bytes(dtype: DType) -> u32 {
    u32::try_from(dtype.size_bytes()).unwrap_or(u32::MAX)
}

/// The tensor of an order for the matching requests of all ranks. `lead` is the request whose type and shape are used.
pub(crate) fn ordered_tensor<'a>(lead: &Request, requests: impl Iterator<Item = &'a Request>) -> OrderedTensor {
    let rows = |request: &Request| match &request.collective {
        Collective::AllGather | Collective::Gather { .. } => vec![first_dimension(&request.shape)],
        Collective::AllToAll { splits } => splits.clone(),
        _ => Vec::new(),
    };
    OrderedTensor { name: lead.name.clone(), shape: lead.shape.clone(), rows: requests.flat_map(rows).collect() }
}

/// The results of one tensor.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    /// Whether each rank has a separate result.
    pub(crate) own: bool,
    shapes: Shapes,
    splits: bool,
    /// The sender of a message.
    source: Option<Rank>,
}

#[derive(Clone, Debug)]
enum Shapes {
    /// All ranks get a result of this shape.
    Every(Shape),
    /// Only this rank gets a result.
    Only(Rank, Shape),
    /// Each rank gets a result, in rank order.
    Each(Vec<Shape>),
}

impl Results {
    /// The results of a tensor; `None` when one has more elements than can be addressed, or the tensor lacks dimensions
    /// or rows.
    ///
    /// The result of a barrier is `[0]`: no bytes.
    pub(crate) fn of(
        collective: &Collective,
        pair: Option<Pair>,
        view: &SetView,
        tensor: &OrderedTensor,
    ) -> Option<Self> {
        let (shape, ranks) = (&tensor.shape, view.ranks.len());
        let shapes = match collective {
            Collective::Barrier => Shapes::Every(empty()),
            Collective::AllReduce { .. } | Collective::Broadcast { .. } => Shapes::Every(shape.clone()),
            Collective::AllGather => Shapes::Every(with_rows(shape, total(&tensor.rows)?)?),
            Collective::Gather { root } => Shapes::Only(*root, with_rows(shape, total(&tensor.rows)?)?),
            Collective::Reduce { root, .. } => Shapes::Only(*root, shape.clone()),
            Collective::Send { .. } => Shapes::Only(pair?.to, shape.clone()),
            Collective::ReduceScatter { .. } | Collective::Scatter { .. } => {
                let rows = shares(*shape.dimensions().first()?, ranks);
                Shapes::Each(rows.map(|rows| with_rows(shape, rows)).collect::<Option<_>>()?)
            }
            Collective::AllToAll { .. } => {
                if tensor.rows.len() != ranks * ranks {
                    return None;
                }
                let received = (0..ranks).map(|receiver| total(&received(tensor, ranks, receiver)));
                Shapes::Each(received.map(|rows| with_rows(shape, rows?)).collect::<Option<_>>()?)
            }
            _ => return None,
        };
        let own = !matches!(shapes, Shapes::Every(_));
        let source = pair.map(|pair| pair.from);
        Some(Self { own, shapes, splits: matches!(collective, Collective::AllToAll { .. }), source })
    }

    /// The result of a rank of the set.
    pub(crate) fn of_rank(&self, view: &SetView, rank: Rank, tensor: &OrderedTensor) -> (Shape, Detail) {
        let position = view.position(rank).unwrap_or_default();
        let shape = match &self.shapes {
            Shapes::Every(shape) => shape.clone(),
            Shapes::Only(only, shape) if *only == rank => shape.clone(),
            Shapes::Only(..) => empty(),
            Shapes::Each(shapes) => shapes.get(position).cloned().unwrap_or_else(empty),
        };
        let detail = match self.source {
            _ if self.splits => Detail::Splits(received(tensor, view.ranks.len(), position)),
            Some(source) if source != rank => Detail::Source(source),
            _ => Detail::None,
        };
        (shape, detail)
    }

    /// Elements of the largest result.
    pub(crate) fn largest(&self) -> u64 {
        match &self.shapes {
            Shapes::Every(shape) | Shapes::Only(_, shape) => shape.elements(),
            Shapes::Each(shapes) => shapes.iter().map(Shape::elements).max().unwrap_or_default(),
        }
    }
}

/// `[0]`: the shape for a rank without a result.
pub(crate) fn empty() -> Shape {
    Shape::new(vec![0]).unwrap_or_default()
}

/// Rows of each of `ranks` ranks: the first `rows % ranks` have one more.
fn shares(rows: u64, ranks: usize) -> impl Iterator<Item = u64> {
    let (whole, parts) = (Span { start: 0, len: rows }, ranks as u64);
    (0..parts).map(move |position| whole.split(parts, position).len)
}

/// Element counts of a tensor in the form that the kind of work needs.
pub(crate) fn counts(kind: &WorkKind, view: &SetView, tensor: &OrderedTensor) -> Vec<u64> {
    let (elements, row) = (tensor.shape.elements(), tensor.shape.row_elements());
    let by_rows = |rows: &u64| rows.saturating_mul(row);
    match kind {
        WorkKind::Scatter { root } if view.is_pair => {
            view.ranks.iter().map(|rank| if rank == root { 0 } else { elements }).collect()
        }
        WorkKind::AllGather | WorkKind::Gather { .. } | WorkKind::AllToAll => tensor.rows.iter().map(by_rows).collect(),
        WorkKind::ReduceScatter | WorkKind::Scatter { .. } => {
            shares(first_dimension(&tensor.shape), view.ranks.len()).map(|rows| by_rows(&rows)).collect()
        }
        _ => vec![elements],
    }
}

/// Rows that a rank receives from each rank.
fn received(tensor: &OrderedTensor, ranks: usize, receiver: usize) -> Vec<u64> {
    tensor.rows.iter().skip(receiver).step_by(ranks.max(1)).copied().collect()
}

fn total(rows: &[u64]) -> Option<u64> {
    rows.iter().try_fold(0_u64, |sum, rows| sum.checked_add(*rows))
}

fn with_rows(shape: &Shape, rows: u64) -> Option<Shape> {
    let mut dimensions = shape.dimensions().to_vec();
    *dimensions.first_mut()? = rows;
    Shape::new(dimensions).ok()
}

/// The rows of a tensor, 0 for a scalar.
fn first_dimension(shape: &Shape) -> u64 {
    shape.dimensions().first().copied().unwrap_or_default()
}
