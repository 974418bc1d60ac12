//! The local part of a reduction: several ranks' blocks become one contribution.

use ronde_wire::{DType, ReduceOp};

use super::element::{Element, with_element};
use super::float::{Brain, Half, Narrow};
use super::{Combination, KernelError, Side, check_length, check_lengths, combination, combine, vectorised};

/// The most bytes of one block: two of them and their widened form stay within a first-level cache.
pub const BLOCK_BYTES_MAX: usize = 16 << 10;

/// Reduces blocks of several ranks in the order in which they are given, each of them prescaled.
///
/// f16 and bf16 accumulate in f32, so the sum of any number of local ranks is rounded once, when it is stored. Buffers
/// are kept from block to block.
///
/// ```
/// use ronde_collectives::kernels::BlockReducer;
/// use ronde_wire::{DType, ReduceOp};
///
/// let mut reducer = BlockReducer::new(DType::U8, ReduceOp::Sum, 1.0)?;
/// let mut sum = [0; 2];
/// reducer.first(&[1, 2])?;
/// reducer.add(&[10, 20])?;
/// reducer.store(&mut sum)?;
/// assert_eq!(sum, [11, 22]);
/// # Ok::<(), ronde_collectives::kernels::KernelError>(())
/// ```
#[derive(Clone, Debug)]
pub struct BlockReducer {
    dtype: DType,
    op: ReduceOp,
    combination: Combination,
    prescale: f64,
    accumulator: Accumulator,
}

#[derive(Clone, Debug)]
enum Accumulator {
    /// The type itself; `scratch` is for prescaling a block that is added.
    Same { sum: Vec<u8>, scratch: Vec<u8> },
    /// f32 for types of two bytes; `scratch` is for widening a block that is added.
    Wide { sum: Vec<f32>, scratch: Vec<f32> },
}

impl BlockReducer {
    /// A reducer with nothing in it.
    ///
    /// # Errors
    /// [`KernelError::Operation`] when the operation is not elementwise for this type.
    pub fn new(dtype: DType, op: ReduceOp, prescale: f64) -> Result<Self, KernelError> {
        let combination = combination(dtype, op)?;
        let accumulator = match dtype {
            DType::F16 | DType::Bf16 => Accumulator::Wide { sum: Vec::new(), scratch: Vec::new() },
            _ => Accumulator::Same { sum: Vec::new(), scratch: Vec::new() },
        };
        Ok(Self { dtype, op, combination, prescale, accumulator })
    }

    /// Begins anew with the first rank's block.
    ///
    /// # Errors
    /// [`KernelError`] when the block is too large or does not hold whole elements.
    pub fn first(&mut self, block: &[u8]) -> Result<(), KernelError> {
        check_block(self.dtype, block)?;
        match &mut self.accumulator {
            Accumulator::Same { sum, .. } => {
                sum.clear();
                sum.extend_from_slice(block);
                super::scale(self.dtype, self.prescale, sum)
            }
            Accumulator::Wide { sum, .. } => {
                widen(self.dtype, block, self.prescale, sum);
                Ok(())
            }
        }
    }

    /// Reduces the next rank's block into what is there; the lower ranks' values are the left operand.
    ///
    /// # Errors
    /// [`KernelError`] when the block's length is not the first one's.
    pub fn add(&mut self, block: &[u8]) -> Result<(), KernelError> {
        check_block(self.dtype, block)?;
        check_lengths(self.len_bytes(), block.len())?;
        match &mut self.accumulator {
            Accumulator::Same { sum, scratch } => {
                let mut prescaled = block;
                if self.prescale != 1.0 {
                    scratch.clear();
                    scratch.extend_from_slice(block);
                    super::scale(self.dtype, self.prescale, scratch)?;
                    prescaled = scratch;
                }
                let (combination, op) = (self.combination, self.op);
                with_element!(self.dtype, op, E => combine::<E>(combination, sum, prescaled, Side::AccumulatorLeft));
            }
            Accumulator::Wide { sum, scratch } => {
                widen(self.dtype, block, self.prescale, scratch);
                combine_wide(self.combination, sum, scratch);
            }
        }
        Ok(())
    }

    /// Writes the reduction, rounded if it was accumulated in a wider type.
    ///
    /// # Errors
    /// [`KernelError::Lengths`] when the buffer's length is not the blocks'.
    pub fn store(&mut self, into: &mut [u8]) -> Result<(), KernelError> {
        check_lengths(self.len_bytes(), into.len())?;
        match (&mut self.accumulator, self.dtype) {
            (Accumulator::Same { sum, .. }, _) => into.copy_from_slice(sum),
            (Accumulator::Wide { sum, .. }, DType::Bf16) => vectorised(|| Brain::narrow(sum, into)),
            (Accumulator::Wide { sum, .. }, _) => vectorised(|| Half::narrow(sum, into)),
        }
        Ok(())
    }

    fn len_bytes(&self) -> usize {
        match &self.accumulator {
            Accumulator::Same { sum, .. } => sum.len(),
            Accumulator::Wide { sum, .. } => 2 * sum.len(),
        }
    }
}

fn widen(dtype: DType, block: &[u8], prescale: f64, into: &mut Vec<f32>) {
    into.resize(block.len() / 2, 0.0);
    match dtype {
        DType::Bf16 => vectorised(|| Brain::widen(block, into)),
        _ => vectorised(|| Half::widen(block, into)),
    }
    if prescale != 1.0 {
        vectorised(|| into.iter_mut().for_each(|value| *value = value.scale(prescale)));
    }
}

fn combine_wide(combination: Combination, sum: &mut [f32], other: &[f32]) {
    match combination {
        Combination::Sum => vectorised(|| zip_wide(sum, other, Element::sum)),
        Combination::Product => vectorised(|| zip_wide(sum, other, Element::product)),
        Combination::Minimum => vectorised(|| zip_wide(sum, other, Element::least)),
        Combination::Maximum => vectorised(|| zip_wide(sum, other, Element::greatest)),
    }
}

#[inline(always)]
fn zip_wide(sum: &mut [f32], other: &[f32], f: impl Fn(f32, f32) -> f32) {
    sum.iter_mut().zip(other).for_each(|(a, b)| *a = f(*a, *b));
}

fn check_block(dtype: DType, block: &[u8]) -> Result<(), KernelError> {
    if block.len() > BLOCK_BYTES_MAX {
        return Err(KernelError::Block { bytes: block.len() });
    }
    check_length(dtype, block.len())
}
