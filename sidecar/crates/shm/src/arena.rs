//! An allocator for ranges of segments. It is bookkeeping only: it touches no memory and never blocks.
//!
//! # Allocation
//!
//! Each training step requests the same sizes and releases them all. A released slot is therefore pushed onto the stack
//! of its *size class*, and the next lease of that class pops it (last in, first out), because its pages are the most
//! likely to be cached. Size classes are multiples of the alignment up to 256 B, then four per power of two up to 1
//! MiB, then multiples of 256 KiB, so at most a quarter of a slot is slack (besides the alignment).
//!
//! If the stack of a class is empty, a slot is carved from the *best-fitting free span*: the smallest one that is large
//! enough. If no span fits, all stacks are drained into the spans, neighbours are merged, and the search is repeated.
//! Stacks therefore never keep space from another class, and once nothing is leased each segment is one free span
//! again: fragmentation does not accumulate over the phases of a program. Only after that does the arena ask for a new
//! segment.
//!
//! Segments are never moved or unmapped. A phase that needs many small segments, followed by one large slot, can
//! therefore reach the limit while much mapped memory is free; the error contains both numbers.
//!
//! Lease and release take O(log n). Draining the stacks takes O(log n) for each slot released since the last time.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The number of a segment within its session and direction. Its owner chooses it and never reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

impl fmt::Display for SegmentId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// The configuration of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaConfig {
    /// The smallest segment to request, in bytes. The arena requests this much, or what a slot needs if that is more.
    pub segment_bytes_min: u64,
    /// Limit for the bytes of all segments together.
    pub limit_bytes: u64,
    /// Alignment of slots in bytes: a power of two, at most 4,096.
    pub alignment: u64,
    /// The name of the setting that defines `limit_bytes`, for error messages.
    pub setting: &'static str,
}

/// A leased range: `len` bytes at `offset` of `segment`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The segment.
    pub segment: SegmentId,
    /// The first byte; a multiple of the arena's alignment.
    pub offset: u64,
    /// The requested number of bytes; may be zero.
    pub len: u64,
}

/// The result of [`Arena::lease`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lease {
    /// The slot, which stays leased until it is released.
    Slot(Slot),
    /// Create a segment of this many bytes, pass it to [`Arena::add_segment`], and lease again.
    Grow {
        /// Bytes of the segment, a multiple of [`GROWTH_STEP_BYTES`] and thus of the page size of every machine.
        bytes: u64,
    },
}

/// Why a slot cannot be leased, not even with another segment. The arena never waits for space: tensors become ready in
/// any order, so waiting could deadlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// The limit is reached.
    #[error(
        "{wanted} bytes of shared memory are wanted, but the limit {setting} = {limit_bytes} leaves no room: {in_use} in use, \
         {mapped} mapped in segments without a free piece large enough; raise {setting} or keep fewer tensors in flight"
    )]
    Limit {
        /// The limit in bytes.
        limit_bytes: u64,
        /// The requested bytes.
        wanted: u64,
        /// Bytes of leased slots, slack included.
        in_use: u64,
        /// Bytes of all segments.
        mapped: u64,
        /// The setting to raise.
        setting: &'static str,
    },
}

/// A mistake of the caller. The arena is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// The slot is not leased: it was released twice or belongs to another arena.
    #[error("the slot of {} bytes at {} of segment {} is not leased; release a slot once, as it was leased", .0.len, .0.offset, .0.segment)]
    NotLeased(Slot),
    /// The arena already has a segment with this number.
    #[error("segment {0} is in the arena already; give each segment a unique number")]
    SegmentKnown(SegmentId),
    /// The segment is too small for a slot or exceeds the limit.
    #[error("segment {segment} of {bytes} bytes does not fit: at least {alignment} and at most {room} can be added")]
    SegmentSize {
        /// The segment.
        segment: SegmentId,
        /// Its size in bytes.
        bytes: u64,
        /// The smallest useful size in bytes.
        alignment: u64,
        /// Bytes left until the limit.
        room: u64,
    },
    /// The alignment is not a power of two, or too large.
    #[error("an arena's alignment is a power of two up to 4096, not {alignment}")]
    Alignment {
        /// The given alignment.
        alignment: u64,
    },
}

/// Usage figures for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArenaUsage {
    /// Bytes of all segments.
    pub mapped_bytes: u64,
    /// Bytes of leased slots, including slack.
    pub in_use_bytes: u64,
    /// Number of leased slots.
    pub slots: usize,
    /// Number of segments.
    pub segments: usize,
}

/// An allocator over a growing set of segments.
///
/// Leased slots never overlap. A slot of zero bytes takes `alignment` bytes, so there are at most `limit_bytes /
/// alignment` slots.
#[derive(Debug)]
pub struct Arena {
    config: ArenaConfig,
    /// Usable bytes of each segment.
    segments: BTreeMap<SegmentId, u64>,
    free: FreeSpans,
    /// Released slots: one stack of locations for each size class.
    stacks: BTreeMap<u64, Vec<Location>>,
    /// Leased slots with their requested length and size class.
    leased: BTreeMap<Location, LeaseRecord>,
    mapped_bytes: u64,
    in_use_bytes: u64,
}

impl Arena {
    /// Creates an arena without segments.
    ///
    /// The limit is rounded down to a multiple of [`GROWTH_STEP_BYTES`], so that a segment of whole pages always fits.
    ///
    /// # Errors
    ///
    /// [`ArenaError::Alignment`].
    pub fn new(config: ArenaConfig) -> Result<Self, ArenaError> {
        if !config.alignment.is_power_of_two() || config.alignment > ALIGNMENT_BYTES_MAX {
            return Err(ArenaError::Alignment { alignment: config.alignment });
        }
        let limit_bytes = config.limit_bytes - config.limit_bytes % GROWTH_STEP_BYTES;
        Ok(Self {
            config: ArenaConfig { limit_bytes, ..config },
            segments: BTreeMap::new(),
            free: FreeSpans::default(),
            stacks: BTreeMap::new(),
            leased: BTreeMap::new(),
            mapped_bytes: 0,
            in_use_bytes: 0,
        })
    }

    /// Leases `bytes` bytes, or asks for another segment.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Limit`] if another segment would exceed the limit. The arena is unchanged.
    pub fn lease(&mut self, bytes: u64) -> Result<Lease, LeaseError> {
        let Some(class) = class_of(bytes, self.config.alignment) else {
            return Err(self.limit_error(bytes));
        };
        match self.find(class) {
            Some(location) => Ok(Lease::Slot(self.record_lease(location, bytes, class))),
            None => self.growth_for(class).map(|bytes| Lease::Grow { bytes }).ok_or_else(|| self.limit_error(bytes)),
        }
    }

    /// Releases a slot. It will be the next one leased in its size class.
    ///
    /// # Errors
    ///
    /// [`ArenaError::NotLeased`] if exactly this slot is not leased.
    pub fn release(&mut self, slot: Slot) -> Result<(), ArenaError> {
        let location = Location { segment: slot.segment, offset: slot.offset };
        let class = match self.leased.get(&location) {
            Some(leased) if leased.len == slot.len => leased.class,
            _ => return Err(ArenaError::NotLeased(slot)),
        };
        self.leased.remove(&location);
        self.in_use_bytes -= class;
        self.stacks.entry(class).or_default().push(location);
        Ok(())
    }

    /// Adds an empty segment of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`ArenaError::SegmentKnown`], [`ArenaError::SegmentSize`].
    pub fn add_segment(&mut self, segment: SegmentId, bytes: u64) -> Result<(), ArenaError> {
        if self.segments.contains_key(&segment) {
            return Err(ArenaError::SegmentKnown(segment));
        }
        let alignment = self.config.alignment;
        let room = self.config.limit_bytes - self.mapped_bytes;
        if bytes < alignment || bytes > room {
            return Err(ArenaError::SegmentSize { segment, bytes, alignment, room });
        }
        let usable = bytes - bytes % alignment;
        self.segments.insert(segment, usable);
        self.mapped_bytes += bytes;
        self.free.insert(Location { segment, offset: 0 }, usable);
        Ok(())
    }

    /// Whether exactly this slot is leased.
    #[must_use]
    pub fn is_leased(&self, slot: Slot) -> bool {
        let location = Location { segment: slot.segment, offset: slot.offset };
        self.leased.get(&location).is_some_and(|leased| leased.len == slot.len)
    }

    /// Usage figures for metrics.
    #[must_use]
    pub fn usage(&self) -> ArenaUsage {
        ArenaUsage {
            mapped_bytes: self.mapped_bytes,
            in_use_bytes: self.in_use_bytes,
            slots: self.leased.len(),
            segments: self.segments.len(),
        }
    }

    /// Removes space for a slot of `class` bytes from the free space.
    fn find(&mut self, class: u64) -> Option<Location> {
        if let Some(location) = self.stacks.get_mut(&class).and_then(Vec::pop) {
            return Some(location);
        }
        if let Some(location) = self.free.carve(class) {
            return Some(location);
        }
        self.drain_stacks();
        self.free.carve(class)
    }

    fn record_lease(&mut self, location: Location, len: u64, class: u64) -> Slot {
        self.leased.insert(location, LeaseRecord { len, class });
        self.in_use_bytes += class;
        Slot { segment: location.segment, offset: location.offset, len }
    }

    /// Turns all released slots into free spans.
    fn drain_stacks(&mut self) {
        for (class, locations) in std::mem::take(&mut self.stacks) {
            for location in locations {
                self.free.insert(location, class);
            }
        }
    }

    /// The size of another segment that holds a slot of `class` bytes, if the limit allows one.
    fn growth_for(&self, class: u64) -> Option<u64> {
        let room = self.config.limit_bytes - self.mapped_bytes;
        let needed = class.checked_next_multiple_of(GROWTH_STEP_BYTES).filter(|needed| *needed <= room)?;
        let preferred = self.config.segment_bytes_min.checked_next_multiple_of(GROWTH_STEP_BYTES).unwrap_or(room);
        // Segments may have any size, so the remaining room need not be a multiple of the step.
        Some(preferred.min(room - room % GROWTH_STEP_BYTES).max(needed))
    }

    fn limit_error(&self, wanted: u64) -> LeaseError {
        LeaseError::Limit {
            limit_bytes: self.config.limit_bytes,
            wanted,
            in_use: self.in_use_bytes,
            mapped: self.mapped_bytes,
            setting: self.config.setting,
        }
    }
}

/// The start of a slot or span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Location {
    segment: SegmentId,
    offset: u64,
}

#[derive(Debug, Clone, Copy)]
struct LeaseRecord {
    len: u64,
    class: u64,
}

/// Free spans, ordered by location to merge neighbours and by size to find the best fit.
#[derive(Debug, Default)]
struct FreeSpans {
    by_location: BTreeMap<Location, u64>,
    by_size: BTreeSet<(u64, Location)>,
}

impl FreeSpans {
    /// Adds a span and merges it with free neighbours of the same segment.
    fn insert(&mut self, location: Location, bytes: u64) {
        let (mut location, mut bytes) = (location, bytes);
        let before = self.by_location.range(..location).next_back().map(|(location, bytes)| (*location, *bytes));
        if let Some((left, left_bytes)) = before
            && left.segment == location.segment
            && left.offset + left_bytes == location.offset
        {
            self.remove(left, left_bytes);
            (location, bytes) = (left, left_bytes + bytes);
        }
        let right = Location { segment: location.segment, offset: location.offset + bytes };
        if let Some(right_bytes) = self.by_location.get(&right).copied() {
            self.remove(right, right_bytes);
            bytes += right_bytes;
        }
        self.by_location.insert(location, bytes);
        self.by_size.insert((bytes, location));
    }

    /// Removes `bytes` bytes from the start of the smallest span that has them.
    fn carve(&mut self, bytes: u64) -> Option<Location> {
        let first = Location { segment: SegmentId(0), offset: 0 };
        let (span_bytes, location) = *self.by_size.range((bytes, first)..).next()?;
        self.remove(location, span_bytes);
        if span_bytes > bytes {
            let rest = Location { offset: location.offset + bytes, ..location };
            self.by_location.insert(rest, span_bytes - bytes);
            self.by_size.insert((span_bytes - bytes, rest));
        }
        Some(location)
    }

    fn remove(&mut self, location: Location, bytes: u64) {
        self.by_location.remove(&location);
        self.by_size.remove(&(bytes, location));
    }
}

/// The size class of a slot of `bytes` bytes: its size including slack, a multiple of `alignment`. `None` on overflow.
fn class_of(bytes: u64, alignment: u64) -> Option<u64> {
    let bytes = bytes.max(1);
    let quarter = (bytes - 1).checked_ilog2().map_or(1, |log| (1_u64 << log) / 4);
    bytes.checked_next_multiple_of(quarter.clamp(alignment, alignment.max(CLASS_STEP_BYTES_MAX)))
}

/// The granularity of segment sizes: the largest page size of Linux.
pub const GROWTH_STEP_BYTES: u64 = 65_536;

/// The distance of size classes above 1 MiB: a quarter of 1 MiB, so that slack stays below a quarter.
const CLASS_STEP_BYTES_MAX: u64 = 256 * 1_024;

/// Mappings are aligned to pages, so a larger alignment cannot be guaranteed.
const ALIGNMENT_BYTES_MAX: u64 = 4_096;

#[cfg(test)]
mod tests;
