//! What an engine tells people: counters, and a picture of the moment.

use ronde_wire::{Epoch, Failure, ProcessSet, Rank, RequestId, SetId, SidecarIndex, TensorName};
use serde::Serialize;

use super::context::Context;
use super::coordinator::Coordinator;
use super::liveness::Link;
use super::negotiation::Waiting;
use super::participant::{Participant, Phase};
use super::requests::Pending;
use super::scheduled::Scheduled;
use crate::event::Time;

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
    /// Names rejected here on the coordinator's word.
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
    /// Requests announced by a number, because they had been announced before.
    pub announced_again: u64,
    /// Remembered requests that were forgotten for others.
    pub cache_evictions: u64,
    /// Control messages passed on for others.
    pub relayed: u64,
    /// Heartbeats sent.
    pub heartbeats: u64,
    /// Coordinator: schedules that were issued.
    pub schedules_issued: u64,
    /// Coordinator: schedules that were withdrawn, for each [`ronde_wire::Deviation`].
    pub schedules_withdrawn: [u64; ronde_wire::Deviation::ALL.len()],
    /// Operations of schedules that were admitted here, without an announcement and an order.
    pub scheduled_operations: u64,
    /// Those of them that were dropped because their schedule was withdrawn.
    pub cancelled_operations: u64,
    /// Pauses of this process itself, longer than the suspicion time, that were noticed afterwards.
    pub pauses: u64,
}

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

/// A picture of the moment, for status pages. Lists are cut to [`STATUS_ENTRIES_MAX`] entries; counts are not.
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
    /// Ranks of this sidecar that take part in the epoch.
    pub ranks_in_epoch: Vec<Rank>,
    /// Ranks of this sidecar that have attached and wait for the next epoch.
    pub ranks_waiting: Vec<Rank>,
    /// Ranks whose attachment is missing for the next epoch: of all sidecars at the coordinator, of this one elsewhere.
    /// Empty within an epoch.
    pub ranks_missing: Vec<Rank>,
    /// Ranks that have joined and wait for the others: of all sidecars at the coordinator, of this one elsewhere.
    pub ranks_joined: Vec<Rank>,
    /// How many process sets there are, that of all ranks included.
    pub sets: usize,
    /// The other ones, in order of their ids.
    pub process_sets: Vec<ProcessSet>,
    /// Requests of local ranks that have no answer yet.
    pub pending: usize,
    /// The oldest of them.
    pub pending_requests: Vec<PendingStatus>,
    /// Coordinator: how many names wait for ranks.
    pub negotiating: usize,
    /// Coordinator: the oldest of those names, and who is missing.
    pub waiting_tensors: Vec<WaitingTensor>,
    /// Coordinator: why the newest operations got their algorithms, newest last.
    pub selections: Vec<String>,
    /// Coordinator: for each rank, how often it was the last to be ready; the slowest rank has most. Empty elsewhere.
    pub last_to_be_ready: Vec<u64>,
    /// Coordinator: for each rank, for how many microseconds the others have waited for it in all. Empty elsewhere.
    pub waited_for_us: Vec<u64>,
    /// What is performed without being negotiated, if there is such.
    pub schedule: Option<ScheduleStatus>,
    /// Operations admitted here and not finished.
    pub in_flight: usize,
    /// Sidecars that are silent.
    pub suspect_sidecars: Vec<SidecarIndex>,
    /// Ranks that are silent.
    pub suspect_ranks: Vec<Rank>,
    /// Settings that were brought into order, in words.
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

/// A request without an answer.
#[derive(Clone, Debug, Serialize)]
pub struct PendingStatus {
    /// Whose.
    pub rank: Rank,
    /// Its number.
    pub request: RequestId,
    /// The set.
    pub set: SetId,
    /// The name.
    pub name: TensorName,
    /// What is to be done.
    pub collective: &'static str,
    /// Whether all ranks have announced it and it is being performed.
    pub ordered: bool,
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
    /// What is to be done.
    pub collective: &'static str,
    /// Who is missing.
    pub missing: Vec<Rank>,
    /// Milliseconds since the first rank announced it.
    pub age_ms: u64,
}

/// What ranks ask for again and again, which is performed without being negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScheduleStatus {
    /// Counts the schedules of the epoch.
    pub number: u64,
    /// Operations of a step.
    pub operations: usize,
    /// Tensors of a step.
    pub tensors: usize,
    /// Steps that were begun and ended here.
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

/// Puts the picture together.
pub(crate) fn status(cx: &Context, participant: &Participant, coordinator: Option<&Coordinator>, now: Time) -> Status {
    let suspects = participant.noticed();
    Status {
        sidecar: cx.config.me,
        coordinator: cx.coordinator,
        phase: phase(participant),
        epoch: participant.epoch,
        world_size: cx.config.world.size(),
        ranks_in_epoch: participant.present.iter().filter(|(_, p)| !p.left).map(|(rank, _)| *rank).collect(),
        ranks_waiting: participant.waiting.iter().copied().collect(),
        ranks_missing: ranks_missing(cx, participant, coordinator),
        ranks_joined: ranks_joined(participant, coordinator),
        sets: participant.sets.len(&cx.config.world),
        process_sets: participant.sets.others(&cx.config.world).take(STATUS_ENTRIES_MAX).collect(),
        pending: participant.requests.len() + participant.any_sources.len(),
        pending_requests: pending_requests(participant, now),
        negotiating: coordinator.map_or(0, |c| c.agreement.negotiation.len()),
        waiting_tensors: coordinator.map_or_else(Vec::new, |c| waiting_tensors(c, now)),
        selections: cx.selections.iter().cloned().collect(),
        last_to_be_ready: coordinator.map_or_else(Vec::new, |c| c.last_to_be_ready.clone()),
        waited_for_us: coordinator.map_or_else(Vec::new, |c| c.waited_for_us.clone()),
        schedule: participant.scheduled.as_ref().map(Scheduled::progress),
        in_flight: participant.admitted.len(),
        suspect_sidecars: suspects.sidecars.clone(),
        suspect_ranks: suspects.ranks.clone(),
        notes: cx.notes.clone(),
        last_failure: participant.last_failure.clone(),
        links: neighbours(cx).map(|(peer, link)| link_status(peer, link, now)).collect(),
        stats: cx.stats.clone(),
    }
}

fn neighbours(cx: &Context) -> impl Iterator<Item = (SidecarIndex, &Link)> {
    cx.links.iter().filter(|(peer, _)| cx.relay.is_neighbour(*peer))
}

fn phase(participant: &Participant) -> EnginePhase {
    match participant.phase {
        Phase::Idle => EnginePhase::Waiting,
        Phase::Active => EnginePhase::Active,
        Phase::Closing(_) => EnginePhase::Closing,
    }
}

fn ranks_missing(cx: &Context, participant: &Participant, coordinator: Option<&Coordinator>) -> Vec<Rank> {
    match coordinator {
        Some(coordinator) => coordinator.missing(cx),
        None if participant.is_idle() => {
            let mine = cx.config.world.ranks_of(cx.config.me);
            mine.into_iter().filter(|rank| !participant.waiting.contains(rank)).collect()
        }
        None => Vec::new(),
    }
}

fn ranks_joined(participant: &Participant, coordinator: Option<&Coordinator>) -> Vec<Rank> {
    match coordinator {
        Some(coordinator) => coordinator.agreement.joined.iter().copied().collect(),
        None => participant.present.keys().copied().filter(|rank| participant.requests.has_joined(*rank)).collect(),
    }
}

fn pending_requests(participant: &Participant, now: Time) -> Vec<PendingStatus> {
    let mut oldest: Vec<_> = participant.requests.iter().collect();
    oldest.sort_by_key(|(rank, pending)| (pending.since, *rank, pending.request));
    let entry = |(rank, pending): (Rank, &Pending)| PendingStatus {
        rank,
        request: pending.request,
        set: pending.what.set,
        name: pending.what.name.clone(),
        collective: pending.what.collective.name(),
        ordered: pending.ordered.is_some(),
        age_ms: now.ms_since(pending.since),
    };
    oldest.into_iter().take(STATUS_ENTRIES_MAX).map(entry).collect()
}

fn waiting_tensors(coordinator: &Coordinator, now: Time) -> Vec<WaitingTensor> {
    let mut oldest: Vec<_> = coordinator.agreement.negotiation.waiting().collect();
    oldest.sort_by_key(|waiting| waiting.since);
    let entry = |waiting: Waiting<'_>| WaitingTensor {
        set: waiting.request.set,
        name: waiting.request.name.clone(),
        collective: waiting.request.collective.name(),
        missing: waiting.missing(&coordinator.agreement.joined),
        age_ms: now.ms_since(waiting.since),
    };
    oldest.into_iter().take(STATUS_ENTRIES_MAX).map(entry).collect()
}

fn link_status(peer: SidecarIndex, link: &Link, now: Time) -> LinkStatus {
    LinkStatus {
        peer,
        up: link.up,
        silent_ms: now.ms_since(link.heard),
        round_trip_us: link.round_trip_us,
        clock_offset_us: link.clock_offset_us,
    }
}
