//! What the coordinator orders, seen as steps: a step ends where something is ordered that it has ordered before in it.
//! A job that trains asks for the same in every step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_wire::{Algorithm, Collective, DType, ReduceOp, SetId, TensorName, limits};

use super::fusion::ReadyTensor;
use crate::engine::shared::TensorKey;
use crate::engine::shared::sets::SetView;
use crate::event::Time;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Repetition {
    /// The step that is being ordered.
    step: Step,
    /// What the one before asked for; `None` before there was a whole one.
    last: Option<BTreeMap<TensorKey, ReadyTensor>>,
    /// How long that took.
    last_us: u64,
    /// Steps in a row, the last one included, that asked for the same.
    equal: u32,
    /// What is left of an iteration of a schedule, and no part of the next step.
    left: BTreeSet<TensorKey>,
    /// The most tensors of a step that are remembered; 0 for nothing at all.
    tensors_max: usize,
}

/// A part of a step that was ordered as one operation.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    pub(crate) view: Arc<SetView>,
    pub(crate) tensors: Vec<ReadyTensor>,
}

impl Bucket {
    fn new(view: &Arc<SetView>) -> Self {
        Self { view: Arc::clone(view), tensors: Vec::new() }
    }
}

#[derive(Debug, Default)]
struct Step {
    began: Time,
    keys: BTreeMap<TensorKey, ReadyTensor>,
    buckets: Vec<Bucket>,
    /// How many of them the step before asked for as well.
    alike: usize,
    /// Whether there is something in it that cannot run ahead.
    is_bound: bool,
}

impl Default for Repetition {
    fn default() -> Self {
        let (step, last, left) = Default::default();
        Self { step, last, last_us: 0, equal: 0, left, tensors_max: limits::SCHEDULE_TENSORS_MAX }
    }
}

impl Repetition {
    /// Remembers steps of so many tensors, or none at all.
    pub(crate) fn set_tensors_max(&mut self, tensors_max: usize) {
        let tensors_max = tensors_max.min(limits::SCHEDULE_TENSORS_MAX);
        if self.tensors_max != tensors_max {
            *self = Self { tensors_max, ..Self::default() };
        }
    }

    /// Steps are counted anew. The next one begins behind what is left of an iteration of a schedule.
    pub(crate) fn restart(&mut self, left: BTreeSet<TensorKey>) {
        self.reset();
        self.left = left;
    }

    /// Forgets what was seen.
    pub(crate) fn reset(&mut self) {
        *self = Self { tensors_max: self.tensors_max, ..Self::default() };
    }

    /// An operation is ordered.
    pub(crate) fn ordered(&mut self, now: Time, view: &Arc<SetView>, bucket: &[ReadyTensor]) {
        if self.tensors_max == 0 {
            return;
        }
        self.step.buckets.push(Bucket::new(view));
        for tensor in bucket {
            self.tensor(now, view, tensor);
        }
        self.step.buckets.retain(|bucket| !bucket.tensors.is_empty());
    }

    /// The buckets of the present step, when it asks for the same as the one before and is whole, for so many steps in a row:
    /// with the time that the one before took, in microseconds. The next one is expected to begin like it. `None` for a step of
    /// small operations only: they are over in the round trip that negotiates them, and would take longer over the lanes.
    pub(crate) fn step(&self, steps: u32) -> Option<(&[Bucket], u64)> {
        let Step { keys, buckets, alike, is_bound, .. } = &self.step;
        let whole = self.last.as_ref().is_some_and(|last| last.len() == keys.len() && *alike == keys.len());
        let found = whole && !*is_bound && !keys.is_empty() && self.equal + 1 >= steps && are_whole(buckets);
        let small = |bucket: &Bucket| bucket.tensors.iter().all(|tensor| tensor.algorithm == Algorithm::Eager);
        let found = found && !buckets.iter().all(small);
        found.then_some((buckets, self.last_us))
    }

    /// Whether the present step asks for a name.
    pub(crate) fn asks_for(&self, set: SetId, name: &TensorName) -> bool {
        self.step.keys.contains_key(&TensorKey::new(set, name))
    }

    fn tensor(&mut self, now: Time, view: &Arc<SetView>, tensor: &ReadyTensor) {
        let key = TensorKey::new(view.topology.set, &tensor.tensor.name);
        if self.left.remove(&key) {
            return;
        }
        if self.step.keys.contains_key(&key) {
            self.end_step(now, view);
        } else if self.step.keys.len() >= self.tensors_max {
            self.reset();
            self.step.buckets.push(Bucket::new(view));
        }
        let kept = ReadyTensor { contributions: Vec::new(), ..tensor.clone() };
        if self.step.keys.is_empty() {
            self.step.began = now;
        }
        self.step.is_bound |= !may_run_ahead(view, &kept);
        let before = self.last.as_ref().and_then(|last| last.get(&key));
        self.step.alike += usize::from(before.is_some_and(|before| before.is_same(&kept)));
        if let Some(bucket) = self.step.buckets.last_mut() {
            bucket.tensors.push(kept.clone());
        }
        self.step.keys.insert(key, kept);
    }

    fn end_step(&mut self, now: Time, view: &Arc<SetView>) {
        let ended = std::mem::take(&mut self.step);
        let equal = self.last.as_ref().is_some_and(|last| last.len() == ended.keys.len() && ended.alike == last.len());
        self.equal = if equal { self.equal.saturating_add(1) } else { 1 };
        self.last_us = now.0.saturating_sub(ended.began.0);
        self.last = Some(ended.keys);
        self.step.buckets.push(Bucket::new(view));
    }
}

/// Whether an operation gives nobody a result before everybody has taken part in it: an element of every rank is in every
/// member's result. And what is reduced has the same bits whether it travels eagerly or not.
fn may_run_ahead(view: &SetView, tensor: &ReadyTensor) -> bool {
    let (shape, rows) = (&tensor.tensor.shape, &tensor.tensor.rows);
    let ranks = view.ranks.len() as u64;
    let small = tensor.algorithm == Algorithm::Eager;
    let needs_all_ranks = match &tensor.collective {
        // It may fail, and stands only when the coordinator says so.
        _ if tensor.plugin.is_some() => false,
        Collective::AllReduce { .. } => true,
        Collective::ReduceScatter { op } => {
            let each = shape.dimensions().first().is_some_and(|rows| *rows >= ranks);
            each && (!small || is_exact(tensor.dtype, *op))
        }
        Collective::AllGather | Collective::AllToAll { .. } => rows.iter().all(|rows| *rows > 0),
        _ => false,
    };
    // The first of an all-gather's rows stand in the shape, all others in the list.
    needs_all_ranks && shape.elements() > 0 && tensor.joined.is_empty()
}

/// Whether all that a group has in the step was released at once: what is cut off by a withdrawal belongs to one use.
fn are_whole(buckets: &[Bucket]) -> bool {
    let mut uses: BTreeMap<(SetId, &TensorName, u32), (u64, usize)> = BTreeMap::new();
    for Bucket { view, tensors } in buckets {
        for tensor in tensors {
            let Some(group) = &tensor.group else { continue };
            let of_group = uses.entry((view.topology.set, &group.name, group.size)).or_insert((tensor.group_use, 0));
            of_group.1 += usize::from(of_group.0 == tensor.group_use);
        }
    }
    uses.into_iter().all(|((_, _, size), (_, count))| count == size as usize)
}

/// Whether the order of a reduction does not matter.
fn is_exact(dtype: DType, op: ReduceOp) -> bool {
    !dtype.is_float() || matches!(op, ReduceOp::Min | ReduceOp::Max)
}

#[cfg(test)]
mod tests {
    use ronde_wire::control::OrderedTensor;
    use ronde_wire::{Group, Rank, SidecarIndex, World};

    use super::super::fusion::tests::tensor;
    use super::*;

    fn view() -> Arc<SetView> {
        let world = World::new(vec![SidecarIndex(0), SidecarIndex(1)]).expect("a world");
        let topology = world.topology(SetId::WORLD).expect("the world");
        Arc::new(SetView::new(SidecarIndex(0), topology))
    }

    fn sum(name: &str, elements: u64) -> ReadyTensor {
        ReadyTensor { dtype: DType::F32, bytes: elements * 4, ..tensor(name, elements) }
    }

    /// Whether a step is found after each bucket; names are letters.
    fn found(buckets: &[&str], steps: u32) -> Vec<bool> {
        let (view, mut repetition) = (view(), Repetition::default());
        let mut after = |bucket: &&str| {
            let tensors: Vec<ReadyTensor> = bucket.chars().map(|name| sum(&name.to_string(), 4)).collect();
            repetition.ordered(Time(0), &view, &tensors);
            repetition.step(steps).is_some()
        };
        buckets.iter().map(&mut after).collect()
    }

    #[test]
    fn a_step_that_repeats_is_found_at_its_end() {
        assert_eq!(found(&["ab", "c", "a", "b", "c"], 2), [false, false, false, false, true]);
        // What came before the first step is no part of any.
        assert_eq!(found(&["xy", "a", "b", "a", "b", "a", "b"], 2)[4..], [false, false, true]);
    }

    #[test]
    fn the_order_within_a_step_is_free_and_buckets_may_join_two_steps() {
        assert_eq!(found(&["a", "b", "c", "ba", "c"], 2), [false, false, false, false, true]);
        assert_eq!(found(&["ab", "ca", "bc"], 2), [false, false, true]);
    }

    #[test]
    fn more_equal_steps_may_be_required() {
        assert_eq!(found(&["a"; 6], 4), [false, false, false, true, true, true]);
    }

    #[test]
    fn steps_with_more_tensors_than_the_limit_are_never_found() {
        let view = view();
        for (tensors_max, is_found) in [(0, false), (2, false), (3, true)] {
            let mut repetition = Repetition::default();
            let mut found = false;
            for name in ["a", "b", "c"].repeat(4) {
                repetition.set_tensors_max(tensors_max);
                repetition.ordered(Time(0), &view, &[sum(name, 4)]);
                found |= repetition.step(2).is_some();
            }
            assert_eq!(found, is_found, "{tensors_max}");
        }
    }

    #[test]
    fn a_different_step_restarts_the_count() {
        assert_eq!(found(&["ab", "ab", "abc", "ab", "ab"], 2), [false, true, false, false, true]);
    }

    #[test]
    fn a_step_of_only_small_operations_is_not_scheduled() {
        let view = view();
        let small = |name| ReadyTensor { algorithm: Algorithm::Eager, ..sum(name, 1) };
        for (others, worth_it) in [(vec![small("b")], false), (vec![small("b"), sum("c", 9_000)], true)] {
            let mut repetition = Repetition::default();
            for _ in 0..3 {
                repetition.ordered(Time(0), &view, &[small("a")]);
                others.iter().for_each(|other| repetition.ordered(Time(0), &view, std::slice::from_ref(other)));
            }
            assert_eq!(repetition.step(2).is_some(), worth_it);
        }
    }

    #[test]
    fn operations_that_one_member_can_complete_alone_are_not_scheduled() {
        let view = view();
        let gather = |rows: Vec<u64>| {
            let tensor = OrderedTensor { rows, ..sum("t", 1).tensor };
            ReadyTensor { collective: Collective::AllGather, tensor, ..sum("t", 1) }
        };
        let scatter = |rows, dtype, algorithm| {
            let collective = Collective::ReduceScatter { op: ReduceOp::Sum };
            ReadyTensor { collective, dtype, algorithm, ..sum("t", rows) }
        };
        let free = [
            sum("t", 1),
            gather(vec![1, 2]),
            scatter(2, DType::F32, Algorithm::Ring),
            scatter(2, DType::I32, Algorithm::Eager),
        ];
        let bound = [
            sum("t", 0),
            gather(vec![1, 0]),
            scatter(1, DType::F32, Algorithm::Ring),
            scatter(2, DType::F32, Algorithm::Eager),
            ReadyTensor { collective: Collective::Barrier, ..sum("t", 1) },
            ReadyTensor { collective: Collective::Broadcast { root: Rank(0) }, ..sum("t", 1) },
            ReadyTensor { joined: vec![Rank(1)], ..sum("t", 1) },
        ];
        assert!(free.iter().all(|tensor| may_run_ahead(&view, tensor)));
        assert!(!bound.iter().any(|tensor| may_run_ahead(&view, tensor)));
    }

    #[test]
    fn a_step_begins_with_a_use_of_a_group() {
        let (view, mut repetition) = (view(), Repetition::default());
        let group = Some(Group { name: TensorName::new("g").expect("a name"), size: 2 });
        let grouped = |name, group_use| ReadyTensor { group: group.clone(), group_use, ..sum(name, 4) };
        let mut found = |name, group_use| {
            repetition.ordered(Time(0), &view, &[grouped(name, group_use)]);
            repetition.step(2).is_some()
        };
        assert!(!found("b", 1), "the rest of a use");
        let all: Vec<bool> = (2..5).flat_map(|group_use| [found("a", group_use), found("b", group_use)]).collect();
        assert_eq!(all, [false; 6], "a step ends between two tensors of a group");
        let left = [TensorKey { set: SetId::WORLD, name: TensorName::new("b").expect("a name") }].into_iter().collect();
        repetition.restart(left);
        let mut found = |name, group_use| {
            repetition.ordered(Time(0), &view, &[grouped(name, group_use)]);
            repetition.step(2).is_some()
        };
        assert!(!found("b", 5), "it is skipped");
        let all: Vec<bool> = (6..8).flat_map(|group_use| [found("a", group_use), found("b", group_use)]).collect();
        assert_eq!(all, [false, false, false, true]);
    }
}
