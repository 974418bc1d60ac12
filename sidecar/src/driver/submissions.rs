//! Handles claims, submissions and results of sessions.

use std::time::Instant;

use bytes::Bytes;
use ronde_bootstrap::messages::FromSidecar;
use ronde_engine::Event;
use ronde_rpc::convert::{Refused, Submission};
use ronde_rpc::v1::server_message::Message;
use ronde_wire::{Cause, Failure, Rank, RequestId, limits};

use super::Driver;
use super::parked::{PARKED_FOR_MAX, ParkedRequest};
use crate::operation::delivery::{ResultBounds, accept, send_failed};
use crate::plugins::{Answer, OPEN_PER_SESSION_MAX};
use crate::session::command::ClaimRequest;
use crate::session::table::SessionId;

impl Driver {
    /// Notes a sign of life; returns the session's rank if it has one. A session without a rank submits nothing: it has
    /// received the end of its epoch, or waits for the begin of one.
    pub(super) fn note_activity(&mut self, session: SessionId) -> Option<Rank> {
        let rank = self.clients.sessions.get_mut(session)?.active_rank()?;
        self.handle(Event::RankAlive { rank });
        Some(rank)
    }

    pub(super) fn claim(&mut self, request: ClaimRequest) {
        let ClaimRequest { claim, access, protocol, session_token, outgoing, reply } = request;
        let worker = claim.worker;
        if self.clients.sessions.is_entitled(worker, &claim.token) {
            self.make_room(worker);
        }
        let claimed = self.clients.sessions.claim(worker, &claim.token, session_token, (access, outgoing));
        if let Ok(id) = claimed {
            self.liveness.note_worker();
            if let Some(uid) = access.uid() {
                let limit_bytes = self.clients.arena_bytes_max;
                self.clients.segments.open_session(session_token, uid, limit_bytes);
            }
            let message = ronde_rpc::Claimed {
                session_token: session_token.to_bytes(),
                protocol,
                heartbeat_ms: u32::try_from(limits::SESSION_HEARTBEAT_MS).unwrap_or(u32::MAX),
                peer_timeout_ms: u32::try_from(self.clients.peer_timeout_ms).unwrap_or(u32::MAX),
                arena_bytes_max: self.clients.arena_bytes_max,
                inline_bytes_max: limits::INLINE_BYTES_MAX as u64,
                pending_max: u32::try_from(access.pending_max().0).unwrap_or(u32::MAX),
                ring_bytes: access.ring_bytes(),
                device_bytes_max: access.uid().and(self.clients.segments.gpus()).map_or(0, |gpus| gpus.bytes_max()),
            };
            tracing::info!(
                worker = worker.0,
                client = claim.client,
                pid = claim.pid,
                ?access,
                "a worker has connected"
            );
            if let Some(session) = self.clients.sessions.get_mut(id) {
                session.pid = claim.pid;
                session.send(Message::Claimed(message.into_message()));
            }
            FromSidecar::Attached { worker: worker.0 }.send();
            self.attach(id, worker);
        }
        if let Err(Ok(id)) = reply.send(claimed) {
            // Its reader has given up, so nothing else would close the session.
            self.close_session(id, "its claim was answered too late");
        }
    }

    pub(super) fn submit(&mut self, id: SessionId, submission: Result<Submission, Refused>) {
        let Some(rank) = self.note_activity(id) else { return };
        if let Ok(submission) = &submission {
            self.flight.recorder.submitted(self.now(), rank, submission);
            let Submission { what, site, .. } = submission;
            let (collective, operation, site) = (what.collective.name(), what.name.clone(), site.clone());
            self.handle(Event::Called { rank, collective, operation, site });
        }
        let set_ranks = submission.as_ref().ok().and_then(|submission| self.engine.set_size(submission.what.set));
        let bounds = ResultBounds { bytes_max: self.clients.arena_bytes_max, set_ranks: set_ranks.unwrap_or(0) as u64 };
        let Some(session) = self.clients.sessions.get_mut(id) else { return };
        let accepted = submission.and_then(|submission| accept(session, &self.clients.segments, submission, bounds));
        match accepted {
            Ok(mut submission) => {
                self.flight.recorder.accepted(rank, &mut submission);
                let _ = self.resolve(id, rank, submission, Instant::now());
            }
            Err(refused) => self.refuse(id, rank, refused),
        }
    }

    /// Continues with a request that arrived at `since` once its plugin is resolved; parks it until then. Returns whether
    /// it is parked.
    fn resolve(&mut self, id: SessionId, rank: Rank, mut submission: Submission, since: Instant) -> bool {
        if let Some(call) = &submission.plugin {
            // The engine refuses an unknown process set.
            let set_ranks = self.engine.set_size(submission.what.set).unwrap_or(0);
            match self.execution.plugins.resolve(id.0, call, &submission.what, set_ranks) {
                Answer::Known(plugin) => submission.what.plugin = Some(plugin),
                Answer::Refused(reason) => {
                    self.give_back(id, rank, &submission, reason);
                    return false;
                }
                Answer::Later => {
                    self.clients.parked.park(ParkedRequest { session: id, submission, since });
                    return true;
                }
            }
        }
        let due = self.engine.contribution_bytes(rank, &submission.what);
        match self.contribution(id, submission.request, due) {
            Ok(contribution) => {
                let (request, what) = (submission.request, submission.what);
                self.flight.recorder.announced(self.now(), rank, request);
                self.handle(Event::Submitted { rank, request, what, contribution });
            }
            Err(reason) => self.give_back(id, rank, &submission, reason),
        }
        false
    }

    /// Resolves the plugins of parked requests again, those of each session in their order of arrival, after the loader has
    /// answered. Once as many of a session are parked again as it may have questions open, the rest of them is left for the
    /// next answers.
    pub(super) fn resolve_parked(&mut self) {
        for id in self.clients.parked.sessions() {
            let mut requests = self.clients.parked.take(id);
            let mut parked = 0;
            while parked < OPEN_PER_SESSION_MAX
                && let Some(ParkedRequest { submission, since, .. }) = requests.pop_front()
            {
                if let Some(rank) = self.waits_still(id, &submission) {
                    parked += usize::from(self.resolve(id, rank, submission, since));
                }
            }
            self.clients.parked.park_rest(id, requests);
        }
    }

    /// Refuses requests that have waited for a plugin for too long.
    pub(super) fn refuse_parked(&mut self) {
        for ParkedRequest { session: id, submission, .. } in self.clients.parked.take_due(Instant::now()) {
            if let Some(rank) = self.waits_still(id, &submission) {
                let name = submission.plugin.as_ref().map_or("", |call| &call.name);
                let (host, seconds) = (self.me, PARKED_FOR_MAX.as_secs());
                let reason = format!("plugin {name} was not loaded on {host} within {seconds} s; see its log");
                self.give_back(id, rank, &submission, reason);
            }
        }
    }

    /// Withdraws a request, parked or submitted.
    pub(super) fn withdraw(&mut self, id: SessionId, rank: Rank, request: RequestId, reason: String) {
        self.flight.recorder.withdrawn(rank, request);
        match self.clients.parked.withdraw(id, request) {
            Some(submission) => self.give_back(id, rank, &submission, reason),
            None => self.handle(Event::Withdrawn { rank, request, reason }),
        }
    }

    /// Returns the rank of a live session that still waits for a request.
    fn waits_still(&mut self, id: SessionId, submission: &Submission) -> Option<Rank> {
        let session = self.clients.sessions.get_mut(id)?;
        session.active_rank().filter(|_| session.pending.contains_key(&submission.request))
    }

    /// Copies the input of an accepted request that travels with its announcement; empty if nothing is `due`.
    fn contribution(&mut self, id: SessionId, request: RequestId, due: usize) -> Result<Bytes, String> {
        let pending = self.clients.sessions.get_mut(id).and_then(|session| session.pending.get(&request));
        match pending.map(|pending| &pending.input) {
            Some(input) if due > 0 => input.copy(due),
            _ => Ok(Bytes::new()),
        }
    }

    /// Refuses an accepted request.
    fn give_back(&mut self, id: SessionId, rank: Rank, submission: &Submission, reason: String) {
        let Some(session) = self.clients.sessions.get_mut(id) else { return };
        session.remove_pending(submission.request);
        self.refuse(id, rank, Refused::of(submission.request, submission.what.clone(), reason));
    }

    /// Fails a request that never reached the engine, and notifies the other ranks if possible.
    fn refuse(&mut self, id: SessionId, rank: Rank, refused: Refused) {
        let Refused { request, set, name, group, members, reason } = refused;
        let mut failure = Failure::new(Cause::Refused, reason.clone()).with_rank(rank);
        failure.tensor.clone_from(&name);
        self.flight.recorder.ended(self.now(), rank, request, Some(&failure));
        if let Some(session) = self.clients.sessions.get_mut(id) {
            send_failed(session, request, &failure);
        }
        if let Some(name) = name {
            self.handle(Event::Refused { rank, set, name, group, members, reason });
        }
    }

    pub(super) fn release(&mut self, id: SessionId, request: RequestId) {
        let Some(session) = self.clients.sessions.get_mut(id) else { return };
        if let Some(held) = session.held.remove(&request) {
            session.result_bytes -= held.result_bytes;
            self.execution.operations.release(held.result, session.rank);
        }
    }
}
