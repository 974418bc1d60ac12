//! Tensors in device memory: they are copied to shared memory and back by [`ronde_gpu::Staging`], while the caller goes on.
//!
//! An operation on such a tensor gets its name and its entry among the pending requests when it is submitted, so all waits,
//! timeouts and failures are those of other operations. Its message is sent when the input has arrived in its slot. Until
//! then the request is *held*, in the order of [`mod@line`]: dropping its handle notifies the other ranks that this rank takes no
//! part, as for other operations.

mod held;
mod line;

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
use crate::tensor::{Layout, TensorRef};
use held::Held;
pub(crate) use line::{Line, Order, Unsent};

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
                let draft = self.draft_of(&to_own_slot(operation), Some(layout(&tensor)))?;
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
        let described: Vec<_> = operations
            .iter()
            .map(|(operation, input)| match input {
                InputTensor::None => (operation.clone(), None),
                InputTensor::Host(TensorRef { dtype, shape, bytes }) => {
                    (operation.clone(), Some(Layout { dtype: *dtype, shape, bytes: bytes.len() }))
                }
                InputTensor::Device(tensor) => (to_own_slot(operation), Some(layout(tensor))),
            })
            .collect();
        let drafts = self.draft_group_of(label, &described)?;
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
            return Ok(in_flight.submitted_after(Submitted::new(submitted, tensor)));
        };
        let (held, in_flight) = Held::insert(draft, output)?;
        let in_flight = in_flight.submitted_after(Submitted::new(Arc::clone(&submitted), tensor));
        // Also kept here, so that a copy that cannot begin fails it with its own error.
        let held = Arc::new(Mutex::new(Some(held)));
        let filling = Arc::clone(&held);
        let finish = move |filled| {
            if let Some(held) = take(&filling) {
                held.finish(filled);
            }
        };
        staging.fetch(tensor.memory.clone(), submitted, slot, Box::new(finish)).map_err(|error| {
            let error = Error::from(error);
            if let Some(mut held) = take(&held) {
                held.fail(&error);
            }
            error
        })?;
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

    /// Starts to copy a result to device memory, after the present work of `stream`; with `submitted`, if that is of the same
    /// stream, after its work at the submission.
    pub(crate) fn deliver(
        &self,
        result: ResultData,
        target: DeviceSpan,
        (stream, submitted): (CallerStream, Option<&Submitted>),
    ) -> Result<Arrival, Error> {
        self.fork_guard.check()?;
        let staging = self.devices.get(target.device())?;
        let is_same = |submitted: &&Submitted| (submitted.device, submitted.stream) == (target.device(), stream);
        let after = match submitted.filter(is_same) {
            Some(submitted) => Arc::clone(&submitted.event),
            None => Arc::new(staging.mark(stream)?),
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

/// A point in the work of the stream that computes an input: that of the submission.
#[derive(Debug)]
pub(crate) struct Submitted {
    event: Arc<Event>,
    device: u32,
    /// Only compared: it may no longer exist.
    stream: CallerStream,
}

impl Submitted {
    fn new(event: Arc<Event>, tensor: &DeviceTensor<'_>) -> Self {
        Self { event, device: tensor.memory.device(), stream: tensor.stream }
    }
}

fn take(held: &Mutex<Option<Held>>) -> Option<Held> {
    held.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// The operation with its result in a slot of this worker, if there is room: that is registered, and from elsewhere the result
/// would be copied once more.
fn to_own_slot<'a>(operation: &Operation<'a>) -> Operation<'a> {
    Operation { mapped: true, ..operation.clone() }
}

fn layout<'a>(tensor: &DeviceTensor<'a>) -> Layout<'a> {
    Layout { dtype: tensor.dtype, shape: tensor.shape, bytes: tensor.memory.bytes() }
}
