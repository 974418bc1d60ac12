//! Requests of local ranks: checked, announced, withdrawn.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    AnySource, Cause, Collective, Control, Failure, Group, Invalidation, Rank, Request, RequestId, Seq, SetId,
    TensorName, limits,
};

use super::requests::{RankKey, Unordered};
use super::scheduled::Scheduled;
use super::{Participant, Phase};
use crate::engine::coordinator::member_sets::weight;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::{Mailbox, RequestKey, Submission, TensorKey, eager, validation};
use crate::event::{Action, Time};

impl Participant {
    /// Handles a worker's request.
    pub(crate) fn submit(&mut self, cx: &mut Context, key: RequestKey, Submission { what, contribution }: Submission) {
        cx.stats.submitted += 1;
        self.mark_alive(cx, key.rank);
        if let Some(what) = self.in_posting_order(cx, key, what) {
            self.submit_in_turn(cx, key, Submission { what, contribution });
        }
    }

    /// Submits a request. A receive comes in its turn among the receives of its rank and tag.
    pub(super) fn submit_in_turn(
        &mut self,
        cx: &mut Context,
        request: RequestKey,
        Submission { mut what, contribution }: Submission,
    ) {
        let rank = request.rank;
        let key = RankKey::new(what.set, &what.name, rank);
        let view = match self.check_accepts(cx, request, &what) {
            Ok(view) => view,
            Err(failure) => {
                let rank_at_fault = failure.rank.or(Some(rank));
                self.refuse(cx, request, Failure { rank: rank_at_fault, ..failure });
                return;
            }
        };
        if self.ungrouped.remove(&key) {
            what.group = None;
        }
        let checked = self
            .check_room(rank)
            .and_then(|()| self.check_set_room(rank, &what))
            .and_then(|()| validation::check(&cx.config.world, &view, &what))
            .and_then(|()| self.check_join(rank, &what))
            .and_then(|()| self.check_contribution(&view, rank, &what, &contribution));
        if let Err(reason) = checked {
            let failure = Failure::new(Cause::Refused, reason).with_rank(rank).with_tensor(what.name);
            match &what.collective {
                // No other rank knows of a receive from any source.
                Collective::RecvAny { .. } => {}
                Collective::AddSetOfMembers { ranks } => {
                    self.void_set(rank, key.name, valid(cx, ranks), failure.clone());
                }
                _ => self.void(cx, key, failure.clone(), what.group),
            }
            self.refuse(cx, request, failure);
            return;
        }
        if let Collective::RecvAny { tag } = what.collective {
            self.waits_for_source(Mailbox { set: what.set, any: AnySource { to: rank, tag } });
        }
        self.enqueue(cx, &key, request.request, cx.now, Submission { what, contribution });
    }

    /// Announces a valid request, or matches it with the schedule.
    pub(super) fn enqueue(
        &mut self,
        cx: &mut Context,
        key: &RankKey,
        request: RequestId,
        since: Time,
        Submission { what, contribution }: Submission,
    ) {
        let rank = key.rank;
        if matches!(what.collective, Collective::AddSetOfMembers { .. }) {
            // Independent of schedules, and of rounds of names.
            self.announce(cx, rank, &what, contribution.clone());
            self.requests.insert(key.clone(), request, Submission { what, contribution }, since);
            return;
        }
        if let Some(failure) = self.requests.take_rejection(key) {
            // This round of the name has failed already. The coordinator counts its participants.
            self.announce_void(key, failure.clone(), what.group);
            self.complete(cx, RequestKey { rank, request }, Err(failure));
            return;
        }
        if self.scheduled.is_none() {
            self.announce(cx, rank, &what, contribution.clone());
        }
        self.requests.insert(key.clone(), request, Submission { what, contribution }, since);
        self.follow(cx, key);
    }

    /// Bytes of a rank's contribution in its announcement.
    pub(crate) fn contribution_bytes(&self, view: &SetView, rank: Rank, what: &Request) -> usize {
        eager::contribution_bytes(view, rank, what, self.eager_bytes).unwrap_or(0)
    }

    fn check_contribution(&self, view: &SetView, rank: Rank, what: &Request, came: &Bytes) -> Result<(), String> {
        match self.contribution_bytes(view, rank, what) {
            due if due == came.len() => Ok(()),
            due => Err(format!("{} of {due} bytes of its contribution arrived; this is a bug in ronde", came.len())),
        }
    }

    /// Handles a request that the service refused.
    pub(crate) fn refused_by_service(
        &mut self,
        cx: &mut Context,
        rank: Rank,
        TensorKey { set, name }: TensorKey,
        group: Option<Group>,
        why: &str,
    ) {
        cx.stats.refused += 1;
        let failure = Failure::new(Cause::Refused, why).with_rank(rank).with_tensor(name.clone());
        let Some(name) = self.refused_in_posting_order(cx, rank, TensorKey { set, name }, &failure) else { return };
        let member = self.sets.scope(cx, set, &name).is_some_and(|view| view.contains(rank));
        let joined = self.requests.has_joined(set, rank);
        let key = RankKey { set, name, rank };
        // While a request by this name is pending, the refused one was a second: the first stays valid.
        if self.is_active() && member && !joined && self.takes_part(rank) && !self.requests.has(&key) {
            self.void(cx, key, failure, group);
        }
    }

    /// Handles a request for a process set of its members that the service refused.
    pub(crate) fn set_refused_by_service(
        &mut self,
        cx: &mut Context,
        rank: Rank,
        TensorKey { set, name }: TensorKey,
        members: &[Rank],
        why: &str,
    ) {
        cx.stats.refused += 1;
        let failure = Failure::new(Cause::Refused, why).with_rank(rank).with_tensor(name.clone());
        let key = RankKey { set, name, rank };
        // Other members do not wait for a rank that is none, or that has joined.
        let awaited = set == SetId::WORLD && members.contains(&rank) && !self.requests.has_joined(set, rank);
        if self.is_active() && awaited && self.takes_part(rank) && !self.requests.has(&key) {
            self.void_set(rank, key.name, valid(cx, members), failure);
        }
    }

    /// Handles a withdrawal: the worker no longer waits. A request that is not ordered yet fails on all ranks;
    /// otherwise the operation completes. Either way its `Complete` follows once nothing accesses its memory. A join
    /// cannot be withdrawn: it completes when all ranks of its set have joined, as the others may have performed operations
    /// without this rank.
    pub(crate) fn withdraw(&mut self, cx: &mut Context, key: RequestKey, reason: &str) {
        let rank = key.rank;
        cx.stats.withdrawn += 1;
        self.mark_alive(cx, rank);
        if !self.is_active() || self.withdraw_held(cx, key, reason) {
            return;
        }
        let ahead = self.scheduled.as_ref().map(Scheduled::first);
        let Some(pending) = self.requests.withdrawable(key, ahead) else { return };
        let what = &pending.what;
        let (set, name, group) = (what.set, what.name.clone(), what.group.clone());
        let failure = Failure::new(Cause::TimedOut, reason).with_rank(rank).with_tensor(name.clone());
        pending.withdrawn = Some(failure.clone());
        if let Collective::AddSetOfMembers { ranks } = &what.collective {
            let ranks = valid(cx, ranks);
            self.outbox.push(Announcement::new(rank, Intent::VoidSet { name, ranks, failure }));
            return;
        }
        if self.scheduled.is_some() {
            self.invalidate(cx, Invalidation::Refusal);
        } else {
            self.outbox.push(Announcement::new(rank, Intent::Void { set, name, failure, group }));
        }
    }

    /// Announces the requests that were not ordered when a schedule ended.
    pub(super) fn announce_unordered(&mut self, cx: &mut Context) {
        for unordered in self.requests.unordered() {
            match unordered {
                Unordered::Refused { key, failure, group } => self.announce_void(&key, failure, group),
                Unordered::Request(key) => {
                    let Some(pending) = self.requests.pending(&key) else { continue };
                    let (what, contribution) = (pending.what.clone(), pending.contribution.clone());
                    let withdrawn = pending.withdrawn.clone();
                    self.announce(cx, key.rank, &what, contribution);
                    if let Some(failure) = withdrawn {
                        let intent = Intent::Void { set: key.set, name: key.name, failure, group: what.group };
                        self.outbox.push(Announcement::new(key.rank, intent));
                    }
                }
            }
        }
    }

    /// Sends the announcements, unless operations that are being dropped still use the memory of the requests.
    pub(crate) fn flush(&mut self, cx: &mut Context) {
        if self.dropping.is_none() {
            self.announce_all(cx);
        }
    }

    /// Sends the announcements in as few messages as frames allow.
    pub(super) fn announce_all(&mut self, cx: &mut Context) {
        let mut batch = Vec::new();
        let mut bytes = 0;
        for announcement in std::mem::take(&mut self.outbox) {
            let size = frame_bytes(&announcement.intent) + announcement.contribution.len();
            if bytes + size > ANNOUNCE_FRAME_BYTES && !batch.is_empty() {
                let announcements = std::mem::take(&mut batch);
                self.to_coordinator(cx, Seq(0), Control::Announce { announcements });
                bytes = 0;
            }
            bytes += size;
            batch.push(announcement);
        }
        if !batch.is_empty() {
            self.to_coordinator(cx, Seq(0), Control::Announce { announcements: batch });
        }
    }

    /// Checks that refuse a request locally, because other ranks cannot know of it.
    fn check_accepts(&self, cx: &mut Context, key: RequestKey, what: &Request) -> Result<Arc<SetView>, Failure> {
        let rank = key.rank;
        let refused = |reason: String| Err(Failure::new(Cause::Refused, reason));
        self.check_takes_part(rank)?;
        let view = self.check_set(cx, rank, what).map_err(|reason| Failure::new(Cause::Refused, reason))?;
        if self.requests.has(&RankKey::new(what.set, &what.name, rank)) || self.has_number(key) {
            return refused(format!(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is \
                 currently being processed. Wait for tensor {} first, or use another name.",
                what.name
            ));
        }
        Ok(view)
    }

    /// Checks that the rank takes part in an active epoch.
    pub(super) fn check_takes_part(&self, rank: Rank) -> Result<(), Failure> {
        if let Phase::Closing(failure) = &self.phase {
            return Err(failure.clone());
        }
        if !self.is_active() {
            return Err(self.last_failure.clone().unwrap_or_else(|| no_epoch(rank)));
        }
        if !self.takes_part(rank) {
            let reason = format!("{rank} does not take part in {}; attach and wait for the next epoch", self.epoch);
            return Err(Failure::new(Cause::Refused, reason));
        }
        Ok(())
    }

    pub(super) fn has_number(&self, key: RequestKey) -> bool {
        self.requests.has_number(key) || self.any_sources.has_number(key)
    }

    /// The participants of a request.
    pub(super) fn check_set(&self, cx: &mut Context, rank: Rank, what: &Request) -> Result<Arc<SetView>, String> {
        let set = what.set;
        let unknown = || format!("Process set provided does not exist, or has not been registered. It is {set}.");
        let view = self.sets.view(cx, set).ok_or_else(unknown)?;
        if !view.contains(rank) {
            return Err(format!("Rank {} is not a member of the provided process set. It is {set}.", rank.0));
        }
        if self.requests.has_joined(set, rank) {
            return Err(format!("{rank} has joined; wait for the join first"));
        }
        validation::check_message(&view, rank, what)?;
        self.sets.scope(cx, set, &what.name).ok_or_else(unknown)
    }

    pub(super) fn check_room(&self, rank: Rank) -> Result<(), String> {
        let most = limits::PENDING_PER_SESSION_MAX;
        if self.requests.of(rank) + self.any_sources.of(rank) < most {
            return Ok(());
        }
        Err(format!("{rank} has {most} requests pending, the most that one session may have; wait for some of them"))
    }

    /// Checks that the rank has room for another request for a process set.
    fn check_set_room(&self, rank: Rank, what: &Request) -> Result<(), String> {
        let listed = |what: &Request| match &what.collective {
            Collective::AddSet { ranks } | Collective::AddSetOfMembers { ranks } => weight(ranks.len()),
            _ => 0,
        };
        let (more, most) = (listed(what), limits::SETS_OF_MEMBERS_PENDING_MAX);
        if more == 0 {
            return Ok(());
        }
        let pending: usize =
            self.requests.iter().filter(|(of, _)| *of == rank).map(|(_, pending)| listed(&pending.what)).sum();
        if pending + more <= most {
            return Ok(());
        }
        Err(format!(
            "{rank} has process sets pending with {pending} ranks, and one session may have {most} (a set counts as {} at \
             least); wait for some of them",
            limits::SET_OF_MEMBERS_RANKS_MIN
        ))
    }

    fn takes_part(&self, rank: Rank) -> bool {
        self.present.get(&rank).is_some_and(|liveness| !liveness.left)
    }

    pub(super) fn refuse(&self, cx: &mut Context, key: RequestKey, failure: Failure) {
        cx.stats.refused += 1;
        self.complete(cx, key, Err(failure));
    }

    fn announce(&mut self, cx: &mut Context, rank: Rank, what: &Request, contribution: Bytes) {
        let cached = self.request_cache.announce(what, cx.config.announce_slots);
        cx.stats.announced_again += u64::from(matches!(cached.intent, Intent::Again { .. }));
        if cached.evicts {
            cx.stats.cache_evictions += 1;
            if cx.stats.cache_evictions == 1 {
                self.warn_of_evictions(cx);
            }
        }
        self.outbox.push(Announcement { rank, intent: cached.intent, contribution });
    }

    fn warn_of_evictions(&self, cx: &mut Context) {
        let text = format!(
            "More than {} different requests are in use; the request cache evicts the least recent ones, which are announced in full again. Give \
             tensors the same name in every step.",
            cx.config.announce_slots
        );
        let suspects = self.notified().clone();
        cx.act(Action::Notice { sidecars: suspects.sidecars, ranks: suspects.ranks, text });
    }

    /// Makes the rank's part in the next round of a name a refusal: the other ranks' requests of the round fail.
    pub(super) fn void(&mut self, cx: &mut Context, key: RankKey, failure: Failure, group: Option<Group>) {
        let group = group.filter(|_| !self.ungrouped.remove(&key));
        if self.scheduled.is_some() {
            self.invalidate(cx, Invalidation::Refusal);
        } else {
            self.announce_void(&key, failure.clone(), group.clone());
        }
        self.requests.refuse(key, failure, group);
    }

    /// The same for a request for a process set of its members, which the coordinator does not answer.
    fn void_set(&mut self, rank: Rank, name: TensorName, ranks: Vec<Rank>, failure: Failure) {
        // The cause distinguishes this from a withdrawal.
        let failure = Failure { cause: Cause::Refused, record: None, ..failure };
        self.outbox.push(Announcement::new(rank, Intent::VoidSet { name, ranks, failure }));
    }

    fn announce_void(&mut self, RankKey { set, name, rank }: &RankKey, failure: Failure, group: Option<Group>) {
        // The cause distinguishes this from a withdrawal.
        let failure = Failure { cause: Cause::Refused, record: None, ..failure };
        let intent = Intent::Void { set: *set, name: name.clone(), failure, group };
        self.outbox.push(Announcement::new(*rank, intent));
    }
}

/// The ranks of a list that exist, ascending, each once.
fn valid(cx: &Context, ranks: &[Rank]) -> Vec<Rank> {
    let size = cx.config.world.size();
    let valid: BTreeSet<Rank> = ranks.iter().copied().filter(|rank| rank.index() < size).collect();
    valid.into_iter().collect()
}

fn no_epoch(rank: Rank) -> Failure {
    let reason = format!("no epoch has begun: {rank} has to wait until all ranks of the job have attached");
    Failure::new(Cause::Refused, reason)
}

/// The most bytes of an intent in a frame; a number has at most ten.
fn frame_bytes(intent: &Intent) -> usize {
    let group_bytes = |group: &Option<Group>| group.as_ref().map_or(0, |group| group.name.as_str().len() + 20);
    match intent {
        Intent::Again { .. } => 24,
        Intent::Ready(request) | Intent::Remember { request, .. } => {
            let listed = match &request.collective {
                Collective::AllToAll { splits } => splits.len(),
                Collective::AddSet { ranks } | Collective::AddSetOfMembers { ranks } => ranks.len(),
                _ => 0,
            };
            let numbers = request.shape.dimensions().len() + listed + 10;
            request.name.as_str().len() + group_bytes(&request.group) + 10 * numbers + 16
        }
        Intent::Void { name, failure, group, .. } => {
            2 * name.as_str().len() + group_bytes(group) + failure.reason.len() + 10 * 8
        }
        Intent::VoidSet { name, ranks, failure } => {
            2 * name.as_str().len() + failure.reason.len() + 10 * (ranks.len() + 8)
        }
    }
}

/// Bytes of announcements in one message.
const ANNOUNCE_FRAME_BYTES: usize = limits::CONTROL_FRAME_BYTES_MAX - 1_024;
