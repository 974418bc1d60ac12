//! A session's shared memory: input segments of its own with an arena on them, and result segments of the sidecar.
//!
//! Locks are held for bookkeeping only, never while bytes are copied. Growing and fetching a segment talk to the sidecar and
//! populate pages (about 1 ms a MiB); they block, and a client's asynchronous calls do them on a blocking thread.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ronde_rpc::Claimed;
use ronde_shm::{
    Arena, ArenaConfig, ForkGuard, Lease, MemClient, MemClientConfig, OwnedSegment, PeerSegment, SegmentId,
    SessionToken, Share, Slot,
};
use ronde_wire::limits;

use crate::error::Error;

/// The shared memory of one session.
#[derive(Debug)]
pub(crate) struct Memory {
    inputs: Mutex<Inputs>,
    results: Mutex<HashMap<u32, Arc<PeerSegment>>>,
    /// Taken before the other locks, never after.
    exchange: Mutex<Exchange>,
    token: SessionToken,
    fork_guard: ForkGuard,
}

#[derive(Debug)]
struct Inputs {
    arena: Arena,
    segments: HashMap<SegmentId, Arc<OwnedSegment>>,
}

#[derive(Debug)]
struct Exchange {
    client: MemClient,
    next: u32,
}

impl Memory {
    /// Opens `mem.sock` for a session. Blocks for as long as connecting to a Unix socket takes.
    pub(crate) fn connect(socket: &Path, claimed: &Claimed) -> Result<Self, Error> {
        // A result segment may serve all workers of the sidecar.
        let result_bytes_max = claimed.arena_bytes_max.saturating_mul(limits::LOCAL_RANKS_MAX as u64);
        let client = MemClient::connect(socket, MemClientConfig { timeout: EXCHANGE_TIMEOUT, result_bytes_max })?;
        let config = ArenaConfig {
            segment_bytes_min: SEGMENT_BYTES_MIN,
            limit_bytes: claimed.arena_bytes_max,
            alignment: ALIGNMENT_BYTES,
            setting: "arena_bytes_max (of the sidecar)",
        };
        let arena = Arena::new(config).map_err(|error| Error::argument(error.to_string()))?;
        Ok(Self {
            inputs: Mutex::new(Inputs { arena, segments: HashMap::new() }),
            results: Mutex::new(HashMap::new()),
            exchange: Mutex::new(Exchange { client, next: 0 }),
            token: SessionToken::from_bytes(claimed.session_token),
            fork_guard: ForkGuard::new(),
        })
    }

    /// Leases a slot if that needs no further segment.
    pub(crate) fn try_lease(self: &Arc<Self>, bytes: u64) -> Result<Option<LeasedSlot>, Error> {
        match self.lease_or_growth(bytes)? {
            Lease::Slot(slot) => Ok(Some(LeasedSlot { memory: Arc::clone(self), slot })),
            Lease::Grow { .. } => Ok(None),
        }
    }

    /// Leases a slot, growing the arena when that is needed. Blocks then.
    pub(crate) fn lease(self: &Arc<Self>, bytes: u64) -> Result<LeasedSlot, Error> {
        if let Some(slot) = self.try_lease(bytes)? {
            return Ok(slot);
        }
        let mut exchange = lock(&self.exchange);
        // Others may have grown or released meanwhile, and may take what this one adds: so in turns, each of which adds a
        // segment, up to the arena's limit.
        loop {
            match self.lease_or_growth(bytes)? {
                Lease::Slot(slot) => return Ok(LeasedSlot { memory: Arc::clone(self), slot }),
                Lease::Grow { bytes } => self.grow(&mut exchange, bytes)?,
            }
        }
    }

    /// Whether a result segment has been fetched.
    pub(crate) fn knows_result(&self, segment: u32) -> bool {
        lock(&self.results).contains_key(&segment)
    }

    /// A result segment; the first time it is fetched and mapped, which blocks.
    pub(crate) fn result(&self, segment: u32) -> Result<Arc<PeerSegment>, Error> {
        if let Some(known) = lock(&self.results).get(&segment) {
            return Ok(Arc::clone(known));
        }
        let mut exchange = lock(&self.exchange);
        if let Some(known) = lock(&self.results).get(&segment) {
            return Ok(Arc::clone(known));
        }
        let fetched = Arc::new(exchange.client.result(&self.token, SegmentId(segment))?);
        lock(&self.results).insert(segment, Arc::clone(&fetched));
        Ok(fetched)
    }

    fn lease_or_growth(&self, bytes: u64) -> Result<Lease, Error> {
        lock(&self.inputs).arena.lease(bytes).map_err(|error| Error::Limit { reason: error.to_string() })
    }

    fn grow(&self, exchange: &mut Exchange, bytes: u64) -> Result<(), Error> {
        let id = SegmentId(exchange.next);
        let size = usize::try_from(bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let segment = OwnedSegment::create("ronde-input", size, Share::Writable)?;
        exchange.client.attach(&self.token, id, &segment)?;
        exchange.next += 1;
        let mut inputs = lock(&self.inputs);
        inputs.arena.add_segment(id, segment.len()).map_err(|error| Error::Limit { reason: error.to_string() })?;
        inputs.segments.insert(id, Arc::new(segment));
        Ok(())
    }
}

/// Bytes of an input segment that are this value's until it is dropped.
#[derive(Debug)]
pub(crate) struct LeasedSlot {
    memory: Arc<Memory>,
    slot: Slot,
}

impl LeasedSlot {
    /// Writes the tensor, which is as long as the slot.
    pub(crate) fn write(&self, tensor: &[u8]) -> Result<(), Error> {
        let segment = lock(&self.memory.inputs).segments.get(&self.slot.segment).cloned();
        match segment {
            Some(segment) => Ok(segment.copy_from(self.slot.offset, tensor)?),
            // Slots are leased from segments of the map only, and none is ever removed.
            None => Err(Error::Protocol { reason: format!("input segment {} is not known", self.slot.segment) }),
        }
    }

    /// Where it is.
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }
}

impl Drop for LeasedSlot {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that does not exist there.
        if self.memory.fork_guard.is_child() {
            return;
        }
        let released = lock(&self.memory.inputs).arena.release(self.slot);
        debug_assert!(released.is_ok(), "{released:?}");
    }
}

/// A panic elsewhere leaves these maps whole: each change is a single call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long the sidecar may take to map a segment.
pub(crate) const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Small enough that a small program pays little for pages, large enough that a model needs few segments.
const SEGMENT_BYTES_MIN: u64 = 16 << 20;
/// A cache line, and what vector instructions like.
const ALIGNMENT_BYTES: u64 = 64;
