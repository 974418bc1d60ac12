//! The coordinator's groups: tensors that are ordered together, when all of them are ready on all ranks.
//!
//! A tensor that is rejected leaves its group, so that the rest still completes. Like a name, a group is used again and
//! again, and its tensors run ahead of each other when some fail: a tensor's k-th use belongs to the group's k-th use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Group, Rank, SetId, TensorName};

use super::fusion::ReadyTensor;
use super::sets::SetView;

/// A tensor that is ready, with those who perform it.
pub(crate) type Ready = (Arc<SetView>, ReadyTensor);

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    uses: BTreeMap<(SetId, TensorName), VecDeque<Use>>,
}

/// One use of a group.
#[derive(Debug)]
struct Use {
    size: usize,
    /// The tensors that are ready or rejected.
    decided: BTreeSet<TensorName>,
    ready: Vec<Ready>,
}

/// Uses of one group of which rejected tensors are remembered. Ready ones are bounded by what ranks may have pending.
const USES_MAX: usize = 64;

impl Groups {
    /// A tensor of a group is ready. Returns what can be ordered now.
    ///
    /// # Errors
    /// A refusal in words when the group is said to have another size; the tensor counts as rejected then.
    pub(crate) fn ready(&mut self, group: &Group, ready: Ready) -> Result<Vec<Ready>, String> {
        let (set, name) = (ready.0.topology.set, ready.1.tensor.name.clone());
        let key = (set, group.name.clone());
        let uses = self.uses.entry(key.clone()).or_default();
        let of_use = next_use(uses, group, &name);
        let (size, given) = (of_use.size, group.size);
        if size != given as usize {
            return Err(format!("group {} has {size} tensors, but {name} says {given}", group.name));
        }
        of_use.decided.insert(name);
        of_use.ready.push(ready);
        Ok(self.release(&key))
    }

    /// A tensor of a group is rejected. Returns what can be ordered now.
    pub(crate) fn rejected(&mut self, set: SetId, group: &Group, name: &TensorName) -> Vec<Ready> {
        let key = (set, group.name.clone());
        let uses = self.uses.entry(key.clone()).or_default();
        if uses.len() < USES_MAX || uses.iter().any(|of_use| !of_use.decided.contains(name)) {
            next_use(uses, group, name).decided.insert(name.clone());
        }
        self.release(&key)
    }

    /// Takes out a tensor that is ready and waits for others of its group; it counts as rejected.
    pub(crate) fn withdraw(&mut self, set: SetId, name: &TensorName) -> Option<Ready> {
        let mut taken = self.take(|ready| ready.0.topology.set == set && ready.1.tensor.name == *name, 1);
        taken.pop()
    }

    /// Takes out what is ready without any of these ranks, because they had joined; it counts as rejected.
    pub(crate) fn take_joined(&mut self, ranks: &BTreeSet<Rank>) -> Vec<Ready> {
        self.take(|(_, tensor)| tensor.joined.iter().any(|rank| ranks.contains(rank)), usize::MAX)
    }

    /// Forgets uses of a set's groups of which nothing is ready.
    pub(crate) fn forget_rejected(&mut self, set: SetId) {
        for (_, uses) in self.uses.iter_mut().filter(|((of, _), _)| *of == set) {
            uses.retain(|of_use| !of_use.ready.is_empty());
        }
        self.uses.retain(|_, uses| !uses.is_empty());
    }

    /// Forgets the groups of a set.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        self.uses.retain(|(of, _), _| *of != set);
    }

    /// Groups of which tensors wait for others, with how many are decided, and how many it has.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (&(SetId, TensorName), usize, usize)> {
        let first = |uses: &VecDeque<Use>| uses.iter().find(|of_use| !of_use.ready.is_empty()).map(Use::progress);
        self.uses.iter().filter_map(move |(key, uses)| first(uses).map(|(decided, size)| (key, decided, size)))
    }

    fn take(&mut self, chosen: impl Fn(&Ready) -> bool, most: usize) -> Vec<Ready> {
        let mut taken = Vec::new();
        for of_use in self.uses.values_mut().flatten() {
            let mut position = 0;
            while position < of_use.ready.len() && taken.len() < most {
                if chosen(&of_use.ready[position]) {
                    taken.push(of_use.ready.remove(position));
                } else {
                    position += 1;
                }
            }
        }
        taken
    }

    /// Ends the uses in which everything is decided.
    fn release(&mut self, key: &(SetId, TensorName)) -> Vec<Ready> {
        let Some(uses) = self.uses.get_mut(key) else { return Vec::new() };
        let mut released = Vec::new();
        while uses.front().is_some_and(|of_use| of_use.decided.len() >= of_use.size) {
            released.extend(uses.pop_front().into_iter().flat_map(|of_use| of_use.ready));
        }
        if uses.is_empty() {
            self.uses.remove(key);
        }
        released
    }
}

impl Use {
    fn progress(&self) -> (usize, usize) {
        (self.decided.len(), self.size)
    }
}

/// The first use in which nothing is known of the tensor.
fn next_use<'a>(uses: &'a mut VecDeque<Use>, group: &Group, name: &TensorName) -> &'a mut Use {
    let position = uses.iter().position(|of_use| !of_use.decided.contains(name)).unwrap_or(uses.len());
    if position == uses.len() {
        uses.push_back(Use { size: group.size as usize, decided: BTreeSet::new(), ready: Vec::new() });
    }
    &mut uses[position]
}
