//! The settings that `ronde run` and `ronde sidecar` both take.
//!
//! [`Tuning`] is the one place for such a setting: its name, help, bounds and unit on the command line, Horovod's variable
//! for it, and its default. The configuration file and the variables of ronde's own follow from the option. The launcher
//! sends the whole to each sidecar in [`Start`](crate::messages::Start). To add a setting, add a field here and use it where
//! it takes effect.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::Args;
use clap::builder::TypedValueParser;
use ronde_transport::Congestion;
use ronde_wire::control::Transport;
use ronde_wire::limits;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::autotune::AutotuneArgs;
use crate::codes::Code;
use crate::flight::FlightDirectory;
use crate::numbers::whole;
use crate::otlp::OtlpArgs;
use crate::plugins::PluginSettings;
use crate::profile::{Cost, Profile, chunk_bytes};
use crate::web::WebArgs;

/// The settings that `ronde run` and `ronde sidecar` both take. An absent value stands for the default.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tuning {
    /// Silence after which a worker or a sidecar is given up, more than one second. [default: 5]
    #[arg(long = "peer-timeout", value_name = "SECONDS", value_parser = timeout_ms)]
    pub peer_timeout_ms: Option<u64>,
    /// What sidecars talk to each other over: quic (UDP), tls (TLS over TCP), or auto: quic for control, tls for data. All of
    /// them are TLS 1.3, and none gives way to another. All sidecars of a job need the same. [default: auto]
    #[arg(long, value_name = "auto|quic|tls", value_parser = clap::value_parser!(Transport))]
    pub transport: Option<Transport>,
    /// The congestion control of TCP connections between sidecars: system (what net.ipv4.tcp_congestion_control of the host
    /// says), a name that it knows, such as dctcp, or auto: the host's, with cubic in place of bbr, whose pacing costs much
    /// processor time within a cluster. Between regions take system.
    #[arg(long, value_name = "auto|system|NAME", default_value_t)]
    #[serde(serialize_with = "write_text", deserialize_with = "read_text")]
    pub tcp_congestion: Congestion,
    /// Data lanes between two sidecars. [default: by the number of cores]
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=limits::LANES_MAX as u64))]
    pub lanes: Option<u16>,
    /// The most data threads of an operation whose ranks all use one sidecar. [default: all data threads]
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=limits::LANES_MAX as u64))]
    pub local_lanes: Option<u16>,
    /// The most that is fused into one operation; 0 switches fusion off. [default: 64, or HOROVOD_FUSION_THRESHOLD in bytes]
    #[arg(long = "fusion-threshold-mb", value_name = "MB", value_parser = mebibytes(0..=65_536))]
    pub fusion_threshold_bytes: Option<u64>,
    /// The chunk size of all operations: a power of two from 4096 to 1048576. [default: chosen for each operation by its cost]
    #[arg(long, value_name = "BYTES", value_parser = chunk)]
    pub chunk_bytes: Option<u32>,
    /// Tensors of up to so many bytes a rank travel with the messages that agree about them; 0 for none. [default: 4096]
    #[arg(long, value_name = "BYTES", value_parser = whole::<u32>(0..=limits::EAGER_BYTES_MAX as u64))]
    pub eager_bytes: Option<u32>,
    /// Negotiate every operation, also those that come again in every step.
    #[arg(long)]
    pub no_run_ahead: bool,
    /// The capacity of the request cache in operations; 0 negotiates every operation in full. [default: the maximum, which
    /// is 4096 in steps that run ahead and 1024 that are announced by number]
    #[arg(long, value_name = "N", env = "HOROVOD_CACHE_CAPACITY", value_parser = capacity)]
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
    #[serde(skip)]
    hierarchical_allgather: bool,
    /// Changes nothing: an all-gather sends every rank's tensor once to every other sidecar in any case.
    #[arg(long, overrides_with = "hierarchical_allgather")]
    #[serde(skip)]
    no_hierarchical_allgather: bool,
    /// A profile that `ronde tune` has written: settings that are not given otherwise, and a cost model.
    #[arg(long = "tuning", value_name = "FILE")]
    #[serde(skip)]
    profile: Option<PathBuf>,
    /// The cost model of the profile.
    #[arg(skip)]
    pub cost: Option<Cost>,
    /// Measure latency and bandwidth between sidecars for metrics and the report, by operations that are negotiated and performed
    /// alone. It changes no algorithm.
    #[arg(long)]
    pub measure_cost: bool,
    /// The search for better settings.
    #[command(flatten)]
    pub autotune: AutotuneArgs,
    /// The plugins.
    #[command(flatten)]
    pub plugins: PluginSettings,
    /// The listener for gRPC-Web.
    #[command(flatten)]
    pub web: WebArgs,
    /// The export of metrics.
    #[command(flatten)]
    pub otlp: OtlpArgs,
    /// Report tensors that wait for some ranks; the default.
    #[arg(long, overrides_with = "no_stall_check")]
    stall_check: bool,
    /// Never report tensors that wait for some ranks, nor end the job for them.
    #[arg(long, env = "HOROVOD_STALL_CHECK_DISABLE", overrides_with = "stall_check")]
    no_stall_check: bool,
    /// Age after which a tensor that waits for some ranks is reported. [default: 60; 10 for `ronde run` in a terminal]
    #[arg(
        long = "stall-check-warning-time-seconds",
        value_name = "SECONDS",
        env = "HOROVOD_STALL_CHECK_TIME_SECONDS",
        value_parser = seconds(1..=604_800)
    )]
    stall_warning_ms: Option<u64>,
    /// Age after which such a tensor ends the job, at least that of the report; 0 for never. [default: 0]
    #[arg(
        long = "stall-check-shutdown-time-seconds",
        value_name = "SECONDS",
        env = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        value_parser = seconds(0..=604_800)
    )]
    stall_shutdown_ms: Option<u64>,
    /// Where sidecars write flight records after a failure: the newest operations, without contents. off records nothing.
    /// [default: a directory of the job in ronde.flight-UID in the temporary directory]
    #[arg(long, value_name = "DIR", env = "RONDE_FLIGHT_DIR", value_parser = FlightDirectory::parse)]
    flight_dir: Option<FlightDirectory>,
    /// Keep all threads of each sidecar on these cores of its host. [default: any]
    #[arg(long, value_name = "CORE,...", value_delimiter = ',', env = "HOROVOD_THREAD_AFFINITY", value_parser = core)]
    pub thread_affinity: Vec<usize>,
    /// Shared memory for the inputs of one worker, and as much for its results. [default: 4096]
    #[arg(long = "arena-mb", value_name = "MB", value_parser = mebibytes(1..=1 << 20))]
    pub arena_bytes_max: Option<u64>,
    /// Let each sidecar use the GPUs of its host: workers share the memory of their tensors with it. It runs all-reduces by NCCL
    /// among the GPUs, and between hosts on 1/n of the bytes per GPU; broadcasts go through the host's memory. For workers with
    /// RONDE_GPU_STAGING=ronde; elastic jobs are refused. Not run on a GPU yet; see docs/GPU.md.
    #[arg(long)]
    pub gpu: bool,
}

impl Tuning {
    /// Completes what the command line, ronde's own variables and the configuration file gave: by those variables of Horovod
    /// that have another unit or form than the option, and with paths as seen from this directory.
    ///
    /// `issues_certificates` says whether clients of gRPC-Web can have certificates of this job.
    ///
    /// # Errors
    /// When a variable is not understood, or settings exclude each other.
    pub fn resolve(self, issues_certificates: bool) -> anyhow::Result<Self> {
        let given = self.with_variables(|name| std::env::var(name).ok())?;
        let (web, plugins) = (given.web.resolve(issues_certificates)?, given.plugins.absolute());
        let flight_dir = given.flight_dir.map(FlightDirectory::absolute);
        let otlp = given.otlp.resolve()?;
        let given = Self { plugins, web, otlp, flight_dir, ..given };
        match &given.profile {
            Some(path) => {
                let profile = Profile::read(path).context(Code::Profile)?;
                Ok(given.with_profile(&profile))
            }
            None => Ok(given),
        }
    }

    /// Completes the settings by those of a profile.
    #[must_use]
    pub fn with_profile(mut self, profile: &Profile) -> Self {
        self.fusion_threshold_bytes = self.fusion_threshold_bytes.or(profile.fusion_threshold_bytes);
        self.chunk_bytes = self.chunk_bytes.or(profile.chunk_bytes);
        self.lanes = self.lanes.or(profile.lanes);
        self.local_lanes = self.local_lanes.or(profile.local_lanes);
        self.eager_bytes = self.eager_bytes.or(profile.eager_bytes);
        self.cost = self.cost.or(profile.cost);
        if !self.hierarchical_allreduce && !self.no_hierarchical_allreduce {
            self.no_hierarchical_allreduce = profile.hierarchical_allreduce == Some(false);
        }
        self.transport = self.transport.or(profile.transport);
        self
    }

    fn with_variables(mut self, lookup: impl Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let is_threshold_given = self.fusion_threshold_bytes.is_some();
        let threshold = lookup(FUSION_THRESHOLD).filter(|text| !text.trim().is_empty());
        if let (false, Some(text)) = (is_threshold_given, threshold) {
            let bytes = text.trim().parse();
            let bytes = bytes
                .ok()
                .with_context(|| format!("{FUSION_THRESHOLD} is {text}; it must be a whole number of bytes"))?;
            self.fusion_threshold_bytes = Some(bytes);
        }
        if !self.hierarchical_allreduce && !self.no_hierarchical_allreduce {
            match lookup(HIERARCHICAL_ALLREDUCE).as_deref().map(str::trim) {
                None | Some("") => {}
                Some("1") => self.hierarchical_allreduce = true,
                Some("0") => self.no_hierarchical_allreduce = true,
                Some(other) => bail!("{HIERARCHICAL_ALLREDUCE} is {other:?}; it is 0 or 1"),
            }
        }
        self.autotune = self.autotune.resolve(!is_threshold_given && self.fusion_threshold_bytes.is_some());
        Ok(self)
    }

    /// Checks the bounds of settings that came in a message, where no option's parser has checked them.
    ///
    /// # Errors
    /// When a value is out of its range, naming it.
    pub fn check(&self) -> anyhow::Result<()> {
        let (lanes, peer_timeout_ms) = (self.lanes(), self.peer_timeout_ms());
        ensure!(
            (1..=limits::LANES_MAX).contains(&usize::from(lanes)),
            "lanes = {lanes} is out of range; it must be 1 to {}",
            limits::LANES_MAX
        );
        ensure!(
            peer_timeout_ms > limits::SUSPECT_MS,
            "peer_timeout = {peer_timeout_ms} ms is too short; silence is only suspect for the first {} ms",
            limits::SUSPECT_MS
        );
        self.chunk_bytes.map_or(Ok(0), |bytes| chunk_bytes(bytes.into()))?;
        self.cost.as_ref().map_or(Ok(()), Cost::check)?;
        self.autotune.check()?;
        self.otlp.settings()?;
        self.web.settings().map(drop)
    }

    /// What sidecars talk to each other over. Default: auto.
    pub fn transport(&self) -> Transport {
        self.transport.unwrap_or_default()
    }

    /// Lanes to each peer. Default: one up to 4 cores of this host, then one for 4 cores, at most 4.
    pub fn lanes(&self) -> u16 {
        let default = || u16::try_from(cores() / CORES_PER_LANE).unwrap_or(1).clamp(1, DEFAULT_LANES_MAX);
        self.lanes.unwrap_or_else(default)
    }

    /// Data threads: one for each lane, and more for operations that need no other sidecar: one for each core, at most 4.
    pub fn threads(&self) -> u16 {
        let default = u16::try_from(cores()).map_or(DEFAULT_LANES_MAX, |cores| cores.min(DEFAULT_LANES_MAX));
        self.lanes().max(default)
    }

    /// Silence after which a worker or a sidecar is dead, in milliseconds. Default: [`limits::PEER_TIMEOUT_MS`].
    pub fn peer_timeout_ms(&self) -> u64 {
        self.peer_timeout_ms.unwrap_or(limits::PEER_TIMEOUT_MS)
    }

    /// Bytes of inputs, and of results, of one session. Default: 4 GiB.
    pub fn arena_bytes_max(&self) -> u64 {
        self.arena_bytes_max.unwrap_or(ARENA_BYTES_MAX)
    }

    /// Bytes of one bucket. Default: [`limits::FUSION_THRESHOLD_BYTES`].
    pub fn fusion_threshold_bytes(&self) -> u64 {
        self.fusion_threshold_bytes.unwrap_or(limits::FUSION_THRESHOLD_BYTES)
    }

    /// Whether an all-reduce begins among the ranks of a sidecar. The coordinator's value counts.
    pub fn hierarchical_allreduce(&self) -> bool {
        !self.no_hierarchical_allreduce
    }

    /// Age of a reported tensor in milliseconds: the greatest number for never, nothing for the engine's default.
    pub fn stall_warning_ms(&self) -> Option<u64> {
        if self.is_stall_check_off() { Some(u64::MAX) } else { self.stall_warning_ms }
    }

    /// Reports stalls early, unless their age is given: somebody watches.
    #[must_use]
    pub fn watched(mut self) -> Self {
        self.stall_warning_ms.get_or_insert(WATCHED_STALL_WARNING_MS);
        self
    }

    /// Age of a tensor that ends the epoch in milliseconds; 0, the default, for never.
    pub fn stall_shutdown_ms(&self) -> u64 {
        if self.is_stall_check_off() { 0 } else { self.stall_shutdown_ms.unwrap_or(0) }
    }

    /// Whether sidecars record, and where they write.
    pub fn flight_directory(&self) -> FlightDirectory {
        self.flight_dir.clone().unwrap_or_default()
    }

    fn is_stall_check_off(&self) -> bool {
        self.no_stall_check && !self.stall_check
    }
}

/// Age of a reported tensor while somebody watches.
const WATCHED_STALL_WARNING_MS: u64 = 10_000;
const FUSION_THRESHOLD: &str = "HOROVOD_FUSION_THRESHOLD";
const HIERARCHICAL_ALLREDUCE: &str = "HOROVOD_HIERARCHICAL_ALLREDUCE";
/// A lane keeps about two cores busy, encrypting on one side and decrypting on the other; the training needs the rest.
const CORES_PER_LANE: usize = 4;
/// Beyond this many lanes the control thread and memory are the limit.
const DEFAULT_LANES_MAX: u16 = 4;
/// Address space, not memory: pages are taken when first used, and a limit that is reached is an error for the user.
const ARENA_BYTES_MAX: u64 = 4 << 30;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// A number of MiB on the command line, of bytes here.
pub(crate) fn mebibytes(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = u64> {
    whole::<u64>(range).map(|megabytes: u64| megabytes << 20)
}

/// A number of seconds on the command line, of milliseconds here.
fn seconds(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = u64> {
    whole::<u64>(range).map(|seconds: u64| seconds * 1_000)
}

/// A number of seconds with a fraction, in milliseconds.
fn timeout_ms(text: &str) -> Result<u64, String> {
    let given: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if !(1.1..=86_400.0).contains(&given) {
        return Err("it must be between 1.1 and 86400 seconds: silence is only suspect for the first one".to_owned());
    }
    let milliseconds = std::time::Duration::from_secs_f64(given).as_millis();
    Ok(u64::try_from(milliseconds).unwrap_or(u64::MAX))
}

/// A number of operations; more than there can be is as many as there can be.
fn capacity(text: &str) -> Result<usize, String> {
    let count: u32 =
        text.trim().parse().map_err(|error| format!("{error}; it must be a whole number of operations"))?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX).min(limits::SCHEDULE_TENSORS_MAX))
}

/// A chunk size.
fn chunk(text: &str) -> Result<u32, String> {
    let bytes: u64 = text.trim().parse().map_err(|error| format!("{error}; it must be a whole number of bytes"))?;
    chunk_bytes(bytes).map_err(|error| error.to_string())
}

/// A core in a list of them.
fn core(text: &str) -> Result<usize, String> {
    let core: u16 = text.trim().parse().map_err(|error| format!("{error}; it is the number of a core, from 0"))?;
    Ok(core.into())
}

fn write_text<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn read_text<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use clap::{FromArgMatches, Parser};

    use super::*;

    #[derive(Parser, Debug)]
    struct Options {
        #[command(flatten)]
        tuning: Tuning,
    }

    fn tuning(line: &str) -> Tuning {
        // Variables are read by the program's configuration, not here.
        let cli = <Options as clap::CommandFactory>::command().no_binary_name(true);
        let cli = cli.mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
        let matches = cli.try_get_matches_from(line.split_whitespace()).expect("a good line");
        Options::from_arg_matches(&matches).expect("a good line").tuning
    }

    #[test]
    fn the_last_of_two_opposite_options_wins_over_horovods_variable() {
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
            let lookup = |name: &str| variable.filter(|_| name == HIERARCHICAL_ALLREDUCE).map(str::to_owned);
            let given = tuning(line).with_variables(lookup).expect("good");
            assert_eq!(given.hierarchical_allreduce(), expected, "{line:?} with {variable:?}");
        }
        let empty = tuning("").with_variables(|_| Some(" ".to_owned())).expect("an empty variable is not set");
        assert_eq!(empty.fusion_threshold_bytes, None);
        let error = tuning("").with_variables(|_| Some("7x".to_owned())).expect_err("neither").to_string();
        assert!(error.contains("HOROVOD_FUSION_THRESHOLD is 7x; it must be a whole number of bytes"), "{error}");
        let perhaps = |name: &str| (name == HIERARCHICAL_ALLREDUCE).then(|| "perhaps".to_owned());
        let error = tuning("").with_variables(perhaps).expect_err("neither").to_string();
        assert!(error.contains("HOROVOD_HIERARCHICAL_ALLREDUCE is \"perhaps\""), "{error}");
    }

    #[test]
    fn options_have_their_unit_and_horovods_variable_its_own() {
        let given = tuning("--fusion-threshold-mb 3 --arena-mb 2 --peer-timeout 1.5 --plugin-state-mb 1");
        assert_eq!((given.fusion_threshold_bytes(), given.arena_bytes_max()), (3 << 20, 2 << 20));
        assert_eq!((given.peer_timeout_ms(), given.plugins.state_bytes_max), (1_500, Some(1 << 20)));
        let lookup = |name: &str| (name == FUSION_THRESHOLD).then(|| " 77 ".to_owned());
        assert_eq!(tuning("").with_variables(lookup).expect("good").fusion_threshold_bytes(), 77);
        assert_eq!(given.with_variables(lookup).expect("good").fusion_threshold_bytes(), 3 << 20);
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_range() {
        let cli = || <Options as clap::CommandFactory>::command().no_binary_name(true).allow_negative_numbers(true);
        for (option, values, most) in [
            ("--arena-mb", ["-1", "0", "two"], "1 to 1048576"),
            ("--fusion-threshold-mb", ["-1", "65537", "1.5"], "0 to 65536"),
            ("--plugin-state-mb", ["-1", "0", "x"], "1 to 1048576"),
            ("--stall-check-warning-time-seconds", ["-1", "0", "18446744073709551616"], "1 to 604800"),
            ("--stall-check-shutdown-time-seconds", ["-1", "604801", "x"], "0 to 604800"),
            ("--lanes", ["-1", "0", "70000"], "1 to 16"),
            ("--otlp-interval", ["-1", "0", "3601"], "1 to 3600"),
        ] {
            for value in values {
                let error = cli().try_get_matches_from([option, value]).expect_err(option).to_string();
                assert!(
                    error.contains(&format!("it must be a whole number from {most}\n")),
                    "{option} {value}: {error}"
                );
            }
        }
    }

    #[test]
    fn a_profile_completes_what_was_not_given() {
        let cost = Cost { alpha_us: 1.0, beta_us_per_byte: 2.0, gamma_us_per_byte: 3.0 };
        let profile = Profile {
            fusion_threshold_bytes: Some(7),
            chunk_bytes: Some(8_192),
            lanes: Some(3),
            local_lanes: Some(4),
            eager_bytes: Some(5),
            hierarchical_allreduce: Some(false),
            transport: Some(Transport::Quic),
            cost: Some(cost),
        };
        let all = tuning("").with_profile(&profile);
        let found = (all.fusion_threshold_bytes, all.chunk_bytes, all.lanes, all.eager_bytes, all.transport, all.cost);
        assert_eq!(found, (Some(7), Some(8_192), Some(3), Some(5), Some(Transport::Quic), Some(cost)));
        assert!(!all.hierarchical_allreduce());
        assert_eq!(all.local_lanes, Some(4));
        assert_eq!(tuning("--local-lanes 2").with_profile(&profile).local_lanes, Some(2));
        let line = "--fusion-threshold-mb 1 --chunk-bytes 4096 --lanes 1 --eager-bytes 0 --hierarchical-allreduce --transport tls";
        let none = tuning(line).with_profile(&profile);
        let kept = (none.fusion_threshold_bytes, none.chunk_bytes, none.lanes, none.eager_bytes, none.transport);
        assert_eq!(kept, (Some(1 << 20), Some(4_096), Some(1), Some(0), Some(Transport::Tls)));
        assert!(none.hierarchical_allreduce());
        assert_eq!(tuning("--transport auto").with_profile(&profile).transport(), Transport::Auto);
        let given = |name: &str| (name == HIERARCHICAL_ALLREDUCE).then(|| "1".to_owned());
        assert!(tuning("").with_variables(given).expect("good").with_profile(&profile).hierarchical_allreduce());
    }

    #[test]
    fn a_capacity_is_bounded() {
        let of = |line: &str| tuning(line).cache_capacity;
        assert_eq!(of(""), None);
        assert_eq!(of("--cache-capacity 0"), Some(0));
        assert_eq!(of("--cache-capacity 1000000"), Some(limits::SCHEDULE_TENSORS_MAX));
    }

    #[test]
    fn the_stall_check_is_switched_off_as_a_whole() {
        let ages = |line: &str| {
            let tuning = tuning(line);
            (tuning.stall_warning_ms(), tuning.stall_shutdown_ms())
        };
        let given = "--stall-check-warning-time-seconds 7 --stall-check-shutdown-time-seconds 9";
        assert_eq!(ages(""), (None, 0));
        assert_eq!(ages(given), (Some(7_000), 9_000));
        assert_eq!(tuning("").watched().stall_warning_ms(), Some(10_000));
        assert_eq!(tuning(given).watched().stall_warning_ms(), Some(7_000));
        assert_eq!(ages(&format!("{given} --no-stall-check")), (Some(u64::MAX), 0));
        assert_eq!(ages(&format!("{given} --no-stall-check --stall-check")), (Some(7_000), 9_000));
    }

    #[test]
    fn a_message_carries_every_setting_and_its_bounds_are_checked() {
        let given = tuning(
            "--peer-timeout 2 --transport tls --tcp-congestion dctcp --lanes 2 --local-lanes 3 --eager-bytes 7 \
             --no-run-ahead \
             --cache-capacity 5 --no-hierarchical-allreduce --plugin p --web-listen 127.0.0.1:0 --no-stall-check \
             --thread-affinity 0,3 --arena-mb 9 --fusion-threshold-mb 1 --chunk-bytes 4096 --autotune \
             --autotune-parameters lanes --autotune-gaussian-process-noise 0.5",
        );
        let text = serde_json::to_string(&given).expect("JSON");
        let read: Tuning = serde_json::from_str(&text).expect("what was written");
        assert_eq!(format!("{read:?}"), format!("{given:?}"));
        let of = |text: &str| serde_json::from_str::<Tuning>(text).map_err(anyhow::Error::from).and_then(|t| t.check());
        of("{}").expect("the defaults are good");
        for (text, reason) in [
            (r#"{"lanes":0}"#, "lanes = 0 is out of range"),
            (r#"{"peer_timeout_ms":1000}"#, "peer_timeout = 1000 ms is too short"),
            (r#"{"tcp_congestion":"a b"}"#, "neither auto nor system"),
            (r#"{"web":{"listen":"10.0.0.1:80"}}"#, "in the clear beyond this host"),
            (r#"{"web":{"listen":"127.0.0.1:80","origins":["x"]}}"#, "is no origin"),
            (r#"{"lane":1}"#, "unknown field"),
            (r#"{"chunk_bytes":5000}"#, "a chunk of 5000 bytes is not possible"),
            (r#"{"cost":{"alpha_us":-1.0,"beta_us_per_byte":1.0,"gamma_us_per_byte":1.0}}"#, "alpha-us = -1 is out of"),
            (r#"{"autotune":{"noise":7.0}}"#, "noise = 7 is out of range"),
        ] {
            let error = format!("{:#}", of(text).expect_err(text));
            assert!(error.contains(reason), "{error}");
        }
    }
}
