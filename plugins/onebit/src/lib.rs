//! Sends one bit for each value, its sign, and a scale for each chunk, the mean of its magnitudes. The error is added
//! to the values of the next round (F. Seide et al., "1-bit stochastic gradient descent and its application to
//! data-parallel distributed training of speech DNNs", Interspeech 2014; S. Karimireddy et al., "Error feedback fixes
//! SignSGD and other gradient compression schemes", ICML 2019).
//!
//! Let `v` be the sum of value and residual, rounded to f32. For finite `v`, the decoded value plus the new residual is
//! exactly `v`, because the residual is stored as a sum of two numbers. A chunk with a NaN or infinity decodes to NaN
//! throughout and leaves no residual.
//!
//! Encoded: the scale of each chunk as f32, then the signs, eight per byte, the first one lowest; 1 is negative.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::lanes::zip;
use ronde_plugin::{Codec, CodecFor, Error, Float, Plugin, Span};

/// The codec.
#[derive(Debug)]
pub struct OneBit {
    chunk: usize,
    /// Scratch space: the sums of values and residuals of a chunk.
    sums: [f32; CHUNK_MAX],
}

impl Plugin for OneBit {
    type Parameters = Settings;

    fn new(settings: &Settings) -> Result<Self, Error> {
        let chunk = usize::try_from(settings.chunk).unwrap_or_default();
        if chunk == 0 || !chunk.is_multiple_of(64) || chunk > CHUNK_MAX {
            return Err(Error::parameters("chunk has to be a multiple of 64, such as 512"));
        }
        Ok(Self { chunk, sums: [0.0; CHUNK_MAX] })
    }
}

impl Codec for OneBit {
    /// The residual as an unevaluated sum: the second number is the rounding error of the first.
    type State = [f32; 2];

    fn bound(&self, elements: usize) -> usize {
        elements.div_ceil(self.chunk) * SCALE_BYTES + elements.div_ceil(8)
    }
}

impl<E: Float<Wide = f32>> CodecFor<E> for OneBit {
    fn encode(&mut self, _: &Span, values: &[E], state: &mut [[f32; 2]], encoded: &mut [u8]) -> Result<usize, Error> {
        let bytes = self.bound(values.len());
        let (scales, signs) = encoded[..bytes].split_at_mut(bytes - values.len().div_ceil(8));
        let chunks = values.chunks(self.chunk).zip(state.chunks_mut(self.chunk));
        let sent = scales.as_chunks_mut().0.iter_mut().zip(signs.chunks_mut(self.chunk / 8));
        for ((values, residuals), (sent_scale, signs)) in chunks.zip(sent) {
            let sums = &mut self.sums[..values.len()];
            zip(sums, values, |sum, value| *sum = value.widen());
            zip(sums, residuals, |sum, [high, low]| *sum = (*sum + high) + low);
            let scale = scale::<E>(sums);
            *sent_scale = scale.to_le_bytes();
            write_signs(sums, signs);
            if scale.is_finite() {
                zip(residuals, sums, |residual, sum| *residual = difference(sum, scale.copysign(sum)));
            } else {
                residuals.fill([0.0; 2]);
            }
        }
        Ok(bytes)
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [E]) -> Result<(), Error> {
        let bytes = self.bound(values.len());
        if encoded.len() != bytes {
            return Err(Error::malformed("1-bit takes 4 bytes for each chunk and 1 bit for each element"));
        }
        let (scales, signs) = encoded.split_at(bytes - values.len().div_ceil(8));
        let sent = scales.as_chunks().0.iter().zip(signs.chunks(self.chunk / 8));
        for (values, (scale, signs)) in values.chunks_mut(self.chunk).zip(sent) {
            let scale = f32::from_le_bytes(*scale);
            let (positive, negative) = (E::narrow(scale), E::narrow(-scale));
            read_signs(signs, values, |is_negative| if is_negative { negative } else { positive });
        }
        Ok(())
    }
}

/// Writes one bit for each number, the first one lowest; 1 is negative.
#[inline(always)]
fn write_signs(sums: &[f32], signs: &mut [u8]) {
    let (rounds, rest) = sums.as_chunks::<ROUND>();
    let (words, rest_signs) = signs.split_at_mut(rounds.len() * WORD_BYTES);
    for (round, word) in rounds.iter().zip(words.as_chunks_mut().0) {
        let mut bits = 0;
        // The bit comes from a constant, so that the compiler vectorises the loop.
        for index in 0..ROUND {
            bits |= (round[index].to_bits().cast_signed() >> 31).cast_unsigned() & BITS[index];
        }
        *word = bits.to_le_bytes();
    }
    for (eight, sign) in rest.chunks(8).zip(rest_signs) {
        *sign = eight.iter().rev().fold(0, |byte, sum| byte << 1 | u8::from(sum.is_sign_negative()));
    }
}

/// Converts each bit written by [`write_signs`] to a value.
#[inline(always)]
fn read_signs<E: Copy>(signs: &[u8], values: &mut [E], value_of: impl Fn(bool) -> E) {
    let (rounds, rest) = values.as_chunks_mut::<ROUND>();
    let (words, rest_signs) = signs.split_at(rounds.len() * WORD_BYTES);
    for (round, word) in rounds.iter_mut().zip(words.as_chunks().0) {
        let bits = u32::from_le_bytes(*word);
        for index in 0..ROUND {
            round[index] = value_of(bits & BITS[index] != 0);
        }
    }
    for (eight, byte) in rest.chunks_mut(8).zip(rest_signs) {
        eight.iter_mut().zip(BITS).for_each(|(value, bit)| *value = value_of(u32::from(*byte) & bit != 0));
    }
}

/// The mean of the magnitudes, rounded to the element type. NaN if there are NaNs or infinities.
#[allow(clippy::cast_possible_truncation, reason = "the mean of magnitudes is none of f32's extremes")]
fn scale<E: Float<Wide = f32>>(sums: &[f32]) -> f32 {
    let mut partial = [0.0_f64; 8];
    let (rounds, rest) = sums.as_chunks::<8>();
    for round in rounds {
        for index in 0..8 {
            partial[index] += f64::from(round[index].abs());
        }
    }
    partial.iter_mut().zip(rest).for_each(|(sum, value)| *sum += f64::from(value.abs()));
    let mean = partial.iter().sum::<f64>() / sums.len() as f64;
    let mean = E::narrow(mean as f32).widen();
    if mean.is_finite() { mean } else { f32::NAN }
}

/// `a - b` as an exact, unevaluated sum (D. Knuth, "The Art of Computer Programming" 4.2.2, Theorem B).
#[inline(always)]
fn difference(a: f32, b: f32) -> [f32; 2] {
    let high = a - b;
    let second = high - a;
    let low = (a - (high - second)) - (b + second);
    [high, low]
}

/// Elements whose signs form one word.
const ROUND: usize = 32;
const WORD_BYTES: usize = ROUND / 8;
/// The bits of a word, the lowest one first.
const BITS: [u32; ROUND] = {
    let mut bits = [1; ROUND];
    let mut index = 1;
    while index < ROUND {
        bits[index] = bits[index - 1] << 1;
        index += 1;
    }
    bits
};
const SCALE_BYTES: usize = 4;
const CHUNK_MAX: usize = 4_096;

ronde_plugin::export! {
    name: "onebit",
    about: "The sign of each value and a scale for each chunk; what that is off by is sent later.",
    codec: OneBit { dtypes: [float16, bfloat16, float32], state_bytes: 8, lossless: false, elementwise: false },
    parameters: Settings {
        chunk: int { default: 512, min: 64, max: 4096, about: "Elements that share a scale: a multiple of 64." },
    },
    limits: { memory_bytes: 458752, call_ms: 20, ranks: 256 },
    buffers: { input: 65536, output: 65536, state: 131072, measures: 0 },
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

    fn codec(chunk: i64) -> OneBit {
        OneBit::new(&Settings { chunk }).expect("valid parameters")
    }

    #[test]
    fn signs_and_the_mean_magnitude_are_sent() {
        let (values, mut state) = ([1.0_f32, -2.0, 3.0, 0.0, -4.0], [[0.0; 2]; 5]);
        let trip = round_trip(&mut codec(64), &Span::whole(5), &values, &mut state).expect("an encoding");
        assert_eq!(trip.decoded, [2.0, -2.0, 2.0, 2.0, -2.0]);
        assert_eq!(state.map(|[high, _]| high), [-1.0, 0.0, 1.0, -2.0, -2.0]);
        assert_eq!(trip.encoded, [0, 0, 0, 64, 0b10010]);
    }

    /// Whole words, and a partial one.
    #[test]
    fn each_sign_has_its_bit() {
        for count in [1, 7, 8, 31, 32, 33, 64, 100] {
            let sums: Vec<f32> = (0..count).map(|index| if index % 3 == 1 { -0.0 } else { 0.5 }).collect();
            let mut signs = vec![0xff; sums.len().div_ceil(8)];
            write_signs(&sums, &mut signs);
            for (index, byte) in signs.iter().enumerate() {
                let bit = |place| u8::from(8 * index + place < count && (8 * index + place) % 3 == 1) << place;
                assert_eq!(*byte, (0..8).map(bit).sum::<u8>(), "byte {index} of {count}");
            }
            let mut read = vec![false; count];
            read_signs(&signs, &mut read, |is_negative| is_negative);
            assert!(read.iter().zip(&sums).all(|(read, sum)| *read == sum.is_sign_negative()), "{count}");
        }
    }

    #[test]
    fn decoded_and_residual_are_the_input_exactly() {
        exact::<f32>();
        exact::<F16>();
        exact::<Bf16>();
    }

    /// f64 holds the sums of such numbers exactly: 24 bits each, with exponents that differ by less than 28.
    fn exact<E: Float<Wide = f32>>() {
        let mut random = Random::new(4);
        let mut codec = codec(64);
        let mut state = vec![[0.0_f32; 2]; 1_000];
        for _ in 0..20 {
            let mut value =
                || (random.below(2_000_001) as f32 - 1_000_000.0) * 2.0_f32.powi(-(random.below(8) as i32) - 9);
            let values: Vec<E> = (0..1_000).map(|_| E::narrow(value())).collect();
            let sum = |(value, [high, low]): (&E, &[f32; 2])| value.widen() + high + low;
            let sums: Vec<f32> = values.iter().zip(&state).map(sum).collect();
            let trip = round_trip(&mut codec, &Span::whole(1_000), &values, &mut state).expect("an encoding");
            for ((decoded, [high, low]), sum) in trip.decoded.iter().zip(&state).zip(&sums) {
                // The two larger numbers cancel first.
                let both = (decoded.to_f64() + f64::from(*high)) + f64::from(*low);
                assert_eq!(both, f64::from(*sum), "{high:e} {low:e}");
            }
        }
    }

    #[test]
    fn overflow_stays_visible_within_its_chunk_and_does_not_last() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (mut values, mut state) = ([1.0_f32; 192], [[0.0; 2]; 192]);
            values[100] = special;
            let trip = round_trip(&mut codec(64), &Span::whole(192), &values, &mut state).expect("an encoding");
            assert!(trip.decoded[64..128].iter().all(|value| value.is_nan()));
            assert!(trip.decoded[..64].iter().chain(&trip.decoded[128..]).all(|value| *value == 1.0));
            assert!(state.iter().flatten().all(|residual| *residual == 0.0));
        }
    }

    #[test]
    fn other_lengths_and_chunks_are_refused() {
        let mut codec = codec(64);
        decode_hostile_bytes::<f32, _>(&mut codec, &[1; 8 + 13], 100);
        assert!(CodecFor::<f32>::decode(&mut codec, &Span::whole(2), &[0; 4], &mut [0.0; 2]).is_err());
        assert!(OneBit::new(&Settings { chunk: 100 }).is_err());
    }

    /// Three small gradients outvote a large one, unless the errors of the signs are kept.
    #[test]
    fn it_converges_with_the_residual_only() {
        let problem = Quadratic::lopsided(4, 256);
        let workers = || Workers::new(codec(64), 4, 256, 256);
        let with = problem.descend(workers(), 0.01, 4_000).expect("encodings");
        let without = problem.descend(workers().forgetful(), 0.01, 4_000).expect("encodings");
        assert!(with < 0.02, "{with}");
        assert!(without > 0.5, "{without}");
    }
}
