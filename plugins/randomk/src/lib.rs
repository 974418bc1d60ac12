//! Random-k: sends the values at random positions and adds the rest to the values of the next round. All ranks draw the
//! same positions from a shared seed, so positions are not sent, and the sum of what was sent is exact (J. Wangni et
//! al., "Gradient sparsification for communication-efficient distributed optimization", NeurIPS 2018; S. Stich et al.,
//! "Sparsified SGD with memory", NeurIPS 2018).
//!
//! A block of n elements is split into k ranges whose lengths differ by at most 1, and one position is drawn in each.
//! The seed includes the round, the tensor and the block's offset, so other rounds draw other positions.
//!
//! Let `v` be the sum of value and residual, rounded to f32. For finite `v` (of f16 up to 2^29), the decoded value plus
//! the new residual is exactly `v`. A `v` beyond the range of the element type is sent as that type's largest number,
//! and the rest in later rounds. If a NaN or infinity was not drawn, the first value is sent as NaN; none stays in the
//! residual.
//!
//! Encoded: the drawn values in their own type.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::lanes::{self, zip};
use ronde_plugin::math::{Random, share};
use ronde_plugin::residual::{self, INFINITY_BITS, magnitude_bits};
use ronde_plugin::{Codec, CodecFor, Error, Float, Plugin, Span};

/// The codec.
#[derive(Clone, Copy, Debug)]
pub struct RandomK {
    ratio: f64,
    seed: u64,
}

impl RandomK {
    /// The positions of this round in ascending order.
    fn places(self, span: &Span) -> impl Iterator<Item = usize> {
        let (elements, kept) = (span.elements, share(self.ratio, span.elements));
        let mut random = Random::of(&[self.seed, span.round, span.tensor, span.offset]);
        (0..kept).map(move |run| {
            let (start, end) = (run * elements / kept, (run + 1) * elements / kept);
            start + random.below(u32::try_from(end - start).unwrap_or(u32::MAX)) as usize
        })
    }
}

impl Plugin for RandomK {
    type Parameters = Settings;

    fn new(settings: &Settings) -> Result<Self, Error> {
        Ok(Self { ratio: settings.ratio, seed: settings.seed.cast_unsigned() })
    }
}

impl Codec for RandomK {
    /// The residual.
    type State = f32;

    fn bound(&self, elements: usize) -> usize {
        share(self.ratio, elements) * size_of::<f32>()
    }
}

impl<E: Float<Wide = f32>> CodecFor<E> for RandomK {
    fn encode(&mut self, span: &Span, values: &[E], state: &mut [f32], encoded: &mut [u8]) -> Result<usize, Error> {
        zip(state, values, |residual, value| *residual += value.widen());
        let others = lanes::greatest(state, magnitude_bits) >= INFINITY_BITS;
        let bytes = share(self.ratio, values.len()) * E::BYTES;
        let mut drawn = false;
        for (index, sent) in self.places(span).zip(encoded[..bytes].chunks_exact_mut(E::BYTES)) {
            let value: E = residual::take(&mut state[index]);
            drawn |= !value.widen().is_finite();
            value.write(sent);
        }
        if others {
            residual::clear_non_finite(state);
            if !drawn {
                E::narrow(f32::NAN).write(&mut encoded[..E::BYTES]);
            }
        }
        Ok(bytes)
    }

    fn decode(&mut self, span: &Span, encoded: &[u8], values: &mut [E]) -> Result<(), Error> {
        if encoded.len() != share(self.ratio, values.len()) * E::BYTES {
            return Err(Error::malformed("random-k sends the values of its places and nothing else"));
        }
        values.fill(E::default());
        for (index, sent) in self.places(span).zip(encoded.chunks_exact(E::BYTES)) {
            values[index] = E::read(sent);
        }
        Ok(())
    }
}

ronde_plugin::export! {
    name: "randomk",
    about: "Values at places that all ranks draw alike; the rest is sent later.",
    codec: RandomK { dtypes: [float16, bfloat16, float32], state_bytes: 4, lossless: false, elementwise: false },
    parameters: Settings {
        ratio: float { default: 0.01, min: 0.0001, max: 1.0, about: "The share of the values that is sent." },
        seed: int { default: 0, min: 0, max: 4294967295, about: "What places are drawn from, besides round and tensor." },
    },
    limits: { memory_bytes: 458752, call_ms: 20, ranks: 256 },
    buffers: { input: 65536, output: 65536, state: 65536, measures: 0 },
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use ronde_plugin::abi::Stage;
    use ronde_plugin::testing::{Quadratic, Workers, decode_hostile_bytes, round_trip};
    use ronde_plugin::{Bf16, F16};

    use super::*;

    fn codec(ratio: f64) -> RandomK {
        RandomK::new(&Settings { ratio, seed: 5 }).expect("valid parameters")
    }

    #[test]
    fn places_are_shared_distinct_and_change() {
        for elements in [0, 1, 10, 999, 16_384] {
            let span = Span::whole(elements);
            let places: Vec<usize> = codec(0.1).places(&span).collect();
            assert_eq!(places.len(), elements.div_ceil(10));
            assert!(places.windows(2).all(|pair| pair[0] < pair[1]) && places.iter().all(|place| *place < elements));
            let result = Span { stage: Stage::Result, ..span };
            assert!(codec(0.1).places(&result).eq(places.iter().copied()), "a sum loses nothing");
            let others = [Span { round: 1, ..span }, Span { tensor: 1, ..span }, Span { offset: 64, ..span }];
            assert!(elements < 10 || others.iter().all(|other| !codec(0.1).places(other).eq(places.iter().copied())));
        }
    }

    #[test]
    fn every_place_comes_up() {
        let mut seen = [false; 100];
        for round in 0..200 {
            codec(0.1).places(&Span { round, ..Span::whole(100) }).for_each(|place| seen[place] = true);
        }
        assert_eq!(seen, [true; 100]);
    }

    #[test]
    fn decoded_and_residual_are_the_input_exactly() {
        exact::<f32>();
        exact::<F16>();
        exact::<Bf16>();
    }

    fn exact<E: Float<Wide = f32>>() {
        let mut random = Random::new(9);
        let mut state = vec![0.0_f32; 1_000];
        for round in 0..20 {
            let values: Vec<E> =
                (0..1_000).map(|_| E::narrow((random.below(2_000_001) as f32 - 1_000_000.0) / 3_000.0)).collect();
            let sums: Vec<f32> = values.iter().zip(&state).map(|(value, residual)| value.widen() + residual).collect();
            let span = Span { round, ..Span::whole(1_000) };
            let trip = round_trip(&mut codec(0.05), &span, &values, &mut state).expect("an encoding");
            for ((decoded, residual), sum) in trip.decoded.iter().zip(&state).zip(&sums) {
                assert_eq!(decoded.to_f64() + f64::from(*residual), f64::from(*sum));
            }
            assert_eq!(trip.encoded.len(), 50 * E::BYTES);
        }
    }

    #[test]
    fn overflow_stays_visible_and_does_not_last() {
        for place in 0..200 {
            let (mut values, mut state) = ([1.0_f32; 200], [0.0; 200]);
            values[place] = f32::INFINITY;
            let trip = round_trip(&mut codec(0.01), &Span::whole(200), &values, &mut state).expect("an encoding");
            assert!(trip.decoded.iter().any(|value| !value.is_finite()));
            assert!(state.iter().all(|residual| residual.is_finite()));
        }
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
    fn other_lengths_are_refused() {
        decode_hostile_bytes::<f32, _>(&mut codec(0.1), &[1; 40], 100);
        assert!(CodecFor::<f32>::decode(&mut codec(0.1), &Span::whole(100), &[0; 44], &mut [0.0; 100]).is_err());
    }

    /// With as many steps; without the residual each position is updated in one step of fifty.
    #[test]
    fn it_converges_with_the_residual_only() {
        let problem = Quadratic::lopsided(4, 256);
        let workers = || Workers::new(codec(0.02), 4, 256, 256);
        let with = problem.descend(workers(), 0.005, 2_000).expect("encodings");
        let without = problem.descend(workers().forgetful(), 0.005, 2_000).expect("encodings");
        assert!(with < 0.02, "{with}");
        assert!(without > 0.5, "{without}");
    }
}
