//! How many files this process may open. Each connection of NCCL takes three, each worker a few, so a soft limit of 1,024, which is
//! common for programs that call `select`, is too low for hosts with many GPUs.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit to the hard one. If it cannot be raised, the log says so: [`StreamGate`](crate::streams::StreamGate)
/// admits what the limit allows.
pub(super) fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is; raise it (ulimit -n) for many connections of NCCL");
    }
}
