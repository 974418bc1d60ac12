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
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use ronde_engine::{Admission, ExecutorStats};
use ronde_transport::{DownReason, Identity, PathStats, PortStats};
use ronde_wire::{Epoch, Lane, Seq, SidecarIndex, limits};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::operation::device::path::DevicePath;
use crate::operation::memory::OperationMemory;
use crate::plugins::Plugins;
use crate::streams::StreamStats;
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
    /// Report counters. The lane of operations in device memory does so by itself.
    Stats(StatsRequest),
    /// For the lane of operations in device memory.
    Gpu(GpuCommand),
    /// For the same lane: room on the host is free for operations that wait for it.
    Room,
    /// Close all links and end the thread.
    Stop(String),
}

/// A command to the lane of operations in device memory.
pub(crate) enum GpuCommand {
    /// Perform this operation; or bring its contributions to the host, which the lane answers with [`LaneReport::Staged`].
    Perform(Arc<Admission>, Arc<OperationMemory>, DevicePath),
    /// The other lanes have performed an operation: bring its results to the devices.
    Deliver(Epoch, Seq),
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
    /// The contributions of an operation are on the host: the other lanes can perform it with this memory.
    Staged(Epoch, Seq, Arc<OperationMemory>),
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

impl LaneReport {
    /// The report of a lane that gets an operation which it cannot perform: a bug, which must not leave the operation waiting.
    pub(crate) fn misplaced(epoch: Epoch, seq: Seq, what: &str) -> Self {
        let reason = format!("{what} was given to a lane that cannot perform it; this is a bug in ronde");
        Self::Failed { epoch, seq, reason, plugin: false }
    }
}

impl GpuCommand {
    /// The report of a lane on the host that gets it.
    pub(crate) fn misplaced(&self) -> LaneReport {
        let (epoch, seq) = match self {
            Self::Perform(admission, ..) => (admission.epoch, admission.seq),
            Self::Deliver(epoch, seq) => (*epoch, *seq),
        };
        LaneReport::misplaced(epoch, seq, "an operation in device memory")
    }
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

/// A request for a lane's counters. Each lane has one at most, for all who wait: they wait no longer when it is dropped.
pub(crate) struct StatsRequest {
    reported: ReportedStats,
    /// Boxed: it would make every command of a lane as large.
    answer: Option<Box<LaneStats>>,
}

impl StatsRequest {
    /// Answers it. The counters are kept also when nobody waits for them any more.
    pub(crate) fn answer(mut self, stats: LaneStats) {
        self.answer = Some(Box::new(stats));
    }
}

impl Drop for StatsRequest {
    fn drop(&mut self) {
        // Before those who wait are woken: what they ask next is a request of its own.
        self.reported.is_requested.store(false, Ordering::Release);
        let answer = self.answer.take();
        self.reported.stats.send_modify(|stats| {
            if let Some(answer) = answer {
                *stats = *answer;
            }
        });
    }
}

/// The counters that a lane has reported last.
#[derive(Clone, Default)]
pub(crate) struct ReportedStats {
    stats: Arc<watch::Sender<LaneStats>>,
    is_requested: Arc<AtomicBool>,
}

impl ReportedStats {
    /// Reports counters.
    pub(crate) fn replace(&self, stats: LaneStats) {
        self.stats.send_replace(stats);
    }

    /// What was reported last: zeros before the first time.
    pub(crate) fn latest(&self) -> LaneStats {
        self.stats.borrow().clone()
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
    /// Counters of its streams.
    pub(crate) streams: StreamStats,
    /// Counters of the lane of operations in device memory; `None` for others.
    pub(crate) gpu: Option<GpuStats>,
}

/// Counters of the lane of operations in device memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuStats {
    /// Operations that NCCL performed.
    pub(crate) nccl: u64,
    /// Operations that NCCL performed within this host, and ronde with other sidecars.
    pub(crate) two_levels: u64,
    /// Operations whose tensors were all copied to the host.
    pub(crate) copied: u64,
    /// Operations that failed on a device, or whose collective was ended with their epoch.
    pub(crate) failed: u64,
    /// Collectives of NCCL whose communicators were aborted, or could not be made.
    pub(crate) aborted: u64,
    /// Bytes of contributions to collectives of NCCL.
    pub(crate) bytes: u64,
}

/// The control thread's handle of a lane.
pub(crate) struct LaneHandle {
    lane: Lane,
    commands: mpsc::Sender<LaneCommand>,
    thread: JoinHandle<()>,
    /// Closed as the thread's last act, after all that it owns is dropped: the command queue closes before that.
    end: oneshot::Receiver<()>,
    reported: ReportedStats,
    /// Whether the lane reports its counters only when it is asked.
    is_asked: bool,
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
        let handle = Self::start_with_sender(lane, |commands, _, _| body(commands))?;
        Ok(Self { is_asked: true, ..handle })
    }

    /// Starts the thread of a lane that also sends commands to itself and reports its counters without being asked. The
    /// sender does not keep the thread running.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(crate) fn start_with_sender(
        lane: Lane,
        body: impl FnOnce(mpsc::Receiver<LaneCommand>, mpsc::WeakSender<LaneCommand>, ReportedStats) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let (own, reported) = (commands.downgrade(), ReportedStats::default());
        let (builder, reports) = (std::thread::Builder::new().name(format!("ronde-lane-{}", lane.0)), reported.clone());
        let (last, end) = oneshot::channel();
        let thread = builder.spawn(move || {
            let _last = last;
            body(receiver, own, reports);
        })?;
        Ok(Self { lane, commands, thread, end, reported, is_asked: false })
    }

    /// Queues a command. Returns false when the lane's thread has ended or does not keep up, which ends the job.
    pub(crate) fn send(&self, command: LaneCommand) -> bool {
        self.commands.try_send(command).is_ok()
    }

    /// The lane's counters: those that it has reported last, when it does not answer until `deadline` or has ended. So they
    /// never decrease.
    pub(crate) fn stats(&self, deadline: Instant) -> impl Future<Output = LaneStats> + Send + use<> {
        let (reported, is_asked) = (self.reported.clone(), self.is_asked);
        let mut answers = reported.stats.subscribe();
        if is_asked && !reported.is_requested.swap(true, Ordering::AcqRel) {
            self.send(LaneCommand::Stats(StatsRequest { reported: reported.clone(), answer: None }));
        }
        async move {
            if is_asked {
                let _ = tokio::time::timeout_at(deadline, answers.changed()).await;
            }
            reported.latest()
        }
    }

    /// Closes the lane's links and waits for its thread.
    ///
    /// # Errors
    /// When the thread has not ended until a deadline; the text names the lane and what it may wait for.
    pub(crate) async fn stop(mut self, reason: String, deadline: Instant) -> Result<(), String> {
        let ended = async {
            // It fails when the thread has ended, or is about to.
            let _ = self.commands.send(LaneCommand::Stop(reason)).await;
            (&mut self.end).await
        };
        if tokio::time::timeout_at(deadline, ended).await.is_err() {
            let (work, callee) = match self.is_asked {
                true => ("", "a plugin or a link"),
                false => (" for operations in device memory", "NCCL or the GPU's driver"),
            };
            return Err(format!("lane {}{work}, which may wait for {callee},", self.lane.0));
        }
        // At once: the thread has nothing left to do.
        if self.thread.join().is_err() {
            tracing::error!("the thread of lane {} panicked", self.lane.0);
        }
        Ok(())
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

/// The bound of a lane's command queue; a lane with a full queue counts as stopped, and the job ends. Each admitted operation has
/// at most one command in it: a lane on the host gets one, and the lane of operations in device memory gets its second one after
/// it has handled the first. Operations of which a rank waits for a request are at most as many as its requests, so those that a
/// rank takes part in fill at most half of the queue. Operations of process sets without a common rank add up: the queue has
/// room for two such sets at their limit. The other commands are few: notices of room and requests for counters are sent one at a
/// time, and a withdrawn schedule, an epoch and a membership have their commands once.
const COMMANDS_MAX: usize = 2 * limits::PENDING_PER_SESSION_MAX;

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    fn with_bytes(sent: u64) -> LaneStats {
        LaneStats { port: PortStats { sealed_bytes: sent, ..PortStats::default() }, ..LaneStats::default() }
    }

    async fn stop(lane: LaneHandle) {
        lane.stop(String::new(), Instant::now() + Duration::from_secs(60)).await.expect("it ends");
    }

    /// Waits when it is dropped, as the memory of a GPU that hangs does.
    struct Hung(std::sync::mpsc::Receiver<()>);

    impl Drop for Hung {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[tokio::test]
    async fn a_lane_that_does_not_end_is_named_by_the_deadline() {
        let (resume, busy) = channel::<()>();
        let lane = LaneHandle::start_with_sender(Lane(3), move |mut commands, _, _| {
            let _held = Hung(busy);
            assert!(matches!(commands.blocking_recv(), Some(LaneCommand::Stop(_))));
            drop(commands);
        });
        let lane = lane.expect("a thread");
        let deadline = Instant::now() + Duration::from_millis(200);
        let named = lane.stop("the end".to_owned(), deadline).await.expect_err("its values are not dropped");
        assert_eq!(named, "lane 3 for operations in device memory, which may wait for NCCL or the GPU's driver,");
        drop(resume);
    }

    #[tokio::test]
    async fn a_lane_whose_queue_stays_full_is_named_by_the_deadline() {
        let (resume, busy) = channel::<()>();
        let lane = LaneHandle::start(Lane(1), move |commands| {
            let _ = busy.recv();
            drop(commands);
        });
        let lane = lane.expect("a thread");
        while lane.send(LaneCommand::Room) {}
        let deadline = Instant::now() + Duration::from_millis(200);
        let named = lane.stop("the end".to_owned(), deadline).await.expect_err("it takes no command");
        assert!(named.starts_with("lane 1, which"), "{named}");
        drop(resume);
    }

    #[tokio::test]
    async fn counters_of_a_lane_that_is_busy_are_those_of_its_last_answer() {
        let (resume, busy) = channel();
        let lane = LaneHandle::start(Lane(0), move |mut commands| {
            for sent in [7, 9] {
                if let Some(LaneCommand::Stats(request)) = commands.blocking_recv() {
                    request.answer(with_bytes(sent));
                }
                let _ = busy.recv();
            }
        });
        let lane = lane.expect("a thread");
        let soon = |millis| Instant::now() + Duration::from_millis(millis);
        assert_eq!(lane.stats(soon(10_000)).await.port.sealed_bytes, 7);
        assert_eq!(lane.stats(soon(1)).await.port.sealed_bytes, 7, "it does not answer now");
        // It answers the second request after that one has been given up.
        resume.send(()).expect("it waits");
        resume.send(()).expect("it waits");
        let ended = tokio::time::timeout(Duration::from_secs(60), lane.commands.closed()).await;
        ended.expect("it was asked a second time");
        assert_eq!(lane.stats(soon(10_000)).await.port.sealed_bytes, 9, "it has ended");
        stop(lane).await;
    }

    #[tokio::test]
    async fn requests_for_counters_that_nobody_waits_for_do_not_fill_the_queue() {
        let (resume, busy) = channel();
        let lane = LaneHandle::start(Lane(0), move |mut commands| {
            let _ = busy.recv();
            while let Some(LaneCommand::Stats(request)) = commands.blocking_recv() {
                request.answer(with_bytes(3));
            }
        });
        let lane = lane.expect("a thread");
        let late = Instant::now() + Duration::from_secs(10);
        (0..1_000).for_each(|_| drop(lane.stats(late)));
        assert_eq!(lane.commands.max_capacity() - lane.commands.capacity(), 1);
        let (first, second) = (lane.stats(late), lane.stats(late));
        resume.send(()).expect("it waits");
        assert_eq!((first.await.port.sealed_bytes, second.await.port.sealed_bytes), (3, 3));
        assert_eq!(lane.stats(late).await.port.sealed_bytes, 3, "it is asked again");
        stop(lane).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_lane_that_reports_by_itself_is_not_waited_for() {
        let (resume, busy) = channel::<()>();
        let (started, starts) = channel();
        let lane = LaneHandle::start_with_sender(Lane(0), move |_commands, _, reported| {
            reported.replace(with_bytes(5));
            started.send(()).expect("the test waits");
            let _ = busy.recv();
        });
        let lane = lane.expect("a thread");
        starts.recv().expect("it starts");
        let before = Instant::now();
        assert_eq!(lane.stats(before + Duration::from_secs(1)).await.port.sealed_bytes, 5);
        assert_eq!(Instant::now(), before, "a paused clock advances only when something waits for it");
        resume.send(()).expect("it waits");
        // A paused clock would not wait for the thread, and go to the deadline at once.
        tokio::time::resume();
        stop(lane).await;
    }
}
