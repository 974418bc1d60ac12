//! What each operation means for each type: the table in the documentation of `supports`, and Horovod's rules for factors
//! and averages, against references in whole numbers.

#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole numbers within the types' ranges")]

use proptest::prelude::*;
use ronde_collectives::kernels::{Side, finish, is_nary, reduce_into, reduce_n, scale, supports};
use ronde_wire::{DType, ReduceOp};

use crate::formats::{Format, bits, load, reduced, store};

const OPS: [ReduceOp; 11] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Average,
    ReduceOp::Median,
    ReduceOp::ClippedMean,
    ReduceOp::Adasum,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

/// A row for each type, a column for each of [`OPS`]: what 7 and 3, or true and false, become on two ranks of equal weight
/// when it is half of each that counts; `None` where it is refused.
const TABLE: [(DType, [Option<f64>; 11]); 11] = [
    (DType::U8, INTEGERS),
    (DType::I8, INTEGERS),
    (DType::U16, INTEGERS),
    (DType::I16, INTEGERS),
    (DType::I32, INTEGERS),
    (DType::I64, INTEGERS),
    (DType::F16, FLOATS),
    (DType::Bf16, FLOATS),
    (DType::F32, FLOATS),
    (DType::F64, FLOATS),
    (DType::Bool, BOOL),
];
const INTEGERS: [Option<f64>; 11] = {
    let [sum, product, least, greatest, mean] = [Some(10.0), Some(21.0), Some(3.0), Some(7.0), Some(5.0)];
    [sum, product, least, greatest, mean, None, None, None, Some(3.0), Some(7.0), Some(4.0)]
};
const FLOATS: [Option<f64>; 11] = {
    let [sum, product, least, greatest, mean] = [Some(10.0), Some(21.0), Some(3.0), Some(7.0), Some(5.0)];
    [sum, product, least, greatest, mean, mean, mean, mean, None, None, None]
};
const BOOL: [Option<f64>; 11] = {
    let (no, yes) = (Some(0.0), Some(1.0));
    [yes, no, no, yes, None, None, None, None, no, yes, yes]
};

#[test]
fn every_operation_of_every_type() {
    for ((dtype, row), listed) in TABLE.into_iter().zip(DType::ALL) {
        assert_eq!(dtype, listed);
        for (op, expected) in OPS.into_iter().zip(row) {
            assert_eq!(supports(dtype, op), expected.is_some(), "{op} of {dtype}");
            let (seven, three) = if dtype == DType::Bool { (1.0, 0.0) } else { (7.0, 3.0) };
            let (left, right) = (element(dtype, seven), element(dtype, three));
            let found =
                if is_nary(op) { all_at_once(dtype, op, &left, &right) } else { pairwise(dtype, op, &left, &right) };
            match expected {
                Some(expected) => assert_eq!(found, Ok(element(dtype, expected)), "{op} of {dtype}"),
                None => {
                    let words = format!(
                        "this kernel has no {op} of {dtype}; refuse it when it is requested, or take the one for its kind"
                    );
                    assert_eq!(found, Err(words));
                }
            }
        }
    }
}

fn all_at_once(dtype: DType, op: ReduceOp, left: &[u8], right: &[u8]) -> Result<Vec<u8>, String> {
    let weights: &[f64] = if op == ReduceOp::Median { &[] } else { &[0.5, 0.5] };
    let mut result = left.to_vec();
    reduce_n(dtype, op, &[left, right], weights, &mut result).map_err(|error| error.to_string())?;
    finish(dtype, op, 2, 1.0, &mut result).map_err(|error| error.to_string())?;
    Ok(result)
}

/// One rank here, the other one elsewhere.
fn pairwise(dtype: DType, op: ReduceOp, left: &[u8], right: &[u8]) -> Result<Vec<u8>, String> {
    let mut result = reduced(dtype, op, 1.0, &[left]).map_err(|error| error.to_string())?;
    reduce_into(dtype, op, &mut result, right, Side::AccumulatorLeft).map_err(|error| error.to_string())?;
    finish(dtype, op, 2, 1.0, &mut result).map_err(|error| error.to_string())?;
    Ok(result)
}

/// A small whole number, which every type holds.
fn element(dtype: DType, value: f64) -> Vec<u8> {
    if dtype == DType::F64 {
        return value.to_le_bytes().to_vec();
    }
    store(if dtype.is_float() { Format::of(dtype).round(value) } else { value as u64 }, dtype)
}

const WHOLE: [DType; 6] = [DType::U8, DType::I8, DType::U16, DType::I16, DType::I32, DType::I64];

fn whole_numbers() -> impl Strategy<Value = (DType, Vec<u64>)> {
    proptest::sample::select(WHOLE.to_vec())
        .prop_flat_map(|dtype| (Just(dtype), proptest::collection::vec(bits(dtype), 1..200)))
}

/// The least and the greatest value, in whole numbers.
fn range(dtype: DType) -> (i128, i128) {
    let width = 8 * dtype.size_bytes();
    match dtype {
        DType::U8 | DType::U16 => (0, (1 << width) - 1),
        _ => (-(1 << (width - 1)), (1 << (width - 1)) - 1),
    }
}

fn whole(dtype: DType, bits: u64) -> i128 {
    let (_, max) = range(dtype);
    let value = i128::from(bits);
    if value > max { value - (1 << (8 * dtype.size_bytes())) } else { value }
}

/// The value times the factor as f64, without what is behind the point, no further than the type goes.
fn scaled(dtype: DType, value: i128, factor: f64) -> i128 {
    let product = value as f64 * factor;
    let (min, max) = range(dtype);
    if product.is_nan() {
        return 0;
    }
    // Bounds first: beyond them an f64 may be larger than any whole number here.
    if product <= min as f64 {
        min
    } else if product >= max as f64 {
        max
    } else {
        product.trunc() as i128
    }
}

fn factor() -> impl Strategy<Value = f64> {
    let named = [1.0, 0.5, -0.5, 1.0 / 3.0, 2.5, -7.25, 0.0, 1e30, -1e30, 1e-30, f64::INFINITY, f64::NAN];
    prop_oneof![proptest::sample::select(named.to_vec()), -3.0..3.0_f64]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn factors_of_integers_truncate_toward_zero((dtype, values) in whole_numbers(), factor in factor()) {
        let mut bytes: Vec<u8> = values.iter().flat_map(|bits| store(*bits, dtype)).collect();
        scale(dtype, factor, &mut bytes).expect("whole elements");
        for (found, bits) in bytes.chunks(dtype.size_bytes()).zip(&values) {
            let value = whole(dtype, *bits);
            let expected = if factor == 1.0 { value } else { scaled(dtype, value, factor) };
            prop_assert_eq!(whole(dtype, load(found)), expected, "{} {} {}", dtype, value, factor);
        }
    }

    /// `postscale * average(prescale * x)` over ranks here and elsewhere; sums wrap.
    #[test]
    fn averages_of_integers_truncate_toward_zero(
        (dtype, values) in whole_numbers(),
        others in proptest::collection::vec(any::<i8>(), 0..4),
        prescale in factor(),
        postscale in factor(),
    ) {
        let bytes = |value: i128| value.to_le_bytes()[..dtype.size_bytes()].to_vec();
        let block = |value: i128| values.iter().flat_map(|_| bytes(value)).collect::<Vec<u8>>();
        let others: Vec<i128> = others.into_iter().map(i128::from).map(|other| other.max(range(dtype).0)).collect();
        let first: Vec<u8> = values.iter().flat_map(|bits| store(*bits, dtype)).collect();
        let blocks: Vec<Vec<u8>> = [first].into_iter().chain(others.iter().map(|other| block(*other))).collect();
        let mut found = reduced(dtype, ReduceOp::Average, prescale, &blocks).expect("whole elements");
        let ranks = u32::try_from(others.len()).expect("few") + 1;
        finish(dtype, ReduceOp::Average, ranks, postscale, &mut found).expect("whole elements");
        for (found, bits) in found.chunks(dtype.size_bytes()).zip(&values) {
            let prescaled = |value: i128| if prescale == 1.0 { value } else { scaled(dtype, value, prescale) };
            let sum = others.iter().fold(prescaled(whole(dtype, *bits)), |sum, other| sum + prescaled(*other));
            let sum = whole(dtype, load(&bytes(sum)));
            let exact = sum / i128::from(ranks);
            let expected = if postscale == 1.0 { exact } else { scaled(dtype, sum, postscale / f64::from(ranks)) };
            prop_assert_eq!(whole(dtype, load(found)), expected, "{} {} {}", dtype, prescale, postscale);
        }
    }

    /// f16 and bf16 are multiplied as f32 holds them and rounded twice: to f32, then to their own.
    #[test]
    fn factors_of_narrow_floats_go_through_f32(values in proptest::collection::vec(any::<u16>(), 1..200), factor in factor()) {
        let single = Format::of(DType::F32);
        for dtype in [DType::F16, DType::Bf16] {
            let format = Format::of(dtype);
            let mut bytes: Vec<u8> = values.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            scale(dtype, factor, &mut bytes).expect("whole elements");
            for (found, bits) in bytes.chunks(2).zip(&values) {
                let product = single.value(single.round(format.value(u64::from(*bits)) * factor));
                let expected = if factor == 1.0 { u64::from(*bits) } else { format.round(product) };
                prop_assert_eq!(load(found), expected, "{} {:x} {}", dtype, bits, factor);
            }
        }
    }
}

/// 7 and -7 on four ranks: neither is rounded away from zero, whatever the width.
#[test]
fn negative_averages_truncate_upward() {
    for dtype in WHOLE {
        for value in [7_i128, -7] {
            if value < range(dtype).0 {
                continue;
            }
            let mut bytes = value.to_le_bytes()[..dtype.size_bytes()].to_vec();
            finish(dtype, ReduceOp::Average, 4, 1.0, &mut bytes).expect("one element");
            assert_eq!(whole(dtype, load(&bytes)), value.signum(), "{dtype}");
        }
    }
}

#[test]
fn a_factor_on_bool_is_one_on_zero_or_one() {
    for (factor, expected) in [(1.0, [0, 1]), (0.5, [0, 0]), (-1.0, [0, 1]), (2.0, [0, 1]), (f64::NAN, [0, 0])] {
        let mut bytes = [0, 1];
        scale(DType::Bool, factor, &mut bytes).expect("whole elements");
        assert_eq!(bytes, expected, "{factor}");
    }
}
