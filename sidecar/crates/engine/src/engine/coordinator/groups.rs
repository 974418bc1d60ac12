//! The coordinator's groups: tensors that are ordered together, when all of them are ready on all ranks.
//!
//! A rejected tensor leaves its group, so that the rest still completes. Like a name, a group is used repeatedly, and
//! its tensors run ahead of each other when some fail: a tensor's k-th use belongs to the group's k-th use. Groups with
//! one name and different sizes are different groups.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Group, Rank, SetId, TensorName, limits};

use super::fusion::ReadyTensor;
use crate::engine::shared::TensorKey;
use crate::engine::shared::sets::SetView;
use crate::event::Time;

/// A ready tensor with its participants.
#[derive(Clone, Debug)]
pub(crate) struct Ready {
    pub(crate) view: Arc<SetView>,
    pub(crate) tensor: ReadyTensor,
}

impl Ready {
    pub(crate) fn key(&self) -> TensorKey {
        TensorKey::new(self.view.topology.set, &self.tensor.tensor.name)
    }
}

/// The groups with tensors that are not ordered yet.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    uses: BTreeMap<GroupKey, VecDeque<Use>>,
    /// The group in which a tensor is ready: at most one, as its ranks wait for their answer.
    ready_in: BTreeMap<TensorKey, GroupKey>,
    /// The number of released uses.
    released: u64,
}

/// The identity of a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct GroupKey {
    set: SetId,
    name: TensorName,
    size: u32,
}

/// One use of a group.
#[derive(Debug)]
struct Use {
    size: usize,
    /// When the first waiting tensor became ready.
    since: Time,
    /// The tensors that are ready or rejected.
    decided: BTreeSet<TensorName>,
    ready: Vec<Ready>,
}

/// A group with tensors that wait for others.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    pub(crate) set: SetId,
    pub(crate) name: &'a TensorName,
    of_use: &'a Use,
}

/// A tensor was rejected in too many uses of its group, which wait for other tensors.
#[derive(Debug)]
pub(crate) struct Overflow;

/// The most pending uses of one group with rejected tensors. Ready tensors are bounded by the pending requests of
/// ranks.
pub(crate) const USES_MAX: usize = 64;

impl Groups {
    /// A tensor of a group is ready. Returns the tensors that can be ordered now.
    pub(crate) fn ready(&mut self, now: Time, group: &Group, ready: Ready) -> Vec<Ready> {
        let tensor = ready.key();
        let key = group_key(tensor.set, group);
        let of_use = next_use(self.uses.entry(key.clone()).or_default(), now, group, &tensor.name);
        if of_use.ready.is_empty() {
            of_use.since = now;
        }
        of_use.decided.insert(tensor.name.clone());
        of_use.ready.push(ready);
        self.ready_in.insert(tensor, key.clone());
        self.release(&key)
    }

    /// A tensor of a group is rejected. Returns the tensors that can be ordered now.
    ///
    /// # Errors
    /// When the tensor was rejected in [`USES_MAX`] pending uses already.
    pub(crate) fn rejected(
        &mut self,
        now: Time,
        set: SetId,
        group: &Group,
        name: &TensorName,
    ) -> Result<Vec<Ready>, Overflow> {
        let key = group_key(set, group);
        let uses = self.uses.entry(key.clone()).or_default();
        if uses.len() >= USES_MAX && uses.iter().all(|of_use| of_use.decided.contains(name)) {
            return Err(Overflow);
        }
        next_use(uses, now, group, name).decided.insert(name.clone());
        Ok(self.release(&key))
    }

    /// Whether a tensor is ready and waits for others of its group.
    pub(crate) fn waits(&self, key: &TensorKey) -> bool {
        self.ready_in.contains_key(key)
    }

    /// Removes a ready tensor that waits for others of its group; it counts as rejected.
    pub(crate) fn withdraw(&mut self, key: &TensorKey) -> Option<Ready> {
        let uses = self.uses.get_mut(&self.ready_in.remove(key)?)?;
        uses.iter_mut().find_map(|of_use| {
            let position = of_use.ready.iter().position(|ready| ready.tensor.tensor.name == key.name)?;
            Some(of_use.ready.remove(position))
        })
    }

    /// Removes the tensors of a set that are ready without any of these joined ranks; they count as rejected. Each is
    /// returned with the progress of its group.
    pub(crate) fn take_joined(&mut self, of: SetId, ranks: &BTreeSet<Rank>) -> Vec<(Ready, String)> {
        let mut taken = Vec::new();
        for (GroupKey { set, name, .. }, uses) in self.uses.iter_mut().filter(|(key, _)| key.set == of) {
            for of_use in uses {
                let progress = Waiting { set: *set, name, of_use }.progress();
                let without = |ready: &Ready| ready.tensor.joined.iter().any(|rank| ranks.contains(rank));
                let (stranded, kept): (Vec<Ready>, _) =
                    std::mem::take(&mut of_use.ready).into_iter().partition(without);
                of_use.ready = kept;
                for ready in stranded {
                    self.ready_in.remove(&ready.key());
                    taken.push((ready, progress.clone()));
                }
            }
        }
        taken
    }

    /// Removes uses of a set's groups without ready tensors.
    pub(crate) fn forget_rejected(&mut self, set: SetId) {
        for (_, uses) in self.uses.iter_mut().filter(|(key, _)| key.set == set) {
            uses.retain(|of_use| !of_use.ready.is_empty());
        }
        self.uses.retain(|_, uses| !uses.is_empty());
    }

    /// Removes the groups of a set.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        self.uses.retain(|key, _| key.set != set);
        self.ready_in.retain(|key, _| key.set != set);
    }

    /// Whether no group waits for a tensor.
    pub(crate) fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }

    /// Groups with tensors that wait for others, each with its first such use.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting<'_>> {
        self.uses.iter().filter_map(|(GroupKey { set, name, .. }, uses)| {
            let of_use = uses.iter().find(|of_use| !of_use.ready.is_empty())?;
            Some(Waiting { set: *set, name, of_use })
        })
    }

    /// Releases the uses whose tensors are all decided.
    fn release(&mut self, key: &GroupKey) -> Vec<Ready> {
        let Some(uses) = self.uses.get_mut(key) else { return Vec::new() };
        let mut released = Vec::new();
        while uses.front().is_some_and(|of_use| of_use.decided.len() >= of_use.size) {
            self.released += 1;
            let group_use = self.released;
            let ready = uses.pop_front().into_iter().flat_map(|of_use| of_use.ready);
            released.extend(
                ready.map(|Ready { view, tensor }| Ready { view, tensor: ReadyTensor { group_use, ..tensor } }),
            );
        }
        if uses.is_empty() {
            self.uses.remove(key);
        }
        for ready in &released {
            self.ready_in.remove(&ready.key());
        }
        released
    }
}

impl Waiting<'_> {
    /// When the first of its tensors became ready.
    pub(crate) fn since(&self) -> Time {
        self.of_use.since
    }

    /// Whether this use waits for this tensor of the group.
    pub(crate) fn lacks(&self, set: SetId, group: &Group, tensor: &TensorName) -> bool {
        let same = set == self.set && group.name == *self.name && group.size as usize == self.of_use.size;
        same && !self.of_use.decided.contains(tensor)
    }

    /// The number of tensors that are neither ready nor rejected.
    pub(crate) fn missing(&self) -> usize {
        self.of_use.size.saturating_sub(self.of_use.decided.len())
    }

    /// "group g of process set 0 has 2 of its 3 tensors (a, b)", rejected ones included.
    pub(crate) fn progress(&self) -> String {
        let decided = &self.of_use.decided;
        let mut names =
            decided.iter().take(limits::REPORT_NAMES_MAX).map(TensorName::as_str).collect::<Vec<_>>().join(", ");
        if decided.len() > limits::REPORT_NAMES_MAX {
            names.push_str(" and others");
        }
        format!(
            "group {} of {} has {} of its {} tensors ({names})",
            self.name,
            self.set,
            decided.len(),
            self.of_use.size
        )
    }
}

fn group_key(set: SetId, group: &Group) -> GroupKey {
    GroupKey { set, name: group.name.clone(), size: group.size }
}

/// The first use in which the tensor is not decided.
fn next_use<'a>(uses: &'a mut VecDeque<Use>, now: Time, group: &Group, name: &TensorName) -> &'a mut Use {
    let position = uses.iter().position(|of_use| !of_use.decided.contains(name)).unwrap_or(uses.len());
    if position == uses.len() {
        let size = group.size as usize;
        uses.push_back(Use { size, since: now, decided: BTreeSet::new(), ready: Vec::new() });
    }
    &mut uses[position]
}
