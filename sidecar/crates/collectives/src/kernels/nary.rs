//! Reductions that see all ranks' values of an element at once: the median, and sums in which each rank has a weight.

use std::marker::PhantomData;

use ronde_wire::{DType, ReduceOp};

use super::sample::{Sample, Wide, with_sample};
use super::{KernelError, check_length, check_lengths, is_nary};

/// Reduces all ranks' blocks, given in rank order, to one.
///
/// [`ReduceOp::Median`] takes the middle value of each element, and the mean of the two middle ones when the number of
/// ranks is even, computed in f32 for types of up to four bytes and in f64 otherwise; -0 is less than +0, and NaN wins.
/// It has no weights. [`ReduceOp::ClippedMean`] and [`ReduceOp::Adasum`] add `weight * value` rank by rank in f64 and
/// round once; a weight of exactly 0 leaves the rank's values out, whatever they are. [`weights`](super::weights()) says
/// what weights are.
///
/// # Errors
/// [`KernelError`] when the operation is no n-ary one or not of this type, when there is nothing to reduce, or when
/// lengths or the number of weights do not fit; `into` is unchanged then.
pub fn reduce_n(
    dtype: DType,
    op: ReduceOp,
    operands: &[&[u8]],
    weights: &[f64],
    into: &mut [u8],
) -> Result<(), KernelError> {
    check_operands(dtype, op, operands)?;
    check_lengths(operands[0].len(), into.len())?;
    let needed = if op == ReduceOp::Median { 0 } else { operands.len() };
    if weights.len() != needed {
        return Err(KernelError::Weights { op, needed, given: weights.len() });
    }
    if op == ReduceOp::Median {
        with_sample!(dtype, op, E => median::<E>(operands, into));
    } else {
        with_sample!(dtype, op, E => weighted_sum::<E>(operands, weights, into));
    }
    Ok(())
}

/// There are operands, of one length that holds whole elements, and the operation reduces them all at once.
pub(super) fn check_operands(dtype: DType, op: ReduceOp, operands: &[&[u8]]) -> Result<(), KernelError> {
    if !is_nary(op) || !dtype.is_float() {
        return Err(KernelError::Operation { dtype, op });
    }
    let first = operands.first().ok_or(KernelError::NoRanks)?;
    check_length(dtype, first.len())?;
    operands.iter().try_for_each(|operand| check_lengths(first.len(), operand.len()))
}

fn weighted_sum<E: Sample>(operands: &[&[u8]], weights: &[f64], into: &mut [u8]) {
    if weights.iter().all(|weight| *weight == 0.0) {
        into.fill(0);
    } else {
        pulp::Arch::new().dispatch(WeightedSum::<E> { operands, weights, into, sample: PhantomData });
    }
}

struct WeightedSum<'a, E> {
    operands: &'a [&'a [u8]],
    weights: &'a [f64],
    into: &'a mut [u8],
    sample: PhantomData<E>,
}

impl<E: Sample> pulp::WithSimd for WeightedSum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let mut sums = [0.0; GROUP];
        let mut values = [E::Wide::default(); GROUP];
        let mut start = 0;
        for into in self.into.chunks_mut(GROUP * E::BYTES) {
            let (end, len) = (start + into.len(), into.len() / E::BYTES);
            // Nothing changes when it is added to this zero, not even the other one.
            sums.fill(-0.0);
            for (operand, &weight) in self.operands.iter().zip(self.weights) {
                if weight != 0.0 {
                    E::load(&operand[start..end], &mut values[..len]);
                    sums.iter_mut().zip(&values).for_each(|(sum, value)| *sum += weight * value.to_f64());
                }
            }
            E::store_f64(&sums[..len], into);
            start = end;
        }
    }
}

fn median<E: Sample>(operands: &[&[u8]], into: &mut [u8]) {
    let exchanges = sorting_network(operands.len());
    let rows = vec![[Default::default(); LANES]; operands.len()];
    pulp::Arch::new().dispatch(Median::<E> { operands, exchanges: &exchanges, rows, into });
}

struct Median<'a, E: Sample> {
    operands: &'a [&'a [u8]],
    exchanges: &'a [(usize, usize)],
    /// A row for each rank while a group of elements is sorted.
    rows: Vec<[<E::Wide as Wide>::Key; LANES]>,
    into: &'a mut [u8],
}

impl<E: Sample> pulp::WithSimd for Median<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(mut self, _: S) {
        let group_bytes = LANES * E::BYTES;
        let whole = self.into.len() / group_bytes * group_bytes;
        let into = std::mem::take(&mut self.into);
        let mut medians = [E::Wide::default(); LANES];
        for start in (0..whole).step_by(group_bytes) {
            // A length that the compiler knows, here and below.
            let end = start + group_bytes;
            self.load(|operand, values| E::load(&operand[start..end], values));
            self.sorted_medians(&mut medians);
            E::store(&medians, &mut into[start..end]);
        }
        if whole < into.len() {
            let rest = (into.len() - whole) / E::BYTES;
            self.load(|operand, values| E::load(&operand[whole..], &mut values[..rest]));
            self.sorted_medians(&mut medians);
            E::store(&medians[..rest], &mut into[whole..]);
        }
    }
}

impl<E: Sample> Median<'_, E> {
    /// A group of elements of each rank to its row.
    #[inline(always)]
    fn load(&mut self, load: impl Fn(&[u8], &mut [E::Wide; LANES])) {
        for (operand, row) in self.operands.iter().zip(&mut self.rows) {
            let mut values = [E::Wide::default(); LANES];
            load(operand, &mut values);
            row.iter_mut().zip(&values).for_each(|(key, value)| *key = value.key());
        }
    }

    /// Sorts the rows. NaN comes to one of the ends, by its sign.
    #[inline(always)]
    fn sorted_medians(&mut self, medians: &mut [E::Wide; LANES]) {
        for &(low, high) in self.exchanges {
            exchange(&mut self.rows, low, high);
        }
        let ranks = self.rows.len();
        let (least, greatest) = (&self.rows[0], &self.rows[ranks - 1]);
        let (lower, upper) = (&self.rows[(ranks - 1) / 2], &self.rows[ranks / 2]);
        for lane in 0..LANES {
            let (lower, upper) = (E::Wide::from_key(lower[lane]), E::Wide::from_key(upper[lane]));
            let median = if ranks % 2 == 1 { lower } else { lower.mean(upper) };
            let (least, greatest) = (E::Wide::from_key(least[lane]), E::Wide::from_key(greatest[lane]));
            let nan = least.not_a_number() | greatest.not_a_number();
            medians[lane] = if nan { E::Wide::nan() } else { median };
        }
    }
}

/// Lane by lane the lesser keys to `low`, the greater ones to `high`.
#[inline(always)]
fn exchange<K: Copy + Ord>(rows: &mut [[K; LANES]], low: usize, high: usize) {
    let (lower, upper) = rows.split_at_mut(high);
    for (a, b) in lower[low].iter_mut().zip(&mut upper[0]) {
        (*a, *b) = ((*a).min(*b), (*a).max(*b));
    }
}

/// Pairs to compare and exchange, in order, so that any number of rows ends sorted: K. E. Batcher's merge exchange, "Sorting
/// networks and their applications", AFIPS 1968, as Algorithm M of D. Knuth, "The Art of Computer Programming" 5.2.2. The
/// pairs do not depend on the values, so whole vectors of elements are sorted at once.
fn sorting_network(rows: usize) -> Vec<(usize, usize)> {
    let mut exchanges = Vec::new();
    let largest = rows.next_power_of_two() / 2;
    let mut p = largest;
    while p > 0 {
        let (mut q, mut remainder, mut distance) = (largest, 0, p);
        loop {
            let lower = (0..rows.saturating_sub(distance)).filter(|low| low & p == remainder);
            exchanges.extend(lower.map(|low| (low, low + distance)));
            if q == p {
                break;
            }
            distance = q - p;
            q /= 2;
            remainder = p;
        }
        p /= 2;
    }
    exchanges
}

/// Elements that are summed together: their sums and one rank's values stay in a first-level cache.
const GROUP: usize = 256;
/// Elements that are sorted together: four vectors of f32 keys, and with 256 ranks rows of 32 KiB.
const LANES: usize = 32;

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::super::float::{Brain, Half};
    use super::super::tests::block;
    use super::*;

    /// The baseline's instructions, the widest ones of this processor, and one element at a time.
    #[test]
    fn dispatch_variants_are_bit_identical() {
        variants::<Half>(DType::F16);
        variants::<Brain>(DType::Bf16);
        variants::<f32>(DType::F32);
        variants::<f64>(DType::F64);
    }

    fn variants<E: Sample>(dtype: DType) {
        let blocks: Vec<Vec<u8>> = (0..6).map(block).collect();
        let operands: Vec<&[u8]> = blocks.iter().map(|block| &block[..4_096]).collect();
        let weights = [0.1, 0.7, 0.0, -1.3, 1.0, 1.0 / 3.0];
        for op in [ReduceOp::Median, ReduceOp::Adasum] {
            let weights = if op == ReduceOp::Median { &[][..] } else { &weights };
            let reduced = |operands: &[&[u8]]| {
                let mut into = vec![0; operands[0].len()];
                reduce_n(dtype, op, operands, weights, &mut into).expect("equal lengths");
                into
            };
            let mut baseline = vec![0; 4_096];
            if op == ReduceOp::Median {
                let (exchanges, rows) = (sorting_network(6), vec![[Default::default(); LANES]; 6]);
                Median::<E> { operands: &operands, exchanges: &exchanges, rows, into: &mut baseline }
                    .with_simd(pulp::Scalar);
            } else {
                WeightedSum::<E> { operands: &operands, weights, into: &mut baseline, sample: PhantomData }
                    .with_simd(pulp::Scalar);
            }
            let singles = (0..4_096).step_by(E::BYTES).flat_map(|start| {
                let operands: Vec<&[u8]> = operands.iter().map(|operand| &operand[start..start + E::BYTES]).collect();
                reduced(&operands)
            });
            let dispatched = reduced(&operands);
            assert!(dispatched == baseline && dispatched.iter().copied().eq(singles), "{op} of {dtype}");
        }
    }

    /// By the 0-1 principle a network that sorts all sequences of zeros and ones sorts everything.
    #[test]
    fn the_network_sorts() {
        for rows in 0..=12 {
            let exchanges = sorting_network(rows);
            for code in 0..1_u32 << rows {
                let mut bits: Vec<u32> = (0..rows).map(|row| code >> row & 1).collect();
                for &(low, high) in &exchanges {
                    assert!(low < high && high < rows);
                    (bits[low], bits[high]) = (bits[low].min(bits[high]), bits[low].max(bits[high]));
                }
                assert!(bits.is_sorted(), "{rows} rows, {code:b}");
            }
        }
    }

    #[test]
    fn the_network_sorts_many_rows() {
        for rows in 1..=256 {
            let exchanges = sorting_network(rows);
            // A step at every place, in an order that mixes the rows.
            for ones in 0..=rows {
                let mut bits: Vec<bool> = (0..rows).map(|row| row * 7_919 % rows.max(2) < ones).collect();
                for &(low, high) in &exchanges {
                    (bits[low], bits[high]) = (bits[low] & bits[high], bits[low] | bits[high]);
                }
                assert!(bits.is_sorted(), "{rows} rows, {ones} ones");
            }
        }
    }
}
