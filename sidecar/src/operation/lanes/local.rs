//! Data threads without a port: they take part in operations that need no other sidecar, so that a host reduces with more
//! cores than it has lanes to others.

use anyhow::Context;
use ronde_engine::{Executor, ExecutorAction, ExecutorConfig};
use ronde_wire::Lane;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use crate::operation::lanes::{EndReport, LaneCommand, LaneConfig, LaneHandle, LaneReport, LaneStats};
use crate::operation::memory::LaneMemory;
use crate::plugins::LanePlugins;
use crate::timeline::Tracer;

/// Starts the thread of a lane that has no links.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(config: LaneConfig, reports: mpsc::Sender<LaneReport>) -> anyhow::Result<LaneHandle> {
    let lane = config.lane;
    LaneHandle::start(lane, move |commands| {
        let _end = EndReport::new(lane, reports.clone());
        let (me, early_grant_bytes) = (config.me, config.early_grant_bytes);
        let executor = Executor::new(ExecutorConfig { me, lane, early_grant_bytes });
        let (memory, tracer) = (LaneMemory::new(Some(LanePlugins::new(config.plugins))), Tracer::default());
        LocalLane { lane, executor, memory, tracer, reports }.run(commands);
    })
    .context("cannot start a thread for local operations")
}

/// Everything that the thread owns.
struct LocalLane {
    lane: Lane,
    executor: Executor,
    memory: LaneMemory,
    tracer: Tracer,
    reports: mpsc::Sender<LaneReport>,
}

impl LocalLane {
    /// Commands first, then one step of work.
    fn run(mut self, mut commands: mpsc::Receiver<LaneCommand>) {
        let mut busy = false;
        loop {
            let command =
                if busy { commands.try_recv() } else { commands.blocking_recv().ok_or(TryRecvError::Disconnected) };
            match command {
                Ok(LaneCommand::Stop(_)) | Err(TryRecvError::Disconnected) => return,
                Ok(command) => self.handle_command(command),
                Err(TryRecvError::Empty) => {}
            }
            busy = self.work();
        }
    }

    fn handle_command(&mut self, command: LaneCommand) {
        match command {
            LaneCommand::Epoch(epoch) => self.executor.handle_epoch(epoch),
            LaneCommand::EpochEnd(epoch) => {
                self.executor.handle_epoch_end(epoch);
                self.memory.clear();
                self.tracer.forget(None);
                self.report(LaneReport::Released(epoch));
            }
            LaneCommand::Admit(admission, memory) => {
                self.memory.insert(admission.seq, memory);
                self.executor.handle_admission(admission);
            }
            LaneCommand::Cancel(epoch, last, dropped) => {
                for seq in self.executor.handle_cancel(epoch, last, &dropped) {
                    self.memory.remove(seq);
                }
                self.tracer.forget(Some(last));
                self.report(LaneReport::Dropped(epoch, last));
            }
            LaneCommand::Trace(wanted) => self.tracer.set(wanted),
            LaneCommand::Stats(reply) => {
                let stats = LaneStats { executor: *self.executor.stats(), ..LaneStats::default() };
                // The asker may have given up; nobody else waits for this.
                let _ = reply.send(stats);
            }
            // It has no links.
            LaneCommand::Identity(_) | LaneCommand::Stop(_) => {}
        }
    }

    /// One chunk's work; true when there may be more.
    fn work(&mut self) -> bool {
        let begin = self.tracer.now();
        let Some(action) = self.executor.poll_action(&mut self.memory) else { return false };
        self.tracer.polled(begin, &action);
        match action {
            ExecutorAction::Worked { .. } => {}
            ExecutorAction::Done { epoch, seq } => {
                self.memory.remove(seq);
                let trace = self.tracer.take(seq).map(|trace| (self.lane, trace));
                self.report(LaneReport::Done(epoch, seq, trace));
            }
            ExecutorAction::Failed { epoch, seq, reason, plugin } => {
                self.memory.remove(seq);
                self.report(LaneReport::Failed { epoch, seq, reason, plugin });
            }
            other => {
                tracing::error!(lane = self.lane.0, ?other, "a lane without links is to send; this is a bug in ronde");
            }
        }
        true
    }

    fn report(&self, report: LaneReport) {
        // When the control thread is gone the process is ending; there is nobody to tell.
        let _ = self.reports.blocking_send(report);
    }
}
