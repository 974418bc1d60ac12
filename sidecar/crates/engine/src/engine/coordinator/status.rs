//! The coordinator's part of the engine's status.

use ronde_wire::{Collective, Rank, SetId};

use super::Coordinator;
use super::member_sets::WaitingSet;
use super::negotiation::Waiting;
use crate::engine::shared::context::Context;
use crate::engine::shared::status::{STATUS_ENTRIES_MAX, WaitingTensor};
use crate::event::Time;

/// The coordinator's status of all ranks. Other sidecars use the default.
#[derive(Debug, Default)]
pub(crate) struct NegotiationStatus {
    /// Ranks that have yet to attach; none within an epoch.
    pub(crate) ranks_missing: Vec<Rank>,
    pub(crate) ranks_joined: Vec<Rank>,
    /// Names that some ranks have announced and others have not.
    pub(crate) names: usize,
    /// The oldest of these names, at most [`STATUS_ENTRIES_MAX`].
    pub(crate) oldest: Vec<WaitingTensor>,
    /// Those of the last epoch when it ended.
    pub(crate) oldest_at_end: Vec<WaitingTensor>,
    pub(crate) last_to_be_ready: Vec<u64>,
    pub(crate) waited_for_us: Vec<u64>,
}

impl Coordinator {
    /// Ranks and names at `now`.
    pub(crate) fn status(&self, cx: &Context, now: Time) -> NegotiationStatus {
        NegotiationStatus {
            ranks_missing: self.missing(cx),
            ranks_joined: self.agreement.joins.ranks().into_iter().collect(),
            names: self.agreement.negotiation.len() + self.agreement.member_sets.len(),
            oldest: self.oldest_names(now),
            oldest_at_end: self
                .waited_at_end
                .1
                .iter()
                .map(|waiting| older(waiting, now, self.waited_at_end.0))
                .collect(),
            last_to_be_ready: self.last_to_be_ready.clone(),
            waited_for_us: self.waited_for_us.clone(),
        }
    }

    pub(super) fn oldest_names(&self, now: Time) -> Vec<WaitingTensor> {
        let entry = |waiting: Waiting<'_>| WaitingTensor {
            set: waiting.request.set,
            name: waiting.request.name.clone(),
            collective: waiting.request.collective.name(),
            missing: waiting.missing(self.agreement.joins.of(waiting.request.set)),
            age_ms: now.ms_since(waiting.since),
        };
        let formed = |waiting: WaitingSet<'_>| WaitingTensor {
            set: SetId::WORLD,
            name: waiting.name.clone(),
            collective: Collective::AddSetOfMembers { ranks: Vec::new() }.name(),
            missing: waiting.missing,
            age_ms: now.ms_since(waiting.since),
        };
        let mut negotiated: Vec<_> = self.agreement.negotiation.waiting().collect();
        negotiated.sort_by_key(|waiting| waiting.since);
        let mut oldest: Vec<_> = negotiated.into_iter().take(STATUS_ENTRIES_MAX).map(entry).collect();
        oldest.extend(self.agreement.member_sets.waiting().map(formed));
        oldest.sort_by_key(|waiting| std::cmp::Reverse(waiting.age_ms));
        oldest.truncate(STATUS_ENTRIES_MAX);
        oldest
    }
}

/// What waited at an earlier time, with its age now.
fn older(waiting: &WaitingTensor, now: Time, then: Time) -> WaitingTensor {
    WaitingTensor { age_ms: waiting.age_ms.saturating_add(now.ms_since(then)), ..waiting.clone() }
}
