//! The mean of each element without its least and greatest values (D. Yin et al., "Byzantine-robust distributed learning:
//! towards optimal statistical rates", ICML 2018).
//!
//! Of the values of `n` ranks, `floor(trim * n)` are omitted at each end. The others are added in f64 in ascending order,
//! divided, and rounded once, so the result does not depend on which rank had which value. An infinity is an outlier like
//! any other; NaN on any rank gives NaN.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::ranks::{LANES, Rows, Sorted};
use ronde_plugin::{Error, Float, Operands, Plugin, Reducer, ReducerFor, Span, Wide};

/// The reducer.
#[derive(Debug)]
pub struct TrimmedMean {
    trim: f64,
    /// Scratch space.
    rows: Rows,
}

impl TrimmedMean {
    /// How many values are omitted at each end. A share such as 0.29 is slightly less in binary, but still means 29 of
    /// 100.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "less than half of the ranks")]
    fn trimmed(&self, ranks: usize) -> usize {
        ((self.trim * ranks as f64 + ROUNDING) as usize).min((ranks - 1) / 2)
    }
}

impl Plugin for TrimmedMean {
    type Parameters = Settings;

    fn new(settings: &Settings) -> Result<Self, Error> {
        Ok(Self { trim: settings.trim, rows: Rows::new() })
    }
}

impl Reducer for TrimmedMean {}

impl<E: Sorted> ReducerFor<E> for TrimmedMean {
    fn reduce(&mut self, _: &Span, operands: &Operands<'_, E>, _: &[f64], output: &mut [E]) -> Result<(), Error> {
        let ranks = operands.ranks();
        let trimmed = self.trimmed(ranks);
        let count = (ranks - 2 * trimmed) as f64;
        self.rows.reduce(operands, output, |rows, means| {
            let mut sums = [-0.0_f64; LANES];
            for row in &rows[trimmed..ranks - trimmed] {
                sums.iter_mut().zip(row).for_each(|(sum, key)| *sum += E::Wide::from_key(*key).to_f64());
            }
            means.iter_mut().zip(&sums).for_each(|(mean, sum)| *mean = E::Wide::from_f64(sum / count));
        });
        Ok(())
    }
}

/// More than the rounding error of the product of a share and at most 256 ranks.
const ROUNDING: f64 = 1e-9;

ronde_plugin::export! {
    name: "trimmed-mean",
    about: "The mean of each element without its least and greatest values.",
    reducer: TrimmedMean {
        dtypes: [float16, bfloat16, float32, float64],
        shape: "n-ary",
        commutative: true,
        measures: 0,
    },
    parameters: Settings {
        trim: float { default: 0.25, min: 0.0, max: 0.5, about: "The share of values that is left out at each end." },
    },
    limits: { memory_bytes: 524288, call_ms: 20, ranks: 256 },
    buffers: { input: 131072, output: 65536, state: 0, measures: 0 },
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    use ronde_plugin::math::Random;
    use ronde_plugin::{Bf16, F16};

    use super::*;

    fn mean<E: Sorted>(trim: f64, values: &[E], ranks: usize) -> Vec<E> {
        let elements = values.len() / ranks;
        let operands = Operands::within(values, ranks, elements, elements).expect("they fit");
        let mut output = vec![E::default(); elements];
        let mut reducer = Box::new(TrimmedMean::new(&Settings { trim }).expect("valid parameters"));
        reducer.reduce(&Span::whole(elements), &operands, &[], &mut output).expect("it cannot fail");
        output
    }

    #[test]
    fn the_ends_are_left_out() {
        assert_eq!(mean(0.25, &[100.0_f32, 1.0, 2.0, -100.0], 4), [1.5]);
        assert_eq!(mean(0.0, &[100.0_f64, 1.0, 2.0, -103.0], 4), [0.0]);
        assert_eq!(mean(0.5, &[9.0_f32, 1.0, 2.0], 3), [2.0], "the middle one is never left out");
        assert_eq!(mean(0.5, &[9.0_f32, 1.0, 2.0, 4.0], 4), [3.0]);
        assert_eq!(mean(0.25, &[9.0_f32, 1.0], 2), [5.0], "half a value is none");
    }

    /// 0.07 of 100 is slightly more than 7 in binary, 0.29 of 100 slightly less than 29.
    #[test]
    fn a_share_that_is_a_whole_number_of_ranks_is_that_number() {
        let trimmed = |trim: f64, ranks| TrimmedMean::new(&Settings { trim }).expect("valid parameters").trimmed(ranks);
        for (trim, ranks, expected) in [(0.29, 100, 29), (0.07, 100, 7), (0.1, 10, 1), (0.3, 10, 3), (0.14, 50, 7)] {
            assert_eq!(trimmed(trim, ranks), expected, "{trim} of {ranks}");
        }
        for percent in 0..50_usize {
            for ranks in 1..=256 {
                let exact = (percent * ranks / 100).min((ranks - 1) / 2);
                assert_eq!(trimmed(percent as f64 / 100.0, ranks), exact, "{percent} percent of {ranks}");
            }
        }
        assert_eq!(trimmed(0.249_999, 4), 0, "and what is less is less");
    }

    #[test]
    fn infinity_is_an_outlier_and_nan_wins() {
        assert_eq!(mean(0.25, &[f32::INFINITY, 1.0, 3.0, f32::NEG_INFINITY], 4), [2.0]);
        assert_eq!(mean(0.0, &[f32::INFINITY, 1.0], 2), [f32::INFINITY]);
        assert!(mean(0.0, &[f32::INFINITY, f32::NEG_INFINITY], 2)[0].is_nan());
        assert!(mean(0.25, &[1.0, 2.0, f32::NAN, 3.0], 4)[0].is_nan());
    }

    /// Sorts each element's values and adds them, one element at a time.
    #[test]
    fn it_is_what_sorting_gives() {
        plain::<F16>();
        plain::<Bf16>();
        plain::<f32>();
        plain::<f64>();
    }

    fn plain<E: Sorted>() {
        let mut random = Random::new(3);
        for (ranks, trim, trimmed) in [(1, 0.4, 0), (2, 0.25, 0), (7, 0.3, 2), (16, 0.25, 4)] {
            let number = |random: &mut Random| f64::from(random.below(1 << 20)) / 1_000.0 - 500.0;
            let values: Vec<E> = (0..ranks * 70).map(|_| E::from_f64(number(&mut random))).collect();
            let found = mean(trim, &values, ranks);
            for (element, found) in found.iter().enumerate() {
                let mut of_ranks: Vec<f64> = (0..ranks).map(|rank| values[rank * 70 + element].to_f64()).collect();
                of_ranks.sort_by(f64::total_cmp);
                let kept = &of_ranks[trimmed..ranks - trimmed];
                // Through f32 for the narrow types, like their arithmetic.
                let mean = E::Wide::from_f64(kept.iter().sum::<f64>() / kept.len() as f64);
                assert!(*found == E::narrow(mean), "{ranks} ranks, element {element}");
            }
        }
    }
}
