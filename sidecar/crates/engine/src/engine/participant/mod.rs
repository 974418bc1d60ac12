//! The participant of every sidecar: the sessions of its ranks, their requests, and the operations performed here.

pub(crate) mod activity;
pub(crate) mod admission;
mod answers;
mod any_source;
mod commit;
mod operations;
pub(crate) mod request_cache;
mod requests;
mod scheduled;
mod status;
mod submission;
pub(crate) mod suspects;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_wire::control::Announcement;
use ronde_wire::{Cause, Control, Epoch, Failure, Rank, Seq, SetId, SidecarIndex, World};

use self::activity::LastCall;
use self::any_source::AnySources;
use self::request_cache::RequestCache;
use self::requests::{RankKey, Requests};
use self::scheduled::Scheduled;
use crate::engine::shared::config::EAGER_BYTES_MOST;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::{SetTable, SetView};
use crate::engine::shared::waits::Waits;
use crate::engine::shared::{RequestKey, wording};
use crate::event::{Action, Admission, Time};
use crate::trace::Trace;

/// The state of the participant. This file handles epochs; `submission`, `any_source`, `answers`, `operations`,
/// `scheduled` and `suspects` handle the rest.
#[derive(Debug, Default)]
pub(crate) struct Participant {
    phase: Phase,
    /// The newest epoch that began here.
    epoch: Epoch,
    /// Ranks that have attached for the next epoch.
    waiting: BTreeSet<Rank>,
    /// Ranks that take part in this one.
    present: BTreeMap<Rank, RankLiveness>,
    /// How many operations each rank has called in the epoch; kept after its end.
    calls: BTreeMap<Rank, u64>,
    requests: Requests,
    any_sources: AnySources,
    sets: SetTable,
    /// Removed sets with operations in flight here: their names are not free before those are done.
    leaving: BTreeSet<SetId>,
    /// Bytes of a contribution up to which the epoch's operations are eager.
    eager_bytes: u32,
    request_cache: RequestCache,
    admitted: BTreeMap<Seq, Running>,
    last_seq: Seq,
    /// The active schedule.
    scheduled: Option<Scheduled>,
    /// For each local rank, how long others have waited for it in steps of schedules.
    waits_here: BTreeMap<Rank, Waits>,
    /// The last operation that is being dropped. The requests are announced again when nothing accesses their memory.
    dropping: Option<Seq>,
    /// Names whose next request is announced without its group, the rest of which was performed by a schedule.
    ungrouped: BTreeSet<RankKey>,
    /// Whether an order could not be admitted; the epoch is about to end.
    broken: bool,
    /// Announcements since the last message to the coordinator.
    outbox: Vec<Announcement>,
    last_failure: Option<Failure>,
    watch: suspects::Watch,
}

/// The phase of the epoch here.
#[derive(Debug, Default)]
pub(crate) enum Phase {
    #[default]
    Idle,
    Active,
    /// A rank has shut down: admitted operations are finished, then the epoch ends with this reason.
    Closing(Failure),
}

/// The liveness of a rank of the epoch.
#[derive(Debug)]
pub(crate) struct RankLiveness {
    last_seen: Time,
    left: bool,
    last_call: Option<LastCall>,
}

/// An admitted operation.
#[derive(Debug)]
pub(crate) struct Running {
    admission: Arc<Admission>,
    /// Whether this sidecar reports to the coordinator that the operation is done.
    reports: bool,
    /// Whether it is performed and its completion is held until it is committed.
    held: bool,
    /// Whether the outcome was reported to the coordinator, for an operation with a plugin.
    reported: bool,
}

impl Participant {
    /// A participant after this epoch.
    pub(crate) fn after(epoch: Epoch) -> Self {
        Self { epoch, ..Self::default() }
    }

    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Idle)
    }

    /// The newest epoch that began here.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether ranks have attached for the next epoch.
    pub(crate) fn has_waiting_ranks(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// A process set as this sidecar knows it; `None` when there is none.
    pub(crate) fn set_view(&mut self, cx: &mut Context, set: SetId) -> Option<Arc<SetView>> {
        self.sets.view(cx, set)
    }

    pub(crate) fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Active)
    }

    /// Whether the last epoch here ended by a shutdown, so that others still finish ordered operations.
    pub(crate) fn has_ended_in_order(&self) -> bool {
        self.last_failure.as_ref().is_some_and(|failure| failure.cause == Cause::ShutDown)
    }

    /// A worker has claimed a rank.
    pub(crate) fn attach(&mut self, cx: &mut Context, rank: Rank) {
        if cx.serves(cx.me(), rank) && self.waiting.insert(rank) && self.is_idle() {
            self.report_waiting(cx);
        }
    }

    /// A session has ended.
    pub(crate) fn leave(&mut self, cx: &mut Context, rank: Rank, failure: Failure) {
        // A session that waits for the next epoch is newer than one within this epoch.
        if self.waiting.remove(&rank) {
            if self.is_idle() {
                self.report_waiting(cx);
            }
            return;
        }
        let Some(liveness) = self.present.get_mut(&rank).filter(|liveness| !liveness.left) else { return };
        liveness.left = true;
        if self.is_active() {
            self.to_coordinator(cx, Seq(0), Control::Left { rank, failure });
        }
    }

    /// Reports to the coordinator which ranks wait for an epoch: the whole list, empty or not. It also reports the
    /// epoch of the frame as finished here.
    pub(crate) fn report_waiting(&mut self, cx: &mut Context) {
        self.watch.reported = cx.now;
        let ranks = self.waiting.iter().copied().collect();
        self.to_coordinator(cx, Seq(0), Control::Attached { ranks });
    }

    /// The coordinator begins an epoch.
    pub(crate) fn begin(&mut self, cx: &mut Context, epoch: Epoch, world: &World, eager_bytes: u32) {
        if epoch <= self.epoch {
            // Sent again on a new link. An epoch that this sidecar has ended by itself cannot be entered again.
            if epoch == self.epoch && self.is_idle() {
                self.refuse_ended(cx);
            } else if epoch < self.epoch {
                cx.stats.stale_frames += 1;
            }
            return;
        }
        if !self.is_idle() {
            let reason = format!("{} was replaced by {epoch} before its end arrived", self.epoch);
            self.end(cx, &Failure::new(Cause::Bug, reason).with_sidecar(cx.coordinator));
        }
        let mine = cx.config.world.ranks_of(cx.me());
        let (here, missing): (Vec<Rank>, Vec<Rank>) = mine.into_iter().partition(|rank| self.waiting.contains(rank));
        self.enter(cx, epoch, &here);
        self.eager_bytes = eager_bytes.min(EAGER_BYTES_MOST);
        if *world != cx.config.world {
            let reason = "its configuration of ranks, sidecars and process sets differs from the coordinator's; \
                          start all sidecars with the same one";
            self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason));
            return;
        }
        cx.stats.epochs += 1;
        cx.act(Action::EpochBegan { epoch });
        for rank in missing {
            let failure =
                Failure::new(Cause::RankLost, format!("its session ended before {epoch} began")).with_rank(rank);
            self.to_coordinator(cx, Seq(0), Control::Left { rank, failure });
        }
    }

    /// The coordinator ends the epoch.
    pub(crate) fn epoch_ended(&mut self, cx: &mut Context, failure: Failure) {
        // Its texts are untrusted.
        let failure = failure.within_limits();
        // A second end means that ordered operations cannot be finished.
        // The coordinator ends a schedule before an orderly end.
        let unfinished = !self.admitted.is_empty() && self.scheduled.is_none();
        if failure.cause != Cause::ShutDown || !unfinished || !self.is_active() {
            self.end(cx, &failure);
            return;
        }
        self.fail_requests(cx, true, &failure);
        self.outbox.clear();
        self.phase = Phase::Closing(failure);
    }

    /// Fails the pending requests: all of them, or only those that are not ordered.
    fn fail_requests(&mut self, cx: &mut Context, unordered_only: bool, failure: &Failure) {
        let mut requests = self.requests.take(unordered_only);
        requests.extend(self.any_sources.clear());
        requests.sort_unstable();
        for key in requests {
            self.complete(cx, key, Err(failure.clone()));
        }
    }

    /// Ends the epoch here: every pending request fails, in order of rank and number.
    pub(crate) fn end(&mut self, cx: &mut Context, failure: &Failure) {
        self.fail_requests(cx, false, failure);
        self.phase = Phase::Idle;
        self.present.clear();
        self.admitted.clear();
        self.scheduled = None;
        self.outbox.clear();
        self.watch = suspects::Watch::default();
        self.last_failure = Some(failure.clone());
        cx.traces.note(|| Trace::EpochOver);
        cx.act(Action::EpochEnded { epoch: self.epoch, failure: failure.clone() });
        self.report_waiting(cx);
    }

    /// The coordinator is unreachable because of the culprit: this sidecar ends the epoch for its own ranks.
    pub(crate) fn coordinator_lost(&mut self, cx: &mut Context, culprit: SidecarIndex, reason: &str) {
        if !self.is_idle() {
            let who = wording::sidecar(&cx.config.world, culprit);
            let what = if culprit == cx.coordinator { "the coordinator" } else { "on the path to the coordinator" };
            let text = format!("{who}, {what}, is lost: {reason}; see the log of that sidecar and its host");
            let failure = Failure::new(Cause::SidecarLost, text).with_sidecar(culprit);
            // If the coordinator is alive after all, it must not wait for this sidecar.
            self.to_coordinator(cx, Seq(0), Control::Failed { failure: failure.clone() });
            self.end(cx, &failure);
        }
    }

    /// Another sidecar is unreachable: the coordinator decides.
    pub(crate) fn peer_lost(&mut self, cx: &mut Context, peer: SidecarIndex, reason: &str) {
        let needed = match self.phase {
            Phase::Idle => false,
            Phase::Active => true,
            Phase::Closing(_) => self.admitted.values().any(|r| r.admission.topology.member(peer).is_some()),
        };
        if needed && cx.sidecars.contains(&peer) {
            let reason = reason.to_owned();
            self.to_coordinator(cx, Seq(0), Control::Unreachable { sidecar: peer, reason });
        }
    }

    /// Reports to the coordinator that this sidecar cannot continue the epoch.
    pub(crate) fn fail(&mut self, cx: &mut Context, seq: Seq, failure: &Failure) {
        self.broken = true;
        let failure = failure.clone().with_sidecar(cx.me());
        self.to_coordinator(cx, seq, Control::Failed { failure });
    }

    fn to_coordinator(&self, cx: &mut Context, seq: Seq, message: Control) {
        cx.send_up(self.epoch, seq, message);
    }

    fn complete(
        &self,
        cx: &mut Context,
        RequestKey { rank, request }: RequestKey,
        outcome: Result<crate::event::Completion, Failure>,
    ) {
        let counter = if outcome.is_ok() { &mut cx.stats.completed } else { &mut cx.stats.failed };
        *counter += 1;
        cx.act(Action::Complete { rank, request, outcome });
    }

    fn enter(&mut self, cx: &mut Context, epoch: Epoch, ranks: &[Rank]) {
        cx.rebase();
        self.phase = Phase::Active;
        self.epoch = epoch;
        self.last_seq = Seq(0);
        self.broken = false;
        self.scheduled = None;
        self.dropping = None;
        self.ungrouped.clear();
        self.sets.clear();
        self.leaving.clear();
        self.request_cache.clear();
        self.waiting.clear();
        self.calls.clear();
        self.present = ranks
            .iter()
            .map(|rank| (*rank, RankLiveness { last_seen: cx.now, left: false, last_call: None }))
            .collect();
    }

    fn refuse_ended(&self, cx: &mut Context) {
        let unknown = || Failure::new(Cause::SidecarLost, format!("{} has ended here", self.epoch));
        let failure = self.last_failure.clone().unwrap_or_else(unknown);
        self.to_coordinator(cx, Seq(0), Control::Failed { failure });
    }
}
