//! The arguments of `ronde sidecar`. [`crate::process`] runs it.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use ronde_bootstrap::interfaces::Selector;
use ronde_bootstrap::logs::LogArgs;
use ronde_bootstrap::numbers::whole;
use ronde_bootstrap::tuning::Tuning;
use ronde_transport::TrustDomain;
use ronde_wire::{JobName, limits};

use crate::process::container::ContainerArgs;

/// Arguments of `ronde sidecar`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct SidecarArgs {
    /// Take configuration and certificate from a launcher: one JSON object a line on standard input and output.
    #[arg(long)]
    pub(crate) bootstrap: bool,
    /// A configuration file (TOML) with a table for each subcommand; environment and command line take precedence.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve this many workers of this host and no other sidecar, without credentials, until standard input ends. A
    /// Python program that no launcher started runs this itself.
    #[arg(
        long,
        value_name = "N",
        conflicts_with_all = ["bootstrap", "certs", "job_secret_file", "peers", "placement", "listen", "network_interfaces"],
        value_parser = whole::<u16>(1..=limits::LOCAL_RANKS_MAX as u64)
    )]
    pub(crate) local_ranks: Option<u16>,
    /// The directory with cert.pem, key.pem and ca.pem, as `ronde certs issue` makes it.
    #[arg(long, value_name = "DIR")]
    pub(crate) certs: Option<PathBuf>,
    /// Instead of --certs: the file with the job's secret, as `ronde certs secret` makes it. Needs --job and --index.
    #[arg(long, value_name = "FILE")]
    pub(crate) job_secret_file: Option<PathBuf>,
    /// With --job-secret-file: the job's name, the same on all hosts.
    #[arg(long, value_name = "NAME", value_parser = |name: &str| JobName::new(name))]
    pub(crate) job: Option<JobName>,
    /// With --job-secret-file: this sidecar's index in --peers, from 0.
    #[arg(long, value_name = "I", value_parser = whole::<u32>(0..=u32::MAX.into()))]
    pub(crate) index: Option<u32>,
    /// With --job-secret-file: the trust domain, a name for whoever runs jobs here, the same on all hosts.
    #[arg(long, value_name = "NAME", default_value = "ronde.local", value_parser = |name: &str| TrustDomain::new(name))]
    pub(crate) trust_domain: TrustDomain,
    /// With --job-secret-file: how long each certificate is valid; it is replaced after two thirds of that time.
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = whole::<u64>(6..=2_592_000))]
    pub(crate) certificate_life: u64,
    /// The addresses of all sidecars of the job, in the order of their indices, this one included. Data lanes use the
    /// ports after the named one.
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',')]
    pub(crate) peers: Vec<String>,
    /// For each rank, the index of its sidecar. [default: one rank on each sidecar]
    #[arg(
        long,
        value_name = "INDEX,...",
        value_delimiter = ',',
        value_parser = whole::<u32>(0..=u32::MAX.into())
    )]
    pub(crate) placement: Vec<u32>,
    /// The address to listen on. [default: the address of this sidecar's entry in --peers]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<IpAddr>,
    /// Listen on the addresses of the first interface or network in this list that this host has; a trailing star
    /// matches any rest of a name.
    #[arg(
        long,
        alias = "network-interface",
        value_name = "NAME|CIDR,...",
        value_delimiter = ',',
        conflicts_with = "listen"
    )]
    pub(crate) network_interfaces: Vec<Selector>,
    /// Where the directory with the workers' sockets is made. [default: XDG_RUNTIME_DIR or the temporary directory]
    #[arg(long, value_name = "DIR")]
    pub(crate) runtime_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) container: ContainerArgs,
    /// End when standard input ends: for a program whose sidecar must end with it.
    #[arg(long, conflicts_with = "bootstrap")]
    pub(crate) end_with_input: bool,
    /// How long resolving the names of the other sidecars and connecting to them may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = whole::<u64>(1..=86_400))]
    pub(crate) start_timeout: u64,
    #[command(flatten)]
    pub(crate) tuning: Tuning,
    #[command(flatten)]
    pub(crate) logs: LogArgs,
}

const EXAMPLES: &str =
    "A sidecar is normally started by `ronde run`. With --certs or --job-secret-file it needs no launcher; it prints a JSON
line with its socket directory and the ranks' token files when workers may come.

Examples:
  ronde sidecar --certs /etc/ronde/sidecar-0 --peers alpha:7400,beta:7400
  ronde sidecar --job-secret-file /etc/ronde/secret --job nightly --index 1 --peers alpha:7400,beta:7400";
