//! Values as IEEE 754 binary16, rounded once to nearest, ties to even.
//!
//! NaN stays NaN (canonical), infinity stays infinity, what is 65,520 or more becomes infinity, and what is 2^-25 or less
//! becomes zero. Encoded: 2 bytes for each element, little-endian.

#![no_std]
#![forbid(unsafe_code)]

use ronde_plugin::lanes::zip;
use ronde_plugin::{Codec, CodecFor, Error, F16, Float, Plugin, Span};

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
        zip(encoded.as_chunks_mut::<2>().0, values, |bytes, value| *bytes = F16::narrow(value).0.to_le_bytes());
        Ok(2 * values.len())
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [f32]) -> Result<(), Error> {
        if encoded.len() != 2 * values.len() {
            return Err(Error::malformed("fp16 takes 2 bytes for each element"));
        }
        zip(values, encoded.as_chunks().0, |value, bytes| *value = F16(u16::from_le_bytes(bytes)).widen());
        Ok(())
    }
}

ronde_plugin::export! {
    name: "fp16",
    about: "Values as IEEE binary16: half the bytes, 11 bits of precision, up to 65,504.",
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
        // 1 + 2^-11 lies between two neighbours, 1 + 3 * 2^-11 too; the even ones are below and above.
        let unit = 2.0_f32.powi(-11);
        let values = [1.0 + unit, 1.0 + 3.0 * unit, -0.0, 65_519.0, 65_520.0, 2.0_f32.powi(-24), 2.0_f32.powi(-25)];
        let trip = round_trip(&mut Cast, &Span::whole(7), &values, &mut [(); 7]).expect("an encoding");
        let expected = [1.0, 1.0 + 4.0 * unit, -0.0, 65_504.0, f32::INFINITY, 2.0_f32.powi(-24), 0.0];
        assert!(trip.decoded.iter().map(|value| value.to_bits()).eq(expected.map(f32::to_bits)), "{trip:?}");
        assert_eq!(trip.encoded.len(), 14);
    }

    #[test]
    fn overflow_stays_visible() {
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e30];
        let trip = round_trip(&mut Cast, &Span::whole(4), &values, &mut [(); 4]).expect("an encoding");
        assert!(trip.decoded[0].is_nan());
        assert_eq!(trip.decoded[1..], [f32::INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    }

    #[test]
    fn other_lengths_are_refused() {
        decode_hostile_bytes::<f32, _>(&mut Cast, &[1, 2, 3, 4], 2);
        assert!(CodecFor::<f32>::decode(&mut Cast, &Span::whole(2), &[0; 5], &mut [0.0; 2]).is_err());
    }
}
