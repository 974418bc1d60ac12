//! What a sidecar in a container is told, because workers, monitoring and whoever waits for its end are elsewhere.

use std::path::PathBuf;

use clap::Args;

/// Options of `ronde sidecar` without a launcher.
#[derive(Args, Debug, Default)]
pub(crate) struct ContainerArgs {
    /// The directory with the workers' sockets and tokens, made if it is not there: one that a worker's container shares.
    /// [default: a fresh one in --runtime-dir]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["bootstrap", "local_ranks", "runtime_dir"])]
    pub(crate) socket_dir: Option<PathBuf>,
    /// Users besides the sidecar's own whose processes may be its workers. Its group may then enter the directory of
    /// sockets and read the tokens.
    #[arg(long, value_name = "UID,...", value_delimiter = ',', conflicts_with_all = ["bootstrap", "local_ranks"])]
    pub(crate) worker_uids: Vec<u32>,
    /// Where /metrics, /status and /healthz are served, without encryption or log-in: for a network of their own.
    /// [default: a free port of the loopback]
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["bootstrap", "local_ranks"])]
    pub(crate) admin_listen: Option<String>,
    /// End when all workers that came have left, with status 0 if their job did; fail when none has come within so many
    /// seconds.
    #[arg(
        long,
        value_name = "SECONDS",
        conflicts_with_all = ["bootstrap", "local_ranks"],
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub(crate) exit_with_workers: Option<u64>,
    /// Write what was done to FILE at the end, as JSON.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["bootstrap", "local_ranks"])]
    pub(crate) report: Option<PathBuf>,
}
