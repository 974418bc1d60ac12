//! The participant's part of the engine's status.

use ronde_wire::{Failure, ProcessSet, Rank};

use super::requests::Pending;
use super::scheduled::Scheduled;
use super::{Participant, Phase};
use crate::engine::shared::context::Context;
use crate::engine::shared::status::{EnginePhase, PendingStatus, STATUS_ENTRIES_MAX, ScheduleStatus};
use crate::event::Time;

/// The status of a participant's ranks and requests.
#[derive(Debug)]
pub(crate) struct RequestStatus {
    pub(crate) ranks_in_epoch: Vec<Rank>,
    pub(crate) ranks_waiting: Vec<Rank>,
    /// Local ranks that have yet to attach; none within an epoch.
    pub(crate) ranks_missing: Vec<Rank>,
    pub(crate) ranks_joined: Vec<Rank>,
    pub(crate) sets: usize,
    pub(crate) process_sets: Vec<ProcessSet>,
    pub(crate) pending: usize,
    /// The oldest pending requests, at most [`STATUS_ENTRIES_MAX`].
    pub(crate) oldest: Vec<PendingStatus>,
    pub(crate) schedule: Option<ScheduleStatus>,
    pub(crate) in_flight: usize,
    pub(crate) last_failure: Option<Failure>,
}

impl Participant {
    /// The phase of this engine.
    pub(crate) fn engine_phase(&self) -> EnginePhase {
        match self.phase {
            Phase::Idle => EnginePhase::Waiting,
            Phase::Active => EnginePhase::Active,
            Phase::Closing(_) => EnginePhase::Closing,
        }
    }

    /// The local ranks and requests at `now`.
    pub(crate) fn request_status(&self, cx: &Context, now: Time) -> RequestStatus {
        let world = &cx.config.world;
        RequestStatus {
            ranks_in_epoch: self.present.iter().filter(|(_, rank)| !rank.left).map(|(rank, _)| *rank).collect(),
            ranks_waiting: self.waiting.iter().copied().collect(),
            ranks_missing: self.missing_ranks(cx),
            ranks_joined: self.requests.joined_ranks().into_iter().collect(),
            sets: self.sets.len(world),
            process_sets: self.sets.others(world).take(STATUS_ENTRIES_MAX).collect(),
            pending: self.requests.len() + self.any_sources.len(),
            oldest: self.oldest_requests(now),
            schedule: self.scheduled.as_ref().map(Scheduled::progress),
            in_flight: self.admitted.len(),
            last_failure: self.last_failure.clone(),
        }
    }

    fn missing_ranks(&self, cx: &Context) -> Vec<Rank> {
        if !self.is_idle() {
            return Vec::new();
        }
        cx.config.world.ranks_of(cx.config.me).into_iter().filter(|rank| !self.waiting.contains(rank)).collect()
    }

    fn oldest_requests(&self, now: Time) -> Vec<PendingStatus> {
        let first = self.scheduled.as_ref().map(Scheduled::first);
        let mut oldest: Vec<_> = self.requests.iter().collect();
        oldest.sort_by_key(|(rank, pending)| (pending.since, *rank, pending.request));
        let entry = |(rank, pending): (Rank, &Pending)| PendingStatus {
            rank,
            request: pending.request,
            set: pending.what.set,
            name: pending.what.name.clone(),
            collective: pending.what.collective.name(),
            ordered: pending.ordered.is_some(),
            scheduled: pending.ordered.is_some_and(|seq| first.is_some_and(|first| seq >= first)),
            age_ms: now.ms_since(pending.since),
        };
        oldest.into_iter().take(STATUS_ENTRIES_MAX).map(entry).collect()
    }
}
