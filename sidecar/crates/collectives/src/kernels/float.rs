//! Floating-point numbers. f16 and bf16 are widened to f32 in groups, computed there and rounded once.
//!
//! The conversions select instead of branching, so that whole vectors go through them, and they are the same code on
//! every processor.

use super::element::{Element, plain_loops};

macro_rules! float {
    ($type:ident, $canonical_nan:literal $(, $single:item)?) => {
        impl Element for $type {
            $($single)?

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                canonical::$type(self + other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                canonical::$type(self * other)
            }

            /// Equal values differ in nothing but the sign of zero, so their bits combine.
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                let equal = $type::from_bits(self.to_bits() | other.to_bits());
                let ordered = if self < other { self } else { other };
                let lesser = if self == other { equal } else { ordered };
                if self.is_nan() | other.is_nan() { $type::from_bits($canonical_nan) } else { lesser }
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                let equal = $type::from_bits(self.to_bits() & other.to_bits());
                let ordered = if self > other { self } else { other };
                let greater = if self == other { equal } else { ordered };
                if self.is_nan() | other.is_nan() { $type::from_bits($canonical_nan) } else { greater }
            }

            #[allow(clippy::cast_possible_truncation, reason = "the one rounding that the module's header promises")]
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                canonical::$type((self as f64 * factor) as $type)
            }

            #[allow(clippy::cast_possible_truncation, reason = "the one rounding that the module's header promises")]
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            #[inline(always)]
            fn quotient(self, ranks: u32) -> Self {
                canonical::$type((self as f64 / f64::from(ranks)) as $type)
            }

            plain_loops!($type);
        }
    };
}

float!(
    f32,
    0x7fc0_0000,
    /// The product of two f32 is exact in f64, so rounding it once is what multiplying in f32 does.
    #[inline(always)]
    fn scale_single(self, factor: f32) -> Self {
        canonical::f32(self * factor)
    }
);
float!(f64, 0x7ff8_0000_0000_0000);

/// Every NaN becomes the positive quiet one without payload.
mod canonical {
    #[inline(always)]
    pub(super) fn f32(value: f32) -> f32 {
        if value.is_nan() { f32::from_bits(0x7fc0_0000) } else { value }
    }

    #[inline(always)]
    pub(super) fn f64(value: f64) -> f64 {
        if value.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { value }
    }
}

/// A type of two bytes that is computed in f32.
pub(super) trait Narrow {
    /// The value, exactly.
    fn to_f32(bits: u16) -> f32;
    /// Rounds to nearest, ties to even; NaN becomes canonical.
    fn from_f32(value: f32) -> u16;

    /// `from` holds as many elements as `into`.
    #[inline(always)]
    fn widen(from: &[u8], into: &mut [f32]) {
        for (bytes, value) in from.as_chunks::<2>().0.iter().zip(into) {
            *value = Self::to_f32(u16::from_le_bytes(*bytes));
        }
    }

    /// `into` holds as many elements as `from`.
    #[inline(always)]
    fn narrow(from: &[f32], into: &mut [u8]) {
        for (value, bytes) in from.iter().zip(into.as_chunks_mut::<2>().0) {
            *bytes = Self::from_f32(*value).to_le_bytes();
        }
    }
}

/// An f16 while it is computed: 5 bits of exponent, 10 of fraction.
#[derive(Clone, Copy)]
pub(super) struct Half(f32);

/// A bf16 while it is computed: the upper half of an f32.
#[derive(Clone, Copy)]
pub(super) struct Brain(f32);

impl Narrow for Half {
    #[inline(always)]
    fn to_f32(bits: u16) -> f32 {
        let shifted = u32::from(bits & 0x7fff) << 13;
        // The exponent's bias grows from 15 to 127, and infinity and NaN have the largest one again.
        let normal = shifted + BIAS_DIFFERENCE;
        let special = normal + BIAS_DIFFERENCE;
        // A denormal is the fraction of the least normal number, less that number.
        let least = BIAS_DIFFERENCE + ONE_EXPONENT;
        let denormal = (f32::from_bits(shifted + least) - f32::from_bits(least)).to_bits();
        let finite = if shifted < HALF_LEAST_NORMAL { denormal } else { normal };
        let magnitude = if shifted < HALF_INFINITY { finite } else { special };
        f32::from_bits(magnitude | u32::from(bits & 0x8000) << 16)
    }

    #[allow(clippy::cast_possible_truncation, reason = "each of the selected values is below 2^15")]
    #[inline(always)]
    fn from_f32(value: f32) -> u16 {
        let magnitude = value.to_bits() & 0x7fff_ffff;
        // Half of the last place that stays, or just below when that is even; a carry goes into the exponent.
        let odd = magnitude >> 13 & 1;
        let normal = magnitude.wrapping_sub(BIAS_DIFFERENCE).wrapping_add(0xfff + odd) >> 13;
        // Beside 2^-1 the last place of an f32 is 2^-24, that of a denormal f16: the addition rounds.
        let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let finite = if magnitude < LEAST_NORMAL_HALF { denormal } else { normal };
        let ordered = if magnitude < BEYOND_HALF { finite } else { 0x7c00 };
        let sign = (value.to_bits() >> 16) as u16 & 0x8000;
        if value.is_nan() { 0x7e00 } else { ordered as u16 | sign }
    }
}

impl Narrow for Brain {
    #[inline(always)]
    fn to_f32(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    #[allow(clippy::cast_possible_truncation, reason = "shifted to 16 bits")]
    #[inline(always)]
    fn from_f32(value: f32) -> u16 {
        let bits = value.to_bits();
        let odd = bits >> 16 & 1;
        let rounded = (bits.wrapping_add(0x7fff + odd) >> 16) as u16;
        if value.is_nan() { 0x7fc0 } else { rounded }
    }
}

/// One step of an f32's exponent.
const ONE_EXPONENT: u32 = 1 << 23;
/// 127 - 15, the difference of the exponents' biases.
const BIAS_DIFFERENCE: u32 = (127 - 15) * ONE_EXPONENT;
/// The least normal f16 and infinity, shifted so that the exponent stands where an f32 has it.
const HALF_LEAST_NORMAL: u32 = ONE_EXPONENT;
const HALF_INFINITY: u32 = 31 * ONE_EXPONENT;
/// 2^-14, the least normal f16, and 2^16, what f16's infinity would be, as f32.
const LEAST_NORMAL_HALF: u32 = (127 - 14) * ONE_EXPONENT;
const BEYOND_HALF: u32 = (127 + 16) * ONE_EXPONENT;

/// Elements that are widened together: large enough for vectors, small enough to stay in L1.
const GROUP: usize = 128;

macro_rules! narrow_float {
    ($element:ident) => {
        impl Element for $element {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self(self.0.sum(other.0))
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                Self(self.0.product(other.0))
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                Self(self.0.least(other.0))
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                Self(self.0.greatest(other.0))
            }

            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                Self(self.0.scale(factor))
            }

            #[inline(always)]
            fn scale_single(self, factor: f32) -> Self {
                Self(self.0.scale_single(factor))
            }

            #[inline(always)]
            fn quotient(self, ranks: u32) -> Self {
                Self(self.0.quotient(ranks))
            }

            #[inline(always)]
            fn zip(accumulator: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self) {
                let (mut left, mut right) = ([0.0; GROUP], [0.0; GROUP]);
                for (accumulator, other) in accumulator.chunks_mut(2 * GROUP).zip(other.chunks(2 * GROUP)) {
                    let len = accumulator.len() / 2;
                    Self::widen(accumulator, &mut left[..len]);
                    Self::widen(other, &mut right[..len]);
                    left.iter_mut().zip(&right).for_each(|(a, b)| *a = f(Self(*a), Self(*b)).0);
                    Self::narrow(&left[..len], accumulator);
                }
            }

            #[inline(always)]
            fn map(bytes: &mut [u8], f: impl Fn(Self) -> Self) {
                let mut wide = [0.0; GROUP];
                for bytes in bytes.chunks_mut(2 * GROUP) {
                    let wide = &mut wide[..bytes.len() / 2];
                    Self::widen(bytes, wide);
                    wide.iter_mut().for_each(|value| *value = f(Self(*value)).0);
                    Self::narrow(wide, bytes);
                }
            }
        }
    };
}

narrow_float!(Half);
narrow_float!(Brain);
