//! Values as bfloat16: the upper half of an f32, rounded once to nearest, ties to even.
//!
//! NaN stays NaN (canonical), infinity stays infinity; finite values above 3.39e38 become infinity, none becomes zero that is
//! a normal f32. Encoded: 2 bytes for each element, little-endian.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::lanes::zip;
use ronde_plugin::{Bf16, Codec, CodecFor, Error, Float, Plugin, Span};

/// The codec.
#[derive(Clone, Copy, Debug)]
pub struct Cast;

impl Plugin for Cast {
    type Parameters = Settings;

    fn new(_: &Settings) -> Result<Self, Error> {
        Ok(Self)
    }
}

impl Codec for Cast {
    type State = ();

    fn bound(&self, elements: usize) -> usize {
        2 * elements
    }
}

impl CodecFor<f32> for Cast {
    fn encode(&mut self, _: &Span, values: &[f32], _: &mut [()], encoded: &mut [u8]) -> Result<usize, Error> {
        zip(encoded.as_chunks_mut::<2>().0, values, |bytes, value| *bytes = Bf16::narrow(value).0.to_le_bytes());
        Ok(2 * values.len())
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [f32]) -> Result<(), Error> {
        if encoded.len() != 2 * values.len() {
            return Err(Error::malformed("bf16 takes 2 bytes for each element"));
        }
        zip(values, encoded.as_chunks().0, |value, bytes| *value = Bf16(u16::from_le_bytes(bytes)).widen());
        Ok(())
    }
}

ronde_plugin::export! {
    name: "bf16",
    about: "Values as bfloat16: half the bytes, the range of float32, 8 bits of precision.",
    codec: Cast { dtypes: [float32], state_bytes: 0, lossless: false, elementwise: true },
    parameters: Settings {},
    limits: { memory_bytes: 327680, call_ms: 20, ranks: 256 },
    buffers: { input: 65536, output: 65536, state: 0, measures: 0 },
}

#[cfg(test)]
mod tests {
    use ronde_plugin::testing::{decode_hostile_bytes, round_trip};

    use super::*;

    #[test]
    fn values_are_rounded_to_nearest_even() {
        // 1 + 1/256 lies between two neighbours, 1 + 3/256 too; the even ones are below and above.
        let values = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0, 3.4e38, 1e-40];
        let trip = round_trip(&mut Cast, &Span::whole(6), &values, &mut [(); 6]).expect("an encoding");
        let expected = [1.0, 1.0, 1.0 + 1.0 / 64.0, -0.0, f32::INFINITY, f32::from_bits(0x0001_0000)];
        assert!(trip.decoded.iter().map(|value| value.to_bits()).eq(expected.map(f32::to_bits)), "{trip:?}");
        assert_eq!(trip.encoded.len(), 12);
    }

    #[test]
    fn overflow_stays_visible() {
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let trip = round_trip(&mut Cast, &Span::whole(3), &values, &mut [(); 3]).expect("an encoding");
        assert!(trip.decoded[0].is_nan());
        assert_eq!(trip.decoded[1..], values[1..]);
    }

    #[test]
    fn other_lengths_are_refused() {
        decode_hostile_bytes::<f32, _>(&mut Cast, &[1, 2, 3, 4], 2);
        assert!(CodecFor::<f32>::decode(&mut Cast, &Span::whole(2), &[0; 3], &mut [0.0; 2]).is_err());
    }
}
