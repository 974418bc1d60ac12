//! [`ResultData`]: the result of an operation before a handle reads it.

use std::sync::Arc;

use ronde_rpc::{Completion, Place};
use ronde_shm::LeasedSlot;
use ronde_wire::{DType, Detail, RequestId, Shape};

use crate::device::{DeviceResult, DeviceSlot, OutputSlot};
use crate::error::Error;
use crate::session::Session;

/// A result that can be read. Dropping it gives its memory back to the sidecar.
#[derive(Debug)]
pub(crate) struct ResultData {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) detail: Detail,
    pub(crate) source: Source,
    pub(crate) order: Order,
}

/// When a result came: all ranks of a sidecar receive the completions of their operations in one order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Order {
    /// The number of the completion in this session.
    pub(crate) arrival: u64,
    /// The job-wide number of the order that had it, which several operations may share.
    pub(crate) seq: u64,
}

/// Where the bytes of a result are.
#[derive(Debug)]
pub(crate) enum Source {
    /// In a result segment of the sidecar.
    Segment { segment: u32, offset: u64, bytes: u64, _release: Release },
    /// In a slot of this worker.
    Output(LeasedSlot),
    /// In device memory that the sidecar has written.
    Device(DeviceSlot),
    /// In private memory.
    Private(Vec<u8>),
    /// In device memory of this worker, which performed the operation in two levels.
    Levels(DeviceResult),
}

impl From<OutputSlot> for Source {
    fn from(slot: OutputSlot) -> Self {
        match slot {
            OutputSlot::Arena(slot) => Self::Output(slot),
            OutputSlot::Device(slot) => Self::Device(slot),
        }
    }
}

impl ResultData {
    /// The result of a completion; `parts` are the bytes that came before it.
    pub(crate) fn new(session: &Arc<Session>, completion: Completion, parts: Vec<u8>) -> Self {
        let Completion { request, seq, dtype, shape, result, detail, .. } = completion;
        let source = match result {
            Place::Arena { segment, offset, bytes } => {
                let release = Release { session: Arc::clone(session), request };
                Source::Segment { segment, offset, bytes, _release: release }
            }
            Place::Inline(data) => Source::Private(data.into()),
            // The sidecar has no device memory of its own: results there are in the slot that the submission named.
            Place::None | Place::Device { .. } => Source::Private(parts),
        };
        Self { dtype, shape, detail, source, order: Order { arrival: 0, seq: seq.0 } }
    }

    /// The result of a completion in the slot that the submission named.
    pub(crate) fn in_output(completion: Completion, source: Source) -> Self {
        let Completion { seq, dtype, shape, detail, .. } = completion;
        Self { dtype, shape, detail, source, order: Order { arrival: 0, seq: seq.0 } }
    }

    /// Maps its segment, on a blocking thread the first time.
    pub(crate) async fn fetch(&self, session: &Session) -> Result<(), Error> {
        let Source::Segment { segment, .. } = self.source else { return Ok(()) };
        let memory = session.memory_of_result(segment)?;
        if memory.knows_result(segment) {
            return Ok(());
        }
        let memory = Arc::clone(memory);
        let fetched = tokio::task::spawn_blocking(move || memory.result(segment).map(drop)).await;
        let fetched = fetched.unwrap_or_else(|error| Err(Error::Thread { reason: error.to_string() }));
        fetched.map_err(|error| session.reason_of(error))
    }

    /// Checks that `target` has the length of the result.
    pub(crate) fn check_length(&self, target: &[u8]) -> Result<(), Error> {
        self.check_bytes(target.len() as u64)
    }

    /// Checks that a target of so many bytes has the length of the result.
    pub(crate) fn check_bytes(&self, target: u64) -> Result<(), Error> {
        let bytes = self.bytes();
        if bytes != target {
            let shape = &self.shape;
            let reason = format!("the result of shape {shape} has {bytes} bytes, but the target has {target}");
            return Err(Error::argument(reason));
        }
        Ok(())
    }

    /// Copies the result into `target`, whose contents are unspecified after an error.
    pub(crate) fn read_into(&self, session: &Session, target: &mut [u8]) -> Result<(), Error> {
        self.check_length(target)?;
        match &self.source {
            Source::Private(data) => target.copy_from_slice(data),
            Source::Output(slot) => slot.read(target)?,
            Source::Levels(result) => result.read(target)?,
            Source::Device(slot) => session.fetch_shared(slot)?.read(target)?,
            Source::Segment { segment, offset, .. } => {
                let mapped = session.memory_of_result(*segment)?.result(*segment);
                mapped.map_err(|error| session.reason_of(error))?.copy_to(*offset, target)?;
                // After the copy: the sidecar may lease the slot again as soon as the session's stream ends. Bytes copied
                // after that may belong to another tensor.
                session.check_results_held()?;
            }
        }
        Ok(())
    }

    /// Takes the bytes; copies them unless they are private already.
    pub(crate) fn take_bytes(&mut self, session: &Session) -> Result<Vec<u8>, Error> {
        if let Source::Private(data) = &mut self.source {
            return Ok(std::mem::take(data));
        }
        let length = usize::try_from(self.bytes()).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let mut bytes = vec![0; length];
        self.read_into(session, &mut bytes)?;
        Ok(bytes)
    }

    /// The length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.source {
            Source::Segment { bytes, .. } => *bytes,
            Source::Output(slot) => slot.slot().len,
            Source::Device(slot) => slot.span().bytes() as u64,
            Source::Private(data) => data.len() as u64,
            Source::Levels(result) => result.bytes() as u64,
        }
    }
}

/// Reports to the sidecar, when dropped, that a result has been read.
#[derive(Debug)]
pub(crate) struct Release {
    session: Arc<Session>,
    request: RequestId,
}

impl Drop for Release {
    fn drop(&mut self) {
        self.session.release(self.request);
    }
}
