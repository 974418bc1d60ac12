//! Counters of one engine.

use std::collections::BTreeMap;

use serde::Serialize;

/// Counters since the engine was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Requests of local ranks.
    pub submitted: u64,
    /// Requests that ended with a result.
    pub completed: u64,
    /// Requests that ended with a failure.
    pub failed: u64,
    /// Requests refused here, by this engine or by the service.
    pub refused: u64,
    /// Requests that ranks stopped waiting for.
    pub withdrawn: u64,
    /// Operations admitted here.
    pub admitted: u64,
    /// Operations performed here.
    pub executed: u64,
    /// Tensors in them: more than operations when fused.
    pub tensors_executed: u64,
    /// Epochs that began here.
    pub epochs: u64,
    /// Names that the coordinator rejected here.
    pub rejected: u64,
    /// Coordinator: operations ordered.
    pub ordered_operations: u64,
    /// Coordinator: tensors ordered.
    pub ordered_tensors: u64,
    /// Coordinator: tensors that shared a bucket with others.
    pub fused_tensors: u64,
    /// Coordinator: names on which ranks disagreed.
    pub mismatches: u64,
    /// Control messages of another epoch, dropped.
    pub stale_frames: u64,
    /// Control messages that break the protocol; their sender was disconnected.
    pub protocol_violations: u64,
    /// Requests announced by their slot in the request cache.
    pub announced_again: u64,
    /// Evictions from the request cache.
    pub cache_evictions: u64,
    /// Control messages relayed for other sidecars.
    pub relayed: u64,
    /// Heartbeats sent.
    pub heartbeats: u64,
    /// Coordinator: schedules that were issued.
    pub schedules_issued: u64,
    /// Coordinator: schedules that were withdrawn, for each [`ronde_wire::Invalidation`].
    pub schedules_withdrawn: [u64; ronde_wire::Invalidation::ALL.len()],
    /// Operations of schedules that were admitted here without an announcement and an order.
    pub scheduled_operations: u64,
    /// For each local rank, the time between the first local rank's submission of a tensor of a schedule and this rank's,
    /// where it was the last of them. Tensors that wait at the same time count once.
    pub waited_here_us: BTreeMap<u32, u64>,
    /// Admitted operations that were dropped because their schedule was withdrawn or a plugin failed.
    pub cancelled_operations: u64,
    /// Pauses of this process itself, longer than the suspicion time, that were noticed afterwards.
    pub pauses: u64,
}
