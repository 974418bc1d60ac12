//! The plugins that an executor calls, as a trait: sandboxed modules in a sidecar, plain functions in simulations.

pub use ronde_collectives::kernels::Side;
use ronde_wire::{DType, Epoch, PluginUse, Seq, SetId, TensorName};

/// What plugins compute. Results hang on the arguments alone, and for a codec on the state that the host keeps for it, by set,
/// tensor, stage and element, between operations that stand. Any of these may fail; then the operation fails everywhere.
pub trait Plugins {
    /// Encodes the values of one block into a buffer that is as long as an encoded block can be; gives the number of bytes.
    ///
    /// # Errors
    /// [`PluginFault`], as for all others.
    fn encode(&mut self, at: &PluginSpan<'_>, values: &[u8], into: &mut [u8]) -> Result<usize, PluginFault>;

    /// Decodes what a plugin encoded on some sidecar.
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

    /// Reduces all ranks' values, in rank order, by what was concluded of them; nothing for a reducer that does not measure.
    fn reduce(
        &mut self,
        at: &PluginSpan<'_>,
        operands: &[&[u8]],
        concluded: &[f64],
        into: &mut [u8],
    ) -> Result<(), PluginFault>;

    /// Adds to the measures of one rank what its values of a span say.
    fn measure(&mut self, at: &PluginSpan<'_>, values: &[u8], sums: &mut [f64]) -> Result<(), PluginFault>;

    /// Turns the measures of all ranks, one rank after another, or their Gram matrix, upper triangle row by row, into what the
    /// reduction is to know.
    fn conclude(&mut self, at: &PluginSpan<'_>, ranks: usize, measures: Vec<f64>) -> Result<Vec<f64>, PluginFault>;
}

/// Values of a span, by rank, as they are read.
pub trait RankValues {
    /// Copies a rank's bytes from some byte of the span on. Ranks are counted from 0.
    fn read(&mut self, rank: usize, start: usize, into: &mut [u8]);
}

/// A part of one tensor of an operation that a plugin is called for.
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
    /// What the values are.
    pub stage: Stage,
    /// The first element within the tensor.
    pub offset: u64,
    /// How many.
    pub elements: u64,
    /// Elements of the whole tensor.
    pub tensor_elements: u64,
}

/// What is encoded and decoded: each value goes through a codec twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// What one member contributes, on its way to the owner of the piece.
    Contribution,
    /// What was reduced, on its way to everybody.
    Result,
}

/// Why a plugin did not give a result: with its name, in words for the ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PluginFault(pub String);
