//! Averages of f16 over several sidecars against sums in f16 and against f64.

use proptest::prelude::*;
use ronde_collectives::kernels::{BlockReducer, KernelError, PartialSums, Side, finish, reduce_into};
use ronde_wire::{DType, ReduceOp};

use crate::formats::Format;

/// What members with so many ranks make of the ranks' values, one member after another.
fn average(dtype: DType, members: &[usize], values: &[Vec<u8>]) -> Vec<u8> {
    let sums = PartialSums::of(dtype, members).expect("16 bits");
    let mut at = 0;
    let mut total: Option<Vec<u8>> = None;
    for &local in members {
        let reducer = BlockReducer::new(dtype, ReduceOp::Average, 1.0).expect("averages").as_partial_sums(sums);
        let part = contribution(reducer, &values[at..at + local]);
        at += local;
        match &mut total {
            None => total = Some(part),
            Some(total) => sums.add(total, &part, Side::AccumulatorLeft).expect("equal lengths"),
        }
    }
    let mut total = total.expect("members");
    sums.finish(u32::try_from(at).expect("few"), 1.0, &mut total).expect("whole elements");
    total
}

/// The same with sums that are rounded to the type.
fn plain_average(dtype: DType, members: &[usize], values: &[Vec<u8>]) -> Vec<u8> {
    let mut at = 0;
    let mut total: Option<Vec<u8>> = None;
    for &local in members {
        let reducer = BlockReducer::new(dtype, ReduceOp::Average, 1.0).expect("averages");
        let part = contribution(reducer, &values[at..at + local]);
        at += local;
        match &mut total {
            None => total = Some(part),
            Some(total) => {
                reduce_into(dtype, ReduceOp::Average, total, &part, Side::AccumulatorLeft).expect("equal lengths");
            }
        }
    }
    let mut total = total.expect("members");
    finish(dtype, ReduceOp::Average, u32::try_from(at).expect("few"), 1.0, &mut total).expect("whole elements");
    total
}

fn contribution(mut reducer: BlockReducer, ranks: &[Vec<u8>]) -> Vec<u8> {
    let mut into = vec![0; ranks[0].len()];
    let read = |rank: usize, start: usize, block: &mut [u8]| {
        block.copy_from_slice(&ranks[rank][start..start + block.len()]);
        Ok::<(), KernelError>(())
    };
    reducer.reduce(ranks.len(), &mut into, read).expect("whole elements");
    into
}

fn members() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1_usize..4, 2..9)
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = f64> {
    bytes.as_chunks::<2>().0.iter().map(|bytes| Format::of(DType::F16).value(u64::from(u16::from_le_bytes(*bytes))))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// With one rank on each member, sums that stay within f16 are those of f16, bit by bit.
    #[test]
    fn sums_within_f16_have_the_bits_of_f16(
        values in prop::collection::vec(prop::collection::vec(any::<u16>(), 60), 2..9),
    ) {
        // Exponents so low that no sum of eight leaves f16.
        let small = |bits: &u16| if bits >> 10 & 31 > 26 { bits & 0x8fff } else { *bits };
        let values: Vec<Vec<u8>> =
            values.iter().map(|rank| rank.iter().flat_map(|bits| small(bits).to_le_bytes()).collect()).collect();
        let members = vec![1; values.len()];
        prop_assert_eq!(average(DType::F16, &members, &values), plain_average(DType::F16, &members, &values));
    }

    /// Finite numbers have a finite average within a thirty-second of the largest of them, whatever their size.
    #[test]
    fn averages_of_finite_numbers_are_finite(
        members in members(),
        draws in prop::collection::vec(any::<u16>(), 24 * 20),
    ) {
        let ranks: usize = members.iter().sum();
        let finite = |bits: &u16| if bits >> 10 & 31 == 31 { bits & 0xfbff } else { *bits };
        let values: Vec<Vec<u8>> = draws.chunks(20).take(ranks)
            .map(|rank| rank.iter().flat_map(|bits| finite(bits).to_le_bytes()).collect()).collect();
        let found = average(DType::F16, &members, &values);
        for (element, found) in halves(&found).enumerate() {
            let column: Vec<f64> = values.iter().map(|rank| halves(rank).nth(element).expect("an element")).collect();
            let mean = column.iter().sum::<f64>() / ranks as f64;
            let largest = column.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
            prop_assert!((found - mean).abs() <= largest / 32.0 + 2_f64.powi(-22), "{} not {}", found, mean);
        }
    }
}

/// All ranks at once: the largest number is the average of itself, and small ones keep their digits.
#[test]
fn averages_at_once_are_divided_before_they_are_rounded() {
    for (dtype, numbers) in [(DType::F16, [0x7bff_u16, 0x0001, 0x3c01]), (DType::Bf16, [0x7f7f, 0x0081, 0x3f81])] {
        for ranks in [1_u32, 2, 3, 5, 8, 64] {
            let values: Vec<u8> = numbers.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            let reducer = BlockReducer::new(dtype, ReduceOp::Average, 1.0).expect("averages").as_average(ranks, 1.0);
            let found = contribution(reducer, &vec![values.clone(); ranks as usize]);
            assert_eq!(found, values, "{dtype} over {ranks}");
        }
    }
}

/// The errors of averages, of the size of a root mean square, before and after partial sums were extended: nowhere larger, and
/// finite where they were not.
#[test]
fn errors_are_not_larger_than_those_of_sums_in_f16() {
    let mut state = 1_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 / f64::from(1 << 23) - 1.0) * 2.0
    };
    let format = Format::of(DType::F16);
    for members in [vec![1, 1], vec![1; 4], vec![2, 2], vec![2; 4], vec![3, 1, 2], vec![1; 8], vec![8; 8]] {
        for scale in [1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 1.0, 1e2, 5e3, 3e4] {
            let ranks: usize = members.iter().sum();
            let values: Vec<Vec<u8>> = (0..ranks)
                .map(|_| (0..2_000).flat_map(|_| format.round(scale * draw()).to_le_bytes()[..2].to_vec()).collect())
                .collect();
            let columns: Vec<Vec<f64>> = values.iter().map(|rank| halves(rank).collect()).collect();
            let error = |found: &[u8]| {
                let squares = halves(found).enumerate().map(|(element, found)| {
                    let mean = columns.iter().map(|rank| rank[element]).sum::<f64>() / ranks as f64;
                    (found - mean).powi(2)
                });
                (squares.sum::<f64>() / 2_000.0).sqrt() / scale
            };
            let before = error(&plain_average(DType::F16, &members, &values));
            let after = error(&average(DType::F16, &members, &values));
            println!("{members:?} of {scale:e}: {before:.2e} became {after:.2e}");
            assert!(after <= before * 1.02 || !before.is_finite(), "{members:?} {scale}: {before} {after}");
            assert!(after < 4e-3 + 2_f64.powi(-24) / scale, "{members:?} {scale}: {after}");
        }
    }
}
