//! Encodes values as bfloat16: the upper half of an f32, rounded once to nearest, ties to even.
//!
//! NaN stays NaN (canonical) and infinity stays infinity. Finite values above 3.39e38 become infinity; no normal f32
//! becomes zero. Encoded: 2 bytes for each element, little-endian.

#![no_std]
#![forbid(unsafe_code)]

ronde_plugin::export_cast! {
    name: "bf16",
    about: "Values as bfloat16: half the bytes, the range of float32, 8 bits of precision.",
    to: Bf16,
}

#[cfg(test)]
mod tests {
    use ronde_plugin::testing::{decode_hostile_bytes, round_trip};
    use ronde_plugin::{CodecFor, Span};

    use super::*;

    #[test]
    fn values_are_rounded_to_nearest_even() {
        // 1 + 1/256 and 1 + 3/256 are halfway between two values; the even ones are below and above.
        let values = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0, 3.4e38, 1e-40];
        let trip = round_trip(&mut Cast::create(), &Span::whole(6), &values, &mut [(); 6]).expect("an encoding");
        let expected = [1.0, 1.0, 1.0 + 1.0 / 64.0, -0.0, f32::INFINITY, f32::from_bits(0x0001_0000)];
        assert!(trip.decoded.iter().map(|value| value.to_bits()).eq(expected.map(f32::to_bits)), "{trip:?}");
        assert_eq!(trip.encoded.len(), 12);
    }

    #[test]
    fn overflow_stays_visible() {
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let trip = round_trip(&mut Cast::create(), &Span::whole(3), &values, &mut [(); 3]).expect("an encoding");
        assert!(trip.decoded[0].is_nan());
        assert_eq!(trip.decoded[1..], values[1..]);
    }

    #[test]
    fn other_lengths_are_refused() {
        decode_hostile_bytes::<f32, _>(&mut Cast::create(), &[1, 2, 3, 4], 2);
        assert!(CodecFor::<f32>::decode(&mut Cast::create(), &Span::whole(2), &[0; 3], &mut [0.0; 2]).is_err());
    }
}
