//! Tensors in device memory: they are copied to shared memory and back by [`ronde_gpu::Staging`], while the caller goes on.
//!
//! An operation on such a tensor gets its name and its entry among the pending requests when it is submitted, so all waits,
//! timeouts and failures are those of other operations. Its message is sent when the input has arrived in its slot. Until
//! then the request is *held*: dropping its handle sends nothing to the sidecar, and the other ranks learn that this rank
//! takes no part when the copy has ended.

mod held;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ronde_gpu::{Arrival, CallerStream, DeviceSpan, Driver, Event, Registrations, Staging, StagingConfig};
use ronde_shm::LeasedSlot;
use ronde_wire::DType;

use crate::error::Error;
use crate::in_flight::InFlight;
use crate::memory::Memory;
use crate::operation::{Label, Operation};
use crate::result_data::{ResultData, Source};
use crate::session::{Draft, Input, Session};
use crate::tensor::TensorRef;
use held::Held;

/// A contiguous tensor in device memory.
#[derive(Clone, Debug)]
pub struct DeviceTensor<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, outermost first; none for a scalar.
    pub shape: &'a [u64],
    /// The elements in row-major order, little-endian.
    pub memory: DeviceSpan,
    /// The stream whose present work computes them.
    pub stream: CallerStream,
}

/// The contribution of a rank, wherever it is.
#[derive(Clone, Debug)]
pub enum InputTensor<'a> {
    /// None: the rank only receives.
    None,
    /// In main memory.
    Host(TensorRef<'a>),
    /// In device memory.
    Device(DeviceTensor<'a>),
}

/// The devices of a session, each opened by its first use.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    /// Declared first: the copies end before segments are released.
    open: Mutex<HashMap<u32, Arc<Staging>>>,
    registrations: Arc<Registrations>,
}

impl Devices {
    fn get(&self, ordinal: u32) -> Result<Arc<Staging>, Error> {
        // A panic elsewhere leaves the map whole: the only change is an insertion.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = open.get(&ordinal) {
            return Ok(Arc::clone(staging));
        }
        let config = StagingConfig::default();
        let staging = Arc::new(Staging::new(&Driver::get()?, ordinal, &self.registrations, config)?);
        open.insert(ordinal, Arc::clone(&staging));
        Ok(staging)
    }
}

impl Session {
    /// Submits an operation whose contribution may be in device memory.
    pub(crate) fn submit_input(
        self: &Arc<Self>,
        operation: &Operation<'_>,
        input: InputTensor<'_>,
    ) -> Result<InFlight, Error> {
        match input {
            InputTensor::None => self.submit_from(&Operation { tensor: None, ..operation.clone() }),
            InputTensor::Host(tensor) => self.submit_from(&Operation { tensor: Some(tensor), ..operation.clone() }),
            InputTensor::Device(tensor) => {
                let lengths = lengths(&tensor);
                let draft = self.draft(&described(operation, &tensor, &lengths))?;
                self.submit_device(draft, &tensor)
            }
        }
    }

    /// Submits operations that become ready together, whose contributions may be in device memory.
    pub(crate) fn submit_group_input(
        self: &Arc<Self>,
        label: Label<'_>,
        operations: &[(Operation<'_>, InputTensor<'_>)],
    ) -> Result<Vec<InFlight>, Error> {
        let lengths: Vec<Vec<u8>> = operations
            .iter()
            .map(|(_, input)| match input {
                InputTensor::Device(tensor) => lengths(tensor),
                InputTensor::None | InputTensor::Host(_) => Vec::new(),
            })
            .collect();
        let described = operations.iter().zip(&lengths).map(|((operation, input), lengths)| match input {
            InputTensor::None => Operation { tensor: None, ..operation.clone() },
            InputTensor::Host(tensor) => Operation { tensor: Some(*tensor), ..operation.clone() },
            InputTensor::Device(tensor) => described(operation, tensor, lengths),
        });
        let drafts = self.draft_group(label, &described.collect::<Vec<_>>())?;
        let parts = drafts.into_iter().zip(operations);
        parts
            .map(|(draft, (_, input))| match input {
                InputTensor::None => self.submit(draft, Input::Bytes(&[]), None),
                InputTensor::Host(tensor) => self.submit_bytes(draft, tensor.bytes),
                InputTensor::Device(tensor) => self.submit_device(draft, tensor),
            })
            .collect()
    }

    fn submit_device(self: &Arc<Self>, draft: Draft, tensor: &DeviceTensor<'_>) -> Result<InFlight, Error> {
        let has_input = draft.request.as_ref().is_some_and(|what| what.collective.has_input(self.pending.me()));
        let prepared =
            if has_input { self.prepare(tensor) } else { self.mark(tensor).map(|submitted| (None, submitted)) };
        let (copy, submitted) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(draft.reject(error)),
        };
        let output = self.result_slot(&draft).and_then(|(memory, bytes)| memory.lease_result(bytes));
        let Some((staging, slot)) = copy else {
            let in_flight = self.submit(draft, Input::Bytes(&[]), output)?;
            return Ok(in_flight.submitted_after(submitted));
        };
        let (held, in_flight) = Held::insert(draft, output, Arc::clone(&submitted))?;
        staging.fetch(tensor.memory.clone(), submitted, slot, Box::new(move |filled| held.finish(filled)))?;
        Ok(in_flight)
    }

    /// An event of the tensor's stream now.
    fn mark(&self, tensor: &DeviceTensor<'_>) -> Result<Arc<Event>, Error> {
        self.fork_guard.check()?;
        Ok(Arc::new(self.devices.get(tensor.memory.device())?.mark(tensor.stream)?))
    }

    /// What a copy from the device needs, before the request is pending.
    fn prepare(&self, tensor: &DeviceTensor<'_>) -> Result<Prepared, Error> {
        self.fork_guard.check()?;
        self.pending.check_room()?;
        let memory = self.memory_for_devices()?;
        let staging = self.devices.get(tensor.memory.device())?;
        // Before memory is leased, which an argument that is wrong should not grow.
        staging.check(&tensor.memory)?;
        let slot = memory.lease(tensor.memory.bytes() as u64)?;
        staging.register(&slot)?;
        let submitted = Arc::new(staging.mark(tensor.stream)?);
        Ok((Some((staging, slot)), submitted))
    }

    fn memory_for_devices(&self) -> Result<&Arc<Memory>, Error> {
        self.memory.as_ref().ok_or_else(|| {
            Error::argument("tensors on GPUs need shared memory, and this session sends tensors inside messages; connect without inline")
        })
    }

    /// Starts to copy a result to device memory, after `stream`, or else after the event of the submission.
    pub(crate) fn deliver(
        &self,
        result: ResultData,
        target: DeviceSpan,
        (stream, submitted): (Option<CallerStream>, Option<&Arc<Event>>),
    ) -> Result<Arrival, Error> {
        self.fork_guard.check()?;
        let staging = self.devices.get(target.device())?;
        let after = match (stream, submitted) {
            (None, Some(submitted)) => Arc::clone(submitted),
            (stream, _) => Arc::new(staging.mark(stream.unwrap_or(CallerStream::LEGACY))?),
        };
        let slot = match result.source {
            Source::Output(slot) => slot,
            Source::Segment { .. } | Source::Private(_) => {
                let mut slot = self.memory_for_devices()?.lease(result.bytes())?;
                let bytes =
                    slot.bytes_mut().ok_or_else(|| Error::argument("a new slot is in use; this is a bug of ronde"))?;
                result.read_into(self, bytes)?;
                slot
            }
        };
        Ok(staging.deliver(slot, target, &after)?)
    }
}

/// The copy to start, if any, and the event after which it begins.
type Prepared = (Option<(Arc<Staging>, LeasedSlot)>, Arc<Event>);

/// As many bytes as a tensor has, by which shape and type are checked. They are zeros that the system does not allocate
/// unless somebody reads them, and nobody does.
fn lengths(tensor: &DeviceTensor<'_>) -> Vec<u8> {
    vec![0; tensor.memory.bytes()]
}

/// The operation with type, shape and length of its tensor. Its result goes to a slot of this worker if there is room, because
/// that is registered: from elsewhere it would be copied once more.
fn described<'a>(operation: &Operation<'a>, tensor: &DeviceTensor<'a>, lengths: &'a [u8]) -> Operation<'a> {
    let tensor = TensorRef { dtype: tensor.dtype, shape: tensor.shape, bytes: lengths };
    Operation { tensor: Some(tensor), mapped: true, ..operation.clone() }
}
