//! Inline execution: the control thread itself performs small operations that need no other sidecar, because passing
//! one to a data thread and back takes longer than the operation.

use std::sync::Arc;

use ronde_engine::{Admission, ExecutorStats};
use ronde_wire::{Lane, SidecarIndex};

use super::core::{LaneCore, Step};
use super::{ExecuteCommand, LaneReport};
use crate::operation::memory::OperationMemory;
use crate::timeline::LaneTrace;

/// The control thread's own lane. It has no links.
pub(crate) struct InlineExecutor {
    core: LaneCore,
}

impl InlineExecutor {
    /// Creates an executor before the first epoch.
    pub(crate) fn new(me: SidecarIndex) -> Self {
        // Small operations have plans without transfers for one lane; these name lane 0.
        Self { core: LaneCore::native(me, Lane(0)) }
    }

    /// Returns whether an operation is executed inline.
    pub(crate) fn takes(admission: &Admission) -> bool {
        let each = if admission.arithmetic.op.is_some() { admission.local_ranks.len() as u64 } else { 1 };
        let element_bytes = admission.arithmetic.dtype.size_bytes() as u64;
        let bytes = admission.plan.layout.elements.saturating_mul(element_bytes).saturating_mul(each);
        let on_lane_0 = admission.plan.lanes() == 1;
        // A call of a plugin may take as long as its limit allows.
        let native = admission.plugin.is_none();
        admission.topology.len() == 1 && on_lane_0 && native && bytes <= BYTES_MAX
    }

    /// Executes a command other than the admission of an operation. No operation is pending between calls, so no report
    /// is needed.
    pub(crate) fn handle(&mut self, command: ExecuteCommand) {
        self.core.handle(command);
    }

    /// Performs an operation that [`Self::takes`] allows; returns its trace, if tracing is on.
    ///
    /// # Errors
    /// When it cannot be performed; the text is the reason.
    pub(crate) fn perform(
        &mut self,
        admission: &Arc<Admission>,
        memory: Arc<OperationMemory>,
    ) -> Result<Option<LaneTrace>, String> {
        self.core.handle(ExecuteCommand::Admit(Arc::clone(admission), memory));
        // This loop ends: every step of a plan is done once, and none of them waits.
        loop {
            match self.core.step() {
                Step::Worked => {}
                Step::Report(LaneReport::Done(_, _, trace)) => return Ok(trace.map(|(_, trace)| trace)),
                Step::Report(LaneReport::Failed { reason, .. }) => return Err(reason),
                Step::Link(action) => return Err(format!("a local plan wants {action:?}; this is a bug in ronde")),
                Step::Idle | Step::Report(_) => {
                    return Err("a local plan makes no progress; this is a bug in ronde".to_owned());
                }
            }
        }
    }

    /// Returns the counters.
    pub(crate) fn stats(&self) -> ExecutorStats {
        self.core.stats().executor
    }
}

/// The most bytes that the control thread reads for one operation; more would delay others.
const BYTES_MAX: u64 = 64 << 10;
