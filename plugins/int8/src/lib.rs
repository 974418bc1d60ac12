//! Quantizes values to 8-bit integers: each chunk has a scale, by which its largest magnitude becomes 127 (D. Alistarh
//! et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017, with one set of
//! levels, rounded to nearest; T. Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016).
//!
//! A chunk with a NaN or infinity decodes to NaN throughout. One whose largest magnitude is below 2^-120 decodes to zeros.
//! Otherwise the error of a value is at most half of its chunk's scale, which is the largest magnitude / 127.
//!
//! Encoded: the scale of each chunk as f32, then a byte for each element.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::lanes::{self, zip};
use ronde_plugin::residual::magnitude_bits;
use ronde_plugin::{Codec, CodecFor, Error, Float, Plugin, Span};

/// The codec.
#[derive(Clone, Copy, Debug)]
pub struct Int8 {
    chunk: usize,
}

impl Plugin for Int8 {
    type Parameters = Settings;

    fn new(settings: &Settings) -> Result<Self, Error> {
        let chunk = usize::try_from(settings.chunk).unwrap_or_default();
        if chunk == 0 || !chunk.is_multiple_of(16) {
            return Err(Error::parameters("chunk has to be a multiple of 16, such as 256"));
        }
        Ok(Self { chunk })
    }
}

impl Codec for Int8 {
    type State = ();

    fn bound(&self, elements: usize) -> usize {
        elements.div_ceil(self.chunk) * SCALE_BYTES + elements
    }
}

impl<E: Float<Wide = f32>> CodecFor<E> for Int8 {
    fn encode(&mut self, _: &Span, values: &[E], _: &mut [()], encoded: &mut [u8]) -> Result<usize, Error> {
        let bytes = self.bound(values.len());
        let (scales, levels) = encoded[..bytes].split_at_mut(bytes - values.len());
        let scales = scales.as_chunks_mut().0.iter_mut();
        for ((values, levels), scale) in values.chunks(self.chunk).zip(levels.chunks_mut(self.chunk)).zip(scales) {
            let (step, inverse) = steps(greatest(values));
            *scale = step.to_le_bytes();
            zip(levels, values, |level, value| {
                // Next to 1.5 * 2^23 the last place is 1: the addition rounds, and the low byte is the level.
                let shifted = value.widen() * inverse + ROUNDING;
                *level = shifted.to_bits().to_le_bytes()[0];
            });
        }
        Ok(bytes)
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [E]) -> Result<(), Error> {
        let bytes = self.bound(values.len());
        if encoded.len() != bytes {
            return Err(Error::malformed("int8 takes 4 bytes for each chunk and 1 for each element"));
        }
        let (scales, levels) = encoded.split_at(bytes - values.len());
        let scales = scales.as_chunks().0.iter();
        for ((values, levels), scale) in values.chunks_mut(self.chunk).zip(levels.chunks(self.chunk)).zip(scales) {
            let step = f32::from_le_bytes(*scale);
            zip(values, levels, |value, level| *value = E::narrow(f32::from(level.cast_signed()) * step));
        }
        Ok(())
    }
}

/// The bits of the largest magnitude. Those of infinity and NaN are larger than all others.
fn greatest<E: Float<Wide = f32>>(values: &[E]) -> u32 {
    lanes::greatest(values, |value| magnitude_bits(value.widen()))
}

/// The value of a level, and the factor for values. The first is NaN if there are NaNs or infinities.
fn steps(greatest: u32) -> (f32, f32) {
    let greatest = f32::from_bits(greatest);
    if !greatest.is_finite() {
        (f32::NAN, 0.0)
    } else if greatest < LEAST {
        (0.0, 0.0)
    } else {
        let step = greatest / LEVELS;
        // Rounding up would turn the largest number into infinity.
        let step = if (step * LEVELS).is_finite() { step } else { f32::from_bits(step.to_bits() - 1) };
        (step, LEVELS / greatest)
    }
}

const SCALE_BYTES: usize = 4;
const LEVELS: f32 = 127.0;
const ROUNDING: f32 = 12_582_912.0;
/// 2^-120. For anything smaller, 127 times its inverse may be infinite.
const LEAST: f32 = f32::from_bits((127 - 120) << 23);

ronde_plugin::export! {
    name: "int8",
    about: "Values as 8-bit integers with a scale for each chunk: a quarter of the bytes.",
    codec: Int8 { dtypes: [float16, bfloat16, float32], state_bytes: 0, lossless: false, elementwise: false },
    parameters: Settings {
        chunk: int { default: 256, min: 16, max: 16384, about: "Elements that share a scale: a multiple of 16." },
    },
    limits: { memory_bytes: 327680, call_ms: 20, ranks: 256 },
    buffers: { input: 65536, output: 65536, state: 0, measures: 0 },
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use ronde_plugin::math::Random;
    use ronde_plugin::testing::{decode_hostile_bytes, round_trip};
    use ronde_plugin::{Bf16, F16};

    use super::*;

    fn codec(chunk: i64) -> Int8 {
        Int8::new(&Settings { chunk }).expect("valid parameters")
    }

    #[test]
    fn the_error_is_at_most_half_a_step() {
        error_is_bounded::<f32>();
        error_is_bounded::<F16>();
        error_is_bounded::<Bf16>();
    }

    fn error_is_bounded<E: Float<Wide = f32>>() {
        let mut random = Random::new(1);
        for chunk in [16, 256] {
            let mut value = || E::narrow((random.below(2_001) as f32 - 1_000.0) / 1_000.0);
            let values: Vec<E> = (0..1_000).map(|_| value()).collect();
            let mut codec = codec(chunk);
            let trip = round_trip(&mut codec, &Span::whole(1_000), &values, &mut [(); 1_000]).expect("an encoding");
            assert_eq!(trip.encoded.len(), 1_000 + 4 * 1_000_usize.div_ceil(codec.chunk));
            for (values, decoded) in values.chunks(codec.chunk).zip(trip.decoded.chunks(codec.chunk)) {
                let step = f32::from_bits(greatest(values)) / LEVELS;
                for (value, decoded) in values.iter().zip(decoded) {
                    let error = (value.widen() - decoded.widen()).abs();
                    // A narrow type rounds again, to at least 8 bits.
                    assert!(error <= step * 0.500_01 + value.widen().abs() / 256.0 * f32::from(E::BYTES == 2));
                }
            }
        }
    }

    #[test]
    fn the_largest_numbers_stay_finite() {
        let values = [f32::MAX, f32::MIN, 0.0, f32::MAX / 2.0];
        let trip = round_trip(&mut codec(16), &Span::whole(4), &values, &mut [(); 4]).expect("an encoding");
        assert!(trip.decoded.iter().all(|value| value.is_finite()), "{trip:?}");
        assert!((trip.decoded[0] / f32::MAX - 1.0).abs() < 1e-6 && trip.decoded[2] == 0.0);
    }

    #[test]
    fn the_smallest_numbers_become_zeros() {
        let values = [f32::from_bits(1), -1e-38, 0.0];
        let trip = round_trip(&mut codec(16), &Span::whole(3), &values, &mut [(); 3]).expect("an encoding");
        assert_eq!(trip.decoded, [0.0; 3]);
        let trip = round_trip(&mut codec(16), &Span::whole(1), &[LEAST], &mut [()]).expect("an encoding");
        assert!((trip.decoded[0] / LEAST - 1.0).abs() < 1e-5, "{trip:?}");
    }

    #[test]
    fn overflow_stays_visible_within_its_chunk() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0_f32; 48];
            values[20] = special;
            let trip = round_trip(&mut codec(16), &Span::whole(48), &values, &mut [(); 48]).expect("an encoding");
            assert!(trip.decoded[16..32].iter().all(|value| value.is_nan()));
            assert!(trip.decoded[..16].iter().chain(&trip.decoded[32..]).all(|value| *value == 1.0));
        }
    }

    #[test]
    fn other_lengths_and_chunks_are_refused() {
        let mut codec = codec(16);
        decode_hostile_bytes::<f32, _>(&mut codec, &[1; 100 + 7 * 4], 100);
        let decoded = CodecFor::<f32>::decode(&mut codec, &Span::whole(2), &[0; 5], &mut [0.0; 2]);
        assert!(decoded.is_err());
        assert!(Int8::new(&Settings { chunk: 100 }).is_err());
    }
}
