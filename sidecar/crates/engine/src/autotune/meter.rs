//! Measures how fast a job's tensors are performed, in whole steps of its program.

use std::collections::BTreeMap;

use ronde_wire::{TensorName, limits};

use crate::event::Time;

/// Scores the operations that this sidecar performs. A step ends when the same tensor comes again: the anchor, which is the
/// first one that repeats.
#[derive(Clone, Debug)]
pub(crate) struct Meter {
    /// Steps of a portion.
    steps: u32,
    /// `None` until the steps after a change of values are over.
    anchor: Option<TensorName>,
    /// How often each tensor was performed in the current portion.
    counts: BTreeMap<TensorName, u32>,
    began: Time,
    bytes: u64,
    scores: Vec<f64>,
}

impl Meter {
    /// A meter for samples of [`PORTIONS`] times `steps` steps.
    pub(crate) fn new(steps: u32) -> Self {
        let (anchor, counts, scores) = Default::default();
        Self { steps: steps.max(1), anchor, counts, began: Time(0), bytes: 0, scores }
    }

    /// Starts a sample.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.steps);
    }

    /// Records an operation that was performed, with the bytes of its tensors. Returns the score of the sample, in bytes for
    /// each microsecond, when it is complete: the median of its portions, as a program may do something else between steps.
    pub(crate) fn performed<'a>(
        &mut self,
        now: Time,
        names: impl Iterator<Item = &'a TensorName>,
        bytes: u64,
    ) -> Option<f64> {
        self.bytes = self.bytes.saturating_add(bytes);
        let repeated = names.filter_map(|name| self.count(name)).next()?;
        if self.anchor.as_ref() == Some(&repeated) {
            let elapsed_us = now.0.saturating_sub(self.began.0).max(1);
            self.scores.push(self.bytes as f64 / elapsed_us as f64);
        }
        (self.anchor, self.began, self.bytes) = (Some(repeated), now, 0);
        self.counts.clear();
        (self.scores.len() >= PORTIONS).then(|| median(&mut self.scores))
    }

    /// Counts a tensor; returns it when it ends the portion. Without the anchor, which a program may stop to use, another
    /// one does that a few steps later and becomes the anchor.
    fn count(&mut self, name: &TensorName) -> Option<TensorName> {
        let awaited = match &self.anchor {
            None => SETTLING_STEPS,
            Some(anchor) if anchor == name => self.steps,
            Some(_) => self.steps.saturating_add(SETTLING_STEPS),
        };
        if !self.counts.contains_key(name) && self.counts.len() >= NAMES_MAX {
            return None;
        }
        let count = self.counts.entry(name.clone()).or_default();
        *count += 1;
        (*count >= awaited).then(|| name.clone())
    }
}

/// Portions of a sample, as many as Horovod has.
pub(crate) const PORTIONS: usize = 5;
/// Steps after a change that are not measured: two are negotiated before a schedule is issued again.
pub(crate) const SETTLING_STEPS: u32 = 3;
/// Tensors that are counted; those of a larger step count from the ones that fit.
const NAMES_MAX: usize = limits::SCHEDULE_TENSORS_MAX;

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> TensorName {
        TensorName::new(text).expect("a name")
    }

    /// Performs steps of two tensors, 60 bytes in all, each of which takes so many microseconds.
    fn perform(meter: &mut Meter, now: &mut u64, steps: u32, step_us: u64) -> Option<f64> {
        let mut score = None;
        for _ in 0..steps {
            *now += step_us;
            score = meter.performed(Time(*now), [name("a")].iter(), 20);
            score = score.or(meter.performed(Time(*now), [name("b")].iter(), 40));
        }
        score
    }

    #[test]
    fn a_sample_has_the_rate_of_its_steps_after_the_settling_ones() {
        let (mut meter, mut now) = (Meter::new(4), 1_000);
        // Slow while it settles.
        assert_eq!(perform(&mut meter, &mut now, SETTLING_STEPS, 1_000_000), None);
        assert_eq!(perform(&mut meter, &mut now, 4 * 4, 30), None);
        let score = perform(&mut meter, &mut now, 4, 30).expect("five portions");
        assert!((score - 2.0).abs() < 0.1, "{score}");
    }

    #[test]
    fn a_pause_of_the_program_does_not_count() {
        let (mut meter, mut now) = (Meter::new(2), 0);
        perform(&mut meter, &mut now, SETTLING_STEPS, 60);
        perform(&mut meter, &mut now, 3, 60);
        now += 1_000_000;
        perform(&mut meter, &mut now, 6, 60);
        let score = perform(&mut meter, &mut now, 1, 60).expect("five portions");
        assert!((score - 1.0).abs() < 0.1, "{score}");
    }

    #[test]
    fn when_a_program_stops_to_use_a_tensor_another_one_ends_the_steps() {
        let (mut meter, mut now) = (Meter::new(2), 0);
        perform(&mut meter, &mut now, SETTLING_STEPS + 1, 60);
        let mut score = None;
        for _ in 0..SETTLING_STEPS + 2 * 6 {
            now += 20;
            score = score.or(meter.performed(Time(now), [name("b")].iter(), 40));
        }
        assert_eq!(score, Some(2.0));
    }

    #[test]
    fn names_that_never_come_again_end_no_sample_and_take_bounded_memory() {
        let mut meter = Meter::new(2);
        for turn in 0..2 * NAMES_MAX {
            assert_eq!(meter.performed(Time(turn as u64), [name(&turn.to_string())].iter(), 8), None);
        }
        assert_eq!(meter.counts.len(), NAMES_MAX);
    }

    #[test]
    fn a_clock_that_stands_still_gives_a_finite_score() {
        let (mut meter, mut now) = (Meter::new(1), 5);
        let score = perform(&mut meter, &mut now, SETTLING_STEPS + 5, 0).expect("five portions");
        assert!(score.is_finite());
    }
}
