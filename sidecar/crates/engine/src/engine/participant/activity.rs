//! The activity of local ranks: reported to the coordinator when others wait for them, and to all ranks when they fail.

use ronde_wire::{Activity, Call, Control, Rank, Record, Seq, TensorName, limits};

use super::Participant;
use crate::engine::shared::context::Context;
use crate::event::Time;

/// The last call of a rank.
#[derive(Clone, Debug)]
pub(crate) struct LastCall {
    /// The name of the collective on the wire.
    pub(crate) collective: &'static str,
    pub(crate) operation: TensorName,
    pub(crate) site: Option<String>,
    pub(crate) at: Time,
}

impl LastCall {
    fn to_call(&self, now: Time) -> Call {
        let call = Call {
            collective: self.collective.to_ascii_lowercase(),
            operation: self.operation.clone(),
            site: self.site.clone(),
            age_ms: now.ms_since(self.at),
        };
        call.within_limits()
    }
}

impl Participant {
    /// A rank has called an operation.
    pub(crate) fn called(&mut self, cx: &Context, rank: Rank, call: LastCall) {
        self.mark_alive(cx, rank);
        if let Some(liveness) = self.present.get_mut(&rank) {
            liveness.last_call = Some(call);
            *self.calls.entry(rank).or_default() += 1;
        }
    }

    /// The record of a rank, for its failure.
    pub(crate) fn record(&self, cx: &Context, rank: Rank, now: Time) -> Record {
        let last_call = self.present.get(&rank).and_then(|liveness| liveness.last_call.as_ref());
        let (host, last_call) = (cx.config.host.clone(), last_call.map(|call| call.to_call(now)));
        Record { rank, host, pid: None, exit: None, last_call, stderr_tail: Vec::new() }
    }

    /// How many operations a rank has called in the epoch, also after its end.
    pub(crate) fn calls(&self, rank: Rank) -> u64 {
        self.calls.get(&rank).copied().unwrap_or(0)
    }

    /// Reports the activity of some ranks to the coordinator.
    pub(crate) fn report_activity(&self, cx: &mut Context, ranks: &[Rank]) {
        let mine = ranks.iter().filter(|rank| cx.serves(cx.me(), **rank)).take(limits::REPORT_RANKS_MAX);
        let activities = mine.map(|rank| self.activity(cx, *rank)).collect();
        self.to_coordinator(cx, Seq(0), Control::Activities { activities });
    }

    fn activity(&self, cx: &Context, rank: Rank) -> Activity {
        let liveness = self.present.get(&rank);
        let oldest = self.requests.iter().filter(|(of, _)| *of == rank).min_by_key(|(_, pending)| pending.since);
        Activity {
            rank,
            silent_ms: liveness.filter(|liveness| !liveness.left).map(|liveness| cx.now.ms_since(liveness.last_seen)),
            last_call: liveness.and_then(|liveness| liveness.last_call.as_ref()).map(|call| call.to_call(cx.now)),
            pending: u32::try_from(self.requests.of(rank) + self.any_sources.of(rank)).unwrap_or(u32::MAX),
            oldest: oldest.map(|(_, pending)| pending.what.name.clone()),
        }
    }
}
