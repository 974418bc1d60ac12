//! Encodes values as IEEE 754 binary16, rounded once to nearest, ties to even.
//!
//! NaN stays NaN (canonical) and infinity stays infinity. Magnitudes of 65,520 and more become infinity, and those of 2^-25
//! and less become zero. Encoded: 2 bytes for each element, little-endian.

#![no_std]
#![forbid(unsafe_code)]

ronde_plugin::export_cast! {
    name: "fp16",
    about: "Values as IEEE binary16: half the bytes, 11 bits of precision, up to 65,504.",
    to: F16,
}

#[cfg(test)]
mod tests {
    use ronde_plugin::testing::{decode_hostile_bytes, round_trip};
    use ronde_plugin::{CodecFor, Span};

    use super::*;

    #[test]
    fn values_are_rounded_to_nearest_even() {
        // 1 + 2^-11 and 1 + 3 * 2^-11 are halfway between two values; the even ones are below and above.
        let unit = 2.0_f32.powi(-11);
        let values = [1.0 + unit, 1.0 + 3.0 * unit, -0.0, 65_519.0, 65_520.0, 2.0_f32.powi(-24), 2.0_f32.powi(-25)];
        let trip = round_trip(&mut Cast::create(), &Span::whole(7), &values, &mut [(); 7]).expect("an encoding");
        let expected = [1.0, 1.0 + 4.0 * unit, -0.0, 65_504.0, f32::INFINITY, 2.0_f32.powi(-24), 0.0];
        assert!(trip.decoded.iter().map(|value| value.to_bits()).eq(expected.map(f32::to_bits)), "{trip:?}");
        assert_eq!(trip.encoded.len(), 14);
    }

    #[test]
    fn overflow_stays_visible() {
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e30];
        let trip = round_trip(&mut Cast::create(), &Span::whole(4), &values, &mut [(); 4]).expect("an encoding");
        assert!(trip.decoded[0].is_nan());
        assert_eq!(trip.decoded[1..], [f32::INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    }

    #[test]
    fn other_lengths_are_refused() {
        decode_hostile_bytes::<f32, _>(&mut Cast::create(), &[1, 2, 3, 4], 2);
        assert!(CodecFor::<f32>::decode(&mut Cast::create(), &Span::whole(2), &[0; 5], &mut [0.0; 2]).is_err());
    }
}
