//! The local part of a reduction: several ranks' blocks become one contribution.

use ronde_wire::{DType, ReduceOp};

use super::element::Element;
use super::float::{Brain, Half, Narrow};
use super::partial::PartialSums;
use super::{Combination, Elementwise, KernelError, Side, check_length, elementwise, vectorised};

/// The most bytes of one block: two of them and their widened form stay within a first-level cache.
pub const BLOCK_BYTES_MAX: usize = 16 << 10;

/// Reduces what several ranks have, in the order of the ranks and each of them prescaled, block by block.
///
/// f16 and bf16 accumulate in f32, so the sum of any number of local ranks is rounded once, when it is stored; others
/// accumulate where the result goes. Buffers are kept from call to call.
///
/// ```
/// use ronde_collectives::kernels::{BlockReducer, KernelError};
/// use ronde_wire::{DType, ReduceOp};
///
/// let ranks = [[1, 2], [10, 20]];
/// let mut reducer = BlockReducer::new(DType::U8, ReduceOp::Sum, 1.0)?;
/// let mut sum = [0; 2];
/// reducer.reduce(ranks.len(), &mut sum, |rank, start, block| {
///     block.copy_from_slice(&ranks[rank][start..start + block.len()]);
///     Ok::<(), KernelError>(())
/// })?;
/// assert_eq!(sum, [11, 22]);
/// # Ok::<(), KernelError>(())
/// ```
#[derive(Clone, Debug)]
pub struct BlockReducer {
    dtype: DType,
    op: ReduceOp,
    elementwise: Elementwise,
    prescale: f64,
    stored: Stored,
    /// What a rank has of a block.
    block: Vec<u8>,
    /// The accumulator, for types of two bytes.
    sum: Vec<f32>,
    /// The widened form of `block`, for types of two bytes.
    widened: Vec<f32>,
}

impl BlockReducer {
    /// A reducer with nothing in it.
    ///
    /// # Errors
    /// [`KernelError::Operation`] when the operation is not elementwise for this type.
    pub fn new(dtype: DType, op: ReduceOp, prescale: f64) -> Result<Self, KernelError> {
        let elementwise = elementwise(dtype, op)?;
        let stored = Stored::Values;
        Ok(Self { dtype, op, elementwise, prescale, stored, block: Vec::new(), sum: Vec::new(), widened: Vec::new() })
    }

    /// The same, whose reductions are parts of an average.
    #[must_use]
    pub fn as_partial_sums(self, sums: PartialSums) -> Self {
        Self { prescale: self.prescale * sums.factor(), stored: Stored::Partial(sums), ..self }
    }

    /// The same, whose reductions are of all `ranks` ranks and become averages, times `postscale`, before they are rounded. For
    /// types of two bytes only.
    #[must_use]
    pub fn as_average(self, ranks: u32, postscale: f64) -> Self {
        let ranks = ranks.max(1);
        // The sum of numbers of bf16 may be larger than any f32; powers of two change no digit.
        let part = if self.dtype == DType::Bf16 { 1.0 / f64::from(ranks.next_power_of_two()) } else { 1.0 };
        let stored = Stored::Multiplied(postscale / f64::from(ranks) / part);
        Self { prescale: self.prescale * part, stored, ..self }
    }

    /// Whether one rank's values are its reduction, bit by bit.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.prescale == 1.0 && matches!(self.stored, Stored::Values | Stored::Multiplied(1.0))
    }

    /// Writes the reduction of so many ranks. `read` is given a rank, counted from 0, the first byte and a buffer of at most
    /// [`BLOCK_BYTES_MAX`], and fills it. The lower ranks' values are the left operand. Each byte of each rank is read once.
    ///
    /// # Errors
    /// [`KernelError`] when there are no ranks or `into` does not hold whole elements, and whatever `read` returns.
    pub fn reduce<E: From<KernelError>>(
        &mut self,
        ranks: usize,
        into: &mut [u8],
        mut read: impl FnMut(usize, usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        check_length(self.dtype, into.len())?;
        if ranks == 0 {
            return Err(KernelError::NoRanks.into());
        }
        for (index, part) in into.chunks_mut(BLOCK_BYTES_MAX).enumerate() {
            let mut read = |rank, block: &mut [u8]| read(rank, index * BLOCK_BYTES_MAX, block);
            match (self.dtype, self.elementwise) {
                (DType::F16 | DType::Bf16, Elementwise::Arithmetic(combination)) => {
                    self.reduce_wide(combination, ranks, part, &mut read)?;
                }
                _ => self.reduce_in_place(ranks, part, &mut read)?,
            }
        }
        Ok(())
    }

    fn reduce_in_place<E: From<KernelError>>(
        &mut self,
        ranks: usize,
        into: &mut [u8],
        read: &mut impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        read(0, into)?;
        super::scale(self.dtype, self.prescale, into)?;
        self.block.resize(into.len(), 0);
        for rank in 1..ranks {
            read(rank, &mut self.block)?;
            super::scale(self.dtype, self.prescale, &mut self.block)?;
            super::reduce_into(self.dtype, self.op, into, &self.block, Side::AccumulatorLeft)?;
        }
        Ok(())
    }

    fn reduce_wide<E: From<KernelError>>(
        &mut self,
        combination: Combination,
        ranks: usize,
        into: &mut [u8],
        read: &mut impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.block.resize(into.len(), 0);
        for rank in 0..ranks {
            read(rank, &mut self.block)?;
            let widened = if rank == 0 { &mut self.sum } else { &mut self.widened };
            widen(self.dtype, &self.block, self.prescale, widened);
            if rank > 0 {
                combine_wide(combination, &mut self.sum, &self.widened);
            }
        }
        if let Stored::Multiplied(factor) = self.stored {
            vectorised(|| self.sum.iter_mut().for_each(|value| *value = value.scale(factor)));
        }
        match (self.stored, self.dtype) {
            (Stored::Partial(sums), _) => sums.narrow(&self.sum, into),
            (_, DType::Bf16) => vectorised(|| Brain::narrow(&self.sum, into)),
            _ => vectorised(|| Half::narrow(&self.sum, into)),
        }
        Ok(())
    }
}

/// How the reduction of types of two bytes is stored.
#[derive(Clone, Copy, Debug)]
enum Stored {
    Values,
    Partial(PartialSums),
    Multiplied(f64),
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

const _: () = assert!(BLOCK_BYTES_MAX.is_multiple_of(8), "blocks hold whole elements of every type");
