//! Adaptive summation: the common part of two gradients counts once, orthogonal parts add up (S. Maleki et al.,
//! "Scaling distributed training with adaptive summation", 2020). The weights have the same bits as those of the native
//! `Adasum`.
//!
//! Two operands become `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`. With `p` the largest power of two up to the
//! number of ranks, the first `2 (ranks - p)` ranks combine in pairs of neighbours, then `p` operands do, level by
//! level. All operands are linear combinations of the ranks' values, so all inner products, and thus one weight for
//! each rank, follow from the Gram matrix that the host measures. The factor is 1 for an operand that is shorter than
//! the square root of the smallest normal f64, or that consists of rounding errors only. If the matrix contains a NaN
//! or infinity, the result is NaN.

#![no_std]
#![forbid(unsafe_code)]

use core::ops::Range;

use ronde_plugin::abi::limits::RANKS_MAX;
use ronde_plugin::ranks::weighted_sum;
use ronde_plugin::{Error, Float, Operands, Plugin, Reducer, ReducerFor, Span};

/// The reducer.
#[derive(Clone, Copy, Debug)]
pub struct Adasum;

impl Plugin for Adasum {
    type Parameters = Settings;

    fn new(_: &Settings) -> Result<Self, Error> {
        Ok(Self)
    }
}

impl Reducer for Adasum {
    /// Converts the Gram matrix to the weights of the ranks.
    fn conclude(&mut self, ranks: usize, measures: &mut [f64]) -> Result<(), Error> {
        let mut weights = [1.0; RANKS_MAX as usize];
        let weights = weights.get_mut(..ranks).filter(|weights| !weights.is_empty()).ok_or(TOO_MANY)?;
        let gram = Gram { ranks, entries: measures };
        if ranks > 1 && !gram.entries.iter().all(|entry| entry.is_finite()) {
            weights.fill(f64::NAN);
        } else {
            gram.combine_all(weights);
        }
        measures[..ranks].copy_from_slice(weights);
        Ok(())
    }
}

impl<E: Float> ReducerFor<E> for Adasum {
    fn reduce(&mut self, _: &Span, operands: &Operands<'_, E>, weights: &[f64], output: &mut [E]) -> Result<(), Error> {
        weighted_sum(operands, weights, output);
        Ok(())
    }
}

/// The inner products of the ranks' values.
struct Gram<'a> {
    ranks: usize,
    /// The upper triangle with the diagonal, row by row.
    entries: &'a [f64],
}

impl Gram<'_> {
    /// Combines operands until one is left. Operands are ranges of ranks, initially single ranks.
    fn combine_all(&self, weights: &mut [f64]) {
        let mut ends = [0; RANKS_MAX as usize];
        ends.iter_mut().enumerate().for_each(|(rank, end)| *end = rank + 1);
        let mut operands = self.ranks;
        let power = 1 << self.ranks.ilog2();
        let mut pairs = if self.ranks > power { self.ranks - power } else { self.ranks / 2 };
        while operands > 1 {
            let mut start = 0;
            for pair in 0..pairs {
                let (middle, end) = (ends[2 * pair], ends[2 * pair + 1]);
                self.combine(weights, start..middle, middle..end);
                ends[pair] = end;
                start = end;
            }
            ends.copy_within(2 * pairs..operands, pairs);
            operands -= pairs;
            pairs = operands / 2;
        }
    }

    /// Combines two operands, each a weighted sum of its ranks: multiplies their weights by the factors.
    fn combine(&self, weights: &mut [f64], left: Range<usize>, right: Range<usize>) {
        let between = self.product(weights, &left, &right).value;
        let left_factor = factor(between, &self.product(weights, &left, &left));
        let right_factor = factor(between, &self.product(weights, &right, &right));
        weights[left].iter_mut().for_each(|weight| *weight *= left_factor);
        weights[right].iter_mut().for_each(|weight| *weight *= right_factor);
    }

    /// The inner product of two operands.
    fn product(&self, weights: &[f64], left: &Range<usize>, right: &Range<usize>) -> Product {
        let mut product = Product { value: 0.0, magnitude: 0.0 };
        for row in left.clone() {
            for column in right.clone() {
                let term = weights[row] * weights[column] * self.entry(row, column);
                product.value += term;
                product.magnitude += term.abs();
            }
        }
        product
    }

    fn entry(&self, row: usize, column: usize) -> f64 {
        let (row, column) = (row.min(column), row.max(column));
        // The rows before it have `ranks`, `ranks - 1`, ... entries.
        self.entries[row * (2 * self.ranks - row + 1) / 2 + column - row]
    }
}

/// A sum, and the sum of the magnitudes of its terms, which bounds its rounding error.
struct Product {
    value: f64,
    magnitude: f64,
}

/// The factor of an operand, given its inner product with the other one and with itself.
fn factor(between: f64, itself: &Product) -> f64 {
    let rounding = itself.magnitude * ROUNDING;
    if itself.value < f64::MIN_POSITIVE || itself.value <= rounding {
        1.0
    } else {
        1.0 - between / (2.0 * itself.value)
    }
}

/// The rounding error of a Gram matrix and of sums of its entries, relative to the sum of all magnitudes.
const ROUNDING: f64 = 16.0 * f64::EPSILON;
const TOO_MANY: Error = Error::own(0, "there are no ranks, or more than 256");

ronde_plugin::export! {
    name: "adasum",
    about: "Adaptive summation: what gradients share counts once, what is orthogonal adds up.",
    reducer: Adasum {
        dtypes: [float16, bfloat16, float32, float64],
        shape: "adaptive",
        commutative: false,
        measures: 0,
    },
    parameters: Settings {},
    limits: { memory_bytes: 655360, call_ms: 100, ranks: 256 },
    buffers: { input: 131072, output: 65536, state: 0, measures: 263168 },
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use ronde_collectives::kernels;
    use ronde_plugin::math::Random;
    use ronde_wire::ReduceOp;

    use super::*;

    fn weights(ranks: usize, gram: &[f64]) -> Vec<f64> {
        let mut measures = gram.to_vec();
        Adasum.conclude(ranks, &mut measures).expect("few ranks");
        measures.truncate(ranks);
        measures
    }

    #[test]
    fn equal_gradients_are_averaged_and_orthogonal_ones_added() {
        assert_eq!(weights(2, &[4.0, 4.0, 4.0]), [0.5, 0.5]);
        assert_eq!(weights(2, &[4.0, 0.0, 9.0]), [1.0, 1.0]);
        assert_eq!(weights(1, &[7.0]), [1.0]);
        assert!(weights(2, &[f64::INFINITY, 0.0, 1.0]).iter().all(|weight| weight.is_nan()));
        assert!(Adasum.conclude(257, &mut vec![0.0; 257 * 129]).is_err());
    }

    /// A Gram matrix of vectors some of which are zero, equal, or cancel out.
    fn gram(random: &mut Random, ranks: usize) -> Vec<f64> {
        let vectors: Vec<[f64; 3]> = (0..ranks)
            .map(|_| {
                let part = |random: &mut Random| f64::from(random.below(5)) - 2.0;
                [part(random), part(random), part(random)]
            })
            .collect();
        let product = |a: &[f64; 3], b: &[f64; 3]| a.iter().zip(b).map(|(a, b)| a * b * 1.1).sum::<f64>();
        let rows = vectors.iter().enumerate();
        rows.flat_map(|(row, a)| vectors[row..].iter().map(move |b| product(a, b))).collect()
    }

    #[test]
    fn weights_are_the_native_ones() {
        let mut random = Random::new(6);
        for ranks in (1..40).chain([64, 100, 256]) {
            for _ in 0..5 {
                let gram = gram(&mut random, ranks);
                let native = kernels::weights(ReduceOp::Adasum, ranks, &gram).expect("a triangle");
                let own = weights(ranks, &gram);
                assert!(own.iter().map(|weight| weight.to_bits()).eq(native.iter().map(|weight| weight.to_bits())));
            }
        }
    }

    #[test]
    fn values_are_summed_by_weight() {
        let operands = Operands::within(&[1.0_f32, 0.0, 0.0, 2.0], 2, 2, 2).expect("they fit");
        let mut output = [0.0; 2];
        Adasum.reduce(&Span::whole(2), &operands, &weights(2, &[1.0, 0.0, 4.0]), &mut output).expect("it cannot fail");
        assert_eq!(output, [1.0, 2.0]);
    }
}
