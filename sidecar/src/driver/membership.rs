//! Enters the memberships of an elastic job, which the launcher decides; `ronde_bootstrap::messages` has the exchange.
//!
//! [`Memberships`] has the rules. Here they are carried out: engine, links and lanes become those of the next membership,
//! sessions that took part in an epoch are past, and workers get their ranks when the launcher commits.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, ensure};
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::interfaces;
use ronde_bootstrap::messages::{FromSidecar, Membership, Peer, TokenFile};
use ronde_engine::{Busy, Event, Memberships, Time};
use ronde_rpc::v1::server_message::Message;
use ronde_rpc::{RankToken, v1};
use ronde_shm::WorkerToken;
use ronde_transport::DownReason;
use ronde_wire::{Cause, Epoch, Failure, Lane, Rank, SidecarIndex, WorkerNumber, World};

use super::Driver;
use crate::operation::lanes::LaneCommand;
use crate::session::directory::RuntimeDir;
use crate::session::table::{Seat, SessionId};

/// What the driver has besides the rules of [`Memberships`].
pub(crate) struct MembershipState {
    rules: Memberships,
    /// The one that is entered next.
    next: Option<(Membership, World)>,
    /// Where tokens of new workers are written; `None` in a job that is not elastic.
    directory: Option<Arc<RuntimeDir>>,
}

impl MembershipState {
    /// The first membership of a sidecar.
    pub(crate) fn new(is_elastic: bool, first: &Membership, directory: &Arc<RuntimeDir>) -> Self {
        match is_elastic {
            true => Self::elastic(first, Arc::clone(directory)),
            false => Self::fixed(first.seats.len()),
        }
    }

    /// The only membership of a job that is not elastic.
    pub(crate) fn fixed(size: usize) -> Self {
        let workers = (0..).map(WorkerNumber).take(size).collect();
        Self { rules: Memberships::new(1, workers, true), next: None, directory: None }
    }

    /// The first membership of a sidecar in an elastic job, which the launcher has yet to commit.
    fn elastic(first: &Membership, directory: Arc<RuntimeDir>) -> Self {
        let rules = Memberships::new(first.number, workers_of(first), false);
        Self { rules, next: None, directory: Some(directory) }
    }

    /// The number of the current membership.
    pub(super) fn number(&self) -> u64 {
        self.rules.number()
    }

    /// Whether the job is elastic.
    pub(super) fn is_elastic(&self) -> bool {
        self.directory.is_some()
    }

    /// When waiting for others ends, if this sidecar waits for them.
    pub(super) fn due(&self) -> Option<Time> {
        self.rules.poll_timeout()
    }
}

impl Driver {
    /// The launcher announces the next membership: its new workers get their tokens, and nothing else changes yet.
    pub(super) fn prepare_membership(&mut self, next: Membership) {
        let number = next.number;
        match self.accept_membership(next) {
            Ok(token_files) => {
                FromSidecar::Prepared { membership: number, token_files }.send();
            }
            Err(error) => {
                // Workers may have run, so this is not an error of settings.
                let text = format!("membership {number} of the job cannot be entered: {error:#}");
                self.fatal.get_or_insert_with(|| Code::SidecarCannotGoOn.mark(&text));
            }
        }
    }

    fn accept_membership(&mut self, next: Membership) -> anyhow::Result<Vec<TokenFile>> {
        let directory = self.memberships.directory.clone().context("the job is not elastic")?;
        let world = world_of(&next.placement(), &next.peers, self.me)?;
        let accepted = self.memberships.rules.change(self.me, next.number, workers_of(&next), &world);
        accepted.map_err(anyhow::Error::msg)?;
        let mine = next.seats.iter().filter(|seat| seat.sidecar == self.me.0).map(|seat| WorkerNumber(seat.worker));
        let mut token_files = Vec::new();
        for worker in mine {
            if !self.clients.sessions.admits(worker) {
                let (token, file) = directory.write_token(worker, None)?;
                self.clients.sessions.add_worker(worker, token);
                self.clients.streams.add_worker(worker, stream_token(&token));
                token_files.push(file);
            }
        }
        tracing::info!(membership = next.number, ranks = world.size(), "another membership is prepared");
        self.memberships.next = Some((next, world));
        Ok(token_files)
    }

    /// The launcher releases the next membership: workers are notified, and it is entered when the epoch is over.
    pub(super) fn release_membership(&mut self, number: u64, added: u32, removed: u32) {
        if !self.memberships.rules.release(number) {
            return tracing::warn!(membership = number, "a membership is released that is not the next one");
        }
        for session in self.clients.sessions.iter_mut().filter(|session| session.active_rank().is_some()) {
            session.send(Message::MembershipChange(v1::MembershipChange { membership: number, added, removed }));
        }
        self.enter_when_idle();
    }

    /// Enters the next membership once it is released and nothing of the current one is left here.
    pub(super) fn enter_when_idle(&mut self) {
        if !self.memberships.rules.is_released() {
            return;
        }
        let here = self.epoch.running.is_some() || !self.engine.is_idle() || !self.execution.operations.is_unused();
        let busy = Busy { here, for_others: !self.engine.is_drained() };
        let (now, lanes) = (self.now(), self.execution.lanes.len());
        if self.memberships.rules.poll_enter(now, busy, lanes) {
            self.enter();
        }
    }

    fn enter(&mut self) {
        let Some((Membership { number, peers, .. }, world)) = self.memberships.next.take() else { return };
        tracing::info!(membership = number, ranks = world.size(), "the sidecar enters another membership");
        self.end_timeline_of(Rank(0));
        self.clients.sessions.end_membership();
        let served = world.ranks_of(self.me);
        let limit_bytes = result_bytes_max(self.clients.arena_bytes_max, self.me, &world);
        self.execution.operations.enter(limit_bytes, served);
        self.execution.plugins.clear();
        self.engine.enter(self.now(), world.clone(), Epoch::before_membership(number));
        self.epoch.has_begun = false;
        self.world = world;
        self.clients.streams.set_common_lanes(common_lanes(&peers));
        self.links.control.enter(number, addresses(&peers, |peer| Some(peer.control)));
        for (lane, handle) in (0..).map(Lane).zip(&self.execution.lanes) {
            let peers = addresses(&peers, |peer| peer.lanes.get(usize::from(lane.0)).copied());
            if !handle.send(LaneCommand::Enter { membership: number, peers }) {
                self.fatal.get_or_insert_with(|| "a lane's thread has ended; see the log above".to_owned());
            }
        }
    }

    /// A lane has entered the next membership; the last one completes it.
    pub(super) fn lane_entered(&mut self, number: u64) {
        if self.memberships.rules.lane_entered(number) {
            FromSidecar::Entered { membership: number }.send();
        }
    }

    /// All sidecars have entered the membership: connects to them, and gives waiting workers their ranks.
    pub(super) fn commit_membership(&mut self, number: u64) {
        if !self.memberships.rules.commit(number) {
            return tracing::warn!(membership = number, "a membership is committed that was not entered last");
        }
        self.open_control_links();
        let waiting = self.clients.sessions.iter_mut().filter(|session| session.seat == Seat::Waiting);
        let waiting: Vec<(SessionId, WorkerNumber)> = waiting.map(|session| (session.id, session.worker)).collect();
        for (id, worker) in waiting {
            self.attach(id, worker);
        }
    }

    /// Gives a session the rank of its worker, if the membership is committed and has one for it. Ends the session of a
    /// worker that was removed from the job.
    pub(super) fn attach(&mut self, id: SessionId, worker: WorkerNumber) {
        if self.memberships.rules.is_removed(worker) {
            let reason = format!("{worker} has been removed from elastic job; its process can exit");
            let failure = Failure::new(Cause::ShutDown, reason);
            if let Some(session) = self.clients.sessions.get_mut(id) {
                session.send(Message::EpochEnded(v1::EpochEnded { epoch: 0, failure: Some((&failure).into()) }));
            }
            return self.close_session(id, &failure.reason);
        }
        let Some(rank) = self.memberships.rules.open_rank(worker) else { return };
        let Some(session) = self.clients.sessions.get_mut(id) else { return };
        session.claimed_during = self.epoch.running;
        self.clients.segments.seat(&session.token, rank);
        self.clients.sessions.seat(id, rank);
        if self.memberships.is_elastic() {
            FromSidecar::Seated { worker: worker.0, membership: self.memberships.number() }.send();
        }
        self.handle(Event::RankAttached { rank });
    }

    /// The launcher decides whether a worker that hangs is replaced.
    pub(super) fn report_hung(&self, rank: Rank, text: String) {
        tracing::warn!(rank = rank.0, "{text}");
        if let Some(worker) = self.memberships.rules.worker_of(rank) {
            FromSidecar::Hung { worker: worker.0, membership: self.memberships.number(), text }.send();
        }
    }

    /// The process of a worker has ended, so its number is not claimed again.
    pub(super) fn forget_worker(&mut self, worker: WorkerNumber) {
        if let Some(directory) = &self.memberships.directory
            && self.clients.sessions.remove_worker(worker)
        {
            self.clients.streams.remove_worker(worker);
            directory.remove_token(worker);
        }
    }

    /// A peer of an elastic job was dialled in vain, or one side does not accept the other. The engine dials again; the
    /// launcher knows who is lost, and decides which of both has to leave if neither is.
    pub(super) fn report_unreachable(&self, peer: SidecarIndex, reason: &DownReason) {
        if self.memberships.is_elastic() && self.memberships.rules.is_open() {
            let (membership, text) = (self.memberships.number(), reason.to_string());
            FromSidecar::Unreachable { peer: peer.0, membership, text }.send();
        }
    }
}

/// The token of a worker, as mem.sock knows it.
pub(crate) fn stream_token(token: &RankToken) -> WorkerToken {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(token.as_bytes());
    WorkerToken::from_bytes(bytes)
}

/// The lanes that all of these sidecars have; streams use no others.
pub(crate) fn common_lanes(peers: &[Peer]) -> u16 {
    let fewest = peers.iter().map(|peer| peer.lanes.len()).min().unwrap_or(1);
    u16::try_from(fewest).unwrap_or(u16::MAX)
}

fn workers_of(membership: &Membership) -> Vec<WorkerNumber> {
    membership.seats.iter().map(|seat| WorkerNumber(seat.worker)).collect()
}

/// Builds the placement of ranks on sidecars.
///
/// # Errors
/// When it is malformed, a sidecar with ranks has no address, or `me` has no rank.
pub(crate) fn world_of(placement: &[u32], peers: &[Peer], me: SidecarIndex) -> anyhow::Result<World> {
    let placement = placement.iter().map(|index| SidecarIndex(*index)).collect();
    let world = World::new(placement).context("the placement of ranks is not usable")?;
    ensure!(!world.ranks_of(me).is_empty(), "no rank is placed on {me}; a sidecar without ranks has nothing to do");
    for sidecar in world.sidecars() {
        let known = peers.iter().any(|peer| peer.sidecar == sidecar.0);
        ensure!(known, "{sidecar} serves ranks, but there is no address for it");
    }
    Ok(world)
}

/// Returns where to dial each peer's port that `port` names, best address first. A peer may offer fewer lanes; plans
/// then use no more than those, so a missing address is never dialled.
pub(crate) fn addresses(
    peers: &[Peer],
    port: impl Fn(&Peer) -> Option<SocketAddr>,
) -> HashMap<SidecarIndex, Vec<SocketAddr>> {
    let own = interfaces::of_this_host();
    let ways = |peer: &Peer| Some((SidecarIndex(peer.sidecar), interfaces::routes_to(peer, port(peer)?.port(), &own)));
    peers.iter().filter_map(ways).collect()
}

/// Returns the size of the result arena. Each session limits its submissions, and an all-gather's result is larger by
/// the number of ranks. The arena must hold the results of all sessions, because nothing may fail here after ordering.
/// This is address space; a result takes pages only when it needs them.
pub(crate) fn result_bytes_max(arena_bytes_max: u64, me: SidecarIndex, world: &World) -> u64 {
    let sessions = world.ranks_of(me).len() as u64;
    arena_bytes_max.saturating_mul(sessions).saturating_mul(1 + world.size() as u64)
}
