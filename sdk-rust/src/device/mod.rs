//! Tensors in device memory: they are copied to shared memory and back by [`ronde_gpu::Staging`], while the caller goes on.
//!
//! An operation on such a tensor gets its name and its entry among the pending requests when it is submitted, so all waits,
//! timeouts and failures are those of other operations. Its message is sent when the input has arrived in its slot. Until
//! then the request is *held*, in the order of [`mod@line`]: dropping its handle notifies the other ranks that this rank takes no
//! part, as for other operations.

mod held;
mod levels;
mod line;
mod route;
mod shared;
mod usage;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ronde_gpu::{Arrival, CallerStream, DeviceSpan, Driver, Event, GpuError, Registrations, Staging, StagingConfig};
use ronde_rpc::{OutputPlace, Place, v1};
use ronde_shm::{LeasedSlot, SlotHold};
use ronde_wire::DType;

use crate::error::Error;
use crate::in_flight::InFlight;
use crate::memory::{Memory, output_place, whole};
use crate::operation::{Label, Operation};
use crate::result_data::{ResultData, Source};
use crate::session::{Draft, Input, Session};
use crate::tensor::{Layout, TensorRef};
use held::Held;
pub use levels::LevelCounts;
use levels::Levels;
pub(crate) use levels::{DeviceResult, LevelOptions, check_levels};
pub(crate) use line::{Line, Order, Unsent};
use route::{Facts, Route, route};
pub(crate) use shared::DeviceSlot;
use shared::{SharedDevices, address_of};
use usage::{DeviceUses, Level};

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
#[derive(Debug)]
pub(crate) struct Devices {
    /// Declared first: the copies end before segments are released.
    open: Mutex<HashMap<u32, Arc<Staging>>>,
    registrations: Arc<Registrations>,
    /// What performs operations in two levels.
    levels: Levels,
    /// What the sidecar has of them, if it uses GPUs.
    shared: SharedDevices,
    /// What the session does on them.
    uses: DeviceUses,
}

/// Memory that the sidecar reads for an operation, held until it answers.
#[derive(Debug)]
pub(crate) enum InputHold {
    /// Shared memory.
    Arena(SlotHold),
    /// Device memory.
    Device(#[expect(dead_code, reason = "it is held, never read")] DeviceSlot),
}

/// Memory where the sidecar writes the result of an operation.
#[derive(Debug)]
pub(crate) enum OutputSlot {
    /// Shared memory.
    Arena(LeasedSlot),
    /// Device memory.
    Device(DeviceSlot),
}

/// The slots of shared memory that the sidecar may use. Device memory is not kept: the sidecar's import of it is its own.
pub(crate) fn slots_in_use(input: Option<InputHold>, output: Option<OutputSlot>) -> impl Iterator<Item = SlotHold> {
    let input = input.and_then(|input| if let InputHold::Arena(slot) = input { Some(slot) } else { None });
    let output = output.and_then(|output| if let OutputSlot::Arena(slot) = output { Some(slot) } else { None });
    input.into_iter().chain(output.map(SlotHold::from))
}

impl OutputSlot {
    /// The location, for the sidecar.
    pub(crate) fn place(&self) -> OutputPlace {
        match self {
            Self::Arena(slot) => output_place(slot.slot()),
            Self::Device(slot) => slot.place(),
        }
    }
}

impl Devices {
    pub(crate) fn new(levels: LevelOptions) -> Self {
        Self {
            open: Mutex::default(),
            registrations: Arc::default(),
            levels: Levels::new(levels),
            shared: SharedDevices::default(),
            uses: DeviceUses::default(),
        }
    }

    /// What has been done on devices since the last call, for the sidecar.
    pub(crate) fn take_uses(&self) -> Vec<v1::GpuUse> {
        self.uses.take_changes()
    }

    /// Has the figures of a GPU reported again, as they were not sent.
    pub(crate) fn uses_not_sent(&self, gpu: &str) {
        self.uses.not_sent(gpu);
    }

    fn count(&self, ordinal: u32, level: Level, bytes: u64) {
        // A GPU whose address cannot be found has worked all the same.
        let address = || address_of(ordinal).ok().map(|address| address.to_string());
        self.uses.count(ordinal, address, (level, bytes));
    }

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
        if draft.request.as_ref().is_some_and(|request| self.devices.levels.takes(request)) && self.memory.is_some() {
            return self.submit_in_levels(draft, tensor);
        }
        let has_input = draft.request.as_ref().is_some_and(|what| what.collective.has_input(self.pending.me()));
        let draft = match self.share(draft, tensor, has_input)? {
            Ok(in_flight) => return Ok(in_flight),
            Err(draft) => draft,
        };
        let prepared =
            if has_input { self.prepare(tensor) } else { self.mark(tensor).map(|submitted| (None, submitted)) };
        let (copy, submitted) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(draft.reject(error)),
        };
        let output = self.result_slot(&draft).and_then(|(memory, bytes)| memory.lease_result(bytes));
        let output = output.map(OutputSlot::Arena);
        let Some((staging, slot)) = copy else {
            let in_flight = self.submit(draft, Input::Bytes(&[]), output)?;
            return Ok(in_flight.submitted_after(Submitted::new(submitted, tensor)));
        };
        let (held, in_flight) = Held::insert(draft, output)?;
        let in_flight = in_flight.submitted_after(Submitted::new(Arc::clone(&submitted), tensor));
        fetch(&staging, held, tensor.memory.clone(), (submitted, slot))?;
        self.devices.count(staging.ordinal(), Level::Copied, tensor.memory.bytes() as u64);
        Ok(in_flight)
    }

    /// Submits an operation whose tensors the sidecar gets in device memory. Returns the draft if it does not get them so.
    #[expect(clippy::result_large_err, reason = "the draft is moved once, as on the other path")]
    fn share(
        self: &Arc<Self>,
        draft: Draft,
        tensor: &DeviceTensor<'_>,
        has_input: bool,
    ) -> Result<Result<InFlight, Draft>, Error> {
        let (Some(what), Some(memory)) = (draft.request.as_ref(), &self.memory) else { return Ok(Err(draft)) };
        let facts = Facts {
            device_bytes_max: self.claimed.device_bytes_max,
            collective: &what.collective,
            has_plugin: draft.plugin.is_some(),
            bytes: tensor.memory.bytes() as u64,
        };
        let prepared = match route(facts) {
            Route::Staged(None) => return Ok(Err(draft)),
            Route::Staged(Some(reason)) => Err(Error::argument(reason)),
            Route::Shared => self.prepare_shared(memory, tensor, has_input),
        };
        let Shared { staging, input, output, submitted } = match prepared {
            Ok(shared) => shared,
            // Also with a tensor that no path takes: the other path refuses it, too.
            Err(error) => {
                self.devices.shared.report(what.name.as_str(), &error.to_string());
                return Ok(Err(draft));
            }
        };
        let output = Some(OutputSlot::Device(output));
        let mark = Submitted::new(Arc::clone(&submitted), tensor);
        let Some((slot, copy)) = input else {
            return self.submit(draft, Input::Bytes(&[]), output).map(|in_flight| Ok(in_flight.submitted_after(mark)));
        };
        let (held, in_flight) = Held::insert(draft, output)?;
        let held = Arc::new(Mutex::new(Some(held)));
        let sharing = Arc::clone(&held);
        let finish = move |shared: Result<(), GpuError>| {
            if let Some(held) = take(&sharing) {
                held.finish(shared.map(|()| (slot.place().into(), InputHold::Device(slot))));
            }
        };
        staging.share(copy, submitted, Box::new(finish)).map_err(|error| {
            let error = Error::from(error);
            if let Some(mut held) = take(&held) {
                held.fail(&error);
            }
            error
        })?;
        self.devices.count(staging.ordinal(), Level::Shared, tensor.memory.bytes() as u64);
        Ok(Ok(in_flight.submitted_after(mark)))
    }

    /// What an operation in shared device memory needs, before the request is pending.
    fn prepare_shared(&self, memory: &Memory, tensor: &DeviceTensor<'_>, has_input: bool) -> Result<Shared, Error> {
        self.fork_guard.check()?;
        self.pending.check_room()?;
        let (ordinal, bytes) = (tensor.memory.device(), tensor.memory.bytes() as u64);
        let staging = self.devices.get(ordinal)?;
        staging.check(&tensor.memory)?;
        let shared = &self.devices.shared;
        let own = if has_input { shared.own(memory, &tensor.memory) } else { Ok(None) };
        let own = own.unwrap_or_else(|error| {
            // It is copied to memory that the sidecar has, as any other tensor.
            shared.report("memory of the program", &error.to_string());
            None
        });
        let input = match own {
            Some(own) => Some((own, None)),
            None if has_input => {
                let slot = shared.lease(memory, ordinal, bytes)?;
                let copy = Some((tensor.memory.clone(), slot.span().clone()));
                Some((slot, copy))
            }
            None => None,
        };
        let output = shared.lease(memory, ordinal, bytes)?;
        let submitted = Arc::new(staging.mark(tensor.stream)?);
        Ok(Shared { staging, input, output, submitted })
    }

    /// Copies device memory that the sidecar has written to a slot of shared memory. Blocks until it is there.
    pub(crate) fn fetch_shared(&self, source: &DeviceSlot) -> Result<LeasedSlot, Error> {
        let span = source.span().clone();
        let staging = self.devices.get(span.device())?;
        let slot = self.memory_for_devices()?.lease(span.bytes() as u64)?;
        let (filled, received) = std::sync::mpsc::channel();
        // The receiver may have given up.
        let pass = move |outcome| drop(filled.send(outcome));
        staging.fetch(span, Arc::new(staging.now()?), slot, Box::new(pass))?;
        let outcome = received.recv_timeout(FETCH_TIMEOUT);
        let late = |_| GpuError::Thread { reason: format!("a result did not arrive within {FETCH_TIMEOUT:?}") };
        Ok(outcome.map_err(late)??)
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
        // Another device's memory is reached through main memory.
        let is_there = matches!(&result.source, Source::Levels(found) if found.device() == target.device());
        let result = match result {
            ResultData { source: Source::Levels(found), .. } if is_there => return Ok(found.deliver(target, stream)?),
            result => result,
        };
        let staging = self.devices.get(target.device())?;
        let is_same = |submitted: &&Submitted| (submitted.device, submitted.stream) == (target.device(), stream);
        let after = match submitted.filter(is_same) {
            Some(submitted) => Arc::clone(&submitted.event),
            None => Arc::new(staging.mark(stream)?),
        };
        self.deliver_after(result, target, &after)
    }

    /// Starts to copy a result from main memory to device memory, after an event.
    fn deliver_after(&self, result: ResultData, target: DeviceSpan, after: &Arc<Event>) -> Result<Arrival, Error> {
        let staging = self.devices.get(target.device())?;
        let slot = match result.source {
            Source::Output(slot) => slot,
            Source::Device(slot) if slot.span().device() == target.device() => {
                return Ok(staging.deliver_within(slot.span().clone(), target, after)?);
            }
            Source::Device(slot) => self.fetch_shared(&slot)?,
            Source::Segment { .. } | Source::Private(_) | Source::Levels(_) => {
                let mut slot = self.memory_for_devices()?.lease(result.bytes())?;
                let bytes =
                    slot.bytes_mut().ok_or_else(|| Error::argument("a new slot is in use; this is a bug of ronde"))?;
                result.read_into(self, bytes)?;
                slot
            }
        };
        Ok(staging.deliver(slot, target, after)?)
    }
}

/// An operation in shared device memory.
struct Shared {
    staging: Arc<Staging>,
    /// Where the sidecar finds the contribution, and the copy that brings it there, if any; `None` for a rank without one.
    input: Option<(DeviceSlot, Option<(DeviceSpan, DeviceSpan)>)>,
    output: DeviceSlot,
    /// The event after which the copy begins.
    submitted: Arc<Event>,
}

/// How long the copy of a result may take.
const FETCH_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Starts to copy the input of a held request to a slot, after an event, and sends the request when it is there.
fn fetch(
    staging: &Staging,
    held: Held,
    source: DeviceSpan,
    (after, slot): (Arc<Event>, LeasedSlot),
) -> Result<(), Error> {
    // Also kept here, so that a copy that cannot begin fails it with its own error.
    let held = Arc::new(Mutex::new(Some(held)));
    let filling = Arc::clone(&held);
    let finish = move |filled: Result<LeasedSlot, GpuError>| {
        if let Some(held) = take(&filling) {
            held.finish(filled.map(|slot| {
                let (hold, part) = whole(slot);
                (Place::from(output_place(part)), InputHold::Arena(hold))
            }));
        }
    };
    staging.fetch(source, after, slot, Box::new(finish)).map_err(|error| {
        let error = Error::from(error);
        if let Some(mut held) = take(&held) {
            held.fail(&error);
        }
        error
    })
}

fn to_error(error: ronde_gpu::GpuError) -> Error {
    error.into()
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
