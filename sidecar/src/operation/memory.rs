//! The [`Memory`] that executors read and write: contributions and results in shared memory.
//!
//! Input segments belong to workers, which may write them at any time, so each read is one copy into private memory. A
//! result is written block by block from private memory to each of its destinations, and never read back.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ronde_engine::{Contributions, InputPlace, Memory, MemoryError, OutputPlace, Plugins};
use ronde_shm::{NON_TEMPORAL_BYTES_MIN, SharedSlot, ShmError};
use ronde_wire::{Rank, Seq, copying};
use tokio::sync::mpsc::WeakSender;

use crate::operation::lanes::LaneCommand;
use crate::operation::results::ResultSlot;
use crate::plugins::LanePlugins;
use crate::session::gpus::DevicePart;
use crate::session::request::{ArenaPart, Input, Output};

/// Where a result goes.
#[derive(Clone)]
pub(crate) enum Destination {
    /// A slot of the sidecar, and the ranks that read it, which share the result.
    Slot(ResultSlot, Vec<Rank>),
    /// A location in the rank's worker's segment.
    Worker(ArenaPart),
    /// A location in the rank's worker's device memory. Only the lane of such operations writes there.
    Device(DevicePart, Rank),
    /// On the host, on the way to device memory.
    Staged(SharedSlot),
}

impl Destination {
    /// The location that a rank named.
    pub(crate) fn of(output: Output, rank: Rank) -> Self {
        match output {
            Output::Arena(part) => Self::Worker(part),
            Output::Device(part) => Self::Device(part, rank),
        }
    }

    /// The length.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Slot(slot, _) => slot.slot.len,
            Self::Worker(output) => output.bytes,
            Self::Device(part, _) => part.bytes,
            Self::Staged(slot) => slot.slot().len,
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        let failed = |error: ShmError| MemoryError(error.to_string());
        // The first byte of a larger result would be evicted before its last one is written.
        let streamed = self.bytes() >= NON_TEMPORAL_BYTES_MIN as u64;
        match self {
            Self::Slot(slot, _) if streamed => slot.segment.copy_from_non_temporal(slot.slot.offset + offset, from),
            Self::Slot(slot, _) => slot.segment.copy_from(slot.slot.offset + offset, from),
            Self::Worker(output) if streamed => output.segment.copy_from_non_temporal(output.offset + offset, from),
            Self::Worker(output) => output.segment.copy_from(output.offset + offset, from),
            Self::Staged(slot) => slot.write(offset, from),
            Self::Device(..) => return Err(MemoryError("a lane of the host has a result in device memory".to_owned())),
        }
        .map_err(failed)
    }
}

/// The memory of one admitted operation, by tensor.
pub(crate) struct OperationMemory {
    /// One for each tensor, in the operation's order.
    pub(crate) tensors: Vec<TensorMemory>,
    /// Notifies the lane of operations in device memory when its slots on the host are free. Declared last: dropped after them.
    #[expect(dead_code, reason = "only its drop does something")]
    pub(crate) notice: Option<RoomNotice>,
}

/// Sends [`LaneCommand::Room`] when it is dropped, unless the lane has another one to handle.
pub(crate) struct RoomNotice(pub(crate) RoomNotices);

/// Sends [`LaneCommand::Room`] to a lane, one at a time.
#[derive(Clone)]
pub(crate) struct RoomNotices {
    commands: WeakSender<LaneCommand>,
    is_sent: Arc<AtomicBool>,
}

impl RoomNotices {
    /// Notices to the lane that receives from this queue.
    pub(crate) fn new(commands: WeakSender<LaneCommand>) -> Self {
        Self { commands, is_sent: Arc::default() }
    }

    /// The lane handles a notice, and sees all room that was free before any notice until now.
    pub(crate) fn received(&self) {
        self.is_sent.swap(false, Ordering::AcqRel);
    }
}

impl Drop for RoomNotice {
    fn drop(&mut self) {
        let RoomNotices { commands, is_sent } = &self.0;
        if !is_sent.swap(true, Ordering::AcqRel)
            && let Some(commands) = commands.upgrade()
            && commands.try_send(LaneCommand::Room).is_err()
        {
            // A lane with a full queue sees after any of those commands what is free.
            is_sent.store(false, Ordering::Release);
        }
    }
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
    /// The contribution of a rank.
    pub(crate) fn input(&self, rank: Rank) -> Option<&Input> {
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
            Some(Input::Staged(slot)) => slot.read(place.offset, into).map_err(|error| MemoryError(error.to_string())),
            Some(Input::Device(_)) => {
                Err(MemoryError(format!("{place:?} is in device memory, which a lane of the host cannot read")))
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
            output.write(place.offset, from)?;
            written = true;
        }
        if written { Ok(()) } else { Err(MemoryError(format!("{place:?} has no result here"))) }
    }

    fn parts(&mut self) -> (&mut dyn Contributions, Option<&mut dyn Plugins>) {
        (&mut self.operations, self.plugins.as_mut().map(|plugins| plugins as &mut dyn Plugins))
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn a_lane_gets_one_notice_of_room_at_a_time() {
        let (commands, mut lane) = mpsc::channel(8);
        let notices = RoomNotices::new(commands.downgrade());
        let mut received = || std::iter::from_fn(|| lane.try_recv().ok()).count();
        for _ in 0..3 {
            drop(RoomNotice(notices.clone()));
        }
        assert_eq!(received(), 1);
        notices.received();
        drop(RoomNotice(notices.clone()));
        assert_eq!(received(), 1, "the lane has handled the first");
        notices.received();
        while commands.try_send(LaneCommand::Room).is_ok() {}
        drop(RoomNotice(notices.clone()));
        assert_eq!(received(), 8, "the queue is full");
        drop(RoomNotice(notices));
        assert_eq!(received(), 1, "a notice that was not sent is not awaited");
    }
}
