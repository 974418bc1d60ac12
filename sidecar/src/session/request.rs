//! The data that a session keeps of a request: its contribution, the location of its result, and the result's name.

use std::sync::Arc;

use bytes::Bytes;
use ronde_shm::{SharedSlot, WorkerSegment};
use ronde_wire::{Epoch, Rank, Seq};

use crate::session::gpus::DevicePart;

/// One rank's contribution to one tensor.
#[derive(Clone)]
pub(crate) enum Input {
    /// In a segment of the rank's session.
    Arena {
        /// The mapping.
        segment: Arc<WorkerSegment>,
        /// The offset of the first byte.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// In device memory of the rank's session.
    Device(DevicePart),
    /// On the host, where it was copied from device memory.
    Staged(SharedSlot),
    /// The bytes that came with the request.
    Inline(Bytes),
    /// No bytes: the rank only waits, or only receives.
    None,
}

impl Input {
    /// Copies the whole contribution of `bytes` bytes into private memory.
    ///
    /// # Errors
    /// When it has another length, or its memory cannot be read; the text is the reason.
    pub(crate) fn copy(&self, bytes: usize) -> Result<Bytes, String> {
        match self {
            Self::Inline(data) if data.len() == bytes => Ok(data.clone()),
            Self::Arena { segment, offset, bytes: given } if *given == bytes as u64 => {
                let mut copy = vec![0; bytes];
                segment.copy_to(*offset, &mut copy).map_err(|error| error.to_string())?;
                Ok(copy.into())
            }
            _ => Err(format!("the contribution does not have the {bytes} bytes of its shape")),
        }
    }
}

/// A location of a worker, for its result.
#[derive(Clone)]
pub(crate) enum Output {
    /// In shared memory.
    Arena(ArenaPart),
    /// In device memory.
    Device(DevicePart),
}

impl Output {
    /// The number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Arena(part) => part.bytes,
            Self::Device(part) => part.bytes,
        }
    }
}

/// A location in a worker's own segment.
#[derive(Clone)]
pub(crate) struct ArenaPart {
    /// The mapping.
    pub(crate) segment: Arc<WorkerSegment>,
    /// The offset of the first byte.
    pub(crate) offset: u64,
    /// The number of bytes.
    pub(crate) bytes: u64,
}

/// Names a result of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ResultId {
    /// The epoch.
    pub(crate) epoch: Epoch,
    /// The operation.
    pub(crate) seq: Seq,
    /// The index of the tensor within it.
    pub(crate) tensor: u32,
    /// The rank that owns it; `None` for the result that the local ranks share.
    pub(crate) rank: Option<Rank>,
}
