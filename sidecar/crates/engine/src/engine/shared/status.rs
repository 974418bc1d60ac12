//! The status of an engine, for status pages and tools.

use ronde_collectives::CostModel;
use ronde_wire::{Epoch, Failure, ProcessSet, Rank, RequestId, SetId, SidecarIndex, TensorName};
use serde::Serialize;

use super::stats::Stats;
use crate::autotune::AutotuneStatus;

/// What an engine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EnginePhase {
    /// No epoch: ranks have yet to attach.
    Waiting,
    /// Within an epoch.
    Active,
    /// A rank has shut down; operations that were ordered before are being finished.
    Closing,
}

/// A snapshot of one engine. Lists are cut to [`STATUS_ENTRIES_MAX`] entries; counts are not.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// This sidecar.
    pub sidecar: SidecarIndex,
    /// The sidecar that orders operations.
    pub coordinator: SidecarIndex,
    /// What the engine is doing.
    pub phase: EnginePhase,
    /// The newest epoch that began here; 0 before the first.
    pub epoch: Epoch,
    /// The ranks of the job.
    pub world_size: usize,
    /// For each rank, the sidecar that serves it.
    pub placement: Vec<SidecarIndex>,
    /// Ranks of this sidecar that take part in the epoch.
    pub ranks_in_epoch: Vec<Rank>,
    /// Ranks of this sidecar that have attached and wait for the next epoch.
    pub ranks_waiting: Vec<Rank>,
    /// Ranks whose attachment is missing for the next epoch: of all sidecars at the coordinator, of this one elsewhere.
    /// Empty within an epoch.
    pub ranks_missing: Vec<Rank>,
    /// Ranks that have joined in a process set and wait for its others: of all sidecars at the coordinator, of this one
    /// elsewhere.
    pub ranks_joined: Vec<Rank>,
    /// How many process sets there are, that of all ranks included.
    pub sets: usize,
    /// The other ones, in order of their ids.
    pub process_sets: Vec<ProcessSet>,
    /// Pending requests of local ranks.
    pub pending: usize,
    /// The oldest of them.
    pub pending_requests: Vec<PendingStatus>,
    /// Coordinator: the number of names that wait for ranks.
    pub negotiating: usize,
    /// Coordinator: the oldest of those names, and the missing ranks.
    pub waiting_tensors: Vec<WaitingTensor>,
    /// Coordinator: the same when the last epoch ended, for the flight record. Empty when another one has begun.
    #[serde(skip)]
    pub waited_at_end: Vec<WaitingTensor>,
    /// Coordinator: the reasons for the algorithms of the newest operations, newest last.
    pub selections: Vec<String>,
    /// Coordinator: for each rank, how often it was the last to be ready; the slowest rank has most. Empty elsewhere.
    pub last_to_be_ready: Vec<u64>,
    /// Coordinator: for each rank, the total microseconds for which others have waited for it, for one tensor or several.
    /// Empty elsewhere.
    pub waited_for_us: Vec<u64>,
    /// The cost model that selects algorithms, at the coordinator.
    pub cost: CostStatus,
    /// Coordinator: the cost model as measured, if that was asked for and enough operations were performed alone.
    pub measured_cost: Option<CostStatus>,
    /// Coordinator: the search for better settings, if there is one.
    pub autotune: Option<AutotuneStatus>,
    /// The schedule that runs without negotiation, if there is one.
    pub schedule: Option<ScheduleStatus>,
    /// Operations admitted here and not finished.
    pub in_flight: usize,
    /// Sidecars that are silent.
    pub suspect_sidecars: Vec<SidecarIndex>,
    /// Ranks that are silent.
    pub suspect_ranks: Vec<Rank>,
    /// Descriptions of adjusted settings.
    pub notes: Vec<String>,
    /// Why the last epoch ended.
    pub last_failure: Option<Failure>,
    /// The control links.
    pub links: Vec<LinkStatus>,
    /// The counters.
    pub stats: Stats,
}

/// The most entries of one list of a [`Status`].
pub const STATUS_ENTRIES_MAX: usize = 100;

/// The cost model of [`Status`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CostStatus {
    /// Microseconds of a round.
    pub alpha_us: f64,
    /// Microseconds for each byte that is sent.
    pub beta_us_per_byte: f64,
    /// Microseconds for each byte that is reduced.
    pub gamma_us_per_byte: f64,
}

impl From<CostModel> for CostStatus {
    fn from(CostModel { alpha_us, beta_us_per_byte, gamma_us_per_byte }: CostModel) -> Self {
        Self { alpha_us, beta_us_per_byte, gamma_us_per_byte }
    }
}

/// A pending request.
#[derive(Clone, Debug, Serialize)]
pub struct PendingStatus {
    /// The rank.
    pub rank: Rank,
    /// The number of the request.
    pub request: RequestId,
    /// The set.
    pub set: SetId,
    /// The name.
    pub name: TensorName,
    /// The collective.
    pub collective: &'static str,
    /// Whether it is being performed: all ranks have announced it, or a schedule has admitted it.
    pub ordered: bool,
    /// Whether a schedule has admitted it: ranks of other sidecars may not have submitted it.
    pub scheduled: bool,
    /// Milliseconds since it was submitted.
    pub age_ms: u64,
}

/// A name that some ranks have announced and others have not.
#[derive(Clone, Debug, Serialize)]
pub struct WaitingTensor {
    /// The set.
    pub set: SetId,
    /// The name.
    pub name: TensorName,
    /// The collective.
    pub collective: &'static str,
    /// The missing ranks.
    pub missing: Vec<Rank>,
    /// Milliseconds since the first rank announced it.
    pub age_ms: u64,
}

/// A schedule: the repeated operations of a training step, which run without negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScheduleStatus {
    /// Number of the schedule within the epoch, from 1.
    pub number: u64,
    /// Operations of a step.
    pub operations: usize,
    /// Tensors of a step.
    pub tensors: usize,
    /// Steps that have completed here.
    pub steps: u64,
}

/// A control link.
#[derive(Clone, Debug, Serialize)]
pub struct LinkStatus {
    /// The peer.
    pub peer: SidecarIndex,
    /// Whether it is open.
    pub up: bool,
    /// Milliseconds since the last message; meaningful within an epoch.
    pub silent_ms: u64,
    /// The newest round trip, in microseconds.
    pub round_trip_us: Option<u64>,
    /// The peer's clock less this sidecar's, in microseconds.
    pub clock_offset_us: Option<i64>,
}
