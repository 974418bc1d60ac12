//! [`scales`]: by what NCCL and ronde multiply, so that scales and averages are those of one level. Pure.

use ronde_gpu::nccl::collective::ElementType;
use ronde_wire::ReduceOp;

/// The factors of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scales {
    /// Multiplies each contribution within the host, before the sum.
    pub(super) inside: f64,
    /// Multiplies the result between hosts. The average over hosts is ronde's.
    pub(super) between: f64,
}

/// The factors for a reduction among `local` ranks of each of `hosts` hosts, with `given` prescale and postscale; `None` if the
/// type cannot hold a factor.
///
/// Between hosts, ronde multiplies in float32 or float64 and rounds once. So NCCL multiplies by a power of two only, which
/// rounds nothing, and ronde by the rest. Of float16 a factor below 1 would round: numbers below 2^-14 would lose digits, the
/// smallest of them all. And without the factor the sum within a host could be too large where the result is not.
pub(super) fn scales(
    op: ReduceOp,
    dtype: ElementType,
    (prescale, postscale): (f64, f64),
    (local, hosts): (usize, usize),
) -> Option<Scales> {
    if !matches!(op, ReduceOp::Sum | ReduceOp::Average) {
        return Some(Scales { inside: 1.0, between: 1.0 });
    }
    #[expect(clippy::cast_precision_loss, reason = "at most 4,096 ranks")]
    let ranks = if op == ReduceOp::Average { local as f64 } else { 1.0 };
    let before = prescale / ranks;
    let inside = if hosts > 1 { power_of_two(before) } else { before * postscale };
    if dtype == ElementType::F16 && inside.abs() < 1.0 {
        return None;
    }
    if hosts > 1 {
        return Some(Scales { inside, between: before / inside * postscale });
    }
    let is_wide = matches!(dtype, ElementType::F32 | ElementType::F64);
    (is_wide || fits(dtype, inside)).then_some(Scales { inside, between: 1.0 })
}

/// The power of two at or below the size of a number, within the normal numbers of all types.
fn power_of_two(number: f64) -> f64 {
    let exponent = number.abs().log2().floor().clamp(-14.0, 15.0);
    exponent.exp2()
}

/// Whether a type of 16 bits has this number, as a normal one. Integers have 1 only.
fn fits(dtype: ElementType, number: f64) -> bool {
    let Some(bits) = dtype.mantissa_bits() else { return number.to_bits() == 1.0_f64.to_bits() };
    let cut = number.to_bits() & ((1_u64 << (f64::MANTISSA_DIGITS - 1 - bits)) - 1);
    cut == 0 && (2_f64.powi(-14)..=2_f64.powi(15)).contains(&number.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: (f64, f64) = (1.0, 1.0);

    fn of(op: ReduceOp, dtype: ElementType, given: (f64, f64), layout: (usize, usize)) -> Option<(f64, f64)> {
        scales(op, dtype, given, layout).map(|Scales { inside, between }| (inside, between))
    }

    #[test]
    fn powers_of_two_are_inside_and_the_rest_between() {
        assert_eq!(of(ReduceOp::Sum, ElementType::F32, PLAIN, (3, 2)), Some((1.0, 1.0)));
        assert_eq!(of(ReduceOp::Average, ElementType::Bf16, PLAIN, (4, 2)), Some((0.25, 1.0)));
        let (inside, between) = of(ReduceOp::Average, ElementType::Bf16, PLAIN, (3, 2)).expect("two hosts");
        assert_eq!(inside, 0.25);
        assert!((inside * between - 1.0 / 3.0).abs() < 1e-15);
        let (inside, between) = of(ReduceOp::Sum, ElementType::F16, (-3.0, 0.5), (2, 2)).expect("two hosts");
        assert_eq!((inside, between), (2.0, -0.75));
    }

    #[test]
    fn one_host_has_only_factors_of_the_type() {
        assert_eq!(of(ReduceOp::Average, ElementType::Bf16, PLAIN, (4, 1)), Some((0.25, 1.0)));
        assert_eq!(of(ReduceOp::Average, ElementType::Bf16, PLAIN, (3, 1)), None);
        assert_eq!(of(ReduceOp::Average, ElementType::F32, PLAIN, (3, 1)), Some((1.0 / 3.0, 1.0)));
        assert_eq!(of(ReduceOp::Sum, ElementType::F16, (1.5, 1.0), (2, 1)), Some((1.5, 1.0)));
        assert_eq!(of(ReduceOp::Sum, ElementType::Bf16, (1e-6, 1.0), (2, 1)), None);
        assert_eq!(of(ReduceOp::Sum, ElementType::I32, PLAIN, (2, 1)), Some((1.0, 1.0)));
        assert_eq!(of(ReduceOp::Max, ElementType::Bf16, PLAIN, (3, 1)), Some((1.0, 1.0)));
    }

    #[test]
    fn small_numbers_of_float16_keep_their_digits() {
        for layout in [(4, 1), (4, 2)] {
            assert_eq!(of(ReduceOp::Average, ElementType::F16, PLAIN, layout), None);
            assert_eq!(of(ReduceOp::Sum, ElementType::F16, (0.5, 1.0), layout), None);
            assert_eq!(of(ReduceOp::Sum, ElementType::F16, PLAIN, layout), Some((1.0, 1.0)));
        }
        assert_eq!(of(ReduceOp::Sum, ElementType::F16, (1.0, 0.5), (4, 1)), None);
        assert_eq!(of(ReduceOp::Sum, ElementType::F16, (1.0, 0.5), (4, 2)), Some((1.0, 0.5)));
    }
}
