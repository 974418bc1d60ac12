//! All ranks' values of a span.

use crate::element::Element;

/// The operands of a reduction, one for each rank, in rank order and of one length.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    input: &'a [E],
    ranks: usize,
    /// Elements from one operand to the next.
    stride: usize,
    elements: usize,
}

impl<'a, E: Element> Operands<'a, E> {
    /// The operands in `input`, `stride` elements apart; `None` if they do not fit.
    #[must_use]
    pub fn within(input: &'a [E], ranks: usize, stride: usize, elements: usize) -> Option<Self> {
        let before_last = ranks.checked_sub(1)?.checked_mul(stride)?;
        let fits = before_last.checked_add(elements)? <= input.len() && (elements <= stride || ranks == 1);
        fits.then_some(Self { input, ranks, stride, elements })
    }

    /// How many there are: at least 1.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// One rank's values.
    ///
    /// # Panics
    /// When there is no such rank.
    #[inline]
    #[must_use]
    pub fn rank(&self, rank: usize) -> &'a [E] {
        &self.input[rank * self.stride..][..self.elements]
    }

    /// Each rank's values.
    #[inline]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [E]> + use<'a, E> {
        let operands = *self;
        (0..operands.ranks).map(move |rank| operands.rank(rank))
    }

    /// Combines the operands in rank order: what a pairwise reducer does with its two.
    #[inline]
    pub fn fold_into(&self, output: &mut [E], combine: impl Fn(E, E) -> E) {
        output.copy_from_slice(self.rank(0));
        for rank in 1..self.ranks {
            output.iter_mut().zip(self.rank(rank)).for_each(|(left, right)| *left = combine(*left, *right));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Operands;

    #[test]
    fn operands_lie_within_their_input() {
        let input = [1_i32, 2, 0, 0, 3, 4, 0, 0, 5, 6];
        let operands = Operands::within(&input, 3, 4, 2).expect("they fit");
        assert!(operands.iter().eq([&[1, 2][..], &[3, 4], &[5, 6]]));
        let mut sums = [0; 2];
        operands.fold_into(&mut sums, |left, right| left + right);
        assert_eq!(sums, [9, 12]);
        assert!(Operands::within(&input, 3, 4, 3).is_none(), "beyond the end");
        assert!(Operands::within(&input, 2, 2, 3).is_none(), "overlapping");
        assert!(Operands::within(&input, 0, 4, 1).is_none(), "no ranks");
        assert!(Operands::within(&input, usize::MAX, usize::MAX, 1).is_none(), "overflow");
    }
}
