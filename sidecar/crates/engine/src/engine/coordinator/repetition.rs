//! Detection of repeated training steps in the coordinator's orders. A step ends when a tensor is ordered that is
//! already part of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_wire::{Algorithm, Collective, DType, ReduceOp, SetId, TensorName, limits};

use super::fusion::ReadyTensor;
use crate::engine::shared::TensorKey;
use crate::engine::shared::sets::SetView;
use crate::event::Time;

/// The history of steps.
#[derive(Debug)]
pub(crate) struct Repetition {
    /// The current step.
    step: Step,
    /// The tensors of the previous step; `None` before there was a complete one.
    last: Option<BTreeMap<TensorKey, ReadyTensor>>,
    /// The duration of the previous step.
    last_us: u64,
    /// The number of equal steps in a row, up to the previous one.
    equal: u32,
    /// The rest of an interrupted iteration of a schedule, which is no part of the next step.
    left: BTreeSet<TensorKey>,
    /// The most tensors of a step; 0 turns the detection off.
    tensors_max: usize,
}

/// The tensors of a step that were ordered as one operation.
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
    /// How many tensors are equal to those of the previous step.
    alike: usize,
    /// Whether it has an operation that cannot be scheduled.
    is_bound: bool,
}

impl Default for Repetition {
    fn default() -> Self {
        let (step, last, left) = Default::default();
        Self { step, last, last_us: 0, equal: 0, left, tensors_max: limits::SCHEDULE_TENSORS_MAX }
    }
}

impl Repetition {
    /// Sets the most tensors of a step; 0 turns the detection off.
    pub(crate) fn set_tensors_max(&mut self, tensors_max: usize) {
        let tensors_max = tensors_max.min(limits::SCHEDULE_TENSORS_MAX);
        if self.tensors_max != tensors_max {
            *self = Self { tensors_max, ..Self::default() };
        }
    }

    /// Restarts the count of steps. The next one begins after `left`, the rest of an iteration of a schedule.
    pub(crate) fn restart(&mut self, left: BTreeSet<TensorKey>) {
        self.reset();
        self.left = left;
    }

    /// Clears the history.
    pub(crate) fn reset(&mut self) {
        *self = Self { tensors_max: self.tensors_max, ..Self::default() };
    }

    /// Records an ordered operation.
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

    /// The buckets of the current step when it is complete and so many steps in a row are equal, with the duration of
    /// the previous one in microseconds. `None` for a step of only small operations: eager ones take one round trip for
    /// negotiation and data together, and would take longer over the lanes.
    pub(crate) fn step(&self, steps: u32) -> Option<(&[Bucket], u64)> {
        let Step { keys, buckets, alike, is_bound, .. } = &self.step;
        let whole = self.last.as_ref().is_some_and(|last| last.len() == keys.len() && *alike == keys.len());
        let found = whole && !*is_bound && !keys.is_empty() && self.equal + 1 >= steps && are_whole(buckets);
        let small = |bucket: &Bucket| bucket.tensors.iter().all(|tensor| tensor.algorithm == Algorithm::Eager);
        let found = found && !buckets.iter().all(small);
        found.then_some((buckets, self.last_us))
    }

    /// Whether the current step contains a name.
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

/// Whether an operation may be scheduled: no member can complete it before all ranks take part, because an element of
/// every rank is in every member's result, and its result has the same bits whether it is eager or not.
fn may_run_ahead(view: &SetView, tensor: &ReadyTensor) -> bool {
    let (shape, rows) = (&tensor.tensor.shape, &tensor.tensor.rows);
    let ranks = view.ranks.len() as u64;
    let small = tensor.algorithm == Algorithm::Eager;
    let needs_all_ranks = match &tensor.collective {
        // It may fail, and needs the commit of the coordinator.
        _ if tensor.plugin.is_some() => false,
        Collective::AllReduce { .. } => true,
        Collective::ReduceScatter { op } => {
            let each = shape.dimensions().first().is_some_and(|rows| *rows >= ranks);
            each && (!small || is_exact(tensor.dtype, *op))
        }
        Collective::AllGather | Collective::AllToAll { .. } => rows.iter().all(|rows| *rows > 0),
        _ => false,
    };
    // The shape of an all-gather has the rows of the first rank; the list has those of all ranks.
    needs_all_ranks && shape.elements() > 0 && tensor.joined.is_empty()
}

/// Whether each group of the step was released as a whole, so that a withdrawal interrupts only one use of it.
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
        // Tensors before the first step are part of none.
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
