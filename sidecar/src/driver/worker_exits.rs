//! Ends sessions, and builds the failure that the other ranks receive.
//!
//! A worker's stream breaks when its process ends. Its parent, the launcher's agent on this host, knows why: it reads
//! the last lines of the worker's output and reports both a moment later. With an agent, a session whose stream is over
//! is *closing* for at most [`EXIT_WAIT`], or [`SHUTDOWN_WAIT`] after a shutdown message. If its process has ended by then,
//! the report is on its way, and it is closing for [`REPORT_WAIT`] more at most: on a busy machine the agent runs late. Until
//! then its contributions stay and operations continue; then the other ranks receive its end with the reason.

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
        let now = Instant::now();
        session.closing = Some(Closing { reason, until: now + wait, latest: now + wait + REPORT_WAIT });
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
        let mut due = Vec::new();
        for session in self.clients.sessions.iter_mut() {
            let Some(closing) = session.closing.as_mut().filter(|closing| closing.until <= now) else { continue };
            if now < closing.latest && has_ended(session.pid) {
                closing.until = closing.latest.min(now + REPORT_POLL);
            } else {
                due.push(session.id);
            }
        }
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
            let now = Instant::now();
            session.closing = Some(Closing { reason: reason.to_owned(), until: now, latest: now });
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

/// Whether the process with this number has ended, or is about to. One that this host does not have has ended; 0 is a process
/// that nobody knows.
fn has_ended(pid: u32) -> bool {
    if pid == 0 {
        return false;
    }
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => is_ending(&stat),
        Err(_) => true,
    }
}

/// Reads the state of a process and its flags, the third and the ninth field of `/proc/<pid>/stat`. The second is the name in
/// parentheses, which may hold anything.
fn is_ending(stat: &str) -> bool {
    let mut fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let is_zombie = fields.next().is_some_and(|state| matches!(state, "Z" | "X"));
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or_default();
    is_zombie || flags & PF_EXITING != 0
}

/// A flag of the kernel: the process is in `exit`. It closes its connections before it becomes a zombie.
const PF_EXITING: u64 = 4;
/// How long a session stays closing while its exit is not reported: long enough for an agent to read the last lines of
/// output, and hardly noticeable.
const EXIT_WAIT: Duration = Duration::from_millis(300);
/// The same after a shutdown message, which an interpreter sends some time before it exits. A clean shutdown is not
/// urgent.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);
/// How much longer it stays closing when its process has ended. An agent that watches another process, whose child this one was,
/// may report nothing: the other ranks receive a loss within a second nevertheless.
const REPORT_WAIT: Duration = Duration::from_millis(600);
/// How often the process is checked until then.
const REPORT_POLL: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_ended_when_it_is_ending_or_gone() {
        assert!(is_ending("7 (a (b) R) Z 1 7 7 0 -1 4194304 0"), "a zombie");
        assert!(is_ending("7 (a) R 1 7 7 0 -1 4194308 0"), "it has closed its connections, and is no zombie yet");
        assert!(!is_ending("7 (a Z 4) S 1 7 7 0 -1 4194304 0") && !is_ending("nonsense"));
        assert!(!has_ended(std::process::id()) && !has_ended(0));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep exists");
        assert!(!has_ended(child.id()));
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert!(has_ended(child.id()));
    }
}
