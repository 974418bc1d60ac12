//! What the settings say about tuning: the search for better settings, its log, and the cost model.

use std::hint::black_box;
use std::time::Instant;

use ronde_bootstrap::profile::Cost;
use ronde_collectives::kernels::{Side, reduce_into};
use ronde_engine::{AutotuneSettings, CostModel, CostStatus};
use ronde_wire::{DType, ReduceOp, World};

use crate::driver::autotune::AutotuneLog;
use crate::process::settings::Settings;

/// Makes the log of the search for better settings, if one was asked for.
pub(crate) fn autotune_log(settings: &Settings, world: &World) -> anyhow::Result<AutotuneLog> {
    let autotune = &settings.tuning.autotune;
    let path = autotune.log_file.as_deref().filter(|_| autotune.is_on());
    AutotuneLog::create(path, known(settings), world.coordinator() == settings.me)
}

/// Returns how to search for better settings, if that was asked for.
pub(crate) fn autotune(settings: &Settings) -> Option<AutotuneSettings> {
    let given = &settings.tuning.autotune;
    let defaults = AutotuneSettings::default();
    let count = |given: Option<u32>, default| given.map_or(default, |count| count as usize);
    given.is_on().then(|| AutotuneSettings {
        parameters: given.parameters(),
        warmup_samples: count(given.warmup_samples, defaults.warmup_samples),
        steps_per_sample: given.steps_per_sample.unwrap_or(defaults.steps_per_sample),
        samples_max: count(given.samples_max, defaults.samples_max),
        noise: given.noise.unwrap_or(defaults.noise),
        seed: defaults.seed,
    })
}

/// Measures the time of a reduced byte when a cost model is to be measured. It is reported with that, and selects no algorithm.
pub(crate) fn measured_gamma(settings: &Settings) -> Option<f64> {
    let measured = || reduction_us_per_byte().unwrap_or(known(settings).gamma_us_per_byte);
    settings.tuning.measure_cost.then(measured)
}

/// The cost model of the profile, or the default.
pub(crate) fn known(settings: &Settings) -> CostModel {
    settings.tuning.cost.map_or_else(CostModel::default, |cost| CostModel {
        alpha_us: cost.alpha_us,
        beta_us_per_byte: cost.beta_us_per_byte,
        gamma_us_per_byte: cost.gamma_us_per_byte,
    })
}

/// Returns a measured cost model as reports have it.
pub(crate) fn measured(cost: CostStatus) -> Cost {
    let CostStatus { alpha_us, beta_us_per_byte, gamma_us_per_byte } = cost;
    Cost { alpha_us, beta_us_per_byte, gamma_us_per_byte }
}

/// Measures how long one thread takes for each byte that it reduces into another, in microseconds: the best of some passes
/// over more memory than a second-level cache has, which takes some milliseconds.
fn reduction_us_per_byte() -> Option<f64> {
    let [mut sum, values] = buffers();
    let mut pass = || {
        let began = Instant::now();
        for (into, from) in sum.chunks_mut(BLOCK_BYTES).zip(values.chunks(BLOCK_BYTES)) {
            reduce_into(DType::F32, ReduceOp::Sum, into, black_box(from), Side::AccumulatorLeft).ok()?;
        }
        Some(began.elapsed().as_secs_f64() * 1e6 / REDUCED_BYTES as f64)
    };
    let best = (0..PASSES).map(|_| pass()).try_fold(f64::INFINITY, |best, us| us.map(|us| best.min(us)))?;
    black_box(&sum);
    Some(best.max(f64::MIN_POSITIVE))
}

/// Memory that has been written: all pages of memory that was only allocated are one page of zeros, which stays in the cache.
fn buffers() -> [Vec<u8>; 2] {
    [0; 2].map(|_| vec![WRITTEN; REDUCED_BYTES])
}

/// As an f32 it is a small normal number, also after some sums.
const WRITTEN: u8 = 0x3c;
const REDUCED_BYTES: usize = 8 << 20;
const BLOCK_BYTES: usize = 16 << 10;
const PASSES: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduced_numbers_are_normal_and_in_pages_of_their_own() {
        let [sum, values] = buffers();
        assert!(sum == values && sum.iter().all(|byte| *byte != 0));
        let number = f32::from_ne_bytes([WRITTEN; 4]);
        assert!(number.is_normal() && (number * (PASSES + 1) as f32).is_normal());
    }

    #[test]
    fn a_byte_is_reduced_in_a_time_above_zero() {
        let us = reduction_us_per_byte().expect("sums of f32 are supported");
        // Between a terabyte and a megabyte in a second.
        assert!((1e-6..1.0).contains(&us), "{us}");
    }
}
