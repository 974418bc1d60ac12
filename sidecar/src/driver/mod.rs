//! The control thread's loop: joins engine, control port, lanes and sessions. What happens becomes an engine event; what
//! the engine wants becomes a message to somebody. Nothing is decided here.

pub(crate) mod backpressure;
pub(crate) mod command;
pub(crate) mod liveness;
mod parked;
mod recording;
pub(crate) mod snapshot;
mod submissions;
mod worker_exits;

pub(crate) use parked::Parked;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_engine::{Action, Admission, Completion, Engine, Event, Time};
use ronde_rpc::v1;
use ronde_rpc::v1::server_message::Message;
use ronde_transport::{
    DownReason, Identity, MutualTls, NetworkPort, Outgoing, Port, PortEvent, Role, SendError, next_event,
};
use ronde_wire::control::Transport;
use ronde_wire::{Cause, Control, Epoch, Failure, FrameKind, Rank, RequestId, Seq, SidecarIndex, World};
use tokio::sync::mpsc;
use tokio::time::{Instant as Deadline, sleep_until};

use crate::driver::backpressure::Backpressure;
use crate::driver::command::ControlCommand;
use crate::driver::liveness::Liveness;
use crate::driver::snapshot::Snapshot;
use crate::operation::delivery::{deliver, epoch_view, fail, result_id};
use crate::operation::lanes::inline::InlineExecutor;
use crate::operation::lanes::{LaneCommand, LaneHandle, LaneReport};
use crate::operation::memory::OperationMemory;
use crate::operation::table::Operations;
use crate::plugins::Plugins;
use crate::session::command::SessionCommand;
use crate::session::segments::Segments;
use crate::session::table::{Session, SessionId, Sessions};
use crate::timeline::Timeline;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::messages::{FromSidecar, WorkerExited};

/// Everything the control thread owns.
pub(crate) struct Driver {
    /// This sidecar.
    pub(crate) me: SidecarIndex,
    /// The membership.
    pub(crate) world: World,
    /// Decides.
    pub(crate) engine: Engine,
    /// Links to other sidecars for control messages.
    pub(crate) control: NetworkPort,
    /// What takes fresh certificates besides links, where gRPC-Web is answered over TLS.
    pub(crate) web_tls: Option<Arc<MutualTls>>,
    /// What they and the lanes run over.
    pub(crate) transport: Transport,
    /// The data threads.
    pub(crate) lanes: Vec<LaneHandle>,
    /// Local workers.
    pub(crate) sessions: Sessions,
    /// Their shared memory.
    pub(crate) segments: Segments,
    /// How much is done in one turn of the loop.
    pub(crate) backpressure: Backpressure,
    /// Performs small operations.
    pub(crate) inline: InlineExecutor,
    /// What is being performed, and results.
    pub(crate) operations: Operations,
    /// What requests may name, and what codecs remember.
    pub(crate) plugins: Arc<Plugins>,
    /// Requests that wait for theirs.
    pub(crate) parked: Parked,
    /// What the worker of rank 0 records.
    pub(crate) timeline: Timeline,
    /// The zero of the engine's time.
    pub(crate) started: Instant,
    /// The limit of each session's inputs, and of its results, in bytes.
    pub(crate) arena_bytes_max: u64,
    /// The silence after which a worker or sidecar is dead, told to workers, in milliseconds.
    pub(crate) peer_timeout_ms: u64,
    /// The epoch that is running.
    pub(crate) running: Option<Epoch>,
    /// Whether there has been an epoch: before the first, a link that does not come is fatal.
    pub(crate) begun: bool,
    /// Whether this sidecar is told how its workers' processes end.
    pub(crate) tells_of_exits: bool,
    /// Ends that were told before the worker's stream was over.
    pub(crate) exits: BTreeMap<Rank, WorkerExited>,
    /// Whether the workers' leaving is its end.
    pub(crate) liveness: Liveness,
    /// Set when a link that the job needs did not come at all.
    pub(crate) fatal: Option<String>,
}

/// Where the driver's news come from.
pub(crate) struct Inbox {
    /// From sessions.
    pub(crate) commands: mpsc::Receiver<SessionCommand>,
    /// From the rest of the process.
    pub(crate) control: mpsc::Receiver<ControlCommand>,
    /// From the lanes.
    pub(crate) reports: mpsc::Receiver<LaneReport>,
}

/// Why the driver runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Until told to stop, or until the workers have left.
    Serving,
    /// Until nobody is served any more.
    Draining,
}

/// What wakes the loop.
enum Wake {
    Session(Option<SessionCommand>),
    Control(Option<ControlCommand>),
    Lane(Option<LaneReport>),
    Port(PortEvent),
    Timeout,
    Stop,
}

impl Driver {
    /// Runs until `stop` resolves, or until the sidecar cannot go on; when draining, also until the last session has ended
    /// and what others still need from here is done.
    pub(crate) async fn run(&mut self, inbox: &mut Inbox, phase: Phase, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        let Inbox { commands, control, reports } = inbox;
        while self.fatal.is_none() && !self.is_over(phase) {
            let close = self.next_close().map(Deadline::from_std);
            let timeout = self.engine.poll_timeout().map(|at| self.instant(at));
            let batch = self.timeline.due().map(Deadline::from_std);
            let worker = self.liveness.due().map(|due| Deadline::from_std(self.started + due));
            let parked = self.parked.due().map(Deadline::from_std);
            let others = [close, self.backpressure.resumes_at(), batch, worker, parked].into_iter().flatten();
            let timeout = timeout.into_iter().chain(others).min();
            let wake = tokio::select! {
                report = reports.recv() => Wake::Lane(report),
                event = next_event(&mut self.control) => Wake::Port(event),
                command = commands.recv() => Wake::Session(command),
                command = control.recv() => Wake::Control(command),
                () = sleep_until(timeout.unwrap_or_else(far_future)) => Wake::Timeout,
                () = &mut stop => Wake::Stop,
            };
            match wake {
                Wake::Session(Some(command)) => {
                    self.handle_command(command);
                    self.handle_waiting(commands);
                }
                Wake::Control(Some(command)) => self.handle_control_command(command),
                Wake::Lane(Some(report)) => self.handle_report(report),
                Wake::Port(event) => self.handle_port(event),
                Wake::Timeout => {
                    self.close_due_sessions(Instant::now());
                    self.flush_timeline();
                    self.refuse_parked();
                    self.fatal = self.fatal.take().or_else(|| self.liveness.timed_out(self.started.elapsed()));
                    self.engine.handle_timeout(self.now());
                }
                Wake::Session(None) | Wake::Control(None) | Wake::Lane(None) | Wake::Stop => return,
            }
            self.perform_actions();
            self.end_unresponsive_sessions();
        }
    }

    /// What has come in the meantime is handled before the engine is asked what to do: it travels and fuses together.
    fn handle_waiting(&mut self, commands: &mut mpsc::Receiver<SessionCommand>) {
        for _ in 0..COMMANDS_AT_ONCE {
            let Ok(command) = commands.try_recv() else { return };
            self.handle_command(command);
        }
    }

    fn is_over(&self, phase: Phase) -> bool {
        match phase {
            Phase::Serving => self.liveness.is_over(self.sessions.len(), self.running.is_some()),
            Phase::Draining => self.sessions.len() == 0 && self.engine.is_drained(),
        }
    }

    /// Ends all sessions that are left: in an orderly way, or because this sidecar cannot go on.
    pub(crate) fn end_sessions(&mut self, cause: Cause, reason: &str) {
        let failure = Failure::new(cause, reason).with_sidecar(self.me);
        for session in self.sessions.iter_mut() {
            session.send(Message::EpochEnded(v1::EpochEnded { epoch: 0, failure: Some((&failure).into()) }));
        }
    }

    /// Asks for the links of the control tree.
    pub(crate) fn open_control_links(&mut self) {
        let neighbours: Vec<_> =
            self.engine.control_parent().into_iter().chain(self.engine.control_children()).collect();
        for peer in neighbours {
            if self.control_role(peer) == Role::Dial {
                FromSidecar::Dialling { peer: peer.0 }.send();
            }
            self.control.open(peer, self.control_role(peer));
        }
    }

    pub(crate) fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn instant(&self, at: Time) -> Deadline {
        Deadline::from_std(self.started + Duration::from_micros(at.0))
    }

    pub(crate) fn handle(&mut self, event: Event) {
        let now = self.now();
        self.engine.handle_event(now, event);
        self.note_traces();
    }

    // === What happens ===

    fn handle_command(&mut self, command: SessionCommand) {
        match command {
            SessionCommand::Claim(claim) => self.claim(*claim),
            SessionCommand::Submit { session, submission } => self.submit(session, *submission),
            SessionCommand::Abstain { session, set, name, group, reason } => {
                if let Some(rank) = self.note_activity(session) {
                    self.handle(Event::Refused { rank, set, name, group, reason });
                }
            }
            SessionCommand::Withdraw { session, request, reason } => {
                if let Some(rank) = self.note_activity(session) {
                    self.withdraw(session, rank, request, reason);
                }
            }
            SessionCommand::Release { session, request } => {
                if self.note_activity(session).is_some() {
                    self.release(session, request);
                }
            }
            SessionCommand::Heartbeat { session: id } => {
                if self.note_activity(id).is_some()
                    && let Some(session) = self.sessions.get_mut(id)
                {
                    session.answer_heartbeat();
                }
            }
            SessionCommand::Goodbye { session, reason } => {
                if let Some(session) = self.sessions.get_mut(session) {
                    // A second one, of a client that is dropped, knows less.
                    session.goodbye.get_or_insert(reason);
                }
            }
            SessionCommand::Ring { session, ring } => {
                if let Some(session) = self.sessions.get_mut(session) {
                    session.switch_to(*ring);
                }
            }
            SessionCommand::Room { session } => {
                if let Some(session) = self.sessions.get_mut(session) {
                    session.flush_ring();
                }
            }
            SessionCommand::Closed { session, reason } => self.stream_ended(session, reason),
            SessionCommand::Record(request) => self.record(request),
            SessionCommand::EndRecording(recording) => self.end_recording(recording),
        }
    }

    fn handle_control_command(&mut self, command: ControlCommand) {
        match command {
            ControlCommand::PluginsAnswered => self.resolve_parked(),
            ControlCommand::Identity(identity) => self.install_identity(&identity),
            ControlCommand::WorkerExited(exited) => self.worker_exited(exited),
            ControlCommand::Snapshot(reply) => {
                let snapshot = self.snapshot();
                // Collected beside the loop: a busy lane answers late. The asker may have gone.
                tokio::spawn(async move { drop(reply.send(snapshot.await)) });
            }
        }
    }

    fn install_identity(&mut self, identity: &Arc<Identity>) {
        if let Err(error) = self.control.install_identity(Arc::clone(identity)) {
            tracing::warn!(%error, "the control port keeps its certificate");
        }
        if let Some(Err(error)) = self.web_tls.as_ref().map(|tls| tls.install_identity(identity)) {
            tracing::warn!(%error, "gRPC-Web keeps its certificate");
        }
        self.send_to_lanes(|| LaneCommand::Identity(Arc::clone(identity)));
    }

    fn handle_report(&mut self, report: LaneReport) {
        match report {
            LaneReport::Done(epoch, seq, trace) => {
                self.note_work(seq, trace);
                let operation = self.operations.name(epoch, seq).map(tracing::field::display);
                tracing::debug!(epoch = epoch.0, seq = seq.0, operation, "a lane has done its part of an operation");
                if self.operations.part_done(epoch, seq) {
                    self.handle(Event::Executed { epoch, seq });
                }
            }
            LaneReport::Dropped(epoch, last) => {
                if self.operations.lane_dropped(epoch, last) {
                    // An operation with a plugin is dropped by itself.
                    self.plugins.discard(epoch, last);
                    self.handle(Event::Cancelled { epoch, last });
                    if !self.operations.is_cancelling() {
                        self.send_deferred_failures();
                    }
                }
            }
            LaneReport::Failed { epoch, seq, reason, plugin } => {
                let operation = self.operations.name(epoch, seq).map(tracing::field::display);
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
            LaneReport::Released(epoch) => self.operations.lane_released(epoch),
            LaneReport::LinkDown { peer, closed, reason } => self.handle(Event::LaneDown { peer, closed, reason }),
            LaneReport::Ended(lane) => {
                self.fatal.get_or_insert_with(|| format!("the thread of {lane} has ended; see the log above"));
            }
        }
    }

    fn handle_port(&mut self, event: PortEvent) {
        match event {
            PortEvent::Up { peer, hello } => {
                if let Some(path) = self.control.path(peer) {
                    FromSidecar::Linked { peer: peer.0, address: path.peer_address.ip() }.send();
                }
                self.handle(Event::LinkUp { peer, lanes: hello.lanes });
            }
            PortEvent::Frame { from, frame } if frame.header.kind == FrameKind::Control => {
                match Control::from_frame(&frame) {
                    Ok(message) => {
                        let (epoch, seq) = (frame.header.epoch, frame.header.seq);
                        self.handle(Event::Control { from, epoch, seq, message });
                    }
                    Err(error) => self.disconnect(from, &error.to_string()),
                }
            }
            PortEvent::Frame { from, frame } => {
                self.disconnect(from, &format!("a {:?} frame on the control connection", frame.header.kind));
            }
            PortEvent::Sent { .. } => {}
            PortEvent::Down { peer, reason } => {
                // A peer that closes before there was an epoch is leaving because the job is over; one that has a reason
                // of its own says it to the launcher itself.
                if !self.begun {
                    self.liveness.note_peer_left();
                    if !matches!(reason, DownReason::ClosedByPeer(_)) {
                        self.fatal = Some(Code::PeerMissing.mark(&format!("{peer} did not come: {reason}")));
                    }
                }
                let reason = reason.to_string();
                self.handle(Event::LinkDown { peer, reason });
            }
        }
    }

    // === What the engine wants ===

    /// Until there is nothing left to do, or until links and heartbeats need their turn: then the rest waits for the next one.
    fn perform_actions(&mut self) {
        self.backpressure.begin();
        while self.backpressure.allows(&self.control) {
            let action = self.engine.poll_action();
            self.note_traces();
            let Some(action) = action else { return self.backpressure.finish() };
            match action {
                Action::Send { to, epoch, seq, message } => self.send(to, epoch, seq, message),
                Action::EpochBegan { epoch } => self.begin_epoch(epoch),
                Action::EpochEnded { epoch, failure } => self.end_epoch(epoch, &failure),
                Action::Admit(admission) => self.admit(&admission),
                Action::Commit { epoch, seq } => self.commit(epoch, seq),
                Action::SetForgotten { set } => self.plugins.forget_set(set),
                Action::Cancel { epoch, last, dropped } => self.cancel(epoch, last, &dropped.into()),
                Action::Complete { rank, request, outcome } => self.complete(rank, request, outcome),
                Action::Notice { sidecars, ranks, text } => self.notice(&sidecars, &ranks, &text),
                Action::Disconnect { peer, reason } => self.disconnect(peer, &reason),
                Action::EndSession { rank, failure } => self.end_session(rank, &failure),
            }
        }
    }

    fn send(&mut self, to: SidecarIndex, epoch: Epoch, seq: Seq, message: Control) {
        let frame = Outgoing::Frame(message.into_frame(epoch, seq));
        let sent = match self.control.send(to, frame.clone()) {
            Err(SendError::NoLink(_)) => {
                self.control.open(to, self.control_role(to));
                self.control.send(to, frame)
            }
            sent => sent,
        };
        match sent {
            Ok(()) => self.backpressure.sent(to, self.control.queued_bytes(to)),
            Err(SendError::NoLink(_)) => {
                tracing::debug!(peer = to.0, "a control message is not sent: the link is gone");
            }
            // Everybody counts on control messages: a peer that does not take them is given up.
            Err(full @ SendError::Full { .. }) => self.disconnect(to, &full.to_string()),
        }
    }

    /// Everybody dials the one above.
    fn control_role(&self, peer: SidecarIndex) -> Role {
        if self.engine.control_parent() == Some(peer) { Role::Dial } else { Role::Await }
    }

    fn disconnect(&mut self, peer: SidecarIndex, reason: &str) {
        tracing::error!(peer = peer.0, reason = Failure::line(reason), "a peer broke the protocol");
        self.control.close(peer, reason);
        self.handle(Event::LinkDown { peer, reason: format!("protocol violation: {reason}") });
    }

    fn begin_epoch(&mut self, epoch: Epoch) {
        self.plugins.clear();
        self.begun = true;
        self.running = Some(epoch);
        tracing::info!(epoch = epoch.0, ranks = self.world.size(), "an epoch has begun");
        self.inline.begin_epoch(epoch);
        self.send_to_lanes(|| LaneCommand::Epoch(epoch));
        let Self { sessions, world, me, .. } = self;
        for session in sessions.iter_mut() {
            let view = epoch_view(world, *me, session.rank, epoch);
            session.send(Message::EpochBegan(view.into_message()));
        }
    }

    fn end_epoch(&mut self, epoch: Epoch, failure: &Failure) {
        tracing::info!(epoch = epoch.0, cause = ?failure.cause, reason = failure.reason, "the epoch is over");
        self.running = None;
        self.liveness.note_end(failure);
        // Nothing is submitted in these sessions any more, so that no memory is used again.
        self.send_deferred_failures();
        self.operations.end_epoch(epoch);
        self.inline.end_epoch(epoch);
        self.send_to_lanes(|| LaneCommand::EpochEnd(epoch));
        for session in self.sessions.iter_mut().filter(|session| session.claimed_during != Some(epoch)) {
            session.send(Message::EpochEnded(v1::EpochEnded { epoch: epoch.0, failure: Some(failure.into()) }));
        }
    }

    fn send_to_lanes(&mut self, command: impl Fn() -> LaneCommand) {
        self.send_to_first_lanes(self.lanes.len(), command);
    }

    fn send_to_first_lanes(&mut self, count: usize, command: impl Fn() -> LaneCommand) {
        let unresponsive = self.lanes.iter().take(count).any(|lane| !lane.send(command()));
        if unresponsive {
            self.fatal.get_or_insert_with(|| "a lane's thread has ended; see the log above".to_owned());
        }
    }

    fn admit(&mut self, admission: &Arc<Admission>) {
        let (epoch, seq, tensors) = (admission.epoch, admission.seq, &admission.tensors);
        let operation = tensors.first().map(|tensor| tracing::field::display(&tensor.name));
        tracing::debug!(epoch = epoch.0, seq = seq.0, operation, tensors = tensors.len(), "an operation begins");
        let is_inline = InlineExecutor::takes(admission);
        self.plugins.begin(admission);
        let threads = admission.plan.lanes();
        match self.operations.admit(admission, threads, &mut self.sessions) {
            Ok(memory) if is_inline => self.perform(admission, memory),
            Ok(memory) => {
                self.send_to_first_lanes(threads, || LaneCommand::Admit(Arc::clone(admission), Arc::clone(&memory)));
            }
            Err(error) => {
                let reason = format!("no memory for the result: {error:#}");
                self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin: false });
            }
        }
    }

    /// What a codec is to remember of an operation stands.
    fn commit(&mut self, epoch: Epoch, seq: Seq) {
        tracing::trace!(epoch = epoch.0, seq = seq.0, "an operation with a plugin stands");
        self.plugins.commit(epoch, seq);
    }

    /// Has the lanes drop operations.
    fn cancel(&mut self, epoch: Epoch, last: Seq, dropped: &Arc<[Seq]>) {
        tracing::debug!(epoch = epoch.0, last = last.0, operations = dropped.len(), "operations are dropped");
        self.operations.cancel((epoch, last), dropped);
        self.send_to_lanes(|| LaneCommand::Cancel(epoch, last, Arc::clone(dropped)));
    }

    /// Performs a small operation on this thread.
    fn perform(&mut self, admission: &Arc<Admission>, memory: Arc<OperationMemory>) {
        self.backpressure.performed();
        let (epoch, seq) = (admission.epoch, admission.seq);
        match self.inline.perform(admission, memory) {
            Ok(()) => {
                self.note_inline_work(seq);
                if self.operations.part_done(epoch, seq) {
                    self.handle(Event::Executed { epoch, seq });
                }
            }
            Err(reason) => self.handle(Event::ExecutionFailed { epoch, seq, reason, plugin: false }),
        }
    }

    fn complete(&mut self, rank: Rank, request: RequestId, outcome: Result<Completion, Failure>) {
        let Self { sessions, operations, .. } = self;
        let session = sessions.of_rank(rank);
        match (outcome, session) {
            (Ok(completion), Some(session)) => deliver(session, operations, request, completion),
            (Ok(completion), None) => operations.release(result_id(rank, &completion), rank),
            (Err(failure), Some(session)) => {
                let operation = failure.tensor.as_ref().map(tracing::field::display);
                let reason = &failure.reason;
                tracing::debug!(rank = rank.0, request = request.0, operation, reason, "a request has failed");
                let is_written = session.pending.get(&request).is_some_and(|pending| pending.in_output);
                if is_written && operations.is_cancelling() {
                    operations.defer_failure((session.id, request, failure));
                } else {
                    fail(session, request, &failure);
                }
            }
            (Err(_), None) => {}
        }
    }

    /// Tells the failures that were put off.
    fn send_deferred_failures(&mut self) {
        for (id, request, failure) in self.operations.take_deferred() {
            if let Some(session) = self.sessions.get_mut(id) {
                fail(session, request, &failure);
            }
        }
    }

    fn notice(&mut self, sidecars: &[SidecarIndex], ranks: &[Rank], text: &str) {
        tracing::warn!(?sidecars, ?ranks, "{text}");
        for session in self.sessions.iter_mut() {
            session.send(Message::Notice(v1::Notice {
                text: text.to_owned(),
                suspect_ranks: ranks.iter().map(|rank| rank.0).collect(),
                suspect_sidecars: sidecars.iter().map(|sidecar| sidecar.0).collect(),
            }));
        }
    }

    /// A worker that messages do not reach is treated as gone.
    fn end_unresponsive_sessions(&mut self) {
        let lost = |session: &mut Session| {
            let reason = session.lost().filter(|_| session.closing.is_none())?;
            Some((session.id, reason.to_owned()))
        };
        let lost: Vec<(SessionId, String)> = self.sessions.iter_mut().filter_map(lost).collect();
        for (id, reason) in lost {
            // Its process may have ended, so that messages find nobody, before the end of its stream is read.
            self.stream_ended(id, reason);
            self.perform_actions();
        }
    }

    fn end_session(&mut self, rank: Rank, failure: &Failure) {
        let Some(session) = self.sessions.of_rank(rank) else { return };
        let id = session.id;
        session.send(Message::EpochEnded(v1::EpochEnded { epoch: 0, failure: Some(failure.into()) }));
        self.close_session(id, &failure.reason);
    }

    /// The state of everything at this moment; lanes that do not answer in time count as zeros.
    pub(crate) fn snapshot(&self) -> impl Future<Output = Snapshot> + Send + use<> {
        let asked: Vec<_> = self.lanes.iter().map(LaneHandle::ask_stats).collect();
        let protected = |peer| Some((peer, self.control.security(peer)?));
        let mut snapshot = Snapshot {
            status: self.engine.status(self.now()),
            engine: self.engine.stats().clone(),
            control: self.control.stats(),
            lanes: Vec::with_capacity(asked.len()),
            inline: self.inline.stats(),
            results: self.operations.results().usage(),
            plugins: self.plugins.stats(),
            sessions: self.sessions.len(),
            ring_sessions: self.sessions.with_ring(),
            up: self.started.elapsed(),
            paths: self.control.paths(),
            transport: self.transport,
            security: self.world.sidecars().into_iter().filter_map(protected).collect(),
            inputs_mapped_bytes: self.segments.mapped_bytes(),
        };
        async move {
            for answer in asked {
                let answer = tokio::time::timeout(STATS_TIMEOUT, answer).await;
                snapshot.lanes.push(answer.map(Result::unwrap_or_default).unwrap_or_default());
            }
            snapshot
        }
    }
}

fn far_future() -> Deadline {
    Deadline::now() + Duration::from_secs(3_600)
}

/// How long a lane may take to report its counters.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);
/// Commands handled in one turn of the loop, so that links and lanes get theirs.
const COMMANDS_AT_ONCE: usize = 256;
