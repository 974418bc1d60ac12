//! Error feedback: a codec keeps what it has not sent of each value, and sends it in later rounds.

use crate::element::Float;

/// Removes what an `E` can hold from a residual, and returns it. A residual beyond the range of `E` gives the largest value,
/// and the rest stays. A NaN or infinity is returned as such.
#[inline(always)]
pub fn take<E: Float<Wide = f32>>(residual: &mut f32) -> E {
    let value = E::saturate(*residual);
    *residual -= value.widen();
    value
}

/// Clears residuals that are NaN or infinite, so that an overflow does not affect later rounds.
pub fn clear_non_finite(residuals: &mut [f32]) {
    residuals.iter_mut().for_each(|value| *value = if value.is_finite() { *value } else { 0.0 });
}

/// The bits of a magnitude. They are ordered like magnitudes, with infinity and NaN above all finite values.
#[inline(always)]
#[must_use]
pub const fn magnitude_bits(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

/// The magnitude bits of infinity; those of NaN are greater.
pub const INFINITY_BITS: u32 = f32::INFINITY.to_bits();

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bf16, F16};

    #[test]
    fn what_is_taken_and_what_stays_add_up() {
        for residual in [0.0, 1.0, 0.1, -3.3, 65_504.0, 1e-6] {
            let mut rest = residual;
            let sent: F16 = take(&mut rest);
            assert_eq!(sent.to_f64() + f64::from(rest), f64::from(residual));
        }
        let mut beyond = 70_000.0;
        assert_eq!(take::<F16>(&mut beyond).widen(), 65_504.0);
        assert_eq!(beyond, 4_496.0);
        assert!(take::<Bf16>(&mut f32::NAN.clone()).widen().is_nan());
    }

    #[test]
    fn only_non_finite_residuals_are_cleared() {
        let mut residuals = [1.0, f32::NAN, f32::INFINITY, -2.0, f32::NEG_INFINITY];
        clear_non_finite(&mut residuals);
        assert_eq!(residuals, [1.0, 0.0, 0.0, -2.0, 0.0]);
    }

    #[test]
    fn magnitudes_are_ordered() {
        let ordered = [0.0, f32::MIN_POSITIVE, -1.0, f32::MAX, f32::NEG_INFINITY, f32::NAN].map(magnitude_bits);
        assert!(ordered.is_sorted() && ordered[4] == INFINITY_BITS && ordered[5] > INFINITY_BITS);
        assert_eq!(magnitude_bits(-0.0), magnitude_bits(0.0));
    }
}
