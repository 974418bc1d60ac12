//! The [`Memory`] that executors read and write: contributions and results in shared memory.
//!
//! Input segments belong to workers, which may write them at any time, so each read is one copy into private memory. A
//! result is written block by block from private memory to each of its destinations, and never read back.

use std::collections::HashMap;
use std::sync::Arc;

use ronde_engine::{Contributions, InputPlace, Memory, MemoryError, OutputPlace, Plugins};
use ronde_shm::{NON_TEMPORAL_BYTES_MIN, ShmError};
use ronde_wire::{Rank, Seq, copying};

use crate::operation::results::ResultSlot;
use crate::plugins::LanePlugins;
use crate::session::request::{Input, Output};

/// Where a result goes.
#[derive(Clone)]
pub(crate) enum Destination {
    /// A slot of the sidecar, and the ranks that read it, which share the result.
    Slot(ResultSlot, Vec<Rank>),
    /// A location in the rank's worker's segment.
    Worker(Output),
}

impl Destination {
    fn bytes(&self) -> u64 {
        match self {
            Self::Slot(slot, _) => slot.slot.len,
            Self::Worker(output) => output.bytes,
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), ShmError> {
        // The first byte of a larger result would be evicted before its last one is written.
        let streamed = self.bytes() >= NON_TEMPORAL_BYTES_MIN as u64;
        match self {
            Self::Slot(slot, _) if streamed => slot.segment.copy_from_non_temporal(slot.slot.offset + offset, from),
            Self::Slot(slot, _) => slot.segment.copy_from(slot.slot.offset + offset, from),
            Self::Worker(output) if streamed => output.segment.copy_from_non_temporal(output.offset + offset, from),
            Self::Worker(output) => output.segment.copy_from(output.offset + offset, from),
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
    /// The local contributions, ascending by rank.
    pub(crate) inputs: Vec<(Rank, Input)>,
    /// The destinations of the results that have bytes: under `None` the result that the local ranks share, else those
    /// of single ranks. All destinations of a result have its length.
    pub(crate) outputs: Vec<(Option<Rank>, Destination)>,
}

impl TensorMemory {
    fn input(&self, rank: Rank) -> Option<&Input> {
        let index = self.inputs.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
        self.inputs.get(index).map(|(_, input)| input)
    }
}

/// The operations that a lane performs now.
pub(crate) struct LaneMemory {
    operations: Operations,
    plugins: Option<LanePlugins>,
}

/// The memory of operations by sequence number.
#[derive(Default)]
struct Operations(HashMap<Seq, Arc<OperationMemory>>);

impl LaneMemory {
    /// Creates an empty table with the plugins that its operations may call.
    pub(crate) fn new(plugins: Option<LanePlugins>) -> Self {
        Self { operations: Operations::default(), plugins }
    }

    /// Adds an operation's memory.
    pub(crate) fn insert(&mut self, seq: Seq, operation: Arc<OperationMemory>) {
        self.operations.0.insert(seq, operation);
    }

    /// Removes a completed operation.
    pub(crate) fn remove(&mut self, seq: Seq) {
        self.operations.0.remove(&seq);
    }

    /// Removes all operations, because the epoch is over.
    pub(crate) fn clear(&mut self) {
        self.operations.0.clear();
    }
}

impl Operations {
    fn operation(&self, seq: Seq) -> Result<&OperationMemory, MemoryError> {
        let operation = self.0.get(&seq);
        operation.map(AsRef::as_ref).ok_or_else(|| MemoryError(format!("{seq} has no memory here")))
    }
}

impl Contributions for Operations {
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError> {
        let tensor = self.operation(place.seq)?.tensors.get(place.tensor as usize);
        let input = tensor.and_then(|tensor| tensor.input(place.rank));
        match input {
            Some(Input::Arena { segment, offset, bytes }) => {
                let end = place.offset.checked_add(into.len() as u64);
                if end.is_none_or(|end| end > *bytes) {
                    return Err(MemoryError(format!("{place:?} is outside of the {bytes} bytes of the contribution")));
                }
                segment.copy_to(offset + place.offset, into).map_err(|error| MemoryError(error.to_string()))
            }
            Some(Input::Inline(data)) => {
                let start = usize::try_from(place.offset).unwrap_or(usize::MAX);
                let range = start..start.saturating_add(into.len());
                let from =
                    data.get(range).ok_or_else(|| MemoryError(format!("{place:?} is outside of the inline bytes")))?;
                copying::copy(into, from);
                Ok(())
            }
            Some(Input::None) | None => Err(MemoryError(format!("{place:?} has no contribution here"))),
        }
    }
}

impl Memory for LaneMemory {
    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError> {
        let tensor = self.operations.operation(place.seq)?.tensors.get(place.tensor as usize);
        let outputs = tensor.into_iter().flat_map(|tensor| &tensor.outputs).filter(|(rank, _)| *rank == place.rank);
        let mut written = false;
        for (_, output) in outputs {
            let end = place.offset.checked_add(from.len() as u64);
            if end.is_none_or(|end| end > output.bytes()) {
                return Err(MemoryError(format!("{place:?} is outside of the result's {} bytes", output.bytes())));
            }
            output.write(place.offset, from).map_err(|error| MemoryError(error.to_string()))?;
            written = true;
        }
        if written { Ok(()) } else { Err(MemoryError(format!("{place:?} has no result here"))) }
    }

    fn parts(&mut self) -> (&mut dyn Contributions, Option<&mut dyn Plugins>) {
        (&mut self.operations, self.plugins.as_mut().map(|plugins| plugins as &mut dyn Plugins))
    }
}
