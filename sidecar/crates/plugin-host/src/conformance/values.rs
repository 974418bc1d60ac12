//! Extreme values of element types, and random bytes.

use ronde_wire::DType;

/// Finite extreme values: zeros, denormals, the smallest normal and the largest number, ones; for integers and booleans
/// the smallest and largest.
pub(super) fn extremes(dtype: DType) -> Vec<u8> {
    let patterns: &[u64] = match dtype {
        DType::F16 => &[0, 0x8000, 1, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x3c00, 0xbc00],
        DType::Bf16 => &[0, 0x8000, 1, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f, 0x3f80, 0xbf80],
        DType::F32 => &[
            0,
            0x8000_0000,
            1,
            0x8000_0001,
            0x007f_ffff,
            0x0080_0000,
            0x7f7f_ffff,
            0xff7f_ffff,
            0x3f80_0000,
            0xbf80_0000,
        ],
        DType::F64 => &[
            0,
            1 << 63,
            1,
            1 << 63 | 1,
            0x000f_ffff_ffff_ffff,
            0x0010_0000_0000_0000,
            0x7fef_ffff_ffff_ffff,
            0xffef_ffff_ffff_ffff,
            0x3ff0_0000_0000_0000,
            0xbff0_0000_0000_0000,
        ],
        DType::Bool => &[0, 1],
        _ => &[0, 1, u64::MAX, 0x7f7f_7f7f_7f7f_7f7f, 0x8080_8080_8080_8080, 1 << 63, u64::MAX >> 1],
    };
    patterns.iter().flat_map(|pattern| pattern.to_le_bytes()[..dtype.size_bytes()].to_vec()).collect()
}

/// NaN and infinities; empty for other than floating-point types.
pub(super) fn overflows(dtype: DType) -> Vec<Vec<u8>> {
    let patterns: &[u64] = match dtype {
        DType::F16 => &[0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe00],
        DType::Bf16 => &[0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffc0],
        DType::F32 => &[0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0x7f80_0001, 0xffc0_0000],
        DType::F64 => &[0x7ff << 52, 0xfff << 52, 0x7ff8 << 48, (0x7ff << 52) | 1, 0xfff8 << 48],
        _ => &[],
    };
    patterns.iter().map(|pattern| pattern.to_le_bytes()[..dtype.size_bytes()].to_vec()).collect()
}

/// Whether an element is NaN or infinite: all bits of its exponent are set.
pub(super) fn is_overflow(dtype: DType, element: &[u8]) -> bool {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    let exponent = match dtype {
        DType::F16 => 0x7c00,
        DType::Bf16 => 0x7f80,
        DType::F32 => 0x7f80_0000,
        DType::F64 => 0x7ff << 52,
        _ => return false,
    };
    u64::from_le_bytes(bytes) & exponent == exponent
}

/// A deterministic generator: SplitMix64, by Steele, Lea and Flood.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    /// A number below `bound`, or 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % (bound.max(1) as u64)).unwrap_or(0)
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}
