//! Floating-point numbers. f16 and bf16 are widened to f32 in groups, computed there and rounded once.

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use super::element::{Element, plain_loops};

macro_rules! float {
    ($type:ident, $canonical_nan:literal) => {
        impl Element for $type {
            fn sum(self, other: Self) -> Self {
                canonical::$type(self + other)
            }

            fn product(self, other: Self) -> Self {
                canonical::$type(self * other)
            }

            /// Equal values differ in nothing but the sign of zero, so their bits combine.
            fn least(self, other: Self) -> Self {
                let equal = $type::from_bits(self.to_bits() | other.to_bits());
                let ordered = if self < other { self } else { other };
                let lesser = if self == other { equal } else { ordered };
                if self.is_nan() | other.is_nan() { $type::from_bits($canonical_nan) } else { lesser }
            }

            fn greatest(self, other: Self) -> Self {
                let equal = $type::from_bits(self.to_bits() & other.to_bits());
                let ordered = if self > other { self } else { other };
                let greater = if self == other { equal } else { ordered };
                if self.is_nan() | other.is_nan() { $type::from_bits($canonical_nan) } else { greater }
            }

            #[allow(clippy::cast_possible_truncation, reason = "the one rounding that the module's header promises")]
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            fn scale(self, factor: f64) -> Self {
                canonical::$type((self as f64 * factor) as $type)
            }

            #[allow(clippy::cast_possible_truncation, reason = "the one rounding that the module's header promises")]
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            fn quotient(self, ranks: u32) -> Self {
                canonical::$type((self as f64 / f64::from(ranks)) as $type)
            }

            plain_loops!($type);
        }
    };
}

float!(f32, 0x7fc0_0000);
float!(f64, 0x7ff8_0000_0000_0000);

/// Every NaN becomes the positive quiet one without payload.
mod canonical {
    pub(super) fn f32(value: f32) -> f32 {
        if value.is_nan() { f32::from_bits(0x7fc0_0000) } else { value }
    }

    pub(super) fn f64(value: f64) -> f64 {
        if value.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { value }
    }
}

/// A type of two bytes that is computed in f32.
pub(super) trait Narrow {
    /// Exact. `from` holds as many elements as `into`.
    fn widen(from: &[u8], into: &mut [f32]);
    /// Rounds to nearest, ties to even; NaN becomes canonical. `into` holds as many elements as `from`.
    fn narrow(from: &mut [f32], into: &mut [u8]);
}

/// An f16 while it is computed.
#[derive(Clone, Copy)]
pub(super) struct Half(f32);

/// A bf16 while it is computed.
#[derive(Clone, Copy)]
pub(super) struct Brain(f32);

/// Elements that are widened together: large enough for vectors, small enough for registers and L1.
const GROUP: usize = 128;

macro_rules! narrow_float {
    ($element:ident, $narrow:ty) => {
        impl Narrow for $element {
            fn widen(from: &[u8], into: &mut [f32]) {
                let mut narrow = [<$narrow>::ZERO; GROUP];
                for (from, into) in from.chunks(2 * GROUP).zip(into.chunks_mut(GROUP)) {
                    let narrow = &mut narrow[..into.len()];
                    for (value, bytes) in narrow.iter_mut().zip(from.as_chunks::<2>().0) {
                        *value = <$narrow>::from_le_bytes(*bytes);
                    }
                    narrow.convert_to_f32_slice(into);
                }
            }

            fn narrow(from: &mut [f32], into: &mut [u8]) {
                let mut narrow = [<$narrow>::ZERO; GROUP];
                for (from, into) in from.chunks_mut(GROUP).zip(into.chunks_mut(2 * GROUP)) {
                    let narrow = &mut narrow[..from.len()];
                    from.iter_mut().for_each(|value| *value = canonical::f32(*value));
                    narrow.convert_from_f32_slice(from);
                    for (value, bytes) in narrow.iter().zip(into.as_chunks_mut::<2>().0) {
                        *bytes = value.to_le_bytes();
                    }
                }
            }
        }

        impl Element for $element {
            fn sum(self, other: Self) -> Self {
                Self(self.0.sum(other.0))
            }

            fn product(self, other: Self) -> Self {
                Self(self.0.product(other.0))
            }

            fn least(self, other: Self) -> Self {
                Self(self.0.least(other.0))
            }

            fn greatest(self, other: Self) -> Self {
                Self(self.0.greatest(other.0))
            }

            fn scale(self, factor: f64) -> Self {
                Self(self.0.scale(factor))
            }

            fn quotient(self, ranks: u32) -> Self {
                Self(self.0.quotient(ranks))
            }

            fn zip(accumulator: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self) {
                let (mut left, mut right) = ([0.0; GROUP], [0.0; GROUP]);
                for (accumulator, other) in accumulator.chunks_mut(2 * GROUP).zip(other.chunks(2 * GROUP)) {
                    let len = accumulator.len() / 2;
                    Self::widen(accumulator, &mut left[..len]);
                    Self::widen(other, &mut right[..len]);
                    left.iter_mut().zip(&right).for_each(|(a, b)| *a = f(Self(*a), Self(*b)).0);
                    Self::narrow(&mut left[..len], accumulator);
                }
            }

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

narrow_float!(Half, f16);
narrow_float!(Brain, bf16);
