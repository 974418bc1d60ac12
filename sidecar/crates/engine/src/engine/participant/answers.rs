//! Answers of the coordinator other than orders: rejections, and requests that complete without an operation.

use ronde_wire::{
    AnySource, Cause, Collective, Control, DType, Detail, Failure, ProcessSet, Rank, Seq, SetId, TensorName,
    WorldError, is_set_of_members_name,
};

use super::Participant;
use super::requests::{REJECTED_AHEAD_MAX, RankKey, Rejected, TakenRequest};
use crate::engine::shared::context::Context;
use crate::engine::shared::shapes::empty;
use crate::engine::shared::{Mailbox, RequestKey, TensorKey};
use crate::event::{Action, Completion};

impl Participant {
    /// Handles the rejection of a name. Excused ranks take no part in this round of it.
    pub(crate) fn rejected(&mut self, cx: &mut Context, key: &TensorKey, failure: &Failure, excused: &[Rank]) {
        let Some(view) = self.sets.scope(cx, key.set, &key.name) else { return };
        cx.stats.rejected += 1;
        let failure = failure.clone().within_limits();
        for &rank in view.local_ranks.iter().filter(|rank| !excused.contains(rank)) {
            match self.requests.reject(RankKey::new(key.set, &key.name, rank), &failure) {
                Rejected::Request(request) => self.complete(cx, RequestKey { rank, request }, Err(failure.clone())),
                Rejected::Answered | Rejected::Ahead => {}
                Rejected::Overflow => {
                    let reason = format!("more than {REJECTED_AHEAD_MAX} rejections wait for {rank}");
                    self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason));
                    return;
                }
            }
        }
        if let Some(any) = AnySource::of_receive(&key.name) {
            self.release_held(cx, Mailbox { set: key.set, any });
        }
    }

    /// All ranks of a set have joined. No name of the set is pending; its rounds are reset.
    pub(crate) fn all_joined(&mut self, cx: &mut Context, set: SetId, name: &TensorName, last: Rank) {
        let ranks = self.sets.view(cx, set).map(|view| view.local_ranks.clone()).unwrap_or_default();
        let joins = |what: &Collective| *what == Collective::Join;
        let Some(requests) = self.take_requests(cx, set, name, &ranks, joins) else { return };
        self.requests.forget_rejections(set);
        self.ungrouped.retain(|key| key.set != set);
        let held = self.any_sources.remove_set(set);
        debug_assert!(held.is_empty(), "a rank whose receive waits cannot join");
        self.answer(cx, requests, &Detail::LastJoined(last));
    }

    /// A process set was added, or its members are told of one that exists.
    pub(crate) fn set_added(&mut self, cx: &mut Context, name: &TensorName, set: &ProcessSet) {
        if is_set_of_members_name(name) {
            self.set_formed(cx, name, set);
            return;
        }
        let fits = |what: &Collective| match what {
            Collective::AddSet { ranks } => {
                let mut ranks = ranks.clone();
                ranks.sort_unstable();
                ranks == set.ranks
            }
            _ => false,
        };
        let Some(requests) = self.take_world_requests(cx, name, fits) else { return };
        match self.sets.add(cx, set) {
            Ok(()) => self.answer(cx, requests, &Detail::Set(set.id)),
            Err(error) => self.cannot_add(cx, set.id, &error, &requests),
        }
    }

    /// The members of a set have formed it, or asked for one that exists.
    fn set_formed(&mut self, cx: &mut Context, name: &TensorName, set: &ProcessSet) {
        let fits = |what: &Collective| match what {
            Collective::AddSetOfMembers { ranks } => {
                let mut ranks = ranks.clone();
                ranks.sort_unstable();
                ranks == set.ranks
            }
            _ => false,
        };
        let Some(requests) = self.take_requests(cx, SetId::WORLD, name, &set.ranks, fits) else { return };
        let known = self.sets.view(cx, set.id).is_some_and(|view| view.ranks == set.ranks);
        let added = if known { Ok(()) } else { self.sets.add(cx, set) };
        match added {
            Ok(()) => self.answer(cx, requests, &Detail::Set(set.id)),
            Err(error) => self.cannot_add(cx, set.id, &error, &requests),
        }
    }

    /// Requests for process sets of their members have failed: those of these ranks.
    pub(crate) fn set_refused(&mut self, cx: &mut Context, name: &TensorName, ranks: &[Rank], failure: &Failure) {
        let fits = |what: &Collective| matches!(what, Collective::AddSetOfMembers { .. });
        let Some(requests) = self.take_requests(cx, SetId::WORLD, name, ranks, fits) else { return };
        cx.stats.rejected += 1;
        let failure = failure.clone().within_limits();
        for key in requests {
            self.complete(cx, key, Err(failure.clone()));
        }
    }

    fn cannot_add(&mut self, cx: &mut Context, set: SetId, error: &WorldError, requests: &[RequestKey]) {
        let failure = Failure::new(Cause::Bug, format!("{set} cannot be added: {error}"));
        requests.iter().for_each(|key| self.complete(cx, *key, Err(failure.clone())));
        self.fail(cx, Seq(0), &failure);
    }

    /// A process set was removed; its requests that are not ordered fail. The ranks are also answered when there was
    /// none.
    pub(crate) fn set_removed(&mut self, cx: &mut Context, name: &TensorName, set: SetId) {
        let Some(requests) = self.take_world_requests(cx, name, |what| *what == Collective::RemoveSet { set }) else {
            return;
        };
        if !self.sets.remove(cx, set) {
            self.answer(cx, requests, &Detail::None);
            return;
        }
        self.ungrouped.retain(|key| key.set != set);
        let held = self.any_sources.remove_set(set);
        for TakenRequest { key, name } in self.requests.take_set(set).into_iter().chain(held) {
            let reason = format!(
                "tensor {name}: {set} was removed before all its ranks had asked for it; remove a set when nothing is \
                 pending on it"
            );
            let failure = Failure::new(Cause::Refused, reason).with_tensor(name);
            self.complete(cx, key, Err(failure));
        }
        // Earlier submissions are sent first: the coordinator accepts nothing about the old set after this.
        self.flush(cx);
        self.leaving.insert(set);
        self.forget_sets(cx);
        self.answer(cx, requests, &Detail::Set(set));
    }

    /// Releases the ids of removed sets once none of their operations is in flight here: a new set with the same id may
    /// use the same names.
    pub(crate) fn forget_sets(&mut self, cx: &mut Context) {
        for set in std::mem::take(&mut self.leaving) {
            if self.admitted.values().any(|running| running.admission.topology.set == set) {
                self.leaving.insert(set);
            } else {
                cx.act(Action::SetForgotten { set });
                self.to_coordinator(cx, Seq(0), Control::SetForgotten { set });
            }
        }
    }

    /// Takes out the requests of all local ranks with a name of the set of all ranks. `None` when one of them has no
    /// such request; the epoch ends then.
    fn take_world_requests(
        &mut self,
        cx: &mut Context,
        name: &TensorName,
        fits: impl Fn(&Collective) -> bool,
    ) -> Option<Vec<RequestKey>> {
        let ranks = cx.world_set(SetId::WORLD).map(|world| world.local_ranks.clone()).unwrap_or_default();
        self.take_requests(cx, SetId::WORLD, name, &ranks, fits)
    }

    /// The same for a name of a set and those of the given ranks that are served here.
    fn take_requests(
        &mut self,
        cx: &mut Context,
        set: SetId,
        name: &TensorName,
        ranks: &[Rank],
        fits: impl Fn(&Collective) -> bool,
    ) -> Option<Vec<RequestKey>> {
        if !self.is_active() {
            cx.stats.stale_frames += 1;
            return None;
        }
        let ranks: Vec<Rank> = ranks.iter().copied().filter(|rank| cx.serves(cx.me(), *rank)).collect();
        let key = |rank| RankKey::new(set, name, rank);
        if let Some(rank) = ranks.iter().find(|rank| !self.requests.fits(&key(**rank), &fits)) {
            let reason = format!("{name} was answered by the coordinator, which {rank} has not asked for");
            self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason).with_tensor(name.clone()));
            return None;
        }
        let taken = |rank| Some(RequestKey { rank, request: self.requests.take_one(&key(rank))? });
        Some(ranks.into_iter().filter_map(taken).collect())
    }

    fn answer(&self, cx: &mut Context, requests: Vec<RequestKey>, detail: &Detail) {
        for key in requests {
            let completion = Completion {
                epoch: self.epoch,
                seq: Seq(0),
                tensor: 0,
                dtype: DType::U8,
                shape: empty(),
                own: false,
                detail: detail.clone(),
            };
            self.complete(cx, key, Ok(completion));
        }
    }
}
