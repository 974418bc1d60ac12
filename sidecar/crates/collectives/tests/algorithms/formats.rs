//! Floating-point formats, computed without the kernels' code.

#![allow(dead_code, reason = "each test binary uses its part")]

use proptest::prelude::*;
use ronde_collectives::kernels::{BlockReducer, KernelError};
use ronde_wire::{DType, ReduceOp};

/// A float type as its parameters: bits of exponent and of fraction.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    exponent: u32,
    fraction: u32,
}

impl Format {
    pub(crate) fn of(dtype: DType) -> Self {
        let (exponent, fraction) = match dtype {
            DType::F16 => (5, 10),
            DType::Bf16 => (8, 7),
            DType::F32 => (8, 23),
            _ => (11, 52),
        };
        Self { exponent, fraction }
    }

    pub(crate) fn sign(self) -> u64 {
        1 << (self.exponent + self.fraction)
    }

    pub(crate) fn infinity(self) -> u64 {
        self.sign() - (1 << self.fraction)
    }

    pub(crate) fn canonical_nan(self) -> u64 {
        self.infinity() | 1 << (self.fraction - 1)
    }

    pub(crate) fn is_nan(self, bits: u64) -> bool {
        bits & !self.sign() > self.infinity()
    }

    /// Exact.
    pub(crate) fn value(self, bits: u64) -> f64 {
        let bias = (1 << (self.exponent - 1)) - 1;
        let fraction = bits & ((1 << self.fraction) - 1);
        let exponent = i32::try_from((bits & !self.sign()) >> self.fraction).expect("at most 11 bits");
        let magnitude = if self.is_nan(bits) {
            f64::NAN
        } else if bits & !self.sign() == self.infinity() {
            f64::INFINITY
        } else {
            let implicit = u64::from(exponent > 0) << self.fraction;
            let shift = exponent.max(1) - bias - i32::try_from(self.fraction).expect("at most 52");
            // Two steps, because a power of two below 2^-1022 is not exact.
            (fraction + implicit) as f64 * 2_f64.powi(shift / 2) * 2_f64.powi(shift - shift / 2)
        };
        if bits & self.sign() == 0 { magnitude } else { -magnitude }
    }

    /// The nearest value's bits, ties to even, by bisection over all of them.
    pub(crate) fn round(self, value: f64) -> u64 {
        if value.is_nan() {
            return self.canonical_nan();
        }
        let sign = if value.is_sign_negative() { self.sign() } else { 0 };
        let magnitude = value.abs();
        let (mut low, mut high) = (0, self.infinity());
        while high - low > 1 {
            let middle = low.midpoint(high);
            if self.value(middle) <= magnitude { low = middle } else { high = middle }
        }
        // What infinity would be if the exponents went on.
        let step = self.value(self.infinity() - 1) - self.value(self.infinity() - 2);
        let above = if high == self.infinity() { self.value(low) + step } else { self.value(high) };
        let (down, up) = (magnitude - self.value(low), above - magnitude);
        let nearest = if magnitude.is_infinite() || up < down || (up == down && high % 2 == 0) { high } else { low };
        sign | nearest
    }
}

pub(crate) fn load(bytes: &[u8]) -> u64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(wide)
}

pub(crate) fn store(bits: u64, dtype: DType) -> Vec<u8> {
    bits.to_le_bytes()[..dtype.size_bytes()].to_vec()
}

/// Bits of a float: zeros, denormals, ordinary numbers, infinities and NaN in about equal shares; bits of an integer.
pub(crate) fn bits(dtype: DType) -> impl Strategy<Value = u64> {
    let mask = u64::MAX >> (64 - 8 * dtype.size_bytes());
    if !dtype.is_float() {
        return prop_oneof![any::<u64>().prop_map(move |bits| bits & mask), (0..4_u64), Just(mask), Just(mask >> 1)]
            .boxed();
    }
    let format = Format::of(dtype);
    let one = (format.infinity() / 2) & !((1 << format.fraction) - 1);
    let magnitude = prop_oneof![
        Just(0),
        1..8_u64,
        (0..1_u64 << format.fraction),
        0..format.infinity(),
        (one - (4 << format.fraction)..one + (4 << format.fraction)),
        Just(format.infinity() - 1),
        Just(format.infinity()),
        (format.infinity()..format.sign()),
    ];
    (magnitude, any::<bool>()).prop_map(move |(bits, sign)| if sign { bits | format.sign() } else { bits }).boxed()
}

/// What ranks with these values have in common.
pub(crate) fn reduced(
    dtype: DType,
    op: ReduceOp,
    prescale: f64,
    ranks: &[impl AsRef<[u8]>],
) -> Result<Vec<u8>, KernelError> {
    let mut reducer = BlockReducer::new(dtype, op, prescale)?;
    let mut result = vec![0; ranks[0].as_ref().len()];
    reducer.reduce(ranks.len(), &mut result, |rank, start, block| {
        block.copy_from_slice(&ranks[rank].as_ref()[start..start + block.len()]);
        Ok::<(), KernelError>(())
    })?;
    Ok(result)
}
