//! What codecs remember of tensors between operations: residuals, momentum. It counts once an operation stands.

use std::collections::HashMap;
use std::sync::Arc;

use ronde_engine::Stage;
use ronde_plugin_host::Span;
use ronde_wire::{Epoch, PluginUse, Seq, SetId, TensorName};

/// An operation.
pub(super) type Operation = (Epoch, Seq);
/// A tensor.
pub(super) type Tensor = (SetId, TensorName);
/// A block of a tensor, by stage and first element.
pub(super) type Block = (Stage, u64);

/// The states of all tensors.
#[derive(Debug)]
pub(super) struct Residuals {
    bytes: u64,
    bytes_max: u64,
    tensors: HashMap<Tensor, Kept>,
    pending: HashMap<Operation, Pending>,
}

/// What is kept of one tensor, for the plugin that was last used for it.
#[derive(Debug)]
struct Kept {
    plugin: Arc<PluginUse>,
    elements: u64,
    /// Operations that stand.
    round: u64,
    /// What plugins know the tensor by.
    number: u64,
    blocks: HashMap<Block, Vec<u8>>,
}

/// An operation that has yet to stand.
#[derive(Debug, Default)]
struct Pending {
    tensors: Vec<Tensor>,
    blocks: Vec<Put>,
}

/// What a block's state is to be.
#[derive(Debug)]
struct Put {
    tensor: Tensor,
    block: Block,
    state: Vec<u8>,
    /// Bytes that it was counted with: none where it takes the place of another.
    counted: u64,
}

impl Residuals {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes: 0, bytes_max, tensors: HashMap::new(), pending: HashMap::new() }
    }

    /// An operation begins. What another plugin, or the same one for another shape, has left of a tensor is forgotten: on
    /// all sidecars alike, as all of them perform the same operations.
    pub(super) fn begin<'a>(
        &mut self,
        operation: Operation,
        set: SetId,
        plugin: &Arc<PluginUse>,
        tensors: impl Iterator<Item = (&'a TensorName, u64)>,
    ) {
        let mut pending = Pending::default();
        for (name, elements) in tensors {
            let tensor = (set, name.clone());
            pending.tensors.push(tensor.clone());
            let fits = |kept: &Kept| kept.elements == elements && kept.plugin == *plugin;
            if !self.tensors.get(&tensor).is_some_and(fits) {
                let number = Span::tensor_number(set.0, name.as_str());
                let (plugin, blocks) = (Arc::clone(plugin), HashMap::new());
                let fresh = Kept { plugin, elements, round: 0, number, blocks };
                if let Some(old) = self.tensors.insert(tensor, fresh) {
                    self.bytes -= old.blocks.values().map(|block| block.len() as u64).sum::<u64>();
                }
            }
        }
        self.pending.insert(operation, pending);
    }

    /// How often a tensor of an operation that has begun was reduced before, and what plugins know it by.
    pub(super) fn round(&self, tensor: &Tensor) -> (u64, u64) {
        self.tensors.get(tensor).map_or((0, 0), |kept| (kept.round, kept.number))
    }

    /// A copy of a block's state of so many bytes; zeros at first.
    pub(super) fn state(&self, tensor: &Tensor, block: Block, bytes: usize) -> Vec<u8> {
        let kept = self.tensors.get(tensor).and_then(|kept| kept.blocks.get(&block));
        kept.filter(|state| state.len() == bytes).cloned().unwrap_or_else(|| vec![0; bytes])
    }

    /// What a block's state is to be when the operation stands.
    ///
    /// # Errors
    /// When there would be more of it than is allowed, with what to do.
    pub(super) fn put(
        &mut self,
        operation: Operation,
        tensor: &Tensor,
        block: Block,
        state: Vec<u8>,
    ) -> Result<(), String> {
        let is_new = self.tensors.get(tensor).is_none_or(|kept| !kept.blocks.contains_key(&block));
        let counted = if is_new { state.len() as u64 } else { 0 };
        if self.bytes + counted > self.bytes_max {
            let (bytes, max) = (self.bytes + counted, self.bytes_max);
            return Err(format!(
                "what codecs keep would be {bytes} bytes, more than the {max} of --plugin-state-mb; raise that"
            ));
        }
        // Of an operation that is over nothing is kept.
        let Some(pending) = self.pending.get_mut(&operation) else { return Ok(()) };
        self.bytes += counted;
        pending.blocks.push(Put { tensor: tensor.clone(), block, state, counted });
        Ok(())
    }

    /// An operation stands.
    pub(super) fn commit(&mut self, operation: Operation) {
        let Some(pending) = self.pending.remove(&operation) else { return };
        for tensor in &pending.tensors {
            if let Some(kept) = self.tensors.get_mut(tensor) {
                kept.round += 1;
            }
        }
        for put in pending.blocks {
            match self.tensors.get_mut(&put.tensor) {
                Some(kept) => drop(kept.blocks.insert(put.block, put.state)),
                None => self.bytes -= put.counted,
            }
        }
    }

    /// An operation does not stand.
    pub(super) fn discard(&mut self, operation: Operation) {
        let Some(pending) = self.pending.remove(&operation) else { return };
        self.bytes -= pending.blocks.iter().map(|put| put.counted).sum::<u64>();
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.bytes_max);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
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
        residuals.begin(operation, set, &plugin(parameter), [(&name, elements)].into_iter());
        operation
    }

    #[test]
    fn a_state_counts_once_its_operation_stands() {
        let mut residuals = Residuals::new(100);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).expect("room");
        assert_eq!((residuals.state(&tensor(), BLOCK, 4), residuals.round(&tensor()).0), (vec![0; 4], 0));
        residuals.commit(first);
        assert_eq!((residuals.state(&tensor(), BLOCK, 4), residuals.round(&tensor()).0), (vec![7; 4], 1));
        let second = begin(&mut residuals, 2, 0, 100);
        residuals.put(second, &tensor(), BLOCK, vec![8; 4]).expect("room");
        residuals.discard(second);
        assert_eq!((residuals.state(&tensor(), BLOCK, 4), residuals.round(&tensor()).0), (vec![7; 4], 1));
        assert_eq!(residuals.bytes(), 4);
        residuals.put(second, &tensor(), BLOCK, vec![9; 4]).expect("it is over, and nothing is kept");
        assert_eq!(residuals.bytes(), 4);
    }

    #[test]
    fn another_plugin_or_shape_begins_anew() {
        for (parameter, elements) in [(1, 100), (0, 101)] {
            let mut residuals = Residuals::new(100);
            let first = begin(&mut residuals, 1, 0, 100);
            residuals.put(first, &tensor(), BLOCK, vec![7; 4]).expect("room");
            residuals.commit(first);
            begin(&mut residuals, 2, parameter, elements);
            assert_eq!((residuals.state(&tensor(), BLOCK, 4), residuals.round(&tensor()).0), (vec![0; 4], 0));
            assert_eq!(residuals.bytes(), 0);
        }
    }

    /// Its ranks hear of a failure before the lanes have let go of the operation, and may ask for the tensor again.
    #[test]
    fn an_operation_that_fails_gives_back_what_it_took_whatever_began_since() {
        let mut residuals = Residuals::new(100);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).expect("room");
        residuals.commit(first);
        let second = begin(&mut residuals, 2, 0, 100);
        residuals.put(second, &tensor(), BLOCK, vec![8; 4]).expect("room");
        let third = begin(&mut residuals, 3, 1, 100);
        residuals.discard(second);
        assert_eq!(residuals.bytes(), 0);
        residuals.put(third, &tensor(), BLOCK, vec![9; 4]).expect("room");
        residuals.commit(third);
        assert_eq!((residuals.bytes(), residuals.state(&tensor(), BLOCK, 4)), (4, vec![9; 4]));
    }

    #[test]
    fn a_limit_names_its_setting() {
        let mut residuals = Residuals::new(7);
        let first = begin(&mut residuals, 1, 0, 100);
        residuals.put(first, &tensor(), BLOCK, vec![7; 4]).expect("room");
        let other = (Stage::Result, 0);
        let refused = residuals.put(first, &tensor(), other, vec![7; 4]).expect_err("8 bytes");
        assert!(refused.contains("--plugin-state-mb") && refused.contains("more than the 7"), "{refused}");
        residuals.discard(first);
        assert_eq!(residuals.bytes(), 0);
    }
}
