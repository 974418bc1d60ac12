//! Lanes with links: each has a data thread that owns a socket, reduces, encrypts and decrypts.

use anyhow::Context;
use ronde_engine::ExecutorAction;
use ronde_transport::{DownReason, NetworkPort, Outgoing, Port, PortEvent, Role, next_event};
use ronde_wire::frame::Chunk;
use ronde_wire::{FrameKind, SidecarIndex};
use tokio::sync::mpsc;

use super::core::{LaneCore, Step};
use super::{EndReport, LaneCommand, LaneConfig, LaneHandle, LaneReport, LaneStats};
use crate::streams::{StreamConfig, StreamEvent, Streams};

/// Starts a lane's thread. `make_port` runs on it, inside its runtime, so that encryption happens there.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(
    (config, streams): (LaneConfig, StreamConfig),
    make_port: impl FnOnce() -> anyhow::Result<NetworkPort> + Send + 'static,
    reports: mpsc::Sender<LaneReport>,
) -> anyhow::Result<LaneHandle> {
    let lane = config.lane;
    let body = move |receiver| {
        let _end = EndReport::new(lane, reports.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = runtime.context("cannot start the lane's runtime").and_then(|runtime| {
            runtime.block_on(async move {
                let port = make_port()?;
                let (core, streams) = (LaneCore::new(&config), Streams::new(streams));
                NetworkLane { me: config.me, core, streams, port, reports }.run(receiver).await;
                Ok(())
            })
        });
        if let Err(error) = result {
            tracing::error!("a lane has ended: {error:#}");
        }
    };
    LaneHandle::start(lane, body).context("cannot start a lane's thread")
}

/// Everything a lane owns.
struct NetworkLane {
    me: SidecarIndex,
    core: LaneCore,
    streams: Streams,
    port: NetworkPort,
    reports: mpsc::Sender<LaneReport>,
}

/// What ends one turn of the loop.
enum Turn {
    Command(Option<LaneCommand>),
    Port(PortEvent),
    Stream(StreamEvent),
    Work,
}

impl NetworkLane {
    /// Handles commands first, then received frames, then one step of work, so that new operations and chunks never
    /// wait for a long one, and the connections' own tasks run between any two steps.
    async fn run(mut self, mut commands: mpsc::Receiver<LaneCommand>) {
        let mut busy = false;
        loop {
            let turn = tokio::select! {
                biased;
                command = commands.recv() => Turn::Command(command),
                event = next_event(&mut self.port) => Turn::Port(event),
                event = self.streams.next_event() => Turn::Stream(event),
                () = tokio::task::yield_now(), if busy => Turn::Work,
            };
            match turn {
                Turn::Command(None) => return,
                Turn::Command(Some(LaneCommand::Stop(reason))) => {
                    self.port.shutdown(&reason).await;
                    return;
                }
                Turn::Command(Some(command)) => self.handle_command(command).await,
                Turn::Port(event) => self.handle_port(event).await,
                Turn::Stream(event) => self.streams.handle_event(event, &mut self.port),
                Turn::Work => {}
            }
            // Operations and streams take turns.
            busy = self.work().await;
            busy |= self.streams.work(&mut self.port);
            while let Some((peer, reason)) = self.streams.take_broken(&mut self.port) {
                self.port.close(peer, &reason);
                self.link_down(peer, DownReason::Lost(reason)).await;
            }
        }
    }

    async fn handle_command(&mut self, command: LaneCommand) {
        match command {
            LaneCommand::Execute(command) => {
                if let Some(report) = self.core.handle(command) {
                    self.report(report).await;
                }
            }
            LaneCommand::Identity(identity) => {
                if let Err(error) = self.port.install_identity(identity) {
                    tracing::warn!(%error, "a lane keeps its certificate");
                }
            }
            LaneCommand::Enter { membership, peers } => {
                let sidecars = peers.keys().copied().chain([self.me]).collect();
                self.port.enter(membership, peers);
                self.streams.enter(sidecars, &mut self.port);
                self.core.executor.handle_membership();
                self.report(LaneReport::Entered(membership)).await;
            }
            LaneCommand::Stats(request) => {
                let stats = LaneStats {
                    port: self.port.stats(),
                    paths: self.port.paths(),
                    streams: self.streams.stats(),
                    ..self.core.stats()
                };
                request.answer(stats);
            }
            LaneCommand::Gpu(command) => self.report(command.misplaced()).await,
            // It waits for no room; the loop stops.
            LaneCommand::Room | LaneCommand::Stop(_) => {}
        }
    }

    async fn handle_port(&mut self, event: PortEvent) {
        match event {
            PortEvent::Up { peer, hello } => {
                self.core.executor.handle_link_up(peer, hello.early_credit_bytes);
                self.streams.handle_up(peer);
            }
            PortEvent::Sent { peer, chunks } => self.core.executor.handle_sent(peer, chunks),
            PortEvent::Frame { from, frame } if frame.header.kind == FrameKind::Admitted => {
                self.core.executor.handle_admitted(from, frame.header.epoch, frame.header.seq);
            }
            PortEvent::StreamSent { peer, bytes } => self.streams.handle_sent(peer, bytes),
            PortEvent::Frame { from, frame } if frame.header.kind == FrameKind::Stream => {
                if let Err(violation) = self.streams.handle_frame(&mut self.port, from, &frame.payload) {
                    self.disconnect(from, &violation).await;
                }
            }
            PortEvent::Frame { from, frame } => {
                let taken = match Chunk::from_frame(frame) {
                    Ok(chunk) => {
                        self.core.tracer.received(chunk.seq, chunk.data.len());
                        self.core.executor.handle_chunk(from, chunk).map_err(|violation| violation.to_string())
                    }
                    Err(error) => Err(error.to_string()),
                };
                if let Err(violation) = taken {
                    self.disconnect(from, &violation).await;
                }
            }
            PortEvent::Down { peer, reason } => {
                self.link_down(peer, reason).await;
            }
        }
    }

    async fn disconnect(&mut self, peer: SidecarIndex, violation: &str) {
        self.port.close(peer, violation);
        self.link_down(peer, DownReason::Protocol(violation.to_owned())).await;
    }

    async fn link_down(&mut self, peer: SidecarIndex, reason: DownReason) {
        self.core.executor.handle_link_down(peer);
        self.streams.handle_down(peer, &reason, &mut self.port);
        self.report(LaneReport::LinkDown { peer, reason }).await;
    }

    /// Performs actions until one chunk's work is done; returns whether there may be more.
    async fn work(&mut self) -> bool {
        match self.core.step() {
            Step::Idle => return false,
            Step::Worked => {}
            Step::Report(report) => self.report(report).await,
            Step::Link(action) => self.handle_link(action).await,
        }
        true
    }

    async fn handle_link(&mut self, action: ExecutorAction) {
        match action {
            ExecutorAction::Open { peer } => {
                let role = if self.me < peer { Role::Dial } else { Role::Await };
                self.port.open(peer, role);
            }
            ExecutorAction::Send { to, chunk } => self.send(to, Outgoing::Chunk(chunk)).await,
            ExecutorAction::Admitted { to, epoch, seq } => {
                self.send(to, Outgoing::Frame(ronde_wire::Frame::admitted(epoch, seq))).await;
            }
            ExecutorAction::Disconnect { peer, violation } => self.disconnect(peer, &violation.to_string()).await,
            // These do not concern links; the core has handled them.
            ExecutorAction::Worked { .. } | ExecutorAction::Done { .. } | ExecutorAction::Failed { .. } => {}
        }
    }

    async fn send(&mut self, to: SidecarIndex, message: Outgoing) {
        if let Err(error) = self.port.send(to, message) {
            // Close it as well, so that the next operation with this peer opens a new link.
            self.port.close(to, &error.to_string());
            self.link_down(to, DownReason::Lost(error.to_string())).await;
        }
    }

    async fn report(&mut self, report: LaneReport) {
        // Without a control thread the process is ending.
        let _ = self.reports.send(report).await;
    }
}
