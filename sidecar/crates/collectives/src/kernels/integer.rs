//! Integers, which wrap, and booleans.

use super::element::{Bits, Element, plain_loops};

macro_rules! integer {
    ($($type:ty)*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }

            #[allow(clippy::cast_possible_truncation, reason = "a float-to-int cast truncates and saturates, as documented")]
            #[allow(clippy::cast_lossless, reason = "the same text serves i64, for which it is not lossless")]
            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                (self as f64 * factor) as Self
            }

            #[allow(clippy::cast_possible_truncation, reason = "a quotient is not larger than its dividend")]
            #[allow(clippy::cast_sign_loss, clippy::useless_conversion, reason = "the same text serves all integers")]
            #[inline(always)]
            fn quotient(self, ranks: u32) -> Self {
                (i64::from(self) / i64::from(ranks)) as Self
            }

            plain_loops!($type);
        }
    )*};
}

integer! { u8 i8 u16 i16 i32 i64 }

/// Bitwise operations do not depend on where one integer ends and the next begins, so bytes serve all of them.
impl Bits for u8 {
    #[inline(always)]
    fn bit_and(self, other: Self) -> Self {
        self & other
    }

    #[inline(always)]
    fn bit_or(self, other: Self) -> Self {
        self | other
    }

    #[inline(always)]
    fn bit_xor(self, other: Self) -> Self {
        self ^ other
    }
}

/// A boolean: any byte but 0 is true.
#[derive(Clone, Copy)]
pub(super) struct Truth(bool);

impl Truth {
    #[inline(always)]
    fn of(byte: u8) -> Self {
        Self(byte != 0)
    }
}

impl Element for Truth {
    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline(always)]
    fn product(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn least(self, other: Self) -> Self {
        self.product(other)
    }

    #[inline(always)]
    fn greatest(self, other: Self) -> Self {
        self.sum(other)
    }

    /// As of the number 0 or 1, truncated.
    #[inline(always)]
    fn scale(self, factor: f64) -> Self {
        Self(self.0 && factor.abs() >= 1.0)
    }

    #[inline(always)]
    fn quotient(self, ranks: u32) -> Self {
        Self(self.0 && ranks == 1)
    }

    #[inline(always)]
    fn zip(accumulator: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self) {
        for (a, b) in accumulator.iter_mut().zip(other) {
            *a = u8::from(f(Self::of(*a), Self::of(*b)).0);
        }
    }

    #[inline(always)]
    fn map(bytes: &mut [u8], f: impl Fn(Self) -> Self) {
        for a in bytes {
            *a = u8::from(f(Self::of(*a)).0);
        }
    }
}

impl Bits for Truth {
    #[inline(always)]
    fn bit_and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn bit_or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline(always)]
    fn bit_xor(self, other: Self) -> Self {
        Self(self.0 ^ other.0)
    }
}
