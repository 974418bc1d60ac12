//! What an engine is told once.

use ronde_collectives::CostModel;
use ronde_wire::{SidecarIndex, World, limits};

use super::wording;

/// The settings of an engine. All but `me` and `world` have defaults.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// This sidecar.
    pub me: SidecarIndex,
    /// Who takes part; equal on all sidecars, which each epoch verifies.
    pub world: World,
    /// The name of this sidecar's host, for people. Default: empty.
    pub host: String,
    /// Lanes that this sidecar offers to each peer. Default 1.
    pub lanes: u16,
    /// Data threads of this sidecar, at least `lanes`: operations that need no other sidecar are cut for so many lanes. Default 1.
    pub threads: u16,
    /// Time between two heartbeats, in milliseconds; at most half of `suspect_ms` is used. Default 100.
    pub heartbeat_ms: u64,
    /// Silence after which a sidecar or rank is named as suspect, in milliseconds. Default 1,000.
    pub suspect_ms: u64,
    /// Silence after which a sidecar or rank is dead, in milliseconds; at least `suspect_ms`. Default 5,000.
    pub peer_timeout_ms: u64,
    /// Bytes of tensors that share a bucket; 0 switches fusion off. Default 64 MiB.
    pub fusion_threshold_bytes: u64,
    /// Buckets of one process set that are ordered and not done; at least 1. Default 2.
    pub buckets_in_flight: usize,
    /// Bytes of a contribution up to which operations travel eagerly, at most [`limits::EAGER_BYTES_MAX`]; 0 switches that off.
    /// Only the coordinator's counts. Default: the most.
    pub eager_bytes: u32,
    /// When what ranks ask for again and again is performed without being negotiated; `None` for never. Only the coordinator's
    /// counts. Default: after two equal steps.
    pub run_ahead: Option<RunAhead>,
    /// Requests of this sidecar's ranks that are announced by a number when they come again, at most
    /// [`limits::ANNOUNCE_SLOTS_MAX`]; 0 for none. Default: the most.
    pub announce_slots: usize,
    /// Whether ranks of one sidecar are reduced with each other before an all-reduce goes to others. Otherwise each rank's
    /// values travel and are reduced in rank order, so that the bits do not depend on the placement; not in sets of more than
    /// [`limits::NARY_RANKS_MAX`] ranks, nor with a codec. Only the coordinator's counts. Default: true.
    pub hierarchical_allreduce: bool,
    /// Age after which a tensor that waits for some ranks is reported, in milliseconds; `u64::MAX` for never. Default 60,000.
    pub stall_warning_ms: u64,
    /// Age after which a tensor that waits for some ranks ends the epoch, in milliseconds; 0 for never. A shorter time than
    /// `stall_warning_ms` is taken as that. Default 0.
    pub stall_shutdown_ms: u64,
    /// Bytes of the largest result of one tensor: a larger one is refused on all ranks. Only the coordinator's counts.
    /// Default: any.
    pub result_bytes_max: u64,
    /// Sidecars below one on the tree of control links; equal on all sidecars. Another value than the default is for tests.
    pub control_fan_out: usize,
    /// What the selection of algorithms assumes; only the coordinator's counts.
    pub cost: CostModel,
}

/// When schedules are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAhead {
    /// Equal steps in a row after which the coordinator expects the next one to be equal; at least 2 are used.
    pub steps: u32,
    /// How many times that is doubled, once for each schedule in a row that did not last. Another value than the default is
    /// for tests.
    pub setbacks_max: u32,
    /// Tensors of a step; more do not run ahead. At most [`limits::SCHEDULE_TENSORS_MAX`], the default.
    pub tensors_max: usize,
}

impl Default for RunAhead {
    fn default() -> Self {
        Self { steps: 2, setbacks_max: 10, tensors_max: limits::SCHEDULE_TENSORS_MAX }
    }
}

impl EngineConfig {
    /// The defaults.
    #[must_use]
    pub fn new(me: SidecarIndex, world: World) -> Self {
        Self {
            me,
            world,
            host: String::new(),
            lanes: 1,
            threads: 1,
            heartbeat_ms: limits::HEARTBEAT_MS,
            suspect_ms: limits::SUSPECT_MS,
            peer_timeout_ms: limits::PEER_TIMEOUT_MS,
            fusion_threshold_bytes: limits::FUSION_THRESHOLD_BYTES,
            buckets_in_flight: limits::BUCKETS_IN_FLIGHT,
            eager_bytes: EAGER_BYTES_MOST,
            run_ahead: Some(RunAhead::default()),
            announce_slots: limits::ANNOUNCE_SLOTS_MAX,
            hierarchical_allreduce: true,
            stall_warning_ms: STALL_WARNING_MS,
            stall_shutdown_ms: 0,
            result_bytes_max: u64::MAX,
            control_fan_out: limits::CONTROL_FAN_OUT,
            cost: CostModel::default(),
        }
    }

    /// Periods that contradict each other are brought into order: two heartbeats fit into `suspect_ms`, which is at
    /// most `peer_timeout_ms`.
    pub(crate) fn in_order(mut self) -> Self {
        self.suspect_ms = self.suspect_ms.max(2);
        self.peer_timeout_ms = self.peer_timeout_ms.max(self.suspect_ms);
        self.heartbeat_ms = self.heartbeat_ms.clamp(1, self.suspect_ms / 2);
        self.buckets_in_flight = self.buckets_in_flight.max(1);
        self.lanes = self.lanes.max(1);
        self.threads = self.threads.max(self.lanes);
        self.eager_bytes = self.eager_bytes.min(EAGER_BYTES_MOST);
        self.announce_slots = self.announce_slots.min(limits::ANNOUNCE_SLOTS_MAX);
        self.stall_warning_ms = self.stall_warning_ms.max(1);
        if self.stall_shutdown_ms > 0 {
            self.stall_shutdown_ms = self.stall_shutdown_ms.max(self.stall_warning_ms);
        }
        self
    }

    /// What [`Self::in_order`] changes that its user would wonder about, in words.
    pub(crate) fn notes(&self) -> Vec<String> {
        if self.stall_shutdown_ms == 0 || self.stall_shutdown_ms >= self.stall_warning_ms {
            return Vec::new();
        }
        let (given, taken) = (wording::seconds(self.stall_shutdown_ms), wording::seconds(self.stall_warning_ms));
        vec![format!("stall_shutdown of {given} is shorter than stall_warning; it is {taken} now")]
    }
}

/// [`limits::EAGER_BYTES_MAX`] as a setting holds it.
#[allow(clippy::cast_possible_truncation, reason = "4 KiB, checked by the assertion below")]
pub(crate) const EAGER_BYTES_MOST: u32 = limits::EAGER_BYTES_MAX as u32;
const _: () = assert!(EAGER_BYTES_MOST as usize == limits::EAGER_BYTES_MAX);

/// Horovod's default of 60 seconds.
const STALL_WARNING_MS: u64 = 60_000;
