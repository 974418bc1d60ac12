//! Two-phase commit of operations with a plugin, the member's side: it reports, holds the results, and waits for the
//! decision.

use ronde_wire::{Cause, Control, Epoch, Failure, Seq};

use super::{Participant, Running};
use crate::engine::shared::context::Context;
use crate::engine::shared::{NAMES_MAX, RequestKey};
use crate::event::Action;
use crate::trace::Trace;

impl Participant {
    /// Whether an operation that is performed here has yet to be committed. Reports it to the coordinator, once.
    pub(super) fn await_commit(&mut self, cx: &mut Context, seq: Seq) -> bool {
        let Some(running) = self.admitted.get_mut(&seq).filter(|running| running.admission.plugin.is_some()) else {
            return false;
        };
        if !running.reported {
            (running.reported, running.held) = (true, true);
            self.to_coordinator(cx, seq, Control::Performed { failure: None });
        }
        true
    }

    /// A plugin failed in an operation here. The operation fails everywhere; the epoch continues.
    pub(crate) fn plugin_failed(&mut self, cx: &mut Context, epoch: Epoch, seq: Seq, reason: &str) {
        let current = epoch == self.epoch && !self.is_idle();
        let running = self.admitted.get_mut(&seq).filter(|running| current && !running.reported);
        let Some(running) = running.filter(|running| running.admission.plugin.is_some()) else {
            cx.stats.stale_frames += 1;
            return;
        };
        running.reported = true;
        let names: Vec<&str> = running.admission.tensors.iter().take(NAMES_MAX).map(|t| t.name.as_str()).collect();
        let (set, me) = (running.admission.topology.set, cx.me());
        let reason = format!("tensor {} of {set}: on {me} {reason}", names.join(", "));
        let mut failure = Failure::new(Cause::Refused, reason).with_sidecar(me);
        failure.tensor = running.admission.tensors.first().map(|tensor| tensor.name.clone());
        self.to_coordinator(cx, seq, Control::Performed { failure: Some(failure) });
    }

    /// Handles the decision: all members have performed an operation, or one of them could not.
    pub(crate) fn commit(&mut self, cx: &mut Context, seq: Seq, failure: Option<Failure>) {
        let is_due = |running: &Running| {
            // It is never committed before this sidecar has performed it.
            running.admission.plugin.is_some() && (running.held || failure.is_some())
        };
        if !self.admitted.get(&seq).is_some_and(is_due) {
            cx.stats.stale_frames += 1;
            return;
        }
        let Some(running) = self.admitted.remove(&seq) else { return };
        let Some(failure) = failure else {
            cx.act(Action::Commit { epoch: self.epoch, seq });
            self.performed(cx, running);
            return;
        };
        let failure = failure.within_limits();
        cx.traces.note(|| Trace::Over { seq, dropped: true });
        cx.stats.cancelled_operations += 1;
        cx.act(Action::Cancel { epoch: self.epoch, last: seq, dropped: vec![seq] });
        for tensor in &running.admission.tensors {
            for answered in &tensor.requests {
                let key = RequestKey { rank: answered.rank, request: answered.request };
                if self.requests.remove(key) {
                    let failure = Failure { tensor: Some(tensor.name.clone()), ..failure.clone() };
                    self.complete(cx, key, Err(failure));
                }
            }
        }
        self.conclude(cx);
    }
}
