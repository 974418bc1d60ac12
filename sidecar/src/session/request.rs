//! What a session keeps of a request: its contribution, the place for its result, and the result itself.

use std::sync::Arc;

use bytes::Bytes;
use ronde_shm::WorkerSegment;
use ronde_wire::{Epoch, Rank, Seq};

/// One rank's contribution to one tensor.
#[derive(Clone)]
pub(crate) enum Input {
    /// In a segment of the rank's session.
    Arena {
        /// The mapping.
        segment: Arc<WorkerSegment>,
        /// The first byte.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// It came with the request.
    Inline(Bytes),
    /// The rank hands over nothing: it only waits, or only receives.
    None,
}

impl Input {
    /// A private copy of the whole contribution, which has `bytes` bytes.
    ///
    /// # Errors
    /// When it has not, or its memory cannot be read, in words.
    pub(crate) fn copy(&self, bytes: usize) -> Result<Bytes, String> {
        match self {
            Self::Inline(data) if data.len() == bytes => Ok(data.clone()),
            Self::Arena { segment, offset, bytes: given } if *given == bytes as u64 => {
                let mut copy = vec![0; bytes];
                segment.copy_to(*offset, &mut copy).map_err(|error| error.to_string())?;
                Ok(copy.into())
            }
            _ => Err(format!("the contribution has not the {bytes} bytes that its shape says")),
        }
    }
}

/// A place in a worker's own segment, for its result.
#[derive(Clone)]
pub(crate) struct Output {
    /// The mapping.
    pub(crate) segment: Arc<WorkerSegment>,
    /// The first byte.
    pub(crate) offset: u64,
    /// How many.
    pub(crate) bytes: u64,
}

/// Names a result of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ResultId {
    /// The epoch.
    pub(crate) epoch: Epoch,
    /// The operation.
    pub(crate) seq: Seq,
    /// The tensor within it.
    pub(crate) tensor: u32,
    /// The rank whose own it is; `None` for the one that the local ranks share.
    pub(crate) rank: Option<Rank>,
}
