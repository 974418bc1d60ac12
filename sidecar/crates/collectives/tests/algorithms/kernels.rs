//! Kernels against plain scalar references, on all kinds of values, at any alignment and length.

use proptest::prelude::*;
use ronde_collectives::kernels::{BLOCK_BYTES_MAX, BlockReducer, KernelError, Side, finish, reduce_into, scale};
use ronde_wire::{DType, ReduceOp};

use crate::formats::{Format, bits, load, reduced, store};

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];
const BITWISE: [ReduceOp; 3] = [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor];
const FLOATS: [DType; 4] = [DType::F16, DType::Bf16, DType::F32, DType::F64];
const INTEGERS: [DType; 6] = [DType::U8, DType::I8, DType::U16, DType::I16, DType::I32, DType::I64];

/// What an operation on two floats must give, computed without the kernels' code.
fn float_reference(dtype: DType, op: ReduceOp, left: u64, right: u64) -> u64 {
    let format = Format::of(dtype);
    let (a, b) = (format.value(left), format.value(right));
    if a.is_nan() || b.is_nan() {
        return format.canonical_nan();
    }
    let arithmetic = |exact: f64| match dtype {
        DType::F64 => {
            if exact.is_nan() {
                format.canonical_nan()
            } else {
                exact.to_bits()
            }
        }
        DType::F32 => format.round(exact),
        _ => format.round(Format::of(DType::F32).value(Format::of(DType::F32).round(exact))),
    };
    // -0 before +0: the order of the bits as signed magnitudes.
    let order = |bits: u64| {
        let magnitude = i128::from(bits & !format.sign());
        if bits & format.sign() == 0 { magnitude } else { -magnitude - 1 }
    };
    match op {
        ReduceOp::Product => arithmetic(a * b),
        ReduceOp::Min => {
            if order(left) <= order(right) {
                left
            } else {
                right
            }
        }
        ReduceOp::Max => {
            if order(left) >= order(right) {
                left
            } else {
                right
            }
        }
        _ => arithmetic(a + b),
    }
}

fn integer_value(dtype: DType, bits: u64) -> i128 {
    let width = 8 * dtype.size_bytes();
    let signed = !matches!(dtype, DType::U8 | DType::U16);
    let value = i128::from(bits);
    if signed && bits >> (width - 1) & 1 == 1 { value - (1 << width) } else { value }
}

fn integer_reference(dtype: DType, op: ReduceOp, left: u64, right: u64) -> u64 {
    let (a, b) = (integer_value(dtype, left), integer_value(dtype, right));
    let result = match op {
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BitAnd => a & b,
        ReduceOp::BitOr => a | b,
        ReduceOp::BitXor => a ^ b,
        _ => a + b,
    };
    load(&result.to_le_bytes()[..dtype.size_bytes()])
}

fn reference(dtype: DType, op: ReduceOp, left: u64, right: u64) -> u64 {
    if dtype.is_float() { float_reference(dtype, op, left, right) } else { integer_reference(dtype, op, left, right) }
}

/// The elementwise operations that a type has.
fn ops(dtype: DType) -> impl Iterator<Item = ReduceOp> {
    OPS.into_iter().chain(BITWISE.into_iter().filter(move |_| !dtype.is_float()))
}

fn pairs() -> impl Strategy<Value = (DType, Vec<(u64, u64)>)> {
    let dtypes: Vec<DType> = FLOATS.into_iter().chain(INTEGERS).collect();
    proptest::sample::select(dtypes)
        .prop_flat_map(|dtype| (Just(dtype), proptest::collection::vec((bits(dtype), bits(dtype)), 0..300)))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn reductions_equal_the_reference((dtype, pairs) in pairs(), misaligned in 0..8_usize) {
        for op in ops(dtype) {
            for side in [Side::AccumulatorLeft, Side::AccumulatorRight] {
                let gather = |which: fn(&(u64, u64)) -> u64| {
                    let padding = vec![0; misaligned];
                    padding.into_iter().chain(pairs.iter().flat_map(|pair| store(which(pair), dtype))).collect::<Vec<u8>>()
                };
                let (mut accumulator, other) = (gather(|pair| pair.0), gather(|pair| pair.1));
                reduce_into(dtype, op, &mut accumulator[misaligned..], &other[misaligned..], side).expect("whole elements");
                for (found, (a, b)) in accumulator[misaligned..].chunks(dtype.size_bytes()).zip(&pairs) {
                    let (left, right) = if side == Side::AccumulatorLeft { (*a, *b) } else { (*b, *a) };
                    let expected = reference(dtype, op, left, right);
                    prop_assert_eq!(load(found), expected, "{} {} {:x} {:x}: {:x}", dtype, op, left, right, load(found));
                }
            }
        }
    }

    #[test]
    fn several_local_ranks_of_two_bytes_round_once(
        wide in any::<bool>(),
        ranks in proptest::collection::vec(proptest::collection::vec(any::<u16>(), 33), 1..6),
        prescale in prop_oneof![Just(1.0), Just(0.25), Just(1.0 / 3.0)],
    ) {
        let dtype = if wide { DType::Bf16 } else { DType::F16 };
        let (format, single) = (Format::of(dtype), Format::of(DType::F32));
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max] {
            let blocks: Vec<Vec<u8>> = ranks.iter().map(|r| r.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
            let found = reduced(dtype, op, prescale, &blocks).expect("whole elements");
            for (index, found) in found.chunks(2).enumerate() {
                let value = |rank: &Vec<u16>| {
                    let value = format.value(u64::from(rank[index]));
                    single.round(if prescale == 1.0 { value } else { value * prescale })
                };
                let first = value(&ranks[0]);
                let sum = ranks[1..].iter().fold(first, |sum, rank| float_reference(DType::F32, op, sum, value(rank)));
                prop_assert_eq!(load(found), format.round(single.value(sum)));
            }
        }
    }

    #[test]
    fn block_reducer_equals_reductions_in_order(
        (dtype, pairs) in pairs(),
        factor in prop_oneof![Just(1.0), Just(0.5), Just(-3.7)],
    ) {
        prop_assume!(!matches!(dtype, DType::F16 | DType::Bf16));
        let block = |which: fn(&(u64, u64)) -> u64| pairs.iter().flat_map(|p| store(which(p), dtype)).collect::<Vec<u8>>();
        let (first, second) = (block(|pair| pair.0), block(|pair| pair.1));
        for op in ops(dtype) {
            let found = reduced(dtype, op, factor, &[&first, &second]).expect("whole elements");
            let (mut expected, mut other) = (first.clone(), second.clone());
            scale(dtype, factor, &mut expected).expect("whole elements");
            scale(dtype, factor, &mut other).expect("whole elements");
            reduce_into(dtype, op, &mut expected, &other, Side::AccumulatorLeft).expect("equal lengths");
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn float_scaling_rounds_once(
        (dtype, pairs) in pairs(),
        factor in prop_oneof![Just(1.0), Just(0.5), Just(1.0 / 3.0), Just(-7.25), Just(f64::INFINITY), Just(1e-30)],
    ) {
        prop_assume!(dtype.is_float());
        let (format, single) = (Format::of(dtype), Format::of(DType::F32));
        let mut bytes: Vec<u8> = pairs.iter().flat_map(|pair| store(pair.0, dtype)).collect();
        scale(dtype, factor, &mut bytes).expect("whole elements");
        for (found, (bits, _)) in bytes.chunks(dtype.size_bytes()).zip(&pairs) {
            let product = format.value(*bits) * factor;
            let expected = match dtype {
                _ if factor == 1.0 => *bits,
                DType::F64 if product.is_nan() => format.canonical_nan(),
                DType::F64 => product.to_bits(),
                DType::F32 => format.round(product),
                _ => format.round(single.value(single.round(product))),
            };
            prop_assert_eq!(load(found), expected);
        }
    }

    #[test]
    fn integer_averages_are_exact((dtype, pairs) in pairs(), ranks in 1..5_000_u32) {
        prop_assume!(!dtype.is_float());
        let mut bytes: Vec<u8> = pairs.iter().flat_map(|pair| store(pair.0, dtype)).collect();
        finish(dtype, ReduceOp::Average, ranks, 1.0, &mut bytes).expect("whole elements");
        for (found, (bits, _)) in bytes.chunks(dtype.size_bytes()).zip(&pairs) {
            prop_assert_eq!(integer_value(dtype, load(found)), integer_value(dtype, *bits) / i128::from(ranks));
        }
    }
}

/// All 2^16 values of each narrow type come back from f32 as they were, NaN as the canonical one.
#[test]
fn narrow_floats_survive_widening() {
    for dtype in [DType::F16, DType::Bf16] {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        assert!(all.len() > BLOCK_BYTES_MAX, "several blocks");
        let found = reduced(dtype, ReduceOp::Sum, 1.0, &[&all]).expect("whole elements");
        for (found, bytes) in found.chunks(2).zip(all.chunks(2)) {
            let format = Format::of(dtype);
            let bits = load(bytes);
            assert_eq!(load(found), if format.is_nan(bits) { format.canonical_nan() } else { bits }, "{dtype}");
        }
    }
}

#[test]
fn two_ones_added_to_2048_count_in_f16() {
    let bytes = |value: u16| value.to_le_bytes();
    let (large, one) = (0x6800, 0x3c00);
    let ranks = [bytes(large), bytes(one), bytes(one)];
    let sum = reduced(DType::F16, ReduceOp::Sum, 1.0, &ranks).expect("one element");
    assert_eq!(sum, bytes(0x6801), "2050, not 2048");
}

#[test]
fn an_average_of_f32_is_not_rounded_by_an_inexact_third() {
    let mut bytes = 9_f32.to_le_bytes();
    finish(DType::F32, ReduceOp::Average, 3, 1.0, &mut bytes).expect("one element");
    assert_eq!(f32::from_le_bytes(bytes), 3.0);
    let mut bytes = 12_345.678_f32.to_le_bytes();
    finish(DType::F32, ReduceOp::Average, 4, 2.0, &mut bytes).expect("one element");
    assert_eq!(f32::from_le_bytes(bytes), 12_345.678 / 2.0);
}

#[test]
fn integers_truncate_and_saturate() {
    let scaled = |value: i32, factor: f64| {
        let mut bytes = value.to_le_bytes();
        scale(DType::I32, factor, &mut bytes).expect("one element");
        i32::from_le_bytes(bytes)
    };
    assert_eq!([scaled(7, 0.5), scaled(-7, 0.5), scaled(7, 1e12), scaled(-7, 1e12)], [3, -3, i32::MAX, i32::MIN]);
    assert_eq!([scaled(7, f64::NAN), scaled(i32::MAX, 1.0)], [0, i32::MAX]);
    let mut bytes = (i64::MAX - 1).to_le_bytes();
    finish(DType::I64, ReduceOp::Sum, 3, 1.0, &mut bytes).expect("one element");
    assert_eq!(i64::from_le_bytes(bytes), i64::MAX - 1, "a factor of 1 does not pass through f64");
    let mut bytes = 10_i64.to_le_bytes();
    finish(DType::I64, ReduceOp::Average, 4, 3.0, &mut bytes).expect("one element");
    assert_eq!(i64::from_le_bytes(bytes), 7, "10 * 0.75 is truncated once");
}

#[test]
fn booleans_are_or_and_and() {
    let reduced = |op| {
        let mut accumulator = [0, 0, 1, 2];
        reduce_into(DType::Bool, op, &mut accumulator, &[0, 9, 0, 1], Side::AccumulatorLeft).expect("equal lengths");
        accumulator
    };
    assert_eq!([reduced(ReduceOp::Sum), reduced(ReduceOp::Max)], [[0, 1, 1, 1]; 2]);
    assert_eq!([reduced(ReduceOp::Product), reduced(ReduceOp::Min)], [[0, 0, 0, 1]; 2]);
    assert_eq!([reduced(ReduceOp::BitAnd), reduced(ReduceOp::BitOr)], [[0, 0, 0, 1], [0, 1, 1, 1]]);
    assert_eq!(reduced(ReduceOp::BitXor), [0, 1, 1, 0], "2 and 1 are both true");
}

#[test]
fn reductions_that_are_not_elementwise_are_rejected() {
    for dtype in DType::ALL {
        for op in [ReduceOp::Adasum, ReduceOp::Median, ReduceOp::ClippedMean] {
            let refusal = KernelError::Operation { dtype, op };
            assert_eq!(BlockReducer::new(dtype, op, 1.0).err(), Some(refusal.clone()));
            assert_eq!(reduce_into(dtype, op, &mut [0; 8], &[0; 8], Side::AccumulatorLeft), Err(refusal));
        }
    }
    for dtype in FLOATS {
        for op in BITWISE {
            let refusal = KernelError::Operation { dtype, op };
            assert_eq!(BlockReducer::new(dtype, op, 1.0).err(), Some(refusal.clone()));
            assert_eq!(finish(dtype, op, 2, 2.0, &mut [0; 8]), Err(refusal));
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_rejected() {
    let length = Err(KernelError::Length { dtype: DType::F32, bytes: 7 });
    assert_eq!(scale(DType::F32, 2.0, &mut [0; 7]), length);
    assert_eq!(finish(DType::F32, ReduceOp::Average, 2, 1.0, &mut [0; 7]), length);
    let (op, side) = (ReduceOp::Sum, Side::AccumulatorLeft);
    assert_eq!(reduce_into(DType::F32, op, &mut [0; 7], &[0; 7], side), length);
    let lengths = Err(KernelError::Lengths { accumulator: 8, other: 4 });
    assert_eq!(reduce_into(DType::F32, op, &mut [0; 8], &[0; 4], side), lengths);
    assert_eq!(finish(DType::F32, ReduceOp::Average, 0, 1.0, &mut [0; 8]), Err(KernelError::NoRanks));
    let odd = Err(KernelError::Length { dtype: DType::F16, bytes: 3 });
    assert_eq!(reduced(DType::F16, op, 1.0, &[[0; 3]]), odd);
    let mut reducer = BlockReducer::new(DType::F16, op, 1.0).expect("elementwise");
    let refusal = KernelError::NoRanks;
    assert_eq!(reducer.reduce(2, &mut [0; 2], |_, _, _| Err(refusal.clone())), Err(refusal.clone()), "the reader's");
    assert_eq!(reducer.reduce(0, &mut [0; 2], |_, _, _| Ok(())), Err(refusal));
}
