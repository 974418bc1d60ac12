//! `ronde tune`: searches for the settings of a job on given hosts and writes them as a profile, with a plot of the search;
//! and the measurement of the cost model before a job (`ronde run --calibrate`).
//!
//! The search itself is that of `ronde run --autotune`, in a job whose workers perform the steps of a training program.

mod log;
mod plot;
mod worker;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, ensure};
use clap::Args;
use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::exit::{EXIT_UNAVAILABLE, fail, print};
use ronde_bootstrap::profile::{Cost, Profile};
use ronde_engine::AutotuneSettings;
use ronde_wire::TuningParameter;
use ronde_wire::control::Transport;
use serde_json::Value;

use self::log::{Row, Search};
pub(super) use self::worker::{TuneWorkerArgs, main as worker};
use crate::bench::scale::workloads::resnet;

/// Arguments of `ronde tune`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct TuneArgs {
    /// How many worker processes to start (also `-np N`).
    #[arg(long = "num-proc", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    num_proc: u32,
    /// Hosts and their slots, as for `ronde run`. [default: localhost:N]
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,...", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// A file with a line `HOST slots=N` for each host.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// How many sidecars to start on a single host.
    #[arg(long, value_name = "K")]
    sidecars: Option<u32>,
    /// A further option of `ronde run`, such as --run-option=--ssh-port=2222 or a start value like
    /// --run-option=--fusion-threshold-mb=8. May be given several times.
    #[arg(long = "run-option", value_name = "OPTION", allow_hyphen_values = true)]
    run_options: Vec<OsString>,
    /// The transports to try, each with a search of its own. [default: tls and quic; auto where there is one sidecar]
    #[arg(long, value_name = "auto|quic|tls,...", value_delimiter = ',', value_parser = clap::value_parser!(Transport))]
    transports: Vec<Transport>,
    /// How many samples a search takes.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=256))]
    samples: u16,
    /// How many samples are discarded first.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=1_000))]
    warmup_samples: u16,
    /// How many steps are measured at once; a sample is the median of five such measurements.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps_per_sample: u32,
    /// What to search for, as for --autotune-parameters. [default: all of it]
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        value_parser = |text: &str| text.parse::<TuningParameter>()
    )]
    parameters: Vec<TuningParameter>,
    /// The bytes of the gradients of a step, BYTES or BYTESxCOUNT each, in the order in which they become ready. [default:
    /// those of ResNet-50]
    #[arg(long, value_name = "BYTES[xCOUNT],...", value_delimiter = ',', conflicts_with = "command", value_parser = gradients)]
    tensors: Vec<Gradients>,
    /// The profile to write; the log and the plot of the search are written beside it.
    #[arg(long, value_name = "FILE", default_value = "ronde-tuning.toml")]
    output: PathBuf,
    /// A training program to search with, instead of one that only performs collectives. It needs enough steps.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Gradients of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gradients {
    bytes: u64,
    count: usize,
}

/// Searches, and writes the profile; prints the outcome.
pub(super) fn main(args: &TuneArgs) -> ExitCode {
    match run(args) {
        Ok(text) => {
            print(&text);
            ExitCode::SUCCESS
        }
        Err(error) => fail(Code::TuneFailed, &coded(&error, Code::TuneFailed), EXIT_UNAVAILABLE),
    }
}

fn run(args: &TuneArgs) -> anyhow::Result<String> {
    check_writable(&args.output)?;
    let mut found = Vec::new();
    for transport in args.transports() {
        let (search, cost) = args.search(transport).with_context(|| format!("the search over {transport} failed"))?;
        found.push((transport, search, cost));
    }
    let best = found.iter().max_by(|a, b| a.1.outcome.score.total_cmp(&b.1.outcome.score));
    let (transport, search, cost) = best.context("there is no transport to search over")?;
    let is_alpha_searched = args.parameters().contains(&TuningParameter::Algorithms);
    let profile = profile((*transport, args.has_peers()), &search.outcome, *cost, is_alpha_searched);
    let picture = args.output.with_extension("svg");
    let searches: Vec<(&str, &Search)> =
        found.iter().map(|(transport, search, _)| (transport.as_str(), search)).collect();
    write(&picture, &plot::plot(&searches))?;
    let text = profile.text(&args.facts(search));
    write(&args.output, &text)?;
    Ok(args.summary(&found, &text, &picture))
}

impl TuneArgs {
    /// Whether the job has several sidecars.
    fn has_peers(&self) -> bool {
        let has_hosts = self.hosts.as_ref().is_some_and(|hosts| hosts.contains(',')) || self.hostfile.is_some();
        has_hosts || self.sidecars.is_some_and(|count| count > 1)
    }

    fn transports(&self) -> Vec<Transport> {
        match (self.transports.is_empty(), self.has_peers()) {
            (false, _) => self.transports.clone(),
            (true, true) => vec![Transport::Tls, Transport::Quic],
            (true, false) => vec![Transport::Auto],
        }
    }

    /// Runs one job with a search.
    fn search(&self, transport: Transport) -> anyhow::Result<(Search, Option<Cost>)> {
        let log = self.output.with_extension(format!("{transport}.csv"));
        let report = self.output.with_extension(format!("{transport}.json"));
        let ended = ended(self.job(transport, &log, &report)?);
        // The report says more than the exit code, and is of no use afterwards.
        let cost = cost_in(&report);
        drop(std::fs::remove_file(&report));
        ended?;
        Ok((Search::read(&log, self.samples.into())?, cost.context("in the job's report")?))
    }

    fn job(&self, transport: Transport, log: &Path, report: &Path) -> anyhow::Result<Command> {
        let ronde = std::env::current_exe().context("cannot find the ronde binary")?;
        let mut command = Command::new(&ronde);
        command.args(["run", "--num-proc"]).arg(self.num_proc.to_string());
        let option = |command: &mut Command, name: &str, value: Option<OsString>| {
            if let Some(value) = value {
                command.arg(name).arg(value);
            }
        };
        option(&mut command, "--hosts", self.hosts.clone().map(Into::into));
        option(&mut command, "--hostfile", self.hostfile.clone().map(Into::into));
        option(&mut command, "--sidecars", self.sidecars.map(|count| count.to_string().into()));
        command.args(without(&self.run_options, &SWITCHES, &[])).args([
            "--transport",
            transport.as_str(),
            "--measure-cost",
            "--autotune",
        ]);
        let parameters: Vec<&str> = self.parameters().into_iter().map(TuningParameter::name).collect();
        for (name, value) in [
            ("--report", report.as_os_str().to_owned()),
            ("--autotune-log-file", log.as_os_str().to_owned()),
            ("--autotune-warmup-samples", self.warmup_samples.to_string().into()),
            ("--autotune-steps-per-sample", self.steps_per_sample.to_string().into()),
            ("--autotune-bayes-opt-max-samples", self.samples.to_string().into()),
            ("--autotune-parameters", parameters.join(",").into()),
        ] {
            command.arg(name).arg(value);
        }
        command.arg("--");
        if self.command.is_empty() {
            let tensors: Vec<String> = self.gradients().iter().map(u64::to_string).collect();
            command.arg(&ronde).args(["tune-worker", "--steps", &self.steps().to_string()]);
            command.args(["--tensors", &tensors.join(",")]);
        } else {
            command.args(&self.command);
        }
        Ok(command)
    }

    fn parameters(&self) -> Vec<TuningParameter> {
        if self.parameters.is_empty() { TuningParameter::ALL.to_vec() } else { self.parameters.clone() }
    }

    fn gradients(&self) -> Vec<u64> {
        if self.tensors.is_empty() {
            return resnet50();
        }
        self.tensors.iter().flat_map(|given| std::iter::repeat_n(given.bytes, given.count)).collect()
    }

    fn steps(&self) -> u64 {
        let (samples_max, warmup_samples) = (self.samples.into(), self.warmup_samples.into());
        let steps_per_sample = self.steps_per_sample;
        AutotuneSettings { samples_max, warmup_samples, steps_per_sample, ..AutotuneSettings::default() }.steps()
    }

    /// Facts for the profile, as TOML.
    fn facts(&self, search: &Search) -> String {
        let hosts = self.hosts.clone().unwrap_or_else(|| "localhost".to_owned());
        let samples = search.samples.len();
        let (score, gain) = (search.outcome.score, search.gain());
        format!(
            "version = {:?}\nranks = {}\nhosts = {hosts:?}\nsamples = {samples}\nmegabytes-per-second = {score:.1}\n\
             gain = {gain:.2}\n",
            env!("CARGO_PKG_VERSION"),
            self.num_proc
        )
    }

    fn summary(&self, found: &[(Transport, Search, Option<Cost>)], profile: &str, picture: &Path) -> String {
        let mut text = String::new();
        for (transport, search, _) in found {
            let (score, gain, samples) = (search.outcome.score, search.gain(), search.samples.len());
            // A string cannot fail to be written to.
            let _ = writeln!(text, "{transport}: {score:.1} MB/s, {gain:.2} times the start, after {samples} samples");
        }
        let (output, picture) = (self.output.display(), picture.display());
        let _ = write!(text, "\n{profile}\nwritten to {output}, the search to {picture}\n");
        let _ = writeln!(text, "use it with: ronde run --tuning {output} ...");
        text
    }
}

/// Measures the cost model with a job of the same options, before the one that was asked for. `arguments` is the command line
/// of that, whose last `command_words` words are its command.
///
/// # Errors
/// When that job fails.
pub(super) fn calibrated(arguments: &[OsString], command_words: usize) -> anyhow::Result<Cost> {
    let ronde = std::env::current_exe().context("cannot find the ronde binary")?;
    let folder = private_folder()?;
    let report = folder.join("report.json");
    let options = &arguments[1..arguments.len().saturating_sub(command_words)];
    let mut command = Command::new(&ronde);
    command.args(without(options, &SWITCHES, &["--report", "--output-filename", "--timeline-filename"]));
    command.env_remove("HOROVOD_TIMELINE").env_remove("RONDE_RUN_TIMELINE_FILENAME");
    command.env("RONDE_RUN_CALIBRATE", "0").env("RONDE_RUN_AUTOTUNE", "0");
    command.args(["--no-autotune", "--measure-cost", "--report"]).arg(&report).arg("--");
    command.arg(&ronde).arg("tune-worker");
    let ended = ended(command);
    let cost = cost_in(&report);
    drop(std::fs::remove_dir_all(&folder));
    ended?;
    cost?.context("nothing was measured: the job has one sidecar, so that nothing is sent; leave out --calibrate")
}

/// Makes a folder that only this user can enter, under a name that nobody can foresee.
fn private_folder() -> anyhow::Result<PathBuf> {
    use std::hash::{BuildHasher, RandomState};
    use std::os::unix::fs::DirBuilderExt;
    let number = RandomState::new().hash_one(std::process::id());
    let folder = std::env::temp_dir().join(format!("ronde-calibration-{number:016x}"));
    let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
    made.with_context(|| format!("cannot make the folder {}", folder.display()))?;
    Ok(folder)
}

/// Switches that a measurement sets itself.
const SWITCHES: [&str; 4] = ["--calibrate", "--measure-cost", "--autotune", "--no-autotune"];

/// Options without some of them: those that take no value, those that take one, and `--`.
fn without(options: &[OsString], switches: &[&str], valued: &[&str]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        let text = option.to_string_lossy();
        if valued.contains(&&*text) {
            rest.next();
            continue;
        }
        let name = text.split('=').next().unwrap_or_default();
        if text != "--" && !switches.contains(&&*text) && !valued.contains(&name) {
            kept.push(option.clone());
        }
    }
    kept
}

/// Runs a job to its end.
fn ended(mut command: Command) -> anyhow::Result<()> {
    let status = command.status().context("the job cannot be started")?;
    ensure!(status.success(), "the job ended with {status}; its messages are above");
    Ok(())
}

/// The cost model in a job's report; `None` when the job had too few operations of different sizes between sidecars.
fn cost_in(report: &Path) -> anyhow::Result<Option<Cost>> {
    let text = std::fs::read_to_string(report).with_context(|| format!("cannot read {}", report.display()))?;
    let report: Value = serde_json::from_str(&text).context("the report is no JSON")?;
    let sidecars = report["sidecars"].as_array().map(Vec::as_slice).unwrap_or_default();
    let cost = sidecars.iter().map(|sidecar| &sidecar["summary"]["cost"]).find(|cost| cost.is_object());
    let cost: Option<Cost> = cost.map(|cost| serde_json::from_value(cost.clone())).transpose()?;
    cost.as_ref().map_or(Ok(()), Cost::check)?;
    Ok(cost)
}

/// The settings that were found over a transport, in a job with or without peers. `is_alpha_searched`: the search has changed
/// alpha.
fn profile(
    (transport, has_peers): (Transport, bool),
    found: &Row,
    cost: Option<Cost>,
    is_alpha_searched: bool,
) -> Profile {
    // Algorithms depend on alpha in relation to beta. The search's relation is the better one: it was tried.
    let searched_us = |cost: &Cost| found.alpha_us * cost.beta_us_per_byte / found.beta_us_per_byte;
    let alpha_us = |cost: &Cost| if is_alpha_searched { searched_us(cost) } else { cost.alpha_us };
    Profile {
        fusion_threshold_bytes: Some(found.fusion_threshold_bytes),
        chunk_bytes: found.chunk_bytes,
        // Without a peer lanes are data threads.
        lanes: Some(found.lanes).filter(|_| has_peers),
        local_lanes: Some(found.lanes).filter(|_| !has_peers),
        eager_bytes: Some(found.eager_bytes),
        hierarchical_allreduce: Some(found.hierarchical_allreduce),
        transport: Some(transport).filter(|transport| *transport != Transport::Auto),
        cost: cost.map(|cost| Cost { alpha_us: alpha_us(&cost), ..cost }),
    }
}

/// Finds out before a search of minutes whether its outcome can be written.
fn check_writable(path: &Path) -> anyhow::Result<()> {
    let is_new = !path.exists();
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A failed search leaves no empty profile.
    let checked = opened.and_then(|_| if is_new { std::fs::remove_file(path) } else { Ok(()) });
    checked.with_context(|| format!("cannot write the profile {}", path.display()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// `BYTES` or `BYTESxCOUNT`.
fn gradients(text: &str) -> Result<Gradients, String> {
    let (bytes, count) = text.split_once('x').unwrap_or((text, "1"));
    let number =
        |text: &str| text.trim().parse::<u64>().map_err(|error| format!("{error}; write BYTES or BYTESxCOUNT"));
    let (bytes, count) = (number(bytes)?, number(count)?);
    let count = usize::try_from(count).ok().filter(|count| (1..=GRADIENTS_MAX).contains(count));
    match (count, (4..=GRADIENT_BYTES_MAX).contains(&bytes)) {
        (Some(count), true) => Ok(Gradients { bytes, count }),
        (None, _) => Err(format!("there can be 1 to {GRADIENTS_MAX} gradients of a size")),
        (_, false) => Err(format!("a gradient has 4 to {GRADIENT_BYTES_MAX} bytes")),
    }
}

/// The bytes of the gradients of ResNet-50, the last layer first.
fn resnet50() -> Vec<u64> {
    resnet([3, 4, 6, 3]).into_iter().rev().map(|elements| 4 * elements).collect()
}

const GRADIENTS_MAX: usize = 4_096;
/// 1 GiB.
const GRADIENT_BYTES_MAX: u64 = 1 << 30;

const EXAMPLES: &str = "Examples:
  ronde tune -np 8 -H alpha:4,beta:4 --output cluster.toml
  ronde tune -np 4 --sidecars 2 --samples 20 python train.py";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradients_of_resnet50_are_those_of_its_25_557_032_parameters() {
        let gradients = resnet50();
        assert_eq!((gradients.len(), gradients.iter().sum::<u64>()), (161, 4 * 25_557_032));
    }

    #[test]
    fn gradients_are_read_and_mistakes_explained() {
        assert_eq!(gradients("4096x3"), Ok(Gradients { bytes: 4_096, count: 3 }));
        assert_eq!(gradients("8"), Ok(Gradients { bytes: 8, count: 1 }));
        for (text, reason) in [
            ("-8", "write BYTES or BYTESxCOUNT"),
            ("8x-1", "write BYTES or BYTESxCOUNT"),
            ("8x0", "1 to 4096 gradients"),
            ("2", "4 to 1073741824 bytes"),
        ] {
            assert!(gradients(text).expect_err(text).contains(reason), "{text}");
        }
    }

    #[test]
    fn a_profile_has_the_measured_model_in_which_a_search_changes_the_relation_of_alpha_to_beta() {
        let found = Row {
            fusion_threshold_bytes: 1,
            chunk_bytes: None,
            lanes: 2,
            eager_bytes: 0,
            hierarchical_allreduce: true,
            alpha_us: 120.0,
            beta_us_per_byte: 1e-3,
            score: 1.0,
        };
        let cost = Cost { alpha_us: 7.0, beta_us_per_byte: 5e-4, gamma_us_per_byte: 1e-4 };
        let alpha =
            |searched| profile((Transport::Tls, true), &found, Some(cost), searched).cost.map(|cost| cost.alpha_us);
        assert_eq!((alpha(false), alpha(true)), (Some(7.0), Some(60.0)));
        // The job had a beta of its own.
        let found = Row { beta_us_per_byte: 2e-3, ..found };
        assert_eq!(
            profile((Transport::Tls, true), &found, Some(cost), true).cost.map(|cost| cost.alpha_us),
            Some(30.0)
        );
        let lanes = |transport, has_peers| {
            let profile = profile((transport, has_peers), &found, None, true);
            (profile.transport, profile.lanes, profile.local_lanes)
        };
        assert_eq!(lanes(Transport::Auto, false), (None, None, Some(2)));
        assert_eq!(lanes(Transport::Tls, true), (Some(Transport::Tls), Some(2), None));
    }

    #[test]
    fn options_of_the_measuring_job_are_the_same_but_for_a_few() {
        let words = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let line = "run --num-proc 2 --calibrate --report a.json -H a:1,b:1 --report=b.json --output-filename d --";
        let kept = without(&words(line), &SWITCHES, &["--report", "--output-filename"]);
        assert_eq!(kept, words("run --num-proc 2 -H a:1,b:1"));
    }

    #[test]
    fn a_report_has_the_cost_model_of_the_coordinator_or_none() {
        let file = tempfile::NamedTempFile::new().expect("a file can be made");
        let of = |text: &str| {
            std::fs::write(file.path(), text).expect("ours");
            cost_in(file.path()).map_err(|error| format!("{error:#}"))
        };
        let cost = r#"{"alpha_us":30.0,"beta_us_per_byte":0.001,"gamma_us_per_byte":0.0001}"#;
        let found = of(&format!(r#"{{"sidecars":[{{"summary":{{}}}},{{"summary":{{"cost":{cost}}}}}]}}"#));
        assert_eq!(found.expect("a model").expect("measured").alpha_us, 30.0);
        assert_eq!(of(r#"{"sidecars":[{"summary":null}]}"#), Ok(None));
        assert!(of("{").expect_err("no JSON").contains("no JSON"));
        let negative = cost.replace("30.0", "-1.0");
        let error = of(&format!(r#"{{"sidecars":[{{"summary":{{"cost":{negative}}}}}]}}"#)).expect_err("negative");
        assert!(error.contains("alpha-us = -1 is out of range"), "{error}");
    }
}
