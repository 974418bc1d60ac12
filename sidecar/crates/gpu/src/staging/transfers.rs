//! [`Transfers`]: copies between the memory of several devices and slots that one process shares among its threads.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ronde_shm::{ArenaConfig, ArenaUsage, LeaseOutcome, OwnedSegment, SegmentId, Share, SharedSlot, WorkerArena};

use super::Registrations;
use crate::driver::{Context, Direction, Event, Stream};
use crate::error::GpuError;
use crate::span::DeviceSpan;

/// Copies, on a stream for each device, between device memory and page-locked slots of its own. One thread uses it.
#[derive(Debug)]
pub struct Transfers {
    streams: HashMap<u32, (Arc<Context>, Stream)>,
    /// Released before the segments are.
    registrations: Registrations,
    arena: WorkerArena,
    segments: u32,
    /// From how many bytes on [`Transfers::has_room`] refuses.
    bytes_max: u64,
    /// Slots that are never released.
    abandoned: u64,
}

impl Transfers {
    /// Prepares for slots of up to so many bytes together. Nothing is allocated before it is used.
    ///
    /// # Errors
    /// [`GpuError::Argument`]; never, with the alignment that it uses.
    pub fn new(bytes_max: u64) -> Result<Self, GpuError> {
        let (streams, registrations) = (HashMap::new(), Registrations::default());
        Ok(Self { streams, registrations, arena: empty_arena()?, segments: 0, bytes_max, abandoned: 0 })
    }

    /// Host memory of all segments, leased or not.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.arena.usage().mapped_bytes
    }

    /// Whether slots of so many bytes together may be leased now. With none in use they always may, so that nothing waits for
    /// room that never comes.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        let ArenaUsage { slots, in_use_bytes, .. } = self.arena.usage();
        slots as u64 <= self.abandoned || in_use_bytes.saturating_add(bytes) <= self.bytes_max
    }

    /// Keeps slots for good, because a copy may still use them.
    pub fn abandon(&mut self, slots: Vec<SharedSlot>) {
        let distinct: HashSet<_> = slots.iter().map(|slot| (slot.slot().segment, slot.slot().offset)).collect();
        self.abandoned += distinct.len() as u64;
        std::mem::forget(slots);
    }

    /// Leases a slot.
    ///
    /// # Errors
    /// [`GpuError::Argument`] when the system has no memory.
    pub fn lease(&mut self, bytes: usize) -> Result<SharedSlot, GpuError> {
        let refused = |error: &dyn std::fmt::Display| GpuError::argument(error.to_string());
        loop {
            match self.arena.lease(bytes as u64).map_err(|error| refused(&error))? {
                LeaseOutcome::Slot(slot) => return Ok(slot.into()),
                // Each turn adds a segment, and the first slot of a new segment is large enough.
                LeaseOutcome::Grow { bytes } => {
                    self.release_if_idle(bytes)?;
                    let size = usize::try_from(bytes).map_err(|error| refused(&error))?;
                    let segment = OwnedSegment::create("ronde-gpu-host", size, Share::Writable);
                    let segment = segment.map_err(|error| refused(&error))?;
                    self.arena.add_segment(SegmentId(self.segments), segment).map_err(|error| refused(&error))?;
                    self.segments += 1;
                }
            }
        }
    }

    /// Releases all segments when none is in use and so many bytes more would be more than the limit: slots of ever larger
    /// sizes, which fit into no older segment, would otherwise add up. Abandoned slots keep theirs.
    fn release_if_idle(&mut self, more_bytes: u64) -> Result<(), GpuError> {
        let ArenaUsage { slots, mapped_bytes, .. } = self.arena.usage();
        let is_idle = slots as u64 <= self.abandoned;
        if is_idle && mapped_bytes > 0 && mapped_bytes.saturating_add(more_bytes) > self.bytes_max {
            let registrations = std::mem::take(&mut self.registrations);
            let arena = std::mem::replace(&mut self.arena, empty_arena()?);
            if self.abandoned > 0 {
                std::mem::forget((registrations, arena));
                self.abandoned = 0;
            }
        }
        Ok(())
    }

    /// Starts a copy of device memory to a slot, from an offset on. Keep both until [`Transfers::mark`]'s event has occurred.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or a slot that is too small, and the driver's errors.
    pub fn fetch(
        &mut self,
        context: &Arc<Context>,
        source: &DeviceSpan,
        place: (&SharedSlot, usize),
    ) -> Result<(), GpuError> {
        self.start(Direction::ToHost, context, source, place)
    }

    /// Starts a copy of a slot, from an offset on, to device memory. Keep both until [`Transfers::mark`]'s event has occurred.
    ///
    /// # Errors
    /// Those of [`Transfers::fetch`].
    pub fn deliver(
        &mut self,
        context: &Arc<Context>,
        place: (&SharedSlot, usize),
        target: &DeviceSpan,
    ) -> Result<(), GpuError> {
        self.start(Direction::ToDevice, context, target, place)
    }

    fn start(
        &mut self,
        direction: Direction,
        context: &Arc<Context>,
        memory: &DeviceSpan,
        place: (&SharedSlot, usize),
    ) -> Result<(), GpuError> {
        context.check_span(memory)?;
        self.registrations.ensure(context, place.0.segment())?;
        let stream = match self.streams.entry(context.ordinal()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert((Arc::clone(context), Stream::new(context)?))
            }
        };
        if memory.bytes() == 0 { Ok(()) } else { stream.1.copy_shared(direction, memory, place) }
    }

    /// Events after all copies that have been started, one for each device that has been used.
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&self) -> Result<Vec<Event>, GpuError> {
        self.streams.values().map(|(_, stream)| Event::after(stream)).collect()
    }
}

fn empty_arena() -> Result<WorkerArena, GpuError> {
    let config = ArenaConfig {
        segment_bytes_min: SEGMENT_BYTES_MIN,
        // Only the system's memory bounds one lease: `has_room` bounds what is in flight.
        limit_bytes: u64::MAX / 2,
        alignment: 64,
        setting: "the system's memory",
    };
    WorkerArena::new(config).map_err(|error| GpuError::argument(error.to_string()))
}

/// As for workers' shared memory.
const SEGMENT_BYTES_MIN: u64 = 16 << 20;
