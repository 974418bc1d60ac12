//! Which values are the largest, without sorting all of them.

use crate::{BLOCK, MAGNITUDE};

/// Finds the largest magnitudes of a block. What it holds is scratch space.
///
/// A histogram of a sample says which magnitude the k-th largest one hardly falls below; one pass collects what is above it,
/// usually twice `k`, and the exact choice is made among these. When the sample was wrong, everything is collected.
pub(crate) struct Selector {
    /// Magnitude and place of candidates, in the order of their places.
    candidates: [u64; BLOCK],
    /// The same, in no order.
    shuffled: [u64; BLOCK],
}

impl core::fmt::Debug for Selector {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Selector")
    }
}

impl Selector {
    pub(crate) const fn new() -> Self {
        Self { candidates: [0; BLOCK], shuffled: [0; BLOCK] }
    }

    /// The places of the `kept` largest magnitudes, ascending; of equal ones the first come first. Zeros are left out.
    #[allow(clippy::cast_possible_truncation, reason = "a place in a block")]
    pub(crate) fn largest(&mut self, values: &[f32], kept: usize) -> impl Iterator<Item = u16> + Clone + use<'_> {
        let likely = likely_below(values, kept);
        let mut count = self.collect(values, likely);
        if count < kept && likely > 1 {
            count = self.collect(values, 1);
        }
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
        chosen.map(|candidate| !(*candidate as u16))
    }

    /// Collects the magnitudes that are at least so large; gives how many there are.
    #[allow(clippy::cast_possible_truncation, reason = "a place in a block")]
    fn collect(&mut self, values: &[f32], least: u32) -> usize {
        let mut count = 0;
        for (group, values) in values.chunks(GROUP).enumerate() {
            // Few groups hold any: first all at once, without branches.
            let any = values.iter().fold(false, |any, value| any | (magnitude(*value) >= least));
            if any {
                for (index, value) in values.iter().enumerate() {
                    let place = (group * GROUP + index) as u16;
                    if magnitude(*value) >= least {
                        // The earlier one of equals is the larger one.
                        self.candidates[count] = u64::from(magnitude(*value)) << 16 | u64::from(!place);
                        count += 1;
                    }
                }
            }
        }
        count
    }
}

/// A magnitude that most likely at least `kept` values reach, and not many more: what a sample says, with three standard
/// deviations to spare. 1, which all but zeros reach, when a sample would say little.
#[allow(clippy::cast_possible_truncation, reason = "the number of bins")]
fn likely_below(values: &[f32], kept: usize) -> u32 {
    let expected = kept / SAMPLED;
    let rank = expected + 3 * expected.isqrt() + 2;
    if rank > values.len() / SAMPLED / 4 {
        return 1;
    }
    let sample = || values.iter().step_by(SAMPLED).map(|value| magnitude(*value));
    let coarse = ranked(sample().map(|magnitude| magnitude >> COARSE_SHIFT), rank);
    // Where values crowd, that bin alone would hold far too many.
    let within = sample().filter(|magnitude| magnitude >> COARSE_SHIFT == coarse.bin);
    let fine = ranked(within.map(|magnitude| magnitude >> FINE_SHIFT & (BINS as u32 - 1)), rank - coarse.above);
    (coarse.bin << COARSE_SHIFT | fine.bin << FINE_SHIFT).max(1)
}

/// Where in a histogram something lies.
struct Ranked {
    bin: u32,
    /// How many are in the bins above.
    above: usize,
}

/// The bin of the one that is `rank`-th from above; the lowest bin when there are fewer.
#[allow(clippy::cast_possible_truncation, reason = "a bin's number")]
fn ranked(bins: impl Iterator<Item = u32>, rank: usize) -> Ranked {
    let mut histogram = [0_u16; BINS];
    bins.for_each(|bin| histogram[bin as usize] += 1);
    let mut above = 0;
    for (bin, count) in histogram.iter().enumerate().rev() {
        if above + usize::from(*count) >= rank {
            return Ranked { bin: bin as u32, above };
        }
        above += usize::from(*count);
    }
    Ranked { bin: 0, above }
}

#[inline(always)]
fn magnitude(value: f32) -> u32 {
    value.to_bits() & MAGNITUDE
}

/// Values that are compared at once.
const GROUP: usize = 16;
/// One of so many values is in the sample.
const SAMPLED: usize = 16;
/// A coarse bin is an exponent and three bits of the fraction, a fine one eleven bits more.
const COARSE_SHIFT: u32 = 20;
const FINE_SHIFT: u32 = 9;
const BINS: usize = 1 << (COARSE_SHIFT - FINE_SHIFT);
const _: () = assert!(BINS == 1 << (31 - COARSE_SHIFT));

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "random bits and places in a block")]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use ronde_plugin::math::Random;

    use super::*;

    /// Sorting everything, as the definition says.
    fn sorted(values: &[f32], kept: usize) -> Vec<u16> {
        let mut order: Vec<u16> = (0..values.len() as u16).filter(|index| values[usize::from(*index)] != 0.0).collect();
        order.sort_by_key(|index| (core::cmp::Reverse(magnitude(values[usize::from(*index)])), *index));
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
                    // All finite and other values, few distinct ones, mostly zeros, a heavy tail.
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
                let chosen: Vec<u16> = selector.largest(&values, kept).collect();
                assert!(chosen == sorted(&values, kept), "case {case}, {kept} of {len}");
            }
        }
    }

    /// Large values where the sample does not look, and small ones where it does.
    #[test]
    fn a_sample_may_be_wrong() {
        let mut selector = std::boxed::Box::new(Selector::new());
        for sampled_are_large in [true, false] {
            let value = |index: usize| {
                if index.is_multiple_of(SAMPLED) == sampled_are_large { 100.0 } else { 1.0 + index as f32 * 1e-5 }
            };
            let values: Vec<f32> = (0..BLOCK).map(value).collect();
            for kept in [10, 164, 1_500, 4_000] {
                assert!(selector.largest(&values, kept).eq(sorted(&values, kept)), "{kept}");
            }
        }
    }
}
