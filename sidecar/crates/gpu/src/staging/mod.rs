//! [`Staging`]: copies between one device's memory and slots of shared memory.
//!
//! Two streams of its own, one per direction, so that both directions of the bus are busy. The caller's streams are ordered
//! with them by events; the host never waits for a caller's stream. A thread starts the copies to the host, waits for them,
//! and passes the filled slots on; it also keeps what copies to the device read until these have ended.
//!
//! Nothing is released while a copy uses it: slots, device memory and registrations are owned by the thread. If copies do
//! not end within [`StagingConfig::drain_timeout`] when the value is dropped, the thread is left to itself and keeps them.

mod pipeline;
mod registrations;
mod thread;
mod transfers;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use ronde_shm::LeasedSlot;

use crate::driver::{Context, Direction, Driver, Event, Stream};
use crate::error::GpuError;
use crate::span::{CallerStream, DeviceSpan};
pub use registrations::Registrations;
use thread::{Fetch, Kept, Message, Share, Thread};
pub use transfers::Transfers;

/// How a [`Staging`] copies.
#[derive(Clone, Copy, Debug)]
pub struct StagingConfig {
    /// The most bytes of one copy.
    pub chunk_bytes: usize,
    /// The most copies to the host that are in flight.
    pub window: usize,
    /// How long dropping the value waits for copies in flight.
    pub drain_timeout: Duration,
}

impl Default for StagingConfig {
    fn default() -> Self {
        Self { chunk_bytes: 4 << 20, window: 4, drain_timeout: Duration::from_secs(5) }
    }
}

/// Copies between the memory of one device and slots.
#[derive(Debug)]
pub struct Staging {
    context: Arc<Context>,
    registrations: Arc<Registrations>,
    up: Stream,
    /// `None` once it is being dropped.
    messages: Option<Sender<Message>>,
    /// Closed when the thread has ended.
    ended: Mutex<Receiver<()>>,
    next: AtomicU64,
    config: StagingConfig,
    process: u32,
    thread: ThreadId,
}

/// Receives that a copy within the device has ended, or why it has not.
pub type Shared = Box<dyn FnOnce(Result<(), GpuError>) + Send>;

/// Receives a slot that a copy has filled, or why it has not.
pub type Filled = Box<dyn FnOnce(Result<LeasedSlot, GpuError>) + Send>;

impl Staging {
    /// Prepares a device, and starts the thread. Segments are registered when their first slot is used.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for a number without a device; [`GpuError::OutOfMemory`]; [`GpuError::Thread`]; the driver's.
    pub fn new(
        driver: &Arc<Driver>,
        ordinal: u32,
        registrations: &Arc<Registrations>,
        config: StagingConfig,
    ) -> Result<Self, GpuError> {
        let context = Context::retain(driver, ordinal)?;
        let (down, up) = (Stream::new(&context)?, Stream::new(&context)?);
        let (messages, received) = channel();
        let (alive, ended) = channel();
        let thread = Thread::new(down, received, Arc::clone(registrations), config, alive);
        let named = std::thread::Builder::new().name(format!("ronde-gpu-{ordinal}"));
        let spawned = named.spawn(move || thread.run());
        let thread = spawned.map_err(|error| GpuError::Thread { reason: error.to_string() })?.thread().id();
        Ok(Self {
            context,
            registrations: Arc::clone(registrations),
            up,
            messages: Some(messages),
            ended: Mutex::new(ended),
            next: AtomicU64::new(0),
            config,
            process: std::process::id(),
            thread,
        })
    }

    /// The device's context.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    /// An event after all work that a stream of the caller's has now.
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&self, stream: CallerStream) -> Result<Event, GpuError> {
        Event::after_caller(&self.context, stream)
    }

    /// Checks that memory is this device's, and that a copy may use it.
    ///
    /// # Errors
    /// [`GpuError::Argument`] with the memory's actual place.
    pub fn check(&self, memory: &DeviceSpan) -> Result<(), GpuError> {
        self.context.check_span(memory)
    }

    /// Registers the segment of a slot, unless it is registered. The first call for a segment takes about 1 ms a MiB.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] when the system cannot lock so much memory, and the driver's other errors.
    pub fn register(&self, slot: &LeasedSlot) -> Result<(), GpuError> {
        self.registrations.ensure(&self.context, slot.segment())
    }

    /// Copies device memory into the start of a slot, after an event. Returns at once. The thread then calls `filled`, which
    /// must not block. The source may be overwritten by work that is ordered after the copy, and by anything after `filled`.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device, or a slot that is too small; `filled` is not called then. Later
    /// failures are passed to `filled`.
    pub fn fetch(
        &self,
        source: DeviceSpan,
        after: Arc<Event>,
        slot: LeasedSlot,
        filled: Filled,
    ) -> Result<(), GpuError> {
        self.context.check_span(&source)?;
        if (source.bytes() as u64) > slot.slot().len {
            return Err(GpuError::argument(format!(
                "{} bytes do not fit a slot of {}",
                source.bytes(),
                slot.slot().len
            )));
        }
        self.registrations.ensure(&self.context, slot.segment())?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.send(Message::Fetch(Fetch { id, source, after, slot, filled }))
    }

    /// Copies the start of a slot to device memory, after an event. Returns at once. Work that uses the memory must be ordered
    /// after the returned arrival. The slot is released when the copy has ended.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of more bytes than the slot; the driver's.
    pub fn deliver(&self, slot: LeasedSlot, target: DeviceSpan, after: &Event) -> Result<Arrival, GpuError> {
        self.context.check_span(&target)?;
        self.registrations.ensure(&self.context, slot.segment())?;
        self.up.wait(after)?;
        if target.bytes() > 0 {
            self.up.copy(Direction::ToDevice, &target, &slot, 0..target.bytes())?;
        }
        let arrived = Event::after(&self.up).map(Arc::new);
        let event = arrived.as_ref().ok().map(Arc::clone);
        // The copy has begun, also if its event could not be recorded: the thread keeps what it uses.
        self.send(Message::Arriving { event, kept: Kept::Slot(slot, target) })?;
        arrived.map(Arrival)
    }

    /// Copies memory of the device to memory of the same device, after an event, or copies nothing. Returns at once. The thread
    /// then calls `shared`, which must not block, when all of that has happened.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of different lengths; `shared` is not called then. Later failures
    /// are passed to `shared`.
    pub fn share(
        &self,
        copy: Option<(DeviceSpan, DeviceSpan)>,
        after: Arc<Event>,
        shared: Shared,
    ) -> Result<(), GpuError> {
        for span in copy.iter().flat_map(|(source, target)| [source, target]) {
            self.context.check_span(span)?;
        }
        self.send(Message::Share(Share { after, copy, shared }))
    }

    /// Copies memory of the device to memory of the same device, after an event. Returns at once. Work that uses the target must
    /// be ordered after the returned arrival. Both are kept until the copy has ended.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of different lengths; the driver's.
    pub fn deliver_within(&self, source: DeviceSpan, target: DeviceSpan, after: &Event) -> Result<Arrival, GpuError> {
        self.context.check_span(&source)?;
        self.context.check_span(&target)?;
        self.up.wait(after)?;
        self.up.copy_device(&source, &target)?;
        let arrived = Event::after(&self.up).map(Arc::new);
        let event = arrived.as_ref().ok().map(Arc::clone);
        self.send(Message::Arriving { event, kept: Kept::Device(source, target) })?;
        arrived.map(Arrival)
    }

    /// An event that has nothing before it.
    ///
    /// # Errors
    /// The driver's.
    pub fn now(&self) -> Result<Event, GpuError> {
        Event::after(&Stream::new(&self.context)?)
    }

    fn send(&self, message: Message) -> Result<(), GpuError> {
        let gone = || GpuError::Thread { reason: "it has ended".to_owned() };
        let messages = self.messages.as_ref().ok_or_else(gone)?;
        messages.send(message).map_err(|unsent| {
            unsent.0.leak();
            gone()
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The thread ends when it has no more to do.
        self.messages = None;
        // The last owner may be the thread itself, which passes filled slots on.
        if std::process::id() != self.process || std::thread::current().id() == self.thread {
            return;
        }
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(self.config.drain_timeout) {
            tracing::warn!(
                target: "ronde",
                "copies of GPU {} have not ended within {:?}; their memory is kept until the process ends",
                self.ordinal(),
                self.config.drain_timeout
            );
        }
    }
}

/// A copy to the device that has been started.
#[derive(Clone, Debug)]
pub struct Arrival(Arc<Event>);

impl Arrival {
    /// An arrival whose copy ends with an event.
    #[must_use]
    pub fn at(event: Arc<Event>) -> Self {
        Self(event)
    }

    /// The event after the copy.
    #[must_use]
    pub fn event(&self) -> &Arc<Event> {
        &self.0
    }

    /// Makes later work of a stream of the caller's wait for the copy. Does not block the thread.
    ///
    /// # Errors
    /// The driver's.
    pub fn order(&self, stream: CallerStream) -> Result<(), GpuError> {
        self.0.order_caller(stream)
    }

    /// Whether the copy has ended.
    ///
    /// # Errors
    /// Why it failed.
    pub fn has_occurred(&self) -> Result<bool, GpuError> {
        self.0.has_occurred()
    }

    /// Blocks the thread until the copy has ended.
    ///
    /// # Errors
    /// Why it failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.0.synchronize()
    }
}
