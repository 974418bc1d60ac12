//! The coordinator begins and ends epochs, negotiates requests and orders operations. It is active on the sidecar of
//! rank 0, which sends it the same messages as all others.

mod agreement;
mod commits;
mod fusion;
mod groups;
mod hung;
mod joins;
mod matching;
pub(crate) mod member_sets;
mod mismatch;
mod negotiation;
mod ordering;
mod process_sets;
mod repetition;
pub(crate) mod request_cache;
mod scheduling;
mod set_requests;
mod stall;
mod status;

use std::collections::{BTreeMap, BTreeSet};

use ronde_wire::control::Announcement;
use ronde_wire::{Cause, Control, Epoch, Failure, OpId, Rank, Seq, SidecarIndex};

use self::agreement::Agreement;
use self::commits::PendingCommits;
use self::hung::HungRanks;
use self::scheduling::{FrozenSchedule, PendingExit};
use self::stall::Stalls;
use crate::engine::shared::context::Context;
use crate::engine::shared::status::WaitingTensor;
use crate::engine::shared::waits::Waits;
use crate::engine::shared::{Suspects, wording};
use crate::event::Time;

/// The state of the coordinator.
#[derive(Debug, Default)]
pub(crate) struct Coordinator {
    phase: Phase,
    epoch: Epoch,
    /// Ranks that have attached since the last epoch began, as each sidecar last reported them.
    attached: BTreeMap<SidecarIndex, BTreeSet<Rank>>,
    /// The newest epoch whose begin was sent to each sidecar on its current link: what the sidecar sent before it
    /// received that is void.
    epoch_notified: BTreeMap<SidecarIndex, Epoch>,
    agreement: Agreement,
    stalls: Stalls,
    hung: HungRanks,
    /// Operations with a plugin; they are committed even after a rank has shut down.
    pending_commits: PendingCommits,
    /// For each rank, how often its announcement was the last one.
    last_to_be_ready: Vec<u64>,
    /// For each rank, the total microseconds for which others have waited for it, and the last of these waits.
    waited_for_us: Vec<u64>,
    waits: Vec<Waits>,
    suspect_ranks: BTreeMap<SidecarIndex, Vec<Rank>>,
    suspects_sent: Suspects,
    /// When the last epoch ended, and the names that waited for ranks then.
    waited_at_end: (Time, Vec<WaitingTensor>),
}

#[derive(Debug, Default)]
enum Phase {
    /// Waiting for ranks to attach.
    #[default]
    Gathering,
    /// Within an epoch.
    Running,
    /// A rank has shut down; these sidecars still finish ordered operations.
    Closing(BTreeSet<SidecarIndex>, Failure),
}

/// The description of a protocol violation, as a text after "it".
pub(crate) type Violation = String;

/// Epoch numbers that a peer may claim; far above any real one, far below the end of the range.
const EPOCH_MAX: u64 = u64::MAX / 2;
/// What to do about a rank that takes fewer steps.
const UNEVEN: &str = "If ranks have different numbers of batches, call join() after the loop.";

impl Coordinator {
    /// Handles a message to the coordinator.
    pub(crate) fn handle(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        id: OpId,
        message: Control,
    ) -> Result<(), Violation> {
        if let Control::Attached { ranks } = message {
            return self.attached(cx, from, id.epoch, &ranks);
        }
        if id.epoch != self.epoch || matches!(self.phase, Phase::Gathering) {
            cx.stats.stale_frames += 1;
            return Ok(());
        }
        match message {
            Control::Left { rank, failure } => self.left(cx, from, rank, &failure),
            Control::Unreachable { sidecar, reason } => self.unreachable(cx, from, sidecar, &reason),
            Control::Announce { announcements } => self.announced(cx, from, announcements),
            Control::Invalidated { number, invalidation } if self.is_running() => {
                self.agreement.scheduling.invalidated(cx, id.epoch, number, invalidation)
            }
            Control::Frozen { number, admitted, completed } if self.is_running() => {
                self.frozen(cx, from, FrozenSchedule { number, admitted, completed })
            }
            Control::Invalidated { .. } | Control::Frozen { .. } => Ok(()),
            Control::Done => self.done(cx, from, id.seq),
            Control::Performed { failure } => self.performed(cx, from, id, failure),
            Control::SetForgotten { set } if self.is_running() => self.agreement.forgotten(from, set),
            Control::SetForgotten { .. } => Ok(()),
            Control::Failed { failure } => {
                self.failed(cx, from, failure);
                Ok(())
            }
            Control::Activities { activities } => {
                let ranks: Vec<Rank> = activities.iter().map(|activity| activity.rank).collect();
                check_served(cx, from, &ranks)?;
                self.hung.answered(cx, &self.agreement, from, &activities);
                self.stalls.answered(cx, from, activities);
                self.stalls.check(cx, &self.agreement, &self.pending_commits, &self.suspects_sent);
                Ok(())
            }
            Control::SuspectRanks { ranks } => {
                check_served(cx, from, &ranks)?;
                self.suspect_ranks.insert(from, ranks);
                self.report_suspects(cx);
                Ok(())
            }
            _ => Err("sends the coordinator a message that only the coordinator sends".to_owned()),
        }
    }

    /// A link to a sidecar is new. It may have been replaced within the epoch, so the begin of the epoch is sent again.
    pub(crate) fn link_up(&mut self, cx: &mut Context, peer: SidecarIndex) {
        self.epoch_notified.remove(&peer);
        if self.is_running() && cx.sidecars.contains(&peer) {
            self.epoch_notified.insert(peer, self.epoch);
            cx.send_down(&[peer].into_iter().collect(), self.epoch, Seq(0), epoch_begin(cx));
        }
    }

    /// Sidecars are lost, because of the culprit, which may be one of them. Returns whether the epoch ends.
    pub(crate) fn lost(
        &mut self,
        cx: &mut Context,
        peers: &[SidecarIndex],
        culprit: SidecarIndex,
        reason: &str,
    ) -> bool {
        for peer in peers {
            self.attached.remove(peer);
            self.epoch_notified.remove(peer);
        }
        self.lost_lanes(cx, peers, culprit, reason)
    }

    /// Operations with these sidecars cannot be finished. Returns whether the epoch ends.
    pub(crate) fn lost_lanes(
        &mut self,
        cx: &mut Context,
        peers: &[SidecarIndex],
        culprit: SidecarIndex,
        reason: &str,
    ) -> bool {
        let awaited = peers.iter().any(|peer| self.awaits(*peer));
        if awaited {
            let who = wording::sidecar(&cx.config.world, culprit);
            let reason = format!("{who} is lost: {reason}; see the log of that sidecar and its host");
            self.end(cx, &Failure::new(Cause::SidecarLost, reason).with_sidecar(culprit));
        }
        awaited
    }

    /// Checks for silent sidecars and stalled names.
    pub(crate) fn tick(&mut self, cx: &mut Context) {
        let watched: Vec<SidecarIndex> = cx.sidecars.iter().copied().filter(|peer| self.awaits(*peer)).collect();
        let dead = watched.into_iter().find(|peer| cx.silent_ms(*peer) >= cx.config.peer_timeout_ms);
        if let Some(peer) = dead {
            let who = wording::sidecar(&cx.config.world, peer);
            let silence = wording::seconds(cx.silent_ms(peer));
            let reason = format!("{who} is lost: it has been silent for {silence}; see that host and its network");
            self.end(cx, &Failure::new(Cause::SidecarLost, reason).with_sidecar(peer));
        }
        self.report_suspects(cx);
        if let Some(failure) = self.stalls.shutdown(cx, &self.agreement) {
            self.end(cx, &failure);
        }
        self.stalls.check(cx, &self.agreement, &self.pending_commits, &self.suspects_sent);
        self.hung.check(cx, &self.agreement);
    }

    /// Orders what is ready. Called when all pending messages are handled, so that tensors that became ready together
    /// share a bucket.
    pub(crate) fn order_ready(&mut self, cx: &mut Context) {
        if self.is_running() {
            if cx.tune() {
                // The buckets of a schedule were cut with the values before.
                self.agreement.scheduling.withdraw_for_tuning(cx, self.epoch);
            }
            self.agreement.order_ready(cx);
            for operation in self.agreement.ordering.take_plugin_operations() {
                self.pending_commits.begin(cx.now, operation);
            }
        }
    }

    /// Whether sidecars have yet to finish an epoch, or an epoch runs.
    pub(crate) fn is_busy(&self) -> bool {
        !matches!(self.phase, Phase::Gathering)
    }

    fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    /// The epoch that runs or is being finished; 0 for none.
    pub(crate) fn busy_with(&self) -> Epoch {
        if self.is_busy() { self.epoch } else { Epoch(0) }
    }

    /// Whether the epoch needs a sidecar.
    pub(crate) fn awaits(&self, peer: SidecarIndex) -> bool {
        match &self.phase {
            Phase::Gathering => false,
            Phase::Running => true,
            Phase::Closing(unfinished, _) => unfinished.contains(&peer),
        }
    }

    /// The ranks that have yet to attach; none within an epoch.
    pub(crate) fn missing(&self, cx: &Context) -> Vec<Rank> {
        if self.is_busy() {
            return Vec::new();
        }
        let attached = |rank: &Rank| self.attached.values().any(|ranks| ranks.contains(rank));
        (0..).map(Rank).take(cx.config.world.size()).filter(|rank| !attached(rank)).collect()
    }

    /// Handles a sidecar's whole list of ranks that wait for the next epoch; it also reports the frame's epoch as
    /// finished there.
    fn attached(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        epoch: Epoch,
        ranks: &[Rank],
    ) -> Result<(), Violation> {
        check_served(cx, from, ranks)?;
        // Epochs after a false claim are greater than that, and not false.
        if epoch.0 > EPOCH_MAX && epoch > self.epoch {
            return Err(format!("claims to have seen {epoch}"));
        }
        match &mut self.phase {
            // Sent before the sender received the begin of this epoch.
            Phase::Running | Phase::Closing(..) if epoch < self.epoch => {
                cx.stats.stale_frames += 1;
                return Ok(());
            }
            Phase::Running | Phase::Closing(..) if epoch > self.epoch => {
                return Err(format!("claims to have seen {epoch}, but {} is the newest", self.epoch));
            }
            Phase::Running => {
                let who = wording::sidecar(&cx.config.world, from);
                let reason = format!("{who} has ended {epoch} on its own; see its log for the reason");
                self.end(cx, &Failure::new(Cause::SidecarLost, reason).with_sidecar(from));
            }
            // Its report of such an operation will not arrive, so nobody would receive the decision.
            Phase::Closing(_, shutdown) if self.pending_commits.awaits(from) => {
                let shutdown = shutdown.clone();
                self.end(cx, &shutdown);
            }
            Phase::Closing(unfinished, _) => {
                unfinished.remove(&from);
                if unfinished.is_empty() {
                    self.phase = Phase::Gathering;
                }
            }
            Phase::Gathering if self.epoch_notified.get(&from).is_some_and(|notified| epoch < *notified) => {
                cx.stats.stale_frames += 1;
                return Ok(());
            }
            // A restarted coordinator learns the newest epoch from the others.
            Phase::Gathering => self.epoch = self.epoch.max(epoch),
        }
        self.attached.insert(from, ranks.iter().copied().collect());
        self.begin_if_complete(cx);
        Ok(())
    }

    fn begin_if_complete(&mut self, cx: &mut Context) {
        let attached: usize = self.attached.values().map(BTreeSet::len).sum();
        if !matches!(self.phase, Phase::Gathering) || attached < cx.config.world.size() {
            return;
        }
        self.epoch.0 += 1;
        self.phase = Phase::Running;
        self.agreement.reset(self.epoch);
        self.waited_at_end.1.clear();
        self.attached.clear();
        cx.rebase();
        cx.tuner.restart_sample();
        self.epoch_notified = cx.sidecars.iter().map(|sidecar| (*sidecar, self.epoch)).collect();
        cx.send_down(&cx.all_sidecars.clone(), self.epoch, Seq(0), epoch_begin(cx));
    }

    /// Ends the epoch on all sidecars. After an orderly shutdown they finish ordered operations; any other failure ends
    /// those, too.
    fn end(&mut self, cx: &mut Context, failure: &Failure) {
        if self.is_running() {
            self.waited_at_end = (cx.now, self.oldest_names(cx.now));
        }
        let to = cx.sidecars.iter().copied().filter(|sidecar| self.awaits(*sidecar)).collect();
        cx.send_down(&to, self.epoch, Seq(0), Control::EpochEnd { failure: failure.clone() });
        let orderly = failure.cause == Cause::ShutDown && matches!(self.phase, Phase::Running);
        self.phase = if orderly {
            Phase::Closing(cx.sidecars.iter().copied().collect(), failure.clone())
        } else {
            Phase::Gathering
        };
        if !orderly {
            self.pending_commits.clear();
        }
        self.agreement.reset(self.epoch);
        self.stalls.clear();
        self.hung.clear();
        self.suspect_ranks.clear();
        self.suspects_sent = Suspects::default();
    }

    fn left(&mut self, cx: &mut Context, from: SidecarIndex, rank: Rank, failure: &Failure) -> Result<(), Violation> {
        check_served(cx, from, &[rank])?;
        if !self.is_running() {
            return Ok(());
        }
        // Operations that some sidecar has completed must complete everywhere, so the schedule is withdrawn first.
        if failure.cause == Cause::ShutDown && self.agreement.scheduling.is_busy() {
            self.agreement.scheduling.withdraw_for_exit(
                cx,
                self.epoch,
                PendingExit { from, rank, failure: failure.clone() },
            );
            return Ok(());
        }
        let why = &failure.reason;
        let who =
            if why.starts_with(&format!("{rank} ")) { String::new() } else { format!("{rank} on {from} has left: ") };
        let named = if failure.cause == Cause::ShutDown {
            let reason = format!(
                "ronde has been shut down: {who}{why}. Operations that were not under way by then fail. {UNEVEN}"
            );
            Failure::new(Cause::ShutDown, reason)
        } else {
            Failure::new(Cause::RankLost, format!("{who}{why}"))
        };
        let record = failure.clone().within_limits().record;
        self.end(cx, &named.with_rank(rank).with_sidecar(from).with_record(record));
        Ok(())
    }

    fn frozen(&mut self, cx: &mut Context, from: SidecarIndex, frozen: FrozenSchedule) -> Result<(), Violation> {
        self.agreement.frozen(cx, from, frozen)?;
        if let Some(failure) = self.agreement.take_fatal() {
            self.end(cx, &failure);
            return Ok(());
        }
        match self.agreement.scheduling.take_pending_exit() {
            Some(PendingExit { from, rank, failure }) => self.left(cx, from, rank, &failure),
            None => Ok(()),
        }
    }

    fn failed(&mut self, cx: &mut Context, from: SidecarIndex, failure: Failure) {
        // An operation ordered before a shutdown may need memory of the rank that closed: the shutdown is the reason.
        if let Phase::Closing(_, shutdown) = &self.phase {
            let shutdown = shutdown.clone();
            self.end(cx, &shutdown);
            return;
        }
        let reason = format!("{} cannot go on: {}", wording::sidecar(&cx.config.world, from), failure.reason);
        let cause = if failure.cause.ends_epoch() { failure.cause } else { Cause::Bug };
        // A sidecar that lost another one names that.
        let lost = failure.sidecar.filter(|lost| cause == Cause::SidecarLost && cx.sidecars.contains(lost));
        let named = Failure::new(cause, reason).with_sidecar(lost.unwrap_or(from));
        self.end(cx, &Failure { rank: failure.rank, tensor: failure.tensor, ..named });
    }

    fn unreachable(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        sidecar: SidecarIndex,
        reason: &str,
    ) -> Result<(), Violation> {
        if !cx.sidecars.contains(&sidecar) || sidecar == from {
            return Err(format!("reports {sidecar} as unreachable, which is not its peer"));
        }
        if !self.awaits(from) {
            return Ok(());
        }
        let is_alive = sidecar == cx.me() || cx.silent_ms(sidecar) < cx.config.suspect_ms;
        let who = wording::sidecar(&cx.config.world, sidecar);
        let text = if is_alive {
            format!("{from} cannot reach {who}: {reason}; the coordinator still receives from both")
        } else {
            format!("{who} is lost: neither {from} nor the coordinator receives from it: {reason}")
        };
        self.end(cx, &Failure::new(Cause::SidecarLost, text).with_sidecar(sidecar));
        Ok(())
    }

    fn announced(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        announcements: Vec<Announcement>,
    ) -> Result<(), Violation> {
        for announcement in announcements {
            if !self.is_running() {
                return Ok(());
            }
            self.agreement.announced(cx, from, announcement)?;
            if let Some((rank, since)) = self.agreement.take_last_to_be_ready() {
                self.note_last(cx, rank, since);
            }
            if let Some(failure) = self.agreement.take_fatal() {
                self.end(cx, &failure);
            }
        }
        Ok(())
    }

    /// A rank was the last to announce a tensor, for which the first one has waited since a time.
    fn note_last(&mut self, cx: &Context, rank: Rank, since: Time) {
        let (ranks, at) = (cx.config.world.size(), rank.index());
        self.last_to_be_ready.resize(ranks, 0);
        self.last_to_be_ready[at] += 1;
        self.waits.resize(ranks, Waits::default());
        self.waited_for_us.resize(ranks, 0);
        self.waited_for_us[at] += self.waits[at].add(since, cx.now);
    }

    fn done(&mut self, cx: &mut Context, from: SidecarIndex, seq: Seq) -> Result<(), Violation> {
        if !self.is_running() {
            return Ok(());
        }
        if self.agreement.ordering.reporter(seq) != Some(from) {
            return Err(format!("reports {seq} as done, which it must not report"));
        }
        self.agreement.ordering.done(cx, seq);
        Ok(())
    }

    fn performed(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        id: OpId,
        failure: Option<Failure>,
    ) -> Result<(), Violation> {
        if self.pending_commits.performed(cx, id, from, failure)? && self.is_running() {
            self.agreement.ordering.done(cx, id.seq);
        }
        Ok(())
    }

    /// Reports silent peers to all sidecars when the list has changed.
    fn report_suspects(&mut self, cx: &mut Context) {
        if !self.is_busy() {
            return;
        }
        let late = |peer: &SidecarIndex| self.awaits(*peer) && cx.silent_ms(*peer) >= cx.config.suspect_ms;
        let sidecars: Vec<SidecarIndex> = cx.sidecars.iter().copied().filter(late).collect();
        let mut ranks: Vec<Rank> = self.suspect_ranks.values().flatten().copied().collect();
        ranks.sort_unstable();
        ranks.dedup();
        let suspects = Suspects { sidecars, ranks };
        if suspects == self.suspects_sent {
            return;
        }
        self.suspects_sent = suspects.clone();
        let Suspects { sidecars, ranks } = suspects;
        cx.send_down(&cx.all_sidecars.clone(), self.epoch, Seq(0), Control::Suspects { sidecars, ranks });
    }
}

fn epoch_begin(cx: &Context) -> Control {
    Control::EpochBegin { world: cx.config.world.clone(), eager_bytes: cx.config.eager_bytes }
}

pub(crate) fn check_served(cx: &Context, from: SidecarIndex, ranks: &[Rank]) -> Result<(), Violation> {
    match ranks.iter().find(|rank| !cx.serves(from, **rank)) {
        Some(rank) => Err(format!("sends a message for {rank}, which it does not serve")),
        None => Ok(()),
    }
}
