//! Lanes without links: data threads for operations that need no other sidecar, so that a host can reduce with more
//! cores than it has lanes to peers.

use anyhow::Context;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use super::core::{LaneCore, Step};
use super::{EndReport, LaneCommand, LaneConfig, LaneHandle, LaneReport};

/// Starts the thread of a lane that has no links.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(config: LaneConfig, reports: mpsc::Sender<LaneReport>) -> anyhow::Result<LaneHandle> {
    let lane = config.lane;
    LaneHandle::start(lane, move |commands| {
        let _end = EndReport::new(lane, reports.clone());
        LocalLane { core: LaneCore::new(&config), reports }.run(commands);
    })
    .context("cannot start a thread for local operations")
}

/// Everything that the thread owns.
struct LocalLane {
    core: LaneCore,
    reports: mpsc::Sender<LaneReport>,
}

impl LocalLane {
    /// Handles commands first, then performs one step of work.
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
            LaneCommand::Execute(command) => {
                if let Some(report) = self.core.handle(command) {
                    self.report(report);
                }
            }
            LaneCommand::Stats(request) => request.answer(self.core.stats()),
            // It has no links.
            LaneCommand::Enter { membership, .. } => self.report(LaneReport::Entered(membership)),
            LaneCommand::Gpu(command) => self.report(command.misplaced()),
            // It makes no links with a certificate, and waits for no room; `run` stops.
            LaneCommand::Identity(_) | LaneCommand::Room | LaneCommand::Stop(_) => {}
        }
    }

    /// Performs the work of one chunk; returns whether there may be more.
    fn work(&mut self) -> bool {
        match self.core.step() {
            Step::Idle => return false,
            Step::Worked => {}
            Step::Report(report) => self.report(report),
            Step::Link(action) => {
                tracing::error!(?action, "a lane without links is asked to use one; this is a bug in ronde");
            }
        }
        true
    }

    fn report(&self, report: LaneReport) {
        // Without a control thread the process is ending.
        let _ = self.reports.blocking_send(report);
    }
}
