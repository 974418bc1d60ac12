//! What two-pass and adaptive reducers measure: sums of squares and inner products, in f64.
//!
//! Partial sums are taken in one fixed pattern: element `i` of a block goes to partial sum `i % 16`, and these are added as
//! a binary tree. So a result depends on how values are cut into calls, and on nothing else.

use std::marker::PhantomData;

use ronde_wire::{DType, ReduceOp};

use super::nary::check_operands;
use super::sample::{Sample, Wide, with_sample};
use super::{KernelError, check_length};

/// Adds the squares of all values to a sum, which may be a NaN or infinity as theirs are.
///
/// # Errors
/// [`KernelError`] when the type is not a floating-point one or the block does not hold whole elements.
pub fn add_sum_of_squares(dtype: DType, values: &[u8], sum: &mut f64) -> Result<(), KernelError> {
    check_length(dtype, values.len())?;
    let dispatch = pulp::Arch::new();
    with_sample!(dtype, ReduceOp::ClippedMean, E => dispatch.dispatch(Squares::<E> { values, sum, sample: PhantomData }));
    Ok(())
}

/// Adds the inner product of each pair of operands to a Gram matrix: its upper triangle with the diagonal, row by row, so
/// `n (n + 1) / 2` numbers for `n` operands, all of one length.
///
/// # Errors
/// [`KernelError`] when the type is not a floating-point one or the lengths do not fit; the matrix is unchanged then.
pub fn add_products(dtype: DType, operands: &[&[u8]], gram: &mut [f64]) -> Result<(), KernelError> {
    let op = ReduceOp::Adasum;
    check_operands(dtype, op, operands)?;
    let needed = gram_len(operands.len());
    if gram.len() != needed {
        return Err(KernelError::Measures { op, ranks: operands.len(), needed, given: gram.len() });
    }
    let dispatch = pulp::Arch::new();
    with_sample!(dtype, op, E => dispatch.dispatch(Products::<E> { operands, gram, sample: PhantomData }));
    Ok(())
}

/// How many numbers the upper triangle of a Gram matrix of so many ranks has.
pub(super) const fn gram_len(ranks: usize) -> usize {
    ranks * (ranks + 1) / 2
}

struct Squares<'a, E> {
    values: &'a [u8],
    sum: &'a mut f64,
    sample: PhantomData<E>,
}

impl<E: Sample> pulp::WithSimd for Squares<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let mut block = [0.0; BLOCK];
        for bytes in self.values.chunks(BLOCK * E::BYTES) {
            widen::<E>(bytes, &mut block);
            *self.sum += product(&block, &block);
        }
    }
}

struct Products<'a, E> {
    operands: &'a [&'a [u8]],
    gram: &'a mut [f64],
    sample: PhantomData<E>,
}

impl<E: Sample> pulp::WithSimd for Products<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let bytes = self.operands[0].len();
        let mut blocks = vec![[0.0; BLOCK]; self.operands.len()];
        for start in (0..bytes).step_by(BLOCK * E::BYTES) {
            let end = bytes.min(start + BLOCK * E::BYTES);
            for (operand, block) in self.operands.iter().zip(&mut blocks) {
                widen::<E>(&operand[start..end], block);
            }
            let pairs =
                blocks.iter().enumerate().flat_map(|(row, left)| blocks[row..].iter().map(move |right| (left, right)));
            for (entry, (left, right)) in self.gram.iter_mut().zip(pairs) {
                *entry += product(left, right);
            }
        }
    }
}

/// The values in f64, exactly, and zeros behind them.
#[inline(always)]
fn widen<E: Sample>(bytes: &[u8], block: &mut [f64; BLOCK]) {
    let mut values = [E::Wide::default(); BLOCK];
    E::load(bytes, &mut values[..bytes.len() / E::BYTES]);
    block.iter_mut().zip(&values).for_each(|(wide, value)| *wide = value.to_f64());
}

#[inline(always)]
fn product(left: &[f64; BLOCK], right: &[f64; BLOCK]) -> f64 {
    let mut partial = [0.0; PARTIAL];
    for (left, right) in left.as_chunks::<PARTIAL>().0.iter().zip(right.as_chunks::<PARTIAL>().0) {
        for lane in 0..PARTIAL {
            partial[lane] += left[lane] * right[lane];
        }
    }
    let mut width = PARTIAL / 2;
    while width > 0 {
        for lane in 0..width {
            partial[lane] += partial[lane + width];
        }
        width /= 2;
    }
    partial[0]
}

/// Elements of a block: those of 16 ranks, widened, fill a first-level cache.
const BLOCK: usize = 256;
/// Partial sums: four vectors, which hides the latency of an addition.
const PARTIAL: usize = 16;

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::super::float::{Brain, Half};
    use super::super::tests::block;
    use super::*;

    /// The baseline's instructions and the widest ones of this processor, on finite and on other values.
    #[test]
    fn dispatch_variants_are_bit_identical() {
        variants::<Half>(DType::F16);
        variants::<Brain>(DType::Bf16);
        variants::<f32>(DType::F32);
        variants::<f64>(DType::F64);
    }

    fn variants<E: Sample>(dtype: DType) {
        // Exponents below that of infinity in every type, and everything.
        let finite = |seed| block(seed).into_iter().map(|byte| byte & 0xb3).collect::<Vec<u8>>();
        for blocks in [[finite(1), finite(2), finite(3)], [block(1), block(2), block(3)]] {
            let operands: Vec<&[u8]> = blocks.iter().map(|block| &block[..4_096 + 8 * 3]).collect();
            let (mut gram, mut baseline) = ([0.0; 6], [0.0; 6]);
            add_products(dtype, &operands, &mut gram).expect("equal lengths");
            Products::<E> { operands: &operands, gram: &mut baseline, sample: PhantomData }.with_simd(pulp::Scalar);
            let (mut sum, mut baseline_sum) = (0.0, 0.0);
            add_sum_of_squares(dtype, operands[0], &mut sum).expect("whole elements");
            Squares::<E> { values: operands[0], sum: &mut baseline_sum, sample: PhantomData }.with_simd(pulp::Scalar);
            let pairs = gram.into_iter().chain([sum]).zip(baseline.into_iter().chain([baseline_sum]));
            for (found, expected) in pairs {
                assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{dtype}");
            }
        }
    }
}
