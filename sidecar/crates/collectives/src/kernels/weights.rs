//! From what was measured to one weight for each rank.

use std::ops::Range;

use ronde_wire::ReduceOp;

use super::KernelError;
use super::measure::gram_len;

/// The weights by which [`reduce_n`](super::reduce_n) sums the values of `ranks` ranks, in rank order.
///
/// **Clipped mean**: `measures` holds each rank's sum of squares. With `m` the median of their square roots, the norms (the
/// mean of the two middle ones when `ranks` is even; what is not finite counts as infinite), a rank's weight is
/// `min(1, m / norm) / ranks`; that of a norm of 0 is `1 / ranks`, and that of an infinite norm or NaN is 0, which leaves the
/// rank out.
///
/// **Adasum** (S. Maleki et al., "Scaling distributed training with adaptive summation", 2020): `measures` holds the
/// ranks' Gram matrix, the upper triangle with the diagonal row by row. Two operands become
/// `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`, where an operand shorter than `sqrt(f64::MIN_POSITIVE)` has the factor 1.
/// With `p` the largest power of two that is not above `ranks`, the first `2 (ranks - p)` ranks combine in pairs of
/// neighbours, then `p` operands do, level by level. All operands are linear combinations of the ranks' values, so all
/// inner products follow from the matrix, and so does one weight for each rank. Where operands cancel so far that nothing
/// but the rounding of the matrix is left of `|a|^2`, the factor is that of a zero; the result's length is bounded all the
/// same. When a number of the matrix is not finite, the weights of two or more ranks are NaN, as the combination itself
/// would be.
///
/// # Errors
/// [`KernelError`] when the operation has no weights, there are no ranks, or the number of measures does not fit.
pub fn weights(op: ReduceOp, ranks: usize, measures: &[f64]) -> Result<Vec<f64>, KernelError> {
    if ranks == 0 {
        return Err(KernelError::NoRanks);
    }
    let needed = match op {
        ReduceOp::ClippedMean => ranks,
        ReduceOp::Adasum => gram_len(ranks),
        _ => return Err(KernelError::NoWeights { op }),
    };
    if measures.len() != needed {
        return Err(KernelError::Measures { op, ranks, needed, given: measures.len() });
    }
    Ok(if op == ReduceOp::ClippedMean { clipped_mean(measures) } else { adaptive_sum(ranks, measures) })
}

fn clipped_mean(squares: &[f64]) -> Vec<f64> {
    let ranks = squares.len() as f64;
    let norms: Vec<f64> = squares
        .iter()
        .map(|square| square.sqrt())
        .map(|norm| if norm.is_nan() { f64::INFINITY } else { norm })
        .collect();
    let mut sorted = norms.clone();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    let weight = |&norm: &f64| {
        if norm.is_infinite() {
            0.0
        } else if norm <= middle {
            1.0 / ranks
        } else {
            middle / norm / ranks
        }
    };
    norms.iter().map(weight).collect()
}

fn adaptive_sum(ranks: usize, gram: &[f64]) -> Vec<f64> {
    if ranks > 1 && !gram.iter().all(|entry| entry.is_finite()) {
        return vec![f64::NAN; ranks];
    }
    let gram = Gram { ranks, entries: gram };
    let mut weights = vec![1.0; ranks];
    // Operands are runs of ranks; each ends before the number in the list.
    let mut ends: Vec<usize> = (1..=ranks).collect();
    let power = if ranks.is_power_of_two() { ranks } else { ranks.next_power_of_two() / 2 };
    let mut pairs = if ranks > power { ranks - power } else { ranks / 2 };
    while ends.len() > 1 {
        let mut start = 0;
        for pair in ends[..2 * pairs].chunks(2) {
            gram.combine(&mut weights, start..pair[0], pair[0]..pair[1]);
            start = pair[1];
        }
        let mut index = 0;
        ends.retain(|_| {
            index += 1;
            index > 2 * pairs || index % 2 == 0
        });
        pairs = ends.len() / 2;
    }
    weights
}

/// The inner products of the ranks' values.
struct Gram<'a> {
    ranks: usize,
    /// The upper triangle with the diagonal, row by row.
    entries: &'a [f64],
}

impl Gram<'_> {
    /// Two operands, each the weighted sum of its ranks, become one: their weights are multiplied by the factors.
    fn combine(&self, weights: &mut [f64], left: Range<usize>, right: Range<usize>) {
        let between = self.product(weights, &left, &right).value;
        let left_factor = factor(between, &self.product(weights, &left, &left));
        let right_factor = factor(between, &self.product(weights, &right, &right));
        weights[left].iter_mut().for_each(|weight| *weight *= left_factor);
        weights[right].iter_mut().for_each(|weight| *weight *= right_factor);
    }

    /// The inner product of two operands.
    fn product(&self, weights: &[f64], left: &Range<usize>, right: &Range<usize>) -> Product {
        let mut product = Product { value: 0.0, magnitude: 0.0 };
        for row in left.clone() {
            for column in right.clone() {
                let term = weights[row] * weights[column] * self.entry(row, column);
                product.value += term;
                product.magnitude += term.abs();
            }
        }
        product
    }

    fn entry(&self, row: usize, column: usize) -> f64 {
        let (row, column) = (row.min(column), row.max(column));
        // The rows above have `ranks`, `ranks - 1`, ... entries.
        self.entries[row * (2 * self.ranks - row + 1) / 2 + column - row]
    }
}

/// A sum, and that of its terms' magnitudes, which says how much of the sum is rounding.
struct Product {
    value: f64,
    magnitude: f64,
}

/// What an operand is multiplied by, given its inner product with the other one and with itself.
fn factor(between: f64, itself: &Product) -> f64 {
    let rounding = itself.magnitude * ROUNDING;
    if itself.value < f64::MIN_POSITIVE || itself.value <= rounding {
        1.0
    } else {
        1.0 - between / (2.0 * itself.value)
    }
}

/// Relative to the sum of all magnitudes, what the rounding of a Gram matrix and of a sum of its entries leaves.
const ROUNDING: f64 = 16.0 * f64::EPSILON;
