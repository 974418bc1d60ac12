//! The inputs of a plan that the coordinator decides and every member checks: kind of work, digest, and which tensors
//! may share a bucket.

use ronde_collectives::digest_input;
use ronde_collectives::plan::{Work, WorkKind};
use ronde_wire::{Algorithm, Collective, PluginUse, PluginWork, ReduceOp, SetTopology, Tuning};
use sha2::{Digest, Sha256};

/// The first 16 bytes of SHA-256 over all inputs of the plan.
pub(crate) fn digest(topology: &SetTopology, work: &Work, tuning: &Tuning) -> [u8; 16] {
    let hash = Sha256::digest(digest_input(topology, work, tuning));
    let mut digest = [0; 16];
    digest.copy_from_slice(&hash[..16]);
    digest
}

/// The kind of work under an algorithm. An operation that could be eager but is not is reduced in the same order, by
/// rank.
pub(crate) fn kind_with(kind: WorkKind, algorithm: Algorithm) -> WorkKind {
    match (kind, algorithm) {
        (WorkKind::AllReduce, Algorithm::Direct) => WorkKind::AllReduceNAry,
        (kind, _) => kind,
    }
}

/// Whether tensors of a collective may share a bucket with others of the same.
pub(crate) fn may_share(collective: &Collective, plugin: Option<&PluginUse>) -> bool {
    if let Some(plugin) = plugin {
        return !matches!(plugin.work, PluginWork::TwoPass { .. } | PluginWork::Adaptive);
    }
    match collective {
        Collective::AllReduce { op } => !matches!(op, ReduceOp::Adasum | ReduceOp::ClippedMean),
        Collective::ReduceScatter { .. } | Collective::AllGather | Collective::Broadcast { .. } => true,
        _ => false,
    }
}

/// Whether a collective proceeds without joined ranks: zeros have no effect on it, or it has no elements.
pub(crate) fn allows_joined(collective: &Collective) -> bool {
    match collective {
        Collective::AllReduce { op } => matches!(op, ReduceOp::Sum | ReduceOp::Average | ReduceOp::Adasum),
        Collective::Barrier => true,
        _ => false,
    }
}
