//! What an executor reads and writes: the [`Memory`] of operations in shared memory.
//!
//! Input segments belong to workers, which may write them at any time; every read is one copy into private memory.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ronde_engine::{InputPlace, Memory, MemoryError, OutputPlace};
use ronde_shm::PeerSegment;
use ronde_wire::{Rank, Seq};

use crate::results::ResultSlot;

/// One rank's contribution to one tensor.
#[derive(Clone)]
pub(crate) enum Input {
    /// In a segment of the rank's session.
    Arena {
        /// The mapping.
        segment: Arc<PeerSegment>,
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

/// The memory of one admitted operation, by tensor.
pub(crate) struct OperationMemory {
    /// One for each tensor, in the operation's order.
    pub(crate) tensors: Vec<TensorMemory>,
}

/// The memory of one tensor of an operation.
pub(crate) struct TensorMemory {
    /// The contributions that are here, ascending by rank.
    pub(crate) inputs: Vec<(Rank, Input)>,
    /// The results that have bytes: the one that the local ranks share, under `None`, or those of single ranks.
    pub(crate) outputs: Vec<(Option<Rank>, ResultSlot)>,
    /// How many local ranks read a shared result: those that have asked for it.
    pub(crate) readers: usize,
}

impl TensorMemory {
    fn input(&self, rank: Rank) -> Option<&Input> {
        let index = self.inputs.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
        self.inputs.get(index).map(|(_, input)| input)
    }
}

/// The operations that a lane performs now.
#[derive(Default)]
pub(crate) struct LaneMemory {
    operations: HashMap<Seq, Arc<OperationMemory>>,
}

impl LaneMemory {
    /// Makes an operation's memory reachable.
    pub(crate) fn insert(&mut self, seq: Seq, operation: Arc<OperationMemory>) {
        self.operations.insert(seq, operation);
    }

    /// Forgets an operation that is done.
    pub(crate) fn remove(&mut self, seq: Seq) {
        self.operations.remove(&seq);
    }

    /// Forgets everything: the epoch is over.
    pub(crate) fn clear(&mut self) {
        self.operations.clear();
    }

    fn operation(&self, seq: Seq) -> Result<&OperationMemory, MemoryError> {
        let operation = self.operations.get(&seq);
        operation.map(AsRef::as_ref).ok_or_else(|| MemoryError(format!("{seq} has no memory here")))
    }
}

impl Memory for LaneMemory {
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError> {
        let tensor = self.operation(place.seq)?.tensors.get(place.tensor as usize);
        let input = tensor.and_then(|tensor| tensor.input(place.rank));
        match input {
            Some(Input::Arena { segment, offset, bytes }) => {
                let end = place.offset.checked_add(into.len() as u64);
                if end.is_none_or(|end| end > *bytes) {
                    return Err(MemoryError(format!("{place:?} lies behind the {bytes} bytes of the contribution")));
                }
                segment.copy_to(offset + place.offset, into).map_err(|error| MemoryError(error.to_string()))
            }
            Some(Input::Inline(data)) => {
                let start = usize::try_from(place.offset).unwrap_or(usize::MAX);
                let range = start..start.saturating_add(into.len());
                let from =
                    data.get(range).ok_or_else(|| MemoryError(format!("{place:?} lies behind the inline bytes")))?;
                into.copy_from_slice(from);
                Ok(())
            }
            Some(Input::None) | None => Err(MemoryError(format!("{place:?} has no contribution here"))),
        }
    }

    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError> {
        let tensor = self.operation(place.seq)?.tensors.get(place.tensor as usize);
        let output = tensor.and_then(|tensor| tensor.outputs.iter().find(|(rank, _)| *rank == place.rank));
        let (_, output) = output.ok_or_else(|| MemoryError(format!("{place:?} has no result here")))?;
        let end = place.offset.checked_add(from.len() as u64);
        if end.is_none_or(|end| end > output.slot.len) {
            return Err(MemoryError(format!("{place:?} lies behind the result's {} bytes", output.slot.len)));
        }
        output
            .segment
            .copy_from(output.slot.offset + place.offset, from)
            .map_err(|error| MemoryError(error.to_string()))
    }
}
