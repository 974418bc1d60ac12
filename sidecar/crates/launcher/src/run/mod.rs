//! `ronde run`: starts and supervises a job.
//!
//! The launcher starts one agent per host (`agents`), lets it start the sidecars, signs their certificates and starts the
//! workers (`job`). The job's certificate authority exists only in this process's memory; no secret is in arguments,
//! environment or shared storage.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::exit::{EXIT_USAGE, fail};
use ronde_bootstrap::interfaces::Selector;
use ronde_bootstrap::logs::{LogArgs, LogFormat};
use ronde_bootstrap::ports::PortRange;
use ronde_bootstrap::tuning::Tuning;
use ronde_wire::JobName;

use crate::envelope::Environment;
use elastic::{ELASTIC_TIMEOUT_SECONDS, ElasticArgs, ElasticSettings, Given};
use environment::Export;
use hosts::Host;
use output::{Form, Label};
use placement::Placement;
use shell::RemoteShell;

pub(crate) use shell::{SSH, remote_command, words};
pub use world::{WorkerArgs, main as worker};

mod address;
mod agents;
pub(crate) mod elastic;
mod environment;
mod failure;
mod hosts;
mod job;
mod output;
mod placement;
mod report;
mod routes;
mod scope;
mod shell;
mod start;
mod starter;
mod state;
mod world;

/// Arguments of `ronde run`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// How many worker processes to start (also `-np N`). In an elastic job: how many it needs to start. [default in an
    /// elastic job: --min-np]
    #[arg(long = "num-proc", value_name = "N")]
    pub num_proc: Option<u32>,
    /// Hosts and their slots, filled in this order; an IPv6 address in brackets. [default: localhost:N]
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,...", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// A file with a line `HOST slots=N` for each host.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// How many sidecars to start on a single host; the workers are split among them in contiguous blocks.
    #[arg(long, value_name = "K")]
    sidecars: Option<u32>,
    /// The command that reaches other hosts; ronde appends host and command line.
    #[arg(long, value_name = "CMD", default_value = SSH)]
    remote_shell: String,
    /// The port of ssh on other hosts. [default: that of ssh's configuration]
    #[arg(short = 'p', long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    ssh_port: Option<u16>,
    /// The private key for ssh. [default: that of ssh's configuration]
    #[arg(short = 'i', long, value_name = "FILE")]
    ssh_identity_file: Option<PathBuf>,
    /// The addresses that sidecars use: those of the first interface or network in this list that a host has; a trailing
    /// star matches any name that begins so. [default: all but the loopback; ronde finds out which reaches a peer]
    #[arg(long, alias = "network-interface", value_name = "NAME|CIDR,...", value_delimiter = ',')]
    network_interfaces: Vec<Selector>,
    /// The ports that sidecars take, of UDP and TCP: one for control messages and one for each lane. [default: any free ones]
    #[arg(long, value_name = "LOW-HIGH")]
    ports: Option<PortRange>,
    /// The path of the ronde binary on other hosts. [default: its path on this one]
    #[arg(long, value_name = "PATH")]
    remote_ronde: Option<PathBuf>,
    /// How long hosts, sidecars and workers may take to start, and from the first rank that joins to the last. [default:
    /// 30, and 100 for ranks to join]
    #[arg(long, value_name = "SECONDS", env = "HOROVOD_START_TIMEOUT", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub start_timeout: Option<u64>,
    #[command(flatten)]
    elastic: ElasticArgs,
    #[command(flatten)]
    tuning: Tuning,
    /// Record what happens to each tensor in FILE, which rank 0's process makes where it runs; DYNAMIC for programs that start
    /// it themselves.
    #[arg(long, value_name = "FILE", env = "HOROVOD_TIMELINE")]
    timeline_filename: Option<String>,
    /// Mark in the timeline when the coordinator issues orders.
    #[arg(long, env = "HOROVOD_TIMELINE_MARK_CYCLES", overrides_with = "no_timeline_mark_cycles")]
    timeline_mark_cycles: bool,
    /// Do not mark them, whatever else is set.
    #[arg(long, overrides_with = "timeline_mark_cycles")]
    no_timeline_mark_cycles: bool,
    /// The job's name: 1 to 63 characters of a-z, 0-9, '-', '_' and '.'. [default: drawn at random]
    #[arg(long, value_name = "NAME", value_parser = |name: &str| JobName::new(name))]
    job: Option<JobName>,
    /// Also write each worker's output to DIR/rank.N/stdout and DIR/rank.N/stderr, in an elastic job to DIR/worker.N/.
    #[arg(long, value_name = "DIR")]
    output_filename: Option<PathBuf>,
    /// Begin each line of output with the time (also `-prefix-timestamp`).
    #[arg(long)]
    prefix_output_with_timestamp: bool,
    /// Run COMMAND once, on this host; it starts the workers, as Open MPI's mpirun does, each as `ronde worker COMMAND`. The
    /// command then owns output and processes.
    #[arg(long, conflicts_with_all = ["output_filename", "prefix_output_with_timestamp"])]
    starter: bool,
    /// Write a summary of the job to FILE, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Log each step.
    #[arg(long)]
    pub verbose: bool,
    #[command(flatten)]
    logs: LogArgs,
    /// Set a variable for the workers, or pass on one that is withheld by default; may be repeated.
    #[arg(short = 'x', long, value_name = "NAME[=VALUE]")]
    export: Vec<Export>,
    /// A configuration file (TOML) with a table for each subcommand; the environment and the command line override it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A program that replaces `ronde sidecar --bootstrap`, for tests.
    #[arg(long, hide = true, value_name = "PROGRAM")]
    sidecar_command: Option<String>,
    /// The worker's command; everything after its first word belongs to it.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Runs a job; the exit code is the first failing worker's, or 128 plus the signal that ended it.
pub fn main(args: RunArgs) -> ExitCode {
    let (settings, shape) = match Settings::new(args) {
        Ok(parsed) => parsed,
        Err(error) => {
            return fail(Code::CommandLine, &coded(&error, Code::CommandLine), EXIT_USAGE);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return fail(Code::LauncherStart, &format!("cannot start: {error}"), EXIT_SYSTEM);
        }
    };
    let code = match &shape {
        Shape::Fixed(placement) => runtime.block_on(job::run(&settings, placement)),
        Shape::Elastic(elastic) => runtime.block_on(elastic::run(&settings, elastic)),
    };
    // Name resolution cannot be interrupted; the process does not wait for it.
    runtime.shutdown_background();
    ExitCode::from(code)
}

/// Whether a job's membership changes.
enum Shape {
    /// It does not: this placement holds to the end.
    Fixed(Placement),
    /// It does.
    Elastic(Box<ElasticSettings>),
}

/// The validated command line and environment of any job.
struct Settings {
    job: JobName,
    command: Vec<String>,
    directory: PathBuf,
    caller: Environment,
    exports: Vec<Export>,
    remote_shell: RemoteShell,
    network_interfaces: Vec<Selector>,
    ports: Option<PortRange>,
    ronde: PathBuf,
    /// The command line that runs an agent on another host.
    remote_agent: String,
    sidecar_command: Option<Vec<String>>,
    start_timeout: Duration,
    /// From the first rank that joins to the last.
    join_timeout: Duration,
    tuning: Tuning,
    output_dir: Option<PathBuf>,
    /// Whether the command starts the workers.
    has_starter: bool,
    timestamps: bool,
    logs: LogArgs,
    report: Option<PathBuf>,
    verbose: bool,
}

impl Settings {
    fn new(args: RunArgs) -> anyhow::Result<(Self, Shape)> {
        let shape = shape(&args)?;
        let ronde = std::env::current_exe().context("cannot find the ronde binary").context(Code::LauncherStart)?;
        let remote_shell = RemoteShell::new(&args.remote_shell, args.ssh_port, args.ssh_identity_file.as_deref())?;
        let marks = args.timeline_mark_cycles && !args.no_timeline_mark_cycles;
        let timeline = args.timeline_filename.map(|file| (file, marks));
        let waits = args.elastic.is_elastic().then(|| args.elastic.elastic_timeout.unwrap_or(ELASTIC_TIMEOUT_SECONDS));
        let mut exports = exports(args.export, args.start_timeout.max(waits), timeline);
        exports.extend(args.elastic.max_np.map(|max| Export::value(MAX_NP, max.to_string())));
        let settings = Self {
            job: args.job.map_or_else(random_job_name, Ok)?,
            command: args.command,
            directory: std::env::current_dir()
                .context("cannot find the working directory")
                .context(Code::LauncherStart)?,
            caller: callers_environment(),
            exports,
            remote_shell,
            network_interfaces: args.network_interfaces,
            ports: args.ports,
            remote_agent: shell::remote_command(args.remote_ronde.as_ref().unwrap_or(&ronde), "agent")?,
            ronde,
            sidecar_command: args.sidecar_command.map(|program| vec![program]),
            start_timeout: Duration::from_secs(args.start_timeout.unwrap_or(START_TIMEOUT_SECONDS)),
            join_timeout: Duration::from_secs(args.start_timeout.unwrap_or(JOIN_TIMEOUT_SECONDS)),
            // The job's authority is dropped after the start, so no client of gRPC-Web could get a certificate.
            tuning: args.tuning.resolve(false)?,
            output_dir: args.output_filename,
            has_starter: args.starter,
            timestamps: args.prefix_output_with_timestamp,
            logs: args.logs,
            report: args.report,
            verbose: args.verbose,
        };
        Ok((settings, shape))
    }

    /// The format of the output.
    fn form(&self, label: Label) -> Form {
        let json_of_job = (self.logs.log_format == LogFormat::Json).then(|| self.job.to_string());
        Form { timestamps: self.timestamps, label, json_of_job }
    }
}

/// Reads from the options whether the job is elastic, and the placement of one that is not.
fn shape(args: &RunArgs) -> anyhow::Result<Shape> {
    let hosts = || hosts_of(args).context(Code::Hosts);
    if !args.elastic.is_elastic() {
        args.elastic.check_fixed()?;
        let ranks = args.num_proc.context("the number of processes is not given; give -np N (--num-proc)")?;
        return Ok(Shape::Fixed(Placement::new(ranks, &hosts()?, args.sidecars).context(Code::Placement)?));
    }
    let conflict = match (args.sidecars, args.starter) {
        (Some(_), _) => Some("--sidecars"),
        (None, true) => Some("--starter"),
        (None, false) => None,
    };
    let given = Given {
        num_proc: args.num_proc,
        conflict,
        start_timeout: Duration::from_secs(args.start_timeout.unwrap_or(START_TIMEOUT_SECONDS)),
        attach_timeout: Duration::from_secs(args.start_timeout.unwrap_or(JOIN_TIMEOUT_SECONDS)),
        peer_timeout: Duration::from_millis(args.tuning.peer_timeout_ms()),
    };
    let hosts = if args.elastic.host_discovery_script.is_some() { Vec::new() } else { hosts()? };
    Ok(Shape::Elastic(Box::new(args.elastic.settings(&hosts, &given)?)))
}

fn hosts_of(args: &RunArgs) -> anyhow::Result<Vec<Host>> {
    let read = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read the host file {}", path.display()))
    };
    Ok(match (&args.hosts, &args.hostfile) {
        (Some(list), _) => hosts::parse_list(list)?,
        (None, Some(path)) => {
            let text = read(path)?;
            hosts::parse_file(&text).with_context(|| format!("in {}", path.display()))?
        }
        (None, None) => Host::local(args.elastic.local_slots(args.num_proc)),
    })
}

/// Adds the timeline's variables, which rank 0 uses, and the start timeout. A worker gives up waiting for others later than
/// the launcher, which knows the missing ranks.
fn exports(mut given: Vec<Export>, start_timeout: Option<u64>, timeline: Option<(String, bool)>) -> Vec<Export> {
    if let Some((file, marks)) = timeline {
        let marks = Export::value(TIMELINE_MARK_CYCLES, u8::from(marks).to_string());
        given.splice(0..0, [Export::value(TIMELINE, file), marks]);
    }
    let worker = start_timeout.map(|seconds| seconds + JOIN_SLACK_SECONDS);
    if let (Some(seconds), None) = (worker, std::env::var_os(WORKER_START_TIMEOUT)) {
        given.insert(0, Export::value(WORKER_START_TIMEOUT, seconds.to_string()));
    }
    given
}

/// The caller's variables that are valid Unicode; messages cannot carry others.
fn callers_environment() -> Environment {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Returns a random name, as jobs of one host must not share one. The number is not secret.
fn random_job_name() -> anyhow::Result<JobName> {
    use std::hash::{BuildHasher, RandomState};
    let number = RandomState::new().hash_one(std::process::id());
    Ok(JobName::new(format!("run-{number:016x}"))?)
}

const START_TIMEOUT_SECONDS: u64 = 30;
const JOIN_TIMEOUT_SECONDS: u64 = 100;
const JOIN_SLACK_SECONDS: u64 = 20;
/// The most processes of an elastic job, for `max_size()` of the SDK for Python.
const MAX_NP: &str = "RONDE_MAX_NP";
/// The variable from which the SDKs read the timeout.
const WORKER_START_TIMEOUT: &str = "RONDE_START_TIMEOUT";
const TIMELINE: &str = "RONDE_TIMELINE";
const TIMELINE_MARK_CYCLES: &str = "RONDE_TIMELINE_MARK_CYCLES";
/// A system error (`EX_OSERR`).
const EXIT_SYSTEM: u8 = 71;

const EXAMPLES: &str = "Examples:
  ronde run -np 4 --sidecars 2 python train.py
  ronde run --min-np 8 -np 16 -H alpha:8,beta:8 -x NCCL_DEBUG=INFO python train.py --epochs 3";
