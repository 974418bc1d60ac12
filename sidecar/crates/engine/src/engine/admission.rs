//! From an order to what is performed here: the coordinator's word is checked against this sidecar's own view.

use ronde_collectives::plan::{Work, WorkKind};
use ronde_collectives::{digest_input, plan};
use ronde_wire::control::{Order, OrderedTensor};
use ronde_wire::{Collective, DType, Detail, Epoch, Rank, Request, RequestId, Seq, SetTopology, Shape, Tuning, limits};
use sha2::{Digest, Sha256};

use super::context::SetView;
use super::requests::Requests;
use crate::event::{Admission, AdmittedRequest, AdmittedTensor, Arithmetic};

/// The first 16 bytes of SHA-256 over all inputs of the plan.
pub(crate) fn digest(topology: &SetTopology, work: &Work, tuning: &Tuning) -> [u8; 16] {
    let hash = Sha256::digest(digest_input(topology, work, tuning));
    let mut digest = [0; 16];
    digest.copy_from_slice(&hash[..16]);
    digest
}

/// The kind of work of a collective that this version performs.
pub(crate) fn work_kind(collective: &Collective) -> Option<WorkKind> {
    match collective {
        Collective::AllReduce { .. } => Some(WorkKind::AllReduce),
        Collective::Broadcast { root } => Some(WorkKind::Broadcast { root: *root }),
        Collective::AllGather => Some(WorkKind::AllGather),
        Collective::Barrier => Some(WorkKind::Barrier),
        _ => None,
    }
}

/// What a plan is made for: the order's tensors as element counts.
pub(crate) fn work(kind: WorkKind, dtype: DType, tensors: &[OrderedTensor]) -> Work {
    let counts = |tensor: &OrderedTensor| match kind {
        WorkKind::AllGather => {
            let row = tensor.shape.row_elements();
            tensor.rows.iter().map(|rows| rows.saturating_mul(row)).collect()
        }
        _ => vec![tensor.shape.elements()],
    };
    let tensors = if kind == WorkKind::Barrier { Vec::new() } else { tensors.iter().map(counts).collect() };
    Work { element_bytes: element_bytes(dtype), tensors, kind }
}

/// Bytes of one element: 1 to 8.
pub(crate) fn element_bytes(dtype: DType) -> u32 {
    u32::try_from(dtype.size_bytes()).unwrap_or(u32::MAX)
}

/// The shape of a tensor's result; `None` when it has more elements than can be addressed.
///
/// A barrier's is `[0]`: no bytes.
pub(crate) fn output(kind: &WorkKind, tensor: &OrderedTensor) -> Option<Shape> {
    match kind {
        WorkKind::AllReduce | WorkKind::Broadcast { .. } => Some(tensor.shape.clone()),
        WorkKind::Barrier => Shape::new(vec![0]).ok(),
        WorkKind::AllGather => {
            let rows = tensor.rows.iter().try_fold(0_u64, |sum, rows| sum.checked_add(*rows))?;
            let mut dimensions = tensor.shape.dimensions().to_vec();
            *dimensions.first_mut()? = rows;
            Shape::new(dimensions).ok()
        }
        _ => None,
    }
}

/// Checks an order and makes its plan; the requests that it answers become ordered.
///
/// # Errors
/// What contradicts this sidecar's own view, in words. The requests may be changed then; the epoch has to end.
pub(crate) fn prepare(
    view: &SetView,
    requests: &mut Requests,
    epoch: Epoch,
    seq: Seq,
    order: &Order,
) -> Result<Admission, String> {
    let me = view.me.ok_or_else(|| format!("it serves no rank of {}", order.set))?;
    let name = order.collective.name();
    let kind = work_kind(&order.collective).ok_or_else(|| format!("{name} is not performed by this version"))?;
    check_count(&kind, order)?;
    // Before anything is added up: no sum of the order's numbers overflows when every result can be addressed.
    let outputs = outputs(&kind, order)?;
    let work = work(kind, order.dtype, &order.tensors);
    if digest(&view.topology, &work, &order.tuning) != order.digest {
        return Err("the digest of the plan's inputs differs from the coordinator's".to_owned());
    }
    let plan = plan(me, &view.topology, &work, &order.tuning).map_err(|error| error.to_string())?;
    let mut tensors = Vec::with_capacity(order.tensors.len());
    for (tensor, output) in order.tensors.iter().zip(outputs) {
        let answered = answer(view, requests, seq, order, tensor)?.into_iter();
        let admitted =
            |(rank, request)| AdmittedRequest { rank, request, output: output.clone(), detail: Detail::None };
        tensors.push(AdmittedTensor {
            name: tensor.name.clone(),
            requests: answered.map(admitted).collect(),
            own: false,
        });
    }
    let arithmetic = Arithmetic {
        dtype: order.dtype,
        op: order.collective.reduce_op(),
        ranks: u32::try_from(view.ranks.len()).unwrap_or(u32::MAX),
        prescale: order.prescale,
        postscale: order.postscale,
        codec: order.codec,
    };
    let (topology, local_ranks) = (view.topology.clone(), view.local_ranks.clone());
    Ok(Admission { epoch, seq, topology, plan, arithmetic, tensors, local_ranks, joined: order.joined.clone() })
}

fn outputs(kind: &WorkKind, order: &Order) -> Result<Vec<Shape>, String> {
    let too_large = |tensor: &OrderedTensor| format!("the result of {} has no valid shape", tensor.name);
    order.tensors.iter().map(|tensor| output(kind, tensor).ok_or_else(|| too_large(tensor))).collect()
}

fn check_count(kind: &WorkKind, order: &Order) -> Result<(), String> {
    let most = match kind {
        WorkKind::Barrier | WorkKind::AllGather => 1,
        _ => limits::BUCKET_TENSORS_MAX,
    };
    match order.tensors.len() {
        count if (1..=most).contains(&count) => Ok(()),
        count => Err(format!("a bucket of {} has 1 to {most} tensors, not {count}", kind.name())),
    }
}

/// The requests of the local ranks for a tensor, compared with the order.
fn answer(
    view: &SetView,
    requests: &mut Requests,
    seq: Seq,
    order: &Order,
    tensor: &OrderedTensor,
) -> Result<Vec<(Rank, RequestId)>, String> {
    let mut answered = Vec::with_capacity(view.local_ranks.len());
    for &rank in &view.local_ranks {
        let request = requests
            .order(&(order.set, tensor.name.clone(), rank), seq, |own| fits(view, order, tensor, rank, own))
            .map_err(|reason| format!("tensor {} of {rank}: {reason}", tensor.name))?;
        answered.push((rank, request));
    }
    Ok(answered)
}

/// Compares a rank's own request with what was ordered.
fn fits(view: &SetView, order: &Order, tensor: &OrderedTensor, rank: Rank, own: &Request) -> Result<(), String> {
    if order.collective != own.collective {
        return Err(format!("{:?} was ordered, {:?} was asked for", order.collective, own.collective));
    }
    if own.collective == Collective::Barrier {
        return Ok(());
    }
    if order.dtype != own.dtype {
        return Err(format!("type {} was ordered, {} was asked for", order.dtype, own.dtype));
    }
    let scales = |pre: f64, post: f64| (pre.to_bits(), post.to_bits());
    if scales(order.prescale, order.postscale) != scales(own.prescale, own.postscale) {
        return Err("other scale factors were ordered than asked for".to_owned());
    }
    let shape_fits = match own.collective {
        Collective::AllGather => {
            let position = view.ranks.binary_search(&rank).ok();
            let rows = position.and_then(|position| tensor.rows.get(position));
            let (ordered, own) = (tensor.shape.dimensions(), own.shape.dimensions());
            tensor.rows.len() == view.ranks.len() && rows == own.first() && ordered.get(1..) == own.get(1..)
        }
        _ => tensor.shape == own.shape && tensor.rows.is_empty(),
    };
    if shape_fits { Ok(()) } else { Err(format!("shape {} was ordered, {} was asked for", tensor.shape, own.shape)) }
}
