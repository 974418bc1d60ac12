//! [`Error`]: every failure of a worker's call, as data, and who is at fault.

use std::fmt::Display;
use std::path::PathBuf;
#[cfg(not(target_arch = "wasm32"))]
use std::sync::Arc;
use std::time::Duration;

#[cfg(not(target_arch = "wasm32"))]
use ronde_gpu::GpuError;
use ronde_rpc::ConvertError;
#[cfg(not(target_arch = "wasm32"))]
use ronde_shm::{ShmError, UsedAfterFork};
use ronde_wire::{Cause, Failure, OPERATION_TIMEOUT, TensorName};
use tonic::Status;

/// A failure of a call. Cheap to clone: all waiters of a session get the same one.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment does not define the sidecar or the rank of this worker, or a setting has an invalid value. All problems are
    /// listed.
    #[error("this process cannot connect with its settings:{}", list(.problems))]
    Settings {
        /// Each problem with what to do.
        problems: Vec<String>,
    },
    /// The rank's token cannot be read.
    #[error("the token file {} cannot be used: {reason}", .path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// The cause and what to do.
        reason: String,
    },
    /// No sidecar answers.
    #[error("no sidecar answers at {}: {reason}; start one there, or set RONDE_SOCKET to its session directory", .directory.display())]
    Connect {
        /// The session directory.
        directory: PathBuf,
        /// The error of the system.
        reason: String,
    },
    /// The sidecar is another user's.
    #[error(
        "the sidecar at {} is user {found}'s, and this worker accepts user {accepted}'s only; nothing was sent to it. Remove that \
         directory if it is not yours, or correct RONDE_SIDECAR_UID", .directory.display()
    )]
    SidecarUser {
        /// The session directory.
        directory: PathBuf,
        /// The user of the process that accepted the connection.
        found: u32,
        /// The accepted user.
        accepted: u32,
    },
    /// The sidecar rejected the claim.
    #[error("the sidecar at {} refused the claim of rank {rank}: {reason}", .directory.display())]
    Claim {
        /// The session directory.
        directory: PathBuf,
        /// The rank that was claimed.
        rank: u32,
        /// The sidecar's reason.
        reason: String,
    },
    /// No sidecar answers over gRPC-Web.
    #[error("no sidecar answers gRPC-Web at {url}: {reason}; start one there with --web-listen, or correct the URL")]
    WebConnect {
        /// The URL.
        url: String,
        /// The error of the platform.
        reason: String,
    },
    /// The sidecar rejected the claim of a rank over gRPC-Web.
    #[error("the sidecar at {url} refused the claim of rank {rank}: {reason}")]
    WebClaim {
        /// The URL.
        url: String,
        /// The rank that was claimed.
        rank: u32,
        /// The sidecar's reason.
        reason: String,
    },
    /// Not all ranks attached in time.
    #[error("the job did not start within {} s: {missing}", .waited.as_secs_f64())]
    Start {
        /// How long this worker waited.
        waited: Duration,
        /// What the job waits for, as far as the sidecar knows.
        missing: String,
    },
    /// The operation, the epoch or the sidecar failed; all affected waiters get the same failure.
    #[error("{0}")]
    Failure(Failure),
    /// An argument is wrong; nothing was submitted.
    #[error("{reason}")]
    Argument {
        /// The cause and what to do.
        reason: String,
    },
    /// A limit is reached; nothing was submitted. The call does not wait for room, because that could deadlock.
    #[error("{reason}")]
    Limit {
        /// The limit, its value, what exceeds it, and the setting to raise.
        reason: String,
    },
    /// The client has been closed.
    #[error("this client is closed; connect a new one")]
    Closed,
    /// The client belongs to the parent process.
    #[cfg(not(target_arch = "wasm32"))]
    #[error(transparent)]
    UsedAfterFork(#[from] UsedAfterFork),
    /// Shared memory failed.
    #[cfg(not(target_arch = "wasm32"))]
    #[error("shared memory failed: {0}")]
    Memory(Arc<ShmError>),
    /// A GPU, its driver or NCCL failed.
    #[cfg(not(target_arch = "wasm32"))]
    #[error(transparent)]
    Device(#[from] GpuError),
    /// The sidecar sent a message that breaks the protocol.
    #[error(
        "the sidecar sent a message that breaks the protocol: {reason}; install the same release of ronde on both sides"
    )]
    Protocol {
        /// How it breaks the protocol.
        reason: String,
    },
    /// A timeline cannot be recorded.
    #[error("the timeline {} cannot be recorded: {reason}", .path.display())]
    Timeline {
        /// Its file.
        path: PathBuf,
        /// The error of the system or the sidecar.
        reason: String,
    },
    /// The client's own thread could not be started.
    #[error("the client's thread cannot be started: {reason}")]
    Thread {
        /// The error of the system.
        reason: String,
    },
}

impl Error {
    /// Who can fix it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Settings { .. }
            | Self::Token { .. }
            | Self::Argument { .. }
            | Self::Limit { .. }
            | Self::Closed
            | Self::SidecarUser { .. }
            | Self::Claim { .. }
            | Self::WebClaim { .. } => Blame::Caller,
            #[cfg(not(target_arch = "wasm32"))]
            Self::UsedAfterFork(_) => Blame::Caller,
            #[cfg(not(target_arch = "wasm32"))]
            Self::Device(error) if error.is_callers() => Blame::Caller,
            #[cfg(not(target_arch = "wasm32"))]
            Self::Device(_) => Blame::Local,
            Self::Connect { .. } | Self::WebConnect { .. } | Self::Start { .. } | Self::Protocol { .. } => Blame::Peer,
            Self::Thread { .. } | Self::Timeline { .. } => Blame::Local,
            Self::Failure(failure) => match failure.cause.blame() {
                ronde_wire::Blame::Caller => Blame::Caller,
                ronde_wire::Blame::Peer => Blame::Peer,
                ronde_wire::Blame::Bug => Blame::Bug,
            },
            #[cfg(not(target_arch = "wasm32"))]
            Self::Memory(error) => match error.blame() {
                ronde_shm::Blame::Caller => Blame::Bug,
                ronde_shm::Blame::Peer => Blame::Peer,
                _ => Blame::Local,
            },
        }
    }

    /// Whether a rank has shut down in an orderly way, after which operations that are under way are completed.
    pub(crate) fn is_shutdown(&self) -> bool {
        self.failure().is_some_and(|failure| failure.cause == ronde_wire::Cause::ShutDown)
    }

    /// The failure that all ranks or the whole session share, if it is one.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        if let Self::Failure(failure) = self { Some(failure) } else { None }
    }

    /// Whether only this call failed and the session goes on.
    #[must_use]
    pub fn is_local_to_call(&self) -> bool {
        match self {
            Self::Argument { .. } | Self::Limit { .. } | Self::Timeline { .. } => true,
            #[cfg(not(target_arch = "wasm32"))]
            Self::Device(_) => true,
            Self::Failure(failure) => !failure.cause.ends_epoch(),
            _ => false,
        }
    }

    pub(crate) fn argument(reason: impl Into<String>) -> Self {
        Self::Argument { reason: reason.into() }
    }

    pub(crate) fn protocol(error: &ConvertError) -> Self {
        Self::Protocol { reason: error.to_string() }
    }

    pub(crate) fn timed_out(reason: String) -> Self {
        Self::Failure(Failure::new(Cause::TimedOut, reason))
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl From<ShmError> for Error {
    fn from(error: ShmError) -> Self {
        match error {
            ShmError::UsedAfterFork(error) => Self::UsedAfterFork(error),
            error => Self::Memory(Arc::new(error)),
        }
    }
}

/// Who can fix an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The calling program or its settings.
    Caller,
    /// Another process or host.
    Peer,
    /// This machine.
    Local,
    /// ronde.
    Bug,
}

impl Blame {
    /// Its name, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Caller => "caller",
            Self::Peer => "peer",
            Self::Local => "local",
            Self::Bug => "bug",
        }
    }
}

/// The reason of a waiter whose operation timeout has passed.
pub(crate) fn overdue(name: &TensorName, timeout: Duration) -> String {
    format!("{name} did not complete within {timeout:?}, {OPERATION_TIMEOUT}; check which ranks did not submit it")
}

/// A status as one line for users.
pub(crate) fn describe(status: &Status) -> String {
    let cause = std::error::Error::source(status).map(|source| format!(" ({source})")).unwrap_or_default();
    format!("{}{cause}", status.message())
}

/// Why a stream ended, in words: an error of the connection means that the sidecar's process has ended, and says nothing to
/// users.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn end_of_stream(status: &Status) -> String {
    if std::error::Error::source(status).is_none() {
        return status.message().to_owned();
    }
    "its process has ended; the launcher's last lines or the sidecar's log say why".to_owned()
}

/// The error when the queue to the sidecar is full.
pub(crate) fn queue_full(messages: usize) -> Error {
    let reason = format!("{messages} messages wait for the sidecar, which does not read; see whether it is alive");
    Error::Limit { reason }
}

/// The failure of every waiter when the sidecar is gone.
pub(crate) fn sidecar_gone(place: impl Display, how: &str) -> Failure {
    Failure::new(Cause::SidecarLost, format!("the sidecar at {place} is gone: {how}"))
}

fn list(problems: &[String]) -> String {
    problems.iter().map(|problem| format!("\n  - {problem}")).collect()
}
