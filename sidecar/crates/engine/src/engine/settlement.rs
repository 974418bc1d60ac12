//! Operations that a plugin takes part in. A plugin may fail on one sidecar alone, so nobody gets a result before the coordinator
//! has heard from all members that they have theirs, and said so to all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_wire::{Cause, Control, Epoch, Failure, PluginUse, Seq, SetId, SidecarIndex, SidecarSet, TensorName, limits};

use super::context::Context;
use super::coordinator::Violation;
use super::fusion::ReadyTensor;
use super::participant::Participant;
use super::sets::SetView;
use super::wording;
use crate::event::{Action, Time};
use crate::trace::Trace;

/// What the coordinator waits for.
#[derive(Debug, Default)]
pub(crate) struct Settlements {
    open: BTreeMap<Seq, Open>,
}

/// An operation that is not settled.
#[derive(Debug)]
struct Open {
    since: Time,
    plugged: Plugged,
}

/// An operation with a plugin.
#[derive(Debug)]
pub(crate) struct Plugged {
    seq: Seq,
    plugin: Arc<PluginUse>,
    set: SetId,
    members: SidecarSet,
    /// Those of them that have yet to report.
    awaited: BTreeSet<SidecarIndex>,
    /// The first ones of its tensors.
    names: Vec<TensorName>,
}

impl Plugged {
    /// What is to be settled of a bucket, if a plugin takes part.
    pub(crate) fn of(seq: Seq, view: &SetView, bucket: &[ReadyTensor]) -> Option<Self> {
        let plugin = bucket.first()?.plugin.clone()?;
        let names = bucket.iter().take(NAMES_MAX).map(|ready| ready.tensor.name.clone()).collect();
        let (set, members) = (view.topology.set, view.sidecars);
        let awaited = view.topology.members.iter().map(|member| member.sidecar).collect();
        Some(Self { seq, plugin, set, members, awaited, names })
    }
}

impl Settlements {
    /// An operation is ordered.
    pub(crate) fn begin(&mut self, now: Time, plugged: Plugged) {
        self.open.insert(plugged.seq, Open { since: now, plugged });
    }

    /// What has not been settled for so long, in words that name plugin and members, the oldest first.
    pub(crate) fn overdue(&self, cx: &Context, age_ms: u64) -> Vec<String> {
        let old = self.open.values().filter(|open| cx.now.ms_since(open.since) >= age_ms);
        old.take(limits::REPORT_NAMES_MAX).map(|open| open.words(cx)).collect()
    }

    pub(crate) fn clear(&mut self) {
        self.open.clear();
    }

    /// A member has performed an operation, or could not. True when that settles it.
    ///
    /// # Errors
    /// When the sender has nothing to report.
    pub(crate) fn performed(
        &mut self,
        cx: &mut Context,
        (epoch, seq): (Epoch, Seq),
        from: SidecarIndex,
        failure: Option<Failure>,
    ) -> Result<bool, Violation> {
        let Some(Open { plugged: Plugged { members, awaited, .. }, .. }) = self.open.get_mut(&seq) else {
            // It failed elsewhere, and this was said before the sender heard of that.
            cx.stats.stale_frames += 1;
            return Ok(false);
        };
        if !awaited.remove(&from) {
            return Err(format!("reports {seq} as performed, which it does not have to report"));
        }
        if failure.is_none() && !awaited.is_empty() {
            return Ok(false);
        }
        let failure = failure.map(|failure| {
            let failure = failure.within_limits();
            Failure { cause: Cause::Refused, ..failure }.with_sidecar(from)
        });
        cx.send_down(&members.clone(), epoch, seq, Control::Settle { failure });
        self.open.remove(&seq);
        Ok(true)
    }
}

impl Open {
    fn words(&self, cx: &Context) -> String {
        let Plugged { plugin, set, names, awaited, .. } = &self.plugged;
        let names: Vec<&str> = names.iter().map(TensorName::as_str).collect();
        let world = &cx.config.world;
        let awaited: Vec<String> =
            awaited.iter().take(limits::REPORT_RANKS_MAX).map(|member| wording::sidecar(world, *member)).collect();
        let age = wording::seconds(cx.now.ms_since(self.since));
        format!(
            "Tensor {} of {set} has been with plugin {plugin} for {age}; not done: {}.",
            names.join(", "),
            awaited.join(", ")
        )
    }
}

impl Participant {
    /// Whether an operation that is performed here has yet to be settled. The coordinator is told, once.
    pub(super) fn await_settlement(&mut self, cx: &mut Context, seq: Seq) -> bool {
        let Some(running) = self.admitted.get_mut(&seq).filter(|running| running.admission.plugin.is_some()) else {
            return false;
        };
        if !running.reported {
            (running.reported, running.held) = (true, true);
            self.to_coordinator(cx, seq, Control::Performed { failure: None });
        }
        true
    }

    /// A plugin could not do its part of an operation here. It fails everywhere; this epoch goes on.
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

    /// All members have performed an operation, or one of them could not.
    pub(crate) fn settle(&mut self, cx: &mut Context, seq: Seq, failure: Option<Failure>) {
        let settles = |running: &super::participant::Running| {
            // Nobody says that it stands before this sidecar has performed it.
            running.admission.plugin.is_some() && (running.held || failure.is_some())
        };
        if !self.admitted.get(&seq).is_some_and(settles) {
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
                if self.requests.remove(answered.rank, answered.request) {
                    let failure = Failure { tensor: Some(tensor.name.clone()), ..failure.clone() };
                    self.complete(cx, answered.rank, answered.request, Err(failure));
                }
            }
        }
        self.conclude(cx);
    }
}

/// Tensors of a bucket that a reason names.
const NAMES_MAX: usize = 3;
