//! `ronde debug`: reads flight records, the newest operations of each sidecar and of its ranks.
//!
//! | subcommand | what | where |
//! |---|---|---|
//! | `dump` | asks the sidecars of this host for their records and writes them | [`dump`] |
//! | `analyze` | says which ranks are missing, from the records of all sidecars | [`analysis`], [`waits`], [`view`] |
//! | `analyze --perfetto` | draws the records as a timeline | [`perfetto`] |

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use nix::fcntl::OFlag;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{answer, fail_with};
use ronde_bootstrap::flight::{self, FILE_BYTES_MAX, FlightRecord};
use ronde_wire::Failure;

use crate::status::{self, NotReady, Target};

mod analysis;
mod perfetto;
mod view;
mod waits;

/// Arguments of `ronde debug`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct DebugArgs {
    #[command(subcommand)]
    command: DebugCommand,
}

#[derive(Subcommand, Debug)]
enum DebugCommand {
    /// Write what the sidecars of this host have recorded, while the job runs or hangs. Changes nothing in the job.
    Dump(DumpArgs),
    /// Merge the flight records of all sidecars and say which ranks are missing.
    Analyze(AnalyzeArgs),
}

/// Arguments of `ronde debug dump`.
#[derive(Args, Debug)]
#[command(after_help = DUMP_EXAMPLES)]
struct DumpArgs {
    /// The directory with a sidecar's sockets. [default: RONDE_SOCKET, else all of this user's jobs on this host]
    #[arg(long, value_name = "DIR", conflicts_with = "url")]
    socket: Option<PathBuf>,
    /// The address of a sidecar's admin pages.
    #[arg(long, value_name = "http://HOST:PORT")]
    url: Option<String>,
    /// Only the sidecars of this job. [default: those of all jobs that are found]
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// The directory in which to write a file for each sidecar; it is made if needed.
    #[arg(long, value_name = "DIR", default_value = "ronde-flight")]
    output: PathBuf,
}

/// Arguments of `ronde debug analyze`.
#[derive(Args, Debug)]
#[command(after_help = ANALYZE_EXAMPLES)]
struct AnalyzeArgs {
    /// Flight records, or directories with them: best those of all sidecars.
    #[arg(required = true, value_name = "FILE|DIR")]
    files: Vec<PathBuf>,
    /// Only the records of this job. [default: those of the job with the newest record]
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Also write the records as a timeline for ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
}

/// Runs a subcommand of `ronde debug`.
pub(super) fn main(args: &DebugArgs) -> ExitCode {
    let (done, code) = match &args.command {
        DebugCommand::Dump(args) => (dump(args), Code::StatusUnreachable),
        DebugCommand::Analyze(args) => (analyze(args), Code::FlightRecord),
    };
    match done {
        Ok(text) => answer(&text),
        Err(error) => fail_with(&error, code),
    }
}

/// How long a sidecar has for its record.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause before a sidecar is asked again whose record others read.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// Writes the records of the sidecars that are found; returns what was written.
fn dump(args: &DumpArgs) -> anyhow::Result<String> {
    let targets = status::targets(args.url.as_deref(), args.socket.as_deref())?;
    let addresses: Vec<SocketAddr> = targets.into_iter().map(|Target { address, .. }| address).collect();
    dump_of(&addresses, args)
}

/// Asks all sidecars at the same time: records that were made at different moments show less.
fn dump_of(addresses: &[SocketAddr], args: &DumpArgs) -> anyhow::Result<String> {
    let directory = std::path::absolute(&args.output).context("cannot see the current directory")?;
    let (mut text, mut silent, mut jobs) = (String::new(), Vec::new(), BTreeSet::new());
    for saved in status::ask_all(addresses, |address| save(address, args.job.as_deref(), &directory)) {
        match saved {
            Ok((job, line)) => {
                writeln!(text, "{line}")?;
                jobs.insert(job);
            }
            Err(error) if error.downcast_ref() == Some(&Code::FlightFile) => return Err(error),
            // A sidecar that was killed leaves its directory; the others' records show which ranks are missing.
            Err(error) => silent.push(error),
        }
    }
    for error in &silent {
        writeln!(text, "no record: {error:#}")?;
    }
    if let Some(error) = silent.into_iter().next().filter(|_| jobs.is_empty()) {
        return Err(error);
    }
    let directory = args.output.display();
    if jobs.len() > 1 {
        let jobs = jobs.into_iter().collect::<Vec<_>>().join(", ");
        writeln!(text, "These are records of the jobs {jobs}: give --job NAME to `ronde debug analyze`.")?;
    }
    writeln!(
        text,
        "Read them with `ronde debug analyze {directory}`, with those of the job's other hosts, if it has any."
    )?;
    Ok(text)
}

/// Requests the record of a sidecar and writes it, if it is of this job; returns the job and a line about the file.
fn save(address: SocketAddr, job: Option<&str>, directory: &Path) -> anyhow::Result<(String, String)> {
    let record = record_of(address, PATIENCE, BUSY_PAUSE)?;
    if job.is_some_and(|job| *job != record.job) {
        return Err(anyhow!("the sidecar at {address} is of job {}", record.job));
    }
    let path = flight::add(directory, &record).context(Code::FlightFile)?;
    let path = Failure::line(&path.display().to_string());
    let line = format!("sidecar {} of job {}: {path}", record.sidecar, record.job);
    Ok((record.job, line))
}

/// Requests the record of a sidecar, again after a pause while others read it, within this time.
fn record_of(address: SocketAddr, within: Duration, pause: Duration) -> anyhow::Result<FlightRecord> {
    let deadline = Instant::now() + within;
    let body = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match status::get(address, "/flight", FILE_BYTES_MAX, left) {
            Err(error) if error.is::<NotReady>() && Instant::now() + pause < deadline => std::thread::sleep(pause),
            answer => break answer?,
        }
    };
    FlightRecord::parse(body.as_bytes()).map_err(|reason| anyhow!("the answer of the sidecar at {address} {reason}"))
}

/// Merges records; returns the analysis.
fn analyze(args: &AnalyzeArgs) -> anyhow::Result<String> {
    let mut records = Vec::new();
    let mut left_out = Vec::new();
    for path in &args.files {
        for file in flight::files(path).map_err(|reason| anyhow!(reason))? {
            let name = || Failure::line(&file.display().to_string());
            match FlightRecord::read(&file) {
                Ok(record) if args.job.as_ref().is_some_and(|job| *job != record.job) => {
                    left_out.push(format!("{} is of job {}", name(), record.job));
                }
                Ok(record) => records.push(record),
                Err(reason) => left_out.push(format!("{} {reason}", name())),
            }
        }
    }
    // The others may say enough.
    if records.is_empty() {
        return Err(anyhow!(left_out.join("\n")));
    }
    let view = view::View::of(&records);
    let mut text = String::new();
    left_out.iter().try_for_each(|line| writeln!(text, "left out: {line}"))?;
    analysis::sentences(&view).iter().try_for_each(|line| writeln!(text, "{line}"))?;
    if let Some(path) = &args.perfetto {
        let written = write_timeline(path, &perfetto::timeline(&view));
        written.with_context(|| format!("cannot write {}", path.display())).context(Code::FlightFile)?;
        writeln!(text, "timeline: {}; open it in https://ui.perfetto.dev", path.display())?;
    }
    Ok(text)
}

/// Writes a file that only this user may read, as the records are, whatever the mode of a file with that name was. Links
/// are not followed.
fn write_timeline(path: &Path, text: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(OFlag::O_NOFOLLOW.bits());
    let mut file = options.open(path)?;
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    std::io::Write::write_all(&mut file, text.as_bytes())
}

const EXAMPLES: &str = "Examples:
  ronde debug dump --output records
  ronde debug analyze records --perfetto records.json";

const DUMP_EXAMPLES: &str = "Examples:
  ronde debug dump
  ronde debug dump --job nightly --output records";

const ANALYZE_EXAMPLES: &str = "Examples:
  ronde debug analyze ronde-flight
  ronde debug analyze alpha/*.flight.json beta/*.flight.json --perfetto records.json";

#[cfg(test)]
mod dump_tests;
#[cfg(test)]
mod tests;
