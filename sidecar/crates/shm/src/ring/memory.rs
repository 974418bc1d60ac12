//! The memory layout of a ring, and checked access to one direction.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::error::ShmError;
use crate::mapping::{Mapping, ReadWrite};
use crate::segment::whole_pages;

/// Smallest capacity of one direction, in bytes.
pub const RING_BYTES_MIN: u64 = 4_096;
/// Largest capacity of one direction, in bytes.
pub const RING_BYTES_MAX: u64 = 1 << 20;

/// The direction of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToSidecar,
    ToWorker,
}

/// One direction of a ring. It keeps the mapping alive.
#[derive(Clone, Debug)]
pub(super) struct Channel {
    mapping: Arc<Mapping<ReadWrite>>,
    control: u64,
    data: u64,
    capacity: u64,
}

impl Channel {
    /// A direction of a mapping of [`ring_bytes`] for this capacity.
    pub(super) fn new(mapping: &Arc<Mapping<ReadWrite>>, direction: Direction, capacity: u64) -> Self {
        let number = match direction {
            Direction::ToSidecar => 0,
            Direction::ToWorker => 1,
        };
        let (control, data) = (CONTROL + CONTROL_BYTES * number, DATA + capacity * number);
        Self { mapping: Arc::clone(mapping), control, data, capacity }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Length of the longest message in bytes.
    pub(super) fn message_bytes_max(&self) -> u64 {
        self.capacity / 2
    }

    pub(super) fn produced(&self) -> &AtomicU64 {
        self.mapping.atomic_u64(self.control).expect(IN_HEADER)
    }

    pub(super) fn consumed(&self) -> &AtomicU64 {
        self.mapping.atomic_u64(self.control + LINE).expect(IN_HEADER)
    }

    pub(super) fn sleeps(&self) -> &AtomicU32 {
        self.mapping.atomic_u32(self.control + 2 * LINE).expect(IN_HEADER)
    }

    pub(super) fn wants_room(&self) -> &AtomicU32 {
        self.mapping.atomic_u32(self.control + 3 * LINE).expect(IN_HEADER)
    }

    /// Writes `bytes`, at most the capacity, at a position.
    pub(super) fn write(&self, position: u64, bytes: &[u8]) {
        let (offset, first) = self.split(position, bytes.len());
        let (head, tail) = bytes.split_at(first);
        self.mapping.copy_from(offset, head).expect(IN_DATA);
        if !tail.is_empty() {
            self.mapping.copy_from(self.data, tail).expect(IN_DATA);
        }
    }

    /// Reads `bytes`, at most the capacity, at a position.
    pub(super) fn read(&self, position: u64, bytes: &mut [u8]) {
        let (offset, first) = self.split(position, bytes.len());
        let (head, tail) = bytes.split_at_mut(first);
        self.mapping.copy_to(offset, head).expect(IN_DATA);
        if !tail.is_empty() {
            self.mapping.copy_to(self.data, tail).expect(IN_DATA);
        }
    }

    /// The offset of a position, and how many of `length` bytes fit before the data wraps around.
    fn split(&self, position: u64, length: usize) -> (u64, usize) {
        let place = position & (self.capacity - 1);
        let until_end = usize::try_from(self.capacity - place).unwrap_or(usize::MAX);
        (self.data + place, length.min(until_end))
    }
}

/// Whether a direction can have this capacity.
pub(super) fn is_capacity(capacity: u64) -> bool {
    capacity.is_power_of_two() && (RING_BYTES_MIN..=RING_BYTES_MAX).contains(&capacity)
}

/// The size of a ring's memfd in whole pages.
pub(super) fn ring_bytes(capacity: u64) -> Result<NonZeroUsize, ShmError> {
    let wrong = || ShmError::RingCapacity { capacity, least: RING_BYTES_MIN, most: RING_BYTES_MAX };
    if !is_capacity(capacity) {
        return Err(wrong());
    }
    whole_pages(usize::try_from(DATA + 2 * capacity).map_err(|_| wrong())?, RING)
}

/// Writes the header that the sidecar checks.
pub(super) fn write_header(mapping: &Mapping<ReadWrite>) {
    mapping.copy_from(0, &MAGIC).expect(IN_HEADER);
    mapping.copy_from(MAGIC.len() as u64, &LAYOUT_VERSION.to_le_bytes()).expect(IN_HEADER);
}

/// Checks the magic number and the layout version.
pub(super) fn check_header(mapping: &Mapping<ReadWrite>) -> Result<(), ShmError> {
    let (mut magic, mut version) = ([0; 8], [0; 4]);
    mapping.copy_to(0, &mut magic).expect(IN_HEADER);
    mapping.copy_to(magic.len() as u64, &mut version).expect(IN_HEADER);
    let version = u32::from_le_bytes(version);
    if magic != MAGIC || version != LAYOUT_VERSION {
        return Err(ShmError::RingLayout { version, ours: LAYOUT_VERSION });
    }
    Ok(())
}

/// The bytes of a ring that a message of `bytes` takes, with its length field and padding.
#[must_use]
pub fn framed(bytes: u64) -> u64 {
    (LENGTH_BYTES as u64 + bytes).next_multiple_of(ALIGNMENT)
}

/// Bytes of a message's length field.
pub(super) const LENGTH_BYTES: usize = 4;
/// Positions are multiples of this, so that a length field never wraps around.
pub(super) const ALIGNMENT: u64 = 8;
/// The name of the ring's memfd in errors.
pub(super) const RING: &str = "the ring of the session";

const MAGIC: [u8; 8] = *b"rondring";
const LAYOUT_VERSION: u32 = 1;
const CONTROL: u64 = 512;
const CONTROL_BYTES: u64 = 512;
/// Two cache lines, because processors prefetch pairs of them.
const LINE: u64 = 128;
const DATA: u64 = 4_096;
const IN_HEADER: &str = "a mapped ring has its header";
const IN_DATA: &str = "a mapped ring has all of its data, and a message is no longer than that";
