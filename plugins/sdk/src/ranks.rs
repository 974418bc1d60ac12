//! Reductions over all ranks' values of an element: sorting, and weighted sums. The results have the same bits as
//! ronde's native operations.

use crate::abi::limits::RANKS_MAX;
use crate::element::{Float, Wide};
use crate::lanes::zip;
use crate::{Bf16, F16, Operands};

/// Elements that are sorted together: several vectors of keys.
pub const LANES: usize = 32;
/// One key for each of [`LANES`] elements.
pub type Row<W> = [<W as Wide>::Key; LANES];

/// Scratch space to sort all ranks' values of a few elements.
#[derive(Debug)]
pub struct Rows {
    singles: [Row<f32>; RANKS_MAX as usize],
    doubles: [Row<f64>; RANKS_MAX as usize],
}

/// A type that [`Rows`] can sort.
pub trait Sorted: Float {
    #[doc(hidden)]
    fn rows(rows: &mut Rows) -> &mut [Row<Self::Wide>];
}

macro_rules! sorted {
    ($($type:ty: $rows:ident),*) => {
        $(impl Sorted for $type {
            fn rows(rows: &mut Rows) -> &mut [Row<Self::Wide>] {
                &mut rows.$rows
            }
        })*
    };
}

sorted!(f32: singles, F16: singles, Bf16: singles, f64: doubles);

impl Rows {
    /// Empty scratch space.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "too large to be made by the way")]
    pub const fn new() -> Self {
        Self { singles: [[0; LANES]; RANKS_MAX as usize], doubles: [[0; LANES]; RANKS_MAX as usize] }
    }

    /// Sorts the ranks' values of each element in ascending order, -0 before +0, and writes the results of `pick`. An
    /// element that is NaN on any rank is NaN in the result.
    ///
    /// `pick` receives the sorted rows, one for each rank, and fills in the results of [`LANES`] elements; those of NaN
    /// are replaced afterwards. There may be at most [`RANKS_MAX`] operands.
    pub fn reduce<E: Sorted>(
        &mut self,
        operands: &Operands<'_, E>,
        output: &mut [E],
        pick: impl Fn(&[Row<E::Wide>], &mut [E::Wide; LANES]),
    ) {
        let ranks = operands.ranks();
        let rows = &mut E::rows(self)[..ranks];
        let mut picked = [E::Wide::default(); LANES];
        for (group, output) in output.chunks_mut(LANES).enumerate() {
            let start = group * LANES;
            for (row, operand) in rows.iter_mut().zip(operands.iter()) {
                let mut values = [E::Wide::default(); LANES];
                let loaded = values.iter_mut().zip(&operand[start..start + output.len()]);
                loaded.for_each(|(wide, value)| *wide = value.widen());
                row.iter_mut().zip(&values).for_each(|(key, value)| *key = value.key());
            }
            for_each_exchange(ranks, |low, high| exchange(rows, low, high));
            pick(rows, &mut picked);
            // After sorting, NaN is at one of the ends, depending on its sign.
            let ends = rows[0].iter().zip(&rows[ranks - 1]);
            for (value, (least, greatest)) in picked.iter_mut().zip(ends) {
                let nan = E::Wide::from_key(*least).not_a_number() | E::Wide::from_key(*greatest).not_a_number();
                *value = if nan { E::Wide::nan() } else { *value };
            }
            output.iter_mut().zip(&picked).for_each(|(element, value)| *element = E::narrow(*value));
        }
    }
}

/// Moves the smaller keys of each lane to `low`, the larger ones to `high`.
#[inline(always)]
fn exchange<K: Copy + Ord>(rows: &mut [[K; LANES]], low: usize, high: usize) {
    let (before, rest) = rows.split_at_mut(high);
    for (a, b) in before[low].iter_mut().zip(&mut rest[0]) {
        (*a, *b) = ((*a).min(*b), (*a).max(*b));
    }
}

/// Pairs of rows, the lower one first, to compare and exchange in this order so that any number of rows gets sorted: K.
/// E. Batcher's merge exchange, "Sorting networks and their applications", AFIPS 1968, as Algorithm M of D. Knuth, "The
/// Art of Computer Programming" 5.2.2. The pairs do not depend on the values, so whole vectors of elements are sorted
/// at once.
fn for_each_exchange(rows: usize, mut exchange: impl FnMut(usize, usize)) {
    let largest = rows.next_power_of_two() / 2;
    let mut p = largest;
    while p > 0 {
        let (mut q, mut remainder, mut distance) = (largest, 0, p);
        loop {
            for low in (0..rows.saturating_sub(distance)).filter(|low| low & p == remainder) {
                exchange(low, low + distance);
            }
            if q == p {
                break;
            }
            distance = q - p;
            q /= 2;
            remainder = p;
        }
        p /= 2;
    }
}

/// Adds `weight * value` rank by rank in f64 and rounds once. A weight of exactly 0 ignores the rank's values, even
/// NaN. There must be as many weights as operands.
pub fn weighted_sum<E: Float>(operands: &Operands<'_, E>, weights: &[f64], output: &mut [E]) {
    if weights.iter().all(|weight| *weight == 0.0) {
        output.fill(E::default());
        return;
    }
    let mut sums = [0.0; GROUP];
    for (group, output) in output.chunks_mut(GROUP).enumerate() {
        let start = group * GROUP;
        let sums = &mut sums[..output.len()];
        // Adding anything to -0 gives that value, even another zero.
        sums.fill(-0.0);
        for (operand, &weight) in operands.iter().zip(weights) {
            if weight != 0.0 {
                let values = &operand[start..start + output.len()];
                zip(sums, values, |sum, value| *sum += weight * value.to_f64());
            }
        }
        zip(output, sums, |element, sum| *element = E::from_f64(sum));
    }
}

/// The sum of the squares of all values in f64. Partial sums follow a fixed pattern, so the result depends only on the
/// values and on where they were split into spans.
#[must_use]
pub fn sum_of_squares<E: Float>(values: &[E]) -> f64 {
    let mut block = [0.0; BLOCK];
    let mut sum = 0.0;
    for values in values.chunks(BLOCK) {
        block.fill(0.0);
        block.iter_mut().zip(values).for_each(|(wide, value)| *wide = value.to_f64());
        let mut partial = [0.0; PARTIAL];
        for values in block.as_chunks::<PARTIAL>().0 {
            partial.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * value);
        }
        let [a, b, c, d, e, f, g, h] = partial;
        sum += ((a + e) + (c + g)) + ((b + f) + (d + h));
    }
    sum
}

/// Elements that are summed together; they fit a first-level cache.
const GROUP: usize = 256;
/// Elements of a block that is summed separately.
const BLOCK: usize = 128;
/// Partial sums of a block.
const PARTIAL: usize = 8;

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use ronde_collectives::kernels;
    use ronde_wire::{DType, ReduceOp};

    use super::*;
    use crate::Element;
    use crate::math::Random;

    /// By the 0-1 principle, a network that sorts all sequences of zeros and ones sorts everything.
    #[test]
    fn the_network_sorts() {
        for rows in 1..=11 {
            for code in 0..1_u32 << rows {
                let mut bits: Vec<u32> = (0..rows).map(|row| code >> row & 1).collect();
                for_each_exchange(rows, |low, high| {
                    (bits[low], bits[high]) = (bits[low].min(bits[high]), bits[low].max(bits[high]));
                });
                assert!(bits.is_sorted(), "{rows} rows, {code:b}");
            }
        }
    }

    /// Arbitrary bits, including NaN and infinity, and numbers that are close together.
    fn values<E: Float>(random: &mut Random, count: usize) -> Vec<E> {
        let mut value = || {
            let any = f64::from(f32::from_bits(random.below(u32::MAX)));
            if random.below(8) == 0 { any } else { f64::from(random.below(1_000)) / 250.0 - 2.0 }
        };
        (0..count).map(|_| E::from_f64(value())).collect()
    }

    fn bytes<E: Element>(values: &[E]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * E::BYTES];
        bytes.chunks_mut(E::BYTES).zip(values).for_each(|(bytes, value)| value.write(bytes));
        bytes
    }

    #[test]
    fn sums_and_squares_are_the_native_ones() {
        native::<F16>(DType::F16);
        native::<Bf16>(DType::Bf16);
        native::<f32>(DType::F32);
        native::<f64>(DType::F64);
    }

    fn native<E: Float>(dtype: DType) {
        let mut random = Random::new(5);
        for elements in [1, 7, 128, 1_000] {
            let input: Vec<E> = values(&mut random, 4 * elements);
            let operands = Operands::within(&input, 4, elements, elements).expect("they fit");
            let native: Vec<Vec<u8>> = operands.iter().map(bytes).collect();
            let native: Vec<&[u8]> = native.iter().map(Vec::as_slice).collect();
            for weights in [[0.1, -1.3, 0.0, 1.0 / 3.0], [0.0; 4]] {
                let mut output = vec![E::default(); elements];
                weighted_sum(&operands, &weights, &mut output);
                let mut expected = vec![0; elements * E::BYTES];
                kernels::reduce_n(dtype, ReduceOp::Adasum, &native, &weights, &mut expected).expect("lengths fit");
                assert!(bytes(&output) == expected, "{elements} of {dtype}");
            }
            let finite: Vec<E> = (0..elements).map(|_| E::from_f64(f64::from(random.below(999)) / 7.0)).collect();
            let mut expected = 0.0;
            kernels::add_sum_of_squares(dtype, &bytes(&finite), &mut expected).expect("whole elements");
            assert_eq!(sum_of_squares(&finite).to_bits(), expected.to_bits(), "{elements} of {dtype}");
        }
    }
}
