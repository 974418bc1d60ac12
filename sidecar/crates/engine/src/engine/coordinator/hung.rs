//! Finds a rank that hangs, so that the launcher of an elastic job can replace it.
//!
//! It must never be a wrong one, so all of this has to hold: operations have waited for long, each of them lacks the same
//! single rank and no other, and the sidecar of this rank answers that its session is open and none of its calls is
//! pending. A rank that is late because it waits for another one, for data, or for a message has a pending call.

use ronde_wire::{Activity, Control, Rank, Seq, SidecarIndex};

use super::agreement::Agreement;
use super::stall::{self, MissingRank};
use crate::engine::shared::context::Context;
use crate::engine::shared::wording;
use crate::event::{Action, Time};

/// The search of one epoch.
#[derive(Debug, Default)]
pub(crate) struct HungRanks {
    /// The rank whose activity was asked for last, and when.
    asked: Option<(Rank, Time)>,
    is_reported: bool,
}

impl HungRanks {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Asks for the activity of a rank for which all others wait.
    pub(crate) fn check(&mut self, cx: &mut Context, agreement: &Agreement) {
        if cx.config.replace_stalled_ms == 0 || self.is_reported {
            return;
        }
        let Some((rank, _)) = only_missing(cx, agreement) else {
            self.asked = None;
            return;
        };
        let is_asked = self.asked.is_some_and(|(of, at)| of == rank && cx.now.ms_since(at) < ASK_INTERVAL_MS);
        let Some(sidecar) = cx.config.world.sidecar_of(rank).filter(|_| !is_asked) else { return };
        self.asked = Some((rank, cx.now));
        cx.send_down(
            &[sidecar].into_iter().collect(),
            agreement.epoch,
            Seq(0),
            Control::AskActivity { ranks: vec![rank] },
        );
    }

    /// Handles the activities that a sidecar reports for its own ranks.
    pub(crate) fn answered(&mut self, cx: &mut Context, agreement: &Agreement, from: SidecarIndex, of: &[Activity]) {
        let Some((rank, _)) = self.asked.filter(|_| !self.is_reported) else { return };
        let Some(activity) = of.iter().find(|activity| activity.rank == rank) else { return };
        let waits_for_nothing = activity.pending == 0 && activity.silent_ms.is_some();
        let is_its_own = cx.config.world.sidecar_of(rank) == Some(from);
        let missing = only_missing(cx, agreement).filter(|(missing, _)| *missing == rank);
        if let Some((_, entry)) = missing.filter(|_| waits_for_nothing && is_its_own) {
            self.is_reported = true;
            let age = wording::seconds(cx.now.ms_since(entry.since));
            let activity = activity.clone().within_limits();
            let text =
                format!("{rank} has not asked for {} for {age}, while others wait for it; {activity}", entry.oldest);
            cx.act(Action::Hung { rank, text });
        }
    }
}

/// The rank that is missing from everything that has waited for too long, if it is only one.
fn only_missing(cx: &Context, agreement: &Agreement) -> Option<(Rank, MissingRank)> {
    let mut missing = stall::missing(cx, agreement, cx.config.replace_stalled_ms);
    let only = missing.pop_first()?;
    missing.is_empty().then_some(only)
}

/// How often the activity of the same rank is asked for.
const ASK_INTERVAL_MS: u64 = 1_000;
