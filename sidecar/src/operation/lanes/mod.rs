//! Lanes execute operations: on data threads with links to other sidecars ([`network`]), on data threads without
//! ([`local`]), or on the control thread itself ([`inline`]). Their common part is [`core::LaneCore`]. This file
//! contains the control thread's handle of a lane.

mod core;
pub(crate) mod inline;
pub(crate) mod local;
pub(crate) mod network;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use ronde_engine::{Admission, ExecutorStats};
use ronde_transport::{DownReason, Identity, PathStats, PortStats};
use ronde_wire::{Epoch, Lane, Seq, SidecarIndex};
use tokio::sync::{mpsc, oneshot};

use crate::operation::memory::OperationMemory;
use crate::plugins::Plugins;
use crate::timeline::LaneTrace;

/// A command of the control thread to a lane. A lane handles its commands in order.
pub(crate) enum LaneCommand {
    /// A command about epochs and operations.
    Execute(ExecuteCommand),
    /// Use this certificate for links made from now on.
    Identity(Arc<Identity>),
    /// Enter another membership of the job; the lane answers with [`LaneReport::Entered`].
    Enter {
        /// Its number.
        membership: u64,
        /// Where its other sidecars are dialled.
        peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
    },
    /// Report counters.
    Stats(oneshot::Sender<LaneStats>),
    /// Close all links and end the thread.
    Stop(String),
}

impl From<ExecuteCommand> for LaneCommand {
    fn from(command: ExecuteCommand) -> Self {
        Self::Execute(command)
    }
}

/// A command that every lane executes, with links or without.
pub(crate) enum ExecuteCommand {
    /// An epoch begins.
    Epoch(Epoch),
    /// An epoch is over; the lane answers with [`LaneReport::Released`].
    EpochEnd(Epoch),
    /// Perform this operation.
    Admit(Arc<Admission>, Arc<OperationMemory>),
    /// Drop these operations, and the chunks of any up to a last one; the lane answers with [`LaneReport::Dropped`].
    Cancel(Epoch, Seq, Arc<[Seq]>),
    /// Switch the tracing of operations on or off.
    Trace(bool),
}

/// A report of a lane to the control thread.
pub(crate) enum LaneReport {
    /// The lane's part of an operation is complete; with its trace, if tracing is on.
    Done(Epoch, Seq, Option<(Lane, LaneTrace)>),
    /// The lane has executed [`ExecuteCommand::Cancel`] up to this operation.
    Dropped(Epoch, Seq),
    /// The lane's part of an operation cannot be performed.
    Failed {
        epoch: Epoch,
        seq: Seq,
        reason: String,
        /// Whether a plugin is at fault.
        plugin: bool,
    },
    /// The lane no longer uses memory of the epoch.
    Released(Epoch),
    /// The lane has executed [`LaneCommand::Enter`].
    Entered(u64),
    /// The link to a peer is gone.
    LinkDown { peer: SidecarIndex, reason: DownReason },
    /// The lane's thread has ended, by itself or by a panic.
    Ended(Lane),
}

/// Reports to the control thread when a lane's thread ends, for any reason.
pub(crate) struct EndReport {
    lane: Lane,
    reports: mpsc::Sender<LaneReport>,
}

impl EndReport {
    /// Creates the guard, which the thread holds until it ends.
    pub(crate) fn new(lane: Lane, reports: mpsc::Sender<LaneReport>) -> Self {
        Self { lane, reports }
    }
}

impl Drop for EndReport {
    fn drop(&mut self) {
        // When the queue is full or closed, the control thread notices at its next command, or has ended itself.
        let _ = self.reports.try_send(LaneReport::Ended(self.lane));
    }
}

/// Counters of a lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct LaneStats {
    /// Counters of its port.
    pub(crate) port: PortStats,
    /// Counters of its executor.
    pub(crate) executor: ExecutorStats,
    /// The paths to the peers whose link is up.
    pub(crate) paths: Vec<(SidecarIndex, PathStats)>,
}

/// The control thread's handle of a lane.
pub(crate) struct LaneHandle {
    commands: mpsc::Sender<LaneCommand>,
    thread: Option<JoinHandle<()>>,
}

impl LaneHandle {
    /// Starts the thread of a lane, which takes its commands from the receiver.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(crate) fn start(
        lane: Lane,
        body: impl FnOnce(mpsc::Receiver<LaneCommand>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let builder = std::thread::Builder::new().name(format!("ronde-lane-{}", lane.0));
        let thread = builder.spawn(move || body(receiver))?;
        Ok(Self { commands, thread: Some(thread) })
    }

    /// Queues a command. Returns false when the lane's thread has ended or does not keep up, which ends the job.
    pub(crate) fn send(&self, command: LaneCommand) -> bool {
        self.commands.try_send(command).is_ok()
    }

    /// Requests the lane's counters; no answer arrives when its thread has ended.
    pub(crate) fn ask_stats(&self) -> oneshot::Receiver<LaneStats> {
        let (reply, answer) = oneshot::channel();
        self.send(LaneCommand::Stats(reply));
        answer
    }

    /// Closes the lane's links and waits for its thread.
    pub(crate) async fn stop(mut self, reason: String) {
        if self.commands.send(LaneCommand::Stop(reason)).await.is_ok() {
            self.commands.closed().await;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a lane's thread panicked");
        }
    }
}

/// The configuration of a lane.
#[derive(Clone)]
pub(crate) struct LaneConfig {
    /// This sidecar.
    pub(crate) me: SidecarIndex,
    /// The number of the lane.
    pub(crate) lane: Lane,
    /// Bytes granted to each peer for operations not yet admitted here.
    pub(crate) early_grant_bytes: u64,
    /// The plugins that its operations may call.
    pub(crate) plugins: Arc<Plugins>,
}

/// The bound of a lane's command queue. There is at most one command for each admitted operation, and pending requests
/// bound those; a lane with a full queue has stopped.
const COMMANDS_MAX: usize = 65_536;
