//! Liveness at one sidecar: its own ranks, the coordinator, and the coordinator's reports of silent peers.

use std::sync::Arc;

use ronde_wire::{Cause, Control, Failure, Rank, Seq, SidecarIndex};

use super::Participant;
use crate::engine::shared::context::Context;
use crate::engine::shared::{Suspects, wording};
use crate::event::{Action, Time};

/// The state of liveness checks.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// When the waiting ranks were last reported.
    pub(super) reported: Time,
    /// Silent local ranks, as last reported.
    silent: Vec<Rank>,
    /// The coordinator's newest report.
    from_coordinator: Suspects,
    /// The last notice to the local sessions.
    notified: Suspects,
}

impl Participant {
    /// A worker has sent a message.
    pub(crate) fn mark_alive(&mut self, cx: &Context, rank: Rank) {
        if let Some(liveness) = self.present.get_mut(&rank) {
            liveness.last_seen = cx.now;
        }
    }

    /// This process itself was paused: restarts all liveness timers.
    pub(crate) fn rebase(&mut self, cx: &Context) {
        self.present.values_mut().for_each(|liveness| liveness.last_seen = cx.now);
    }

    /// Handles the coordinator's report of silent peers.
    pub(crate) fn suspects(&mut self, cx: &mut Context, suspects: Suspects) {
        let known = |cx: &Context, rank: &Rank| cx.config.world.sidecar_of(*rank).is_some();
        self.watch.from_coordinator = Suspects {
            sidecars: suspects.sidecars.into_iter().filter(|s| cx.sidecars.contains(s)).collect(),
            ranks: suspects.ranks.into_iter().filter(|rank| known(cx, rank)).collect(),
        };
        self.notice(cx);
    }

    /// The current suspects: sidecars and ranks.
    pub(crate) fn notified(&self) -> &Suspects {
        &self.watch.notified
    }

    /// Checks the timers.
    pub(crate) fn tick(&mut self, cx: &mut Context) {
        if self.is_idle() {
            // Repeated, so that waiting ranks survive a lost link or a restarted coordinator.
            let due = cx.now.ms_since(self.watch.reported) >= cx.config.suspect_ms;
            if !self.waiting.is_empty() && due {
                self.report_waiting(cx);
            }
            return;
        }
        self.watch_ranks(cx);
        self.check_delays(cx);
        match silence_upstream(cx) {
            Some((culprit, silent_ms)) if silent_ms >= cx.config.peer_timeout_ms => {
                let reason = format!("it has been silent for {}", wording::seconds(silent_ms));
                self.coordinator_lost(cx, culprit, &reason);
            }
            _ => self.notice(cx),
        }
    }

    fn watch_ranks(&mut self, cx: &mut Context) {
        if !self.is_active() {
            return;
        }
        let silence = |liveness: &super::RankLiveness| cx.now.ms_since(liveness.last_seen);
        let late = |limit_ms: u64| {
            let present = self.present.iter().filter(move |(_, p)| !p.left && silence(p) >= limit_ms);
            present.map(|(rank, _)| *rank).collect::<Vec<_>>()
        };
        let (dead, silent) = (late(cx.config.peer_timeout_ms), late(cx.config.suspect_ms));
        if silent != self.watch.silent {
            self.watch.silent.clone_from(&silent);
            self.to_coordinator(cx, Seq(0), Control::SuspectRanks { ranks: silent });
        }
        for rank in dead {
            let silence = wording::seconds(cx.config.peer_timeout_ms);
            let reason = format!("{rank} has been silent for {silence}: its process is stopped or overloaded");
            let record = Some(Arc::new(self.record(cx, rank, cx.now)));
            let failure = Failure::new(Cause::RankLost, reason).with_rank(rank).with_sidecar(cx.me());
            let failure = failure.with_record(record);
            cx.act(Action::EndSession { rank, failure: failure.clone() });
            self.leave(cx, rank, failure);
        }
    }

    /// Notifies the local sessions of silent peers when the list has changed.
    fn notice(&mut self, cx: &mut Context) {
        let mut suspects = self.watch.from_coordinator.clone();
        let late = silence_upstream(cx).filter(|(_, silent_ms)| *silent_ms >= cx.config.suspect_ms);
        if let Some((sidecar, _)) = late.filter(|(sidecar, _)| !suspects.sidecars.contains(sidecar)) {
            suspects.sidecars.push(sidecar);
        }
        if suspects == self.watch.notified {
            return;
        }
        let text = describe(cx, &suspects);
        self.watch.notified = suspects.clone();
        let Suspects { sidecars, ranks } = suspects;
        cx.act(Action::Notice { sidecars, ranks, text });
    }
}

/// The sidecar on the path to the coordinator that has been silent for longest, and for how long.
fn silence_upstream(cx: &Context) -> Option<(SidecarIndex, u64)> {
    cx.relay.silent_above(cx.relay.parent().map_or(0, |parent| cx.silent_ms(parent)))
}

fn describe(cx: &Context, suspects: &Suspects) -> String {
    let mut late: Vec<String> =
        suspects.sidecars.iter().map(|sidecar| wording::sidecar(&cx.config.world, *sidecar)).collect();
    if !suspects.ranks.is_empty() {
        late.push(wording::ranks(&suspects.ranks));
    }
    if late.is_empty() {
        return "All sidecars and ranks respond again.".to_owned();
    }
    let (for_now, until) = (wording::seconds(cx.config.suspect_ms), wording::seconds(cx.config.peer_timeout_ms));
    format!("Silent for more than {for_now}: {}. Operations wait; they fail after {until}.", late.join(", "))
}
