//! [`SharedDevices`]: device memory that a session shares with its sidecar, leased slot by slot.
//!
//! Each device has an arena of segments. What the program has allocated for sharing ([`ronde_gpu::exports`]) is passed to the
//! sidecar when it is submitted first. Segments stay with the sidecar until the session ends.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ronde_gpu::{Context, DeviceSegment, DeviceSpan, Driver, exports};
use ronde_rpc::{OutputPlace, SegmentKind};
use ronde_shm::{Arena, ArenaConfig, Lease, PciAddress, SegmentId, Slot};

use crate::error::Error;
use crate::memory::Memory;

/// The shared device memory of a session.
#[derive(Debug, Default)]
pub(super) struct SharedDevices {
    arenas: Mutex<HashMap<u32, Arc<DeviceArena>>>,
    /// Allocations of the program that the sidecar has, by address.
    passed: Mutex<HashMap<u64, Passed>>,
    next: AtomicU32,
    /// Why tensors were copied to shared memory, as far as the log has it.
    reported: Mutex<HashSet<String>>,
}

/// A program's allocation: its segment at the sidecar, or why the sidecar refused it, for as long as the allocation lives.
type Passed = (Result<SegmentId, Error>, Weak<DeviceSegment>);

/// The segments of one device.
#[derive(Debug)]
struct DeviceArena {
    context: Arc<Context>,
    gpu: PciAddress,
    state: Arc<Mutex<ArenaState>>,
    /// Held while a segment is added.
    growth: Mutex<Growth>,
}

/// Why the last segment was not added, so that not each operation makes another attempt.
#[derive(Debug, Default)]
struct Growth {
    /// The error, when it came, and the bytes that were asked for: fewer may fit.
    failed: Option<(Error, Instant, u64)>,
}

#[derive(Debug)]
struct ArenaState {
    arena: Arena,
    segments: HashMap<SegmentId, Arc<DeviceSegment>>,
}

/// Device memory that the sidecar has, too. The last clone releases it.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSlot {
    span: DeviceSpan,
    segment: SegmentId,
    offset: u64,
}

/// A leased slot; released when dropped.
#[derive(Debug)]
struct SlotLease {
    state: Weak<Mutex<ArenaState>>,
    slot: Slot,
    /// Keeps the segment mapped.
    _part: DeviceSpan,
}

impl DeviceSlot {
    /// The bytes.
    pub(crate) fn span(&self) -> &DeviceSpan {
        &self.span
    }

    /// The location, for the sidecar.
    pub(crate) fn place(&self) -> OutputPlace {
        let (kind, bytes) = (SegmentKind::Device, self.span.bytes() as u64);
        OutputPlace { kind, segment: self.segment.0, offset: self.offset, bytes }
    }
}

impl SharedDevices {
    /// The program's allocation with these bytes, passed to the sidecar; `None` for other memory.
    pub(super) fn own(&self, memory: &Memory, tensor: &DeviceSpan) -> Result<Option<DeviceSlot>, Error> {
        let Some((segment, offset)) = exports::find(tensor.address(), tensor.bytes()) else { return Ok(None) };
        let known = lock(&self.passed).get(&segment.address()).cloned();
        let passed = match known.filter(|(_, passed)| std::ptr::eq(passed.as_ptr(), &raw const *segment)) {
            Some((passed, _)) => passed,
            None => {
                let gpu = address_of(segment.ordinal())?;
                let passed = self.pass(memory, &segment, gpu);
                // Also a refusal: the sidecar is asked once for each allocation.
                lock(&self.passed).insert(segment.address(), (passed.clone(), Arc::downgrade(&segment)));
                passed
            }
        };
        let id = passed?;
        // Also kept by its owner's object: an allocator may give freed memory to another tensor.
        Ok(Some(DeviceSlot { span: tensor.clone(), segment: id, offset }))
    }

    /// Leases a slot of a device, which may add a segment: that blocks until the sidecar has imported it.
    pub(super) fn lease(&self, memory: &Memory, ordinal: u32, bytes: u64) -> Result<DeviceSlot, Error> {
        let arena = self.arena(memory, ordinal)?;
        if let Ok(slot) = arena.try_lease(bytes)? {
            return Ok(slot);
        }
        let mut growth = lock(&arena.growth);
        // Other threads may lease concurrently. Each turn adds a segment, up to the arena's limit.
        loop {
            match arena.try_lease(bytes)? {
                Ok(slot) => return Ok(slot),
                Err(bytes) => growth.attempt(Instant::now(), bytes, || self.grow(memory, &arena, bytes))?,
            }
        }
    }

    fn arena(&self, memory: &Memory, ordinal: u32) -> Result<Arc<DeviceArena>, Error> {
        let mut arenas = lock(&self.arenas);
        if let Some(arena) = arenas.get(&ordinal) {
            return Ok(Arc::clone(arena));
        }
        let config = ArenaConfig {
            segment_bytes_min: SEGMENT_BYTES_MIN,
            limit_bytes: memory.device_bytes_max(),
            alignment: ALIGNMENT_BYTES,
            setting: "--arena-mb (arena_bytes_max of the sidecar)",
        };
        let arena = Arena::new(config).map_err(|error| Error::argument(error.to_string()))?;
        let state = Arc::new(Mutex::new(ArenaState { arena, segments: HashMap::new() }));
        let (context, gpu) = (Context::retain(&Driver::get()?, ordinal)?, address_of(ordinal)?);
        let arena = Arc::new(DeviceArena { context, gpu, state, growth: Mutex::default() });
        arenas.insert(ordinal, Arc::clone(&arena));
        Ok(arena)
    }

    fn grow(&self, memory: &Memory, arena: &DeviceArena, bytes: u64) -> Result<(), Error> {
        let size = usize::try_from(bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let segment = Arc::new(DeviceSegment::create(&arena.context, size)?);
        let id = self.pass(memory, &segment, arena.gpu)?;
        let mut state = lock(&arena.state);
        state.arena.add_segment(id, bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        state.segments.insert(id, segment);
        Ok(())
    }

    fn pass(&self, memory: &Memory, segment: &DeviceSegment, gpu: PciAddress) -> Result<SegmentId, Error> {
        let id = SegmentId(self.next.fetch_add(1, Ordering::Relaxed));
        let descriptor = segment.export()?;
        memory.attach_device(id, (segment.bytes() as u64, gpu), descriptor.as_fd())?;
        Ok(id)
    }

    /// Reports, once for each reason, that tensors are copied to shared memory.
    pub(super) fn report(&self, name: &str, reason: &str) {
        let mut reported = lock(&self.reported);
        if reported.len() < REASONS_MAX && reported.insert(reason.to_owned()) {
            tracing::warn!(
                target: "ronde",
                "{name}: the tensor is not shared with the sidecar, but copied to shared memory: {reason} (reported once)"
            );
        }
    }
}

impl Growth {
    /// Makes an attempt, unless an earlier one failed: a device may have memory again after a while; the sidecar's refusal stays.
    fn attempt(&mut self, now: Instant, bytes: u64, add: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if let Some((error, since, failed_bytes)) = &self.failed {
            let may_pass =
                bytes < *failed_bytes || matches!(error, Error::Device(_)) && now.duration_since(*since) >= RETRY_AFTER;
            if !may_pass {
                return Err(error.clone());
            }
        }
        let added = add();
        self.failed = added.as_ref().err().map(|error| (error.clone(), now, bytes));
        added
    }
}

impl DeviceArena {
    /// A slot, or the bytes of the segment that has to be added for it.
    fn try_lease(&self, bytes: u64) -> Result<Result<DeviceSlot, u64>, Error> {
        let mut state = lock(&self.state);
        let limit = |reason: String| Error::Limit { reason };
        let slot = match state.arena.lease(bytes).map_err(|error| limit(error.to_string()))? {
            Lease::Grow { bytes } => return Ok(Err(bytes)),
            Lease::Slot(slot) => slot,
        };
        let segment = state.segments.get(&slot.segment).cloned();
        drop(state);
        let segment = segment.ok_or_else(|| limit("an arena leases from its own segments".to_owned()))?;
        let part = segment.part(slot.offset, bytes)?;
        let state = Arc::downgrade(&self.state);
        let span = part.and_keep(|part| Arc::new(SlotLease { state, slot, _part: part }) as _);
        Ok(Ok(DeviceSlot { span, segment: slot.segment, offset: slot.offset }))
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        if let Some(state) = self.state.upgrade() {
            let released = lock(&state).arena.release(self.slot);
            debug_assert!(released.is_ok(), "{released:?}");
        }
    }
}

/// Where a device is on the bus, which has the same name in all processes.
pub(super) fn address_of(ordinal: u32) -> Result<PciAddress, Error> {
    let bus_id = Driver::get()?.info(ordinal)?.bus_id;
    bus_id.parse().map_err(|_| Error::argument(format!("GPU {ordinal} has no PCI address, but {bus_id:?}")))
}

/// Ignores poisoning: a panic elsewhere leaves these maps whole, because each change is a single call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A model's gradients take few of these, and a small program not much of a GPU.
const SEGMENT_BYTES_MIN: u64 = 32 << 20;
/// What CUDA's own allocator aligns to.
const ALIGNMENT_BYTES: u64 = 256;
/// How long a device that had no memory for a segment is not asked again.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// Some reasons contain numbers.
const REASONS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ronde_gpu::GpuError;

    use super::*;

    #[test]
    fn what_was_refused_is_not_asked_for_again() {
        let (start, asked) = (Instant::now(), Cell::new(0));
        let attempt = |growth: &mut Growth, after: Duration, outcome: Result<(), Error>| {
            growth.attempt(start + after, 1000, || {
                asked.set(asked.get() + 1);
                outcome
            })
        };
        let mut growth = Growth::default();
        attempt(&mut growth, Duration::ZERO, Ok(())).expect("there is room");
        let full = || Err(Error::Device(GpuError::Unavailable { reason: "no memory".to_owned() }));
        attempt(&mut growth, Duration::ZERO, full()).expect_err("the device has no memory");
        attempt(&mut growth, RETRY_AFTER / 2, Ok(())).expect_err("the same reason");
        assert_eq!(asked.get(), 2);
        attempt(&mut growth, RETRY_AFTER, Ok(())).expect("memory may be free again");
        let refused = || Err(Error::Limit { reason: "the sidecar refuses it".to_owned() });
        attempt(&mut growth, RETRY_AFTER, refused()).expect_err("it is refused");
        let error = attempt(&mut growth, 100 * RETRY_AFTER, Ok(())).expect_err("a refusal stays");
        assert!(error.to_string().contains("the sidecar refuses it"), "{error}");
        assert_eq!(asked.get(), 4);
        growth.attempt(start, 999, || Ok(())).expect("fewer bytes may fit");
    }
}
