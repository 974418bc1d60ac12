//! The settings of an engine.

use ronde_collectives::CostModel;
use ronde_wire::{Epoch, SidecarIndex, World, limits};

use super::wording;
use crate::autotune::AutotuneSettings;

/// The settings of an engine. All but `me` and `world` have defaults.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// This sidecar.
    pub me: SidecarIndex,
    /// The membership; equal on all sidecars, which each epoch verifies.
    pub world: World,
    /// Epochs count on from this one: [`Epoch::before_membership`] in an elastic job.
    pub epochs_after: Epoch,
    /// The display name of this sidecar's host. Default: empty.
    pub host: String,
    /// Lanes that this sidecar offers to each peer. Default 1.
    pub lanes: u16,
    /// The most lanes of one operation, which has at most as many as all its members offer. Only the coordinator's setting
    /// is used. Default: no limit.
    pub lanes_used_max: u16,
    /// The most lanes of an operation whose ranks all use this sidecar; it has at most `threads`. Only the coordinator's
    /// setting is used. Default: no limit.
    pub threads_used_max: u16,
    /// The chunk size of all plans in bytes, a power of two within the limits of a chunk; `None` lets the cost model choose
    /// one for each bucket. Only the coordinator's setting is used. Default `None`.
    pub chunk_bytes: Option<u32>,
    /// Data threads of this sidecar, at least `lanes`: operations on this sidecar alone use so many lanes. Default 1.
    pub threads: u16,
    /// Time between two heartbeats, in milliseconds; at most half of `suspect_ms` is used. Default 100.
    pub heartbeat_ms: u64,
    /// Silence after which a sidecar or rank is named as suspect, in milliseconds. Default 1,000.
    pub suspect_ms: u64,
    /// Silence after which a sidecar or rank is dead, in milliseconds; at least `suspect_ms`. Default 5,000.
    pub peer_timeout_ms: u64,
    /// Bytes of tensors that share a bucket; 0 switches fusion off. Default 64 MiB.
    pub fusion_threshold_bytes: u64,
    /// Whether tensors of at most [`limits::EAGER_BYTES_MAX`] share no bucket with longer ones: workers keep these in main
    /// memory, and longer ones may be in device memory, where a bucket is performed only if all of its tensors are. Only the
    /// coordinator's setting is used. Default: false.
    pub separates_small_tensors: bool,
    /// Buckets of one process set that are in flight; at least 1. Default 2.
    pub buckets_in_flight: usize,
    /// Bytes of a contribution up to which operations are eager, at most [`limits::EAGER_BYTES_MAX`]; 0 switches that
    /// off. Only the coordinator's setting is used. Default: the most.
    pub eager_bytes: u32,
    /// When repeated steps run without negotiation; `None` for never. Only the coordinator's setting is used. Default:
    /// after two equal steps.
    pub run_ahead: Option<RunAhead>,
    /// Slots of the request cache, by which repeated requests are announced, at most [`limits::ANNOUNCE_SLOTS_MAX`]; 0
    /// for none. Default: the most.
    pub announce_slots: usize,
    /// Whether an all-reduce first reduces the ranks of each sidecar. Otherwise each rank's values are sent and reduced
    /// in rank order, so that the bits do not depend on the placement; not in sets of more than
    /// [`limits::NARY_RANKS_MAX`] ranks, nor with a codec. Only the coordinator's setting is used. Default: true.
    pub hierarchical_allreduce: bool,
    /// Age after which a tensor that waits for some ranks is reported, in milliseconds; `u64::MAX` for never. Default
    /// 60,000.
    pub stall_warning_ms: u64,
    /// Age after which a tensor that waits for some ranks ends the epoch, in milliseconds; 0 for never. A shorter time
    /// than `stall_warning_ms` is raised to that. Default 0.
    pub stall_shutdown_ms: u64,
    /// Age after which a tensor that waits for a single rank, which waits for nothing itself, is reported by
    /// [`Action::Hung`](crate::Action::Hung), in milliseconds; 0 for never. Default 0.
    pub replace_stalled_ms: u64,
    /// The most bytes of the result of one tensor: a larger one is refused on all ranks. Only the coordinator's setting
    /// is used. Default: no limit.
    pub result_bytes_max: u64,
    /// Children of one sidecar in the tree of control links; equal on all sidecars. Other values than the default are
    /// for tests.
    pub control_fan_out: usize,
    /// The cost model of the selection of algorithms; only the coordinator's setting is used.
    pub cost: CostModel,
    /// The measured time of a reduced byte in microseconds. With it the coordinator measures latency and bandwidth, too, of
    /// operations that are performed alone, for [`Status::measured_cost`](crate::Status::measured_cost), and for nothing else.
    /// Default: nothing is measured.
    pub measured_gamma_us_per_byte: Option<f64>,
    /// How the coordinator searches for better settings than these; `None` for not at all, the default. Only the
    /// coordinator's setting is used.
    pub autotune: Option<AutotuneSettings>,
}

/// When schedules are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAhead {
    /// Equal steps in a row before the coordinator issues a schedule; at least 2.
    pub steps: u32,
    /// How many times that number is doubled at most, once for each consecutive schedule that did not last. Other
    /// values than the default are for tests.
    pub setbacks_max: u32,
    /// The most tensors of a scheduled step. At most [`limits::SCHEDULE_TENSORS_MAX`], the default.
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
            epochs_after: Epoch(0),
            host: String::new(),
            lanes: 1,
            lanes_used_max: u16::MAX,
            threads_used_max: u16::MAX,
            chunk_bytes: None,
            threads: 1,
            heartbeat_ms: limits::HEARTBEAT_MS,
            suspect_ms: limits::SUSPECT_MS,
            peer_timeout_ms: limits::PEER_TIMEOUT_MS,
            fusion_threshold_bytes: limits::FUSION_THRESHOLD_BYTES,
            separates_small_tensors: false,
            buckets_in_flight: limits::BUCKETS_IN_FLIGHT,
            eager_bytes: EAGER_BYTES_MOST,
            run_ahead: Some(RunAhead::default()),
            announce_slots: limits::ANNOUNCE_SLOTS_MAX,
            hierarchical_allreduce: true,
            stall_warning_ms: STALL_WARNING_MS,
            stall_shutdown_ms: 0,
            replace_stalled_ms: 0,
            result_bytes_max: u64::MAX,
            control_fan_out: limits::CONTROL_FAN_OUT,
            cost: CostModel::default(),
            measured_gamma_us_per_byte: None,
            autotune: None,
        }
    }

    /// Adjusts settings that contradict each other: two heartbeats fit into `suspect_ms`, which is at most
    /// `peer_timeout_ms`.
    pub(crate) fn in_order(mut self) -> Self {
        self.suspect_ms = self.suspect_ms.max(2);
        self.peer_timeout_ms = self.peer_timeout_ms.max(self.suspect_ms);
        self.heartbeat_ms = self.heartbeat_ms.clamp(1, self.suspect_ms / 2);
        self.buckets_in_flight = self.buckets_in_flight.max(1);
        self.lanes = self.lanes.max(1);
        self.threads = self.threads.max(self.lanes);
        self.lanes_used_max = self.lanes_used_max.max(1);
        self.threads_used_max = self.threads_used_max.max(1);
        self.eager_bytes = self.eager_bytes.min(EAGER_BYTES_MOST);
        self.announce_slots = self.announce_slots.min(limits::ANNOUNCE_SLOTS_MAX);
        self.stall_warning_ms = self.stall_warning_ms.max(1);
        if self.stall_shutdown_ms > 0 {
            self.stall_shutdown_ms = self.stall_shutdown_ms.max(self.stall_warning_ms);
        }
        self
    }

    /// The age after which a tensor that waits is of interest.
    pub(crate) fn stall_checked_ms(&self) -> u64 {
        if self.replace_stalled_ms == 0 {
            self.stall_warning_ms
        } else {
            self.stall_warning_ms.min(self.replace_stalled_ms)
        }
    }

    /// The visible changes of [`Self::in_order`], for the status page.
    pub(crate) fn notes(&self) -> Vec<String> {
        if self.stall_shutdown_ms == 0 || self.stall_shutdown_ms >= self.stall_warning_ms {
            return Vec::new();
        }
        let (given, taken) = (wording::seconds(self.stall_shutdown_ms), wording::seconds(self.stall_warning_ms));
        vec![format!("stall_shutdown of {given} is shorter than stall_warning; {taken} is used instead")]
    }
}

/// [`limits::EAGER_BYTES_MAX`] in the type of the setting.
#[allow(clippy::cast_possible_truncation, reason = "4 KiB, checked by the assertion below")]
pub(crate) const EAGER_BYTES_MOST: u32 = limits::EAGER_BYTES_MAX as u32;
const _: () = assert!(EAGER_BYTES_MOST as usize == limits::EAGER_BYTES_MAX);

/// Horovod's default of 60 seconds.
const STALL_WARNING_MS: u64 = 60_000;
