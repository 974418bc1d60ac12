//! Executes operations: sends them to lanes or performs them inline, and handles the lanes' reports.

use std::sync::Arc;

use ronde_engine::{Admission, Completion, Event};
use ronde_transport::DownReason;
use ronde_wire::{Epoch, Failure, Rank, RequestId, Seq};

use super::host_queue::HostQueue;
use super::{DeviceExecution, Driver};
use crate::operation::delivery::{deliver, fail, result_id};
use crate::operation::device::facts_of;
use crate::operation::device::path::{DevicePath, path_of};
use crate::operation::lanes::inline::InlineExecutor;
use crate::operation::lanes::{ExecuteCommand, GpuCommand, LaneCommand, LaneReport};
use crate::operation::memory::OperationMemory;
use crate::operation::table::{FailedRequest, Progress};

/// A command for the lanes on the host that waits for earlier operations whose tensors come from devices.
pub(crate) enum HostCommand {
    /// An operation, with its memory.
    Admit(Arc<Admission>, Arc<OperationMemory>),
    /// [`ExecuteCommand::Cancel`].
    Cancel(Epoch, Seq, Arc<[Seq]>),
}

/// The commands that wait, and the admissions of operations whose contributions are on their way.
pub(crate) type Waiting = HostQueue<Arc<Admission>, HostCommand>;

impl Driver {
    pub(super) fn handle_report(&mut self, report: LaneReport) {
        match report {
            LaneReport::Done(epoch, seq, trace) => {
                self.note_work(seq, trace);
                let operation = self.execution.operations.name(epoch, seq).map(tracing::field::display);
                tracing::debug!(epoch = epoch.0, seq = seq.0, operation, "a lane completed its part of an operation");
                match self.execution.operations.part_done(epoch, seq) {
                    Progress::Running => {}
                    Progress::OnHost => self.send_to_gpu_lane(GpuCommand::Deliver(epoch, seq)),
                    Progress::Done => {
                        self.flight.recorder.performed(self.now(), epoch, seq);
                        self.handle(Event::Executed { epoch, seq });
                        self.send_released_failures();
                    }
                }
            }
            LaneReport::Staged(epoch, seq, memory) => {
                if self.epoch.running != Some(epoch) {
                    return;
                }
                self.execution.device.queue.arrived(seq, |admission| HostCommand::Admit(admission, memory));
                self.send_queued();
            }
            LaneReport::Dropped(epoch, last) => {
                if self.execution.operations.lane_dropped(epoch, last) {
                    // An operation with a plugin is dropped separately.
                    self.execution.plugins.discard(epoch, last);
                    self.handle(Event::Cancelled { epoch, last });
                    self.send_released_failures();
                }
            }
            LaneReport::Failed { epoch, seq, reason, plugin } => {
                let operation = self.execution.operations.name(epoch, seq).map(tracing::field::display);
                let line = Failure::line(&reason);
                tracing::error!(
                    epoch = epoch.0,
                    seq = seq.0,
                    operation,
                    reason = line,
                    "a lane cannot perform an operation"
                );
                self.flight.recorder.not_performed(epoch, seq, &reason);
                self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin });
            }
            LaneReport::Released(epoch) => {
                self.execution.operations.lane_released(epoch);
                self.send_released_failures();
                self.send_announcements();
            }
            LaneReport::Entered(membership) => self.lane_entered(membership),
            LaneReport::LinkDown { peer, reason } => {
                if matches!(reason, DownReason::Unanswered(_) | DownReason::Refused(_)) {
                    self.report_unreachable(peer, &reason);
                }
                let closed = matches!(reason, DownReason::ClosedByPeer(_));
                self.handle(Event::LaneDown { peer, closed, reason: reason.to_string() });
            }
            LaneReport::Ended(lane) => {
                self.fatal.get_or_insert_with(|| format!("the thread of {lane} has ended; see the log above"));
            }
        }
    }

    pub(super) fn send_to_lanes(&mut self, command: impl Fn() -> LaneCommand) {
        self.send_to_first_lanes(self.execution.lanes.len(), command);
    }

    pub(super) fn send_to_first_lanes(&mut self, count: usize, command: impl Fn() -> LaneCommand) {
        let unresponsive = self.execution.lanes.iter().take(count).any(|lane| !lane.send(command()));
        if unresponsive {
            self.fatal.get_or_insert_with(|| "a lane's thread has ended; see the log above".to_owned());
        }
    }

    pub(super) fn admit(&mut self, admission: &Arc<Admission>) {
        let (epoch, seq, tensors) = (admission.epoch, admission.seq, &admission.tensors);
        let operation = tensors.first().map(|tensor| tracing::field::display(&tensor.name));
        tracing::debug!(epoch = epoch.0, seq = seq.0, operation, tensors = tensors.len(), "an operation begins");
        self.flight.recorder.ordered(self.now(), admission);
        let is_inline = InlineExecutor::takes(admission);
        self.execution.plugins.begin(admission);
        let threads = admission.plan.lanes();
        match self.execution.operations.admit(admission, threads, &mut self.clients.sessions) {
            Ok(memory) if memory.is_on_device() => self.admit_on_device(admission, memory),
            Ok(memory) if is_inline => self.perform(admission, memory),
            Ok(memory) => {
                let command = HostCommand::Admit(Arc::clone(admission), memory);
                self.execution.device.queue.push(Some(seq), command);
                self.send_queued();
            }
            Err(error) => {
                let reason = format!("no memory for the result: {error}");
                self.flight.recorder.not_performed(epoch, seq, &reason);
                self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin: false });
            }
        }
    }

    /// Gives an operation with tensors in device memory to the lane of such operations.
    fn admit_on_device(&mut self, admission: &Arc<Admission>, memory: Arc<OperationMemory>) {
        let (epoch, seq) = (admission.epoch, admission.seq);
        self.flight.recorder.started(self.now(), epoch, seq);
        let path = path_of(&facts_of(admission, &memory, self.execution.device.is_hierarchical));
        let is_staged = !matches!(path, DevicePath::Nccl(_));
        self.execution.operations.hand_to_gpu(epoch, seq, is_staged);
        if is_staged {
            let on_host = match path {
                DevicePath::TwoLevels(inside) => Arc::new(admission.with_reduced_ranks(inside.reduction.factor)),
                _ => Arc::clone(admission),
            };
            self.execution.device.queue.await_one(seq, on_host);
        }
        self.send_to_gpu_lane(GpuCommand::Perform(Arc::clone(admission), memory, path));
    }

    fn send_to_gpu_lane(&mut self, command: GpuCommand) {
        let lane = self.execution.device.lane.and_then(|lane| self.execution.lanes.get(lane));
        if !lane.is_some_and(|lane| lane.send(LaneCommand::Gpu(command))) {
            self.fatal.get_or_insert_with(|| "the lane of operations in device memory has ended".to_owned());
        }
    }

    /// Sends the lanes on the host what waits for no device.
    fn send_queued(&mut self) {
        while let Some(command) = self.execution.device.queue.pop() {
            match command {
                HostCommand::Admit(admission, memory) => {
                    self.flight.recorder.started(self.now(), admission.epoch, admission.seq);
                    self.send_to_first_lanes(admission.plan.lanes(), || {
                        ExecuteCommand::Admit(Arc::clone(&admission), Arc::clone(&memory)).into()
                    });
                }
                HostCommand::Cancel(epoch, last, dropped) => {
                    let on_host = self.execution.device.lane.unwrap_or(self.execution.lanes.len());
                    self.send_to_first_lanes(on_host, || {
                        ExecuteCommand::Cancel(epoch, last, Arc::clone(&dropped)).into()
                    });
                }
            }
        }
    }

    /// Commits the codec state that an operation leaves.
    pub(super) fn commit(&mut self, epoch: Epoch, seq: Seq) {
        tracing::trace!(epoch = epoch.0, seq = seq.0, "an operation with a plugin is committed");
        self.execution.plugins.commit(epoch, seq);
    }

    /// Makes the lanes drop operations.
    pub(super) fn cancel(&mut self, epoch: Epoch, last: Seq, dropped: &Arc<[Seq]>) {
        tracing::debug!(epoch = epoch.0, last = last.0, operations = dropped.len(), "operations are dropped");
        self.execution.operations.cancel((epoch, last), dropped);
        self.flight.recorder.dropped(epoch, dropped);
        let DeviceExecution { lane, queue, .. } = &mut self.execution.device;
        queue.remove(dropped);
        queue.push(None, HostCommand::Cancel(epoch, last, Arc::clone(dropped)));
        // It need not wait for operations of the host.
        if let Some(lane) = lane.and_then(|lane| self.execution.lanes.get(lane))
            && !lane.send(ExecuteCommand::Cancel(epoch, last, Arc::clone(dropped)).into())
        {
            self.fatal.get_or_insert_with(|| "the lane of operations in device memory has ended".to_owned());
        }
        self.send_queued();
    }

    /// Performs a small operation on this thread.
    pub(super) fn perform(&mut self, admission: &Arc<Admission>, memory: Arc<OperationMemory>) {
        self.backpressure.performed();
        let (epoch, seq) = (admission.epoch, admission.seq);
        self.flight.recorder.started(self.now(), epoch, seq);
        match self.execution.inline.perform(admission, memory) {
            Ok(trace) => {
                self.note_inline_work(seq, trace);
                if self.execution.operations.part_done(epoch, seq) == Progress::Done {
                    self.flight.recorder.performed(self.now(), epoch, seq);
                    self.handle(Event::Executed { epoch, seq });
                }
            }
            Err(reason) => {
                self.flight.recorder.not_performed(epoch, seq, &reason);
                self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin: false });
            }
        }
    }

    pub(super) fn complete(&mut self, rank: Rank, request: RequestId, outcome: Result<Completion, Failure>) {
        self.flight.recorder.ended(self.now(), rank, request, outcome.as_ref().err());
        let Self { clients, execution, .. } = self;
        let (session, operations) = (clients.sessions.of_rank(rank), &mut execution.operations);
        match (outcome, session) {
            (Ok(completion), Some(session)) => deliver(session, operations, request, completion),
            (Ok(completion), None) => operations.release(result_id(rank, &completion), rank),
            (Err(failure), Some(session)) => {
                let operation = failure.tensor.as_ref().map(tracing::field::display);
                let reason = &failure.reason;
                tracing::debug!(rank = rank.0, request = request.0, operation, reason, "a request has failed");
                let operation = session.pending.get(&request).and_then(|pending| pending.operation);
                let failed = FailedRequest { session: session.id, request, failure };
                if let Some(FailedRequest { failure, .. }) = operations.hold_failure(operation, failed) {
                    fail(session, request, &failure);
                }
            }
            (Err(_), None) => {}
        }
    }

    /// Sends the failures whose operations no lane performs any more.
    fn send_released_failures(&mut self) {
        for FailedRequest { session, request, failure } in self.execution.operations.take_released() {
            if let Some(session) = self.clients.sessions.get_mut(session) {
                fail(session, request, &failure);
            }
        }
    }
}
