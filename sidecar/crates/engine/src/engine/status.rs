//! Assembles the status of an engine from its context, participant and coordinator.

use super::coordinator::Coordinator;
use super::participant::Participant;
use super::shared::calibration::Calibration;
use super::shared::context::Context;
use super::shared::status::Status;
use crate::event::Time;

/// A snapshot at `now`.
pub(crate) fn status(cx: &Context, participant: &Participant, coordinator: Option<&Coordinator>, now: Time) -> Status {
    let requests = participant.request_status(cx, now);
    let negotiation = coordinator.map(|coordinator| coordinator.status(cx, now)).unwrap_or_default();
    let suspects = participant.notified();
    let is_coordinator = coordinator.is_some();
    Status {
        sidecar: cx.config.me,
        coordinator: cx.coordinator,
        phase: participant.engine_phase(),
        epoch: participant.epoch(),
        world_size: cx.config.world.size(),
        placement: cx.config.world.placement().to_vec(),
        ranks_in_epoch: requests.ranks_in_epoch,
        ranks_waiting: requests.ranks_waiting,
        ranks_missing: if is_coordinator { negotiation.ranks_missing } else { requests.ranks_missing },
        ranks_joined: if is_coordinator { negotiation.ranks_joined } else { requests.ranks_joined },
        sets: requests.sets,
        process_sets: requests.process_sets,
        pending: requests.pending,
        pending_requests: requests.oldest,
        negotiating: negotiation.names,
        waiting_tensors: negotiation.oldest,
        waited_at_end: negotiation.oldest_at_end,
        selections: cx.selections.iter().cloned().collect(),
        last_to_be_ready: negotiation.last_to_be_ready,
        waited_for_us: negotiation.waited_for_us,
        cost: cx.config.cost.into(),
        measured_cost: cx.calibration.as_ref().and_then(Calibration::fit),
        autotune: cx.tuner.status(),
        schedule: requests.schedule,
        in_flight: requests.in_flight,
        suspect_sidecars: suspects.sidecars.clone(),
        suspect_ranks: suspects.ranks.clone(),
        notes: cx.notes.clone(),
        last_failure: requests.last_failure,
        links: cx.link_status(now),
        stats: cx.stats.clone(),
    }
}
