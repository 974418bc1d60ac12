//! Small operations that need no other sidecar while they are performed: the control thread performs them at once, as
//! handing one to a data thread and back takes longer than the operation itself.

use std::sync::Arc;

use ronde_engine::{Admission, Executor, ExecutorAction, ExecutorConfig, ExecutorStats};
use ronde_wire::{Epoch, Lane, Seq, SidecarIndex};

use crate::operation::memory::{LaneMemory, OperationMemory};
use crate::timeline::{LaneTrace, Tracer};

/// The control thread's own executor. It has no links.
pub(crate) struct InlineExecutor {
    executor: Executor,
    memory: LaneMemory,
    tracer: Tracer,
}

impl InlineExecutor {
    /// An executor before the first epoch.
    pub(crate) fn new(me: SidecarIndex) -> Self {
        // Plans without transfers name lane 0 when they are cut for one lane, which small ones are.
        let config = ExecutorConfig { me, lane: Lane(0), early_grant_bytes: 0 };
        Self { executor: Executor::new(config), memory: LaneMemory::new(None), tracer: Tracer::default() }
    }

    /// Whether an operation is performed here.
    pub(crate) fn takes(admission: &Admission) -> bool {
        let each = if admission.arithmetic.op.is_some() { admission.local_ranks.len() as u64 } else { 1 };
        let element_bytes = admission.arithmetic.dtype.size_bytes() as u64;
        let bytes = admission.plan.layout.elements.saturating_mul(element_bytes).saturating_mul(each);
        let on_lane_0 = admission.plan.lanes() == 1;
        // A plugin's call takes as long as its limit allows.
        let native = admission.plugin.is_none();
        admission.topology.len() == 1 && on_lane_0 && native && bytes <= BYTES_MAX
    }

    /// An epoch begins.
    pub(crate) fn begin_epoch(&mut self, epoch: Epoch) {
        self.executor.handle_epoch(epoch);
    }

    /// An epoch is over. Nothing of it is under way here.
    pub(crate) fn end_epoch(&mut self, epoch: Epoch) {
        self.executor.handle_epoch_end(epoch);
        self.tracer.forget(None);
    }

    /// Performs an operation that [`Self::takes`] allows.
    ///
    /// # Errors
    /// Why it cannot be performed, in words.
    pub(crate) fn perform(&mut self, admission: &Arc<Admission>, memory: Arc<OperationMemory>) -> Result<(), String> {
        let seq = admission.seq;
        self.memory.insert(seq, memory);
        self.executor.handle_admission(Arc::clone(admission));
        let result = self.finish();
        self.memory.remove(seq);
        result
    }

    /// Whether [`Self::take_trace`] is asked from now on.
    pub(crate) fn set_tracing(&mut self, wanted: bool) {
        self.tracer.set(wanted);
    }

    /// What an operation that was performed spent its time on, if that is wanted.
    pub(crate) fn take_trace(&mut self, seq: Seq) -> Option<LaneTrace> {
        self.tracer.take(seq)
    }

    /// Counters.
    pub(crate) fn stats(&self) -> ExecutorStats {
        *self.executor.stats()
    }

    /// Ends: every step of a plan is done once, and none of them waits.
    fn finish(&mut self) -> Result<(), String> {
        loop {
            let begin = self.tracer.now();
            let Some(action) = self.executor.poll_action(&mut self.memory) else { break };
            self.tracer.polled(begin, &action);
            match action {
                ExecutorAction::Worked { .. } => {}
                ExecutorAction::Done { .. } => return Ok(()),
                ExecutorAction::Failed { reason, .. } => return Err(reason),
                other => return Err(format!("a local plan wants {other:?}; this is a bug in ronde")),
            }
        }
        Err("a local plan stands still; this is a bug in ronde".to_owned())
    }
}

/// Bytes that the control thread reads for one operation: what it may copy without being late for others.
const BYTES_MAX: u64 = 64 << 10;
