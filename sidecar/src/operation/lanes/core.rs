//! The common part of all lanes: an executor, the memory of its operations, and the measurement of its time.

use std::sync::Arc;

use ronde_engine::{Executor, ExecutorAction, ExecutorConfig};
use ronde_wire::{Lane, SidecarIndex};

use super::{ExecuteCommand, LaneConfig, LaneReport, LaneStats};
use crate::operation::memory::LaneMemory;
use crate::plugins::LanePlugins;
use crate::timeline::Tracer;

/// The part of a lane that executes operations. It has no links; the owner sends its chunks.
pub(super) struct LaneCore {
    lane: Lane,
    pub(super) executor: Executor,
    pub(super) tracer: Tracer,
    memory: LaneMemory,
}

/// The result of one step.
pub(super) enum Step {
    /// There is nothing to do until something happens.
    Idle,
    /// Part of an operation was performed.
    Worked,
    /// An operation completed or failed.
    Report(LaneReport),
    /// The owner must act on a link to a peer.
    Link(ExecutorAction),
}

impl LaneCore {
    /// Creates a lane whose operations may call plugins.
    pub(super) fn new(config: &LaneConfig) -> Self {
        let plugins = LanePlugins::new(Arc::clone(&config.plugins));
        Self::with(config.me, config.lane, config.early_grant_bytes, Some(plugins))
    }

    /// Creates a lane without links and plugins.
    pub(super) fn native(me: SidecarIndex, lane: Lane) -> Self {
        Self::with(me, lane, 0, None)
    }

    fn with(me: SidecarIndex, lane: Lane, early_grant_bytes: u64, plugins: Option<LanePlugins>) -> Self {
        let executor = Executor::new(ExecutorConfig { me, lane, early_grant_bytes });
        Self { lane, executor, memory: LaneMemory::new(plugins), tracer: Tracer::default() }
    }

    /// Executes a command; returns the report that answers it, if there is one.
    pub(super) fn handle(&mut self, command: ExecuteCommand) -> Option<LaneReport> {
        match command {
            ExecuteCommand::Epoch(epoch) => self.executor.handle_epoch(epoch),
            ExecuteCommand::EpochEnd(epoch) => {
                self.executor.handle_epoch_end(epoch);
                self.memory.clear();
                self.tracer.forget(None);
                return Some(LaneReport::Released(epoch));
            }
            ExecuteCommand::Admit(admission, memory) => {
                self.memory.insert(admission.seq, memory);
                self.executor.handle_admission(admission);
            }
            ExecuteCommand::Cancel(epoch, last, dropped) => {
                for seq in self.executor.handle_cancel(epoch, last, &dropped) {
                    self.memory.remove(seq);
                }
                self.tracer.forget(Some(last));
                return Some(LaneReport::Dropped(epoch, last));
            }
            ExecuteCommand::Trace(wanted) => self.tracer.set(wanted),
        }
        None
    }

    /// Performs the work of at most one chunk.
    pub(super) fn step(&mut self) -> Step {
        let begin = self.tracer.now();
        let Some(action) = self.executor.poll_action(&mut self.memory) else { return Step::Idle };
        self.tracer.polled(begin, &action);
        match action {
            ExecutorAction::Worked { .. } => Step::Worked,
            ExecutorAction::Done { epoch, seq } => {
                self.memory.remove(seq);
                let trace = self.tracer.take(seq).map(|trace| (self.lane, trace));
                Step::Report(LaneReport::Done(epoch, seq, trace))
            }
            ExecutorAction::Failed { epoch, seq, reason, plugin } => {
                self.memory.remove(seq);
                Step::Report(LaneReport::Failed { epoch, seq, reason, plugin })
            }
            link => Step::Link(link),
        }
    }

    /// Returns the counters of a lane without links.
    pub(super) fn stats(&self) -> LaneStats {
        LaneStats { executor: *self.executor.stats(), ..LaneStats::default() }
    }
}
