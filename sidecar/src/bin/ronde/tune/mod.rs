//! `ronde tune`: searches for the settings of a job on given hosts and writes them as a profile, with a plot of the search;
//! and the measurement of the cost model before a job (`ronde run --calibrate`).
//!
//! The search itself is that of `ronde run --autotune`, in a job whose workers perform the steps of a training program.

mod calibrate;
mod child;
mod found;
mod log;
mod plot;
mod worker;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow};
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{answer, fail_with};
use ronde_bootstrap::numbers::whole;
use ronde_engine::AutotuneSettings;
use ronde_wire::TuningParameter;
use ronde_wire::control::Transport;

pub(super) use self::calibrate::calibrated;
use self::calibrate::{SWITCHES, without};
use self::child::{Interrupted, Signals};
use self::found::{Found, Reported};
use self::log::Search;
pub(super) use self::worker::{TuneWorkerArgs, main as worker};
use crate::bench::scale::workloads::resnet;

/// Arguments of `ronde tune`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct TuneArgs {
    /// How many worker processes to start (also `-np N`).
    #[arg(long = "num-proc", value_name = "N", value_parser = whole::<u32>(1..=u32::MAX.into()))]
    num_proc: u32,
    /// Hosts and their slots, as for `ronde run`. [default: localhost:N]
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,...", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// A file with a line `HOST slots=N` for each host.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// How many sidecars to start on a single host.
    #[arg(long, value_name = "K", value_parser = whole::<u32>(0..=u32::MAX.into()))]
    sidecars: Option<u32>,
    /// A further option of `ronde run`, such as --run-option=--ssh-port=2222 or a start value like
    /// --run-option=--fusion-threshold-mb=8. May be given several times.
    #[arg(long = "run-option", value_name = "OPTION", allow_hyphen_values = true)]
    run_options: Vec<OsString>,
    /// The transports to try, each with a search of its own. A job of one sidecar uses none: it is searched once. [default: auto,
    /// tls and quic]
    #[arg(long, value_name = "auto|quic|tls,...", value_delimiter = ',', value_parser = clap::value_parser!(Transport))]
    transports: Vec<Transport>,
    /// How many samples a search takes.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = whole::<u16>(1..=256))]
    samples: u16,
    /// How many samples are discarded first.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u16>(0..=1_000))]
    warmup_samples: u16,
    /// How many steps are measured at once; a sample is the median of five such measurements.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole::<u32>(1..=1_000_000))]
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
        Ok(text) => answer(&text),
        Err(error) => failed(&error),
    }
}

/// Writes why there is no outcome. A signal of the user is no failure, and the job has reported it.
pub(super) fn failed(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<Interrupted>() {
        Some(interrupted) => interrupted.exit_code(),
        None => fail_with(error, Code::TuneFailed),
    }
}

fn run(args: &TuneArgs) -> anyhow::Result<String> {
    check_writable(&args.output)?;
    let (all, failures) = args.searches(&Signals::install()?)?;
    let best = all.iter().max_by(|a, b| a.search.outcome.score.total_cmp(&b.search.outcome.score));
    let best = best.context("there is no transport to search over")?;
    let picture = args.output.with_extension("svg");
    let searches: Vec<(&str, &Search)> = all.iter().map(|found| (found.name(), &found.search)).collect();
    write(&picture, &plot::plot(&searches))?;
    let profile = best.profile(args.is_alpha_searched()).text(&args.facts(&best.search));
    write(&args.output, &profile)?;
    let mut text: String = all.iter().map(Found::line).chain(failures).map(|line| line + "\n").collect();
    let (output, picture) = (args.output.display(), picture.display());
    // A string cannot fail to be written to.
    let _ = write!(text, "\n{profile}\nwritten to {output}, the search to {picture}\n");
    if let Some(note) = best.note(args.is_alpha_searched()) {
        let _ = writeln!(text, "{note}");
    }
    let _ = writeln!(text, "use it with: ronde run --tuning {output} ...");
    Ok(text)
}

impl TuneArgs {
    fn transports(&self) -> Vec<Transport> {
        // The default of jobs is among them: otherwise a profile would replace it by something that it was not compared with.
        let all = || vec![Transport::Auto, Transport::Tls, Transport::Quic];
        if self.transports.is_empty() { all() } else { self.transports.clone() }
    }

    /// Searches over each transport. Returns what was found, and a line for each search that failed.
    ///
    /// # Errors
    /// When no search succeeded, or the user has ended one.
    fn searches(&self, signals: &Signals) -> anyhow::Result<(Vec<Found>, Vec<String>)> {
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for transport in self.transports() {
            let (search, reported) = self.search(transport, signals);
            let is_single = reported.as_ref().is_ok_and(|reported| reported.sidecars == 1);
            let both = search.and_then(|search| Ok((search, reported.context("in the job's report")?)));
            match both {
                Ok((search, reported)) => found.push(Found::new(transport, search, &reported)),
                Err(error) if error.is::<Interrupted>() => return Err(error),
                Err(error) => failures.push(format!("the search over {transport} failed: {error:#}")),
            }
            if is_single {
                // It uses no transport: another search would be the same.
                break;
            }
        }
        if found.is_empty() { Err(anyhow!(failures.join("\n"))) } else { Ok((found, failures)) }
    }

    /// Runs one job with a search. Returns its log and its report, which says something also about a job that failed.
    fn search(&self, transport: Transport, signals: &Signals) -> (anyhow::Result<Search>, anyhow::Result<Reported>) {
        let log = self.output.with_extension(format!("{transport}.csv"));
        let report = self.output.with_extension(format!("{transport}.json"));
        // Files of an earlier search must not pass for those of this one, which may be on another host.
        let removed = remove(&log).and_then(|()| remove(&report));
        let ended = removed.and_then(|()| signals.run(&self.job(transport, &log, &report)?));
        let reported = Reported::read(&report);
        // It is of no use afterwards.
        drop(std::fs::remove_file(&report));
        (ended.and_then(|()| Search::read(&log, self.samples.into())), reported)
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

    fn is_alpha_searched(&self) -> bool {
        self.parameters().contains(&TuningParameter::Algorithms)
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
        let file = || self.hostfile.as_ref().map(|path| path.display().to_string());
        let hosts = self.hosts.clone().or_else(file).unwrap_or_else(|| "localhost".to_owned());
        let samples = search.samples.len();
        let (score, gain) = (search.outcome.score, search.gain());
        format!(
            "version = {:?}\nranks = {}\nhosts = {hosts:?}\nsamples = {samples}\nmegabytes-per-second = {score:.1}\n\
             gain = {gain:.2}\n",
            env!("CARGO_PKG_VERSION"),
            self.num_proc
        )
    }
}

/// Finds out before a search of minutes whether its outcome can be written.
fn check_writable(path: &Path) -> anyhow::Result<()> {
    let is_new = !path.exists();
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A failed search leaves no empty profile.
    let checked = opened.and_then(|_| if is_new { std::fs::remove_file(path) } else { Ok(()) });
    checked.with_context(|| format!("cannot write the profile {}", path.display())).context(Code::ResultUnwritable)
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {} of an earlier search", path.display()))
        }
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let written = std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    written.context(Code::ResultUnwritable)
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
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        args: TuneArgs,
    }

    #[test]
    fn the_default_transport_is_searched_over_like_the_others() {
        let transports = |words: &[&str]| {
            let words = ["tune", "--num-proc", "2"].iter().chain(words);
            Line::try_parse_from(words).expect("a command line").args.transports()
        };
        assert_eq!(transports(&[]), [Transport::default(), Transport::Tls, Transport::Quic]);
        assert_eq!(transports(&["--transports", "quic,auto"]), [Transport::Quic, Transport::Auto]);
    }

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
}
