//! Top-k: sends the values of the largest magnitude in each block and adds the rest to the values of the next round (A.
//! Aji and K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; S. Stich et al.,
//! "Sparsified SGD with memory", NeurIPS 2018).
//!
//! Let `v` be the sum of value and residual, rounded to f32. For finite `v` (of f16 up to 2^29), the decoded value plus
//! the new residual is exactly `v`. A `v` beyond the range of the element type is sent as that type's largest number,
//! and the rest in later rounds. NaN and infinity have the largest magnitudes: at least one is sent if there are any,
//! and none leaves a residual, so an overflow does not affect later rounds.
//!
//! Encoded: the number of values as u32, the values in their own type, their positions in the block as ascending u16.
//! Zeros of `v` are not sent.

#![no_std]
#![forbid(unsafe_code)]

mod select;

use ronde_plugin::math::share;
use ronde_plugin::residual::{self, INFINITY_BITS};
use ronde_plugin::{Codec, CodecFor, Error, Float, Plugin, Span};
use select::Selector;

/// The codec.
#[derive(Debug)]
pub struct TopK {
    ratio: f64,
    selector: Selector,
}

impl Plugin for TopK {
    type Parameters = Settings;

    fn new(settings: &Settings) -> Result<Self, Error> {
        Ok(Self { ratio: settings.ratio, selector: Selector::new() })
    }
}

impl Codec for TopK {
    /// The residual.
    type State = f32;

    fn bound(&self, elements: usize) -> usize {
        HEADER_BYTES + share(self.ratio, elements) * (size_of::<f32>() + PLACE_BYTES)
    }
}

impl<E: Float<Wide = f32>> CodecFor<E> for TopK {
    #[allow(clippy::cast_possible_truncation, reason = "at most the elements of a block")]
    fn encode(&mut self, _: &Span, values: &[E], state: &mut [f32], encoded: &mut [u8]) -> Result<usize, Error> {
        let greatest = self.selector.add(values, state);
        let kept = share(self.ratio, values.len());
        let chosen = self.selector.largest(state, greatest, kept);
        let count = chosen.clone().count();
        let bytes = HEADER_BYTES + count * (E::BYTES + PLACE_BYTES);
        let (header, rest) = encoded[..bytes].split_at_mut(HEADER_BYTES);
        let (sent, places) = rest.split_at_mut(count * E::BYTES);
        header.copy_from_slice(&(count as u32).to_le_bytes());
        for ((index, sent), place) in chosen.zip(sent.chunks_exact_mut(E::BYTES)).zip(places.as_chunks_mut().0) {
            residual::take::<E>(&mut state[usize::from(index)]).write(sent);
            *place = index.to_le_bytes();
        }
        if greatest >= INFINITY_BITS {
            residual::clear_non_finite(state);
        }
        Ok(bytes)
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [E]) -> Result<(), Error> {
        let (header, rest) = encoded.split_at_checked(HEADER_BYTES).ok_or(MALFORMED)?;
        let count = header.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize;
        let needed = count.checked_mul(E::BYTES + PLACE_BYTES).ok_or(MALFORMED)?;
        if rest.len() != needed {
            return Err(MALFORMED);
        }
        let (sent, places) = rest.split_at(count * E::BYTES);
        values.fill(E::default());
        let mut free = 0;
        for (sent, place) in sent.chunks_exact(E::BYTES).zip(places.as_chunks().0) {
            let index = usize::from(u16::from_le_bytes(*place));
            if index < free || index >= values.len() {
                return Err(MALFORMED);
            }
            values[index] = E::read(sent);
            free = index + 1;
        }
        Ok(())
    }
}

const HEADER_BYTES: usize = 4;
const PLACE_BYTES: usize = 2;
/// Elements of the largest block: its values fill a buffer, and positions fit 16 bits.
const BLOCK: usize = 16_384;
const MALFORMED: Error =
    Error::malformed("top-k sends a count, so many values, and so many ascending places in the block");

ronde_plugin::export! {
    name: "topk",
    about: "The values of the largest magnitude of each block; the rest is sent later.",
    codec: TopK { dtypes: [float16, bfloat16, float32], state_bytes: 4, lossless: false, elementwise: false },
    parameters: Settings {
        ratio: float { default: 0.01, min: 0.0001, max: 1.0, about: "The share of the values that is sent." },
    },
    limits: { memory_bytes: 786432, call_ms: 20, ranks: 256 },
    buffers: { input: 65536, output: 65536, state: 65536, measures: 0 },
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use ronde_plugin::math::Random;
    use ronde_plugin::testing::{Quadratic, Workers, decode_hostile_bytes, round_trip};
    use ronde_plugin::{Bf16, F16};

    use super::*;

    fn codec(ratio: f64) -> TopK {
        TopK::new(&Settings { ratio }).expect("valid parameters")
    }

    #[test]
    fn the_largest_are_sent_and_the_rest_stays() {
        let (values, mut state) = ([0.5_f32, -3.0, 0.0, 2.0, -2.0], [0.0; 5]);
        let trip = round_trip(&mut codec(0.4), &Span::whole(5), &values, &mut state).expect("an encoding");
        assert_eq!(trip.decoded, [0.0, -3.0, 0.0, 2.0, 0.0], "of equal magnitudes the first one");
        assert_eq!(state, [0.5, 0.0, 0.0, 0.0, -2.0]);
        let trip = round_trip(&mut codec(0.4), &Span::whole(5), &[0.0_f32; 5], &mut state).expect("an encoding");
        assert_eq!((trip.decoded, state), (vec![0.5, 0.0, 0.0, 0.0, -2.0], [0.0; 5]), "and comes later");
        let trip = round_trip(&mut codec(0.4), &Span::whole(5), &[0.0_f32; 5], &mut state).expect("an encoding");
        assert_eq!(trip.encoded, [0; 4], "zeros are not sent");
    }

    #[test]
    fn decoded_and_residual_are_the_input_exactly() {
        exact::<f32>();
        exact::<F16>();
        exact::<Bf16>();
    }

    fn exact<E: Float<Wide = f32>>() {
        let mut random = Random::new(9);
        let mut codec = codec(0.05);
        let mut state = vec![0.0_f32; 3_000];
        for _ in 0..20 {
            let mut value =
                || (random.below(2_000_001) as f32 - 1_000_000.0) * 2.0_f32.powi(-(random.below(30) as i32));
            let values: Vec<E> = (0..state.len()).map(|_| E::narrow(value() / 100.0)).collect();
            let sums: Vec<f32> = values.iter().zip(&state).map(|(value, residual)| value.widen() + residual).collect();
            let trip = round_trip(&mut codec, &Span::whole(3_000), &values, &mut state).expect("an encoding");
            for ((decoded, residual), sum) in trip.decoded.iter().zip(&state).zip(&sums) {
                assert_eq!(decoded.to_f64() + f64::from(*residual), f64::from(*sum));
            }
            assert_eq!(trip.encoded.len(), 4 + 150 * (E::BYTES + 2));
        }
    }

    #[test]
    fn overflow_stays_visible_and_does_not_last() {
        let (mut values, mut state) = (vec![1e30_f32; 500], vec![0.0; 500]);
        values[400..450].fill(f32::NAN);
        values[450..].fill(f32::NEG_INFINITY);
        let trip = round_trip(&mut codec(0.01), &Span::whole(500), &values, &mut state).expect("an encoding");
        assert!(trip.decoded.iter().filter(|value| !value.is_finite()).count() == 5);
        assert!(state.iter().all(|residual| residual.is_finite()));
    }

    /// Values near the limit of a narrow type's range, with residuals that exceed it: nothing is lost.
    #[test]
    fn a_sum_beyond_the_range_comes_in_parts() {
        beyond::<F16>(65_504.0);
        beyond::<Bf16>(f32::from_bits(0x7f7f_0000));
    }

    fn beyond<E: Float<Wide = f32>>(largest: f32) {
        for (value, residual) in [(largest, largest / 400.0), (-largest, -largest / 400.0)] {
            let (mut values, mut state) = (vec![E::narrow(value); 100], vec![residual; 100]);
            let sum = f64::from(value + residual);
            for round in 0..3 {
                let before = state.clone();
                let span = Span { round, ..Span::whole(100) };
                let trip = round_trip(&mut codec(0.05), &span, &values, &mut state).expect("an encoding");
                assert!(trip.decoded.iter().all(|sent| sent.to_f64().is_finite()), "{sum} in round {round}");
                let mut of_each = trip.decoded.iter().zip(&state).zip(values.iter().zip(&before));
                assert!(of_each.all(|((sent, after), (value, before))| {
                    sent.to_f64() + f64::from(*after) == f64::from(value.widen() + before)
                }));
                assert_eq!(trip.decoded.iter().filter(|sent| **sent != E::default()).count(), 5);
                values.fill(E::narrow(1.0));
            }
        }
    }

    /// A sum beyond the range of f32 is an overflow: it is visible, and gone in the next round.
    #[test]
    fn a_sum_beyond_the_range_of_f32_does_not_last() {
        let (values, mut state) = ([f32::MAX; 100], vec![f32::MAX; 100]);
        let trip = round_trip(&mut codec(0.05), &Span::whole(100), &values, &mut state).expect("an encoding");
        assert!(trip.decoded.contains(&f32::INFINITY));
        assert_eq!(state, [0.0; 100]);
    }

    #[test]
    fn what_no_encoder_gives_is_refused() {
        let mut codec = codec(0.1);
        let mut state = vec![0.0; 100];
        let values: Vec<f32> = (0..100).map(|index| index as f32).collect();
        let trip = round_trip(&mut codec, &Span::whole(100), &values, &mut state).expect("an encoding");
        decode_hostile_bytes::<f32, _>(&mut codec, &trip.encoded, 100);
        decode_hostile_bytes::<f32, _>(&mut codec, &trip.encoded, 0);
        let mut twice = trip.encoded.clone();
        let end = twice.len();
        twice.copy_within(end - 4..end - 2, end - 2);
        let decoded = codec.decode(&Span::whole(100), &twice, &mut vec![0.0_f32; 100]);
        assert!(decoded.is_err(), "one place twice");
    }

    #[test]
    fn no_values_and_one_value() {
        let mut codec = codec(0.0001);
        let trip = round_trip::<f32, _>(&mut codec, &Span::whole(0), &[], &mut []).expect("an encoding");
        assert_eq!((trip.encoded.len(), trip.decoded.len()), (4, 0));
        let trip = round_trip(&mut codec, &Span::whole(1), &[7.0_f32], &mut [0.0]).expect("an encoding");
        assert_eq!(trip.decoded, [7.0]);
    }

    /// The large gradients cancel out and nothing else is sent, unless unsent values are kept.
    #[test]
    fn it_converges_with_the_residual_only() {
        let problem = Quadratic::cancelling(4, 256);
        let workers = || Workers::new(codec(1.0 / 16.0), 4, 256, 256);
        let with = problem.descend(workers(), 0.01, 4_000).expect("encodings");
        let without = problem.descend(workers().forgetful(), 0.01, 4_000).expect("encodings");
        assert!(with < 0.02, "{with}");
        assert!(without > 0.5, "{without}");
    }
}
