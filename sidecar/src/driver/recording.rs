//! Begins and ends the recording of a timeline, and passes events to it.

use std::time::Instant;

use ronde_wire::{Lane, Rank, Seq};
use tonic::Status;

use super::Driver;
use crate::operation::lanes::ExecuteCommand;
use crate::session::command::RecordRequest;
use crate::timeline::{LaneTrace, RecordingId};

impl Driver {
    /// Begins a recording for the worker of rank 0; an earlier recording ends.
    pub(super) fn record(&mut self, request: RecordRequest) {
        let RecordRequest { session_token, mark_cycles, batches, reply } = request;
        let rank =
            self.clients.sessions.iter_mut().find(|session| session.token == session_token).map(|s| s.active_rank());
        let refused = match rank {
            Some(Some(FIRST)) => {
                let recording = self.timeline.begin(Instant::now(), batches, mark_cycles);
                self.follow_timeline();
                if reply.send(Ok(recording)).is_err() {
                    // Its reader has given up, so nothing else would end the recording.
                    self.end_recording(recording);
                }
                return;
            }
            Some(Some(rank)) => {
                Status::failed_precondition(format!("{rank} cannot record a timeline; rank 0 records for all ranks"))
            }
            Some(None) => Status::failed_precondition("the worker has no rank yet; rank 0 records for all ranks"),
            None => Status::permission_denied("no open session has this session token"),
        };
        // The caller may be gone.
        drop(reply.send(Err(refused)));
    }

    /// Ends a worker's recording.
    pub(super) fn end_recording(&mut self, recording: RecordingId) {
        if self.timeline.is_on() {
            self.timeline.end_of(recording);
            self.follow_end();
        }
    }

    /// Sends events that waited for a batch.
    pub(super) fn flush_timeline(&mut self) {
        if self.timeline.is_on() {
            self.timeline.flush(Instant::now());
            self.follow_end();
        }
    }

    /// Ends the recording of a session that is over.
    pub(crate) fn end_timeline_of(&mut self, rank: Rank) {
        if rank == FIRST && self.timeline.is_on() {
            self.timeline.end();
            self.follow_end();
        }
    }

    /// Switches tracing in the engine and the threads on or off.
    fn follow_timeline(&mut self) {
        let wanted = self.timeline.is_on();
        self.engine.set_tracing(wanted);
        self.execution.inline.handle(ExecuteCommand::Trace(wanted));
        self.send_to_lanes(|| ExecuteCommand::Trace(wanted).into());
    }

    /// Forwards the engine's traces. Called after each event and each poll of the engine.
    pub(super) fn note_traces(&mut self) {
        if !self.timeline.is_on() {
            return;
        }
        let traces = self.engine.take_traces();
        if !traces.is_empty() {
            self.timeline.note(Instant::now(), traces);
            self.follow_end();
        }
    }

    /// Notes the trace of a lane's part of an operation.
    pub(super) fn note_work(&mut self, seq: Seq, trace: Option<(Lane, LaneTrace)>) {
        if let Some((lane, trace)) = trace {
            self.timeline.performed(Instant::now(), seq, Some(lane), &trace);
            self.follow_end();
        }
    }

    /// Notes the trace of an operation that the control thread performed.
    pub(super) fn note_inline_work(&mut self, seq: Seq, trace: Option<LaneTrace>) {
        if let Some(trace) = trace {
            self.timeline.performed(Instant::now(), seq, None, &trace);
            self.follow_end();
        }
    }

    /// Switches tracing off if the recording is over, which also happens when its worker is gone.
    fn follow_end(&mut self) {
        if !self.timeline.is_on() {
            self.follow_timeline();
        }
    }
}

/// The rank that may record.
const FIRST: Rank = Rank(0);
