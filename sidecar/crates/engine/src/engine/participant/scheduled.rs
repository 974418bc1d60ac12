//! The execution of a schedule on one sidecar: requests of local ranks are matched with positions. A position is
//! admitted, without negotiation, when all local ranks have submitted all of it and everything before it is admitted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_wire::control::OrderedTensor;
use ronde_wire::{Cause, Control, Epoch, Failure, Invalidation, Rank, ScheduledBucket, Seq, SetId, TensorName, limits};

use super::admission::{self, Template};
use super::requests::{Pending, RankKey, Unordered};
use super::{Participant, Running};
use crate::engine::shared::context::Context;
use crate::engine::shared::status::ScheduleStatus;
use crate::engine::shared::{RequestKey, SEQ_MAX, TensorKey};
use crate::event::{Action, Admission, Time};
use crate::trace::{Trace, operation};

/// The active schedule.
#[derive(Debug)]
pub(crate) struct Scheduled {
    number: u64,
    first: Seq,
    patience_us: u64,
    positions: Vec<Position>,
    /// The position of each tensor.
    tensor_positions: TensorPositions,
    /// Whether this sidecar takes part in any operation of it.
    takes_part: bool,
    /// Complete iterations, and the next position of the current one.
    iterations: u64,
    next: usize,
    /// Admitted operations that are not performed yet, and their bytes.
    in_flight: BTreeMap<Seq, u64>,
    in_flight_bytes: u64,
    /// The last admitted operation.
    admitted: Seq,
    /// The last completed operation of each set.
    completed: BTreeMap<SetId, Seq>,
    ranks: BTreeMap<Rank, RankProgress>,
    /// Whether the invalidation was reported to the coordinator.
    invalidated: bool,
    /// Whether admission and completion have stopped.
    frozen: bool,
}

type TensorPositions = BTreeMap<TensorKey, TensorPosition>;

/// A tensor of a schedule: the index of its operation, and its own within that.
#[derive(Clone, Copy, Debug)]
struct TensorPosition {
    operation: usize,
    tensor: usize,
}

#[derive(Debug)]
struct Position {
    bucket: ScheduledBucket,
    /// `None` where this sidecar takes no part.
    template: Option<Template>,
    bytes: u64,
    /// Requests of local ranks that are missing for its next iteration, and their total number.
    missing: usize,
    requests: usize,
    /// For each of its tensors, the local ranks that have submitted it.
    arrivals: Vec<Arrivals>,
}

/// The local ranks that have submitted a tensor for the next iteration of its position.
#[derive(Clone, Copy, Debug, Default)]
struct Arrivals {
    ranks: usize,
    first: Time,
}

impl Arrivals {
    /// A rank has submitted the tensor, at a time. Returns when the first of `all` local ranks has submitted it, if this is
    /// the last one.
    fn note(&mut self, all: usize, at: Time) -> Option<Time> {
        self.first = if self.ranks == 0 { at } else { self.first.min(at) };
        self.ranks += 1;
        if self.ranks < all {
            return None;
        }
        self.ranks = 0;
        (all > 1).then_some(self.first)
    }
}

/// The requests of one rank that are matched and not admitted.
#[derive(Debug, Default)]
struct RankProgress {
    requests: usize,
    last: Time,
    /// Whether the rank was found in order, and has submitted nothing since.
    in_order: bool,
}

impl Scheduled {
    /// Its first operation.
    pub(crate) fn first(&self) -> Seq {
        self.first
    }

    /// For status pages.
    pub(crate) fn progress(&self) -> ScheduleStatus {
        let (operations, tensors) = (self.positions.len(), self.tensor_positions.len());
        ScheduleStatus { number: self.number, operations, tensors, steps: self.iterations }
    }

    /// The next operation, when all of it is submitted and there is room for it.
    fn due(&self) -> Option<&Position> {
        let position = self.positions.get(self.next)?;
        let small = self.in_flight_bytes.saturating_add(position.bytes) <= limits::SCHEDULED_IN_FLIGHT_BYTES;
        let most = if small { limits::SCHEDULED_IN_FLIGHT_MAX } else { limits::BUCKETS_IN_FLIGHT };
        let room = self.in_flight.len() < most;
        (position.missing == 0 && room && self.takes_part && self.holds()).then_some(position)
    }

    /// Whether requests are matched and admitted. This stops once this sidecar has reported an invalidation: a rank's
    /// request after a refused one belongs to a later iteration than the next one.
    fn holds(&self) -> bool {
        !self.invalidated && !self.frozen
    }

    fn next_seq(&self) -> Seq {
        Seq(self.first.0 + self.iterations * self.positions.len() as u64 + self.next as u64)
    }

    /// Advances to the next position.
    fn step(&mut self) {
        self.next += 1;
        if self.next == self.positions.len() {
            (self.next, self.iterations) = (0, self.iterations + 1);
        }
    }

    /// Records an operation as performed. False when it is not in flight for this schedule.
    fn done(&mut self, seq: Seq) -> bool {
        let bytes = self.in_flight.remove(&seq);
        self.in_flight_bytes -= bytes.unwrap_or(0);
        bytes.is_some()
    }

    /// When the order of a quiet rank has to be checked next.
    fn deadline(&self) -> Option<Time> {
        let watched = self.ranks.values().filter(|progress| progress.requests > 0 && !progress.in_order);
        let first = watched.map(|progress| progress.last).min().filter(|_| self.holds())?;
        Some(Time(first.0.saturating_add(self.patience_us)))
    }

    /// Requests of local ranks for tensors whose groups were partly completed in the same iteration. They continue
    /// without their group.
    fn rest_of_groups(&self, completed: &[(SetId, Seq)]) -> Vec<RankKey> {
        let mut rest = Vec::new();
        for (set, last) in completed {
            // The last committed position of the set in its last iteration.
            let Some(last) = last.0.checked_sub(self.first.0).map(|turn| turn % self.positions.len() as u64) else {
                continue;
            };
            let of_set = (0..).zip(&self.positions).filter(|(_, position)| position.bucket.order.set == *set);
            let (stand, over): (Vec<_>, Vec<_>) = of_set.partition(|(at, _)| *at <= last);
            let groups = stand.iter().flat_map(|(_, position)| position.bucket.groups.iter().flatten());
            let groups: BTreeSet<(&TensorName, u32)> = groups.map(|group| (&group.name, group.size)).collect();
            for (_, position) in over {
                let Some(template) = &position.template else { continue };
                let tensors = position.bucket.order.tensors.iter().zip(&position.bucket.groups);
                let cut = tensors.filter(|(_, group)| {
                    group.as_ref().is_some_and(|group| groups.contains(&(&group.name, group.size)))
                });
                for (tensor, _) in cut {
                    rest.extend(template.view.local_ranks.iter().map(|rank| RankKey::new(*set, &tensor.name, *rank)));
                }
            }
        }
        rest
    }

    /// Whether a rank has submitted a tensor and not everything before it, or not all of its bucket. The rank may be
    /// waiting for the one before it submits the other.
    fn is_out_of_order(&self, rank: Rank, is_asked: impl Fn(RankKey) -> bool) -> bool {
        let mut gap = false;
        let turns = (self.next..self.positions.len()).chain(0..self.next);
        for position in turns.map(|at| &self.positions[at]) {
            let Some(template) = position.template.as_ref().filter(|template| template.view.serves(rank)) else {
                continue;
            };
            let key = |tensor: &OrderedTensor| RankKey::new(template.view.topology.set, &tensor.name, rank);
            let tensors = &position.bucket.order.tensors;
            let asked = tensors.iter().filter(|tensor| is_asked(key(tensor))).count();
            gap |= asked < tensors.len();
            if gap && asked > 0 {
                return true;
            }
        }
        false
    }
}

impl Participant {
    /// Handles a new schedule. Announced requests that are not ordered are void at the coordinator, and are matched
    /// with the schedule here.
    pub(crate) fn schedule(
        &mut self,
        cx: &mut Context,
        first: Seq,
        number: u64,
        patience_us: u64,
        buckets: Vec<ScheduledBucket>,
    ) {
        if !self.is_active() || self.broken {
            cx.stats.stale_frames += 1;
            return;
        }
        // Keeps the request caches of both sides equal.
        self.announce_all(cx);
        match self.prepare_schedule(cx, first, buckets) {
            Ok((positions, tensor_positions)) => {
                let serves = |rank: &Rank| (*rank, RankProgress::default());
                let takes_part = positions.iter().any(|position| position.template.is_some());
                self.scheduled = Some(Scheduled {
                    number,
                    first,
                    patience_us,
                    positions,
                    tensor_positions,
                    takes_part,
                    iterations: 0,
                    next: 0,
                    in_flight: BTreeMap::new(),
                    in_flight_bytes: 0,
                    admitted: Seq(first.0 - 1),
                    completed: BTreeMap::new(),
                    ranks: self.present.keys().map(serves).collect(),
                    invalidated: false,
                    frozen: false,
                });
                self.match_unordered(cx);
            }
            Err(reason) => {
                let reason = format!("schedule {number} of {} cannot be followed: {reason}", self.epoch);
                self.fail(cx, first, &Failure::new(Cause::Bug, reason));
            }
        }
    }

    /// Handles the withdrawal of a schedule: nothing of it is admitted or completed after this.
    pub(crate) fn freeze(&mut self, cx: &mut Context, number: u64) {
        let current = |scheduled: &&mut Scheduled| scheduled.number == number && !scheduled.frozen;
        let Some(scheduled) = self.scheduled.as_mut().filter(current) else {
            cx.stats.stale_frames += 1;
            return;
        };
        scheduled.frozen = true;
        let completed = scheduled.completed.iter().map(|(set, seq)| (*set, *seq)).collect();
        let frozen = Control::Frozen { number, admitted: scheduled.admitted, completed };
        self.to_coordinator(cx, Seq(0), frozen);
    }

    /// Handles the end of a schedule. Its operations up to the last one that any sidecar completed in the same set are
    /// committed; the requests of all others are announced again.
    pub(crate) fn resume(&mut self, cx: &mut Context, number: u64, last: Seq, completed: &[(SetId, Seq)]) {
        let Some(scheduled) = self.scheduled.take_if(|scheduled| scheduled.number == number && scheduled.frozen) else {
            cx.stats.stale_frames += 1;
            return;
        };
        let stands = |set: SetId, seq: Seq| completed.iter().any(|(of, last)| *of == set && seq <= *last);
        let mut dropped = Vec::new();
        for seq in self.admitted.range(scheduled.first..).map(|(seq, _)| *seq).collect::<Vec<_>>() {
            let Some(running) = self.admitted.get(&seq) else { continue };
            let set = running.admission.topology.set;
            match (stands(set, seq), running.held) {
                (true, false) => {}
                (true, true) => {
                    if let Some(running) = self.admitted.remove(&seq) {
                        self.performed(cx, running);
                    }
                }
                (false, _) => {
                    dropped.push(seq);
                    cx.traces.note(|| Trace::Over { seq, dropped: true });
                    self.drop_operation(seq);
                }
            }
        }
        cx.stats.cancelled_operations += dropped.len() as u64;
        if !dropped.is_empty() {
            self.dropping = Some(last);
        }
        cx.act(Action::Cancel { epoch: self.epoch, last, dropped });
        self.last_seq = self.last_seq.max(last);
        for key in scheduled.rest_of_groups(completed) {
            if !self.requests.ungroup(&key) {
                self.ungrouped.insert(key);
            }
        }
        self.announce_unordered(cx);
    }

    /// The lanes have dropped the cancelled operations.
    pub(crate) fn cancelled(&mut self, cx: &mut Context, epoch: Epoch, last: Seq) {
        if epoch == self.epoch && self.dropping.take_if(|dropping| *dropping == last).is_some() {
            self.advance(cx);
        }
    }

    /// Matches a new request with the schedule, if there is one.
    pub(super) fn follow(&mut self, cx: &mut Context, key: &RankKey) {
        let Some(scheduled) = self.scheduled.as_mut().filter(|scheduled| scheduled.holds()) else { return };
        let Some(pending) = self.requests.pending(key) else { return };
        let found = scheduled.tensor_positions.get(&TensorKey::new(key.set, &key.name));
        let position = found.and_then(|at| Some((scheduled.positions.get_mut(at.operation)?, at.tensor)));
        let matched = position.filter(|(position, tensor)| {
            let (order, group) = (&position.bucket.order, &position.bucket.groups[*tensor]);
            let fits = |template: &Template| {
                admission::fits(&template.view, order, &order.tensors[*tensor], key.rank, &pending.what).is_ok()
            };
            pending.what.group == *group && position.template.as_ref().is_some_and(fits)
        });
        let Some((position, tensor)) = matched else {
            self.invalidate(cx, Invalidation::Request);
            return;
        };
        position.missing -= 1;
        let all = position.requests / position.arrivals.len();
        if let Some(first) = position.arrivals[tensor].note(all, pending.since) {
            let waited_us = self.waits_here.entry(key.rank).or_default().add(first, pending.since);
            *cx.stats.waited_here_us.entry(key.rank.0).or_default() += waited_us;
        }
        let what = operation(&position.bucket.order.collective);
        cx.traces.note(|| Trace::Ready { set: key.set, name: key.name.clone(), operation: what, rank: key.rank });
        let progress = scheduled.ranks.entry(key.rank).or_default();
        (progress.requests, progress.last, progress.in_order) = (progress.requests + 1, cx.now, false);
        self.advance(cx);
    }

    /// Admits the operations of the schedule that are submitted completely.
    pub(super) fn advance(&mut self, cx: &mut Context) {
        while let Some(scheduled) = self.scheduled.as_mut().filter(|_| !self.broken && self.dropping.is_none()) {
            let Some(position) = scheduled.due() else { return };
            let (seq, bytes) = (scheduled.next_seq(), position.bytes);
            let Some(template) = &position.template else {
                scheduled.step();
                continue;
            };
            match template.admission(&mut self.requests, self.epoch, seq, &position.bucket.order) {
                Ok(admission) => {
                    let admission = Admission { scheduled: true, ..admission };
                    for answered in admission.tensors.iter().flat_map(|tensor| &tensor.requests) {
                        if let Some(progress) = scheduled.ranks.get_mut(&answered.rank) {
                            progress.requests -= 1;
                        }
                    }
                    let position = &mut scheduled.positions[scheduled.next];
                    cx.traces.note(|| Trace::ordered(seq, &position.bucket.order, true));
                    position.missing = position.requests;
                    scheduled.in_flight.insert(seq, bytes);
                    scheduled.in_flight_bytes += bytes;
                    scheduled.admitted = seq;
                    scheduled.step();
                    cx.stats.scheduled_operations += 1;
                    self.last_seq = seq;
                    self.admit(
                        cx,
                        Running { admission: Arc::new(admission), reports: false, held: false, reported: false },
                    );
                }
                Err(reason) => {
                    let reason = format!("{seq} of {} cannot be admitted: {reason}", self.epoch);
                    self.fail(cx, seq, &Failure::new(Cause::Bug, reason));
                }
            }
        }
    }

    /// Records that an operation is performed. Returns whether its completion is held, because it may be dropped.
    pub(super) fn hold(&mut self, seq: Seq) -> bool {
        let Some(scheduled) = &mut self.scheduled else { return false };
        let Some(running) = self.admitted.get_mut(&seq).filter(|_| scheduled.done(seq)) else { return false };
        if scheduled.frozen {
            running.held = true;
        } else {
            let last = scheduled.completed.entry(running.admission.topology.set).or_insert(seq);
            *last = seq.max(*last);
        }
        scheduled.frozen
    }

    /// Reports to the coordinator, once, that the schedule is invalid.
    pub(super) fn invalidate(&mut self, cx: &mut Context, invalidation: Invalidation) {
        let Some(scheduled) = self.scheduled.as_mut().filter(|scheduled| scheduled.holds()) else { return };
        scheduled.invalidated = true;
        let number = scheduled.number;
        self.to_coordinator(cx, Seq(0), Control::Invalidated { number, invalidation });
    }

    /// When [`Self::check_schedule`] is due.
    pub(crate) fn invalidation_deadline(&self) -> Option<Time> {
        self.scheduled.as_ref().and_then(Scheduled::deadline)
    }

    /// Checks the order of ranks that have submitted nothing for a while: a rank out of order may wait for ever.
    pub(crate) fn check_schedule(&mut self, cx: &mut Context) {
        let (Some(scheduled), requests) = (&mut self.scheduled, &self.requests) else { return };
        if scheduled.deadline().is_none_or(|at| cx.now < at) {
            return;
        }
        let is_asked = |key: RankKey| requests.pending(&key).is_some_and(|pending| pending.ordered.is_none());
        let patience_us = scheduled.patience_us;
        let quiet = |progress: &RankProgress| {
            progress.requests > 0 && !progress.in_order && cx.now.0 >= progress.last.0.saturating_add(patience_us)
        };
        let quiet: Vec<Rank> =
            scheduled.ranks.iter().filter(|(_, progress)| quiet(progress)).map(|(rank, _)| *rank).collect();
        for rank in quiet {
            if scheduled.is_out_of_order(rank, is_asked) {
                self.invalidate(cx, Invalidation::Order);
                return;
            }
            if let Some(progress) = scheduled.ranks.get_mut(&rank) {
                progress.in_order = true;
            }
        }
    }

    /// Invalidates the schedule when a request waits so long that the coordinator has to find the missing rank.
    pub(super) fn check_delays(&mut self, cx: &mut Context) {
        let Some(first) = self.scheduled.as_ref().map(|scheduled| scheduled.first) else { return };
        let limit_ms = cx.config.stall_checked_ms() / DELAYS_PER_WARNING;
        let is_late = |since: Time| cx.now.ms_since(since) >= limit_ms;
        let ahead = |ordered: Option<Seq>| ordered.is_none_or(|seq| seq >= first);
        let delayed = |pending: &Pending| !pending.forms_set() && ahead(pending.ordered) && is_late(pending.since);
        if self.requests.iter().any(|(_, pending)| delayed(pending)) {
            self.invalidate(cx, Invalidation::Delay);
        }
    }

    fn prepare_schedule(
        &self,
        cx: &mut Context,
        first: Seq,
        buckets: Vec<ScheduledBucket>,
    ) -> Result<(Vec<Position>, TensorPositions), String> {
        // Its operations are numbered here, so there have to be numbers for all of them.
        if first.0 > SEQ_MAX {
            return Err(format!("it begins with {first}; no operation has a number beyond {SEQ_MAX}"));
        }
        if first <= self.last_seq || self.scheduled.is_some() {
            return Err(format!(
                "it begins with {first}, which does not follow {}, or another schedule is active",
                self.last_seq
            ));
        }
        let tensors: usize = buckets.iter().map(|bucket| bucket.order.tensors.len()).sum();
        let sets: BTreeSet<SetId> = buckets.iter().map(|bucket| bucket.order.set).collect();
        let within = (1..=limits::SCHEDULE_BUCKETS_MAX).contains(&buckets.len())
            && tensors <= limits::SCHEDULE_TENSORS_MAX
            && sets.len() <= limits::SCHEDULE_SETS_MAX;
        if !within {
            let (buckets, sets) = (buckets.len(), sets.len());
            return Err(format!(
                "{buckets} operations with {tensors} tensors of {sets} sets are not within the limits"
            ));
        }
        let (mut positions, mut tensor_positions) = (Vec::with_capacity(buckets.len()), TensorPositions::new());
        for (at, bucket) in buckets.into_iter().enumerate() {
            let order = &bucket.order;
            for (tensor, ordered) in order.tensors.iter().enumerate() {
                let key = TensorKey::new(order.set, &ordered.name);
                if tensor_positions.insert(key, TensorPosition { operation: at, tensor }).is_some() {
                    return Err(format!("tensor {} of {} is in it twice", ordered.name, order.set));
                }
            }
            positions.push(self.position(cx, bucket)?);
        }
        Ok((positions, tensor_positions))
    }

    fn position(&self, cx: &mut Context, bucket: ScheduledBucket) -> Result<Position, String> {
        let order = &bucket.order;
        let tensors = order.tensors.len();
        let bare = order.joined.is_empty() && order.pair.is_none() && order.contributions.is_empty();
        if !bare || bucket.groups.len() != tensors {
            return Err(format!("an operation of {} is not one for a schedule", order.set));
        }
        let view = self.sets.view(cx, order.set).ok_or_else(|| format!("{} does not exist here", order.set))?;
        let template = view.me.map(|_| Template::new(&view, order)).transpose()?;
        let element_bytes = order.dtype.size_bytes() as u64;
        let bytes = template.as_ref().map_or(0, |template| template.elements().saturating_mul(element_bytes));
        let requests = tensors * view.local_ranks.len();
        let arrivals = vec![Arrivals::default(); tensors];
        Ok(Position { bucket, template, bytes, missing: requests, requests, arrivals })
    }

    /// Matches announced requests that are not ordered with the schedule; those that do not match invalidate it.
    fn match_unordered(&mut self, cx: &mut Context) {
        for unordered in self.requests.unordered() {
            match unordered {
                Unordered::Refused { .. } => self.invalidate(cx, Invalidation::Refusal),
                Unordered::Request(key) => {
                    if self.requests.pending(&key).is_some_and(|pending| pending.withdrawn.is_some()) {
                        self.invalidate(cx, Invalidation::Refusal);
                    }
                    self.follow(cx, &key);
                }
            }
        }
    }

    /// Drops an operation: its requests are as they were before it was admitted.
    fn drop_operation(&mut self, seq: Seq) {
        let Some(running) = self.admitted.remove(&seq) else { return };
        for answered in running.admission.tensors.iter().flat_map(|tensor| &tensor.requests) {
            self.requests.mark_unordered(RequestKey { rank: answered.rank, request: answered.request });
        }
    }
}

/// Checks for delayed requests per stall warning time, of which the warning may be late by one interval.
const DELAYS_PER_WARNING: u64 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_the_local_ranks_is_waited_for() {
        let mut arrivals = Arrivals::default();
        for _ in 0..2 {
            assert_eq!(arrivals.note(3, Time(50)), None);
            assert_eq!(arrivals.note(3, Time(20)), None, "requests from before the schedule come in any order");
            assert_eq!(arrivals.note(3, Time(90)), Some(Time(20)));
        }
        assert_eq!(arrivals.note(1, Time(5)), None, "nobody waits for the only rank");
    }
}
