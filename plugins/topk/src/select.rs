//! Selects the largest values without sorting all of them.

use ronde_plugin::Float;
use ronde_plugin::residual::magnitude_bits;

use crate::BLOCK;

/// Finds the largest magnitudes of a block. What it holds is scratch space.
///
/// The largest magnitude of each group of values is known. The k-th largest of these maxima is reached by at least k values,
/// and, if k is a small share of the groups, by few more. One pass over the groups therefore finds the candidates, and the
/// exact choice is made among them. (Like the bounds of block maxima in S. Ding and T. Suel, "Faster top-k document
/// retrieval using block-max indexes", SIGIR 2011.)
pub(crate) struct Selector {
    /// The largest magnitude of each group: four for each [`ROUND`], one per lane, and one for the remaining elements.
    maxima: [u32; GROUPS_MAX],
    /// Magnitude and position of candidates, in the order of positions.
    candidates: [u64; BLOCK],
    /// The same, unordered.
    shuffled: [u64; BLOCK],
}

impl core::fmt::Debug for Selector {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Selector")
    }
}

impl Selector {
    pub(crate) const fn new() -> Self {
        Self { maxima: [0; GROUPS_MAX], candidates: [0; BLOCK], shuffled: [0; BLOCK] }
    }

    /// Adds values to sums, and records the largest magnitude of each group of sums. Returns the bits of the largest
    /// one. Both slices have the same length, at most a block.
    pub(crate) fn add<E: Float<Wide = f32>>(&mut self, values: &[E], sums: &mut [f32]) -> u32 {
        let (values, rest) = values.as_chunks::<ROUND>();
        let (rounds, sums_of_rest) = sums.as_chunks_mut::<ROUND>();
        let (maxima, _) = self.maxima.as_chunks_mut::<LANES>();
        let mut greatest = [0; LANES];
        for ((sums, values), maxima) in rounds.iter_mut().zip(values).zip(maxima) {
            let mut most = [0; LANES];
            for (sums, values) in sums.as_chunks_mut::<LANES>().0.iter_mut().zip(values.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    sums[lane] += values[lane].widen();
                    most[lane] = most[lane].max(magnitude_bits(sums[lane]));
                }
            }
            for lane in 0..LANES {
                greatest[lane] = greatest[lane].max(most[lane]);
            }
            *maxima = most;
        }
        let mut last = 0;
        for (sum, value) in sums_of_rest.iter_mut().zip(rest) {
            *sum += value.widen();
            last = last.max(magnitude_bits(*sum));
        }
        self.maxima[rounds.len() * LANES] = last;
        greatest.into_iter().fold(last, u32::max)
    }

    /// The positions of the `kept` largest magnitudes of the sums that [`Self::add`] updated, ascending; among equal
    /// ones the first positions win. Zeros are omitted. `greatest` is the result of [`Self::add`].
    pub(crate) fn largest(
        &mut self,
        sums: &[f32],
        greatest: u32,
        kept: usize,
    ) -> impl Iterator<Item = u16> + Clone + use<'_> {
        let reached = self.reached(sums.len(), kept, greatest);
        let count = self.collect(sums, reached);
        let least = if kept == 0 {
            u64::MAX
        } else if count <= kept {
            0
        } else {
            let shuffled = &mut self.shuffled[..count];
            shuffled.copy_from_slice(&self.candidates[..count]);
            *shuffled.select_nth_unstable(count - kept).1
        };
        let chosen = self.candidates[..count].iter().filter(move |candidate| **candidate >= least);
        chosen.map(|candidate| place(*candidate))
    }

    /// A magnitude that at least `kept` sums reach (if so many are not zero), but few more. It is 1, which all but
    /// zeros reach, if the groups carry too little information.
    ///
    /// Repeatedly splits a range of magnitudes into parts and counts the maxima that reach the start of each. The
    /// search starts near the largest magnitude and falls back to the range below.
    #[allow(clippy::cast_possible_truncation, reason = "a few parts")]
    fn reached(&self, len: usize, kept: usize, greatest: u32) -> u32 {
        let maxima = &self.maxima[..len / ROUND * LANES + usize::from(!len.is_multiple_of(ROUND))];
        if kept == 0 || kept > maxima.len() - maxima.len() / 8 {
            return 1;
        }
        let mut low = greatest.saturating_sub(NEAR);
        let mut width = greatest - low;
        while width > PRECISION {
            width = width.div_ceil(PARTS as u32);
            let counts = counts(maxima, core::array::from_fn(|part| low + width * part as u32));
            match counts.iter().take_while(|count| **count as usize >= kept).count() as u32 {
                0 => (low, width) = (0, low),
                parts => low += width * (parts - 1),
            }
        }
        low.max(1)
    }

    /// Collects the magnitudes that are at least `least`. Returns their number.
    fn collect(&mut self, sums: &[f32], least: u32) -> usize {
        let Self { maxima, candidates, .. } = self;
        let mut found = Found { candidates, count: 0, least };
        let (rounds, rest) = sums.as_chunks::<ROUND>();
        for (round, (sums, maxima)) in rounds.iter().zip(maxima.as_chunks::<LANES>().0).enumerate() {
            // Few groups contain any.
            if !maxima.iter().fold(false, |any, most| any | (*most >= least)) {
                continue;
            }
            let before = found.count;
            for (lane, most) in maxima.iter().enumerate() {
                if *most >= least {
                    found.push((round * ROUND + lane..).step_by(LANES).zip(sums[lane..].iter().step_by(LANES)));
                }
            }
            if found.count > before + 1 {
                found.candidates[before..found.count].sort_unstable_by_key(|candidate| place(*candidate));
            }
        }
        found.push((rounds.len() * ROUND..).zip(rest));
        found.count
    }
}

/// Collected candidates.
struct Found<'a> {
    candidates: &'a mut [u64; BLOCK],
    count: usize,
    /// The least magnitude of a candidate.
    least: u32,
}

impl Found<'_> {
    /// Collects those of some sums that are large enough. This is hard to predict for a branch, so every sum is
    /// written, and the next one overwrites it unless it counts.
    #[allow(clippy::cast_possible_truncation, reason = "a place in a block")]
    #[inline(always)]
    fn push<'a>(&mut self, sums: impl Iterator<Item = (usize, &'a f32)>) {
        for (place, sum) in sums {
            // Among equal ones the earlier is the larger candidate.
            self.candidates[self.count] = u64::from(magnitude_bits(*sum)) << 16 | u64::from(!(place as u16));
            self.count += usize::from(magnitude_bits(*sum) >= self.least);
        }
    }
}

/// The position of a candidate in its block.
#[allow(clippy::cast_possible_truncation, reason = "a place is what the lower bits hold")]
fn place(candidate: u64) -> u16 {
    !(candidate as u16)
}

/// For each of some borders, how many maxima reach it. Unrolled, so that the compiler vectorises it.
#[inline(always)]
fn counts(maxima: &[u32], borders: [u32; PARTS]) -> [u32; PARTS] {
    let [mut first, mut second, mut third, mut fourth] = [[0; LANES]; PARTS];
    let (rounds, rest) = maxima.as_chunks::<LANES>();
    for maxima in rounds {
        count(&mut first, maxima, borders[0]);
        count(&mut second, maxima, borders[1]);
        count(&mut third, maxima, borders[2]);
        count(&mut fourth, maxima, borders[3]);
    }
    let counts = [first, second, third, fourth];
    core::array::from_fn(|part| {
        let rest = rest.iter().map(|most| u32::from(*most >= borders[part]));
        counts[part].iter().copied().chain(rest).sum()
    })
}

#[inline(always)]
fn count(counts: &mut [u32; LANES], maxima: &[u32; LANES], border: u32) {
    for lane in 0..LANES {
        counts[lane] += u32::from(maxima[lane] >= border);
    }
}

/// Values in a vector.
const LANES: usize = 4;
/// Values that are added at once, one group per lane. With half as many there would be more groups to search; with
/// twice as many, more values to collect.
const ROUND: usize = 8 * LANES;
/// Groups of a whole block, and one more.
const GROUPS_MAX: usize = BLOCK / ROUND * LANES + 1;
/// Parts of a range that one pass over the groups distinguishes.
const PARTS: usize = 4;
/// Where the search starts: within a factor of 256 of the largest magnitude.
const NEAR: u32 = 8 << 23;
/// The range of bits at which the search stops: some thousandths of a magnitude.
const PRECISION: u32 = 1 << 16;

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "random bits and places in a block")]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use ronde_plugin::math::Random;

    use super::*;

    /// The definition: sort everything.
    fn sorted(values: &[f32], kept: usize) -> Vec<u16> {
        let mut order: Vec<u16> = (0..values.len() as u16).filter(|index| values[usize::from(*index)] != 0.0).collect();
        order.sort_by_key(|index| (core::cmp::Reverse(magnitude_bits(values[usize::from(*index)])), *index));
        order.truncate(kept);
        order.sort_unstable();
        order
    }

    #[test]
    fn the_choice_is_that_of_sorting() {
        let mut random = Random::new(3);
        let mut selector = std::boxed::Box::new(Selector::new());
        for case in 0..200 {
            let len = [1, 2, 63, 1_000, 5_000, BLOCK][case % 6];
            let values: Vec<f32> = (0..len)
                .map(|_| match case / 6 % 4 {
                    // Arbitrary bits, few distinct values, mostly zeros, a heavy tail.
                    0 => f32::from_bits(random.next() as u32),
                    1 => random.below(3) as f32 - 1.0,
                    2 => {
                        if random.below(50) == 0 {
                            random.below(1_000) as f32
                        } else {
                            0.0
                        }
                    }
                    _ => 1.0 / (1.0 + random.below(100_000) as f32),
                })
                .collect();
            for kept in [0, 1, len / 100 + 1, len / 3 + 1, len] {
                let kept = kept.min(len);
                let mut sums = std::vec![0.0; len];
                let greatest = selector.add(&values, &mut sums);
                assert_eq!(Some(greatest), sums.iter().map(|sum| magnitude_bits(*sum)).max(), "case {case}, {len}");
                let chosen: Vec<u16> = selector.largest(&sums, greatest, kept).collect();
                assert!(chosen == sorted(&sums, kept), "case {case}, {kept} of {len}");
            }
        }
    }

    /// All of the largest values in one group, and none in it; as many groups as are kept, and fewer.
    #[test]
    fn uninformative_groups_are_handled() {
        let mut selector = std::boxed::Box::new(Selector::new());
        for large in [0..LANES * 8, 0..BLOCK / 2, BLOCK - 7..BLOCK] {
            for step in [1, LANES, ROUND] {
                let value = |index: usize| {
                    let is_large = large.contains(&index) && index.is_multiple_of(step);
                    if is_large { 100.0 + index as f32 } else { 1.0 + index as f32 * 1e-5 }
                };
                let values: Vec<f32> = (0..BLOCK).map(value).collect();
                let mut sums = std::vec![0.0; BLOCK];
                let greatest = selector.add(&values, &mut sums);
                for kept in [1, 10, 164, GROUPS_MAX - GROUPS_MAX / 8, GROUPS_MAX, 4_000] {
                    assert!(
                        selector.largest(&sums, greatest, kept).eq(sorted(&sums, kept)),
                        "{large:?} by {step}, {kept}"
                    );
                }
            }
        }
    }
}
