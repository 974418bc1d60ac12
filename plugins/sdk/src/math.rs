//! Mathematical functions that `core` lacks.

/// The correctly rounded square root.
#[inline]
#[must_use]
pub fn sqrt(value: f64) -> f64 {
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    {
        use core::arch::wasm32::{f64x2_extract_lane, f64x2_splat, f64x2_sqrt};
        f64x2_extract_lane::<0>(f64x2_sqrt(f64x2_splat(value)))
    }
    #[cfg(all(target_arch = "wasm32", not(target_feature = "simd128")))]
    {
        compile_error!("plugins are built with -C target-feature=+simd128, as `ronde plugin build` does");
    }
    #[cfg(not(target_arch = "wasm32"))]
    value.sqrt()
}

/// The share `ratio` of `elements`, rounded up: at least 1 (if there are any), at most all.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most `elements`")]
#[must_use]
pub fn share(ratio: f64, elements: usize) -> usize {
    let exact = ratio * elements as f64;
    let whole = exact as usize;
    (if (whole as f64) < exact { whole + 1 } else { whole }).clamp(elements.min(1), elements)
}

/// Pseudo-random numbers that follow from a seed: SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom
/// number generators", OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence for a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The sequence for several numbers, whose order matters.
    #[must_use]
    pub fn of(seeds: &[u64]) -> Self {
        let mix = |state: u64, seed: &u64| Self(state ^ *seed).next();
        Self(seeds.iter().fold(0, mix))
    }

    /// The next number.
    #[inline]
    #[allow(clippy::should_implement_trait, reason = "there is always a next one")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A byte.
    #[inline]
    pub fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    /// A number below a bound, by multiplying: less uniform than it could be by no more than `bound / 2^32`.
    #[allow(clippy::cast_possible_truncation, reason = "below 2^32")]
    #[inline]
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.next() >> 32) * u64::from(bound)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::{Random, share};

    /// The first numbers of the authors' sequence for seed 1234567.
    #[test]
    fn the_sequence_is_the_published_one() {
        let mut random = Random::new(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn a_share_is_rounded_up() {
        let shares = [(0.01, 0), (0.01, 1), (0.01, 100), (0.01, 101), (1.0, 7), (2.0, 7), (0.0, 7)];
        assert_eq!(shares.map(|(ratio, elements)| share(ratio, elements)), [0, 1, 1, 2, 7, 7, 1]);
    }

    #[test]
    fn seeds_are_not_exchangeable() {
        assert_ne!(Random::of(&[1, 2]).next(), Random::of(&[2, 1]).next());
        let mut random = Random::new(0);
        assert!((0..1_000).all(|_| random.below(7) < 7));
    }
}
