//! The control thread's loop: it connects the engine, the control links, the lanes and the sessions. It turns inputs
//! into events of the engine, and actions of the engine into messages. The driver decides nothing.

pub(crate) mod autotune;
mod backpressure;
pub(crate) mod command;
mod epochs;
mod execution;
mod flight;
mod host_queue;
mod links;
pub(crate) mod liveness;
pub(crate) mod membership;
mod parked;
mod recording;
pub(crate) mod snapshot;
mod submissions;
#[cfg(test)]
mod tests;
mod worker_exits;

pub(crate) use flight::Flight;
pub(crate) use parked::Parked;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_bootstrap::messages::{ToSidecar, WorkerExited};
use ronde_engine::{Action, Engine, EngineConfig, Event, Time};
use ronde_rpc::v1;
use ronde_rpc::v1::server_message::Message;
use ronde_transport::{MutualTls, NetworkPort, PortEvent, next_event};
use ronde_wire::control::Transport;
use ronde_wire::{Cause, Failure, Rank, SidecarIndex, WorkerNumber, World};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant as Deadline, sleep_until};

use crate::driver::autotune::AutotuneLog;
use crate::driver::backpressure::Backpressure;
use crate::driver::command::ControlCommand;
use crate::driver::epochs::EpochState;
use crate::driver::liveness::Liveness;
use crate::driver::membership::MembershipState;
use crate::operation::delivery::send_waiting;
use crate::operation::lanes::inline::InlineExecutor;
use crate::operation::lanes::{LaneHandle, LaneReport};
use crate::operation::table::Operations;
use crate::plugins::Plugins;
use crate::session::command::SessionCommand;
use crate::session::segments::Segments;
use crate::session::table::{Session, SessionId, Sessions};
use crate::streams::StreamGate;
use crate::timeline::Timeline;

/// Everything the control thread owns.
pub(crate) struct Driver {
    /// This sidecar.
    me: SidecarIndex,
    /// The membership.
    world: World,
    /// The engine, which makes all decisions.
    engine: Engine,
    /// The origin of the engine's time.
    started: Instant,
    links: Links,
    execution: Execution,
    clients: Clients,
    epoch: EpochState,
    memberships: MembershipState,
    exits: WorkerExits,
    /// The timeline that the worker of rank 0 records.
    timeline: Timeline,
    /// The log of the search for better settings.
    pub(crate) autotune: AutotuneLog,
    /// The flight recorder.
    pub(crate) flight: Flight,
    /// Bounds the work of one turn of the loop.
    backpressure: Backpressure,
    /// Whether the sidecar ends when the workers have left.
    pub(crate) liveness: Liveness,
    /// Why the sidecar must end, if it must.
    pub(crate) fatal: Option<String>,
}

/// The links to other sidecars for control messages.
pub(crate) struct Links {
    /// The port that owns them.
    pub(crate) control: NetworkPort,
    /// Receives new certificates, too, if gRPC-Web is served over TLS.
    pub(crate) web_tls: Option<Arc<MutualTls>>,
    /// The transport of these links and of the lanes' links.
    pub(crate) transport: Transport,
}

/// What executes operations.
pub(crate) struct Execution {
    /// The data threads.
    pub(crate) lanes: Vec<LaneHandle>,
    /// Performs small operations on this thread.
    pub(crate) inline: InlineExecutor,
    /// The operations that are being performed, and their results.
    pub(crate) operations: Operations,
    /// The plugins that requests may name, and the state that codecs keep.
    pub(crate) plugins: Arc<Plugins>,
    /// How operations in device memory are executed.
    pub(crate) device: DeviceExecution,
}

/// What executes operations in device memory.
#[derive(Default)]
pub(crate) struct DeviceExecution {
    /// The index of its lane, the last one; `None` if the sidecar uses no GPUs.
    pub(crate) lane: Option<usize>,
    /// Whether ranks of a sidecar may be reduced with each other before others.
    pub(crate) is_hierarchical: bool,
    /// What the other lanes get when contributions have come from devices.
    pub(crate) queue: execution::Waiting,
    /// What the sidecar uses, for display.
    pub(crate) gpus: GpuState,
}

/// Whether the sidecar uses GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum GpuState {
    /// They were not asked for.
    #[default]
    Off,
    /// They were asked for; why they cannot be used.
    Unavailable(String),
    /// It does.
    Used {
        /// How many there are.
        gpus: usize,
        /// The version of NCCL.
        nccl: (u32, u32, u32),
    },
}

/// The local workers.
pub(crate) struct Clients {
    /// Their sessions.
    pub(crate) sessions: Sessions,
    /// Their shared memory.
    pub(crate) segments: Segments,
    /// Admits their streams.
    pub(crate) streams: StreamGate,
    /// Requests that wait for their plugin.
    pub(crate) parked: Parked,
    /// The limit in bytes of each session's inputs, and of its results.
    pub(crate) arena_bytes_max: u64,
    /// The silence in milliseconds after which a worker or sidecar is dead; workers receive this number.
    pub(crate) peer_timeout_ms: u64,
}

/// The exits of worker processes.
#[derive(Default)]
struct WorkerExits {
    /// Whether a launcher reports them.
    are_reported: bool,
    /// Reports that arrived before the worker's stream ended.
    early: BTreeMap<WorkerNumber, WorkerExited>,
}

/// What the driver receives.
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
    /// To serve, until it is stopped or the workers have left.
    Serving,
    /// To drain, until no session is left.
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
    /// Creates a driver before the first epoch of its first membership. `exits_are_reported`: a launcher reports how workers' processes end.
    pub(crate) fn new(
        config: EngineConfig,
        links: Links,
        execution: Execution,
        clients: Clients,
        (liveness, memberships, flight): (Liveness, MembershipState, Flight),
        exits_are_reported: bool,
    ) -> Self {
        Self {
            me: config.me,
            world: config.world.clone(),
            engine: Engine::new(config, Time(0)),
            started: Instant::now(),
            links,
            execution,
            clients,
            epoch: EpochState::default(),
            memberships,
            exits: WorkerExits { are_reported: exits_are_reported, early: BTreeMap::new() },
            timeline: Timeline::default(),
            autotune: AutotuneLog::default(),
            flight,
            backpressure: Backpressure::default(),
            liveness,
            fatal: None,
        }
    }

    /// Runs until `stop` resolves, or until the sidecar must end. When draining, it also ends after the last session
    /// has ended and peers need nothing more from this sidecar.
    pub(crate) async fn run(&mut self, inbox: &mut Inbox, phase: Phase, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        let Inbox { commands, control, reports } = inbox;
        while self.fatal.is_none() && !self.is_over(phase) {
            let close = self.next_close().map(Deadline::from_std);
            let timeout = self.engine.poll_timeout().map(|at| self.instant(at));
            let batch = self.timeline.due().map(Deadline::from_std);
            let worker = self.liveness.due().map(|due| Deadline::from_std(self.started + due));
            let parked = self.clients.parked.due().map(Deadline::from_std);
            let membership = self.memberships.due().map(|at| self.instant(at));
            let others = [close, self.backpressure.resumes_at(), batch, worker, parked, membership];
            let others = others.into_iter().flatten();
            let timeout = timeout.into_iter().chain(others).min();
            let wake = tokio::select! {
                report = reports.recv() => Wake::Lane(report),
                event = next_event(&mut self.links.control) => Wake::Port(event),
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
            self.enter_when_idle();
        }
    }

    // Handle queued inputs before polling the engine, so that they are sent and fused together.
    fn handle_waiting(&mut self, commands: &mut mpsc::Receiver<SessionCommand>) {
        for _ in 0..COMMANDS_AT_ONCE {
            let Ok(command) = commands.try_recv() else { return };
            self.handle_command(command);
        }
    }

    fn is_over(&self, phase: Phase) -> bool {
        match phase {
            Phase::Serving => self.liveness.is_over(self.clients.sessions.len(), self.epoch.running.is_some()),
            Phase::Draining => self.clients.sessions.len() == 0 && self.engine.is_drained(),
        }
    }

    /// Closes the lanes and the control links, and ends their threads. A lane that does not end in time is named, and its
    /// thread ends with the process.
    pub(crate) async fn shut_down(mut self, reason: &str) {
        let deadline = Deadline::now() + LANES_END_TIMEOUT;
        // At the same time: one that is stuck must not keep the others from closing their links.
        let lanes = std::mem::take(&mut self.execution.lanes).into_iter();
        let mut stopping: JoinSet<_> = lanes.map(|lane| lane.stop(reason.to_owned(), deadline)).collect();
        while let Some(stopped) = stopping.join_next().await {
            if let Ok(Err(lane)) = stopped {
                let waited = LANES_END_TIMEOUT.as_secs();
                tracing::error!("{lane} has not ended within {waited} s, and the sidecar ends without it");
            }
        }
        self.links.control.shutdown(reason).await;
    }

    /// Ends all remaining sessions: for a shutdown, or because of a failure of this sidecar. Lanes may still use the
    /// workers' memory: a client does not use it again after such an end.
    pub(crate) fn end_sessions(&mut self, cause: Cause, reason: &str) {
        let failure = Failure::new(cause, reason).with_sidecar(self.me);
        for session in self.clients.sessions.iter_mut() {
            session.send(Message::EpochEnded(v1::EpochEnded { epoch: 0, failure: Some((&failure).into()) }));
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

    // === Inputs ===

    fn handle_command(&mut self, command: SessionCommand) {
        match command {
            SessionCommand::Claim(claim) => self.claim(*claim),
            SessionCommand::Submit { session, submission } => self.submit(session, *submission),
            SessionCommand::Abstain { session, set, name, group, reason } => {
                if let Some(rank) = self.note_activity(session) {
                    self.handle(Event::Refused { rank, set, name, group, members: Vec::new(), reason });
                }
            }
            SessionCommand::Withdraw { session, request, reason } => {
                if let Some(rank) = self.note_activity(session) {
                    self.record_timeout(rank, &reason);
                    self.withdraw(session, rank, request, reason);
                }
            }
            SessionCommand::Release { session, request } => {
                if self.note_activity(session).is_some() {
                    self.release(session, request);
                }
            }
            SessionCommand::Heartbeat { session: id } => {
                self.note_activity(id);
                if let Some(session) = self.clients.sessions.get_mut(id) {
                    session.answer_heartbeat();
                }
            }
            SessionCommand::GpuUse { session, used } => {
                if let Some(session) = self.clients.sessions.get_mut(session) {
                    session.gpus.note(used.0, used.1);
                }
            }
            SessionCommand::ShutDown { session, reason } => {
                if let Some(session) = self.clients.sessions.get_mut(session) {
                    // A second reason comes from a client that is being dropped; the first one is better.
                    session.shutdown_reason.get_or_insert(reason);
                }
            }
            SessionCommand::Ring { session, ring } => {
                if let Some(session) = self.clients.sessions.get_mut(session) {
                    session.switch_to(*ring);
                }
            }
            SessionCommand::Room { session } => {
                if let Some(session) = self.clients.sessions.get_mut(session) {
                    send_waiting(session, &mut self.execution.operations);
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
            ControlCommand::Launcher(message) => self.handle_launcher(*message),
            // The receiver may be gone, of this one and of the others.
            ControlCommand::Ping(reply) => drop(reply.send(())),
            ControlCommand::Flight(reply) => drop(reply.send(self.flight_snapshot(None))),
            ControlCommand::Snapshot(reply) => {
                let snapshot = self.snapshot();
                // Collected concurrently with the loop: a busy lane answers late. The receiver may be gone.
                tokio::spawn(async move { drop(reply.send(snapshot.await)) });
            }
        }
    }

    fn handle_launcher(&mut self, message: ToSidecar) {
        match message {
            ToSidecar::WorkerExited(exited) => self.worker_exited(exited),
            ToSidecar::Change(next) => self.prepare_membership(next),
            ToSidecar::Enter { membership, added, removed } => self.release_membership(membership, added, removed),
            ToSidecar::Commit { membership } => self.commit_membership(membership),
            ToSidecar::EndWithWorkers { within_s } => {
                let within = Duration::from_secs(u64::from(within_s));
                self.liveness.end_with_workers(self.started.elapsed() + within);
            }
            ToSidecar::Start(_) | ToSidecar::Join(_) => {
                tracing::warn!("the launcher has sent a first message again, which is ignored");
            }
        }
    }

    // === Actions of the engine ===

    /// Performs actions until none is left, or until links and heartbeats need their turn; the rest waits for the next
    /// turn.
    fn perform_actions(&mut self) {
        self.backpressure.begin();
        while self.backpressure.allows(&self.links.control) {
            let action = self.engine.poll_action();
            self.note_traces();
            let Some(action) = action else { return self.backpressure.finish() };
            match action {
                Action::Send { to, epoch, seq, message } => self.send(to, epoch, seq, message),
                Action::EpochBegan { epoch } => self.begin_epoch(epoch),
                Action::EpochEnded { epoch, failure } => self.end_epoch(epoch, &failure),
                Action::Admit(admission) => self.admit(&admission),
                Action::Commit { epoch, seq } => self.commit(epoch, seq),
                Action::SetForgotten { set } => self.execution.plugins.forget_set(set),
                Action::Cancel { epoch, last, dropped } => self.cancel(epoch, last, &dropped.into()),
                Action::Complete { rank, request, outcome } => self.complete(rank, request, outcome),
                Action::Notice { sidecars, ranks, text } => self.notice(&sidecars, &ranks, &text),
                Action::Autotuned(sample) => self.autotuned(&sample),
                Action::Hung { rank, text } => self.report_hung(rank, text),
                Action::Disconnect { peer, reason } => self.disconnect(peer, &reason),
                Action::EndSession { rank, failure } => self.end_session(rank, &failure),
            }
        }
    }

    fn notice(&mut self, sidecars: &[SidecarIndex], ranks: &[Rank], text: &str) {
        let suspect_ranks = numbers(ranks.iter().map(|rank| rank.0));
        let suspect_sidecars = numbers(sidecars.iter().map(|sidecar| sidecar.0));
        tracing::warn!(suspect_ranks, suspect_sidecars, "{text}");
        for session in self.clients.sessions.iter_mut() {
            session.send(Message::Notice(v1::Notice {
                text: text.to_owned(),
                suspect_ranks: ranks.iter().map(|rank| rank.0).collect(),
                suspect_sidecars: sidecars.iter().map(|sidecar| sidecar.0).collect(),
            }));
        }
    }

    /// Treats a worker that messages do not reach as gone.
    fn end_unresponsive_sessions(&mut self) {
        let lost = |session: &mut Session| {
            let reason = session.lost().filter(|_| session.closing.is_none())?;
            Some((session.id, reason.to_owned()))
        };
        let lost: Vec<(SessionId, String)> = self.clients.sessions.iter_mut().filter_map(lost).collect();
        for (id, reason) in lost {
            // Its process may have ended, so that sending fails before the end of its stream is read.
            self.stream_ended(id, reason);
            self.perform_actions();
        }
    }

    fn end_session(&mut self, rank: Rank, failure: &Failure) {
        let Some(session) = self.clients.sessions.of_rank(rank) else { return };
        let id = session.id;
        session.send(Message::EpochEnded(v1::EpochEnded { epoch: 0, failure: Some(failure.into()) }));
        self.close_session(id, &failure.reason);
    }
}

/// `2,3`; nothing for none.
fn numbers(of: impl Iterator<Item = u32>) -> Option<String> {
    let numbers: Vec<String> = of.map(|number| number.to_string()).collect();
    (!numbers.is_empty()).then(|| numbers.join(","))
}

fn far_future() -> Deadline {
    Deadline::now() + Duration::from_secs(3_600)
}

/// Commands handled in one turn of the loop, so that links and lanes are not starved.
const COMMANDS_AT_ONCE: usize = 256;

/// How long to wait for all lanes to end: longer than their links take, and with the time for draining less than the 10 s after
/// which a launcher kills a sidecar. What NCCL and a GPU's driver take has no bound.
const LANES_END_TIMEOUT: Duration = Duration::from_secs(4);
