//! The plugins that an executor calls, as a trait: sandboxed modules in a sidecar, plain functions in simulations.

pub use ronde_collectives::kernels::Side;
use ronde_wire::{DType, Epoch, PluginUse, Seq, SetId, TensorName};

/// The computations of plugins. Results depend only on the arguments, and for a codec on the state that the host keeps
/// for it between committed operations, by set, tensor, stage and element. If one of these fails, the operation fails
/// everywhere.
pub trait Plugins {
    /// Encodes the values of one block into a buffer of the greatest encoded length; returns the number of bytes.
    ///
    /// # Errors
    /// [`PluginFault`], as for all others.
    fn encode(&mut self, at: &PluginSpan<'_>, values: &[u8], into: &mut [u8]) -> Result<usize, PluginFault>;

    /// Decodes a block that a plugin encoded on some sidecar.
    fn decode(&mut self, at: &PluginSpan<'_>, encoded: &[u8], into: &mut [u8]) -> Result<(), PluginFault>;

    /// Reduces two ranks' values; the accumulator, on the given side, becomes the result.
    fn reduce_pair(
        &mut self,
        at: &PluginSpan<'_>,
        accumulator: &mut [u8],
        other: &[u8],
        side: Side,
    ) -> Result<(), PluginFault>;

    /// Reduces the values of one rank or more in pairs, in rank order, each read once.
    fn reduce_in_pairs(
        &mut self,
        at: &PluginSpan<'_>,
        ranks: usize,
        values: &mut dyn RankValues,
        into: &mut [u8],
    ) -> Result<(), PluginFault>;

    /// Reduces all ranks' values, in rank order, with the conclusions of [`Self::conclude`]; these are empty for a
    /// reducer that does not measure.
    fn reduce(
        &mut self,
        at: &PluginSpan<'_>,
        operands: &[&[u8]],
        concluded: &[f64],
        into: &mut [u8],
    ) -> Result<(), PluginFault>;

    /// Adds the measures of one rank's values of a span to the rank's sums.
    fn measure(&mut self, at: &PluginSpan<'_>, values: &[u8], sums: &mut [f64]) -> Result<(), PluginFault>;

    /// Turns the measures of all ranks, one rank after another, or the upper triangle of their Gram matrix, row by row,
    /// into the conclusions for the reduction.
    fn conclude(&mut self, at: &PluginSpan<'_>, ranks: usize, measures: Vec<f64>) -> Result<Vec<f64>, PluginFault>;
}

/// Access to the values of a span, by rank.
pub trait RankValues {
    /// Copies a rank's bytes from byte `start` of the span on. Ranks are counted from 0.
    fn read(&mut self, rank: usize, start: usize, into: &mut [u8]);
}

/// The span of one tensor of an operation for which a plugin is called.
#[derive(Clone, Copy, Debug)]
pub struct PluginSpan<'a> {
    /// The epoch.
    pub epoch: Epoch,
    /// The operation.
    pub seq: Seq,
    /// The plugin.
    pub plugin: &'a PluginUse,
    /// The set.
    pub set: SetId,
    /// The tensor.
    pub name: &'a TensorName,
    /// The type of its elements.
    pub dtype: DType,
    /// The stage of the values.
    pub stage: Stage,
    /// The first element within the tensor.
    pub offset: u64,
    /// The number of elements.
    pub elements: u64,
    /// Elements of the whole tensor.
    pub tensor_elements: u64,
}

/// The values that a codec handles: each value is encoded twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// The contribution of one member, sent to the owner of the piece.
    Contribution,
    /// The reduced value, sent to all members.
    Result,
}

/// Why a plugin returned no result, with its name, as a text for the ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PluginFault(pub String);
