//! Ends sessions, and builds the failure that the other ranks receive.
//!
//! A worker's stream breaks when its process ends. Its parent, the launcher's agent on this host, knows why: it reads
//! the last lines of the worker's output and reports both a moment later. With an agent, a session whose stream is over
//! is *closing* for at most [`EXIT_WAIT`], or [`SHUTDOWN_WAIT`] after a shutdown message. Until then its contributions
//! stay and operations continue; then the other ranks receive its end with the reason.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_bootstrap::messages::{FromSidecar, WorkerExited};
use ronde_engine::Event;
use ronde_wire::{Cause, Exit, Failure, Record, WorkerNumber};

use crate::driver::Driver;
use crate::session::table::{Closing, Session, SessionId};

impl Driver {
    /// Handles the end of a session's stream.
    pub(crate) fn stream_ended(&mut self, id: SessionId, reason: String) {
        let Some(session) = self.clients.sessions.get_mut(id).filter(|session| session.closing.is_none()) else {
            return;
        };
        if !self.exits.are_reported {
            self.close_session(id, &reason);
            return;
        }
        let wait = if session.shutdown_reason.is_some() { SHUTDOWN_WAIT } else { EXIT_WAIT };
        session.closing = Some(Closing { reason, until: Instant::now() + wait });
        session.hang_up();
        self.report_left(id);
        let Some(worker) = self.clients.sessions.get_mut(id).map(|session| session.worker) else { return };
        if let Some(exited) = self.exits.early.remove(&worker) {
            self.finish_close(id, Some(exited));
        }
    }

    /// Handles the agent's report of how a worker's process has ended.
    pub(crate) fn worker_exited(&mut self, exited: WorkerExited) {
        let worker = WorkerNumber(exited.worker);
        tracing::info!(worker = worker.0, pid = exited.pid, ended = %exited.exit, "a worker's process has ended");
        let rank = self.clients.sessions.of_worker(worker).and_then(|session| session.active_rank());
        let record = rank.map(|rank| self.engine.record(rank, self.now()));
        let last_call = record.and_then(|record| record.last_call).map(|call| call.to_string());
        FromSidecar::Noted { worker: worker.0, last_call }.send();
        let is_served = self.clients.sessions.admits(worker);
        self.forget_worker(worker);
        let session = self.clients.sessions.of_worker(worker);
        match session.filter(|session| session.closing.is_some()).map(|session| session.id) {
            Some(id) => self.finish_close(id, Some(exited)),
            // Its stream may end a moment later. Workers of other sidecars are ignored here.
            None if is_served => drop(self.exits.early.insert(worker, exited)),
            None => {}
        }
    }

    /// Drops the exit of a worker's last process when a new process claims its number.
    pub(crate) fn make_room(&mut self, worker: WorkerNumber) {
        self.exits.early.remove(&worker);
        let session = self.clients.sessions.of_worker(worker).filter(|session| session.closing.is_some());
        if let Some(id) = session.map(|session| session.id) {
            self.finish_close(id, None);
        }
    }

    /// Closes the sessions whose exit was not reported in time.
    pub(crate) fn close_due_sessions(&mut self, now: Instant) {
        let due = |session: &&mut Session| session.closing.as_ref().is_some_and(|closing| closing.until <= now);
        let due: Vec<SessionId> = self.clients.sessions.iter_mut().filter(due).map(|session| session.id).collect();
        due.into_iter().for_each(|id| self.finish_close(id, None));
    }

    /// Returns when the next of these sessions is closed.
    pub(crate) fn next_close(&mut self) -> Option<Instant> {
        self.clients
            .sessions
            .iter_mut()
            .filter_map(|session| session.closing.as_ref().map(|closing| closing.until))
            .min()
    }

    /// Closes a session without waiting for a report.
    pub(crate) fn close_session(&mut self, id: SessionId, reason: &str) {
        let Some(session) = self.clients.sessions.get_mut(id) else { return };
        if session.closing.is_none() {
            session.closing = Some(Closing { reason: reason.to_owned(), until: Instant::now() });
            self.report_left(id);
        }
        self.finish_close(id, None);
    }

    /// Removes a session and notifies the engine that its rank, if it has one, has left.
    fn finish_close(&mut self, id: SessionId, exited: Option<WorkerExited>) {
        let Some(mut session) = self.clients.sessions.close(id) else { return };
        self.clients.segments.close_session(&session.token);
        if session.active_rank().is_none() {
            // Its results went with their membership, and other workers do not know it.
            tracing::info!(worker = session.worker.0, "a worker without a rank has left");
            return;
        }
        let failure = self.failure_of(&session, exited);
        let unsent = session.take_unsent();
        for result in session.held.values().map(|held| held.result).chain(unsent) {
            self.execution.operations.release(result, session.rank);
        }
        self.end_timeline_of(session.rank);
        let orderly = failure.cause == Cause::ShutDown;
        tracing::info!(rank = session.rank.0, orderly, reason = failure.reason, "a worker has left");
        self.handle(Event::RankLeft { rank: session.rank, failure });
    }

    /// Reports the end of a session before any rank fails because of it: the launcher blames the rank that left first, not
    /// the one that exits first.
    fn report_left(&mut self, id: SessionId) {
        let Some(session) = self.clients.sessions.get_mut(id) else { return };
        let operations = session.active_rank().map(|rank| self.engine.calls(rank));
        FromSidecar::Left { worker: session.worker.0, operations }.send();
    }

    /// Builds the failure that the other ranks receive.
    fn failure_of(&self, session: &Session, exited: Option<WorkerExited>) -> Failure {
        let (rank, me) = (session.rank, self.me);
        let well = exited.as_ref().is_none_or(|exited| exited.exit == Exit::Code(0));
        let failure = |cause, reason: String| Failure::new(cause, reason).with_rank(rank).with_sidecar(me);
        if let Some(reason) = session.shutdown_reason.as_ref().filter(|_| well) {
            return failure(Cause::ShutDown, format!("{rank} has shut down: {reason}"));
        }
        let record = self.engine.record(rank, self.now());
        let reason = match &exited {
            Some(WorkerExited { exit, .. }) => {
                let unexpected = if well { " without shutting down its session" } else { "" };
                format!("{rank} on host {} {exit}{unexpected}{}", record.host, exit.advice())
            }
            None => {
                let seen = session.closing.as_ref().map(|closing| closing.reason.as_str()).unwrap_or_default();
                let unknown = if self.exits.are_reported {
                    ""
                } else {
                    "; no launcher watches it, so see its own output for why"
                };
                format!("{rank} on {me} is gone: {seen}{unknown}")
            }
        };
        let (exit, stderr_tail) = exited.map_or((None, Vec::new()), |exited| (Some(exited.exit), exited.stderr_tail));
        let record = Record { pid: Some(session.pid).filter(|pid| *pid > 0), exit, stderr_tail, ..record };
        failure(Cause::RankLost, reason).with_record(Some(Arc::new(record.within_limits())))
    }
}

/// How long a session stays closing while its exit is not reported: long enough for an agent to read the last lines of
/// output, and hardly noticeable.
const EXIT_WAIT: Duration = Duration::from_millis(300);
/// The same after a shutdown message, which an interpreter sends some time before it exits. A clean shutdown is not
/// urgent.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);
