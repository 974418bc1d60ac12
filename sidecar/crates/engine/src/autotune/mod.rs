//! Autotune: the coordinator searches for the settings with which the job's tensors are performed fastest.
//!
//! A sample is the rate of some steps under one choice of values (`meter`). Which values come next follows from a Gaussian
//! process over all samples (`search`). The values take effect on the coordinator's next order, which carries everything
//! that shapes a plan, so that all ranks use the same ones at each operation.
//!
//! After its last sample the best values stay for the rest of the job. In an elastic job a membership with another
//! coordinator, or one that begins during the search, restarts it: samples of another placement say little.

mod gaussian_process;
mod meter;
mod search;
mod space;
#[cfg(test)]
mod tests;

use ronde_wire::{TensorName, TuningParameter};
use serde::Serialize;

use self::meter::Meter;
use self::search::{Search, Verdict};
pub(crate) use self::space::Bounds;
pub use self::space::Knobs;
use self::space::Space;
use crate::event::Time;

/// How to search.
#[derive(Clone, Debug, PartialEq)]
pub struct AutotuneSettings {
    /// What the search may change. Default: [`TuningParameter::KEEP_BITS`].
    pub parameters: Vec<TuningParameter>,
    /// Samples that are discarded first. Default 3.
    pub warmup_samples: usize,
    /// Steps of a portion; a sample has five. Default 10.
    pub steps_per_sample: u32,
    /// Samples of the search, 1 to 256. Default 20.
    pub samples_max: usize,
    /// The standard deviation of a sample's error, as a share of that of all samples, 0 to 1. Default 0.2.
    pub noise: f64,
    /// Where random proposals begin. Default 0.
    pub seed: u64,
}

impl Default for AutotuneSettings {
    fn default() -> Self {
        let parameters = TuningParameter::KEEP_BITS.to_vec();
        Self { parameters, warmup_samples: 3, steps_per_sample: 10, samples_max: 20, noise: 0.2, seed: 0 }
    }
}

impl AutotuneSettings {
    /// The steps of a program after which the search is over, a few more than it takes.
    #[must_use]
    pub fn steps(&self) -> u64 {
        let sample = (u64::from(self.steps_per_sample.max(1)) + 1) * meter::PORTIONS as u64;
        let sample = sample + u64::from(meter::SETTLING_STEPS) + 2;
        sample.saturating_mul(self.warmup_samples.saturating_add(self.samples_max) as u64)
    }
}

/// A sample, or the outcome of a search.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AutotuneSample {
    /// Which one it is.
    pub stage: AutotuneStage,
    /// The values.
    pub knobs: Knobs,
    /// Bytes of tensors that were performed in a microsecond, the step's computation included.
    pub score: f64,
    /// The score over that of the first sample, which has the values of the start; 1 before there is one.
    pub gain: f64,
    /// The samples so far, warm-up excluded.
    pub samples: usize,
}

/// Where a search is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AutotuneStage {
    /// Its scores are discarded.
    WarmUp,
    /// It tries values.
    Searching,
    /// It is over: the best values are in use.
    Finished,
}

/// The state of a search, for status pages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AutotuneStatus {
    /// Where it is.
    pub stage: AutotuneStage,
    /// The samples so far, warm-up excluded.
    pub samples: usize,
    /// How many there will be.
    pub samples_max: usize,
    /// The values in use.
    pub knobs: Knobs,
    /// The best sample so far.
    pub best: Option<AutotuneSample>,
}

/// A search and its measurements.
#[derive(Clone, Debug)]
pub(crate) struct Autotune {
    settings: AutotuneSettings,
    bounds: Bounds,
    search: Search,
    meter: Meter,
    /// The score of a complete sample that was not handled yet.
    score: Option<f64>,
    finished: Option<AutotuneSample>,
}

impl Autotune {
    /// A search from these values.
    pub(crate) fn new(settings: AutotuneSettings, start: Knobs, bounds: Bounds) -> Self {
        let AutotuneSettings { warmup_samples, samples_max, noise, seed, .. } = settings;
        let space = Space::new(&settings.parameters, bounds);
        let search = Search::new(space, start, warmup_samples, samples_max, noise.clamp(0.0, 1.0), seed);
        let meter = Meter::new(settings.steps_per_sample);
        Self { settings, bounds, search, meter, score: None, finished: None }
    }

    /// The values in use.
    pub(crate) fn knobs(&self) -> Knobs {
        self.finished.map_or(self.search.current(), |finished| finished.knobs)
    }

    /// The search in another membership: an unfinished one restarts from its best values, the values of a finished one stay.
    /// Where a job of one sidecar gets another one, or the other way round, values that mean something else in the other
    /// kind of job, or nothing, are the `given` ones.
    pub(crate) fn restarted(self, bounds: Bounds, given: &Knobs) -> Self {
        let is_other_kind = self.bounds.is_single != bounds.is_single;
        let adjusted = |knobs: Knobs| {
            let Knobs { fusion_threshold_bytes, chunk_bytes, .. } = knobs;
            if is_other_kind { Knobs { fusion_threshold_bytes, chunk_bytes, ..*given } } else { knobs }
        };
        match self.finished {
            Some(finished) => {
                let finished = Some(AutotuneSample { knobs: adjusted(finished.knobs), ..finished });
                Self { bounds, finished, ..self }
            }
            None => Self::new(self.settings, adjusted(self.search.best().knobs), bounds),
        }
    }

    /// Starts the current sample again: an epoch has begun.
    pub(crate) fn restart_sample(&mut self) {
        self.meter.restart();
        self.score = None;
    }

    /// Records an operation that was performed here.
    pub(crate) fn performed<'a>(&mut self, now: Time, names: impl Iterator<Item = &'a TensorName>, bytes: u64) {
        if self.finished.is_none() && self.score.is_none() {
            self.score = self.meter.performed(now, names, bytes);
        }
    }

    /// Handles a complete sample, if there is one; [`Self::knobs`] may be others then. Returns it and, after the last one,
    /// the outcome.
    pub(crate) fn advance(&mut self) -> Option<(AutotuneSample, Option<AutotuneSample>)> {
        let score = self.score.take()?;
        self.meter.restart();
        let knobs = self.search.current();
        match self.search.observe(score) {
            Verdict::Warming => Some((self.sample(AutotuneStage::WarmUp, knobs, score), None)),
            Verdict::Next => Some((self.sample(AutotuneStage::Searching, knobs, score), None)),
            Verdict::Over(best) => {
                self.finished = Some(self.sample(AutotuneStage::Finished, best.knobs, best.score));
                Some((self.sample(AutotuneStage::Searching, knobs, score), self.finished))
            }
        }
    }

    /// The state for status pages.
    pub(crate) fn status(&self) -> AutotuneStatus {
        let is_warming = self.search.is_warming();
        let stage = if is_warming { AutotuneStage::WarmUp } else { AutotuneStage::Searching };
        let best = || {
            let best = self.search.best();
            (!self.search.tried().is_empty()).then(|| self.sample(stage, best.knobs, best.score))
        };
        AutotuneStatus {
            stage: self.finished.map_or(stage, |finished| finished.stage),
            samples: self.search.tried().len(),
            samples_max: self.settings.samples_max,
            knobs: self.knobs(),
            best: self.finished.or_else(best),
        }
    }

    fn sample(&self, stage: AutotuneStage, knobs: Knobs, score: f64) -> AutotuneSample {
        let first = self.search.tried().first().map_or(score, |first| first.score);
        let gain = if first > 0.0 { score / first } else { 1.0 };
        AutotuneSample { stage, knobs, score, gain, samples: self.search.tried().len() }
    }
}
