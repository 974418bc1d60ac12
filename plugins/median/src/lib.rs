//! The median of all ranks' values of each element; for an even number of ranks, the mean of the two middle values (D.
//! Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018). The bits are the
//! same as those of the native `Median`: -0 is less than +0, and NaN on any rank gives NaN.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::ranks::{Rows, Sorted};
use ronde_plugin::{Error, Operands, Plugin, Reducer, ReducerFor, Span, Wide};

/// The reducer. What it holds is scratch space.
#[derive(Debug)]
pub struct Median {
    rows: Rows,
}

impl Plugin for Median {
    type Parameters = Settings;

    fn new(_: &Settings) -> Result<Self, Error> {
        Ok(Self { rows: Rows::new() })
    }
}

impl Reducer for Median {}

impl<E: Sorted> ReducerFor<E> for Median {
    fn reduce(&mut self, _: &Span, operands: &Operands<'_, E>, _: &[f64], output: &mut [E]) -> Result<(), Error> {
        let ranks = operands.ranks();
        self.rows.reduce(operands, output, |rows, medians| {
            let middle = rows[(ranks - 1) / 2].iter().zip(&rows[ranks / 2]);
            for (median, (lower, upper)) in medians.iter_mut().zip(middle) {
                let (lower, upper) = (E::Wide::from_key(*lower), E::Wide::from_key(*upper));
                *median = if ranks % 2 == 1 { lower } else { lower.mean(upper) };
            }
        });
        Ok(())
    }
}

ronde_plugin::export! {
    name: "median",
    about: "The middle value of each element: up to half of the ranks may send anything.",
    reducer: Median {
        dtypes: [float16, bfloat16, float32, float64],
        shape: "n-ary",
        commutative: true,
        measures: 0,
    },
    parameters: Settings {},
    limits: { memory_bytes: 524288, call_ms: 20, ranks: 256 },
    buffers: { input: 131072, output: 65536, state: 0, measures: 0 },
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    use ronde_collectives::kernels::reduce_n;
    use ronde_plugin::math::Random;
    use ronde_plugin::{Bf16, F16};
    use ronde_wire::{DType, ReduceOp};

    use super::*;

    fn median<E: Sorted>(values: &[E], ranks: usize) -> Vec<E> {
        let elements = values.len() / ranks;
        let operands = Operands::within(values, ranks, elements, elements).expect("they fit");
        let mut output = vec![E::default(); elements];
        let mut reducer = Box::new(Median { rows: Rows::new() });
        reducer.reduce(&Span::whole(elements), &operands, &[], &mut output).expect("it cannot fail");
        output
    }

    #[test]
    fn odd_and_even_numbers_of_ranks() {
        assert_eq!(median(&[1.0_f32, 9.0, 3.0], 3), [3.0]);
        assert_eq!(median(&[1.0_f32, 9.0, 3.0, 5.0], 4), [4.0]);
        assert_eq!(median(&[1.0_f64, 9.0, 3.0, 5.0], 2), [2.0, 7.0]);
        assert_eq!(median(&[f32::MAX, f32::MAX], 2), [f32::MAX]);
    }

    #[test]
    fn a_minority_of_infinities_is_outvoted_and_nan_wins() {
        assert_eq!(median(&[f32::INFINITY, 1.0, 2.0], 3), [2.0]);
        assert!(median(&[1.0, -f32::NAN, 2.0], 3)[0].is_nan() && median(&[1.0, f32::NAN, 2.0], 3)[0].is_nan());
    }

    #[test]
    fn the_bits_are_the_native_ones() {
        native::<F16>(DType::F16);
        native::<Bf16>(DType::Bf16);
        native::<f32>(DType::F32);
        native::<f64>(DType::F64);
    }

    fn native<E: Sorted>(dtype: DType) {
        let mut random = Random::new(8);
        for ranks in [1, 2, 3, 5, 8, 17] {
            let bytes: Vec<u8> = (0..ranks * 100 * E::BYTES).map(|_| random.byte()).collect();
            let values: Vec<E> = bytes.chunks(E::BYTES).map(E::read).collect();
            let operands: Vec<&[u8]> = bytes.chunks(100 * E::BYTES).collect();
            let mut expected = vec![0; 100 * E::BYTES];
            reduce_n(dtype, ReduceOp::Median, &operands, &[], &mut expected).expect("lengths fit");
            for (own, native) in median(&values, ranks).into_iter().zip(expected.chunks(E::BYTES)) {
                let mut written = vec![0; E::BYTES];
                own.write(&mut written);
                assert_eq!(written, native, "{ranks} ranks of {dtype}");
            }
        }
    }
}
