//! The options of a search for the best settings (autotune).

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use clap::builder::TypedValueParser;
use ronde_wire::TuningParameter;
use serde::{Deserialize, Serialize};

use crate::numbers::whole;

/// Whether and how the coordinator searches for the settings with which the job's tensors are performed fastest.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AutotuneArgs {
    /// Search for the settings with which the job's tensors are performed fastest, while it trains; the given settings are
    /// the start.
    #[arg(long = "autotune", env = "HOROVOD_AUTOTUNE", overrides_with = "no_autotune")]
    autotune: bool,
    /// Do not search, whatever else is set.
    #[arg(long = "no-autotune", overrides_with = "autotune")]
    no_autotune: bool,
    /// Write each sample of the search, and in the last row the outcome, to FILE, as CSV, where the sidecar of rank 0 runs.
    #[arg(long = "autotune-log-file", value_name = "FILE", env = "HOROVOD_AUTOTUNE_LOG")]
    pub log_file: Option<PathBuf>,
    /// How many samples are discarded first. [default: 3]
    #[arg(
        long = "autotune-warmup-samples",
        value_name = "N",
        env = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        value_parser = whole::<u32>(0..=1_000)
    )]
    pub warmup_samples: Option<u32>,
    /// How many steps are measured at once; a sample is the median of five such measurements. [default: 10]
    #[arg(
        long = "autotune-steps-per-sample",
        value_name = "N",
        env = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        value_parser = whole::<u32>(1..=1_000_000)
    )]
    pub steps_per_sample: Option<u32>,
    /// How many samples the search takes; then the best settings stay. [default: 20]
    #[arg(
        long = "autotune-bayes-opt-max-samples",
        value_name = "N",
        env = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        value_parser = whole::<u32>(1..=256)
    )]
    pub samples_max: Option<u32>,
    /// The standard deviation of the error of a sample, as a share of that of all samples, from 0 to 1: more, and the search
    /// believes single samples less. [default: 0.2]
    #[arg(
        long = "autotune-gaussian-process-noise",
        value_name = "SHARE",
        env = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        value_parser = share
    )]
    pub noise: Option<f64>,
    /// What the search may change: fusion-threshold, chunk-bytes and lanes, and what also changes the last bits of results:
    /// eager-bytes, algorithms, hierarchical-allreduce. [default: the first three]
    #[arg(
        long = "autotune-parameters",
        value_name = "NAME,...",
        value_delimiter = ',',
        value_parser = clap::builder::NonEmptyStringValueParser::new().try_map(|text| text.parse::<TuningParameter>())
    )]
    pub parameters: Vec<TuningParameter>,
}

impl AutotuneArgs {
    /// Whether to search.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.autotune && !self.no_autotune
    }

    /// What the search may change.
    #[must_use]
    pub fn parameters(&self) -> Vec<TuningParameter> {
        if self.parameters.is_empty() { TuningParameter::KEEP_BITS.to_vec() } else { self.parameters.clone() }
    }

    /// The same with a path as seen from this process's directory, and without a parameter that Horovod's variable gave.
    pub(crate) fn resolve(self, is_threshold_horovods: bool) -> Self {
        let log_file = self.log_file.as_ref().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
        let mut parameters = self.parameters.clone();
        if parameters.is_empty() && is_threshold_horovods {
            // As in Horovod, a value that its variable gives is constant.
            parameters = self.parameters();
            parameters.retain(|parameter| *parameter != TuningParameter::FusionThreshold);
        }
        Self { log_file, parameters, ..self }
    }

    /// Checks the bounds of values that came in a message.
    ///
    /// # Errors
    /// When a value is out of its range, naming it.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let samples = self.samples_max.unwrap_or(1);
        ensure!((1..=256).contains(&samples), "autotune samples_max = {samples} is out of range; it must be 1 to 256");
        let steps = self.steps_per_sample.unwrap_or(1);
        ensure!(steps > 0, "autotune steps_per_sample = 0 is out of range; it must be at least 1");
        let noise = self.noise.unwrap_or(0.0);
        ensure!((0.0..=1.0).contains(&noise), "autotune noise = {noise} is out of range; it must be 0 to 1");
        Ok(())
    }
}

/// A share of one.
fn share(text: &str) -> Result<f64, String> {
    let given: f64 = text.trim().parse().map_err(|error| format!("{error}"))?;
    if (0.0..=1.0).contains(&given) { Ok(given) } else { Err("it must be from 0 to 1".to_owned()) }
}

#[cfg(test)]
mod tests {
    use clap::{FromArgMatches, Parser};

    use super::*;

    #[derive(Parser, Debug)]
    struct Options {
        #[command(flatten)]
        autotune: AutotuneArgs,
    }

    fn parsed(line: &str) -> Result<AutotuneArgs, String> {
        let cli = <Options as clap::CommandFactory>::command().no_binary_name(true);
        let cli = cli.mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
        let matches = cli.try_get_matches_from(line.split_whitespace()).map_err(|error| error.to_string())?;
        Ok(Options::from_arg_matches(&matches).expect("it was parsed").autotune)
    }

    #[test]
    fn a_search_is_asked_for_and_the_last_of_two_opposite_options_wins() {
        for (line, is_on) in
            [("", false), ("--autotune", true), ("--autotune --no-autotune", false), ("--no-autotune --autotune", true)]
        {
            assert_eq!(parsed(line).expect("good").is_on(), is_on, "{line:?}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_range() {
        for (line, reason) in [
            ("--autotune-bayes-opt-max-samples 0", "it must be a whole number from 1 to 256"),
            ("--autotune-bayes-opt-max-samples=-3", "it must be a whole number from 1 to 256"),
            ("--autotune-steps-per-sample 0", "it must be a whole number from 1 to 1000000"),
            ("--autotune-warmup-samples=-1", "it must be a whole number from 0 to 1000"),
            ("--autotune-gaussian-process-noise 1.5", "it must be from 0 to 1"),
            ("--autotune-gaussian-process-noise nan", "it must be from 0 to 1"),
            (
                "--autotune-parameters lanes,cycle-time",
                "there is no parameter \"cycle-time\"; there are fusion-threshold",
            ),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(reason), "{error}");
        }
        let of = |text: &str| serde_json::from_str::<AutotuneArgs>(text).expect("JSON").check();
        for text in [r#"{"samples_max":0}"#, r#"{"samples_max":257}"#, r#"{"steps_per_sample":0}"#, r#"{"noise":2}"#] {
            assert!(of(text).expect_err(text).to_string().contains("is out of range"), "{text}");
        }
    }

    #[test]
    fn a_threshold_that_horovods_variable_gives_is_constant_unless_parameters_are_named() {
        let names = |line: &str, horovods| parsed(line).expect("good").resolve(horovods).parameters();
        assert_eq!(names("", false), TuningParameter::KEEP_BITS);
        assert_eq!(names("", true), [TuningParameter::ChunkBytes, TuningParameter::Lanes]);
        let named = "--autotune-parameters fusion-threshold,algorithms";
        assert_eq!(names(named, true), [TuningParameter::FusionThreshold, TuningParameter::Algorithms]);
        let file = parsed("--autotune-log-file a.csv").expect("good").resolve(false).log_file.expect("given");
        assert!(file.is_absolute());
    }
}
