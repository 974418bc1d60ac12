//! The driver's half of a timeline: its recording begins and ends, and what happens is handed to it.

use std::time::Instant;

use ronde_wire::{Lane, Rank, Seq};
use tonic::Status;

use super::Driver;
use crate::operation::lanes::ExecuteCommand;
use crate::session::command::RecordRequest;
use crate::timeline::{LaneTrace, RecordingId};

impl Driver {
    /// The worker of rank 0 wants to record what happens; a recording before this one ends.
    pub(super) fn record(&mut self, request: RecordRequest) {
        let RecordRequest { session_token, mark_cycles, batches, reply } = request;
        let rank =
            self.clients.sessions.iter_mut().find(|session| session.token == session_token).map(|session| session.rank);
        let refused = match rank {
            Some(FIRST) => {
                let recording = self.timeline.begin(Instant::now(), batches, mark_cycles);
                self.follow_timeline();
                if reply.send(Ok(recording)).is_err() {
                    // Its reader has given up, so that nobody else would ever end it.
                    self.end_recording(recording);
                }
                return;
            }
            Some(rank) => Status::failed_precondition(format!("{rank} records nothing; rank 0 does, for all")),
            None => Status::permission_denied("this session token is of no open session"),
        };
        // Whoever asked may have gone.
        drop(reply.send(Err(refused)));
    }

    /// A worker records no longer.
    pub(super) fn end_recording(&mut self, recording: RecordingId) {
        if self.timeline.is_on() {
            self.timeline.end_of(recording);
            self.follow_end();
        }
    }

    /// Sends what has waited for others to travel with.
    pub(super) fn flush_timeline(&mut self) {
        if self.timeline.is_on() {
            self.timeline.flush(Instant::now());
            self.follow_end();
        }
    }

    /// A session is over, and with it what it records.
    pub(crate) fn end_timeline_of(&mut self, rank: Rank) {
        if rank == FIRST && self.timeline.is_on() {
            self.timeline.end();
            self.follow_end();
        }
    }

    /// Engine and threads tell what happens from now on, or no longer.
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

    /// The control thread has performed an operation.
    pub(super) fn note_inline_work(&mut self, seq: Seq, trace: Option<LaneTrace>) {
        if let Some(trace) = trace {
            self.timeline.performed(Instant::now(), seq, None, &trace);
            self.follow_end();
        }
    }

    /// A recording may be over, also by itself when its worker has gone.
    fn follow_end(&mut self) {
        if !self.timeline.is_on() {
            self.follow_timeline();
        }
    }
}

/// Who records.
const FIRST: Rank = Rank(0);
