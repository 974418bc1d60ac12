//! The engine of one sidecar's control thread: a state machine that negotiates, orders, admits and completes operations
//! and tracks liveness.
//!
//! It consists of a *participant* on every sidecar and, on the sidecar of rank 0, the *coordinator* of the job. Both
//! share one context. Messages to this sidecar itself take an internal queue instead of the network, so local and
//! remote messages share one code path.

mod coordinator;
mod participant;
mod shared;
mod status;
#[cfg(test)]
mod tests;

use ronde_wire::{
    Cause, Control, Epoch, Failure, OpId, Rank, Record, Request, Seq, SetId, SidecarIndex, World,
    is_set_of_members_name,
};

pub use self::shared::config::{EngineConfig, RunAhead};
pub use self::shared::stats::Stats;
pub use self::shared::status::{
    CostStatus, EnginePhase, LinkStatus, PendingStatus, STATUS_ENTRIES_MAX, ScheduleStatus, Status, WaitingTensor,
};

use self::coordinator::Coordinator;
use self::participant::Participant;
use self::participant::activity::LastCall;
use self::shared::context::{Context, Envelope};
use self::shared::links::Stamps;
use self::shared::{RequestKey, Submission, Suspects, TensorKey};
use crate::event::{Action, Event, Time};
use crate::relay::{Relay, RelayEvent, RelayOutput};
use crate::trace::Trace;

/// One sidecar's engine. It is pure: time is an argument, every other input is an [`Event`], every output an
/// [`Action`].
///
/// The caller's loop:
/// 1. [`handle_event`](Self::handle_event) for each event. Requests that are submitted between two polls are announced
///    together, and tensors that become ready between them are fused.
/// 2. [`poll_action`](Self::poll_action) until it returns `None`, performing each action in order.
/// 3. [`poll_timeout`](Self::poll_timeout); without an event until then, [`handle_timeout`](Self::handle_timeout) and
///    again from 2.
///
/// No event makes it panic, whatever it contains. Time that runs backwards is treated as unchanged.
///
/// Guarantees:
/// - Every [`Event::Submitted`] gets exactly one [`Action::Complete`], provided that admitted operations are executed
///   or fail, and that peers either respond or time out. This includes withdrawn requests and ranks that have left;
///   their memory may be in use until then.
/// - An epoch's [`Action::EpochEnded`] follows the `Complete` of all its requests. There may be no
///   [`Action::EpochBegan`] before it when the epoch could not be entered here.
/// - [`Action::Admit`]s are in ascending order of seq.
#[derive(Debug)]
pub struct Engine {
    context: Context,
    participant: Participant,
    /// On the sidecar of rank 0.
    coordinator: Option<Coordinator>,
    next_tick: Time,
    /// When the link to the parent in the tree was last opened for the sidecars below.
    parent_link_opened: Time,
    /// Whether the last heartbeat to the sidecars below reported that the coordinator was busy with an epoch.
    reported_busy: bool,
}

impl Engine {
    /// An engine without links, ranks and epoch.
    #[must_use]
    pub fn new(config: EngineConfig, now: Time) -> Self {
        let context = Context::new(config, now);
        let coordinator = (context.me() == context.coordinator).then(Coordinator::default);
        Self {
            participant: Participant::after(context.config.epochs_after),
            context,
            coordinator,
            next_tick: now,
            parent_link_opened: Time(0),
            reported_busy: false,
        }
    }

    /// Enters another membership of the job: other ranks and sidecars, without links. Epochs count on from `after`; counters
    /// and tracing continue. Ranks that have attached for the next epoch are forgotten: they attach again, with their ranks
    /// of the new membership.
    ///
    /// Call it when no epoch runs here, all actions are performed, and no operation uses memory of the last epoch. An
    /// epoch that others still finish is given up.
    pub fn enter(&mut self, now: Time, world: World, after: Epoch) {
        self.observe(now);
        self.context.enter(world);
        self.participant = Participant::after(after.max(self.participant.epoch()));
        self.coordinator = (self.context.me() == self.context.coordinator).then(Coordinator::default);
        (self.next_tick, self.parent_link_opened, self.reported_busy) = (self.context.now, Time(0), false);
    }

    /// Whether this sidecar takes part in no epoch: none runs here, and none is being finished.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.participant.is_idle()
    }

    /// Handles an event.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        self.observe(now);
        let cx = &mut self.context;
        match event {
            Event::RankAttached { rank } => self.participant.attach(cx, rank),
            Event::RankLeft { rank, failure } => self.participant.leave(cx, rank, failure),
            Event::RankAlive { rank } => self.participant.mark_alive(cx, rank),
            Event::Called { rank, collective, operation, site } => {
                self.participant.called(cx, rank, LastCall { collective, operation, site, at: cx.now });
            }
            Event::Submitted { rank, request, what, contribution } => {
                self.participant.submit(cx, RequestKey { rank, request }, Submission { what, contribution });
            }
            Event::Refused { rank, set, name, members, reason, .. } if is_set_of_members_name(&name) => {
                self.participant.set_refused_by_service(cx, rank, TensorKey { set, name }, &members, &reason);
            }
            Event::Refused { rank, set, name, group, reason, .. } => {
                self.participant.refused_by_service(cx, rank, TensorKey { set, name }, group, &reason);
            }
            Event::Withdrawn { rank, request, reason } => {
                self.participant.withdraw(cx, RequestKey { rank, request }, &reason);
            }
            Event::LinkUp { peer, lanes } => self.link_up(peer, lanes),
            Event::LinkDown { peer, reason } => self.link_down(peer, &reason),
            Event::LaneDown { peer, closed, reason } => {
                // A coordinator that leaves sends the reason on its control link, which this event may have overtaken.
                if !closed || peer != cx.coordinator {
                    self.lane_down(peer, &reason);
                }
            }
            Event::Control { from, epoch, seq, message } => {
                self.receive(from, Envelope { id: OpId { epoch, seq }, message });
            }
            Event::Executed { epoch, seq } => self.participant.executed(cx, epoch, seq),
            Event::Cancelled { epoch, last } => self.participant.cancelled(cx, epoch, last),
            Event::ExecutionFailed { epoch, seq, reason, plugin: true } => {
                self.participant.plugin_failed(cx, epoch, seq, &reason);
            }
            Event::ExecutionFailed { epoch, seq, reason, plugin: false } => {
                self.participant.execution_failed(cx, epoch, seq, &reason);
            }
        }
    }

    /// Handles the time of [`poll_timeout`](Self::poll_timeout). Does nothing before that.
    pub fn handle_timeout(&mut self, now: Time) {
        self.observe(now);
        self.participant.check_schedule(&mut self.context);
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
        self.report_silence();
        self.send_heartbeats();
    }

    /// When to call [`handle_timeout`](Self::handle_timeout); `None` while there is no timer. Call it after the actions
    /// are drained. The time may be in the past.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let invalidation = self.participant.invalidation_deadline();
        self.needs_ticks().then(|| invalidation.map_or(self.next_tick, |at| at.min(self.next_tick)))
    }

    /// The next action, `None` when there is none for now.
    pub fn poll_action(&mut self) -> Option<Action> {
        if self.context.actions.is_empty() {
            self.process_pending();
        }
        self.context.actions.pop_front()
    }

    /// Turns [`Self::take_traces`] on or off. Off by default.
    pub fn set_tracing(&mut self, wanted: bool) {
        self.context.traces.want(wanted);
    }

    /// The traces since the last call, in order. Call it after every call that may produce traces: their number is not
    /// bounded otherwise.
    pub fn take_traces(&mut self) -> Vec<Trace> {
        self.context.traces.take()
    }

    /// Whether the process may exit once its transport has sent its queue: there is no epoch, and all sidecars for
    /// which this one is the coordinator or a relay have finished the last one. After an orderly end all sidecars must
    /// have finished it: they would treat one that exits earlier as lost.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let needed =
            self.coordinator.is_some() || self.context.relay.is_needed() || self.participant.has_ended_in_order();
        self.participant.is_idle() && !(needed && self.coordinators_epoch() != Epoch(0))
    }

    /// The sidecar to which this one opens its control link; `None` at the coordinator.
    #[must_use]
    pub fn control_parent(&self) -> Option<SidecarIndex> {
        self.context.relay.parent()
    }

    /// The sidecars that open a control link to this one.
    pub fn control_children(&self) -> impl Iterator<Item = SidecarIndex> {
        self.context.relay.children()
    }

    /// The number of ranks of a process set, `None` when this sidecar knows of none.
    pub fn set_size(&mut self, set: SetId) -> Option<usize> {
        self.participant.set_view(&mut self.context, set).map(|view| view.ranks.len())
    }

    /// How many bytes of a rank's contribution belong into its [`Event::Submitted`]: all of it where the request is
    /// eager, 0 otherwise.
    pub fn contribution_bytes(&mut self, rank: Rank, what: &Request) -> usize {
        let Some(view) = self.participant.set_view(&mut self.context, what.set) else { return 0 };
        self.participant.contribution_bytes(&view, rank, what)
    }

    /// The record of a local rank, for its failure: its host and its last call.
    #[must_use]
    pub fn record(&self, rank: Rank, now: Time) -> Record {
        self.participant.record(&self.context, rank, now)
    }

    /// How many operations a local rank has called in the last epoch.
    #[must_use]
    pub fn calls(&self, rank: Rank) -> u64 {
        self.participant.calls(rank)
    }

    /// A snapshot for status pages.
    #[must_use]
    pub fn status(&self, now: Time) -> Status {
        status::status(&self.context, &self.participant, self.coordinator.as_ref(), now)
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.context.stats
    }

    /// Moves the clock. A jump across due ticks means that this process itself was paused; then the silence of peers is
    /// no evidence against them.
    fn observe(&mut self, now: Time) {
        let paused = now.ms_since(self.context.now) > self.context.config.suspect_ms && self.needs_ticks();
        self.context.now = self.context.now.max(now);
        if paused {
            self.context.stats.pauses += 1;
            self.context.rebase();
            self.participant.rebase(&self.context);
        }
    }

    /// The epoch that the coordinator is known to be busy with; 0 for none.
    fn coordinators_epoch(&self) -> Epoch {
        self.coordinator.as_ref().map_or(self.context.relay.epoch(), Coordinator::busy_with)
    }

    fn needs_ticks(&self) -> bool {
        !self.is_drained() || self.participant.has_waiting_ranks() || self.context.links.any_up()
    }

    /// Handles local messages, announces and orders until nothing is pending. It terminates: each message leads to few
    /// others and never to itself.
    fn process_pending(&mut self) {
        loop {
            while let Some(envelope) = self.context.loopback.pop_front() {
                self.handle_message(self.context.me(), envelope);
            }
            self.participant.flush(&mut self.context);
            if let (true, Some(coordinator)) = (self.context.loopback.is_empty(), &mut self.coordinator) {
                coordinator.order_ready(&mut self.context);
            }
            if self.context.loopback.is_empty() {
                self.notify_epoch_finished();
                let (relay, mut out) = self.context.relay();
                relay.flush(&mut out);
                return;
            }
        }
    }

    /// Sends heartbeats down as soon as the epoch is finished: sidecars below wait for that before they exit.
    fn notify_epoch_finished(&mut self) {
        let is_busy = self.coordinators_epoch() != Epoch(0);
        if std::mem::replace(&mut self.reported_busy, is_busy) && !is_busy {
            self.send_heartbeats_down();
        }
    }

    fn link_up(&mut self, peer: SidecarIndex, lanes: u16) {
        let cx = &mut self.context;
        if cx.relay.is_neighbour(peer) {
            cx.links.opened(peer, lanes, cx.now);
        }
        let (relay, mut out) = self.relay();
        let events = relay.link_up(&mut out, peer, lanes);
        self.handle_relay_events(events);
    }

    fn link_down(&mut self, peer: SidecarIndex, reason: &str) {
        let cx = &mut self.context;
        if !cx.relay.is_neighbour(peer) {
            self.lane_down(peer, reason);
            return;
        }
        cx.links.closed(peer);
        let (relay, mut out) = self.relay();
        let events = relay.link_down(&mut out, peer, reason);
        self.handle_relay_events(events);
    }

    /// A lane is lost: operations with the peer cannot be finished.
    fn lane_down(&mut self, peer: SidecarIndex, reason: &str) {
        let cx = &mut self.context;
        if cx.sidecars.binary_search(&peer).is_err() {
            return;
        }
        let decided = match &mut self.coordinator {
            Some(coordinator) => coordinator.lost_lanes(cx, &[peer], peer, reason),
            None if peer == cx.coordinator => {
                self.participant.coordinator_lost(cx, peer, reason);
                true
            }
            None => false,
        };
        if !decided {
            self.participant.peer_lost(cx, peer, reason);
        }
    }

    /// Handles the events of the tree of control links.
    fn handle_relay_events(&mut self, events: Vec<RelayEvent>) {
        for event in events {
            match event {
                RelayEvent::Up { peer, lanes } => self.path_up(peer, lanes),
                RelayEvent::Down { peers, culprit, reason } => self.paths_down(&peers, culprit, &reason),
                RelayEvent::Message { from, id, message } => self.handle_message(from, Envelope { id, message }),
                RelayEvent::Violation { peer, what } => self.expel(peer, &what),
                RelayEvent::Expel { child, reason } => {
                    self.context.act(Action::Disconnect { peer: child, reason: reason.clone() });
                    self.link_down(child, &reason);
                }
            }
        }
    }

    /// There is a path between the coordinator and this sidecar, or, at the coordinator, a peer.
    fn path_up(&mut self, peer: SidecarIndex, lanes: u16) {
        let cx = &mut self.context;
        if let Some(coordinator) = &mut self.coordinator {
            if !cx.relay.is_neighbour(peer) {
                cx.links.opened(peer, lanes, cx.now);
            }
            coordinator.link_up(cx, peer);
        } else if self.participant.is_idle() {
            self.participant.report_waiting(cx);
        }
    }

    /// Paths to the coordinator are lost.
    fn paths_down(&mut self, peers: &[SidecarIndex], culprit: SidecarIndex, reason: &str) {
        let cx = &mut self.context;
        let Some(coordinator) = &mut self.coordinator else {
            self.participant.coordinator_lost(cx, culprit, reason);
            return;
        };
        peers.iter().for_each(|peer| cx.links.closed(*peer));
        if !coordinator.lost(cx, peers, culprit, reason) {
            // The culprit has finished the epoch, but this sidecar may still need it.
            self.participant.peer_lost(cx, culprit, reason);
        }
    }

    fn receive(&mut self, from: SidecarIndex, envelope: Envelope) {
        self.context.links.mark_alive(from, self.context.now);
        if self.context.sidecars.binary_search(&from).is_err() {
            self.expel(from, "serves no rank of this job");
            return;
        }
        let Envelope { id, message } = envelope;
        let (relay, mut out) = self.relay();
        match relay.receive(&mut out, from, id, message) {
            Ok(events) => self.handle_relay_events(events),
            Err(what) => self.expel(from, &what),
        }
    }

    /// Handles a message of this sidecar, of a neighbour about its link, or relayed along the tree.
    fn handle_message(&mut self, from: SidecarIndex, envelope: Envelope) {
        if let Err(what) = self.dispatch(from, envelope) {
            self.expel(from, &what);
        }
    }

    /// Disconnects a sidecar that breaks the protocol.
    fn expel(&mut self, peer: SidecarIndex, what: &str) {
        let cx = &mut self.context;
        cx.stats.protocol_violations += 1;
        let reason = format!("{peer} breaks the protocol: it {what}");
        if peer == cx.me() {
            // Only a bug can lead here; the epoch ends instead of hanging.
            self.participant.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason));
        } else if self.coordinator.is_none() || cx.relay.is_neighbour(peer) || !cx.all_sidecars.contains(peer) {
            cx.act(Action::Disconnect { peer, reason: reason.clone() });
            self.link_down(peer, &reason);
        } else {
            let (relay, mut out) = self.relay();
            let events = relay.expel(&mut out, peer, &reason);
            self.handle_relay_events(events);
        }
    }

    /// The tree of control links; at the coordinator it gets the current epoch first.
    fn relay(&mut self) -> (&mut Relay, RelayOutput<'_>) {
        if let Some(coordinator) = &self.coordinator {
            self.context.relay.set_epoch(coordinator.busy_with());
        }
        self.context.relay()
    }

    fn dispatch(&mut self, from: SidecarIndex, Envelope { id, message }: Envelope) -> Result<(), String> {
        let cx = &mut self.context;
        match message {
            Control::Heartbeat { sent_us, echo_us, held_us } => {
                cx.links.beat(from, Stamps { sent_us, echo_us, held_us }, cx.now);
                let above = cx.relay.parent() == Some(from) && cx.relay.is_joined();
                if above && id.epoch != self.participant.epoch() {
                    // Control messages arrive in order, so the end of the epoch was sent and lost with a link.
                    let reason = format!("it no longer takes part in {}", self.participant.epoch());
                    self.participant.coordinator_lost(cx, cx.coordinator, &reason);
                }
                Ok(())
            }
            Control::EpochBegin { .. }
            | Control::EpochEnd { .. }
            | Control::Order(_)
            | Control::Reject { .. }
            | Control::SetAdded { .. }
            | Control::SetRemoved { .. }
            | Control::SetRefused { .. }
            | Control::AllJoined { .. }
            | Control::Suspects { .. }
            | Control::AskActivity { .. }
            | Control::Schedule { .. }
            | Control::Withdraw { .. }
            | Control::Commit { .. }
            | Control::Matched { .. }
            | Control::Resume { .. } => {
                if from != cx.coordinator {
                    return Err("sends a message that only the coordinator sends".to_owned());
                }
                self.handle_coordinator(id, message);
                Ok(())
            }
            _ => match &mut self.coordinator {
                Some(coordinator) => coordinator.handle(cx, from, id, message),
                None => Err("sends a message that only the coordinator receives".to_owned()),
            },
        }
    }

    fn handle_coordinator(&mut self, OpId { epoch, seq }: OpId, message: Control) {
        let (cx, participant) = (&mut self.context, &mut self.participant);
        if let Control::EpochBegin { world, eager_bytes } = message {
            participant.begin(cx, epoch, &world, eager_bytes);
            return;
        }
        if epoch != participant.epoch() || participant.is_idle() {
            cx.stats.stale_frames += 1;
            return;
        }
        match message {
            Control::EpochEnd { failure } => participant.epoch_ended(cx, failure),
            Control::Order(order) => participant.order(cx, seq, &order),
            Control::Reject { set, name, failure, excused } => {
                participant.rejected(cx, &TensorKey { set, name }, &failure, &excused);
            }
            Control::SetAdded { name, set } => participant.set_added(cx, &name, &set),
            Control::SetRemoved { name, set } => participant.set_removed(cx, &name, set),
            Control::SetRefused { name, ranks, failure } => participant.set_refused(cx, &name, &ranks, &failure),
            Control::AllJoined { set, name, last } => participant.all_joined(cx, set, &name, last),
            Control::AskActivity { ranks } => participant.report_activity(cx, &ranks),
            Control::Suspects { sidecars, ranks } => participant.suspects(cx, Suspects { sidecars, ranks }),
            Control::Schedule { number, buckets, patience_us } => {
                participant.schedule(cx, seq, number, patience_us, buckets);
            }
            Control::Matched { set, receive, message } => participant.matched(cx, set, &receive, message),
            Control::Commit { failure } => participant.commit(cx, seq, failure),
            Control::Withdraw { number } => participant.freeze(cx, number),
            Control::Resume { number, last, completed } => participant.resume(cx, number, last, &completed),
            _ => {}
        }
    }

    fn send_heartbeats_down(&mut self) {
        let epoch = self.coordinators_epoch();
        let cx = &mut self.context;
        for child in cx.relay.children().collect::<Vec<_>>() {
            if cx.links.is_up(child) || self.coordinator.as_ref().is_some_and(|coordinator| coordinator.awaits(child)) {
                cx.heartbeat(child, epoch);
            }
        }
    }

    fn send_heartbeats(&mut self) {
        self.send_heartbeats_down();
        let cx = &mut self.context;
        let Some(parent) = cx.relay.parent() else { return };
        if cx.links.is_up(parent) || !self.participant.is_idle() {
            cx.heartbeat(parent, self.participant.epoch());
        } else if cx.relay.has_children() && cx.now.ms_since(self.parent_link_opened) >= cx.config.suspect_ms {
            // The sidecars below depend on this link and cannot open it.
            self.parent_link_opened = cx.now;
            cx.open_parent_link();
        }
    }

    fn report_silence(&mut self) {
        let Context { relay, links, actions, stats, config, now, .. } = &mut self.context;
        let mut out = RelayOutput { actions, stats };
        relay.report_silence(&mut out, config.suspect_ms, |peer| links.silent_ms(peer, *now));
    }
}
