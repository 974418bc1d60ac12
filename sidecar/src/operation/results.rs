//! Result segments: executors write results into slots that local ranks read. Each tensor of an operation has one slot,
//! which its local ranks share; it is free again when all of them have released it.
//!
//! A worker maps whole segments. So a segment contains results of process sets with the same local ranks only, and only
//! these ranks may map it. Such an arena stays for the life of the process: workers keep segments mapped, and sets that
//! are added and removed again and again use the same memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ronde_shm::{Arena, ArenaConfig, ArenaUsage, Lease, OwnedSegment, SegmentId, Share, Slot};
use ronde_wire::Rank;

use crate::session::segments::Segments;

/// The results of all process sets.
pub(crate) struct Results {
    limit_bytes: u64,
    /// All ranks of this sidecar, ascending.
    served: Vec<Rank>,
    arenas: Vec<RanksArena>,
    /// The indices of the arenas.
    of_ranks: HashMap<Arc<[Rank]>, usize>,
    /// Bytes of all segments.
    mapped_bytes: u64,
    next_segment: u32,
    segments: Segments,
}

/// The arena of the sets with the same local ranks.
struct RanksArena {
    arena: Arena,
    owned: BTreeMap<SegmentId, Arc<OwnedSegment>>,
    ranks: Arc<[Rank]>,
}

/// A leased slot for one tensor's result.
#[derive(Clone)]
pub(crate) struct ResultSlot {
    /// Identifies the slot for the arena.
    pub(crate) slot: Slot,
    /// The mapping to write to.
    pub(crate) segment: Arc<OwnedSegment>,
    /// The index of its arena.
    arena: usize,
}

impl Results {
    /// Creates an empty table for a sidecar that serves these ranks. All segments together have at most `limit_bytes`.
    /// It publishes them to workers through `segments`.
    pub(crate) fn new(limit_bytes: u64, served: Vec<Rank>, segments: Segments) -> Self {
        let (arenas, of_ranks) = (Vec::new(), HashMap::new());
        Self { limit_bytes, served, arenas, of_ranks, mapped_bytes: 0, next_segment: 0, segments }
    }

    /// Forgets all segments: another membership begins, in which ranks are other workers. No slot is in use; a worker
    /// that mapped a segment keeps its own mapping.
    pub(crate) fn enter(&mut self, limit_bytes: u64, served: Vec<Rank>) {
        self.segments.clear_results();
        (self.limit_bytes, self.served, self.mapped_bytes) = (limit_bytes, served, 0);
        self.arenas.clear();
        self.of_ranks.clear();
    }

    /// Leases a slot for a result of a set with these local ranks, and grows by a segment when none fits.
    ///
    /// # Errors
    /// When the limit is reached or the system has no memory; both fail the operation on all ranks. Submissions count
    /// their own size beforehand, and the limit leaves room for what all-gathers add.
    pub(crate) fn lease(&mut self, ranks: &Arc<[Rank]>, bytes: u64) -> anyhow::Result<ResultSlot> {
        let index = self.arena_of(ranks)?;
        for _ in 0..LEASE_ATTEMPTS {
            let of_ranks = &mut self.arenas[index];
            match of_ranks.arena.lease(bytes)? {
                Lease::Slot(slot) => {
                    let segment = of_ranks.owned.get(&slot.segment).map(Arc::clone);
                    let segment =
                        segment.ok_or_else(|| anyhow::anyhow!("a slot is in no segment; this is a bug in ronde"))?;
                    return Ok(ResultSlot { slot, segment, arena: index });
                }
                Lease::Grow { bytes } => self.grow(index, bytes)?,
            }
        }
        anyhow::bail!("a new segment has no room for {bytes} bytes; this is a bug in ronde")
    }

    /// Releases a slot.
    pub(crate) fn release(&mut self, slot: &ResultSlot) {
        if let Err(error) = self.arenas[slot.arena].arena.release(slot.slot) {
            tracing::error!(%error, "a result slot was released twice; this is a bug in ronde");
        }
    }

    /// Returns the figures for metrics.
    pub(crate) fn usage(&self) -> ArenaUsage {
        let usages = self.arenas.iter().map(|of_ranks| of_ranks.arena.usage());
        usages.fold(ArenaUsage::default(), |sum, usage| ArenaUsage {
            mapped_bytes: sum.mapped_bytes + usage.mapped_bytes,
            in_use_bytes: sum.in_use_bytes + usage.in_use_bytes,
            slots: sum.slots + usage.slots,
            segments: sum.segments + usage.segments,
        })
    }

    /// Returns the index of the arena of these ranks, which is created if there is none.
    fn arena_of(&mut self, ranks: &Arc<[Rank]>) -> anyhow::Result<usize> {
        if let Some(index) = self.of_ranks.get(ranks) {
            return Ok(*index);
        }
        let is_all = **ranks == *self.served;
        let config = ArenaConfig {
            segment_bytes_min: if is_all { SEGMENT_BYTES_MIN } else { PARTIAL_SEGMENT_BYTES_MIN },
            limit_bytes: self.limit_bytes,
            alignment: ALIGNMENT_BYTES,
            setting: "result_bytes_max",
        };
        self.arenas.push(RanksArena { arena: Arena::new(config)?, owned: BTreeMap::new(), ranks: Arc::clone(ranks) });
        self.of_ranks.insert(Arc::clone(ranks), self.arenas.len() - 1);
        Ok(self.arenas.len() - 1)
    }

    fn grow(&mut self, index: usize, bytes: u64) -> anyhow::Result<()> {
        let (mapped, limit) = (self.mapped_bytes, self.limit_bytes);
        anyhow::ensure!(
            bytes <= limit.saturating_sub(mapped),
            "{bytes} more bytes exceed result_bytes_max = {limit}, of which {mapped} are in use for other process sets"
        );
        let id = SegmentId(self.next_segment);
        let next = id.0.checked_add(1).ok_or_else(|| anyhow::anyhow!("no segment ids are left"))?;
        let name = format!("ronde-result-{id}");
        let segment = Arc::new(OwnedSegment::create(&name, usize::try_from(bytes)?, Share::ReadOnlyForOthers)?);
        let of_ranks = &mut self.arenas[index];
        of_ranks.arena.add_segment(id, segment.len())?;
        self.segments.add_result(id, Arc::clone(&segment), Arc::clone(&of_ranks.ranks));
        of_ranks.owned.insert(id, segment);
        (self.next_segment, self.mapped_bytes) = (next, mapped + bytes);
        tracing::debug!(segment = id.0, bytes, "result segment added");
        Ok(())
    }
}

/// The smallest segment of the sets with all ranks of this sidecar: growing is rare, and small jobs pay only for pages
/// that they use.
const SEGMENT_BYTES_MIN: u64 = 16 << 20;
/// The same of other sets, of which there may be many: segments are populated when they are created.
const PARTIAL_SEGMENT_BYTES_MIN: u64 = 1 << 20;
/// A cache line.
const ALIGNMENT_BYTES: u64 = 64;
/// One lease, one growth, one more lease.
const LEASE_ATTEMPTS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    /// All ranks, and one of them.
    fn ranks() -> (Arc<[Rank]>, Arc<[Rank]>) {
        ([Rank(0), Rank(1)].into(), [Rank(0)].into())
    }

    fn results(limit_bytes: u64) -> Results {
        Results::new(limit_bytes, vec![Rank(0), Rank(1)], Segments::default())
    }

    #[test]
    fn sets_with_other_local_ranks_share_no_segment_and_those_with_the_same_share_one() {
        let (mut results, (every, single)) = (results(64 << 20), ranks());
        let all = results.lease(&every, 100).expect("room");
        let of_one = results.lease(&single, 100).expect("room");
        assert_ne!(all.slot.segment, of_one.slot.segment);
        for _ in 0..100 {
            let (again, of_one_again) = (results.lease(&every, 100), results.lease(&single, 100));
            let (again, of_one_again) = (again.expect("room"), of_one_again.expect("room"));
            assert_eq!(again.slot.segment, all.slot.segment);
            assert_eq!(of_one_again.slot.segment, of_one.slot.segment);
            results.release(&again);
            results.release(&of_one_again);
        }
        assert_eq!((results.usage().segments, results.usage().slots), (2, 2));
        results.release(&all);
        results.release(&of_one);
        assert_eq!((results.usage().segments, results.usage().slots), (2, 0));
    }

    #[test]
    fn all_segments_together_have_a_limit() {
        let (mut results, (every, single)) = (results(20 << 20), ranks());
        let held = results.lease(&every, 16 << 20).expect("room");
        let error = results.lease(&single, 8 << 20).map(drop).expect_err("no room");
        assert!(error.to_string().contains("result_bytes_max = 20971520"), "{error}");
        results.release(&held);
        results.lease(&every, 16 << 20).expect("its own segment is free");
    }
}
