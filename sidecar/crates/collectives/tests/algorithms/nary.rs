//! Codecs and n-ary reductions against plain references, on all kinds of values and any length.

use proptest::prelude::*;
use ronde_collectives::kernels::{
    KernelError, add_products, add_sum_of_squares, decode, encode, finish, is_nary, reduce_n, supports, weights,
};
use ronde_wire::{Codec, DType, ReduceOp};

use crate::formats::{Format, bits, load, store};

const FLOATS: [DType; 4] = [DType::F16, DType::Bf16, DType::F32, DType::F64];
const CODECS: [(Codec, DType); 2] = [(Codec::F16, DType::F16), (Codec::Bf16, DType::Bf16)];

/// A type, and for each of 1 to 9 ranks as many values.
fn operands() -> impl Strategy<Value = (DType, Vec<Vec<u64>>)> {
    (proptest::sample::select(FLOATS.to_vec()), 1..10_usize, 0..70_usize).prop_flat_map(|(dtype, ranks, elements)| {
        let values = proptest::collection::vec(bits(dtype), elements);
        (Just(dtype), proptest::collection::vec(values, ranks))
    })
}

fn bytes_of(dtype: DType, values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|bits| store(*bits, dtype)).collect()
}

fn reduced(dtype: DType, op: ReduceOp, ranks: &[Vec<u64>], weights: &[f64]) -> Vec<u64> {
    let blocks: Vec<Vec<u8>> = ranks.iter().map(|values| bytes_of(dtype, values)).collect();
    let operands: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    let mut into = vec![0xa5; blocks[0].len()];
    reduce_n(dtype, op, &operands, weights, &mut into).expect("equal lengths");
    into.chunks(dtype.size_bytes()).map(load).collect()
}

/// As [`Format::round`], where an f64 is its own.
fn rounded(dtype: DType, value: f64) -> u64 {
    match dtype {
        DType::F64 if value.is_nan() => Format::of(dtype).canonical_nan(),
        DType::F64 => value.to_bits(),
        _ => Format::of(dtype).round(value),
    }
}

/// The middle value of one element, by sorting; computed in f32 where that holds all values.
fn median_reference(dtype: DType, mut column: Vec<u64>) -> u64 {
    let format = Format::of(dtype);
    if column.iter().any(|bits| format.is_nan(*bits)) {
        return format.canonical_nan();
    }
    column.sort_by(|a, b| format.value(*a).total_cmp(&format.value(*b)));
    let (lower, upper) = (column[(column.len() - 1) / 2], column[column.len() / 2]);
    if column.len() % 2 == 1 {
        return lower;
    }
    let (a, b) = (format.value(lower), format.value(upper));
    let single = Format::of(DType::F32);
    match dtype {
        DType::F64 => rounded(dtype, if (a + b).is_infinite() { a / 2.0 + b / 2.0 } else { (a + b) / 2.0 }),
        // An f64 holds the sum of two f32 exactly, or so nearly that rounding it again makes no difference.
        DType::F32 => single.round((a + b) / 2.0),
        _ => format.round(single.value(single.round((a + b) / 2.0))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn medians_equal_the_reference((dtype, ranks) in operands()) {
        let found = reduced(dtype, ReduceOp::Median, &ranks, &[]);
        for (index, found) in found.into_iter().enumerate() {
            let column: Vec<u64> = ranks.iter().map(|values| values[index]).collect();
            prop_assert_eq!(found, median_reference(dtype, column.clone()), "{} {:x?}", dtype, column);
        }
    }

    #[test]
    fn weighted_sums_are_rounded_once(
        (dtype, ranks) in operands(),
        weights in proptest::collection::vec(
            prop_oneof![Just(0.0), Just(1.0), Just(-0.25), Just(1.0 / 3.0), Just(1e-3), -2.0..2.0_f64], 9),
    ) {
        let format = Format::of(dtype);
        let weights = &weights[..ranks.len()];
        let found = reduced(dtype, ReduceOp::ClippedMean, &ranks, weights);
        prop_assert_eq!(&found, &reduced(dtype, ReduceOp::Adasum, &ranks, weights));
        for (index, found) in found.into_iter().enumerate() {
            let products = ranks.iter().zip(weights).filter(|(_, weight)| **weight != 0.0);
            let sum = products.map(|(values, weight)| weight * format.value(values[index])).reduce(|sum, one| sum + one);
            prop_assert_eq!(found, rounded(dtype, sum.unwrap_or(0.0)), "{}", dtype);
        }
    }

    #[test]
    fn encoding_rounds_once_and_decoding_is_exact(
        values in proptest::collection::vec(bits(DType::F32), 0..300),
        misaligned in 0..4_usize,
    ) {
        let single = Format::of(DType::F32);
        let mut bytes = vec![0; misaligned];
        bytes.extend(bytes_of(DType::F32, &values));
        for (codec, narrow) in CODECS {
            let format = Format::of(narrow);
            let mut encoded = vec![0; 2 * values.len()];
            encode(codec, DType::F32, &bytes[misaligned..], &mut encoded).expect("lengths fit");
            let mut decoded = vec![0; misaligned + 4 * values.len()];
            decode(codec, DType::F32, &encoded, &mut decoded[misaligned..]).expect("lengths fit");
            let pairs = encoded.chunks(2).zip(decoded[misaligned..].chunks(4));
            for ((encoded, decoded), value) in pairs.zip(&values) {
                let expected = format.round(single.value(*value));
                prop_assert_eq!(load(encoded), expected, "{} of {:x}", codec, value);
                prop_assert_eq!(load(decoded), single.round(format.value(expected)));
            }
        }
    }

    #[test]
    fn measures_equal_plain_sums((dtype, ranks) in operands()) {
        let format = Format::of(dtype);
        let values: Vec<Vec<f64>> =
            ranks.iter().map(|values| values.iter().map(|bits| format.value(*bits)).collect()).collect();
        let blocks: Vec<Vec<u8>> = ranks.iter().map(|values| bytes_of(dtype, values)).collect();
        let operands: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
        let mut gram = vec![0.25; ranks.len() * (ranks.len() + 1) / 2];
        add_products(dtype, &operands, &mut gram).expect("equal lengths");
        let mut entries = gram.into_iter();
        for (row, left) in values.iter().enumerate() {
            for (column, right) in values.iter().enumerate().skip(row) {
                let found = entries.next().expect("the upper triangle");
                let terms: Vec<f64> = left.iter().zip(right).map(|(a, b)| a * b).collect();
                prop_assert!(is_sum(found, 0.25, &terms), "{} {:?}", found, terms);
                if row == column {
                    let mut sum = 0.25;
                    add_sum_of_squares(dtype, operands[row], &mut sum).expect("whole elements");
                    prop_assert!(sum.to_bits() == found.to_bits() || sum.is_nan() && found.is_nan(), "{} {}", sum, found);
                }
            }
        }
    }

    #[test]
    fn clipped_means_equal_the_reference(squares in proptest::collection::vec(
        prop_oneof![Just(0.0), Just(f64::INFINITY), Just(f64::NAN), 1e-300..1e300_f64, 0.0..4.0_f64], 1..12)
    ) {
        let ranks = squares.len() as f64;
        let norms: Vec<f64> =
            squares.iter().map(|square| if square.is_nan() { f64::INFINITY } else { square.sqrt() }).collect();
        let mut sorted = norms.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
        let found = weights(ReduceOp::ClippedMean, squares.len(), &squares).expect("a sum for each rank");
        for (found, norm) in found.into_iter().zip(norms) {
            let expected = match norm {
                0.0 => 1.0 / ranks,
                f64::INFINITY => 0.0,
                _ => f64::min(1.0, middle / norm) / ranks,
            };
            prop_assert!((found - expected).abs() <= 1e-12 * expected, "{} {}", found, expected);
        }
    }

    #[test]
    fn adasum_equals_the_recursion_on_vectors(
        ranks in 1..18_usize,
        elements in 1..40_usize,
        numbers in proptest::collection::vec(-1.0..1.0_f64, 17 * 40),
        lengths in proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0), 1e-3..1e3_f64], 17),
    ) {
        let vectors: Vec<Vec<f64>> = (0..ranks)
            .map(|rank| numbers[rank * 40..][..elements].iter().map(|number| number * lengths[rank]).collect())
            .collect();
        let (found, magnitude) = adasum(&vectors);
        let (expected, cancelled) = recursion(&vectors);
        // Inner products of what is left after a cancellation are as inexact as the square of what has cancelled.
        prop_assume!(cancelled < 100.0);
        for (found, expected) in found.iter().zip(expected) {
            prop_assert!((found - expected).abs() <= 1e-9 * magnitude, "{} {}", found, expected);
        }
    }

    #[test]
    fn adasum_is_bounded_however_much_cancels(
        ranks in 2..18_usize,
        elements in 1..4_usize,
        numbers in proptest::collection::vec(-1.0..1.0_f64, 17 * 4),
        exponents in proptest::collection::vec(0..18_i32, 17),
    ) {
        // Neighbours are opposites, but for a difference that is anything from large to less than what f64 can tell.
        let value = |rank: usize, index: usize| {
            let sign = if rank.is_multiple_of(2) { 1.0 } else { -1.0 };
            sign * (numbers[rank / 2 * 4 + index] + 0.1_f64.powi(exponents[rank]) * numbers[rank * 4 + index])
        };
        let vectors: Vec<Vec<f64>> =
            (0..ranks).map(|rank| (0..elements).map(|index| value(rank, index)).collect()).collect();
        let norms = vectors.iter().map(|vector| dot(vector, vector).sqrt()).sum::<f64>();
        let (found, _) = adasum(&vectors);
        // A combination is at most half longer than both operands together.
        prop_assert!(dot(&found, &found).sqrt() <= 1.6_f64.powi(5) * norms, "{:?} of {:?}", found, vectors);
    }
}

/// Whether a number is what was there before and the terms, in any order; orders differ in what they round, and in whether
/// finite terms overflow on the way.
fn is_sum(found: f64, before: f64, terms: &[f64]) -> bool {
    if terms.iter().any(|term| term.is_nan()) {
        return found.is_nan();
    }
    let magnitude = before + terms.iter().map(|term| term.abs()).sum::<f64>();
    if magnitude.is_finite() {
        let expected = before + terms.iter().sum::<f64>();
        return (found - expected).abs() <= 1e-13 * magnitude;
    }
    terms.iter().all(|term| term.is_finite()) || !found.is_finite()
}

/// What the kernels give, and the greatest magnitude of a value that takes part.
fn adasum(vectors: &[Vec<f64>]) -> (Vec<f64>, f64) {
    let blocks: Vec<Vec<u8>> =
        vectors.iter().map(|vector| vector.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let operands: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    let mut gram = vec![0.0; operands.len() * (operands.len() + 1) / 2];
    add_products(DType::F64, &operands, &mut gram).expect("equal lengths");
    let weights = weights(ReduceOp::Adasum, operands.len(), &gram).expect("a whole matrix");
    let mut into = vec![0; blocks[0].len()];
    reduce_n(DType::F64, ReduceOp::Adasum, &operands, &weights, &mut into).expect("equal lengths");
    let magnitude = vectors.iter().flatten().fold(0.0, |most, value| f64::max(most, value.abs()));
    (into.chunks(8).map(|value| f64::from_bits(load(value))).collect(), magnitude)
}

/// Adasum as it is described, on whole vectors: excess ranks fold in pairs, then halves combine. And how many times longer
/// the longest operands were, all in all, than what they left.
fn recursion(vectors: &[Vec<f64>]) -> (Vec<f64>, f64) {
    let mut operands: Vec<Operand> = vectors.iter().map(|vector| Operand::new(vector.clone())).collect();
    let power = (0..).map(|exponent| 1 << exponent).take_while(|power| *power <= vectors.len()).last().unwrap_or(1);
    let excess = vectors.len() - power;
    let folded: Vec<Operand> = operands[..2 * excess].chunks(2).map(|pair| pair[0].combined(&pair[1])).collect();
    operands.splice(..2 * excess, folded);
    let result = halves(&operands);
    (result.vector, result.cancelled)
}

fn halves(operands: &[Operand]) -> Operand {
    match operands {
        [only] => only.clone(),
        _ => {
            let (left, right) = operands.split_at(operands.len() / 2);
            halves(left).combined(&halves(right))
        }
    }
}

#[derive(Clone)]
struct Operand {
    vector: Vec<f64>,
    /// The lengths of all ranks' parts.
    length: f64,
    cancelled: f64,
}

impl Operand {
    fn new(vector: Vec<f64>) -> Self {
        Self { length: dot(&vector, &vector).sqrt(), vector, cancelled: 1.0 }
    }

    fn combined(&self, other: &Self) -> Self {
        let between = dot(&self.vector, &other.vector);
        let factor = |operand: &Self| {
            let square = dot(&operand.vector, &operand.vector);
            if square.sqrt() < f64::MIN_POSITIVE.sqrt() { 1.0 } else { 1.0 - between / (2.0 * square) }
        };
        let (here, there) = (factor(self), factor(other));
        let vector: Vec<f64> = self.vector.iter().zip(&other.vector).map(|(a, b)| here * a + there * b).collect();
        let length = here.abs() * self.length + there.abs() * other.length;
        let left = dot(&vector, &vector).sqrt();
        let cancelled = if length == 0.0 { 1.0 } else { length / left };
        Self { vector, length, cancelled: cancelled.max(self.cancelled).max(other.cancelled) }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn adasum_of_textbook_cases() {
    let of = |vectors: &[&[f64]]| adasum(&vectors.iter().map(|vector| vector.to_vec()).collect::<Vec<_>>()).0;
    assert_eq!(of(&[&[3.0, 0.0], &[0.0, 4.0]]), [3.0, 4.0], "orthogonal vectors add");
    assert_eq!(of(&[&[1.0, 2.0], &[1.0, 2.0]]), [1.0, 2.0], "equal vectors average");
    assert_eq!(of(&[&[1.0, 2.0], &[0.0, 0.0]]), [1.0, 2.0], "zeros change nothing");
    assert_eq!(of(&[&[1.0], &[-1.0]]), [0.0], "opposites cancel");
    assert_eq!(
        of(&[&[-0.0, 5.0]]).map_bits(),
        [(-0.0_f64).to_bits(), 5.0_f64.to_bits()],
        "one rank's value is the result"
    );
    assert_eq!(of(&[&[2.0], &[2.0], &[2.0], &[2.0], &[2.0]]), [2.0], "at any number of ranks");
    assert_eq!(of(&[&[1.0], &[-1.0], &[7.0]]), [7.0], "what cancels out counts as zero afterwards");
}

trait MapBits {
    fn map_bits(&self) -> Vec<u64>;
}

impl MapBits for Vec<f64> {
    fn map_bits(&self) -> Vec<u64> {
        self.iter().map(|value| value.to_bits()).collect()
    }
}

#[test]
fn non_finite_values_propagate_through_adasum() {
    for poison in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e200] {
        for ranks in 2..6 {
            let mut vectors = vec![vec![1.0, 0.0]; ranks];
            vectors[ranks - 1][1] = poison;
            let (found, _) = adasum(&vectors);
            assert!(found.iter().all(|value| value.is_nan()), "{poison} at {ranks} ranks: {found:?}");
        }
    }
    let one = reduced(DType::F64, ReduceOp::Adasum, &[vec![f64::INFINITY.to_bits()]], &[1.0]);
    assert_eq!(one, [f64::INFINITY.to_bits()]);
}

#[test]
fn a_clipped_rank_does_not_poison() {
    let ranks = [vec![1.0_f64.to_bits()], vec![f64::NAN.to_bits()], vec![3.0_f64.to_bits()]];
    let mut squares = [0.0; 3];
    for (values, sum) in ranks.iter().zip(&mut squares) {
        add_sum_of_squares(DType::F64, &bytes_of(DType::F64, values), sum).expect("one element");
    }
    let weights = weights(ReduceOp::ClippedMean, 3, &squares).expect("a sum for each rank");
    assert_eq!(weights, [1.0 / 3.0, 0.0, 1.0 / 3.0]);
    let found = reduced(DType::F64, ReduceOp::ClippedMean, &ranks, &weights);
    assert_eq!(f64::from_bits(found[0]), 1.0 / 3.0 + 3.0 / 3.0);
    let nothing = reduced(DType::F64, ReduceOp::ClippedMean, &ranks, &[0.0; 3]);
    assert_eq!(nothing, [0], "a sum of nothing is +0");
}

/// A median of many ranks, more elements than any block, in every type; the length is no multiple of anything.
#[test]
fn large_blocks() {
    for dtype in FLOATS {
        for ranks in [2, 33, 256] {
            let format = Format::of(dtype);
            let value = |rank: usize, index: usize| format.round((rank * 31 + index * 17) as f64 % 101.0 - 50.0);
            let values: Vec<Vec<u64>> =
                (0..ranks).map(|rank| (0..777).map(|index| value(rank, index)).collect()).collect();
            let medians = reduced(dtype, ReduceOp::Median, &values, &[]);
            for (index, found) in medians.into_iter().enumerate() {
                let column = (0..ranks).map(|rank| value(rank, index)).collect();
                assert_eq!(found, median_reference(dtype, column), "{dtype} {ranks} {index}");
            }
            let sums = reduced(dtype, ReduceOp::ClippedMean, &values, &vec![0.125; ranks]);
            for (index, found) in sums.into_iter().enumerate() {
                let sum: f64 = (0..ranks).map(|rank| 0.125 * format.value(value(rank, index))).sum();
                assert_eq!(format.value(found), format.value(rounded(dtype, sum)), "{dtype} {ranks} {index}");
            }
        }
    }
}

#[test]
fn errors_name_what_does_not_fit() {
    let (median, clipped, adasum) = (ReduceOp::Median, ReduceOp::ClippedMean, ReduceOp::Adasum);
    let reduce = |dtype, op, operands: &[&[u8]], weights: &[f64]| reduce_n(dtype, op, operands, weights, &mut [0; 4]);
    let (block, f32) = (&[0_u8; 4][..], DType::F32);
    assert_eq!(
        reduce(f32, ReduceOp::Sum, &[block], &[]),
        Err(KernelError::Operation { dtype: f32, op: ReduceOp::Sum })
    );
    assert_eq!(
        reduce(DType::I32, median, &[block], &[]),
        Err(KernelError::Operation { dtype: DType::I32, op: median })
    );
    assert_eq!(reduce(f32, median, &[], &[]), Err(KernelError::NoRanks));
    assert_eq!(reduce(f32, median, &[block, &[0; 8]], &[]), Err(KernelError::Lengths { accumulator: 4, other: 8 }));
    assert_eq!(reduce(f32, median, &[&[0; 8]], &[]), Err(KernelError::Lengths { accumulator: 8, other: 4 }));
    assert_eq!(reduce(f32, median, &[&[0; 3]], &[]), Err(KernelError::Length { dtype: f32, bytes: 3 }));
    assert_eq!(reduce(f32, median, &[block], &[1.0]), Err(KernelError::Weights { op: median, needed: 0, given: 1 }));
    assert_eq!(reduce(f32, clipped, &[block], &[]), Err(KernelError::Weights { op: clipped, needed: 1, given: 0 }));
    assert_eq!(weights(adasum, 0, &[]), Err(KernelError::NoRanks));
    assert_eq!(weights(median, 1, &[1.0]), Err(KernelError::NoWeights { op: median }));
    let measures = Err(KernelError::Measures { op: adasum, ranks: 3, needed: 6, given: 5 });
    assert_eq!(weights(adasum, 3, &[0.0; 5]), measures);
    assert_eq!(add_products(f32, &[block; 3], &mut [0.0; 5]), measures.map(drop));
    assert_eq!(add_sum_of_squares(f32, &[0; 5], &mut 0.0), Err(KernelError::Length { dtype: f32, bytes: 5 }));
}

#[test]
fn codecs_reject_types_they_do_not_encode() {
    for dtype in DType::ALL {
        for codec in Codec::ALL {
            let bytes = dtype.size_bytes();
            let fits = codec != Codec::None && dtype == DType::F32;
            let refused = (!fits).then_some(KernelError::Codec { codec, dtype });
            assert_eq!(encode(codec, dtype, &vec![0; bytes], &mut [0; 2]).err(), refused);
            assert_eq!(decode(codec, dtype, &[0; 2], &mut vec![0; bytes]).err(), refused);
        }
    }
    let encoded = Err(KernelError::Encoded { codec: Codec::F16, expected: 4, given: 2 });
    assert_eq!(encode(Codec::F16, DType::F32, &[0; 8], &mut [0; 2]), encoded);
    assert_eq!(decode(Codec::F16, DType::F32, &[0; 2], &mut [0; 8]), encoded);
    let length = Err(KernelError::Length { dtype: DType::F32, bytes: 6 });
    assert_eq!(encode(Codec::F16, DType::F32, &[0; 6], &mut [0; 2]), length);
}

#[test]
fn n_ary_reductions_are_for_floats_and_only_scaled_at_the_end() {
    for op in [ReduceOp::Median, ReduceOp::ClippedMean, ReduceOp::Adasum] {
        assert!(is_nary(op));
        for dtype in DType::ALL {
            assert_eq!(supports(dtype, op), dtype.is_float());
            let mut bytes = [0; 8];
            let refused = (!dtype.is_float()).then_some(KernelError::Operation { dtype, op });
            assert_eq!(finish(dtype, op, 3, 2.0, &mut bytes).err(), refused);
        }
        let mut bytes = 1.5_f32.to_le_bytes();
        finish(DType::F32, op, 3, 2.0, &mut bytes).expect("one element");
        assert_eq!(f32::from_le_bytes(bytes), 3.0);
    }
}
