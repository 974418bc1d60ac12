//! What the coordinator says about names besides orders: rejections, and what is agreed without an operation.

use ronde_wire::{Cause, Collective, Control, DType, Detail, Failure, ProcessSet, Rank, Seq, SetId, TensorName};

use super::context::Context;
use super::negotiation::Key;
use super::participant::Participant;
use super::requests::{REJECTED_AHEAD_MAX, Rejected};
use super::shapes::empty;
use crate::event::Completion;

impl Participant {
    /// The coordinator rejects a name. Excused ranks take no part in this round of it.
    pub(crate) fn rejected(&mut self, cx: &mut Context, key: &Key, failure: &Failure, excused: &[Rank]) {
        let Some(view) = self.sets.scope(cx, key.0, &key.1) else { return };
        cx.stats.rejected += 1;
        let failure =
            Failure { reason: Failure::new(failure.cause, failure.reason.as_str()).reason, ..failure.clone() };
        for &rank in view.local_ranks.iter().filter(|rank| !excused.contains(rank)) {
            match self.requests.reject((key.0, key.1.clone(), rank), &failure) {
                Rejected::Request(request) => self.complete(cx, rank, request, Err(failure.clone())),
                Rejected::Answered | Rejected::Ahead => {}
                Rejected::Overflow => {
                    let reason = format!("more than {REJECTED_AHEAD_MAX} rejections wait for {rank}");
                    self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason));
                    return;
                }
            }
        }
    }

    /// All ranks have joined. No name of the set of all ranks is under way any more; all of them begin anew.
    pub(crate) fn all_joined(&mut self, cx: &mut Context, name: &TensorName, last: Rank) {
        self.requests.forget_rejections(SetId::WORLD);
        self.answer(cx, name, &Detail::LastJoined(last), |what| *what == Collective::Join);
    }

    /// There is a new process set.
    pub(crate) fn set_added(&mut self, cx: &mut Context, name: &TensorName, set: &ProcessSet) {
        if !self.is_active() {
            cx.stats.stale_frames += 1;
        } else if let Err(error) = self.sets.add(cx, set) {
            let reason = format!("{} cannot be added: {error}", set.id);
            self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason));
        } else {
            let asked = |what: &Collective| match what {
                Collective::AddSet { ranks } => {
                    let mut ranks = ranks.clone();
                    ranks.sort_unstable();
                    ranks == set.ranks
                }
                _ => false,
            };
            self.answer(cx, name, &Detail::Set(set.id), asked);
        }
    }

    /// A process set is gone; what is asked of it and not ordered fails. When there is none, the ranks learn that.
    pub(crate) fn set_removed(&mut self, cx: &mut Context, name: &TensorName, set: SetId) {
        if !self.is_active() {
            cx.stats.stale_frames += 1;
            return;
        }
        let removed = self.sets.remove(cx, set);
        if removed {
            for (rank, request, name) in self.requests.take_set(set) {
                let failure = Failure::new(Cause::Refused, format!("{set} was removed")).with_tensor(name);
                self.complete(cx, rank, request, Err(failure));
            }
            // What was submitted before goes out before: the coordinator takes nothing about the set behind this.
            self.flush(cx);
            self.to_coordinator(cx, Seq(0), Control::SetForgotten { set });
        }
        let detail = if removed { Detail::Set(set) } else { Detail::None };
        self.answer(cx, name, &detail, |what| *what == Collective::RemoveSet { set });
    }

    /// Completes the requests of all local ranks by a name of the set of all ranks.
    fn answer(&mut self, cx: &mut Context, name: &TensorName, detail: &Detail, fits: impl Fn(&Collective) -> bool) {
        if !self.is_active() {
            cx.stats.stale_frames += 1;
            return;
        }
        let ranks = cx.world_set(SetId::WORLD).map(|world| world.local_ranks.clone()).unwrap_or_default();
        for rank in ranks {
            let Some(request) = self.requests.answer(&(SetId::WORLD, name.clone(), rank), &fits) else {
                let reason = format!("{name} was answered with {detail:?}, which {rank} has not asked for");
                self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason).with_tensor(name.clone()));
                return;
            };
            let completion = Completion {
                epoch: self.epoch,
                seq: Seq(0),
                tensor: 0,
                dtype: DType::U8,
                shape: empty(),
                own: false,
                detail: detail.clone(),
            };
            self.complete(cx, rank, request, Ok(completion));
        }
    }
}
