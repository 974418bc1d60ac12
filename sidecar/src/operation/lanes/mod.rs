//! Data threads: each owns one lane, its socket, its executor, and does the reducing and sealing of what travels there.

pub(crate) mod inline;
pub(crate) mod local;

use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context;
use ronde_engine::{Admission, Executor, ExecutorAction, ExecutorConfig, ExecutorStats};
use ronde_transport::{
    DownReason, Identity, NetworkPort, Outgoing, PathStats, Port, PortEvent, PortStats, Role, next_event,
};
use ronde_wire::frame::Chunk;
use ronde_wire::{Epoch, FrameKind, Lane, Seq, SidecarIndex};
use tokio::sync::{mpsc, oneshot};

use crate::operation::memory::{LaneMemory, OperationMemory};
use crate::plugins::{LanePlugins, Plugins};
use crate::timeline::{LaneTrace, Tracer};

/// What the control thread tells a lane, in order.
pub(crate) enum LaneCommand {
    /// An epoch begins.
    Epoch(Epoch),
    /// An epoch is over; the lane answers [`LaneReport::Released`].
    EpochEnd(Epoch),
    /// Perform this.
    Admit(Arc<Admission>, Arc<OperationMemory>),
    /// Drop these operations, and what still comes of any up to a last one; the lane answers [`LaneReport::Dropped`].
    Cancel(Epoch, Seq, Arc<[Seq]>),
    /// Take a fresh certificate for links made from now on.
    Identity(Arc<Identity>),
    /// Tell what the time of operations is spent on, or no longer.
    Trace(bool),
    /// Report counters.
    Stats(oneshot::Sender<LaneStats>),
    /// Close all links and end the thread.
    Stop(String),
}

/// What a lane tells the control thread.
pub(crate) enum LaneReport {
    /// The lane's part of an operation is complete; what it spent its time on, if that is wanted.
    Done(Epoch, Seq, Option<(Lane, LaneTrace)>),
    /// The lane has dropped what it was told to, up to this operation.
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

/// Starts a lane's thread. `make_port` runs on it, inside its runtime, so that sealing happens there.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(
    config: LaneConfig,
    make_port: impl FnOnce() -> anyhow::Result<NetworkPort> + Send + 'static,
    reports: mpsc::Sender<LaneReport>,
) -> anyhow::Result<LaneHandle> {
    let lane = config.lane;
    let body = move |receiver| {
        let _end = EndReport::new(lane, reports.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = runtime.context("cannot start the lane's runtime").and_then(|runtime| {
            runtime.block_on(async move {
                let port = make_port()?;
                LaneThread::new(&config, port, reports).run(receiver).await;
                Ok(())
            })
        });
        if let Err(error) = result {
            tracing::error!("a lane has ended: {error:#}");
        }
    };
    LaneHandle::start(lane, body).context("cannot start a lane's thread")
}

/// Everything a lane owns.
struct LaneThread {
    me: SidecarIndex,
    lane: Lane,
    port: NetworkPort,
    executor: Executor,
    memory: LaneMemory,
    tracer: Tracer,
    reports: mpsc::Sender<LaneReport>,
}

/// What ends one turn of the loop.
enum Turn {
    Command(Option<LaneCommand>),
    Port(PortEvent),
    Work,
}

impl LaneThread {
    fn new(config: &LaneConfig, port: NetworkPort, reports: mpsc::Sender<LaneReport>) -> Self {
        let executor = Executor::new(ExecutorConfig {
            me: config.me,
            lane: config.lane,
            early_grant_bytes: config.early_grant_bytes,
        });
        let (me, lane) = (config.me, config.lane);
        let memory = LaneMemory::new(Some(LanePlugins::new(Arc::clone(&config.plugins))));
        Self { me, lane, port, executor, memory, tracer: Tracer::default(), reports }
    }

    /// Commands first, then what arrives, then one step of work: so new operations and chunks never wait for a long one,
    /// and the connections' own tasks run between any two steps.
    async fn run(mut self, mut commands: mpsc::Receiver<LaneCommand>) {
        let mut busy = false;
        loop {
            let turn = tokio::select! {
                biased;
                command = commands.recv() => Turn::Command(command),
                event = next_event(&mut self.port) => Turn::Port(event),
                () = tokio::task::yield_now(), if busy => Turn::Work,
            };
            match turn {
                Turn::Command(None) => return,
                Turn::Command(Some(LaneCommand::Stop(reason))) => {
                    self.port.shutdown(&reason).await;
                    return;
                }
                Turn::Command(Some(command)) => self.handle_command(command).await,
                Turn::Port(event) => self.handle_port(event).await,
                Turn::Work => {}
            }
            busy = self.work().await;
        }
    }

    async fn handle_command(&mut self, command: LaneCommand) {
        match command {
            LaneCommand::Epoch(epoch) => self.executor.handle_epoch(epoch),
            LaneCommand::EpochEnd(epoch) => {
                self.executor.handle_epoch_end(epoch);
                self.memory.clear();
                self.tracer.forget(None);
                self.report(LaneReport::Released(epoch)).await;
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
                self.report(LaneReport::Dropped(epoch, last)).await;
            }
            LaneCommand::Identity(identity) => {
                if let Err(error) = self.port.install_identity(identity) {
                    tracing::warn!(%error, "a lane keeps its certificate");
                }
            }
            LaneCommand::Trace(wanted) => self.tracer.set(wanted),
            LaneCommand::Stats(reply) => {
                let stats =
                    LaneStats { port: self.port.stats(), executor: *self.executor.stats(), paths: self.port.paths() };
                // The asker may have given up; nobody else waits for this.
                let _ = reply.send(stats);
            }
            LaneCommand::Stop(_) => {}
        }
    }

    async fn handle_port(&mut self, event: PortEvent) {
        match event {
            PortEvent::Up { peer, hello } => {
                self.executor.handle_link_up(peer, hello.early_credit_bytes);
            }
            PortEvent::Sent { peer, chunks } => self.executor.handle_sent(peer, chunks),
            PortEvent::Frame { from, frame } if frame.header.kind == FrameKind::Admitted => {
                self.executor.handle_admitted(from, frame.header.epoch, frame.header.seq);
            }
            PortEvent::Frame { from, frame } => {
                let taken = match Chunk::from_frame(frame) {
                    Ok(chunk) => {
                        self.tracer.received(chunk.seq, chunk.data.len());
                        self.executor.handle_chunk(from, chunk).map_err(|violation| violation.to_string())
                    }
                    Err(error) => Err(error.to_string()),
                };
                if let Err(violation) = taken {
                    self.disconnect(from, &violation).await;
                }
            }
            PortEvent::Down { peer, reason } => {
                let closed = matches!(reason, DownReason::ClosedByPeer(_));
                self.link_down(peer, closed, reason.to_string()).await;
            }
        }
    }

    async fn disconnect(&mut self, peer: SidecarIndex, violation: &str) {
        self.port.close(peer, violation);
        self.link_down(peer, false, format!("protocol violation: {violation}")).await;
    }

    async fn link_down(&mut self, peer: SidecarIndex, closed: bool, reason: String) {
        self.executor.handle_link_down(peer);
        self.report(LaneReport::LinkDown { peer, closed, reason }).await;
    }

    /// Performs actions until one chunk's work is done; true when there may be more.
    async fn work(&mut self) -> bool {
        let begin = self.tracer.now();
        let Some(action) = self.executor.poll_action(&mut self.memory) else { return false };
        self.tracer.polled(begin, &action);
        match action {
            ExecutorAction::Open { peer } => {
                let role = if self.me < peer { Role::Dial } else { Role::Await };
                self.port.open(peer, role);
            }
            ExecutorAction::Send { to, chunk } => self.send(to, Outgoing::Chunk(chunk)).await,
            ExecutorAction::Admitted { to, epoch, seq } => {
                self.send(to, Outgoing::Frame(ronde_wire::Frame::admitted(epoch, seq))).await;
            }
            ExecutorAction::Done { epoch, seq } => {
                self.memory.remove(seq);
                let trace = self.tracer.take(seq).map(|trace| (self.lane, trace));
                self.report(LaneReport::Done(epoch, seq, trace)).await;
            }
            ExecutorAction::Failed { epoch, seq, reason, plugin } => {
                self.memory.remove(seq);
                self.report(LaneReport::Failed { epoch, seq, reason, plugin }).await;
            }
            ExecutorAction::Disconnect { peer, violation } => self.disconnect(peer, &violation.to_string()).await,
            ExecutorAction::Worked { .. } => {}
        }
        true
    }

    async fn send(&mut self, to: SidecarIndex, message: Outgoing) {
        if let Err(error) = self.port.send(to, message) {
            // Closed as well, so that the next operation with this peer gets a fresh link.
            self.port.close(to, &error.to_string());
            self.link_down(to, false, error.to_string()).await;
        }
    }

    async fn report(&mut self, report: LaneReport) {
        // When the control thread is gone the process is ending; there is nobody to tell.
        let _ = self.reports.send(report).await;
    }
}

/// Commands are at most one for each admitted operation and those are bounded by pending requests; a lane that is this far
/// behind has stopped.
const COMMANDS_MAX: usize = 65_536;
