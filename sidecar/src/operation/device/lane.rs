//! The lane of operations in device memory: a thread that drives NCCL and copies between devices and the host.
//!
//! An operation that NCCL performs completely is done here. For any other one this lane first brings the contributions to the
//! host, or what NCCL has reduced them to; the other lanes then perform it there, and at the end this lane brings the results to
//! the devices.
//!
//! The workers' streams do not appear here: a worker submits a tensor when it has been computed, and uses a result when it
//! has been notified. So nothing that a worker's stream does, or no longer does, holds this thread up.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use ronde_engine::Admission;
use ronde_gpu::GpuError;
use ronde_wire::{Epoch, Lane, Rank, Seq};
use tokio::sync::mpsc;

use super::inbox::{Inbox, Received};
use super::path::{DevicePath, LocalReduction};
use super::work::{StagedResult, Work};
use crate::operation::lanes::{
    EndReport, ExecuteCommand, GpuCommand, LaneCommand, LaneHandle, LaneReport, LaneStats, ReportedStats,
};
use crate::operation::memory::{OperationMemory, RoomNotice, RoomNotices};
use crate::session::gpus::Gpus;

/// The configuration of the lane.
pub(crate) struct GpuLaneConfig {
    /// Its number.
    pub(crate) lane: Lane,
    /// The GPUs.
    pub(crate) gpus: Arc<Gpus>,
    /// Host memory for tensors on their way, of all local ranks together. One operation may take more than that.
    pub(crate) host_bytes_max: u64,
    /// How long a collective may take.
    pub(crate) timeout: Duration,
}

/// Starts the thread.
///
/// # Errors
/// When it cannot be started.
pub(crate) fn spawn(config: GpuLaneConfig, reports: mpsc::Sender<LaneReport>) -> anyhow::Result<LaneHandle> {
    let GpuLaneConfig { lane, gpus, host_bytes_max, timeout } = config;
    let work = Work::new(gpus, host_bytes_max, timeout)?;
    LaneHandle::start_with_sender(lane, move |commands, own, stats| {
        let _end = EndReport::new(lane, reports.clone());
        let (inbox, notices) = (Inbox::new(commands), RoomNotices::new(own));
        let (waiting, staged, reasons) = Default::default();
        GpuLane { inbox, notices, work, reports, stats, waiting, staged, reasons }.run();
    })
    .context("cannot start the thread for operations in device memory")
}

/// Everything that the thread owns.
struct GpuLane {
    inbox: Inbox,
    /// For notices when room on the host is free.
    notices: RoomNotices,
    work: Work,
    reports: mpsc::Sender<LaneReport>,
    /// Where its counters are read while it works.
    stats: ReportedStats,
    /// Operations whose contributions are brought to the host as soon as there is room, in order.
    waiting: VecDeque<Waiting>,
    /// Operations whose results are to be brought to devices.
    staged: HashMap<(Epoch, Seq), Vec<StagedResult>>,
    /// Why tensors were copied to the host, as far as the log has it.
    reasons: HashSet<&'static str>,
}

/// An operation that waits for room on the host.
struct Waiting {
    epoch: Epoch,
    seq: Seq,
    memory: Arc<OperationMemory>,
    /// The local ranks, and what NCCL reduces their contributions to; `None` to copy each of them.
    reduced: Option<(Vec<Rank>, LocalReduction)>,
}

impl Waiting {
    /// The room that it takes on the host.
    fn bytes(&self) -> u64 {
        if self.reduced.is_some() { self.memory.reduced_bytes() } else { self.memory.staged_bytes() }
    }
}

impl GpuLane {
    fn run(mut self) {
        loop {
            match self.inbox.next() {
                Received::Closed | Received::Command(LaneCommand::Stop(_)) => return,
                Received::Command(command) => self.handle(command),
            }
            self.fetch_waiting();
        }
    }

    fn handle(&mut self, command: LaneCommand) {
        match command {
            LaneCommand::Execute(command) => self.execute(command),
            LaneCommand::Gpu(GpuCommand::Perform(admission, memory, path)) => self.perform(&admission, memory, path),
            LaneCommand::Gpu(GpuCommand::Deliver(epoch, seq)) => self.deliver(epoch, seq),
            // It has no links.
            LaneCommand::Enter { membership, .. } => self.report(LaneReport::Entered(membership)),
            // `run` uses the room.
            LaneCommand::Room => self.notices.received(),
            // It makes no links with a certificate, and reports counters by itself; `run` stops.
            LaneCommand::Identity(_) | LaneCommand::Stats(_) | LaneCommand::Stop(_) => {}
        }
    }

    fn execute(&mut self, command: ExecuteCommand) {
        match command {
            ExecuteCommand::EpochEnd(epoch) => {
                self.waiting.retain(|waiting| waiting.epoch != epoch);
                self.staged.retain(|(of, _), _| *of != epoch);
                self.report(LaneReport::Released(epoch));
            }
            ExecuteCommand::Cancel(epoch, last, dropped) => {
                self.waiting.retain(|waiting| waiting.epoch != epoch || !dropped.contains(&waiting.seq));
                self.staged.retain(|(of, seq), _| *of != epoch || !dropped.contains(seq));
                self.report(LaneReport::Dropped(epoch, last));
            }
            // Nothing depends on the beginning of an epoch here, and traces have no part of this lane.
            ExecuteCommand::Epoch(_) | ExecuteCommand::Trace(_) => {}
            ExecuteCommand::Admit(admission, _) => {
                self.report(LaneReport::misplaced(admission.epoch, admission.seq, "an operation on the host"));
            }
        }
    }

    fn perform(&mut self, admission: &Admission, memory: Arc<OperationMemory>, path: DevicePath) {
        let (epoch, seq) = (admission.epoch, admission.seq);
        if self.inbox.drops(epoch, seq) {
            // What drops it reports that this lane does not use its memory.
            return;
        }
        match path {
            DevicePath::Nccl(inside) => {
                let (inbox, work) = (&mut self.inbox, &mut self.work);
                let performed = work.reduce(&memory, &admission.served, inside, &mut || inbox.check(epoch));
                match performed {
                    Ok(()) => {
                        self.work.stats.nccl += 1;
                        self.report(LaneReport::Done(epoch, seq, None));
                    }
                    Err(error) => self.fail(epoch, seq, &error),
                }
            }
            DevicePath::TwoLevels(inside) => {
                let reduced = Some((admission.served.clone(), inside));
                self.waiting.push_back(Waiting { epoch, seq, memory, reduced });
            }
            DevicePath::Copied(reason) => {
                if self.reasons.insert(reason) {
                    let operation = admission.tensors.first().map(|tensor| tracing::field::display(&tensor.name));
                    tracing::warn!(operation, reason, "tensors in device memory are copied to the host; reported once");
                }
                self.waiting.push_back(Waiting { epoch, seq, memory, reduced: None });
            }
        }
    }

    /// Brings the contributions of operations to the host, as far as there is room.
    fn fetch_waiting(&mut self) {
        while let Some(Waiting { epoch, seq, memory, reduced }) =
            self.waiting.pop_front_if(|next| self.work.has_room(next.bytes()))
        {
            if self.inbox.drops(epoch, seq) {
                continue;
            }
            let (inbox, work) = (&mut self.inbox, &mut self.work);
            let (fetched, is_reduced) = match &reduced {
                Some((ranks, inside)) => {
                    (work.fetch_reduced(&memory, ranks, *inside, &mut || inbox.check(epoch)), true)
                }
                None => (work.fetch(&memory), false),
            };
            match fetched {
                Ok((tensors, results)) => {
                    let stats = &mut self.work.stats;
                    *(if is_reduced { &mut stats.two_levels } else { &mut stats.copied }) += 1;
                    self.staged.insert((epoch, seq), results);
                    let notice = Some(RoomNotice(self.notices.clone()));
                    self.report(LaneReport::Staged(epoch, seq, Arc::new(OperationMemory { tensors, notice })));
                }
                Err(error) => self.fail(epoch, seq, &error),
            }
        }
    }

    fn deliver(&mut self, epoch: Epoch, seq: Seq) {
        // It may have been dropped meanwhile.
        let Some(results) = self.staged.remove(&(epoch, seq)) else { return };
        if self.inbox.drops(epoch, seq) {
            return;
        }
        let (inbox, work) = (&mut self.inbox, &mut self.work);
        match work.deliver(&results, &mut || inbox.check(epoch)) {
            Ok(()) => self.report(LaneReport::Done(epoch, seq, None)),
            Err(error) => self.fail(epoch, seq, &error),
        }
    }

    /// Reports a failure, unless the operation has been dropped.
    fn fail(&mut self, epoch: Epoch, seq: Seq, error: &GpuError) {
        self.work.stats.failed += 1;
        self.publish_stats();
        if !self.inbox.drops(epoch, seq) {
            let reason = format!("its tensors are in device memory, and {error}");
            self.report(LaneReport::Failed { epoch, seq, reason, plugin: false });
        }
    }

    fn publish_stats(&self) {
        self.stats.replace(LaneStats { gpu: Some(self.work.stats), ..LaneStats::default() });
    }

    fn report(&self, report: LaneReport) {
        // Before the worker can see that its operation is complete.
        self.publish_stats();
        // Without a control thread the process is ending.
        let _ = self.reports.blocking_send(report);
    }
}
