//! The engine of one sidecar's control thread: a state machine that negotiates, orders, admits and completes operations
//! and knows who is alive.
//!
//! It consists of a *participant* on every sidecar and, where rank 0 is hosted, the
//! *coordinator* of the whole job. Both work on one context; messages to this sidecar itself take an
//! internal queue instead of the network, so there is one code path for near and far.

mod activity;
mod admission;
mod agreement;
mod answers;
mod config;
mod context;
mod coordinator;
mod eager;
mod fusion;
mod groups;
mod liveness;
mod mismatch;
mod negotiation;
mod operations;
mod ordering;
mod participant;
mod performed;
mod remembered;
mod requests;
mod roster;
mod sets;
mod shapes;
mod stall;
mod status;
mod submission;
#[cfg(test)]
mod tests;
mod watch;
mod wording;

use ronde_wire::{Cause, Control, Epoch, Failure, Rank, Record, Request, Seq, SetId, SidecarIndex};

pub use self::config::EngineConfig;
pub use self::status::{EnginePhase, LinkStatus, PendingStatus, STATUS_ENTRIES_MAX, Stats, Status, WaitingTensor};

use self::activity::LastCall;
use self::context::{Context, Envelope};
use self::coordinator::Coordinator;
use self::liveness::Stamps;
use self::participant::Participant;
use self::watch::Suspects;
use crate::event::{Action, Event, Time};

/// One sidecar's engine. Pure: time is an argument, everything else that happens is an [`Event`], and everything that it
/// wants done is an [`Action`].
///
/// The caller's loop:
/// 1. [`handle_event`](Self::handle_event) for what has happened, once or several times. What is submitted between two
///    polls is announced together, and what becomes ready between them is fused together.
/// 2. [`poll_action`](Self::poll_action) until it returns `None`, performing each action in order.
/// 3. [`poll_timeout`](Self::poll_timeout); when nothing happens until then, [`handle_timeout`](Self::handle_timeout),
///    and again from 2.
///
/// Events may carry anything: no input makes it panic. Time that runs backwards is taken as standing still.
///
/// Promises:
/// - Every [`Event::Submitted`] gets exactly one [`Action::Complete`], provided that admitted operations are executed or
///   fail, and that peers are either heard or time out. This holds for withdrawn requests and for ranks that have left,
///   too; their memory may be in use until then.
/// - An epoch's [`Action::EpochEnded`] comes after the `Complete` of all its requests. It may come without an
///   [`Action::EpochBegan`] when the epoch could not be entered here.
/// - [`Action::Admit`]s come by ascending seq.
#[derive(Debug)]
pub struct Engine {
    context: Context,
    participant: Participant,
    /// Where rank 0 is hosted.
    coordinator: Option<Coordinator>,
    next_tick: Time,
}

impl Engine {
    /// An engine at rest: no links, no ranks, no epoch.
    #[must_use]
    pub fn new(config: EngineConfig, now: Time) -> Self {
        let context = Context::new(config, now);
        let coordinator = (context.me() == context.coordinator).then(Coordinator::default);
        Self { context, participant: Participant::default(), coordinator, next_tick: now }
    }

    /// Something has happened.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        self.observe(now);
        let cx = &mut self.context;
        match event {
            Event::RankAttached { rank } => self.participant.attach(cx, rank),
            Event::RankLeft { rank, failure } => self.participant.leave(cx, rank, failure),
            Event::RankHeard { rank } => self.participant.heard(cx, rank),
            Event::Called { rank, collective, operation, site } => {
                self.participant.called(cx, rank, LastCall { collective, operation, site, at: cx.now });
            }
            Event::Submitted { rank, request, what, contribution } => {
                self.participant.submit(cx, rank, request, (what, contribution));
            }
            Event::Refused { rank, set, name, group, reason } => {
                self.participant.refused_by_service(cx, rank, (set, name), group, &reason);
            }
            Event::Withdrawn { rank, request, reason } => self.participant.withdraw(cx, rank, request, &reason),
            Event::LinkUp { peer, lanes } => self.link_up(peer, lanes),
            Event::LinkDown { peer, reason } => self.lose(peer, &reason),
            Event::Control { from, epoch, seq, message } => self.receive(from, Envelope { epoch, seq, message }),
            Event::Executed { epoch, seq } => self.participant.executed(cx, epoch, seq),
            Event::ExecutionFailed { epoch, seq, reason } => {
                self.participant.execution_failed(cx, epoch, seq, &reason);
            }
        }
    }

    /// The time of [`poll_timeout`](Self::poll_timeout) has come. Harmless when it has not.
    pub fn handle_timeout(&mut self, now: Time) {
        self.observe(now);
        let cx = &mut self.context;
        if cx.now < self.next_tick || !self.needs_ticks() {
            return;
        }
        let cx = &mut self.context;
        self.next_tick = cx.now.plus_ms(cx.config.heartbeat_ms);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.tick(cx);
        }
        self.participant.tick(cx);
        self.send_heartbeats();
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called; `None` while nothing has to be watched. Ask after
    /// the actions are drained. May lie in the past.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.needs_ticks().then_some(self.next_tick)
    }

    /// The next thing to do, `None` when there is nothing more for now.
    pub fn poll_action(&mut self) -> Option<Action> {
        if self.context.actions.is_empty() {
            self.settle();
        }
        self.context.actions.pop_front()
    }

    /// Whether this engine needs nothing from others and, at the coordinator, others need nothing from it: no epoch, and
    /// everybody has finished the last one. A process may exit then, once its transport has sent what is queued.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.participant.is_idle() && !self.coordinator.as_ref().is_some_and(Coordinator::is_busy)
    }

    /// The number of ranks of a process set, `None` when there is none as far as this sidecar has heard.
    pub fn set_size(&mut self, set: SetId) -> Option<usize> {
        self.participant.sets.view(&mut self.context, set).map(|view| view.ranks.len())
    }

    /// How many bytes of a rank's contribution are to come with its [`Event::Submitted`]: all of it where the request travels
    /// eagerly, 0 otherwise.
    pub fn contribution_bytes(&mut self, rank: Rank, what: &Request) -> usize {
        let Some(view) = self.participant.sets.view(&mut self.context, what.set) else { return 0 };
        self.participant.contribution_bytes(&view, rank, what)
    }

    /// What is known of a rank that is placed here, for the others, should it fail: where it is and what it did last.
    #[must_use]
    pub fn record(&self, rank: Rank, now: Time) -> Record {
        self.participant.record(&self.context, rank, now)
    }

    /// A picture of the moment.
    #[must_use]
    pub fn status(&self, now: Time) -> Status {
        status::status(&self.context, &self.participant, self.coordinator.as_ref(), now)
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.context.stats
    }

    /// Moves the clock. When it has jumped although ticks were due, this very process was paused: silence says nothing
    /// about the others then.
    fn observe(&mut self, now: Time) {
        let paused = now.ms_since(self.context.now) > self.context.config.suspect_ms && self.needs_ticks();
        self.context.now = self.context.now.max(now);
        if paused {
            self.context.stats.pauses += 1;
            self.context.links.rebase(now);
            self.participant.rebase(&self.context);
        }
    }

    fn needs_ticks(&self) -> bool {
        !self.is_drained() || !self.participant.waiting.is_empty() || self.context.links.any_up()
    }

    /// Handles messages to this sidecar itself, announces, orders, until nothing is left to do. Ends, because each message
    /// that is handled here leads to few others and none to itself.
    fn settle(&mut self) {
        loop {
            while let Some(envelope) = self.context.loopback.pop_front() {
                self.receive(self.context.me(), envelope);
            }
            self.participant.flush(&mut self.context);
            if let (true, Some(coordinator)) = (self.context.loopback.is_empty(), &mut self.coordinator) {
                coordinator.settle(&mut self.context);
            }
            if self.context.loopback.is_empty() {
                return;
            }
        }
    }

    fn link_up(&mut self, peer: SidecarIndex, lanes: u16) {
        let cx = &mut self.context;
        cx.links.opened(peer, lanes, cx.now);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.link_up(cx, peer);
        } else if peer == cx.coordinator && self.participant.is_idle() {
            self.participant.report_waiting(cx);
        }
    }

    /// A peer is gone, or is treated as if it were.
    fn lose(&mut self, peer: SidecarIndex, reason: &str) {
        let cx = &mut self.context;
        cx.links.closed(peer);
        if cx.sidecars.binary_search(&peer).is_err() {
            return;
        }
        if let Some(coordinator) = &mut self.coordinator {
            let awaited = coordinator.awaits(peer);
            coordinator.lost(cx, peer, reason);
            if !awaited {
                // The peer has finished the epoch, but this sidecar's own part may still need it.
                self.participant.peer_lost(cx, peer, reason);
            }
        } else if peer == cx.coordinator {
            self.participant.coordinator_lost(cx, reason);
        } else {
            self.participant.peer_lost(cx, peer, reason);
        }
    }

    fn receive(&mut self, from: SidecarIndex, envelope: Envelope) {
        self.context.links.heard(from, self.context.now);
        if let Err(what) = self.dispatch(from, envelope) {
            self.context.stats.protocol_violations += 1;
            let reason = format!("{from} breaks the protocol: it {what}");
            if from == self.context.me() {
                // Only a bug can lead here; the epoch ends rather than hang.
                self.participant.fail(&mut self.context, Seq(0), &Failure::new(Cause::Bug, reason));
                return;
            }
            self.context.act(Action::Disconnect { peer: from, reason: reason.clone() });
            self.lose(from, &reason);
        }
    }

    fn dispatch(&mut self, from: SidecarIndex, Envelope { epoch, seq, message }: Envelope) -> Result<(), String> {
        let cx = &mut self.context;
        if cx.sidecars.binary_search(&from).is_err() {
            return Err("serves no rank of this job".to_owned());
        }
        match message {
            Control::Heartbeat { sent_us, echo_us, held_us } => {
                cx.links.beat(from, Stamps { sent_us, echo_us, held_us }, cx.now);
                if from == cx.coordinator && epoch != self.participant.epoch {
                    // Control messages arrive in order, so the end of the epoch was said, and lost with a link.
                    self.participant
                        .coordinator_lost(cx, &format!("it takes part in {} no more", self.participant.epoch));
                }
                Ok(())
            }
            Control::EpochBegin { .. }
            | Control::EpochEnd { .. }
            | Control::Order(_)
            | Control::Reject { .. }
            | Control::SetAdded { .. }
            | Control::SetRemoved { .. }
            | Control::AllJoined { .. }
            | Control::Suspects { .. }
            | Control::AskActivity { .. } => {
                if from != cx.coordinator {
                    return Err("sends what only the coordinator sends".to_owned());
                }
                self.handle_coordinator(epoch, seq, message);
                Ok(())
            }
            _ => match &mut self.coordinator {
                Some(coordinator) => coordinator.handle(cx, from, (epoch, seq), message),
                None => Err("sends what only the coordinator gets".to_owned()),
            },
        }
    }

    fn handle_coordinator(&mut self, epoch: Epoch, seq: Seq, message: Control) {
        let (cx, participant) = (&mut self.context, &mut self.participant);
        if let Control::EpochBegin { world, eager_bytes } = message {
            participant.begin(cx, epoch, &world, eager_bytes);
            return;
        }
        if epoch != participant.epoch || participant.is_idle() {
            cx.stats.stale_frames += 1;
            return;
        }
        match message {
            Control::EpochEnd { failure } => participant.epoch_ended(cx, failure),
            Control::Order(order) => participant.order(cx, seq, &order),
            Control::Reject { set, name, failure, excused } => {
                participant.rejected(cx, &(set, name), &failure, &excused);
            }
            Control::SetAdded { name, set } => participant.set_added(cx, &name, &set),
            Control::SetRemoved { name, set } => participant.set_removed(cx, &name, set),
            Control::AllJoined { name, last } => participant.all_joined(cx, &name, last),
            Control::AskActivity { ranks } => participant.tell_activity(cx, &ranks),
            Control::Suspects { sidecars, ranks } => participant.suspects(cx, Suspects { sidecars, ranks }),
            _ => {}
        }
    }

    fn send_heartbeats(&mut self) {
        let cx = &mut self.context;
        let epoch = self.coordinator.as_ref().map_or(self.participant.epoch, Coordinator::busy_with);
        let peers: Vec<SidecarIndex> = match &self.coordinator {
            Some(coordinator) => {
                let needed = |peer: &SidecarIndex| cx.links.is_up(*peer) || coordinator.awaits(*peer);
                cx.sidecars.iter().copied().filter(needed).collect()
            }
            None if cx.links.is_up(cx.coordinator) || !self.participant.is_idle() => vec![cx.coordinator],
            None => Vec::new(),
        };
        let me = cx.config.me;
        for peer in peers.into_iter().filter(|peer| *peer != me) {
            cx.stats.heartbeats += 1;
            let heartbeat = cx.links.heartbeat(peer, cx.now);
            cx.send(peer, epoch, Seq(0), heartbeat);
        }
    }
}
