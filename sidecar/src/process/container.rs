//! Options for a sidecar in a container, whose workers, monitoring and supervisor are elsewhere.

use std::path::PathBuf;

use clap::Args;
use ronde_bootstrap::numbers::whole;

use crate::session::worker_uids::WorkerUid;

/// Options of `ronde sidecar` without a launcher.
#[derive(Args, Debug, Default)]
pub(crate) struct ContainerArgs {
    /// The directory with the workers' sockets and tokens, shared with the worker's container; it is made if it does
    /// not exist. [default: a new one in --runtime-dir]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["bootstrap", "runtime_dir"])]
    pub(crate) socket_dir: Option<PathBuf>,
    /// Users besides the sidecar's own whose processes may be its workers. RANK=UID reserves a rank for processes of that
    /// user; give each rank its own user to keep them apart. The sidecar's group may then enter the directory of sockets.
    #[arg(long, value_name = "[RANK=]UID,...", value_delimiter = ',', conflicts_with = "bootstrap")]
    pub(crate) worker_uids: Vec<WorkerUid>,
    /// The address of the page, /metrics, /status, /flight and /healthz, which have neither encryption nor authentication: use a
    /// private network. [default: a free port of the loopback]
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "bootstrap")]
    pub(crate) admin_listen: Option<String>,
    /// End when all workers that connected have left, with status 0 if their job succeeded, else 69; fail if none
    /// connects within this many seconds.
    #[arg(
        long,
        value_name = "SECONDS",
        conflicts_with = "bootstrap",
        value_parser = whole::<u64>(1..=86_400)
    )]
    pub(crate) exit_with_workers: Option<u64>,
    /// Write a report to FILE at the end, as JSON.
    #[arg(long, value_name = "FILE", conflicts_with = "bootstrap")]
    pub(crate) report: Option<PathBuf>,
}
