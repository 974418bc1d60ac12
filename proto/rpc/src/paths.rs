//! File names in a sidecar's session directory, and the version of the session protocol.
//!
//! A container needs access to this directory only.

use std::path::{Path, PathBuf};

use ronde_wire::WorkerNumber;

/// The socket of the gRPC service.
#[must_use]
pub fn rpc_socket(directory: &Path) -> PathBuf {
    directory.join("rpc.sock")
}

/// The socket over which segments of shared memory are passed.
#[must_use]
pub fn mem_socket(directory: &Path) -> PathBuf {
    directory.join("mem.sock")
}

/// The file with a worker's token: 32 bytes, mode 0400. Named after the rank, which is the worker's number in a job that
/// is not elastic.
#[must_use]
pub fn token_file(directory: &Path, worker: WorkerNumber) -> PathBuf {
    directory.join(format!("rank-{}.token", worker.0))
}

/// The newest version of the session protocol that this release supports.
pub const PROTOCOL_VERSION: u32 = 1;
/// The oldest version of the session protocol that this release supports.
pub const PROTOCOL_VERSION_MIN: u32 = 1;
