//! [`Memory`]: the shared memory of a session. It has the worker's segments, an arena for inputs and for results that stay in
//! shared memory, and the sidecar's result segments.
//!
//! No lock is held while bytes are copied. Growing the arena and fetching a segment exchange messages with the sidecar and
//! populate pages (about 1 ms a MiB). They block; asynchronous calls do them on a blocking thread.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ronde_rpc::{Claimed, OutputPlace, SegmentKind};
use ronde_shm::{
    ArenaConfig, ArenaUsage, LeaseOutcome, LeasedSlot, MemClient, MemClientConfig, OwnedSegment, PciAddress,
    PeerSegment, SegmentId, SessionToken, Share, ShmError, Slot, SlotHold, WeakSlot, WorkerArena,
};
use ronde_wire::limits;

use crate::buffer::SharedMemory;
use crate::connect::MemSocket;
use crate::error::Error;

/// The shared memory of one session.
#[derive(Debug)]
pub(crate) struct Memory {
    own: WorkerArena,
    limit_bytes: u64,
    /// Of device memory; 0 if the sidecar uses no GPUs.
    device_bytes_max: u64,
    /// Results leave room for an input of this size.
    largest_input_bytes: AtomicU64,
    registered: Mutex<Registered>,
    results: Mutex<HashMap<u32, Arc<PeerSegment>>>,
    /// Taken before the other locks, never after.
    exchange: Mutex<Exchange>,
    token: SessionToken,
}

/// A part of a slot as an input: the hold that keeps the slot leased, and the location of the bytes.
pub(crate) type InputPart = (SlotHold, Slot);

/// All of a slot.
pub(crate) fn whole(slot: LeasedSlot) -> InputPart {
    let part = slot.slot();
    (slot.into(), part)
}

/// Slots that programs write to directly (zero-copy), by the address of their first byte.
#[derive(Debug, Default)]
struct Registered {
    slots: BTreeMap<usize, RegisteredSlot>,
    /// At this number of slots the released ones are removed.
    sweep_at: usize,
}

/// A slot and its bytes, which are known without holding it: while it is held, its owner cannot write.
#[derive(Debug)]
struct RegisteredSlot {
    bytes: u64,
    slot: WeakSlot,
}

#[derive(Debug)]
struct Exchange {
    socket: MemSocket,
    config: MemClientConfig,
    /// Connected by the first exchange: the sidecar closes connections that stay silent.
    client: Option<MemClient>,
    next: u32,
}

impl Exchange {
    /// Performs one exchange. A connection that failed is not used again. When the sidecar has closed it since the last
    /// exchange, another one is made at once.
    fn perform<T>(&mut self, exchange: impl Fn(&mut MemClient) -> Result<T, ShmError>) -> Result<T, Error> {
        let was_connected = self.client.is_some();
        let performed = self.attempt(&exchange)?;
        let performed = match performed {
            Err(ShmError::PeerClosed { .. }) if was_connected => self.attempt(&exchange)?,
            performed => performed,
        };
        Ok(performed?)
    }

    fn attempt<T>(
        &mut self,
        exchange: &impl Fn(&mut MemClient) -> Result<T, ShmError>,
    ) -> Result<Result<T, ShmError>, Error> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(self.socket.connect(self.config)?),
        };
        let performed = exchange(client);
        if performed.as_ref().is_err_and(|error| !matches!(error, ShmError::Refused { .. })) {
            self.client = None;
        }
        Ok(performed)
    }
}

impl Memory {
    /// The memory of a session, whose segments are exchanged over `socket`.
    pub(crate) fn new(socket: MemSocket, claimed: &Claimed) -> Result<Self, Error> {
        // A result segment may serve all workers of the sidecar.
        let result_bytes_max = claimed.arena_bytes_max.saturating_mul(limits::LOCAL_RANKS_MAX as u64);
        let exchange = MemClientConfig { timeout: EXCHANGE_TIMEOUT, result_bytes_max };
        let exchange = Exchange { socket, config: exchange, client: None, next: 0 };
        let config = ArenaConfig {
            segment_bytes_min: SEGMENT_BYTES_MIN,
            limit_bytes: claimed.arena_bytes_max,
            alignment: ALIGNMENT_BYTES,
            setting: "--arena-mb (arena_bytes_max of the sidecar)",
        };
        Ok(Self {
            own: WorkerArena::new(config).map_err(|error| Error::argument(error.to_string()))?,
            limit_bytes: claimed.arena_bytes_max,
            device_bytes_max: claimed.device_bytes_max,
            largest_input_bytes: AtomicU64::new(0),
            registered: Mutex::default(),
            results: Mutex::new(HashMap::new()),
            exchange: Mutex::new(exchange),
            token: SessionToken::from_bytes(claimed.session_token),
        })
    }

    /// Leases a slot if that needs no new segment.
    pub(crate) fn try_lease(&self, bytes: u64) -> Result<Option<LeasedSlot>, Error> {
        Ok(self.lease_or_growth(bytes)?.ok())
    }

    /// Leases a slot for an input. Blocks when the arena has to grow.
    pub(crate) fn lease(&self, bytes: u64) -> Result<LeasedSlot, Error> {
        self.largest_input_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.lease_slot(bytes)
    }

    /// An input: the registered slot that its bytes are in, or a new slot with a copy. Blocks while the arena grows.
    pub(crate) fn input(&self, bytes: &[u8]) -> Result<InputPart, Error> {
        if let Some(registered) = self.registered_part(bytes) {
            return Ok(registered);
        }
        let mut slot = self.lease(bytes.len() as u64)?;
        slot.write(bytes)?;
        Ok(whole(slot))
    }

    /// Leases a slot that the program writes to directly and submits without a copy. Blocks while the arena grows.
    pub(crate) fn lease_registered(&self, bytes: u64) -> Result<LeasedSlot, Error> {
        let slot = self.lease_slot(bytes)?;
        self.register(&slot);
        Ok(slot)
    }

    /// Registers a slot: bytes submitted from it are not copied. Its owner does not write to it while they are in flight.
    pub(crate) fn register(&self, slot: &LeasedSlot) {
        let mut registered = lock(&self.registered);
        if registered.slots.len() >= registered.sweep_at {
            registered.slots.retain(|_, registered| !registered.slot.is_gone());
            registered.sweep_at = REGISTERED_SWEEP_MIN.max(2 * registered.slots.len());
        }
        let (bytes, weak) = (slot.slot().len, slot.downgrade());
        registered.slots.insert(slot.address(), RegisteredSlot { bytes, slot: weak });
    }

    /// The part of a registered slot that the bytes are in, if any.
    pub(crate) fn registered_part(&self, bytes: &[u8]) -> Option<InputPart> {
        let (address, length) = (bytes.as_ptr().addr(), bytes.len());
        let registered = lock(&self.registered);
        for (start, RegisteredSlot { bytes, slot }) in registered.slots.range(..=address).rev() {
            let skipped = address - start;
            let is_within = length > 0 && skipped.checked_add(length).is_some_and(|end| end as u64 <= *bytes);
            if is_within && let Some((hold, whole)) = slot.hold() {
                return Some((hold, Slot { offset: whole.offset + skipped as u64, len: length as u64, ..whole }));
            }
            // Slots that still exist do not overlap.
            if !slot.is_gone() {
                return None;
            }
        }
        None
    }

    fn lease_slot(&self, bytes: u64) -> Result<LeasedSlot, Error> {
        if let Some(slot) = self.try_lease(bytes)? {
            return Ok(slot);
        }
        let mut exchange = lock(&self.exchange);
        // Other threads may grow, release or lease concurrently. So this repeats; each turn adds a segment, up to the arena's
        // limit.
        loop {
            match self.lease_or_growth(bytes)? {
                Ok(slot) => return Ok(slot),
                Err(growth) => self.grow(&mut exchange, growth)?,
            }
        }
    }

    /// Whether a result of this size gets a slot. Small results do not. Half of the arena, or the size of the largest input, is
    /// kept for inputs, without which nothing can be submitted.
    pub(crate) fn has_room_for_result(&self, bytes: u64) -> bool {
        if bytes < MAPPED_BYTES_MIN {
            return false;
        }
        let kept = self.largest_input_bytes.load(Ordering::Relaxed).max(self.limit_bytes / KEPT_FOR_INPUTS);
        self.own.usage().in_use_bytes.saturating_add(bytes).saturating_add(kept) <= self.limit_bytes
    }

    /// Leases a slot for a result, if it [gets one](Self::has_room_for_result); blocks while the arena grows.
    pub(crate) fn lease_result(&self, bytes: u64) -> Option<LeasedSlot> {
        if !self.has_room_for_result(bytes) {
            return None;
        }
        let leased = self.lease_slot(bytes);
        leased
            .inspect_err(|error| tracing::debug!(target: "ronde", %error, "no slot for a result: it will be copied"))
            .ok()
    }

    /// What this worker has in its own segments.
    pub(crate) fn usage(&self) -> SharedMemory {
        let ArenaUsage { mapped_bytes, in_use_bytes, slots, segments } = self.own.usage();
        SharedMemory { mapped_bytes, in_use_bytes, slots, segments }
    }

    /// Whether a result segment is mapped.
    pub(crate) fn knows_result(&self, segment: u32) -> bool {
        lock(&self.results).contains_key(&segment)
    }

    /// A result segment. The first call fetches and maps it, which blocks.
    pub(crate) fn result(&self, segment: u32) -> Result<Arc<PeerSegment>, Error> {
        if let Some(known) = lock(&self.results).get(&segment) {
            return Ok(Arc::clone(known));
        }
        let mut exchange = lock(&self.exchange);
        if let Some(known) = lock(&self.results).get(&segment) {
            return Ok(Arc::clone(known));
        }
        let fetched = Arc::new(exchange.perform(|client| client.result(&self.token, SegmentId(segment)))?);
        lock(&self.results).insert(segment, Arc::clone(&fetched));
        Ok(fetched)
    }

    /// The most bytes of device memory that the session may pass; 0 if the sidecar uses no GPUs.
    pub(crate) fn device_bytes_max(&self) -> u64 {
        self.device_bytes_max
    }

    /// Passes device memory to the sidecar, which has imported it when this returns.
    pub(crate) fn attach_device(
        &self,
        id: SegmentId,
        memory: (u64, PciAddress),
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        lock(&self.exchange).perform(|client| client.attach_device(&self.token, id, memory, descriptor))
    }

    /// A slot, or the bytes of the segment that has to be added for it.
    fn lease_or_growth(&self, bytes: u64) -> Result<Result<LeasedSlot, u64>, Error> {
        match self.own.lease(bytes) {
            Ok(LeaseOutcome::Slot(slot)) => Ok(Ok(slot)),
            Ok(LeaseOutcome::Grow { bytes }) => Ok(Err(bytes)),
            Err(error) => Err(Error::Limit { reason: error.to_string() }),
        }
    }

    fn grow(&self, exchange: &mut Exchange, bytes: u64) -> Result<(), Error> {
        let size = usize::try_from(bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let segment = OwnedSegment::create("ronde-input", size, Share::Writable)?;
        // Each attempt has a number of its own: of one that failed, the sidecar may have mapped the segment.
        let next = Cell::new(exchange.next);
        let attached = exchange.perform(|client| {
            let id = SegmentId(next.replace(next.get() + 1));
            client.attach(&self.token, id, &segment).map(|()| id)
        });
        exchange.next = next.get();
        let id = attached?;
        self.own.add_segment(id, segment).map_err(|error| Error::Limit { reason: error.to_string() })
    }
}

/// Ignores poisoning: a panic elsewhere leaves these maps whole, because each change is a single call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long the sidecar may take to map a segment.
pub(crate) const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Small enough that a small program populates few pages, large enough that a model needs few segments.
const SEGMENT_BYTES_MIN: u64 = 16 << 20;
/// A smaller result is copied, because a slot would save nothing.
const MAPPED_BYTES_MIN: u64 = 64 << 10;
/// Results leave 1/2 of the arena to inputs.
const KEPT_FOR_INPUTS: u64 = 2;
/// With fewer registered slots, released ones are not removed.
const REGISTERED_SWEEP_MIN: usize = 64;
/// A cache line, and the width of a vector register.
const ALIGNMENT_BYTES: u64 = 64;
/// Where the sidecar writes a result.
pub(crate) fn output_place(slot: Slot) -> OutputPlace {
    OutputPlace { kind: SegmentKind::Arena, segment: slot.segment.0, offset: slot.offset, bytes: slot.len }
}
