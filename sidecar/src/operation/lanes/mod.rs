//! Lanes execute operations: on data threads with links to other sidecars ([`network`]), on data threads without ([`local`]),
//! or on the control thread itself ([`inline`]). What they have in common is [`core::LaneCore`]. This file has the control
//! thread's end of a lane.

mod core;
pub(crate) mod inline;
pub(crate) mod local;
pub(crate) mod network;

use std::sync::Arc;
use std::thread::JoinHandle;

use ronde_engine::{Admission, ExecutorStats};
use ronde_transport::{Identity, PathStats, PortStats};
use ronde_wire::{Epoch, Lane, Seq, SidecarIndex};
use tokio::sync::{mpsc, oneshot};

use crate::operation::memory::OperationMemory;
use crate::plugins::Plugins;
use crate::timeline::LaneTrace;

/// A command of the control thread to a lane. A lane handles its commands in order.
pub(crate) enum LaneCommand {
    /// About epochs and operations.
    Execute(ExecuteCommand),
    /// Use this certificate for links made from now on.
    Identity(Arc<Identity>),
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

/// A command that every lane executes alike, with links or without.
pub(crate) enum ExecuteCommand {
    /// An epoch begins.
    Epoch(Epoch),
    /// An epoch is over; the answer is [`LaneReport::Released`].
    EpochEnd(Epoch),
    /// Perform this.
    Admit(Arc<Admission>, Arc<OperationMemory>),
    /// Drop these operations, and what still comes of any up to a last one; the answer is [`LaneReport::Dropped`].
    Cancel(Epoch, Seq, Arc<[Seq]>),
    /// Report what the time of operations is spent on, or no longer.
    Trace(bool),
}

/// A report of a lane to the control thread.
pub(crate) enum LaneReport {
    /// The lane's part of an operation is complete; what it spent its time on, if that is wanted.
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
    /// No memory of the epoch is touched any more.
    Released(Epoch),
    /// The link to a peer is gone.
    LinkDown {
        peer: SidecarIndex,
        /// Whether the peer closed it.
        closed: bool,
        reason: String,
    },
    /// The lane's thread has ended, by itself or by a panic.
    Ended(Lane),
}

/// Tells the control thread that a lane's thread is over, however it ends.
pub(crate) struct EndReport {
    lane: Lane,
    reports: mpsc::Sender<LaneReport>,
}

impl EndReport {
    /// To be held until the thread ends.
    pub(crate) fn new(lane: Lane, reports: mpsc::Sender<LaneReport>) -> Self {
        Self { lane, reports }
    }
}

impl Drop for EndReport {
    fn drop(&mut self) {
        // When the queue is full or closed, the control thread finds out by its next command, or is gone itself.
        let _ = self.reports.try_send(LaneReport::Ended(self.lane));
    }
}

/// Counters of a lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct LaneStats {
    /// Of its port.
    pub(crate) port: PortStats,
    /// Of its executor.
    pub(crate) executor: ExecutorStats,
    /// The ways to the peers whose link is up.
    pub(crate) paths: Vec<(SidecarIndex, PathStats)>,
}

/// The control thread's end of a lane.
pub(crate) struct LaneHandle {
    commands: mpsc::Sender<LaneCommand>,
    thread: Option<JoinHandle<()>>,
}

impl LaneHandle {
    /// Starts the thread of a lane, which takes its commands from the receiver.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start(
        lane: Lane,
        body: impl FnOnce(mpsc::Receiver<LaneCommand>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let builder = std::thread::Builder::new().name(format!("ronde-lane-{}", lane.0));
        let thread = builder.spawn(move || body(receiver))?;
        Ok(Self { commands, thread: Some(thread) })
    }

    /// Queues a command. False when the lane's thread has ended or does not keep up, which ends the job.
    pub(crate) fn send(&self, command: LaneCommand) -> bool {
        self.commands.try_send(command).is_ok()
    }

    /// Asks for the lane's counters; the answer does not come when its thread has ended.
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

/// What a lane is made with.
#[derive(Clone)]
pub(crate) struct LaneConfig {
    /// This sidecar.
    pub(crate) me: SidecarIndex,
    /// Which lane.
    pub(crate) lane: Lane,
    /// Bytes granted to each peer for operations not yet admitted here.
    pub(crate) early_grant_bytes: u64,
    /// What its operations may call.
    pub(crate) plugins: Arc<Plugins>,
}

/// Commands are at most one for each admitted operation and those are bounded by pending requests; a lane that is this far
/// behind has stopped.
const COMMANDS_MAX: usize = 65_536;
