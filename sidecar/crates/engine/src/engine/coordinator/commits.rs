//! Two-phase commit of operations with a plugin, the coordinator's side.
//!
//! A plugin can fail on one sidecar alone. No rank gets a result before all members have reported success and the
//! coordinator has sent them its decision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_wire::{Cause, Control, Failure, OpId, PluginUse, Seq, SetId, SidecarIndex, SidecarSet, TensorName, limits};

use super::Violation;
use super::fusion::ReadyTensor;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::{NAMES_MAX, wording};
use crate::event::Time;

/// The operations that are not committed yet.
#[derive(Debug, Default)]
pub(crate) struct PendingCommits {
    open: BTreeMap<Seq, Open>,
}

/// An operation that is not committed yet.
#[derive(Debug)]
struct Open {
    since: Time,
    operation: PluginOperation,
}

/// An operation with a plugin.
#[derive(Debug)]
pub(crate) struct PluginOperation {
    seq: Seq,
    plugin: Arc<PluginUse>,
    set: SetId,
    members: SidecarSet,
    /// The members that have not reported yet.
    awaited: BTreeSet<SidecarIndex>,
    /// The first tensors of it.
    names: Vec<TensorName>,
}

impl PluginOperation {
    /// The operation of a bucket, if it has a plugin.
    pub(crate) fn of(seq: Seq, view: &SetView, bucket: &[ReadyTensor]) -> Option<Self> {
        let plugin = bucket.first()?.plugin.clone()?;
        let names = bucket.iter().take(NAMES_MAX).map(|ready| ready.tensor.name.clone()).collect();
        let (set, members) = (view.topology.set, view.sidecars);
        let awaited = view.topology.members.iter().map(|member| member.sidecar).collect();
        Some(Self { seq, plugin, set, members, awaited, names })
    }
}

impl PendingCommits {
    /// An operation is ordered.
    pub(crate) fn begin(&mut self, now: Time, operation: PluginOperation) {
        self.open.insert(operation.seq, Open { since: now, operation });
    }

    /// Descriptions of the operations that wait for so long, with plugin and members, the oldest first.
    pub(crate) fn overdue(&self, cx: &Context, age_ms: u64) -> Vec<String> {
        let old = self.open.values().filter(|open| cx.now.ms_since(open.since) >= age_ms);
        old.take(limits::REPORT_NAMES_MAX).map(|open| open.words(cx)).collect()
    }

    /// Whether an operation waits for the report of this sidecar.
    pub(crate) fn awaits(&self, sidecar: SidecarIndex) -> bool {
        self.open.values().any(|open| open.operation.awaited.contains(&sidecar))
    }

    pub(crate) fn clear(&mut self) {
        self.open.clear();
    }

    /// Handles the report of a member. True when it decides the operation.
    ///
    /// # Errors
    /// When no report of the sender is awaited.
    pub(crate) fn performed(
        &mut self,
        cx: &mut Context,
        OpId { epoch, seq }: OpId,
        from: SidecarIndex,
        failure: Option<Failure>,
    ) -> Result<bool, Violation> {
        let Some(Open { operation: PluginOperation { members, awaited, .. }, .. }) = self.open.get_mut(&seq) else {
            // It failed elsewhere, and this report was sent before the sender received the decision.
            cx.stats.stale_frames += 1;
            return Ok(false);
        };
        if !awaited.remove(&from) {
            return Err(format!("reports {seq} as performed, which it must not report"));
        }
        if failure.is_none() && !awaited.is_empty() {
            return Ok(false);
        }
        let failure = failure.map(|failure| {
            let failure = failure.within_limits();
            Failure { cause: Cause::Refused, ..failure }.with_sidecar(from)
        });
        cx.send_down(&members.clone(), epoch, seq, Control::Commit { failure });
        self.open.remove(&seq);
        Ok(true)
    }
}

impl Open {
    fn words(&self, cx: &Context) -> String {
        let PluginOperation { plugin, set, names, awaited, .. } = &self.operation;
        let names: Vec<&str> = names.iter().map(TensorName::as_str).collect();
        let world = &cx.config.world;
        let awaited: Vec<String> =
            awaited.iter().take(limits::REPORT_RANKS_MAX).map(|member| wording::sidecar(world, *member)).collect();
        let age = wording::seconds(cx.now.ms_since(self.since));
        format!(
            "Tensor {} of {set} has waited for plugin {plugin} for {age}; not done: {}.",
            names.join(", "),
            awaited.join(", ")
        )
    }
}
