//! The begin and the end of epochs, for lanes and for sessions.
//!
//! When an epoch ends, lanes may be in the middle of its operations: they read inputs and write results in the workers'
//! own memory. A worker that receives a failure uses that memory for something else. So the order is: the lanes drop
//! the epoch, then the workers receive the failures of its requests, then its end, then the begin of the next one. A
//! lane needs at most one step for that, which a plugin's time limit bounds.

use std::collections::VecDeque;

use ronde_rpc::v1;
use ronde_rpc::v1::server_message::Message;
use ronde_wire::{Epoch, Failure};

use super::Driver;
use crate::operation::delivery::epoch_view;
use crate::operation::lanes::ExecuteCommand;
use crate::session::table::{Seat, Session, SessionId};

/// The epoch.
#[derive(Default)]
pub(super) struct EpochState {
    /// The current epoch.
    pub(super) running: Option<Epoch>,
    /// Whether an epoch has begun. Before the first one, a link that does not connect is fatal.
    pub(super) has_begun: bool,
    /// What sessions have yet to receive, in order. It grows only while lanes drop an epoch.
    announcements: VecDeque<Announcement>,
}

/// A begin or an end for the sessions that were live then.
struct Announcement {
    epoch: Epoch,
    sessions: Vec<SessionId>,
    /// Why the epoch ended; `None` for a begin.
    ended: Option<Failure>,
}

impl Driver {
    pub(super) fn begin_epoch(&mut self, epoch: Epoch) {
        self.execution.plugins.clear();
        self.epoch.has_begun = true;
        self.epoch.running = Some(epoch);
        self.note_epoch(epoch);
        tracing::info!(epoch = epoch.0, ranks = self.world.size(), "an epoch has begun");
        self.execution.inline.handle(ExecuteCommand::Epoch(epoch));
        self.send_to_lanes(|| ExecuteCommand::Epoch(epoch).into());
        let active = self.clients.sessions.iter_mut().filter(|session| session.active_rank().is_some());
        let begin = |session: &mut Session| {
            session.seat = Seat::Active { in_epoch: true };
            session.id
        };
        let sessions = active.map(begin).collect();
        self.announce(Announcement { epoch, sessions, ended: None });
    }

    pub(super) fn end_epoch(&mut self, epoch: Epoch, failure: &Failure) {
        tracing::info!(epoch = epoch.0, cause = ?failure.cause, reason = failure.reason, "the epoch is over");
        self.epoch.running = None;
        self.liveness.note_end(failure);
        self.record_failure(failure);
        self.execution.operations.end_epoch(epoch);
        self.execution.device.queue.clear();
        self.execution.inline.handle(ExecuteCommand::EpochEnd(epoch));
        self.send_to_lanes(|| ExecuteCommand::EpochEnd(epoch).into());
        let is_concerned =
            |session: &&mut Session| session.active_rank().is_some() && session.claimed_during != Some(epoch);
        let concerned = self.clients.sessions.iter_mut().filter(is_concerned);
        let sessions = concerned.map(|session| session.id).collect();
        self.announce(Announcement { epoch, sessions, ended: Some(failure.clone()) });
    }

    fn announce(&mut self, announcement: Announcement) {
        self.epoch.announcements.push_back(announcement);
        self.send_announcements();
    }

    /// Sends announcements up to the end of an epoch that lanes have not dropped.
    pub(super) fn send_announcements(&mut self) {
        let operations = &self.execution.operations;
        while let Some(next) =
            self.epoch.announcements.pop_front_if(|next| next.ended.is_none() || !operations.is_draining(next.epoch))
        {
            let Announcement { epoch, sessions, ended } = next;
            for id in sessions {
                let Some(session) = self.clients.sessions.get_mut(id) else { continue };
                session.send(match &ended {
                    Some(failure) => {
                        Message::EpochEnded(v1::EpochEnded { epoch: epoch.0, failure: Some(failure.into()) })
                    }
                    None => {
                        let position = (session.rank, self.memberships.number());
                        Message::EpochBegan(epoch_view(&self.world, self.me, position, epoch).into_message())
                    }
                });
            }
        }
    }
}
