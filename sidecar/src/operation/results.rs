//! Result segments: executors write results into slots that local ranks read. Each tensor of an operation has one slot,
//! which its local ranks share; it is free again when all of them have released it.

use std::sync::Arc;

use ronde_shm::{Arena, ArenaConfig, ArenaUsage, Lease, OwnedSegment, SegmentId, Share, Slot};

use crate::session::segments::Segments;

/// The arena of results.
pub(crate) struct Results {
    arena: Arena,
    owned: Vec<Arc<OwnedSegment>>,
    segments: Segments,
}

/// A leased slot for one tensor's result.
#[derive(Clone)]
pub(crate) struct ResultSlot {
    /// Identifies the slot for the arena.
    pub(crate) slot: Slot,
    /// The mapping to write to.
    pub(crate) segment: Arc<OwnedSegment>,
}

impl Results {
    /// Creates an empty arena. It publishes its segments to workers through `segments`.
    ///
    /// # Errors
    /// When the limit is not valid for an arena.
    pub(crate) fn new(limit_bytes: u64, segments: Segments) -> anyhow::Result<Self> {
        let config = ArenaConfig {
            segment_bytes_min: SEGMENT_BYTES_MIN,
            limit_bytes,
            alignment: ALIGNMENT_BYTES,
            setting: "result_bytes_max",
        };
        Ok(Self { arena: Arena::new(config)?, owned: Vec::new(), segments })
    }

    /// Leases a slot, growing by a segment when none fits.
    ///
    /// # Errors
    /// When the limit is reached or the system has no memory; both fail the operation on all ranks. Submissions count
    /// their own size beforehand, and the limit leaves room for what all-gathers add.
    pub(crate) fn lease(&mut self, bytes: u64) -> anyhow::Result<ResultSlot> {
        for _ in 0..LEASE_ATTEMPTS {
            match self.arena.lease(bytes)? {
                Lease::Slot(slot) => {
                    let segment = Arc::clone(&self.owned[slot.segment.0 as usize]);
                    return Ok(ResultSlot { slot, segment });
                }
                Lease::Grow { bytes } => self.grow(bytes)?,
            }
        }
        anyhow::bail!("a new segment has no room for {bytes} bytes; this is a bug in ronde")
    }

    /// Releases a slot.
    pub(crate) fn release(&mut self, slot: Slot) {
        if let Err(error) = self.arena.release(slot) {
            tracing::error!(%error, "a result slot was released twice; this is a bug in ronde");
        }
    }

    /// Returns the figures for metrics.
    pub(crate) fn usage(&self) -> ArenaUsage {
        self.arena.usage()
    }

    fn grow(&mut self, bytes: u64) -> anyhow::Result<()> {
        let id = SegmentId(u32::try_from(self.owned.len())?);
        let name = format!("ronde-result-{id}");
        let segment = Arc::new(OwnedSegment::create(&name, usize::try_from(bytes)?, Share::ReadOnlyForOthers)?);
        self.arena.add_segment(id, segment.len())?;
        self.segments.add_result(id, Arc::clone(&segment));
        self.owned.push(segment);
        tracing::debug!(segment = id.0, bytes, "result segment added");
        Ok(())
    }
}

/// The smallest segment: growing is rare, and small jobs pay only for pages that they use.
const SEGMENT_BYTES_MIN: u64 = 16 << 20;
/// A cache line.
const ALIGNMENT_BYTES: u64 = 64;
/// One lease, one growth, one more lease.
const LEASE_ATTEMPTS: usize = 2;
