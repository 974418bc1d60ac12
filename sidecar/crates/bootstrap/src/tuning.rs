//! Options that `ronde run` and `ronde sidecar` share, by the names that Horovod's launcher has for them.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use ronde_wire::limits;

use crate::plugins::PluginSettings;

/// The options about how operations that come again, and those of several ranks of a host, are performed.
#[derive(Args, Clone, Debug)]
pub struct ReuseArgs {
    /// How many operations are remembered because they come again in every step; 0 for none, which is to negotiate every
    /// operation in full. [default: as many as there can be: 4096 in steps that run ahead, 1024 that are announced by number]
    #[arg(long, value_name = "N", env = "HOROVOD_CACHE_CAPACITY", value_parser = parse_capacity)]
    pub cache_capacity: Option<usize>,
    /// Reduce the tensors of a sidecar's ranks with each other before an all-reduce goes to other sidecars; the default.
    #[arg(long, overrides_with = "no_hierarchical_allreduce")]
    hierarchical_allreduce: bool,
    /// Send every rank's tensor and reduce in the order of ranks: more bytes, and bits that do not depend on which host has
    /// which rank. HOROVOD_HIERARCHICAL_ALLREDUCE=0 asks for it, too.
    #[arg(long, overrides_with = "hierarchical_allreduce")]
    no_hierarchical_allreduce: bool,
    /// Changes nothing: an all-gather sends every rank's tensor once to every other sidecar in any case.
    #[arg(long, overrides_with = "no_hierarchical_allgather")]
    hierarchical_allgather: bool,
    /// Changes nothing: an all-gather sends every rank's tensor once to every other sidecar in any case.
    #[arg(long, overrides_with = "hierarchical_allgather")]
    no_hierarchical_allgather: bool,
}

impl ReuseArgs {
    /// Whether an all-reduce begins among the ranks of a sidecar.
    ///
    /// # Errors
    /// When Horovod's variable is not 0 or 1.
    pub fn is_hierarchical(&self) -> anyhow::Result<bool> {
        self.is_hierarchical_with(std::env::var("HOROVOD_HIERARCHICAL_ALLREDUCE").ok().as_deref())
    }

    fn is_hierarchical_with(&self, horovod: Option<&str>) -> anyhow::Result<bool> {
        if self.hierarchical_allreduce || self.no_hierarchical_allreduce {
            return Ok(!self.no_hierarchical_allreduce);
        }
        match horovod.map(str::trim) {
            None | Some("" | "1") => Ok(true),
            Some("0") => Ok(false),
            Some(other) => bail!("HOROVOD_HIERARCHICAL_ALLREDUCE is {other:?}; it is 0 or 1"),
        }
    }
}

/// The options about plugins.
#[derive(Args, Clone, Debug)]
pub struct PluginArgs {
    /// A plugin, or a directory of plugins, besides those that come with ronde; the same files at the same
    /// place on every host. May be given several times.
    #[arg(long = "plugin", value_name = "FILE|DIR")]
    paths: Vec<PathBuf>,
    /// Let in only plugins that the owner of this public key has signed (`ronde plugin keygen`). May be given several times.
    #[arg(long = "plugin-key", value_name = "FILE", conflicts_with = "digests")]
    keys: Vec<PathBuf>,
    /// Let in only the plugin with this digest (`sha256sum`). May be given several times.
    #[arg(long = "plugin-digest", value_name = "SHA256")]
    digests: Vec<String>,
    /// The most that codecs keep between operations, residuals and the like. [default: 8192]
    #[arg(long = "plugin-state-mb", value_name = "MB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    state_mb: Option<u64>,
}

impl PluginArgs {
    /// As a sidecar is told; paths as seen from here.
    pub fn settings(&self) -> PluginSettings {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        PluginSettings {
            paths: self.paths.iter().map(absolute).collect(),
            keys: self.keys.iter().map(absolute).collect(),
            digests: self.digests.clone(),
            state_bytes_max: self.state_mb.map(|megabytes| megabytes << 20),
        }
    }
}

/// The options about tensors that wait for some ranks.
#[derive(Args, Clone, Debug)]
pub struct StallArgs {
    /// Report tensors that wait for some ranks; the default.
    #[arg(long, overrides_with = "no_stall_check")]
    stall_check: bool,
    /// Never report tensors that wait for some ranks, nor end the job for them.
    #[arg(long, env = "HOROVOD_STALL_CHECK_DISABLE", overrides_with = "stall_check")]
    no_stall_check: bool,
    /// Age after which a tensor that waits for some ranks is reported. [default: 60]
    #[arg(long, value_name = "SECONDS", env = "HOROVOD_STALL_CHECK_TIME_SECONDS", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    stall_check_warning_time_seconds: Option<u64>,
    /// Age after which such a tensor ends the job, at least that of the report; 0 for never. [default: 0]
    #[arg(long, value_name = "SECONDS", env = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", value_parser = clap::value_parser!(u64).range(0..=604_800))]
    stall_check_shutdown_time_seconds: Option<u64>,
}

impl StallArgs {
    /// Age of a report in milliseconds; the greatest number for never, nothing for the default.
    pub fn warning_ms(&self) -> Option<u64> {
        if self.is_off() {
            Some(u64::MAX)
        } else {
            self.stall_check_warning_time_seconds.map(|seconds| seconds * 1_000)
        }
    }

    /// Age of the end in milliseconds; 0 for never, nothing for the default.
    pub fn shutdown_ms(&self) -> Option<u64> {
        if self.is_off() { Some(0) } else { self.stall_check_shutdown_time_seconds.map(|seconds| seconds * 1_000) }
    }

    fn is_off(&self) -> bool {
        self.no_stall_check && !self.stall_check
    }
}

/// The most that is fused into one operation: as the option says in MiB, else Horovod's variable in bytes.
///
/// # Errors
/// When Horovod's variable is no number of bytes.
pub fn fusion_threshold_bytes(megabytes: Option<u64>) -> anyhow::Result<Option<u64>> {
    if let Some(megabytes) = megabytes {
        return Ok(Some(megabytes << 20));
    }
    let Some(text) = std::env::var_os(FUSION_THRESHOLD) else { return Ok(None) };
    let bytes = text.to_str().and_then(|text| text.trim().parse().ok());
    bytes.map(Some).with_context(|| format!("{FUSION_THRESHOLD} is {}; it is a number of bytes", text.display()))
}

const FUSION_THRESHOLD: &str = "HOROVOD_FUSION_THRESHOLD";

/// A number of operations; more than there can be is as many as there can be.
fn parse_capacity(text: &str) -> Result<usize, String> {
    let count: u32 = text.trim().parse().map_err(|error| format!("{error}; it is a number of operations"))?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX).min(limits::SCHEDULE_TENSORS_MAX))
}

/// A core in a list of them.
///
/// # Errors
/// When it is not the number of a core.
pub fn core(text: &str) -> Result<usize, String> {
    let core: u16 = text.trim().parse().map_err(|error| format!("{error}; it is the number of a core, from 0"))?;
    Ok(core.into())
}

/// A duration in seconds, with a fraction, for `--peer-timeout`.
///
/// # Errors
/// When it is no number, or not between 1.1 and 86,400.
pub fn seconds(text: &str) -> Result<std::time::Duration, String> {
    let given: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if !(1.1..=86_400.0).contains(&given) {
        return Err("it must be between 1.1 and 86400 seconds: silence is only suspect for the first one".to_owned());
    }
    Ok(std::time::Duration::from_secs_f64(given))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{FromArgMatches, Parser};

    #[derive(Parser, Debug)]
    struct Options {
        #[command(flatten)]
        reuse: ReuseArgs,
        #[command(flatten)]
        stall: StallArgs,
    }

    fn options(line: &str) -> Options {
        // Variables are read in layers, not here.
        let cli = <Options as clap::CommandFactory>::command().no_binary_name(true);
        let cli = cli.mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
        let matches = cli.try_get_matches_from(line.split_whitespace()).expect("a good line");
        Options::from_arg_matches(&matches).expect("a good line")
    }

    #[test]
    fn the_last_of_two_opposites_counts_and_horovods_variable_behind_them() {
        let cases = [
            ("", None, true),
            ("", Some("1"), true),
            ("", Some("0"), false),
            ("--hierarchical-allreduce", Some("0"), true),
            ("--no-hierarchical-allreduce", Some("1"), false),
            ("--no-hierarchical-allreduce --hierarchical-allreduce", None, true),
            ("--hierarchical-allreduce --no-hierarchical-allreduce", None, false),
        ];
        for (line, variable, expected) in cases {
            let given = options(line).reuse.is_hierarchical_with(variable);
            assert_eq!(given.expect("good"), expected, "{line:?} with {variable:?}");
        }
        let error = options("").reuse.is_hierarchical_with(Some("perhaps")).expect_err("neither");
        assert!(error.to_string().contains("HOROVOD_HIERARCHICAL_ALLREDUCE is \"perhaps\""), "{error}");
    }

    #[test]
    fn a_capacity_is_bounded() {
        let of = |line: &str| options(line).reuse.cache_capacity;
        assert_eq!(of(""), None);
        assert_eq!(of("--cache-capacity 0"), Some(0));
        assert_eq!(of("--cache-capacity 1000000"), Some(limits::SCHEDULE_TENSORS_MAX));
    }

    #[test]
    fn the_stall_check_is_switched_off_as_a_whole() {
        let ages = |line: &str| {
            let stall = options(line).stall;
            (stall.warning_ms(), stall.shutdown_ms())
        };
        let given = "--stall-check-warning-time-seconds 7 --stall-check-shutdown-time-seconds 9";
        assert_eq!(ages(""), (None, None));
        assert_eq!(ages(given), (Some(7_000), Some(9_000)));
        assert_eq!(ages(&format!("{given} --no-stall-check")), (Some(u64::MAX), Some(0)));
        assert_eq!(ages(&format!("{given} --no-stall-check --stall-check")), (Some(7_000), Some(9_000)));
    }
}
