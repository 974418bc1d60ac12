//! Sums of f16 and bf16 on their way to an average.
//!
//! Between sidecars partial sums travel in 16 bits. A sum may be larger than the largest number of the type although the
//! average is not.
//!
//! *f16*: partial sums use f16's codes of infinity and NaN, those with exponent 31, for larger numbers. Of the 1,024 codes of a
//! sign the last is NaN and the one before it infinity. The others hold numbers from 2^16 on, as many powers of two as the sum of
//! all ranks' numbers may need and one more: with 8 binary digits for up to 4 ranks, 7 for up to 64, otherwise 6. All numbers below 65,520
//! have the code that they have in f16. Over more than [`MEMBERS_MAX`] sidecars such coarse sums would stop to grow: there partial
//! sums are plain f16, and infinite when they are too large.
//!
//! *bf16*: contributions are divided by a power of two that is not less than the number of ranks. Only numbers below 2^-126 lose
//! digits by that.

use ronde_wire::DType;

use super::float::{Brain, Half, Narrow};
use super::{Element, KernelError, Side, check_length, check_lengths, vectorised};

/// How partial sums of an average are held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartialSums {
    format: Format,
    factor: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Extended(Extended),
    Brain,
}

impl PartialSums {
    /// The partial sums of an average over sidecars with so many ranks each. `None` where sums are held as the type has them.
    #[must_use]
    pub fn of(dtype: DType, ranks: &[usize]) -> Option<Self> {
        let total: usize = ranks.iter().sum();
        match dtype {
            _ if total == 0 => None,
            DType::F16 if ranks.len() <= MEMBERS_MAX => {
                Some(Self { format: Format::Extended(Extended::new(total)), factor: 1.0 })
            }
            DType::Bf16 => Some(Self { format: Format::Brain, factor: 1.0 / power(total.next_power_of_two()) }),
            _ => None,
        }
    }

    /// What contributions are multiplied by, besides the prescale.
    #[must_use]
    pub const fn factor(self) -> f64 {
        self.factor
    }

    /// Adds `other` to the accumulator. The lower rank's sum is the left operand.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit; the accumulator is unchanged then.
    pub fn add(self, accumulator: &mut [u8], other: &[u8], side: Side) -> Result<(), KernelError> {
        check_length(DType::F16, accumulator.len())?;
        check_lengths(accumulator.len(), other.len())?;
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for (accumulator, other) in accumulator.chunks_mut(GROUP_BYTES).zip(other.chunks(GROUP_BYTES)) {
            self.widen(accumulator, &mut left);
            self.widen(other, &mut right);
            vectorised(|| {
                let pairs = left.iter_mut().zip(&right);
                match side {
                    Side::AccumulatorLeft => pairs.for_each(|(a, b)| *a = a.sum(*b)),
                    Side::AccumulatorRight => pairs.for_each(|(a, b)| *a = b.sum(*a)),
                }
            });
            self.narrow(&left, accumulator);
        }
        Ok(())
    }

    /// The values of complete sums, each multiplied by `postscale / ranks`. The average of numbers of the type is not larger than the
    /// largest of them, so sums that are larger by an eighth or less are taken for rounded ones.
    ///
    /// # Errors
    /// [`KernelError`] when the buffer does not hold whole elements or there are no ranks.
    pub fn finish(self, ranks: u32, postscale: f64, bytes: &mut [u8]) -> Result<(), KernelError> {
        check_length(DType::F16, bytes.len())?;
        if ranks == 0 {
            return Err(KernelError::NoRanks);
        }
        let factor = postscale / f64::from(ranks) / self.factor;
        #[allow(clippy::cast_possible_truncation, reason = "it is within f32 and may be rounded")]
        let most = (self.largest() * f64::from(ranks) * self.factor) as f32;
        let mut wide = Vec::new();
        for bytes in bytes.chunks_mut(GROUP_BYTES) {
            self.widen(bytes, &mut wide);
            vectorised(|| wide.iter_mut().for_each(|sum| *sum = bounded(*sum, most).scale(factor)));
            match self.format {
                Format::Extended(_) => vectorised(|| Half::narrow(&wide, bytes)),
                Format::Brain => vectorised(|| Brain::narrow(&wide, bytes)),
            }
        }
        Ok(())
    }

    /// The largest number of the type.
    fn largest(self) -> f64 {
        match self.format {
            Format::Extended(_) => 65_504.0,
            Format::Brain => f64::from(f32::from_bits(0x7f7f_0000)),
        }
    }

    /// `into` holds as many elements as `from`.
    pub(super) fn narrow(self, from: &[f32], into: &mut [u8]) {
        match self.format {
            Format::Extended(format) => vectorised(|| {
                for (value, bytes) in from.iter().zip(into.as_chunks_mut::<2>().0) {
                    *bytes = format.code(*value).to_le_bytes();
                }
            }),
            Format::Brain => vectorised(|| Brain::narrow(from, into)),
        }
    }

    fn widen(self, from: &[u8], into: &mut Vec<f32>) {
        into.resize(from.len() / 2, 0.0);
        match self.format {
            Format::Extended(format) => vectorised(|| {
                for (bytes, value) in from.as_chunks::<2>().0.iter().zip(into) {
                    *value = format.value(u16::from_le_bytes(*bytes));
                }
            }),
            Format::Brain => vectorised(|| Brain::widen(from, into)),
        }
    }
}

/// The format of partial sums of f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extended {
    /// Bits of an f32's fraction that a number beyond f16 does not have.
    dropped: u32,
    /// The first code that is beyond all numbers.
    end: u32,
}

impl Extended {
    /// For sums of so many numbers of f16. They are below 2^(16 + log2 count); roundings never double them.
    fn new(count: usize) -> Self {
        let exponents = count.next_power_of_two().ilog2() + 1;
        let digits = (INFINITY / exponents).ilog2();
        Self { dropped: 23 - digits, end: exponents << digits }
    }

    #[inline(always)]
    fn value(self, bits: u16) -> f32 {
        let code = u32::from(bits & 0x7fff).wrapping_sub(LARGE);
        let large = f32::from_bits((code << self.dropped).wrapping_add(TWO_TO_16));
        let finite = if code < self.end { large } else { f32::INFINITY };
        let magnitude = if code == NAN { f32::NAN } else { finite };
        let signed = if bits & 0x8000 == 0 { magnitude } else { -magnitude };
        if u32::from(bits & 0x7fff) < LARGE { Half::to_f32(bits) } else { signed }
    }

    #[allow(clippy::cast_possible_truncation, reason = "each of the selected values is below 2^15")]
    #[inline(always)]
    fn code(self, value: f32) -> u16 {
        let magnitude = value.to_bits() & 0x7fff_ffff;
        let sign = (value.to_bits() >> 16) as u16 & 0x8000;
        let odd = magnitude >> self.dropped & 1;
        let half = (1 << (self.dropped - 1)) - 1;
        let code = (magnitude.wrapping_sub(TWO_TO_16).wrapping_add(half + odd)) >> self.dropped;
        let finite = if code < self.end { code } else { INFINITY };
        let large = (LARGE + if value.is_nan() { NAN } else { finite }) as u16;
        // Of NaN only one form goes on, without a sign.
        let large = if value.is_nan() { large } else { large | sign };
        if magnitude < TWO_TO_16 { Half::from_f32(value) } else { large }
    }
}

/// A sum that only its roundings can have made larger than that of the largest numbers is that.
#[inline(always)]
fn bounded(sum: f32, most: f32) -> f32 {
    // The bound itself may be beyond f32, and infinity is not a rounded number.
    let by_rounding = sum.is_finite() && sum.abs() > most && sum.abs() <= most * (1.0 + 1.0 / 8.0);
    if by_rounding { most.copysign(sum) } else { sum }
}

/// The power of two that a number is.
fn power(of: usize) -> f64 {
    f64::from(1_u32 << of.ilog2())
}

/// The most sidecars over which partial sums of f16 hold numbers that f16 does not.
pub(super) const MEMBERS_MAX: usize = 32;
/// The first code of f16's exponent 31.
const LARGE: u32 = 0x7c00;
/// Codes from there on.
const INFINITY: u32 = 0x3fe;
const NAN: u32 = 0x3ff;
/// 2^16 as an f32.
const TWO_TO_16: u32 = (127 + 16) << 23;
/// Bytes of elements that are widened together.
const GROUP_BYTES: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// All 65,536 codes come back, and everything is in order.
    #[test]
    fn codes_are_values_in_order_and_come_back() {
        for count in [2, 3, 4, 5, 8, 9, 32, 64] {
            let format = Extended::new(count);
            let mut last = -1.0;
            for code in 0..=0x7fff_u16 {
                let value = format.value(code);
                if u32::from(code) < LARGE + format.end {
                    assert!(value > last && value.is_finite(), "{count}: {code:x} is {value}, after {last}");
                    assert_eq!((format.code(value), format.code(-value)), (code, code | 0x8000), "{count}: {code:x}");
                    last = value;
                }
            }
            assert!(last >= 1.9 * 65_504.0 * count as f32, "{count}: {last}");
            assert_eq!(format.value(format.code(f32::INFINITY)), f32::INFINITY);
            assert_eq!(format.value(format.code(f32::NEG_INFINITY)), f32::NEG_INFINITY);
            assert_eq!(format.value(format.code(3.0 * last)), f32::INFINITY);
            assert!(format.value(format.code(f32::NAN)).is_nan() && format.value(format.code(-f32::NAN)).is_nan());
        }
    }

    /// What f16 rounds to a number, this does to the same; what it rounds to infinity goes to the nearest number.
    #[test]
    fn numbers_round_to_the_nearest() {
        let format = Extended::new(4);
        for step in 0..400_000_u32 {
            let value = f32::from_bits(0x3300_0000 + step * 910);
            let (code, plain) = (format.code(value), Half::from_f32(value));
            if plain == 0x7c00 {
                let error = |code: u16| (format.value(code) - value).abs();
                assert!(error(code) <= error(code - 1) && error(code) <= error(code + 1), "{value}: {code:x}");
            } else {
                assert_eq!(code, plain, "{value}");
            }
        }
        assert!(f32::from_bits(0x3300_0000 + 400_000 * 910) > 300_000.0, "beyond f16");
    }

    #[test]
    fn the_average_of_the_largest_is_the_largest() {
        for (dtype, largest) in [(DType::F16, 0x7bff_u16), (DType::Bf16, 0x7f7f)] {
            let value = if dtype == DType::F16 { Half::to_f32(largest) } else { Brain::to_f32(largest) };
            for members in [vec![1, 1], vec![2, 2], vec![1; 4], vec![4, 3, 5], vec![64; 7], vec![1; 32]] {
                let sums = PartialSums::of(dtype, &members).expect("16 bits");
                let ranks = members.iter().sum::<usize>();
                let mut sum = [0; 2];
                for local in members {
                    let mut bytes = [0; 2];
                    #[allow(clippy::cast_possible_truncation, reason = "what a sidecar does in f32")]
                    sums.narrow(&[(f64::from(value) * sums.factor() * local as f64) as f32], &mut bytes);
                    sums.add(&mut sum, &bytes, Side::AccumulatorLeft).expect("one element");
                }
                sums.finish(u32::try_from(ranks).expect("few"), 1.0, &mut sum).expect("one element");
                let found = u16::from_le_bytes(sum);
                let off = i32::from(largest) - i32::from(found);
                // 1/16 of its value at most for f16, and rounding to bf16 once a sidecar.
                assert!((0..=if dtype == DType::F16 { 64 } else { 4 }).contains(&off), "{dtype} {ranks}: {found:x}");
            }
        }
    }

    #[test]
    fn infinity_and_nan_stay() {
        for (dtype, infinity, nan) in [(DType::F16, 0x7c00_u16, 0x7e00), (DType::Bf16, 0x7f80, 0x7fc0)] {
            for members in [vec![1, 1], vec![1, 1, 2], vec![1; 4], vec![1; 32]] {
                let sums = PartialSums::of(dtype, &members).expect("16 bits");
                let ranks = u32::try_from(members.iter().sum::<usize>()).expect("few");
                for (value, expected) in
                    [(f32::INFINITY, infinity), (f32::NEG_INFINITY, infinity | 0x8000), (f32::NAN, nan)]
                {
                    let (mut sum, mut other) = ([0; 2], [0; 2]);
                    sums.narrow(&[value], &mut sum);
                    sums.narrow(&[1.0], &mut other);
                    sums.add(&mut sum, &other, Side::AccumulatorLeft).expect("one element");
                    sums.finish(ranks, 1.0, &mut sum).expect("one element");
                    assert_eq!(u16::from_le_bytes(sum), expected, "{dtype} {ranks} {value}");
                }
            }
        }
    }

    #[test]
    fn other_types_and_large_sets_have_plain_sums() {
        assert_eq!(PartialSums::of(DType::F32, &[1, 1]), None);
        assert_eq!(PartialSums::of(DType::F16, &[1; MEMBERS_MAX + 1]), None);
        assert_eq!(PartialSums::of(DType::F16, &[0]), None);
    }
}
