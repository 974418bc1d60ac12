//! Floating-point elements in the wider form in which several ranks' values are compared, measured and summed.

use super::element::Element;
use super::float::{Brain, Half, Narrow};

/// A floating-point type in memory. Loops over groups of elements, which the compiler turns into vectors.
pub(super) trait Sample {
    /// What holds every value exactly.
    type Wide: Wide;
    /// Bytes of one element.
    const BYTES: usize;

    /// Exact. `from` holds as many elements as `into`.
    fn load(from: &[u8], into: &mut [Self::Wide]);
    /// Rounds to nearest, ties to even; NaN becomes canonical. `into` holds as many elements as `from`.
    fn store(from: &[Self::Wide], into: &mut [u8]);
    /// The same from f64, rounded once.
    fn store_f64(from: &[f64], into: &mut [u8]);
}

/// f32 or f64: what has an order on its bits and a mean.
pub(super) trait Wide: Copy + Default {
    /// An integer that is ordered like the values, -0 before +0.
    type Key: Copy + Ord + Default;

    fn key(self) -> Self::Key;
    fn from_key(key: Self::Key) -> Self;
    fn not_a_number(self) -> bool;
    /// Half of the sum, rounded once; NaN is canonical. Two finite values have a finite mean.
    fn mean(self, other: Self) -> Self;
    fn nan() -> Self;
    fn to_f64(self) -> f64;
}

macro_rules! wide {
    ($type:ident, $key:ident, $sign_shift:literal) => {
        impl Wide for $type {
            type Key = $key;

            #[allow(clippy::cast_possible_wrap, reason = "bits are reinterpreted")]
            #[inline(always)]
            fn key(self) -> $key {
                let bits = self.to_bits() as $key;
                bits ^ ((bits >> $sign_shift) & $key::MAX)
            }

            #[allow(clippy::cast_sign_loss, reason = "bits are reinterpreted")]
            #[inline(always)]
            fn from_key(key: $key) -> Self {
                Self::from_bits((key ^ ((key >> $sign_shift) & $key::MAX)) as _)
            }

            #[inline(always)]
            fn not_a_number(self) -> bool {
                self.is_nan()
            }

            /// Halves first only where the sum is too large, which is where halving is exact; a sum that is so small that
            /// halving it rounds is exact itself.
            #[inline(always)]
            fn mean(self, other: Self) -> Self {
                let sum = self + other;
                let halves = self * 0.5 + other * 0.5;
                let mean = if sum.is_infinite() { halves } else { sum * 0.5 };
                if mean.is_nan() { Self::nan() } else { mean }
            }

            #[inline(always)]
            fn nan() -> Self {
                // A product that is NaN is canonical.
                Element::product(Self::NAN, Self::NAN)
            }

            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
        }

        impl Sample for $type {
            type Wide = Self;
            const BYTES: usize = size_of::<Self>();

            #[inline(always)]
            fn load(from: &[u8], into: &mut [Self]) {
                for (bytes, value) in from.as_chunks::<{ size_of::<Self>() }>().0.iter().zip(into) {
                    *value = Self::from_le_bytes(*bytes);
                }
            }

            #[inline(always)]
            fn store(from: &[Self], into: &mut [u8]) {
                for (value, bytes) in from.iter().zip(into.as_chunks_mut::<{ size_of::<Self>() }>().0) {
                    *bytes = (if value.is_nan() { Self::nan() } else { *value }).to_le_bytes();
                }
            }

            #[allow(clippy::cast_possible_truncation, reason = "the one rounding")]
            #[allow(clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            #[inline(always)]
            fn store_f64(from: &[f64], into: &mut [u8]) {
                for (value, bytes) in from.iter().zip(into.as_chunks_mut::<{ size_of::<Self>() }>().0) {
                    *bytes = (if value.is_nan() { Self::nan() } else { *value as Self }).to_le_bytes();
                }
            }
        }
    };
}

wide!(f32, i32, 31);
wide!(f64, i64, 63);

macro_rules! narrow_sample {
    ($type:ident) => {
        impl Sample for $type {
            type Wide = f32;
            const BYTES: usize = 2;

            #[inline(always)]
            fn load(from: &[u8], into: &mut [f32]) {
                Self::widen(from, into);
            }

            #[inline(always)]
            fn store(from: &[f32], into: &mut [u8]) {
                Self::narrow(from, into);
            }

            #[inline(always)]
            fn store_f64(from: &[f64], into: &mut [u8]) {
                for (value, bytes) in from.iter().zip(into.as_chunks_mut::<2>().0) {
                    *bytes = Self::from_f32(to_odd(*value)).to_le_bytes();
                }
            }
        }
    };
}

narrow_sample!(Half);
narrow_sample!(Brain);

/// Rounds to f32 so that a second rounding, to a type with at least two bits less, gives what one rounding would: of the
/// two neighbours of an inexact value the one whose last bit is 1 (S. Boldo and G. Melquiond, "Emulation of a FMA and
/// correctly rounded sums", IEEE Transactions on Computers 57 (2008)).
#[allow(clippy::cast_possible_truncation, reason = "the first of two roundings")]
#[inline(always)]
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let bits = nearest.to_bits();
    let toward_value = if f64::from(nearest).abs() > value.abs() { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    let inexact = f64::from(nearest) != value;
    let odd = if inexact & (bits & 1 == 0) { toward_value } else { bits };
    // NaN is told from numbers by the rounding that follows; infinity is exact.
    if value.is_nan() { nearest } else { f32::from_bits(odd) }
}

/// Evaluates an expression with the floating-point type of a [`ronde_wire::DType`]; returns an error for other types.
macro_rules! with_sample {
    ($dtype:expr, $op:expr, $sample:ident => $expression:expr) => {{
        macro_rules! with {
            ($type:ty) => {{
                type $sample = $type;
                $expression
            }};
        }
        match $dtype {
            ronde_wire::DType::F16 => with!($crate::kernels::float::Half),
            ronde_wire::DType::Bf16 => with!($crate::kernels::float::Brain),
            ronde_wire::DType::F32 => with!(f32),
            ronde_wire::DType::F64 => with!(f64),
            dtype => return Err($crate::kernels::KernelError::Operation { dtype, op: $op }),
        }
    }};
}

pub(super) use with_sample;
