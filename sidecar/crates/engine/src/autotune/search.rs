//! The search: which values to try next, given the scores of those that were tried.

use std::collections::BTreeSet;

use super::gaussian_process::{GaussianProcess, OBSERVATIONS_MAX, expected_improvement};
use super::space::{Knobs, Space};

/// A search for the values with the greatest score. It is deterministic: equal scores lead to equal proposals.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    space: Space,
    start: Knobs,
    warmup_left: usize,
    samples_max: usize,
    noise: f64,
    random: Random,
    tried: Vec<Tried>,
    /// Fitted to the samples so far; `None` before the first one. Kept, as the control thread makes proposals and status
    /// pages.
    process: Option<GaussianProcess>,
    best: Tried,
    /// The process's mean there.
    best_mean: f64,
    current: Knobs,
}

/// A sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tried {
    pub(crate) knobs: Knobs,
    pub(crate) score: f64,
}

/// What follows from a score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// It was a warm-up sample: the values stay.
    Warming,
    /// Try [`Search::current`] next.
    Next,
    /// The search is over; these values are the best.
    Over(Tried),
}

impl Search {
    /// A search from `start`, which is the first sample after `warmup` discarded ones.
    pub(crate) fn new(space: Space, start: Knobs, warmup: usize, samples_max: usize, noise: f64, seed: u64) -> Self {
        let samples_max = samples_max.clamp(1, OBSERVATIONS_MAX);
        let (tried, random, best) = (Vec::new(), Random(seed), Tried { knobs: start, score: 0.0 });
        Self {
            space,
            start,
            warmup_left: warmup,
            samples_max,
            noise,
            random,
            tried,
            process: None,
            best,
            best_mean: 0.0,
            current: start,
        }
    }

    /// The values to try.
    pub(crate) fn current(&self) -> Knobs {
        self.current
    }

    /// The samples so far, without those of the warm-up.
    pub(crate) fn tried(&self) -> &[Tried] {
        &self.tried
    }

    /// Whether scores are still discarded.
    pub(crate) fn is_warming(&self) -> bool {
        self.warmup_left > 0
    }

    /// Records the score of the current values.
    pub(crate) fn observe(&mut self, score: f64) -> Verdict {
        if self.warmup_left > 0 {
            self.warmup_left -= 1;
            return Verdict::Warming;
        }
        self.tried.push(Tried { knobs: self.current, score: if score.is_finite() { score } else { 0.0 } });
        self.learn();
        let next = if self.tried.len() < self.samples_max { self.propose() } else { None };
        let Some(next) = next else { return Verdict::Over(self.best) };
        self.current = next;
        Verdict::Next
    }

    /// The values that have most likely the greatest score: of those that were tried, with the process's mean instead of the
    /// score, as the greatest of many noisy scores is most of all a lucky one.
    pub(crate) fn best(&self) -> Tried {
        self.best
    }

    /// Fits the process to the samples, and finds the best one.
    fn learn(&mut self) {
        let points: Vec<Vec<f64>> = self.tried.iter().map(|tried| self.space.coordinates(&tried.knobs)).collect();
        let scores: Vec<f64> = self.tried.iter().map(|tried| tried.score).collect();
        self.process = GaussianProcess::fit(&points, &scores, self.noise.max(NOISE_LEAST));
        let smoothed = self.process.as_ref().map_or(scores, |process| process.smoothed().collect());
        let best = smoothed.into_iter().zip(&self.tried).max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((mean, tried)) = best {
            (self.best, self.best_mean) = (*tried, mean);
        }
    }

    /// The next values; `None` when all have been tried.
    fn propose(&mut self) -> Option<Knobs> {
        let known: BTreeSet<usize> =
            self.tried.iter().map(|tried| self.space.nearest(&self.space.coordinates(&tried.knobs))).collect();
        if known.len() >= self.space.size() {
            return None;
        }
        let index = match self.spread(&known) {
            Some(index) => index,
            None => self.most_promising(&known)?,
        };
        Some(self.space.knobs(index, &self.start))
    }

    /// The first samples cover the space evenly: points of Halton's sequence.
    fn spread(&self, known: &BTreeSet<usize>) -> Option<usize> {
        let turn = self.tried.len();
        if turn > SPREAD_BASE + self.space.dimensions() {
            return None;
        }
        let point: Vec<f64> = PRIMES.iter().take(self.space.dimensions()).map(|base| halton(turn, *base)).collect();
        Some(self.space.nearest(&point)).filter(|index| !known.contains(index))
    }

    /// The point with the greatest expected improvement among the neighbours of the best points and random ones.
    fn most_promising(&mut self, known: &BTreeSet<usize>) -> Option<usize> {
        let candidates = self.candidates(known);
        let Some(process) = &self.process else { return candidates.into_iter().next() };
        let promise = |index: usize| {
            let point = self.space.coordinates(&self.space.knobs(index, &self.start));
            (expected_improvement(process.predict(&point), self.best_mean), index)
        };
        let promises = candidates.into_iter().map(promise);
        promises.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))).map(|(_, index)| index)
    }

    /// Points that were not tried, of which the space has one at least: the neighbours of the best ones, and others that are
    /// spread over the space.
    fn candidates(&mut self, known: &BTreeSet<usize>) -> BTreeSet<usize> {
        let size = self.space.size();
        let wanted = (PREDICTION_KERNELS_MAX / self.tried.len().max(1)).clamp(CANDIDATES_LEAST, CANDIDATES_MAX);
        let mut by_score: Vec<&Tried> = self.tried.iter().collect();
        by_score.sort_by(|a, b| b.score.total_cmp(&a.score));
        let best = by_score.iter().take(NEIGHBOURHOODS);
        let best = best.map(|tried| self.space.nearest(&self.space.coordinates(&tried.knobs)));
        let mut found: BTreeSet<usize> = best.flat_map(|index| self.space.neighbours(index)).collect();
        found.retain(|index| !known.contains(index));
        if size <= CANDIDATES_MAX {
            let unknown: Vec<usize> = (0..size).filter(|index| !known.contains(index)).collect();
            let step = unknown.len().div_ceil(wanted).max(1);
            let first = self.random.below(step);
            found.extend(unknown.into_iter().skip(first).step_by(step));
            return found;
        }
        // At least half of the draws are new, as at most half of the space is known.
        for _ in 0..2 * wanted {
            if found.len() >= wanted {
                break;
            }
            let index = self.random.below(size);
            found.extend((!known.contains(&index)).then_some(index));
        }
        found
    }
}

/// The most points for which the expected improvement is computed.
const CANDIDATES_MAX: usize = 512;
/// The fewest, where there are as many: more than the neighbours of the best points.
const CANDIDATES_LEAST: usize = 128;
/// Kernels of the predictions of all candidates, one for each candidate and sample. This bounds the time of a proposal, which the control thread spends
/// (the test `the_time_of_a_proposal` measures it).
const PREDICTION_KERNELS_MAX: usize = 24_000;
const _: () = assert!(CANDIDATES_MAX >= 2 * OBSERVATIONS_MAX, "random candidates must mostly be new");
/// The best points whose neighbours are always candidates.
const NEIGHBOURHOODS: usize = 8;
/// Evenly spread samples, besides one for each dimension.
const SPREAD_BASE: usize = 3;
/// The bases of Halton's sequence, one for each dimension.
const PRIMES: [usize; 6] = [2, 3, 5, 7, 11, 13];
/// Measurements are never exact.
const NOISE_LEAST: f64 = 0.01;

/// Element `turn` of Halton's sequence in one dimension: its digits in the base, mirrored at the point. From 1.
fn halton(turn: usize, base: usize) -> f64 {
    let (mut rest, mut share, mut sum) = (turn, 1.0 / base as f64, 0.0);
    while rest > 0 {
        sum += share * (rest % base) as f64;
        rest /= base;
        share /= base as f64;
    }
    sum
}

/// SplitMix64: G. L. Steele, D. Lea and C. H. Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below a bound above 0. The bound is far below 2^64, so the bias does not matter.
    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below a usize")]
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ronde_wire::TuningParameter;

    use super::super::gaussian_process::KERNELS;
    use super::super::space::Bounds;
    use super::super::space::tests::{bounds, defaults};
    use super::*;

    fn search(parameters: &[TuningParameter], warmup: usize, samples: usize, seed: u64) -> Search {
        Search::new(Space::new(parameters, bounds()), defaults(), warmup, samples, 0.1, seed)
    }

    #[test]
    fn warm_up_samples_are_discarded_and_the_start_is_the_first_sample() {
        let mut search = search(&TuningParameter::KEEP_BITS, 2, 3, 1);
        for _ in 0..2 {
            assert!(search.is_warming());
            assert_eq!(search.observe(1e9), Verdict::Warming);
            assert_eq!(search.current(), defaults());
        }
        assert_eq!(search.observe(1.0), Verdict::Next);
        assert_ne!(search.current(), defaults());
        assert_eq!(search.observe(0.5), Verdict::Next);
        assert_eq!(search.observe(f64::NAN), Verdict::Over(Tried { knobs: defaults(), score: 1.0 }));
    }

    #[test]
    fn a_space_of_one_point_is_searched_at_once() {
        let mut search = Search::new(Space::new(&[], Bounds { lanes: 1, ..bounds() }), defaults(), 0, 20, 0.1, 1);
        assert_eq!(search.observe(3.0), Verdict::Over(Tried { knobs: defaults(), score: 3.0 }));
    }

    #[test]
    fn a_small_space_is_tried_completely_and_then_it_is_over() {
        let mut search = search(&[TuningParameter::Lanes], 0, 100, 1);
        let mut lanes = BTreeSet::new();
        loop {
            let current = search.current();
            assert!(lanes.insert(current.lanes), "a second sample of {current:?}");
            if let Verdict::Over(best) = search.observe(f64::from(current.lanes)) {
                assert_eq!((best.knobs.lanes, lanes.len()), (4, 4));
                return;
            }
        }
    }

    /// A search over everything after so many samples, and the kernels that the last one took.
    fn searched(samples: usize) -> (Search, usize) {
        let mut search = search(&TuningParameter::ALL, 0, OBSERVATIONS_MAX, 3);
        let mut before = 0;
        for _ in 0..samples {
            let at = search.space.coordinates(&search.current());
            before = KERNELS.get();
            search.observe(100.0 - at.iter().map(|at| (at - 0.4).powi(2)).sum::<f64>());
        }
        (search, KERNELS.get() - before)
    }

    #[test]
    fn a_proposal_computes_few_kernels_and_a_status_none() {
        let (search, kernels) = searched(OBSERVATIONS_MAX - 1);
        // One fit, scales from a part of the samples, and the candidates.
        assert!(kernels < 120_000, "{kernels}");
        let before = KERNELS.get();
        assert_eq!(search.tried().len(), OBSERVATIONS_MAX - 1);
        assert!(search.best().score > 99.0);
        assert_eq!(KERNELS.get(), before);
    }

    /// `cargo test --release -p ronde-engine the_time_of_a_proposal -- --ignored --nocapture` prints what ADR 35 has.
    #[test]
    #[ignore = "measures"]
    fn the_time_of_a_proposal() {
        for samples in [20, 60, 128, 255] {
            let (mut search, _) = searched(samples - 1);
            let began = std::time::Instant::now();
            search.observe(99.0);
            println!("sample {samples}: {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn equal_scores_lead_to_equal_samples_none_of_them_twice(seed: u64, peak in 0.0..1.0_f64) {
            let run = || {
                let mut search = search(&TuningParameter::ALL, 1, 30, seed);
                let mut samples = Vec::new();
                loop {
                    let current = search.current();
                    let at = search.space.coordinates(&current);
                    let score = 100.0 - at.iter().map(|at| (at - peak).powi(2)).sum::<f64>();
                    let verdict = search.observe(score);
                    samples.push(current);
                    if let Verdict::Over(best) = verdict {
                        return (samples, best);
                    }
                }
            };
            let (samples, best) = run();
            prop_assert_eq!(&run(), &(samples.clone(), best));
            let distinct: BTreeSet<String> = samples.iter().skip(1).map(|knobs| format!("{knobs:?}")).collect();
            prop_assert_eq!(distinct.len(), samples.len() - 1);
            prop_assert!(samples.contains(&best.knobs));
        }
    }
}
