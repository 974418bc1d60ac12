//! Element types, and the state that a codec keeps for each element.

use core::ops::{Add, Mul, Neg, Sub};

use crate::abi::DType;
use crate::support::Plain;

/// An element type.
pub trait Element: Plain + PartialEq + Default {
    /// The type's number and name in the host.
    const DTYPE: DType;
    /// Bytes of one element.
    const BYTES: usize = size_of::<Self>();

    /// Reads an element, little-endian. `bytes` has [`Element::BYTES`].
    fn read(bytes: &[u8]) -> Self;
    /// Writes the element, little-endian. `bytes` has [`Element::BYTES`].
    fn write(self, bytes: &mut [u8]);
}

/// The state that a codec keeps for each element.
pub trait State: Plain + Default + PartialEq {}

/// A floating-point type. f16 and bf16 are computed in f32 and rounded once.
pub trait Float: Element {
    /// f64 for f64, otherwise f32: represents every value exactly.
    type Wide: Wide;

    /// Converts exactly.
    fn widen(self) -> Self::Wide;
    /// Rounds to nearest, ties to even; NaN becomes canonical.
    fn narrow(value: Self::Wide) -> Self;
    /// Like [`Float::narrow`], but finite values stay finite: beyond the range the result is the largest value with the
    /// same sign. For codecs that keep the difference and send it later.
    fn saturate(value: Self::Wide) -> Self;
    /// Converts exactly.
    fn to_f64(self) -> f64;
    /// Rounds to nearest once, ties to even; NaN becomes canonical.
    fn from_f64(value: f64) -> Self;
}

/// f32 or f64, with a total order on their bits.
pub trait Wide:
    Float + PartialOrd + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Neg<Output = Self>
{
    /// An integer ordered like the values: -0 before +0, NaN at either end by its sign.
    type Key: Copy + Ord + Default;

    /// The key of the value.
    fn key(self) -> Self::Key;
    /// The value with this key.
    fn from_key(key: Self::Key) -> Self;
    /// Whether the value is NaN.
    fn not_a_number(self) -> bool;
    /// Half of the sum, rounded once; NaN is canonical. The mean of two finite values is finite.
    #[must_use]
    fn mean(self, other: Self) -> Self;
    /// The positive quiet NaN without payload.
    fn nan() -> Self;
}

/// The bits of an IEEE 754 binary16: 5 of exponent, 10 of fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The bits of a bfloat16: the upper half of an f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// A byte; 0 is false.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bool(pub u8);

macro_rules! elements {
    ($($type:ty: $dtype:ident, $from:expr, $to:expr;)*) => {
        $(impl Element for $type {
            const DTYPE: DType = DType::$dtype;

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or_else(Self::default, |bytes| $from(*bytes))
            }

            #[inline(always)]
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&$to(self));
            }
        })*
    };
}

elements! {
    u8: U8, u8::from_le_bytes, u8::to_le_bytes;
    i8: I8, i8::from_le_bytes, i8::to_le_bytes;
    u16: U16, u16::from_le_bytes, u16::to_le_bytes;
    i16: I16, i16::from_le_bytes, i16::to_le_bytes;
    i32: I32, i32::from_le_bytes, i32::to_le_bytes;
    i64: I64, i64::from_le_bytes, i64::to_le_bytes;
    F16: F16, |bytes| F16(u16::from_le_bytes(bytes)), |value: F16| value.0.to_le_bytes();
    Bf16: Bf16, |bytes| Bf16(u16::from_le_bytes(bytes)), |value: Bf16| value.0.to_le_bytes();
    f32: F32, f32::from_le_bytes, f32::to_le_bytes;
    f64: F64, f64::from_le_bytes, f64::to_le_bytes;
    Bool: Bool, |[byte]: [u8; 1]| Bool(byte), |value: Bool| [value.0];
}

impl State for () {}
impl State for u8 {}
impl State for u16 {}
impl State for u32 {}
impl State for i32 {}
impl State for f32 {}
impl State for f64 {}
impl State for [f32; 2] {}
impl State for [f64; 2] {}

macro_rules! wide {
    ($type:ident, $key:ident, $sign_shift:literal) => {
        impl Float for $type {
            type Wide = Self;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(value: Self) -> Self {
                if value.is_nan() { Self::nan() } else { value }
            }

            #[inline(always)]
            fn saturate(value: Self) -> Self {
                Self::narrow(value)
            }

            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }

            #[allow(clippy::cast_possible_truncation, reason = "the one rounding")]
            #[allow(clippy::unnecessary_cast, reason = "the same text serves f32 and f64")]
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                Self::narrow(value as Self)
            }
        }

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

            /// Halves the operands first only if the sum overflows, where halving is exact. A sum so small that halving
            /// it rounds is itself exact.
            #[inline(always)]
            fn mean(self, other: Self) -> Self {
                let sum = self + other;
                let halves = self * 0.5 + other * 0.5;
                Self::narrow(if sum.is_infinite() { halves } else { sum * 0.5 })
            }

            #[inline(always)]
            fn nan() -> Self {
                // Infinity with the first bit of the fraction set.
                let infinity = Self::INFINITY.to_bits();
                Self::from_bits(infinity | (infinity >> 1 & !infinity))
            }
        }
    };
}

wide!(f32, i32, 31);
wide!(f64, i64, 63);

impl Float for F16 {
    type Wide = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        let shifted = u32::from(self.0 & 0x7fff) << 13;
        // The exponent's bias grows from 15 to 127; infinity and NaN get the largest exponent again.
        let normal = shifted + BIAS_DIFFERENCE;
        let special = normal + BIAS_DIFFERENCE;
        // A denormal is the fraction of the smallest normal number, minus that number.
        let least = BIAS_DIFFERENCE + ONE_EXPONENT;
        let denormal = (f32::from_bits(shifted + least) - f32::from_bits(least)).to_bits();
        let finite = if shifted < ONE_EXPONENT { denormal } else { normal };
        let magnitude = if shifted < HALF_INFINITY { finite } else { special };
        f32::from_bits(magnitude | u32::from(self.0 & 0x8000) << 16)
    }

    #[allow(clippy::cast_possible_truncation, reason = "each of the selected values is below 2^15")]
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let magnitude = value.to_bits() & 0x7fff_ffff;
        // Adds half of the last remaining place, or slightly less if that place is even; a carry increments the
        // exponent.
        let odd = magnitude >> 13 & 1;
        let normal = magnitude.wrapping_sub(BIAS_DIFFERENCE).wrapping_add(0xfff + odd) >> 13;
        // Next to 2^-1 the last place of an f32 is 2^-24, which is that of a denormal f16: the addition rounds.
        let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let finite = if magnitude < LEAST_NORMAL_HALF { denormal } else { normal };
        let ordered = if magnitude < BEYOND_HALF { finite } else { 0x7c00 };
        let sign = (value.to_bits() >> 16) as u16 & 0x8000;
        Self(if value.is_nan() { 0x7e00 } else { ordered as u16 | sign })
    }

    #[inline(always)]
    fn saturate(value: f32) -> Self {
        let Self(narrow) = Self::narrow(value);
        // The largest value precedes infinity.
        Self(narrow - u16::from(narrow & 0x7fff == 0x7c00 && value.is_finite()))
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self.widen())
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        Self::narrow(to_odd(value))
    }
}

impl Float for Bf16 {
    type Wide = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[allow(clippy::cast_possible_truncation, reason = "shifted to 16 bits")]
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        Self(if value.is_nan() { 0x7fc0 } else { rounded })
    }

    #[inline(always)]
    fn saturate(value: f32) -> Self {
        let Self(narrow) = Self::narrow(value);
        // The largest value precedes infinity.
        Self(narrow - u16::from(narrow & 0x7fff == 0x7f80 && value.is_finite()))
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self.widen())
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        Self::narrow(to_odd(value))
    }
}

/// Rounds to f32 such that a second rounding, to a type with at least two bits less, gives the same result as a single
/// one: an inexact value becomes the neighbour whose last bit is 1 (S. Boldo and G. Melquiond, "Emulation of a FMA and
/// correctly rounded sums", IEEE Transactions on Computers 57 (2008)).
#[allow(clippy::cast_possible_truncation, reason = "the first of two roundings")]
#[inline(always)]
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let bits = nearest.to_bits();
    let toward_value = if f64::from(nearest).abs() > value.abs() { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    let inexact = f64::from(nearest) != value;
    let odd = if inexact & (bits & 1 == 0) { toward_value } else { bits };
    // The following rounding distinguishes NaN from numbers; infinity is exact.
    if value.is_nan() { nearest } else { f32::from_bits(odd) }
}

/// One step of an f32's exponent. It is also the smallest normal f16, shifted to the exponent of an f32.
const ONE_EXPONENT: u32 = 1 << 23;
/// 127 - 15, the difference of the exponents' biases.
const BIAS_DIFFERENCE: u32 = (127 - 15) * ONE_EXPONENT;
/// An f16's infinity, shifted in the same way.
const HALF_INFINITY: u32 = 31 * ONE_EXPONENT;
/// 2^-14, the smallest normal f16, and 2^16, the successor of f16's range, as f32.
const LEAST_NORMAL_HALF: u32 = (127 - 14) * ONE_EXPONENT;
const BEYOND_HALF: u32 = (127 + 16) * ONE_EXPONENT;

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use ronde_collectives::kernels;
    use ronde_wire::{Codec, ReduceOp};

    use super::*;

    /// Every value of the narrow types, and f32 values of all exponents with many fractions.
    #[test]
    fn conversions_are_those_of_the_native_kernels() {
        let singles =
            || (0..u32::MAX).step_by(4_099).chain((0x3300_0000..0x3900_0000).step_by(257)).map(f32::from_bits);
        let bytes: Vec<u8> = singles().flat_map(f32::to_le_bytes).collect();
        let mut encoded = std::vec![0; bytes.len() / 2];
        for codec in [Codec::F16, Codec::Bf16] {
            kernels::encode(codec, ronde_wire::DType::F32, &bytes, &mut encoded).expect("lengths fit");
            for (value, native) in singles().zip(encoded.as_chunks::<2>().0) {
                let own = if codec == Codec::F16 { F16::narrow(value).0 } else { Bf16::narrow(value).0 };
                assert_eq!(own, u16::from_le_bytes(*native), "{codec:?} of {value:e}");
            }
        }
        for bits in 0..=u16::MAX {
            let mut native = [0; 4];
            for (codec, own) in [(Codec::F16, F16(bits).widen()), (Codec::Bf16, Bf16(bits).widen())] {
                kernels::decode(codec, ronde_wire::DType::F32, &bits.to_le_bytes(), &mut native).expect("lengths fit");
                let native = f32::from_le_bytes(native);
                assert!(own.to_bits() == native.to_bits() || own.is_nan() && native.is_nan(), "{codec:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn what_is_finite_stays_so_when_it_is_saturated() {
        for (value, half) in
            [(65_519.9, 0x7bff), (65_520.0, 0x7bff), (-1e30, 0xfbff), (f32::MAX, 0x7bff), (1.5, 0x3e00)]
        {
            assert_eq!(F16::saturate(value), F16(half), "{value}");
        }
        for (value, bits) in [(f32::MAX, 0x7f7f), (f32::MIN, 0xff7f), (1.5, 0x3fc0)] {
            assert_eq!(Bf16::saturate(value), Bf16(bits), "{value}");
        }
        let overflows = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        assert!(overflows.into_iter().all(|value| F16::saturate(value) == F16::narrow(value)));
        assert!(overflows.into_iter().all(|value| Bf16::saturate(value) == Bf16::narrow(value)));
    }

    #[test]
    fn types_are_those_of_the_wire() {
        for (ours, theirs) in DType::ALL.into_iter().zip(ronde_wire::DType::ALL) {
            assert_eq!((ours.name(), ours.size_bytes()), (theirs.name(), theirs.size_bytes()));
        }
        assert_eq!((size_of::<F16>(), F16::DTYPE.size_bytes()), (2, 2));
    }

    /// Sums halfway between two values of a narrow type, for which rounding twice is wrong.
    #[test]
    fn narrowing_from_f64_rounds_once() {
        for step in 0..4_096_u32 {
            let value = 1.0 + f64::from(step) / 4_096.0 / 512.0 + f64::from(step % 3) * 1e-12 - 1e-12;
            for dtype in [ronde_wire::DType::F16, ronde_wire::DType::Bf16] {
                let operand = |half: bool| if half { value.to_le_bytes() } else { 0.0_f64.to_le_bytes() };
                let mut exact = operand(true);
                kernels::reduce_n(ronde_wire::DType::F64, ReduceOp::Adasum, &[&operand(true)], &[1.0], &mut exact)
                    .expect("one operand");
                assert_eq!(f64::from_le_bytes(exact), value);
                // The nearer of the two neighbours, by exact arithmetic.
                let own = if dtype == ronde_wire::DType::F16 {
                    nearest(value, |bits| F16(bits).to_f64(), F16::from_f64(value).0)
                } else {
                    nearest(value, |bits| Bf16(bits).to_f64(), Bf16::from_f64(value).0)
                };
                assert!(own, "{dtype} of {value:e}");
            }
        }
    }

    /// Whether no neighbour is nearer, and the last bit is 0 on a tie.
    fn nearest(value: f64, widen: impl Fn(u16) -> f64, bits: u16) -> bool {
        let distance = |bits: u16| (widen(bits) - value).abs();
        [bits - 1, bits + 1].into_iter().all(|other| {
            distance(bits) < distance(other) || distance(bits).to_bits() == distance(other).to_bits() && bits & 1 == 0
        })
    }

    #[test]
    fn keys_are_ordered_like_values() {
        let values = [f32::NEG_INFINITY, -1.5, -0.0, 0.0, f32::MIN_POSITIVE, 2.0, f32::INFINITY];
        assert!(values.is_sorted_by_key(|value| value.key()));
        assert!(values.iter().all(|value| f32::from_key(value.key()).to_bits() == value.to_bits()));
        assert_eq!(f32::MAX.mean(f32::MAX).to_bits(), f32::MAX.to_bits());
        assert_eq!((f32::nan().to_bits(), f64::nan().to_bits()), (0x7fc0_0000, 0x7ff8_0000_0000_0000));
    }
}
