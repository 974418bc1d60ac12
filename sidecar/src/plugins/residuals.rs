//! State that codecs keep between operations (residuals): it is committed with its operation, on all sidecars alike.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ronde_engine::Stage;
use ronde_plugin_host::Span;
use ronde_wire::{DType, Epoch, PluginUse, Seq, SetId, TensorName};

/// An operation.
pub(super) type Operation = (Epoch, Seq);
/// A tensor of a process set.
pub(super) type Tensor = (SetId, TensorName);
/// A block of a tensor's contribution or result: its first element.
pub(super) type Block = (Stage, u64);

/// The state of a block.
type State = Arc<Vec<u8>>;

/// State by tensor and block. A tensor that returns with another plugin, other parameters, another type or another
/// length starts without state.
///
/// Tensors that were used once are evicted, oldest first, when there are too many or no bytes are left: calls without a
/// name are such tensors. The number of tensors is limited for each set, in the order of its operations, so that all
/// its members evict the same ones and count the rounds of the others alike.
#[derive(Debug, Default)]
pub(super) struct Residuals {
    sets: HashMap<SetId, Tensors>,
    pending: HashMap<Operation, Pending>,
    /// Bytes of all blocks, pending ones included.
    bytes: u64,
    bytes_max: u64,
}

/// The tensors of a set.
#[derive(Debug, Default)]
pub(super) struct Tensors {
    kept: HashMap<TensorName, TensorState>,
    /// Their names by last use.
    order: BTreeMap<u64, TensorName>,
    /// The last uses of those that were used once and have state: without this index, each eviction would scan all tensors.
    once: BTreeSet<u64>,
    /// How many tensors have been used.
    came: u64,
}

/// The properties that a tensor must keep for its state to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TensorKind {
    plugin: Arc<PluginUse>,
    dtype: DType,
    elements: u64,
}

#[derive(Debug)]
struct TensorState {
    kind: TensorKind,
    /// Its last use.
    came: u64,
    /// Its committed operations.
    round: u64,
    /// The tensor's number for plugins.
    number: u64,
    blocks: HashMap<Block, State>,
    /// Whether blocks were evicted: their values are missing from every later result.
    has_lost: bool,
}

/// The state that an operation leaves when it is committed.
#[derive(Debug, Default)]
struct Pending {
    tensors: Vec<Tensor>,
    blocks: Vec<NewState>,
}

/// The new state of a block.
#[derive(Debug)]
struct NewState {
    tensor: Tensor,
    block: Block,
    state: State,
}

/// The removed state of blocks. Drop it after the lock is released: lanes wait for the lock, and freeing hundreds of
/// megabytes takes milliseconds.
#[derive(Debug, Default)]
#[must_use = "it would be dropped while the lock is held"]
pub(super) struct Removed(Vec<State>);

/// The most tensors that a set keeps state of.
const TENSORS_MAX: usize = 1 << 16;

impl Residuals {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, ..Self::default() }
    }

    /// Begins an operation; returns the state that is evicted for its tensors.
    pub(super) fn begin<'a>(
        &mut self,
        operation: Operation,
        set: SetId,
        (plugin, dtype): (&Arc<PluginUse>, DType),
        tensors: impl Iterator<Item = (&'a TensorName, u64)>,
    ) -> Removed {
        let (mut pending, mut removed) = (Pending::default(), Removed::default());
        for (name, elements) in tensors {
            pending.tensors.push((set, name.clone()));
            let kind = TensorKind { plugin: Arc::clone(plugin), dtype, elements };
            removed.append(self.sets.entry(set).or_default().come(set, name, kind));
        }
        self.bytes -= removed.bytes();
        self.pending.insert(operation, pending);
        removed
    }

    /// Returns how often a tensor of a running operation was reduced before, and its number for plugins.
    pub(super) fn round(&self, (set, name): &Tensor) -> (u64, u64) {
        self.kept(*set, name).map_or((0, 0), |kept| (kept.round, kept.number))
    }

    /// Returns a block's state; `None` for the initial zeros.
    pub(super) fn state(&self, (set, name): &Tensor, block: Block) -> Option<State> {
        self.kept(*set, name)?.blocks.get(&block).cloned()
    }

    /// Stores the state that an operation leaves for a block, if it is committed. Also returns the state that is evicted
    /// for it, or the new state itself if it is not stored.
    ///
    /// # Errors
    /// The result is an error when there is no room; the text is the reason.
    pub(super) fn put(
        &mut self,
        operation: Operation,
        tensor: &Tensor,
        block: Block,
        state: Vec<u8>,
    ) -> (Removed, Result<(), String>) {
        let (more, state) = (state.len() as u64, Arc::new(state));
        // An operation that is over leaves nothing.
        if !self.pending.contains_key(&operation) {
            return (Removed(vec![state]), Ok(()));
        }
        let (set, name) = tensor;
        let mut removed = self.make_room(more);
        let (max, has_lost) = (self.bytes_max, self.kept(*set, name).is_some_and(|kept| kept.has_lost));
        if has_lost || self.bytes + more > max {
            let bytes = self.bytes + more;
            removed.0.push(state);
            let reason = format!(
                "the state of codecs would be {bytes} bytes, more than the {max} of --plugin-state-mb; raise that, and \
                 name calls, so that their tensors are known again"
            );
            return (removed, Err(reason));
        }
        if let Some(pending) = self.pending.get_mut(&operation) {
            self.bytes += more;
            pending.blocks.push(NewState { tensor: tensor.clone(), block, state });
        }
        (removed, Ok(()))
    }

    /// Commits an operation; returns the state that it replaces.
    pub(super) fn commit(&mut self, operation: Operation) -> Removed {
        let mut removed = Removed::default();
        let Some(pending) = self.pending.remove(&operation) else { return removed };
        for (set, name) in &pending.tensors {
            if let Some(kept) = self.kept_mut(*set, name) {
                kept.round += 1;
            }
        }
        for NewState { tensor: (set, name), block, state } in pending.blocks {
            let old = match self.kept_mut(set, &name) {
                Some(kept) => kept.blocks.insert(block, state),
                None => Some(state),
            };
            removed.0.extend(old);
        }
        self.bytes -= removed.bytes();
        self.index(&pending.tensors);
        removed
    }

    /// Discards an operation; returns the state that it would have left.
    pub(super) fn discard(&mut self, operation: Operation) -> Removed {
        let Some(pending) = self.pending.remove(&operation) else { return Removed::default() };
        let removed = Removed(pending.blocks.into_iter().map(|new| new.state).collect());
        self.bytes -= removed.bytes();
        self.index(&pending.tensors);
        removed
    }

    /// Removes a process set without operations in progress; returns its state, because freeing it takes a while. Lanes
    /// may discard failed operations later.
    pub(super) fn remove_set(&mut self, set: SetId) -> Option<Tensors> {
        let tensors = self.sets.remove(&set)?;
        self.bytes -= tensors.kept.values().map(TensorState::bytes).sum::<u64>();
        Some(tensors)
    }

    /// Removes everything; returns it, because freeing it takes a while.
    pub(super) fn clear(&mut self) -> Self {
        let fresh = Self::new(self.bytes_max);
        std::mem::replace(self, fresh)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes which tensors of an operation that is over may be evicted.
    fn index(&mut self, tensors: &[Tensor]) {
        for (set, name) in tensors {
            if let Some(tensors) = self.sets.get_mut(set) {
                tensors.index(name);
            }
        }
    }

    /// Evicts the oldest blocks of tensors that were used once and have no pending state, until this many bytes fit;
    /// returns what it evicts.
    fn make_room(&mut self, more: u64) -> Removed {
        let mut removed = Removed::default();
        while self.bytes + more > self.bytes_max {
            let oldest =
                self.sets.iter().filter_map(|(set, tensors)| Some((self.evictable(*set, tensors)?, *set))).min();
            let Some((came, set)) = oldest else { break };
            let Some(tensors) = self.sets.get_mut(&set) else { break };
            let evicted = tensors.forget(came);
            self.bytes -= evicted.bytes();
            removed.append(evicted);
        }
        removed
    }

    /// Returns the last use of the oldest tensor of a set that may be evicted.
    fn evictable(&self, set: SetId, tensors: &Tensors) -> Option<u64> {
        let uses = |tensor: &Tensor, name: &TensorName| tensor.0 == set && tensor.1 == *name;
        let is_pending = |name| self.pending.values().any(|each| each.tensors.iter().any(|tensor| uses(tensor, name)));
        tensors.once.iter().copied().find(|came| tensors.order.get(came).is_some_and(|name| !is_pending(name)))
    }

    fn kept(&self, set: SetId, name: &TensorName) -> Option<&TensorState> {
        self.sets.get(&set)?.kept.get(name)
    }

    fn kept_mut(&mut self, set: SetId, name: &TensorName) -> Option<&mut TensorState> {
        self.sets.get_mut(&set)?.kept.get_mut(name)
    }
}

impl Removed {
    fn bytes(&self) -> u64 {
        self.0.iter().map(|state| state.len() as u64).sum()
    }

    fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl Tensors {
    /// Registers the use of a tensor; returns the blocks that are evicted for it.
    fn come(&mut self, set: SetId, name: &TensorName, kind: TensorKind) -> Removed {
        self.came += 1;
        let mut removed = Removed::default();
        match self.kept.get_mut(name) {
            Some(kept) if kept.kind == kind => {
                self.order.remove(&kept.came);
                self.once.remove(&kept.came);
                kept.came = self.came;
            }
            old => {
                if let Some(kept) = old {
                    tracing::debug!(%name, "the codec state of a tensor is dropped: its type, length or plugin has changed");
                    self.order.remove(&kept.came);
                    self.once.remove(&kept.came);
                    removed.append(kept.forget());
                }
                let number = Span::tensor_number(set.0, name.as_str());
                let kept =
                    TensorState { kind, came: self.came, round: 0, number, blocks: HashMap::new(), has_lost: false };
                self.kept.insert(name.clone(), kept);
            }
        }
        self.order.insert(self.came, name.clone());
        while self.order.len() > TENSORS_MAX {
            let Some((came, name)) = self.order.pop_first() else { break };
            self.once.remove(&came);
            if let Some(mut kept) = self.kept.remove(&name) {
                removed.append(kept.forget());
            }
        }
        removed
    }

    /// Notes whether a tensor was used once and has state.
    fn index(&mut self, name: &TensorName) {
        let Some(kept) = self.kept.get(name) else { return };
        if kept.round == 1 && !kept.blocks.is_empty() {
            self.once.insert(kept.came);
        } else {
            self.once.remove(&kept.came);
        }
    }

    /// Evicts the blocks of the tensor with this last use, and returns them.
    fn forget(&mut self, came: u64) -> Removed {
        self.once.remove(&came);
        let kept = self.order.get(&came).and_then(|name| self.kept.get_mut(name));
        kept.map(TensorState::forget).unwrap_or_default()
    }
}

impl TensorState {
    fn bytes(&self) -> u64 {
        self.blocks.values().map(|block| block.len() as u64).sum()
    }

    /// Evicts its blocks, and returns them.
    fn forget(&mut self) -> Removed {
        self.has_lost = true;
        Removed(self.blocks.drain().map(|(_, state)| state).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::collection::vec;
    use proptest::proptest;
    use ronde_wire::PluginWork;

    use super::*;

    const BLOCK: Block = (Stage::Contribution, 64);

    fn plugin(parameter: u64) -> Arc<PluginUse> {
        let work = PluginWork::Codec { block_elements: 64, encoded_bytes: 9 };
        let (name, version) = ("topk".to_owned(), "1".to_owned());
        Arc::new(PluginUse { name, version, digest: [1; 32], parameters: vec![parameter], work })
    }

    fn tensor() -> Tensor {
        (SetId(0), TensorName::new("t").expect("a name"))
    }

    fn begin(residuals: &mut Residuals, seq: u64, parameter: u64, elements: u64) -> Operation {
        let operation = (Epoch(1), Seq(seq));
        let (set, name) = tensor();
        drop(residuals.begin(operation, set, (&plugin(parameter), DType::F32), [(&name, elements)].into_iter()));
        operation
    }

    fn state(residuals: &Residuals) -> Option<Vec<u8>> {
        residuals.state(&tensor(), BLOCK).map(|state| state.to_vec())
    }

    #[test]
    fn residuals_count_only_after_their_operation_is_committed() {
        let mut residuals = Residuals::new(100);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).1.expect("room");
        assert_eq!((state(&residuals), residuals.round(&tensor()).0), (None, 0));
        drop(residuals.commit(first));
        assert_eq!((state(&residuals), residuals.round(&tensor()).0), (Some(vec![7; 4]), 1));
        let second = begin(&mut residuals, 2, 0, 100);
        residuals.put(second, &tensor(), BLOCK, vec![8; 4]).1.expect("room");
        drop(residuals.discard(second));
        assert_eq!((state(&residuals), residuals.round(&tensor()).0), (Some(vec![7; 4]), 1));
        assert_eq!(residuals.bytes(), 4);
        residuals.put(second, &tensor(), BLOCK, vec![9; 4]).1.expect("it is over, and nothing is kept");
        assert_eq!(residuals.bytes(), 4);
    }

    /// The caller drops it after the lock is released.
    #[test]
    fn removed_state_is_returned() {
        let blocks = |states: &[u8]| states.iter().map(|&state| Arc::new(vec![state; 4])).collect::<Vec<_>>();
        let mut residuals = Residuals::new(8);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![1; 4]).1.expect("room");
        assert_eq!(residuals.commit(first).0, blocks(&[]));
        let second = begin(&mut residuals, 2, 0, 100);
        residuals.put(second, &tensor(), BLOCK, vec![2; 4]).1.expect("room");
        let (removed, refused) = residuals.put(second, &tensor(), (Stage::Result, 0), vec![3; 4]);
        assert_eq!((removed.0, refused.is_err()), (blocks(&[3]), true));
        assert_eq!(residuals.commit(second).0, blocks(&[1]));
        assert_eq!(residuals.put(second, &tensor(), BLOCK, vec![4; 4]).0.0, blocks(&[4]));
        // Other parameters.
        let (set, name) = tensor();
        let third = (Epoch(1), Seq(3));
        let removed = residuals.begin(third, set, (&plugin(1), DType::F32), [(&name, 100)].into_iter());
        assert_eq!(removed.0, blocks(&[2]));
        residuals.put(third, &tensor(), BLOCK, vec![5; 4]).1.expect("room");
        assert_eq!(residuals.discard(third).0, blocks(&[5]));
        // Tensors used once.
        for (seq, name) in [(4, "a"), (5, "b")] {
            once(&mut residuals, seq, name).expect("room");
        }
        let fourth = begin(&mut residuals, 6, 1, 100);
        let (removed, put) = residuals.put(fourth, &tensor(), BLOCK, vec![6; 8]);
        assert_eq!((removed.0, put), (blocks(&[1, 1]), Ok(())));
    }

    /// A set that is added later may reuse its id.
    #[test]
    fn a_removed_process_set_leaves_no_residuals() {
        let mut residuals = Residuals::new(100);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).1.expect("room");
        drop(residuals.commit(first));
        // It has failed, and a lane has not discarded it yet.
        let second = begin(&mut residuals, 2, 0, 100);
        residuals.put(second, &tensor(), BLOCK, vec![8; 4]).1.expect("room");
        assert!(residuals.remove_set(SetId(1)).is_none() && residuals.bytes() == 8);
        assert!(residuals.remove_set(SetId(0)).is_some());
        residuals.put(second, &tensor(), (Stage::Result, 0), vec![8; 4]).1.expect("room");
        drop(residuals.discard(second));
        assert_eq!(residuals.bytes(), 0);
        let restarted = begin(&mut residuals, 3, 0, 100);
        assert_eq!((state(&residuals), residuals.round(&tensor()).0), (None, 0));
        drop(residuals.commit(restarted));
        assert_eq!(residuals.round(&tensor()).0, 1);
    }

    #[test]
    fn another_plugin_or_shape_starts_without_residuals() {
        for (parameter, elements) in [(1, 100), (0, 101)] {
            let mut residuals = Residuals::new(100);
            let first = begin(&mut residuals, 1, 0, 100);
            residuals.put(first, &tensor(), BLOCK, vec![7; 4]).1.expect("room");
            drop(residuals.commit(first));
            begin(&mut residuals, 2, parameter, elements);
            assert_eq!((state(&residuals), residuals.round(&tensor()).0), (None, 0));
            assert_eq!(residuals.bytes(), 0);
        }
    }

    /// Its ranks receive a failure before the lanes have discarded the operation, and may submit the tensor again.
    #[test]
    fn a_failed_operation_restores_its_residuals() {
        let mut residuals = Residuals::new(100);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).1.expect("room");
        drop(residuals.commit(first));
        let second = begin(&mut residuals, 2, 0, 100);
        residuals.put(second, &tensor(), BLOCK, vec![8; 4]).1.expect("room");
        let third = begin(&mut residuals, 3, 1, 100);
        drop(residuals.discard(second));
        assert_eq!(residuals.bytes(), 0);
        residuals.put(third, &tensor(), BLOCK, vec![9; 4]).1.expect("room");
        drop(residuals.commit(third));
        assert_eq!((residuals.bytes(), state(&residuals)), (4, Some(vec![9; 4])));
    }

    #[test]
    fn an_error_about_the_limit_names_its_setting() {
        let mut residuals = Residuals::new(7);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).1.expect("room");
        let other = (Stage::Result, 0);
        let refused = residuals.put(first, &tensor(), other, vec![7; 4]).1.expect_err("8 bytes");
        assert!(refused.contains("--plugin-state-mb") && refused.contains("more than the 7"), "{refused}");
        drop(residuals.discard(first));
        assert_eq!(residuals.bytes(), 0);
    }

    #[test]
    fn another_type_starts_without_residuals() {
        let mut residuals = Residuals::new(100);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).1.expect("room");
        drop(residuals.commit(first));
        let (set, name) = tensor();
        drop(residuals.begin((Epoch(1), Seq(2)), set, (&plugin(0), DType::Bf16), [(&name, 100)].into_iter()));
        assert_eq!((state(&residuals), residuals.bytes()), (None, 0));
    }

    /// Performs an operation on its own tensor with four bytes of state.
    fn once(residuals: &mut Residuals, seq: u64, name: &str) -> Result<(), String> {
        let (operation, tensor) = ((Epoch(1), Seq(seq)), (SetId(0), TensorName::new(name).expect("a name")));
        drop(residuals.begin(operation, tensor.0, (&plugin(0), DType::F32), [(&tensor.1, 8)].into_iter()));
        let (_, put) = residuals.put(operation, &tensor, BLOCK, vec![1; 4]);
        drop(residuals.commit(operation));
        put
    }

    /// Calls without a name have a new name each time.
    #[test]
    fn tensors_used_once_are_evicted_and_fail_when_they_return() {
        let mut residuals = Residuals::new(12);
        for seq in 1..=2 {
            once(&mut residuals, seq, "kept").expect("room for the old and the new");
        }
        for seq in 3..100 {
            once(&mut residuals, seq, &format!("allreduce.noname.{seq}")).expect("the oldest of them goes");
        }
        assert_eq!(residuals.bytes(), 12);
        once(&mut residuals, 100, "kept").expect("what comes again stays");
        let lost = once(&mut residuals, 101, "allreduce.noname.3").expect_err("its state was dropped");
        assert!(lost.contains("--plugin-state-mb"), "{lost}");
    }

    #[test]
    fn residuals_in_use_are_not_evicted() {
        let mut residuals = Residuals::new(8);
        once(&mut residuals, 1, "t").expect("room");
        let second = begin(&mut residuals, 2, 0, 8);
        residuals.put(second, &tensor(), BLOCK, vec![2; 4]).1.expect("room for the old and the new");
        let refused = residuals.put(second, &tensor(), (Stage::Result, 0), vec![2; 4]).1.expect_err("12 bytes");
        assert!(refused.contains("12 bytes, more than the 8"), "{refused}");
        assert_eq!(state(&residuals), Some(vec![1; 4]));
    }

    /// The tensors that may be evicted, found without the index.
    fn evictable(residuals: &Residuals) -> BTreeSet<(u64, SetId)> {
        let busy: Vec<&Tensor> = residuals.pending.values().flat_map(|pending| &pending.tensors).collect();
        let tensors = residuals.sets.iter().flat_map(|(set, tensors)| tensors.kept.iter().map(|kept| (*set, kept)));
        tensors
            .filter(|(set, (name, _))| !busy.contains(&&(*set, (*name).clone())))
            .filter(|(_, (_, kept))| kept.round == 1 && !kept.blocks.is_empty())
            .map(|(set, (_, kept))| (kept.came, set))
            .collect()
    }

    /// Works off operations of two sets, several of which are pending; each step is a kind, a tensor and its length.
    fn work(steps: &[(u8, u32, u64)]) {
        let mut residuals = Residuals::new(24);
        let mut running: VecDeque<(Operation, Tensor)> = VecDeque::new();
        for (seq, &(kind, number, elements)) in (1..).zip(steps) {
            match (kind, running.front().cloned()) {
                (1, Some((operation, tensor))) => {
                    let _ = residuals.put(operation, &tensor, (Stage::Contribution, u64::from(number)), vec![1; 4]);
                }
                (2, Some((operation, _))) => drop(residuals.commit(operation)),
                (3, Some((operation, _))) => drop(residuals.discard(operation)),
                _ => {
                    let tensor = (SetId(number % 2), TensorName::new(format!("t{number}")).expect("a name"));
                    let operation = (Epoch(1), Seq(seq));
                    let tensors = [(&tensor.1, elements)].into_iter();
                    drop(residuals.begin(operation, tensor.0, (&plugin(0), DType::F32), tensors));
                    running.push_back((operation, tensor));
                }
            }
            if matches!(kind, 2 | 3) {
                running.pop_front();
            } else if running.len() > 1 {
                running.rotate_left(1);
            }
            let mut found = BTreeSet::new();
            for (set, tensors) in &residuals.sets {
                found.extend(residuals.evictable(*set, tensors).map(|came| (came, *set)));
            }
            let wanted = evictable(&residuals);
            assert_eq!(found.first(), wanted.first(), "after step {seq} of {steps:?}");
            let kept = residuals.sets.values().flat_map(|tensors| tensors.kept.values()).map(TensorState::bytes);
            let pending = residuals.pending.values().flat_map(|pending| &pending.blocks);
            let bytes = kept.sum::<u64>() + pending.map(|new| new.state.len() as u64).sum::<u64>();
            assert_eq!(residuals.bytes(), bytes, "after step {seq} of {steps:?}");
            assert!(bytes <= 24, "after step {seq} of {steps:?}");
        }
    }

    proptest! {
        #[test]
        fn the_index_of_tensors_used_once_is_that_of_a_search(
            steps in vec((0..4u8, 0..6u32, 1..3u64), 1..80),
        ) {
            work(&steps);
        }
    }

    #[test]
    fn a_process_set_keeps_residuals_of_a_bounded_number_of_tensors() {
        let mut residuals = Residuals::new(u64::MAX);
        for seq in 0..=TENSORS_MAX as u64 {
            once(&mut residuals, seq, &format!("t{seq}")).expect("room");
        }
        assert_eq!(residuals.bytes(), 4 * TENSORS_MAX as u64);
        let round = |name: &str| residuals.round(&(SetId(0), TensorName::new(name).expect("a name"))).0;
        assert_eq!((round("t0"), round("t1")), (0, 1));
    }
}
