//! The mean of all ranks' tensors after those longer than the median length are scaled down to it (clipping, as a
//! defence against large updates: S. Karimireddy, L. He and M. Jaggi, "Learning from history for Byzantine robust
//! optimization", ICML 2021). Weights and sums are the same as those of the native `ClippedMean`.
//!
//! The length of a rank's tensor is the square root of the sum of its squares. A rank whose length is infinite or NaN
//! has the weight 0: it is ignored, and its overflow does not appear in the result.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::abi::limits::RANKS_MAX;
use ronde_plugin::math::sqrt;
use ronde_plugin::ranks::{sum_of_squares, weighted_sum};
use ronde_plugin::{Error, Float, Operands, Plugin, Reducer, ReducerFor, Span};

/// The reducer.
#[derive(Clone, Copy, Debug)]
pub struct ClippedMean;

impl Plugin for ClippedMean {
    type Parameters = Settings;

    fn new(_: &Settings) -> Result<Self, Error> {
        Ok(Self)
    }
}

impl Reducer for ClippedMean {
    /// Converts the sums of squares of the ranks to their weights.
    fn conclude(&mut self, ranks: usize, measures: &mut [f64]) -> Result<(), Error> {
        let mut sorted = [0.0; RANKS_MAX as usize];
        let sorted = sorted.get_mut(..ranks).filter(|norms| !norms.is_empty()).ok_or(TOO_MANY)?;
        for (norm, square) in sorted.iter_mut().zip(&mut *measures) {
            let root = sqrt(*square);
            *norm = if root.is_nan() { f64::INFINITY } else { root };
            *square = *norm;
        }
        sorted.sort_unstable_by(f64::total_cmp);
        let middle = f64::midpoint(sorted[(ranks - 1) / 2], sorted[ranks / 2]);
        let ranks = ranks as f64;
        for weight in measures {
            let norm = *weight;
            *weight = if norm.is_infinite() {
                0.0
            } else if norm <= middle {
                1.0 / ranks
            } else {
                middle / norm / ranks
            };
        }
        Ok(())
    }
}

impl<E: Float> ReducerFor<E> for ClippedMean {
    fn measure(&mut self, _: &Span, values: &[E], measures: &mut [f64]) -> Result<(), Error> {
        measures.iter_mut().for_each(|measure| *measure = sum_of_squares(values));
        Ok(())
    }

    fn reduce(&mut self, _: &Span, operands: &Operands<'_, E>, weights: &[f64], output: &mut [E]) -> Result<(), Error> {
        weighted_sum(operands, weights, output);
        Ok(())
    }
}

const TOO_MANY: Error = Error::own(0, "there are no ranks, or more than 256");

ronde_plugin::export! {
    name: "clipped-mean",
    about: "The mean of tensors that are shortened to the median length where they are longer.",
    reducer: ClippedMean {
        dtypes: [float16, bfloat16, float32, float64],
        shape: "two-pass",
        commutative: false,
        measures: 1,
    },
    parameters: Settings {},
    limits: { memory_bytes: 393216, call_ms: 20, ranks: 256 },
    buffers: { input: 131072, output: 65536, state: 0, measures: 2048 },
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

    fn clipped(values: &[f32], ranks: usize) -> Vec<f32> {
        let elements = values.len() / ranks;
        let operands = Operands::within(values, ranks, elements, elements).expect("they fit");
        let (mut reducer, span) = (ClippedMean, Span::whole(elements));
        let mut measures = vec![0.0; ranks];
        for (measure, operand) in measures.iter_mut().zip(operands.iter()) {
            reducer.measure(&span, operand, core::slice::from_mut(measure)).expect("it cannot fail");
        }
        reducer.conclude(ranks, &mut measures).expect("few ranks");
        let mut output = vec![0.0; elements];
        reducer.reduce(&span, &operands, &measures, &mut output).expect("it cannot fail");
        output
    }

    #[test]
    fn what_is_too_long_is_shortened() {
        assert_eq!(clipped(&[3.0, 0.0, 0.0, 3.0, 0.0, 3000.0], 3), [1.0, 2.0]);
        assert_eq!(clipped(&[0.0, 0.0], 2), [0.0], "a length of 0");
        assert_eq!(clipped(&[2.0, 2.0, f32::INFINITY], 3), [4.0 / 3.0], "left out");
        assert_eq!(clipped(&[f32::NAN], 1), [0.0]);
    }

    #[test]
    fn weights_are_the_native_ones() {
        let mut random = Random::new(2);
        for ranks in [1, 2, 3, 8, 33, 256] {
            let square = |random: &mut Random| match random.below(10) {
                0 => f64::INFINITY,
                1 => f64::NAN,
                2 => 0.0,
                _ => f64::from(random.below(1 << 30)) / 1_000.0,
            };
            let measures: Vec<f64> = (0..ranks).map(|_| square(&mut random)).collect();
            let expected = kernels::weights(ReduceOp::ClippedMean, ranks, &measures).expect("as many as ranks");
            let mut own = measures.clone();
            ClippedMean.conclude(ranks, &mut own).expect("few ranks");
            assert!(own.iter().map(|weight| weight.to_bits()).eq(expected.iter().map(|weight| weight.to_bits())));
        }
        assert!(ClippedMean.conclude(257, &mut [0.0; 257]).is_err());
    }
}
