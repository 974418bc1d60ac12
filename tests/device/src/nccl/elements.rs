//! Elements of NCCL's types: how two are combined.

use std::ffi::c_int;

use half_precision::{from_bfloat16, from_half, to_bfloat16, to_half};

const SUM: c_int = 0;
const PRODUCT: c_int = 1;
const MAX: c_int = 2;
const MIN: c_int = 3;
pub(super) const AVERAGE: c_int = 4;

/// The bytes of an element; `None` for a type that ronde does not use.
pub(super) fn bytes_of(dtype: c_int) -> Option<usize> {
    match dtype {
        0 | 1 => Some(1),
        6 | 9 => Some(2),
        2 | 7 => Some(4),
        4 | 8 => Some(8),
        _ => None,
    }
}

/// Whether an operation is one of NCCL's own.
pub(super) fn is_operation(op: c_int) -> bool {
    (SUM..=MIN).contains(&op) || op == AVERAGE
}

macro_rules! each {
    ($kind:ty, $into:expr, $other:expr, $combine:expr) => {
        for (place, other) in $into.chunks_exact_mut(size_of::<$kind>()).zip($other.chunks_exact(size_of::<$kind>())) {
            let one = <$kind>::from_le_bytes((&*place).try_into().unwrap_or_default());
            let two = <$kind>::from_le_bytes(other.try_into().unwrap_or_default());
            place.copy_from_slice(&$combine(one, two).to_le_bytes());
        }
    };
}

macro_rules! integers {
    ($kind:ty, $into:expr, $other:expr, $op:expr) => {
        match $op {
            SUM | AVERAGE => each!($kind, $into, $other, <$kind>::wrapping_add),
            PRODUCT => each!($kind, $into, $other, <$kind>::wrapping_mul),
            MAX => each!($kind, $into, $other, <$kind>::max),
            _ => each!($kind, $into, $other, <$kind>::min),
        }
    };
}

macro_rules! floats {
    ($kind:ty, $into:expr, $other:expr, $op:expr) => {
        match $op {
            SUM | AVERAGE => each!($kind, $into, $other, |one: $kind, two: $kind| one + two),
            PRODUCT => each!($kind, $into, $other, |one: $kind, two: $kind| one * two),
            MAX => each!($kind, $into, $other, <$kind>::max),
            _ => each!($kind, $into, $other, <$kind>::min),
        }
    };
}

fn combined(op: c_int, one: f32, two: f32) -> f32 {
    match op {
        SUM | AVERAGE => one + two,
        PRODUCT => one * two,
        MAX => one.max(two),
        _ => one.min(two),
    }
}

/// Combines each element with another one.
pub(super) fn reduce(dtype: c_int, op: c_int, into: &mut [u8], other: &[u8]) {
    match dtype {
        0 => integers!(i8, into, other, op),
        1 => integers!(u8, into, other, op),
        2 => integers!(i32, into, other, op),
        4 => integers!(i64, into, other, op),
        6 => each!(u16, into, other, |one, two| to_half(combined(op, from_half(one), from_half(two)))),
        9 => each!(u16, into, other, |one, two| to_bfloat16(combined(op, from_bfloat16(one), from_bfloat16(two)))),
        7 => floats!(f32, into, other, op),
        _ => floats!(f64, into, other, op),
    }
}

/// Multiplies each element by a scalar of its type.
pub(super) fn scale(dtype: c_int, into: &mut [u8], scalar: [u8; 8]) {
    let element = bytes_of(dtype).unwrap_or(1);
    let factors = scalar[..element].repeat(into.len() / element);
    reduce(dtype, PRODUCT, into, &factors);
}

/// By what NCCL multiplies each contribution to an average, before the sum: 1 / `ranks`, rounded to the type. `None` for
/// integers, whose averages ronde does not ask it for.
pub(super) fn inverse(dtype: c_int, ranks: usize) -> Option<[u8; 8]> {
    let factor = f64::from(u16::try_from(ranks).unwrap_or(u16::MAX)).recip();
    #[expect(clippy::cast_possible_truncation, reason = "it is rounded")]
    let rounded = factor as f32;
    let mut scalar = [0; 8];
    match dtype {
        6 => scalar[..2].copy_from_slice(&to_half(rounded).to_le_bytes()),
        9 => scalar[..2].copy_from_slice(&to_bfloat16(rounded).to_le_bytes()),
        7 => scalar[..4].copy_from_slice(&rounded.to_le_bytes()),
        8 => scalar = factor.to_le_bytes(),
        _ => return None,
    }
    Some(scalar)
}

/// Numbers of 16 bits, by way of float32.
mod half_precision {
    pub(super) fn from_bfloat16(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    /// Rounds to nearest, ties to even.
    pub(super) fn to_bfloat16(value: f32) -> u16 {
        if value.is_nan() {
            return 0x7fc0;
        }
        let bits = value.to_bits();
        u16::try_from((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).unwrap_or(u16::MAX)
    }

    pub(super) fn from_half(bits: u16) -> f32 {
        let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from((bits >> 10) & 0x1f), f32::from(bits & 0x3ff));
        match exponent {
            0 => sign * mantissa * 2_f32.powi(-24),
            31 if mantissa > 0.0 => f32::NAN,
            31 => sign * f32::INFINITY,
            _ => sign * (1024.0 + mantissa) * 2_f32.powi(exponent - 25),
        }
    }

    /// Rounds to nearest, ties to even.
    pub(super) fn to_half(value: f32) -> u16 {
        let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
        let size = value.abs();
        if value.is_nan() {
            return 0x7e00;
        }
        if size >= 65_520.0 {
            return sign | 0x7c00;
        }
        // The unit in the last place: that of the binade, at least that of subnormal numbers.
        let exponent = (i32::try_from(size.to_bits() >> 23).unwrap_or_default() - 127).max(-14);
        let units = (size * 2_f32.powi(10 - exponent)).round_ties_even();
        let base = if exponent == -14 && units < 1024.0 { 0.0 } else { 1024.0 };
        let biased = if base > 0.0 { u16::try_from(exponent + 15).unwrap_or_default() } else { 0 };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an integer from 0 to 2048")]
        let mantissa = (units - base) as u16;
        sign | ((biased << 10) + mantissa)
    }
}
