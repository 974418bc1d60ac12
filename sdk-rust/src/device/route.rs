//! Whether a tensor in device memory is shared with the sidecar, which runs NCCL, or copied to shared memory. Pure.

use ronde_wire::{Collective, limits};

/// What the decision depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts<'a> {
    /// Device memory that the sidecar accepts of this session; 0 if it uses no GPUs.
    pub(super) device_bytes_max: u64,
    /// The operation.
    pub(super) collective: &'a Collective,
    /// Whether a plugin takes part.
    pub(super) has_plugin: bool,
    /// The length of the tensor, and of the result.
    pub(super) bytes: u64,
}

/// A route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// The sidecar gets device memory.
    Shared,
    /// The worker copies the tensor to shared memory, as it does without a sidecar that uses GPUs. With the reason, if that is
    /// for users.
    Staged(Option<&'static str>),
}

/// Decides. Other ranks may decide otherwise: the sidecar performs what it gets.
pub(super) fn route(facts: Facts<'_>) -> Route {
    let Facts { device_bytes_max, collective, has_plugin, bytes } = facts;
    let is_supported = matches!(collective, Collective::AllReduce { .. } | Collective::Broadcast { .. });
    match () {
        () if device_bytes_max == 0 => Route::Staged(None),
        // They travel with the messages that agree about them, which is faster.
        () if bytes <= limits::EAGER_BYTES_MAX as u64 => Route::Staged(None),
        () if !is_supported => {
            Route::Staged(Some("the sidecar takes all-reduces and broadcasts in device memory only"))
        }
        () if has_plugin => Route::Staged(Some("a plugin works on tensors in main memory")),
        () => Route::Shared,
    }
}

#[cfg(test)]
mod tests {
    use ronde_wire::{Rank, ReduceOp};

    use super::*;

    const ALL_REDUCE: Collective = Collective::AllReduce { op: ReduceOp::Sum };

    fn facts(collective: &Collective) -> Facts<'_> {
        Facts { device_bytes_max: 1 << 30, collective, has_plugin: false, bytes: 1 << 20 }
    }

    #[test]
    fn large_all_reduces_and_broadcasts_are_shared() {
        assert_eq!(route(facts(&ALL_REDUCE)), Route::Shared);
        assert_eq!(route(facts(&Collective::Broadcast { root: Rank(1) })), Route::Shared);
        let least = limits::EAGER_BYTES_MAX as u64 + 1;
        assert_eq!(route(Facts { bytes: least, ..facts(&ALL_REDUCE) }), Route::Shared);
    }

    #[test]
    fn what_users_did_not_ask_for_is_not_reported() {
        assert_eq!(route(Facts { device_bytes_max: 0, ..facts(&ALL_REDUCE) }), Route::Staged(None));
        assert_eq!(route(Facts { device_bytes_max: 0, ..facts(&Collective::AllGather) }), Route::Staged(None));
        assert_eq!(route(Facts { bytes: limits::EAGER_BYTES_MAX as u64, ..facts(&ALL_REDUCE) }), Route::Staged(None));
    }

    #[test]
    fn other_operations_are_copied_with_a_reason() {
        let others = [Collective::AllGather, Collective::ReduceScatter { op: ReduceOp::Sum }, Collective::Barrier];
        for collective in &others {
            assert!(matches!(route(facts(collective)), Route::Staged(Some(reason)) if reason.contains("all-reduces")));
        }
        let with_plugin = route(Facts { has_plugin: true, ..facts(&ALL_REDUCE) });
        assert!(matches!(with_plugin, Route::Staged(Some(reason)) if reason.contains("plugin")));
    }
}
