//! The coordinator's side of schedules: it issues one when steps repeat, and withdraws it when a rank deviates.
//!
//! While there is a schedule nothing is negotiated. Announcements that still arrive were sent before their sender
//! received the schedule, and are void: each sidecar keeps its requests and announces the remaining ones when the
//! schedule is over.
//!
//! **Which operations are committed.** On the withdrawal of a schedule each sidecar stops completing operations and
//! reports the ones that it has completed. An operation that any sidecar has completed was admitted by all members of
//! its set, as were all earlier ones of the same set. These are performed to their end. This holds for each set
//! separately: the members of another set may not have submitted an operation in between. All other operations are
//! dropped everywhere; no worker was notified of them.

use std::collections::{BTreeMap, BTreeSet};

use ronde_wire::{
    Cause, Control, Epoch, Failure, Invalidation, Rank, ScheduledBucket, Seq, SetId, SidecarIndex, SidecarSet,
    TensorName, control, limits,
};

use super::Violation;
use super::agreement::Agreement;
use super::ordering::make_order;
use super::repetition::{Bucket, Repetition};
use crate::engine::shared::config::RunAhead;
use crate::engine::shared::context::Context;
use crate::engine::shared::{SEQ_MAX, TensorKey, wording};
use crate::trace::Trace;

/// The schedules of the epoch.
#[derive(Debug, Default)]
pub(crate) struct Scheduling {
    pub(super) repetition: Repetition,
    /// The number of schedules so far.
    number: u64,
    issued: Option<Issued>,
    /// Schedules in a row that did not last: each of them doubles the equal steps that are required before the next.
    setbacks: u32,
    /// An orderly exit of a rank, handled once the schedule is withdrawn.
    pending_exit: Option<PendingExit>,
}

/// An orderly exit of a rank, as its sidecar reported it.
#[derive(Debug)]
pub(crate) struct PendingExit {
    pub(crate) from: SidecarIndex,
    pub(crate) rank: Rank,
    pub(crate) failure: Failure,
}

/// The fields of [`Control::Frozen`].
#[derive(Debug)]
pub(crate) struct FrozenSchedule {
    pub(crate) number: u64,
    pub(crate) admitted: Seq,
    pub(crate) completed: Vec<(SetId, Seq)>,
}

#[derive(Debug)]
struct Issued {
    first: Seq,
    /// The names of each operation of an iteration.
    names: Vec<(SetId, Vec<TensorName>)>,
    /// The members of each set in it.
    members: BTreeMap<SetId, SidecarSet>,
    /// The answers, while it is being withdrawn.
    answers: Option<Answers>,
    /// Whether the coordinator withdraws it to change settings: nothing is known then about the program.
    retuned: bool,
}

/// The answers of the sidecars to the withdrawal of a schedule.
#[derive(Debug)]
struct Answers {
    missing: BTreeSet<SidecarIndex>,
    /// The last operation that each sidecar has admitted.
    admitted: BTreeMap<SidecarIndex, Seq>,
    /// The last completed operation of each set, and a sidecar that has completed it.
    completed: BTreeMap<SetId, (Seq, SidecarIndex)>,
}

impl Scheduling {
    /// Whether there is a schedule, running or being withdrawn.
    pub(crate) fn is_busy(&self) -> bool {
        self.issued.is_some()
    }

    /// Withdraws the schedule because a rank exits. The exit is handled when that is over.
    pub(crate) fn withdraw_for_exit(&mut self, cx: &mut Context, epoch: Epoch, pending_exit: PendingExit) {
        self.pending_exit.get_or_insert(pending_exit);
        self.withdraw(cx, epoch, Invalidation::WorkerExit);
    }

    /// Withdraws the schedule because the coordinator has other settings for the next one.
    pub(crate) fn withdraw_for_tuning(&mut self, cx: &mut Context, epoch: Epoch) {
        self.withdraw(cx, epoch, Invalidation::Tuning);
    }

    /// Takes the exit to handle, when no schedule is active.
    pub(crate) fn take_pending_exit(&mut self) -> Option<PendingExit> {
        if self.is_busy() { None } else { self.pending_exit.take() }
    }

    /// A sidecar reports a schedule as invalid.
    ///
    /// # Errors
    /// When there was no schedule of that number.
    pub(crate) fn invalidated(
        &mut self,
        cx: &mut Context,
        epoch: Epoch,
        number: u64,
        invalidation: Invalidation,
    ) -> Result<(), Violation> {
        if number == 0 || number > self.number {
            return Err(format!("invalidates schedule {number}; there were {}", self.number));
        }
        // A report about an older schedule was sent before the sender received its end.
        if number == self.number {
            self.withdraw(cx, epoch, invalidation);
        }
        Ok(())
    }

    fn withdraw(&mut self, cx: &mut Context, epoch: Epoch, invalidation: Invalidation) {
        let Some(issued) = self.issued.as_mut().filter(|issued| issued.answers.is_none()) else { return };
        let missing = cx.sidecars.iter().copied().collect();
        issued.retuned = invalidation == Invalidation::Tuning;
        issued.answers = Some(Answers { missing, admitted: BTreeMap::new(), completed: BTreeMap::new() });
        cx.stats.schedules_withdrawn[invalidation as usize] += 1;
        cx.send_down(&cx.all_sidecars.clone(), epoch, Seq(0), Control::Withdraw { number: self.number });
    }
}

impl Answers {
    /// An operation is complete nowhere before all members of its set have admitted it. Returns one for which the answers
    /// contradict that, with the two sidecars.
    fn contradiction(&self, members: &BTreeMap<SetId, SidecarSet>) -> Option<(Seq, SidecarIndex, SidecarIndex)> {
        self.completed.iter().find_map(|(set, (seq, by))| {
            let lacks = |member: &SidecarIndex| self.admitted.get(member).is_none_or(|admitted| admitted < seq);
            members.get(set)?.iter().find(lacks).map(|member| (*seq, *by, member))
        })
    }
}

impl Issued {
    /// The tensors after the committed operations in the last iteration of each set.
    fn left(&self) -> BTreeSet<TensorKey> {
        let completed = self.answers.iter().flat_map(|answers| &answers.completed);
        let rest = completed.flat_map(|(set, (last, _))| {
            let stands = (last.0 - self.first.0) % self.names.len() as u64;
            let rest = (0..).zip(&self.names).filter(move |(at, (of, _))| of == set && *at > stands);
            rest.flat_map(|(_, (set, names))| names.iter().map(|name| TensorKey::new(*set, name)))
        });
        rest.collect()
    }
}

impl Agreement {
    /// Orders what is ready, and issues a schedule when enough steps were equal.
    pub(crate) fn order_ready(&mut self, cx: &mut Context) {
        if self.scheduling.is_busy() {
            return;
        }
        let Some(run_ahead) = cx.config.run_ahead.filter(|_| cx.sidecars.len() > 1) else {
            self.scheduling.repetition.set_tensors_max(0);
            self.ordering.order(cx, self.epoch, &mut self.scheduling.repetition);
            return;
        };
        self.scheduling.repetition.set_tensors_max(run_ahead.tensors_max);
        self.ordering.order(cx, self.epoch, &mut self.scheduling.repetition);
        self.issue(cx, run_ahead);
    }

    fn issue(&mut self, cx: &mut Context, run_ahead: RunAhead) {
        let steps = run_ahead.steps.max(2) << self.scheduling.setbacks.min(run_ahead.setbacks_max).min(SETBACKS_MOST);
        let has_seqs = self.ordering.last().0 < SEQ_MAX - SCHEDULE_SEQS_MAX;
        if self.scheduling.repetition.step(steps).is_none() || !self.is_plain() || !has_seqs {
            return;
        }
        let Some((buckets, last_us)) = self.scheduling.repetition.step(steps) else { return };
        let sets: BTreeSet<SetId> = buckets.iter().map(|bucket| bucket.view.topology.set).collect();
        let buckets = buckets.to_vec();
        let members = buckets.iter().map(|bucket| (bucket.view.topology.set, bucket.view.sidecars)).collect();
        let patience_us = last_us.clamp(PATIENCE_LEAST_US, PATIENCE_MOST_US);
        let fits = sets.len() <= limits::SCHEDULE_SETS_MAX && buckets.len() <= limits::SCHEDULE_BUCKETS_MAX;
        let scheduled = if fits { scheduled(cx, buckets) } else { None };
        let Some(buckets) = scheduled else {
            // The next equal step would not fit either.
            self.scheduling.repetition.reset();
            self.scheduling.setbacks = self.scheduling.setbacks.saturating_add(1);
            return;
        };
        self.scheduling.number += 1;
        let (number, first) = (self.scheduling.number, Seq(self.ordering.last().0 + 1));
        self.negotiation.clear();
        self.ordering.clear_ready();
        cx.stats.schedules_issued += 1;
        let names = |bucket: &ScheduledBucket| {
            let names = bucket.order.tensors.iter().map(|tensor| tensor.name.clone());
            (bucket.order.set, names.collect())
        };
        let names = buckets.iter().map(names).collect();
        self.scheduling.issued = Some(Issued { first, names, members, answers: None, retuned: false });
        cx.traces.note(|| Trace::Cycle);
        let schedule = Control::Schedule { number, buckets, patience_us };
        cx.send_down(&cx.all_sidecars.clone(), self.epoch, first, schedule);
    }

    /// Whether all pending requests are part of the step, and no other negotiation is in progress.
    fn is_plain(&self) -> bool {
        let expected = |set, name| self.scheduling.repetition.asks_for(set, name);
        let decided = !self.negotiation.is_poisoned() && self.groups.is_empty() && self.process_sets.all_acknowledged();
        decided
            && self.joins.is_empty()
            && !self.ordering.ends_join()
            && self.matching.is_empty()
            && self.negotiation.waiting().all(|waiting| expected(waiting.request.set, &waiting.request.name))
            && self.ordering.ready().all(|(set, ready)| expected(set, &ready.tensor.name))
    }

    /// Handles the answer of a sidecar to the withdrawal of a schedule.
    ///
    /// # Errors
    /// When it was not asked, or reports impossible numbers.
    pub(crate) fn frozen(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        FrozenSchedule { number, admitted, completed }: FrozenSchedule,
    ) -> Result<(), Violation> {
        let current = number == self.scheduling.number;
        let issued = self.scheduling.issued.as_mut().filter(|_| current);
        let (first, members) = match &issued {
            Some(Issued { first, members, .. }) => (*first, members),
            None => return Err(format!("answers for schedule {number}, for which it was not asked")),
        };
        let possible = |(set, seq): &(SetId, Seq)| {
            members.get(set).is_some_and(|members| members.contains(from)) && (first..=admitted).contains(seq)
        };
        let ahead = admitted.0.checked_sub(first.0 - 1).is_some_and(|ahead| ahead <= SCHEDULE_SEQS_MAX);
        if !ahead || !completed.iter().all(possible) {
            return Err(format!(
                "reports for schedule {number} that it admitted {admitted} and completed {completed:?}"
            ));
        }
        let asked = |answers: &&mut Answers| answers.missing.contains(&from);
        let Some(answers) = issued.and_then(|issued| issued.answers.as_mut()).filter(asked) else {
            return Err(format!("answers for schedule {number}, for which it was not asked"));
        };
        answers.missing.remove(&from);
        answers.admitted.insert(from, admitted);
        for (set, seq) in completed {
            let last = answers.completed.entry(set).or_insert((seq, from));
            *last = (seq, from).max(*last);
        }
        if answers.missing.is_empty() {
            self.resume(cx);
        }
        Ok(())
    }

    fn resume(&mut self, cx: &mut Context) {
        let Some(issued) = self.scheduling.issued.take() else { return };
        let left = issued.left();
        let Issued { first, names, members, answers: Some(answers), retuned } = issued else { return };
        if let Some((seq, one, other)) = answers.contradiction(&members) {
            let world = &cx.config.world;
            let reason = format!(
                "{} has completed {seq}, as it reports, but {} has not admitted it, so one of them breaks the protocol; see \
                 their logs",
                wording::sidecar(world, one),
                wording::sidecar(world, other)
            );
            self.fatal = Some(Failure::new(Cause::SidecarLost, reason).with_sidecar(one));
            return;
        }
        let performed = answers.completed.values().map(|(last, _)| last.0 + 1 - first.0).max().unwrap_or(0);
        let worth_it = performed / (names.len() as u64).max(1) >= ITERATIONS_WORTH_IT;
        self.scheduling.setbacks = match (worth_it, retuned) {
            (true, _) => 0,
            (false, true) => self.scheduling.setbacks,
            (false, false) => self.scheduling.setbacks.saturating_add(1),
        };
        self.scheduling.repetition.restart(left);
        let last = answers.admitted.values().copied().max().unwrap_or(Seq(first.0 - 1));
        self.ordering.pass_over(last);
        let completed = answers.completed.into_iter().map(|(set, (seq, _))| (set, seq)).collect();
        let resume = Control::Resume { number: self.scheduling.number, last, completed };
        let all_sidecars: SidecarSet = cx.all_sidecars;
        cx.send_down(&all_sidecars, self.epoch, Seq(0), resume);
    }
}

/// The buckets of a schedule; `None` when they do not fit a message.
fn scheduled(cx: &mut Context, buckets: Vec<Bucket>) -> Option<Vec<ScheduledBucket>> {
    let mut bytes = 0;
    let mut all = Vec::with_capacity(buckets.len());
    for Bucket { view, tensors } in buckets {
        let groups = tensors.iter().map(|tensor| tensor.group.clone()).collect();
        let order = make_order(cx, &view, tensors, false)?;
        let bucket = ScheduledBucket { order, groups };
        bytes += control::encode(&bucket).len();
        if bytes > SCHEDULE_BYTES_MAX {
            return None;
        }
        all.push(bucket);
    }
    Some(all)
}

/// Bytes of a schedule's buckets; the rest of a message is for its other fields.
const SCHEDULE_BYTES_MAX: usize = limits::ENCLOSED_BYTES_MAX - 64;
/// The least patience. A rank that deviates from the order for as long as a step took most likely waits for another
/// rank; but it needs some time between two requests.
const PATIENCE_LEAST_US: u64 = 1_000;
/// The greatest patience: a withdrawal costs less than this.
const PATIENCE_MOST_US: u64 = 250_000;
/// Iterations after which a schedule has saved much more than it cost.
const ITERATIONS_WORTH_IT: u64 = 32;
/// Bounds the shift; no job has that many steps.
const SETBACKS_MOST: u32 = 20;
/// Operations of one schedule that a sidecar may claim to have admitted: as many as it could in months, and so few that
/// hundreds of thousands of false claims leave numbers to honest sidecars.
const SCHEDULE_SEQS_MAX: u64 = 1 << 44;
