//! Eager operations: each rank's small contribution travels in its announcement, and the order carries all of them, so
//! that nothing else is exchanged. Every member then computes as if it served all ranks.
//!
//! Whether a request is eager depends only on the request, the set and the epoch's threshold. So both sides agree on
//! it, and the order of a reduction never depends on the order of arrival.

use bytes::Bytes;
use ronde_collectives::plan::WorkKind;
use ronde_wire::control::{Order, OrderedTensor};
use ronde_wire::{Algorithm, Codec, Collective, Rank, Request, Tuning, limits};

use super::sets::SetView;
use super::shapes::{counts, work_kind};
use super::{RankContributions, RankRequests};

/// The tuning of eager plans: one sub-schedule, as the contributions of an order are smaller than this chunk.
pub(crate) const TUNING: Tuning = Tuning { algorithm: Algorithm::Eager, chunk_bytes: CHUNK_BYTES, lanes: 1, window: 1 };

#[allow(clippy::cast_possible_truncation, reason = "64 KiB, checked by the assertion below")]
const CHUNK_BYTES: u32 = limits::EAGER_ORDER_BYTES_MAX as u32;
const _: () = assert!(CHUNK_BYTES as usize == limits::EAGER_ORDER_BYTES_MAX);

/// Bytes of the contribution in a rank's announcement: `None` when the request is not eager.
pub(crate) fn contribution_bytes(view: &SetView, rank: Rank, request: &Request, threshold_bytes: u32) -> Option<usize> {
    let alone = view.topology.len() <= 1;
    if threshold_bytes == 0 || alone || view.is_pair || request.codec != Codec::None || request.plugin.is_some() {
        return None;
    }
    let kind = work_kind(&request.collective, request.dtype, request.codec, None, None)?;
    // A schedule performs an all-reduce in the same order with an n-ary plan, which is limited to so many ranks.
    let too_many = kind == WorkKind::AllReduce && view.ranks.len() > limits::NARY_RANKS_MAX;
    if kind.measures() || too_many {
        return None;
    }
    if !contributes(&request.collective, rank) {
        return Some(0);
    }
    let bytes = request.shape.elements() * request.dtype.size_bytes() as u64;
    let most = (threshold_bytes as usize).min(limits::EAGER_ORDER_BYTES_MAX / view.ranks.len().max(1));
    usize::try_from(bytes).ok().filter(|bytes| *bytes <= most)
}

/// All contributions to a tensor in rank order; `None` when the tensor is not eager.
pub(crate) fn gathered(
    view: &SetView,
    requests: &RankRequests,
    mut contributions: RankContributions,
    threshold_bytes: u32,
) -> Option<Vec<Bytes>> {
    let of_rank = |rank: &Rank| match requests.get(rank) {
        Some(request) => {
            contribution_bytes(view, *rank, request, threshold_bytes)?;
            Some(contributions.remove(rank).unwrap_or_default())
        }
        // It has joined.
        None => Some(Bytes::new()),
    };
    view.ranks.iter().map(of_rank).collect()
}

/// Checks that an eager order carries the contributions that its plan reads.
///
/// # Errors
/// A description of what is wrong.
pub(crate) fn check(view: &SetView, order: &Order, kind: &WorkKind) -> Result<(), String> {
    if order.tuning.algorithm != Algorithm::Eager {
        return if order.contributions.is_empty() { Ok(()) } else { Err("it carries contributions".to_owned()) };
    }
    if order.tuning != TUNING
        || order.pair.is_some()
        || kind.measures()
        || order.codec != Codec::None
        || order.plugin.is_some()
    {
        return Err("it cannot be eager".to_owned());
    }
    if order.contributions.len() != order.tensors.len() {
        let count = order.contributions.len();
        return Err(format!("it carries contributions to {count} of {} tensors", order.tensors.len()));
    }
    for (tensor, contributions) in order.tensors.iter().zip(&order.contributions) {
        let counts = counts(kind, view, tensor);
        let expected = |rank: &Rank| contributed_bytes(view, order, tensor, kind, &counts, *rank);
        let expected = view.ranks.iter().map(expected);
        if !expected.eq(contributions.iter().map(|bytes| bytes.len() as u64)) {
            return Err(format!("the contributions to tensor {} are not what its shape says", tensor.name));
        }
    }
    Ok(())
}

/// Bytes that a rank contributes to an ordered tensor. The shapes of its results are known to be valid.
fn contributed_bytes(
    view: &SetView,
    order: &Order,
    tensor: &OrderedTensor,
    kind: &WorkKind,
    counts: &[u64],
    rank: Rank,
) -> u64 {
    if !contributes(&order.collective, rank) || order.joined.binary_search(&rank).is_ok() {
        return 0;
    }
    let position = view.position(rank).unwrap_or_default();
    let ranks = view.ranks.len();
    let elements = match kind {
        WorkKind::AllGather | WorkKind::Gather { .. } => counts.get(position).copied().unwrap_or_default(),
        WorkKind::AllToAll => counts.iter().skip(position * ranks).take(ranks).sum(),
        _ => tensor.shape.elements(),
    };
    elements.saturating_mul(order.dtype.size_bytes() as u64)
}

/// Whether an operation reads a rank's tensor.
fn contributes(collective: &Collective, rank: Rank) -> bool {
    match collective {
        Collective::Broadcast { root } => *root == rank,
        _ => collective.has_input(rank),
    }
}
