//! `ronde job`: shows and changes an elastic job that runs, from the host and by the user of its launcher.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | the commands |
//! | `find.rs` | finds the socket of a job |
//! | `socket.rs` | the socket: the launcher's end and the command's |
//! | `messages.rs` | what is sent over it |
//! | `render.rs` | the state for people |

use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use clap::{Args, Subcommand};
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::directory;
use ronde_bootstrap::exit::{answer, fail_with};
use ronde_bootstrap::numbers::whole;
use ronde_wire::JobName;

use find::Found;
use messages::{Answer, JobStatus, Request};

mod find;
pub(crate) mod messages;
mod render;
pub(crate) mod socket;

/// Arguments of `ronde job`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct JobArgs {
    #[command(subcommand)]
    command: JobCommand,
}

#[derive(Subcommand, Debug)]
enum JobCommand {
    /// Show the workers, hosts and changes of an elastic job.
    Status(StatusArgs),
    /// Let the workers of a host leave at their next commit, and do not use it any more.
    Drain(DrainArgs),
    /// Change the number of workers, between --min-np and --max-np of the job.
    Scale(ScaleArgs),
}

/// Which job.
#[derive(Args, Debug)]
struct Chosen {
    /// The job. [default: RONDE_JOB, else the only elastic job of this user on this host]
    #[arg(long, value_name = "NAME", env = "RONDE_JOB", value_parser = |name: &str| JobName::new(name))]
    job: Option<JobName>,
}

#[derive(Args, Debug)]
#[command(after_help = STATUS_EXAMPLES)]
struct StatusArgs {
    #[command(flatten)]
    chosen: Chosen,
    /// Print the state as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = DRAIN_EXAMPLES)]
struct DrainArgs {
    /// The host, as `ronde job status` prints it.
    host: String,
    #[command(flatten)]
    chosen: Chosen,
    /// Use the host again.
    #[arg(long, conflicts_with = "wait")]
    undo: bool,
    /// Wait until no worker is left on the host, at most so long.
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64>(1..=864_000))]
    wait: Option<u64>,
}

#[derive(Args, Debug)]
#[command(after_help = SCALE_EXAMPLES)]
struct ScaleArgs {
    /// How many workers the job is to have. Without enough slots it has fewer, until hosts are added.
    #[arg(value_parser = whole::<u32>(0..=u32::MAX.into()))]
    workers: u32,
    #[command(flatten)]
    chosen: Chosen,
}

/// Asks a running job, or changes it.
pub fn main(args: &JobArgs) -> ExitCode {
    match run(&args.command) {
        Ok(text) => answer(&text),
        Err(error) => fail_with(&error, Code::JobUnreachable),
    }
}

fn run(command: &JobCommand) -> anyhow::Result<String> {
    let found = |chosen: &Chosen| find::find(&directory::default_base(), chosen.job.as_ref());
    match command {
        JobCommand::Status(args) => {
            let status = status(&found(&args.chosen)?)?;
            Ok(if args.json { serde_json::to_string(&status)? + "\n" } else { render::status(&status) })
        }
        JobCommand::Drain(args) => {
            let job = found(&args.chosen)?;
            let text = execute(&job, &Request::Drain { host: args.host.clone(), undo: args.undo })?;
            if let Some(seconds) = args.wait {
                await_empty(&job, &args.host, Duration::from_secs(seconds))?;
            }
            Ok(text)
        }
        JobCommand::Scale(args) => execute(&found(&args.chosen)?, &Request::Scale { workers: args.workers }),
    }
}

fn status(job: &Found) -> anyhow::Result<JobStatus> {
    match job.ask(&Request::Status)? {
        Answer::Status(status) => Ok(*status),
        other => Err(unexpected(&other)),
    }
}

/// Has a command executed; returns what follows from it.
fn execute(job: &Found, request: &Request) -> anyhow::Result<String> {
    match job.ask(request)? {
        Answer::Done { text } => Ok(text + "\n"),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &Answer) -> anyhow::Error {
    match answer {
        Answer::Refused { reason } => anyhow!(reason.clone()).context(Code::JobRequest),
        _ => anyhow!("the launcher's answer belongs to another command; use the `ronde` that started the job")
            .context(Code::JobUnreachable),
    }
}

/// Waits until a drained host has no workers.
fn await_empty(job: &Found, host: &str, at_most: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + at_most;
    loop {
        let status = status(job)?;
        let left = status.workers.iter().filter(|worker| worker.host == host).count();
        if left == 0 {
            return Ok(());
        }
        let late = anyhow!(
            "{left} workers are still on host {host} after {} s: they leave when they commit their state \
             (`state.commit()` or `state.check_host_updates()`), and not before other hosts have slots for the {} \
             workers that the job needs",
            at_most.as_secs(),
            status.min
        );
        ensure!(Instant::now() < deadline, late.context(Code::JobRequest));
        sleep(POLL_INTERVAL);
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "Examples:
  ronde job status
  ronde job drain beta --wait 300";

const STATUS_EXAMPLES: &str = "Examples:
  ronde job status
  ronde job status --job digits --json";

const DRAIN_EXAMPLES: &str = "Examples:
  ronde job drain beta --wait 300
  ronde job drain beta --undo";

const SCALE_EXAMPLES: &str = "Examples:
  ronde job scale 6
  ronde job scale 12 --job digits";
