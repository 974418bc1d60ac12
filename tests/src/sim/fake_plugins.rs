//! Plugins of simulated sidecars: plain functions that fail on one sidecar now and then, and the state of their codec.
//!
//! The codec's results are those of a plain sum. With its values it sends how often the tensor was reduced before, and
//! it keeps the same number for each block: a member that counted an operation which others dropped is detected by the
//! next one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_engine::{Admission, PluginFault, PluginSpan, Plugins, RankValues, Side, Stage};
use ronde_wire::{DType, Epoch, PluginUse, PluginWork, Seq, SetId, SidecarIndex, TensorName};

/// The behaviour of a fake plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FakePlugin {
    /// Values as they are, with the number of the round.
    Codec,
    /// The greatest of each byte.
    Pairwise,
    /// The last rank's values, in the other shapes of reducers.
    NAry,
    TwoPass,
    Adaptive,
}

impl FakePlugin {
    pub(super) const REDUCERS: [Self; 4] = [Self::Pairwise, Self::NAry, Self::TwoPass, Self::Adaptive];

    /// The plugin. Its only parameter is whether it fails now and then.
    pub(super) fn uses(self, fails: bool) -> Arc<PluginUse> {
        let work = match self {
            Self::Codec => PluginWork::Codec { block_elements: BLOCK_ELEMENTS, encoded_bytes: 8 + 8 * BLOCK_ELEMENTS },
            Self::Pairwise => PluginWork::Pairwise,
            Self::NAry => PluginWork::NAry,
            Self::TwoPass => PluginWork::TwoPass { measures: 1 },
            Self::Adaptive => PluginWork::Adaptive,
        };
        let (name, version) = ("stand-in".to_owned(), "1".to_owned());
        Arc::new(PluginUse { name, version, digest: [7; 32], parameters: vec![u64::from(fails)], work })
    }

    /// Whether inner products are measured, which only numbers with fractions have.
    pub(super) const fn wants_floats(self) -> bool {
        matches!(self, Self::Adaptive)
    }
}

/// The codec's state on one sidecar: by set and name, until an operation is committed or discarded.
#[derive(Debug, Default)]
pub(super) struct Kept {
    tensors: BTreeMap<(SetId, TensorName), Tensor>,
    pending: BTreeMap<(Epoch, Seq), Pending>,
    /// A violation that was observed.
    pub(super) wrong: Option<String>,
}

#[derive(Debug, Default)]
struct Tensor {
    /// The properties that a tensor must keep for its rounds to continue.
    kind: Option<(Arc<PluginUse>, DType, u64)>,
    round: u64,
    /// How often each block was encoded in committed operations.
    blocks: BTreeMap<(Stage, u64), u64>,
}

#[derive(Debug, Default)]
struct Pending {
    rounds: BTreeMap<(SetId, TensorName), u64>,
    encoded: BTreeSet<(SetId, TensorName, Stage, u64)>,
}

impl Kept {
    /// An operation begins.
    pub(super) fn begin(&mut self, admission: &Admission) {
        let Some(plugin) = &admission.plugin else { return };
        let mut pending = Pending::default();
        for (tensor, elements) in admission.tensors.iter().zip(&plugin.elements) {
            let key = (admission.topology.set, tensor.name.clone());
            let kind = Some((Arc::clone(&plugin.uses), admission.arithmetic.dtype, *elements));
            let kept = self.tensors.entry(key.clone()).or_default();
            if kept.kind != kind {
                *kept = Tensor { kind, ..Tensor::default() };
            }
            pending.rounds.insert(key, kept.round);
        }
        self.pending.insert((admission.epoch, admission.seq), pending);
    }

    /// Commits an operation. Returns false when there is none.
    pub(super) fn commit(&mut self, operation: (Epoch, Seq)) -> bool {
        let Some(pending) = self.pending.remove(&operation) else { return false };
        for key in pending.rounds.into_keys() {
            self.tensors.entry(key).or_default().round += 1;
        }
        for (set, name, stage, block) in pending.encoded {
            *self.tensors.entry((set, name)).or_default().blocks.entry((stage, block)).or_default() += 1;
        }
        true
    }

    /// Discards an operation; no lane works on it any more.
    pub(super) fn discard(&mut self, operation: (Epoch, Seq)) {
        self.pending.remove(&operation);
    }

    /// Removes a set.
    pub(super) fn forget(&mut self, set: SetId) {
        self.tensors.retain(|(of, _), _| *of != set);
    }

    fn blame(&mut self, text: String) {
        self.wrong.get_or_insert(text);
    }

    /// Returns how often the tensor of a call was reduced before; `None` once its operation is over.
    fn round(&mut self, at: &PluginSpan<'_>) -> Option<u64> {
        self.pending.get(&(at.epoch, at.seq))?.rounds.get(&(at.set, at.name.clone())).copied()
    }
}

/// The plugins of a sidecar's lane.
pub(super) struct HostPlugins<'a> {
    pub(super) me: SidecarIndex,
    pub(super) kept: &'a mut Kept,
}

impl HostPlugins<'_> {
    /// Whether it fails on this sidecar, on all lanes, in an operation.
    fn check(&self, at: &PluginSpan<'_>) -> Result<(), PluginFault> {
        let mixed = (at.seq.0 ^ at.epoch.0 << 20 ^ u64::from(self.me.0) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let fails = at.plugin.parameters == [1] && mixed >> 60 == 0;
        if fails { Err(PluginFault(FAILS.to_owned())) } else { Ok(()) }
    }
}

impl Plugins for HostPlugins<'_> {
    fn encode(&mut self, at: &PluginSpan<'_>, values: &[u8], into: &mut [u8]) -> Result<usize, PluginFault> {
        self.check(at)?;
        let round = self.kept.round(at).unwrap_or(u64::MAX);
        let tensor = self.kept.tensors.get(&(at.set, at.name.clone()));
        let times = tensor.and_then(|tensor| tensor.blocks.get(&(at.stage, at.offset))).copied().unwrap_or(0);
        if let Some(pending) = self.kept.pending.get_mut(&(at.epoch, at.seq)) {
            let once = pending.encoded.insert((at.set, at.name.clone(), at.stage, at.offset));
            if !once || times != round {
                self.kept.blame(format!("{at:?} was encoded {times} times before round {round}, or now again"));
            }
        }
        let end = if values.iter().all(|byte| *byte == 0) { 8 } else { 8 + values.len() };
        into[..8].copy_from_slice(&round.to_le_bytes());
        into[8..end].copy_from_slice(&values[..end - 8]);
        Ok(end)
    }

    fn decode(&mut self, at: &PluginSpan<'_>, encoded: &[u8], into: &mut [u8]) -> Result<(), PluginFault> {
        self.check(at)?;
        let (round, values) = encoded.split_first_chunk().map_or((None, &[][..]), |(r, v)| (Some(*r), v));
        let own = self.kept.round(at);
        if own.is_some() && round.map(u64::from_le_bytes) != own {
            self.kept.blame(format!("{at:?} was encoded in round {round:?}, and is decoded in {own:?}"));
        }
        into.fill(0);
        into[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn reduce_pair(
        &mut self,
        at: &PluginSpan<'_>,
        accumulator: &mut [u8],
        other: &[u8],
        _: Side,
    ) -> Result<(), PluginFault> {
        self.check(at)?;
        greatest(accumulator, other);
        Ok(())
    }

    fn reduce_in_pairs(
        &mut self,
        at: &PluginSpan<'_>,
        ranks: usize,
        values: &mut dyn RankValues,
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        self.check(at)?;
        values.read(0, 0, into);
        let mut other = vec![0; into.len()];
        for rank in 1..ranks {
            values.read(rank, 0, &mut other);
            greatest(into, &other);
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        at: &PluginSpan<'_>,
        operands: &[&[u8]],
        concluded: &[f64],
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        self.check(at)?;
        let wanted = if at.plugin.work == PluginWork::NAry { 0 } else { operands.len() };
        if concluded.len() != wanted {
            self.kept.blame(format!("{at:?} sees {concluded:?} of {} ranks", operands.len()));
        }
        into.copy_from_slice(operands.last().ok_or_else(|| PluginFault("there is nothing to reduce".to_owned()))?);
        Ok(())
    }

    fn measure(&mut self, at: &PluginSpan<'_>, _: &[u8], sums: &mut [f64]) -> Result<(), PluginFault> {
        self.check(at)?;
        sums[0] += at.elements as f64;
        Ok(())
    }

    fn conclude(&mut self, at: &PluginSpan<'_>, ranks: usize, measures: Vec<f64>) -> Result<Vec<f64>, PluginFault> {
        self.check(at)?;
        let measured = matches!(at.plugin.work, PluginWork::TwoPass { .. });
        if measured && measures != vec![at.tensor_elements as f64; ranks] {
            self.kept.blame(format!("{at:?}: the elements of {ranks} ranks are measured as {measures:?}"));
        }
        Ok(vec![1.0; ranks])
    }
}

/// Combines two ranks' values as [`FakePlugin::Pairwise`] does.
pub(super) fn greatest(into: &mut [u8], other: &[u8]) {
    into.iter_mut().zip(other).for_each(|(into, other)| *into = (*into).max(*other));
}

/// The error text of a fake plugin that fails.
pub(super) const FAILS: &str = "the fake plugin fails here";
/// Elements of a block: large tensors have many.
const BLOCK_ELEMENTS: u32 = 4_096;
