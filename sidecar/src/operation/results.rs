//! Result segments: executors write results into slots that local ranks read. Each tensor of an operation has one slot,
//! which its local ranks share; it is free again when all of them have released it.
//!
//! A worker maps whole segments, so a segment contains results of one process set only, and only the set's members may map
//! it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ronde_shm::{Arena, ArenaConfig, ArenaUsage, Lease, OwnedSegment, SegmentId, Share, Slot};
use ronde_wire::{Rank, SetId};

use crate::session::segments::Segments;

/// The results of all process sets.
pub(crate) struct Results {
    limit_bytes: u64,
    /// `None` for a place that is free for another arena.
    arenas: Vec<Option<SetArena>>,
    /// The arenas of the present sets, as indices.
    of_sets: HashMap<SetId, usize>,
    next_segment: u32,
    segments: Segments,
}

/// The arena of a process set.
struct SetArena {
    arena: Arena,
    owned: BTreeMap<SegmentId, Arc<OwnedSegment>>,
    /// The set's local ranks, ascending.
    members: Arc<[Rank]>,
    /// Its set is gone: it is dropped with its last slot.
    is_retired: bool,
}

/// A leased slot for one tensor's result.
#[derive(Clone)]
pub(crate) struct ResultSlot {
    /// Identifies the slot for the arena.
    pub(crate) slot: Slot,
    /// The mapping to write to.
    pub(crate) segment: Arc<OwnedSegment>,
    /// The index of its arena, which stays while the slot is leased.
    arena: usize,
}

impl Results {
    /// Creates empty arenas with this limit for each. It publishes their segments to workers through `segments`.
    pub(crate) fn new(limit_bytes: u64, segments: Segments) -> Self {
        Self { limit_bytes, arenas: Vec::new(), of_sets: HashMap::new(), next_segment: 0, segments }
    }

    /// Leases a slot for a result of a set with these local ranks, and grows by a segment when none fits.
    ///
    /// # Errors
    /// When the limit is reached or the system has no memory; both fail the operation on all ranks. Submissions count
    /// their own size beforehand, and the limit leaves room for what all-gathers add.
    pub(crate) fn lease(&mut self, set: SetId, members: &[Rank], bytes: u64) -> anyhow::Result<ResultSlot> {
        let index = self.arena_of(set, members)?;
        for _ in 0..LEASE_ATTEMPTS {
            let Some(of_set) = &mut self.arenas[index] else { break };
            match of_set.arena.lease(bytes)? {
                Lease::Slot(slot) => {
                    let segment = of_set.owned.get(&slot.segment).map(Arc::clone);
                    let segment =
                        segment.ok_or_else(|| anyhow::anyhow!("a slot is in no segment; this is a bug in ronde"))?;
                    return Ok(ResultSlot { slot, segment, arena: index });
                }
                Lease::Grow { bytes } => {
                    let id = SegmentId(self.next_segment);
                    of_set.grow(id, bytes, &self.segments)?;
                    self.next_segment =
                        id.0.checked_add(1).ok_or_else(|| anyhow::anyhow!("no segment ids are left"))?;
                }
            }
        }
        anyhow::bail!("a new segment has no room for {bytes} bytes; this is a bug in ronde")
    }

    /// Releases a slot.
    pub(crate) fn release(&mut self, slot: &ResultSlot) {
        let Some(of_set) = self.arenas.get_mut(slot.arena).and_then(Option::as_mut) else {
            tracing::error!("a result slot was released after its arena; this is a bug in ronde");
            return;
        };
        if let Err(error) = of_set.arena.release(slot.slot) {
            tracing::error!(%error, "a result slot was released twice; this is a bug in ronde");
        }
        self.drop_if_unused(slot.arena);
    }

    /// Drops the memory of a set that is gone, as soon as its results are released.
    pub(crate) fn forget_set(&mut self, set: SetId) {
        let Some(index) = self.of_sets.remove(&set) else { return };
        if let Some(of_set) = &mut self.arenas[index] {
            of_set.is_retired = true;
        }
        self.drop_if_unused(index);
    }

    /// The same for all sets but that of all ranks.
    pub(crate) fn forget_sets(&mut self) {
        let gone: Vec<SetId> = self.of_sets.keys().copied().filter(|set| *set != SetId::WORLD).collect();
        gone.into_iter().for_each(|set| self.forget_set(set));
    }

    /// Returns the figures for metrics.
    pub(crate) fn usage(&self) -> ArenaUsage {
        let usages = self.arenas.iter().flatten().map(|of_set| of_set.arena.usage());
        usages.fold(ArenaUsage::default(), |sum, usage| ArenaUsage {
            mapped_bytes: sum.mapped_bytes + usage.mapped_bytes,
            in_use_bytes: sum.in_use_bytes + usage.in_use_bytes,
            slots: sum.slots + usage.slots,
            segments: sum.segments + usage.segments,
        })
    }

    /// Returns the index of a set's arena, which is created if there is none for exactly these members: a set's number is
    /// given to another one later.
    fn arena_of(&mut self, set: SetId, members: &[Rank]) -> anyhow::Result<usize> {
        if let Some(index) = self.of_sets.get(&set).copied() {
            if self.arenas[index].as_ref().is_some_and(|of_set| *of_set.members == *members) {
                return Ok(index);
            }
            self.forget_set(set);
        }
        let config = ArenaConfig {
            segment_bytes_min: if set == SetId::WORLD { WORLD_SEGMENT_BYTES_MIN } else { SET_SEGMENT_BYTES_MIN },
            limit_bytes: self.limit_bytes,
            alignment: ALIGNMENT_BYTES,
            setting: "result_bytes_max",
        };
        let arena = Arena::new(config)?;
        let of_set = Some(SetArena { arena, owned: BTreeMap::new(), members: members.into(), is_retired: false });
        let index = match self.arenas.iter().position(Option::is_none) {
            Some(free) => {
                self.arenas[free] = of_set;
                free
            }
            None => {
                self.arenas.push(of_set);
                self.arenas.len() - 1
            }
        };
        self.of_sets.insert(set, index);
        Ok(index)
    }

    fn drop_if_unused(&mut self, index: usize) {
        if self.arenas[index].as_ref().is_some_and(|of_set| of_set.is_retired && of_set.arena.usage().slots == 0)
            && let Some(of_set) = self.arenas[index].take()
        {
            of_set.owned.keys().for_each(|id| self.segments.remove_result(*id));
        }
    }
}

impl SetArena {
    fn grow(&mut self, id: SegmentId, bytes: u64, segments: &Segments) -> anyhow::Result<()> {
        let name = format!("ronde-result-{id}");
        let segment = Arc::new(OwnedSegment::create(&name, usize::try_from(bytes)?, Share::ReadOnlyForOthers)?);
        self.arena.add_segment(id, segment.len())?;
        segments.add_result(id, Arc::clone(&segment), Arc::clone(&self.members));
        self.owned.insert(id, segment);
        tracing::debug!(segment = id.0, bytes, "result segment added");
        Ok(())
    }
}

/// The smallest segment of the set of all ranks: growing is rare, and small jobs pay only for pages that they use.
const WORLD_SEGMENT_BYTES_MIN: u64 = 16 << 20;
/// The same of another set: the 1,023 sets that a job may add take 1 GiB, because segments are populated when they are
/// created.
const SET_SEGMENT_BYTES_MIN: u64 = 1 << 20;
/// A cache line.
const ALIGNMENT_BYTES: u64 = 64;
/// One lease, one growth, one more lease.
const LEASE_ATTEMPTS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const SET: SetId = SetId(1);

    fn results() -> Results {
        Results::new(64 << 20, Segments::default())
    }

    #[test]
    fn sets_share_no_segment_and_a_set_that_is_gone_keeps_none() {
        let mut results = results();
        let world = results.lease(SetId::WORLD, &[Rank(0), Rank(1)], 100).expect("room");
        let of_set = results.lease(SET, &[Rank(0)], 100).expect("room");
        assert_ne!(world.slot.segment, of_set.slot.segment);
        let again = results.lease(SET, &[Rank(0)], 100).expect("room");
        assert_eq!(again.slot.segment, of_set.slot.segment);
        // A slot that is still read keeps its segment.
        results.release(&again);
        results.forget_set(SET);
        assert_eq!(results.usage().segments, 2);
        results.release(&of_set);
        assert_eq!((results.usage().segments, results.usage().slots), (1, 1));
        results.forget_sets();
        results.release(&world);
        assert_eq!((results.usage().segments, results.usage().slots), (1, 0));
    }

    #[test]
    fn another_set_with_the_same_number_has_another_segment() {
        let mut results = results();
        let first = results.lease(SET, &[Rank(0), Rank(1)], 100).expect("room");
        let second = results.lease(SET, &[Rank(1), Rank(2)], 100).expect("room");
        assert_ne!(first.slot.segment, second.slot.segment);
        results.release(&first);
        assert_eq!(results.usage().segments, 1, "that of the first set is dropped");
        results.release(&second);
        // Its arena is used again, with segments of new numbers.
        let third = results.lease(SET, &[Rank(3)], 100).expect("room");
        assert!(third.slot.segment > second.slot.segment);
    }
}
