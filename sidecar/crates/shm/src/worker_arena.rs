//! A worker's own segments with an arena, and slots that their owner reads and writes in place.
//!
//! # Why slices of shared memory are sound here
//!
//! The rest of this crate offers copies only, because the peer may write shared bytes at any time. Here the peer is the
//! worker's own sidecar. The worker trusts it with all its tensors, and it writes only where it was asked for a result,
//! until it has answered. Within this process:
//!
//! - A [`LeasedSlot`] is the only access to its bytes: [`WorkerArena::add_segment`] consumes the segment.
//! - Leased slots do not overlap ([`Arena`]), and a slot stays leased until its owner is dropped.
//! - Methods borrow the slot as usual: shared to read, exclusively to write. A [`SlotHold`] gives no access to bytes.
//!
//! Who asks the sidecar for a result must not allow access to the slot's bytes before the answer arrives.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::arena::{Arena, ArenaConfig, ArenaError, ArenaUsage, Lease, LeaseError, SegmentId, Slot};
use crate::error::ShmError;
use crate::fork::ForkGuard;
use crate::segment::OwnedSegment;

/// A worker's segments, leased slot by slot. Its lock is held for bookkeeping only, never while bytes are copied.
#[derive(Debug)]
pub struct WorkerArena {
    arena_state: Arc<Mutex<ArenaState>>,
    fork_guard: ForkGuard,
}

#[derive(Debug)]
struct ArenaState {
    arena: Arena,
    segments: HashMap<SegmentId, Arc<OwnedSegment>>,
}

/// The result of [`WorkerArena::lease`].
#[derive(Debug)]
pub enum LeaseOutcome {
    /// The slot.
    Slot(LeasedSlot),
    /// Create a segment of this many bytes, pass it to [`WorkerArena::add_segment`], and lease again.
    Grow {
        /// Bytes of the segment; see [`Lease::Grow`].
        bytes: u64,
    },
}

impl WorkerArena {
    /// Creates an arena without segments.
    ///
    /// # Errors
    ///
    /// Those of [`Arena::new`].
    pub fn new(config: ArenaConfig) -> Result<Self, ArenaError> {
        let arena_state = ArenaState { arena: Arena::new(config)?, segments: HashMap::new() };
        Ok(Self { arena_state: Arc::new(Mutex::new(arena_state)), fork_guard: ForkGuard::new() })
    }

    /// Leases `bytes` bytes, or asks for another segment. The contents of the slot are unspecified.
    ///
    /// # Errors
    ///
    /// Those of [`Arena::lease`].
    ///
    /// # Panics
    ///
    /// Never: slots are leased from segments of this arena, and segments are never removed.
    pub fn lease(&self, bytes: u64) -> Result<LeaseOutcome, LeaseError> {
        let mut arena_state = lock(&self.arena_state);
        let slot = match arena_state.arena.lease(bytes)? {
            Lease::Grow { bytes } => return Ok(LeaseOutcome::Grow { bytes }),
            Lease::Slot(slot) => slot,
        };
        let segment = arena_state.segments.get(&slot.segment).cloned().expect("an arena leases from its own segments");
        let arena_state = Arc::downgrade(&self.arena_state);
        Ok(LeaseOutcome::Slot(LeasedSlot(Arc::new(SlotLease {
            arena_state,
            segment,
            slot,
            fork_guard: self.fork_guard,
        }))))
    }

    /// Adds a segment to lease from.
    ///
    /// # Errors
    ///
    /// Those of [`Arena::add_segment`].
    pub fn add_segment(&self, id: SegmentId, segment: OwnedSegment) -> Result<(), ArenaError> {
        let mut arena_state = lock(&self.arena_state);
        arena_state.arena.add_segment(id, segment.len())?;
        arena_state.segments.insert(id, Arc::new(segment));
        Ok(())
    }

    /// Usage figures for metrics.
    #[must_use]
    pub fn usage(&self) -> ArenaUsage {
        lock(&self.arena_state).arena.usage()
    }
}

/// A leased slot with exclusive access to its bytes. It is released when dropped, and may outlive the arena.
#[derive(Debug)]
pub struct LeasedSlot(Arc<SlotLease>);

/// Keeps a slot leased and unwritten while the peer reads it, without access to its bytes.
#[derive(Clone, Debug)]
pub struct SlotHold(#[expect(dead_code, reason = "it is held, never read")] Arc<SlotLease>);

/// A leased slot that threads share. They read and write it by copies only, in disjoint parts or in an order of their own;
/// what they read in any other case is unspecified.
#[derive(Clone, Debug)]
pub struct SharedSlot(Arc<SlotLease>);

/// Keeps a segment mapped, without access to its bytes. For registering it with a device.
#[derive(Clone, Debug)]
pub struct SegmentHold(Arc<OwnedSegment>);

/// A weak reference to a slot.
#[derive(Clone, Debug)]
pub struct WeakSlot(Weak<SlotLease>);

/// A lease, which ends when its last reference is dropped.
#[derive(Debug)]
struct SlotLease {
    /// Dropped with the session.
    arena_state: Weak<Mutex<ArenaState>>,
    segment: Arc<OwnedSegment>,
    slot: Slot,
    fork_guard: ForkGuard,
}

impl LeasedSlot {
    /// The location of the slot.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.0.slot
    }

    /// Writes `source` at the start of the slot.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSegment::copy_from`].
    pub fn write(&mut self, source: &[u8]) -> Result<(), ShmError> {
        self.0.check(source.len())?;
        self.0.segment.copy_from(self.0.slot.offset, source)
    }

    /// Reads `target.len()` bytes from the start of the slot.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSegment::copy_to`].
    pub fn read(&self, target: &mut [u8]) -> Result<(), ShmError> {
        self.0.check(target.len())?;
        self.0.segment.copy_to(self.0.slot.offset, target)
    }

    /// The bytes, in place. A forked child sees its parent's writes until it writes a page itself.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let (start, length) = self.0.pointer_range();
        // SAFETY: the slot lies within its segment, which this value keeps mapped. This process writes it only through
        // an exclusive borrow of this value, and the peer only when asked to: see the module's documentation.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    /// The bytes, in place and writable; `None` while somebody [holds](Self::hold) them. Writes of a forked child stay
    /// private.
    #[must_use]
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if Arc::strong_count(&self.0) > 1 {
            return None;
        }
        let (start, length) = self.0.pointer_range();
        // SAFETY: as in `bytes`, and the borrow is exclusive: a holder of the slot has no access to its bytes.
        Some(unsafe { std::slice::from_raw_parts_mut(start.cast_mut(), length) })
    }

    /// The address of the bytes in this process, valid while this value lives; see [`OwnedSegment::address`].
    #[must_use]
    pub fn address(&self) -> usize {
        self.0.pointer_range().0.expose_provenance()
    }

    /// Keeps the slot leased and unwritten, also after this value is dropped.
    #[must_use]
    pub fn hold(&self) -> SlotHold {
        SlotHold(Arc::clone(&self.0))
    }

    /// The segment of the slot.
    #[must_use]
    pub fn segment(&self) -> SegmentHold {
        SegmentHold(Arc::clone(&self.0.segment))
    }

    /// A weak reference to the slot.
    #[must_use]
    pub fn downgrade(&self) -> WeakSlot {
        WeakSlot(Arc::downgrade(&self.0))
    }
}

impl SegmentHold {
    /// The address of the segment's first byte in this process.
    ///
    /// # Panics
    ///
    /// Never: the first byte of a mapped segment has an address.
    #[must_use]
    pub fn address(&self) -> usize {
        self.0.address(0, self.len()).expect("a segment contains its own bytes")
    }

    /// Its length in bytes, whole pages.
    ///
    /// # Panics
    ///
    /// Never: what is mapped fits the address space.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no segment is empty")]
    pub fn len(&self) -> usize {
        usize::try_from(self.0.len()).expect("a segment is mapped, so its length is that of an object")
    }
}

impl From<LeasedSlot> for SharedSlot {
    fn from(slot: LeasedSlot) -> Self {
        Self(slot.0)
    }
}

impl SharedSlot {
    /// The location of the slot.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.0.slot
    }

    /// Writes `source` at `offset` within the slot.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSegment::copy_from`].
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.0.check_part(offset, source.len())?;
        self.0.segment.copy_from(self.0.slot.offset + offset, source)
    }

    /// Reads bytes at `offset` within the slot.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSegment::copy_to`].
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.0.check_part(offset, target.len())?;
        self.0.segment.copy_to(self.0.slot.offset + offset, target)
    }

    /// The address of the bytes in this process, valid while this value lives; see [`OwnedSegment::address`].
    #[must_use]
    pub fn address(&self) -> usize {
        self.0.pointer_range().0.expose_provenance()
    }

    /// The segment of the slot.
    #[must_use]
    pub fn segment(&self) -> SegmentHold {
        SegmentHold(Arc::clone(&self.0.segment))
    }
}

impl From<LeasedSlot> for SlotHold {
    fn from(slot: LeasedSlot) -> Self {
        Self(slot.0)
    }
}

impl WeakSlot {
    /// Holds the slot and returns its location; `None` if it is not leased any more.
    #[must_use]
    pub fn hold(&self) -> Option<(SlotHold, Slot)> {
        let lease = self.0.upgrade()?;
        let slot = lease.slot;
        Some((SlotHold(lease), slot))
    }

    /// Whether the slot is not leased any more.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl SlotLease {
    fn pointer_range(&self) -> (*const u8, usize) {
        let length = usize::try_from(self.slot.len).expect("a slot is mapped, so its length is that of an object");
        let start = self.segment.pointer(self.slot.offset, length).expect("a slot lies within its segment");
        (start, length)
    }

    fn check(&self, length: usize) -> Result<(), ShmError> {
        self.check_part(0, length)
    }

    fn check_part(&self, offset: u64, length: usize) -> Result<(), ShmError> {
        if offset.checked_add(length as u64).is_some_and(|end| end <= self.slot.len) {
            return Ok(());
        }
        Err(self.segment.out_of_range(self.slot.offset.saturating_add(offset), length))
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that does not exist there.
        if self.fork_guard.is_child() {
            return;
        }
        let Some(arena_state) = self.arena_state.upgrade() else { return };
        let released = lock(&arena_state).arena.release(self.slot);
        debug_assert!(released.is_ok(), "{released:?}");
    }
}

/// A panic elsewhere leaves the arena consistent: every change is a single call.
fn lock(arena_state: &Mutex<ArenaState>) -> MutexGuard<'_, ArenaState> {
    arena_state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Share;

    const CONFIG: ArenaConfig =
        ArenaConfig { segment_bytes_min: 1 << 16, limit_bytes: 1 << 20, alignment: 64, setting: "arena_bytes_max" };

    fn arena() -> WorkerArena {
        WorkerArena::new(CONFIG).expect("a power of two")
    }

    fn leased(arena: &WorkerArena, bytes: u64) -> LeasedSlot {
        for id in 0.. {
            match arena.lease(bytes).expect("room") {
                LeaseOutcome::Slot(slot) => return slot,
                LeaseOutcome::Grow { bytes } => {
                    let size = usize::try_from(bytes).expect("small");
                    let segment = OwnedSegment::create("leased", size, Share::Writable).expect("memory");
                    arena.add_segment(SegmentId(id), segment).expect("it was asked for");
                }
            }
        }
        unreachable!("numbers do not end");
    }

    #[test]
    fn slots_are_read_and_written_in_place() {
        let arena = arena();
        let (mut one, mut other) = (leased(&arena, 100), leased(&arena, 100));
        one.bytes_mut().expect("nobody holds it").fill(1);
        other.bytes_mut().expect("nobody holds it").fill(2);
        one.write(&[3; 7]).expect("it fits");
        let mut copy = [0; 100];
        one.read(&mut copy).expect("it fits");
        assert_eq!(copy[..8], [3, 3, 3, 3, 3, 3, 3, 1]);
        assert_eq!((one.bytes(), other.bytes()), (&copy[..], &[2; 100][..]));
        assert_eq!(one.address() % 64, 0);
        let segment = one.segment();
        assert!((segment.address()..segment.address() + segment.len()).contains(&other.address()));
        assert_eq!(arena.usage().slots, 2);
        drop(other);
        assert_eq!(arena.usage().slots, 1);
    }

    #[test]
    fn out_of_range_accesses_are_refused() {
        let arena = arena();
        let mut slot = leased(&arena, 10);
        let error = slot.write(&[0; 11]).expect_err("its neighbour's byte");
        assert!(matches!(error, ShmError::OutOfRange { len: 11, .. }), "{error}");
        let error = slot.read(&mut [0; 11]).expect_err("its neighbour's byte");
        assert!(matches!(error, ShmError::OutOfRange { len: 11, .. }), "{error}");
    }

    #[test]
    fn a_shared_slot_is_copied_within_its_bounds() {
        let arena = arena();
        let shared = SharedSlot::from(leased(&arena, 100));
        let other = shared.clone();
        other.write(90, &[7; 10]).expect("its last bytes");
        let mut copy = [0; 10];
        shared.read(90, &mut copy).expect("its last bytes");
        assert_eq!((copy, shared.slot().len), ([7; 10], 100));
        for offset in [91, u64::MAX] {
            let error = shared.write(offset, &[0; 10]).expect_err("its neighbour's byte");
            assert!(matches!(error, ShmError::OutOfRange { .. }), "{error}");
            shared.read(offset, &mut copy).expect_err("its neighbour's byte");
        }
        drop(shared);
        assert_eq!(arena.usage().slots, 1);
        drop(other);
        assert_eq!(arena.usage().slots, 0);
    }

    #[test]
    fn a_hold_keeps_the_slot_leased_and_blocks_writing() {
        let arena = arena();
        let mut slot = leased(&arena, 100);
        let (weak, pointer_range) = (slot.downgrade(), slot.slot());
        let (hold, found) = weak.hold().expect("it is leased");
        assert_eq!(found, pointer_range);
        assert!(slot.bytes_mut().is_none() && !weak.is_gone());
        drop(hold);
        assert!(slot.bytes_mut().is_some());
        let last = slot.hold();
        drop(slot);
        assert_eq!(arena.usage().slots, 1);
        drop(last);
        assert_eq!(arena.usage().slots, 0);
        assert!(weak.is_gone() && weak.hold().is_none());
    }

    #[test]
    fn a_slot_outlives_its_arena() {
        let arena = arena();
        let mut slot = leased(&arena, 4_096);
        drop(arena);
        slot.bytes_mut().expect("nobody holds it").fill(5);
        assert!(slot.bytes().iter().all(|byte| *byte == 5));
    }

    #[test]
    fn empty_slots_have_no_bytes() {
        let arena = arena();
        let mut slot = leased(&arena, 0);
        assert!(slot.bytes().is_empty() && slot.bytes_mut().is_some_and(|bytes| bytes.is_empty()));
    }
}
