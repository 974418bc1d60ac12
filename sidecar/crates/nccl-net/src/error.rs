//! Errors, with NCCL's code for each.

use ronde_shm::ShmError;
use ronde_shm::ring::RingError;
use ronde_wire::stream::StreamError;

use crate::abi;

/// Why a call fails. Texts say what happened, why, and what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The environment does not name a sidecar and a worker.
    #[error("{0}; start the program by `ronde run --nccl-net`, which sets the variables of its workers")]
    Settings(String),
    /// The sidecar cannot be reached, or refuses.
    #[error("no connection to the sidecar: {0}")]
    Sidecar(#[from] ShmError),
    /// The sidecar's end of a ring makes no sense.
    #[error("the ring of a connection is broken: {0}")]
    Ring(#[from] RingError),
    /// The sidecar or the peer sent something that is no message.
    #[error("{0}")]
    Message(#[from] StreamError),
    /// The connection is over.
    #[error("the connection is over: {0}")]
    Over(String),
    /// NCCL passed something that the plugin does not support.
    #[error("{0}")]
    Usage(String),
}

impl Error {
    /// NCCL's code.
    pub(crate) fn code(&self) -> abi::Status {
        match self {
            Self::Settings(_) | Self::Sidecar(_) | Self::Ring(_) => abi::SYSTEM_ERROR,
            Self::Message(_) | Self::Over(_) => abi::REMOTE_ERROR,
            Self::Usage(_) => abi::INVALID_USAGE,
        }
    }
}
