//! `ronde run`: starts and supervises a job.
//!
//! The launcher starts one agent per host (`agents`), lets it start the sidecars, signs their certificates and starts the
//! workers (`job`). The job's certificate authority exists only in this process's memory; no secret is in arguments,
//! environment or shared storage.

use std::io::{IsTerminal, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{fail, fail_with, notice};
use ronde_bootstrap::interfaces::Selector;
use ronde_bootstrap::logs::{LogArgs, LogFormat};
use ronde_bootstrap::numbers::whole;
use ronde_bootstrap::ports::PortRange;
use ronde_bootstrap::profile::Cost;
use ronde_bootstrap::tuning::Tuning;
use ronde_wire::JobName;

use crate::envelope::Environment;
use command::{interpreter_of, number_after_program, number_is_missing};
use elastic::{ELASTIC_TIMEOUT_SECONDS, ElasticArgs, ElasticSettings, Given};
use environment::Export;
use hosts::Host;
use output::{Form, Label};
use placement::Placement;

pub(crate) use hosts::names;
pub(crate) use shell::{RemoteShell, SSH, remote_command};
pub use world::{WorkerArgs, main as worker};

mod address;
mod agents;
mod command;
mod console;
pub(crate) mod elastic;
mod environment;
mod failure;
mod hosts;
mod input;
mod job;
mod nccl;
mod outcome;
mod outlet;
mod output;
mod own_errors;
mod placement;
mod records;
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
    /// How many worker processes to start (also `-np N`, `-n N`). In an elastic job: how many it needs to start. [default: all
    /// slots of the hosts; in an elastic job: --min-np]
    #[arg(long = "num-proc", alias = "np", value_name = "N", value_parser = whole::<u32>(1..=u32::MAX.into()))]
    pub num_proc: Option<u32>,
    /// How many worker processes to start on each host, whatever its slots, in a job of a fixed size.
    #[arg(
        long,
        alias = "nproc_per_node",
        value_name = "N",
        conflicts_with = "num_proc",
        value_parser = whole::<u32>(1..=u32::MAX.into())
    )]
    nproc_per_node: Option<u32>,
    /// Hosts and their slots, 1 if not given, filled in this order; an IPv6 address in brackets. [default: localhost:N]
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,...", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// A file with a line `HOST slots=N` for each host.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// How many sidecars to start on a single host; the workers are split among them in contiguous blocks.
    #[arg(long, value_name = "K", value_parser = whole::<u32>(0..=u32::MAX.into()))]
    sidecars: Option<u32>,
    /// The command that reaches other hosts; ronde appends host and command line.
    #[arg(long, value_name = "CMD", default_value = SSH)]
    remote_shell: String,
    /// The port of ssh on other hosts. [default: that of ssh's configuration]
    #[arg(short = 'p', long, value_name = "PORT", value_parser = whole::<u16>(1..=u16::MAX.into()))]
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
    #[arg(long, value_name = "SECONDS", env = "HOROVOD_START_TIMEOUT", value_parser = whole::<u64>(1..=86_400))]
    pub start_timeout: Option<u64>,
    /// Have NCCL of the workers send between hosts over their sidecars, which encrypt everything, and in no other way: sets
    /// NCCL_NET_PLUGIN, NCCL_NET, NCCL_MNNVL_ENABLE and LD_LIBRARY_PATH
    #[arg(long)]
    nccl_net: bool,
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
    /// Pass the launcher's standard input to this rank, for a debugger such as pdb; the others have none.
    #[arg(
        long,
        value_name = "RANK",
        conflicts_with_all = ["starter", "min_np", "host_discovery_script"],
        value_parser = whole::<u32>(0..=u32::MAX.into())
    )]
    stdin: Option<u32>,
    /// Run COMMAND once, on this host; it starts the workers, as Open MPI's mpirun does, each as `ronde worker COMMAND`. The
    /// command then owns output and processes.
    #[arg(long, conflicts_with_all = ["output_filename", "prefix_output_with_timestamp"])]
    starter: bool,
    /// Measure latency and bandwidth between the hosts first, with a job of a few seconds, and choose algorithms by them.
    #[arg(long, conflicts_with_all = ["starter", "min_np", "host_discovery_script"])]
    pub calibrate: bool,
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

impl RunArgs {
    /// The same with a measured cost model.
    #[must_use]
    pub fn with_cost(mut self, cost: Cost) -> Self {
        self.tuning.cost = Some(cost);
        self
    }
}

/// Runs a job, after it has printed notices about its options; the exit code is the first failing worker's, or 128 plus the
/// signal that ended it.
pub fn main(args: RunArgs, notices: &[String]) -> ExitCode {
    let (settings, shape) = match Settings::new(args) {
        Ok(parsed) => parsed,
        Err(error) => {
            notices.iter().for_each(|text| notice(text));
            return fail_with(&error, Code::CommandLine);
        }
    };
    // The command of --starter is a launcher, which has such options.
    let of_command = number_after_program(&settings.command).filter(|_| !settings.has_starter);
    let of_variables = environment::notices(&settings.caller, &settings.exports, &left_out_variables());
    for text in notices.iter().chain(&of_command).chain(&of_variables) {
        // Fails only if standard error is closed.
        let _ = write!(std::io::stderr(), "{}", settings.form(Label::Rank).notice(text));
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return fail(Code::LauncherStart, &format!("cannot start: {error}"));
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
    /// Distinguishes this run from others of the same name.
    run: String,
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
    /// The rank that reads the launcher's standard input.
    stdin: Option<u32>,
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
        if args.nccl_net {
            // Before those of `-x`, which count.
            exports.splice(0..0, nccl::exports(&ronde, |name| std::env::var(name).ok())?);
        }
        exports.extend(args.elastic.max_np.map(|max| Export::value(MAX_NP, max.to_string())));
        let tuning = args.tuning.resolve(false)?;
        // Horovod's launcher has its own default, which its users know.
        let is_watched = std::io::stderr().is_terminal() && !exports.iter().any(Export::is_horovods);
        let settings = Self {
            job: args.job.map_or_else(random_job_name, Ok)?,
            run: random_text(),
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
            tuning: if is_watched { tuning.watched() } else { tuning },
            output_dir: args.output_filename,
            has_starter: args.starter,
            timestamps: args.prefix_output_with_timestamp,
            stdin: args.stdin,
            logs: args.logs,
            report: args.report,
            verbose: args.verbose,
        };
        Ok((settings, shape))
    }

    /// The format of the output.
    fn form(&self, label: Label) -> Form {
        let json_of_job = (self.logs.log_format == LogFormat::Json).then(|| self.job.to_string());
        Form { timestamps: self.timestamps, label, json_of_job, reader: self.stdin }
    }
}

/// Reads from the options whether the job is elastic, and the placement of one that is not.
fn shape(args: &RunArgs) -> anyhow::Result<Shape> {
    let hosts = || hosts_of(args).context(Code::Hosts);
    if let Some(suggestion) = interpreter_of(&args.command) {
        anyhow::bail!(suggestion);
    }
    if !args.elastic.is_elastic() {
        args.elastic.check_fixed()?;
        let has_hosts = args.hosts.is_some() || args.hostfile.is_some() || args.nproc_per_node.is_some();
        anyhow::ensure!(args.num_proc.is_some() || has_hosts, number_is_missing(&args.command));
        let hosts = hosts()?;
        let slots = || hosts.iter().map(|host| host.slots.get()).fold(0, u32::saturating_add);
        let ranks = args.num_proc.unwrap_or_else(slots);
        if let Some(rank) = args.stdin {
            anyhow::ensure!(rank < ranks, "--stdin {rank}: the ranks of this job are 0 to {}", ranks.saturating_sub(1));
        }
        return Ok(Shape::Fixed(Placement::new(ranks, &hosts, args.sidecars).context(Code::Placement)?));
    }
    anyhow::ensure!(args.nproc_per_node.is_none(), "--nproc-per-node is for jobs of a fixed size; give -np and -H");
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
    let mut hosts = match (&args.hosts, &args.hostfile) {
        (Some(list), _) => hosts::parse_list(list)?,
        (None, Some(path)) => {
            let text = read(path)?;
            hosts::parse_file(&text).with_context(|| format!("in {}", path.display()))?
        }
        (None, None) => Host::local(args.elastic.local_slots(args.num_proc.or(args.nproc_per_node))),
    };
    if let Some(slots) = args.nproc_per_node.and_then(NonZeroU32::new) {
        hosts.iter_mut().for_each(|host| host.slots = slots);
    }
    Ok(hosts)
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

/// The names of the caller's variables that are not valid Unicode.
fn left_out_variables() -> Vec<String> {
    std::env::vars_os()
        .filter(|(name, value)| name.to_str().is_none() || value.to_str().is_none())
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect()
}

/// Returns a random name, as jobs of one host must not share one.
fn random_job_name() -> anyhow::Result<JobName> {
    Ok(JobName::new(format!("run-{}", random_text()))?)
}

/// Returns a random number as text. It is not secret.
fn random_text() -> String {
    use std::hash::{BuildHasher, RandomState};
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
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

const EXAMPLES: &str = "Examples:
  ronde run -np 4 --sidecars 2 python train.py
  ronde run --min-np 8 -np 16 -H alpha:8,beta:8 -x NCCL_DEBUG=INFO python train.py --epochs 3";
