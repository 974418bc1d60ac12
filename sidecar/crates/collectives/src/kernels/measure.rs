//! What two-pass and adaptive reducers measure: sums of squares and inner products, in f64.
//!
//! Partial sums are taken in one fixed pattern: a call is cut into blocks of 128 elements, element `i` of a block goes to
//! partial sum `i % 8`, and these are added as a binary tree. So a result depends on how values are cut into calls, and on nothing else.

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
    fn with_simd<S: pulp::Simd>(self, simd: S) {
        let mut block = [0.0; BLOCK];
        for bytes in self.values.chunks(BLOCK * E::BYTES) {
            widen::<E>(bytes, &mut block);
            let [product] = products(simd, &block, &[block]);
            *self.sum += product;
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
    fn with_simd<S: pulp::Simd>(self, simd: S) {
        let bytes = self.operands[0].len();
        let mut blocks = vec![[0.0; BLOCK]; self.operands.len()];
        for start in (0..bytes).step_by(BLOCK * E::BYTES) {
            let end = bytes.min(start + BLOCK * E::BYTES);
            for (operand, block) in self.operands.iter().zip(&mut blocks) {
                widen::<E>(&operand[start..end], block);
            }
            let mut gram = &mut self.gram[..];
            for row in 0..blocks.len() {
                let (entries, below) = gram.split_at_mut(blocks.len() - row);
                gram = below;
                add_row(simd, &blocks[row..], entries);
            }
        }
    }
}

/// Adds the products of the first block with each one. Several at once read the first only once.
#[inline(always)]
fn add_row<S: pulp::Simd>(simd: S, blocks: &[[f64; BLOCK]], entries: &mut [f64]) {
    let (groups, rest) = blocks.as_chunks::<TOGETHER>();
    let (entry_groups, entry_rest) = entries.as_chunks_mut::<TOGETHER>();
    for (group, entries) in groups.iter().zip(entry_groups) {
        let found = products(simd, &blocks[0], group);
        entries.iter_mut().zip(found).for_each(|(entry, product)| *entry += product);
    }
    for (block, entry) in rest.iter().zip(entry_rest) {
        let [product] = products(simd, &blocks[0], std::array::from_ref(block));
        *entry += product;
    }
}

/// The values in f64, exactly, and zeros behind them.
#[inline(always)]
fn widen<E: Sample>(bytes: &[u8], block: &mut [f64; BLOCK]) {
    let mut values = [E::Wide::default(); BLOCK];
    E::load(bytes, &mut values[..bytes.len() / E::BYTES]);
    block.iter_mut().zip(&values).for_each(|(wide, value)| *wide = value.to_f64());
}

/// In vectors of `S`, of which several hold the partial sums when they are short.
#[inline(always)]
fn products<S: pulp::Simd, const N: usize>(simd: S, left: &[f64; BLOCK], rights: &[[f64; BLOCK]; N]) -> [f64; N] {
    const { assert!(PARTIAL.is_multiple_of(S::F64_LANES)) };
    let vectors = PARTIAL / S::F64_LANES;
    let left = S::as_simd_f64s(left).0;
    let rights = rights.each_ref().map(|right| S::as_simd_f64s(right).0);
    let mut partial = [[simd.splat_f64s(0.0); PARTIAL]; N];
    for start in (0..left.len()).step_by(vectors) {
        for (partial, right) in partial.iter_mut().zip(&rights) {
            for vector in 0..vectors {
                let product = simd.mul_f64s(left[start + vector], right[start + vector]);
                partial[vector] = simd.add_f64s(partial[vector], product);
            }
        }
    }
    partial.map(|partial| {
        let mut lanes = [0.0; PARTIAL];
        S::as_mut_simd_f64s(&mut lanes).0.copy_from_slice(&partial[..vectors]);
        total(lanes)
    })
}

/// As a binary tree: four apart, then two, then one.
#[inline(always)]
fn total([a, b, c, d, e, f, g, h]: [f64; PARTIAL]) -> f64 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Elements of a block: those of 32 ranks, widened, fill a first-level cache.
const BLOCK: usize = 128;
/// Partial sums of a product: two vectors.
const PARTIAL: usize = 8;
/// Products with one block that are taken together: their partial sums stay in registers.
const TOGETHER: usize = 4;

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
