//! Executes operations: sends them to lanes or performs them inline, and handles the lanes' reports.

use std::sync::Arc;

use ronde_engine::{Admission, Completion, Event};
use ronde_transport::DownReason;
use ronde_wire::{Epoch, Failure, Rank, RequestId, Seq};

use super::Driver;
use crate::operation::delivery::{deliver, fail, result_id};
use crate::operation::lanes::inline::InlineExecutor;
use crate::operation::lanes::{ExecuteCommand, LaneCommand, LaneReport};
use crate::operation::memory::OperationMemory;
use crate::operation::table::FailedRequest;

impl Driver {
    pub(super) fn handle_report(&mut self, report: LaneReport) {
        match report {
            LaneReport::Done(epoch, seq, trace) => {
                self.note_work(seq, trace);
                let operation = self.execution.operations.name(epoch, seq).map(tracing::field::display);
                tracing::debug!(epoch = epoch.0, seq = seq.0, operation, "a lane completed its part of an operation");
                if self.execution.operations.part_done(epoch, seq) {
                    self.handle(Event::Executed { epoch, seq });
                    self.send_released_failures();
                }
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
        let is_inline = InlineExecutor::takes(admission);
        self.execution.plugins.begin(admission);
        let threads = admission.plan.lanes();
        match self.execution.operations.admit(admission, threads, &mut self.clients.sessions) {
            Ok(memory) if is_inline => self.perform(admission, memory),
            Ok(memory) => {
                self.send_to_first_lanes(threads, || {
                    ExecuteCommand::Admit(Arc::clone(admission), Arc::clone(&memory)).into()
                });
            }
            Err(error) => {
                let reason = format!("no memory for the result: {error}");
                self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin: false });
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
        self.send_to_lanes(|| ExecuteCommand::Cancel(epoch, last, Arc::clone(dropped)).into());
    }

    /// Performs a small operation on this thread.
    pub(super) fn perform(&mut self, admission: &Arc<Admission>, memory: Arc<OperationMemory>) {
        self.backpressure.performed();
        let (epoch, seq) = (admission.epoch, admission.seq);
        match self.execution.inline.perform(admission, memory) {
            Ok(trace) => {
                self.note_inline_work(seq, trace);
                if self.execution.operations.part_done(epoch, seq) {
                    self.handle(Event::Executed { epoch, seq });
                }
            }
            Err(reason) => self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin: false }),
        }
    }

    pub(super) fn complete(&mut self, rank: Rank, request: RequestId, outcome: Result<Completion, Failure>) {
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
