//! A session's shared memory: segments of its own with an arena on them, for inputs and for results that stay there, and
//! result segments of the sidecar.
//!
//! Locks are held for bookkeeping only, never while bytes are copied. Growing and fetching a segment talk to the sidecar and
//! populate pages (about 1 ms a MiB); they block, and a client's asynchronous calls do them on a blocking thread.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ronde_rpc::Claimed;
use ronde_shm::{
    Arena, ArenaConfig, ArenaUsage, ForkGuard, Lease, MemClient, MemClientConfig, OwnedSegment, PeerSegment, SegmentId,
    SessionToken, Share, Slot,
};
use ronde_wire::limits;

use crate::error::Error;

/// The shared memory of one session.
#[derive(Debug)]
pub(crate) struct Memory {
    own: Arc<Mutex<Own>>,
    limit_bytes: u64,
    results: Mutex<HashMap<u32, Arc<PeerSegment>>>,
    /// Taken before the other locks, never after.
    exchange: Mutex<Exchange>,
    token: SessionToken,
    fork_guard: ForkGuard,
}

/// The worker's own segments.
#[derive(Debug)]
struct Own {
    arena: Arena,
    segments: HashMap<SegmentId, Arc<OwnedSegment>>,
    /// Room for as many bytes is left when results take theirs.
    largest_input_bytes: u64,
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
            own: Arc::new(Mutex::new(Own { arena, segments: HashMap::new(), largest_input_bytes: 0 })),
            limit_bytes: claimed.arena_bytes_max,
            results: Mutex::new(HashMap::new()),
            exchange: Mutex::new(Exchange { client, next: 0 }),
            token: SessionToken::from_bytes(claimed.session_token),
            fork_guard: ForkGuard::new(),
        })
    }

    /// Leases a slot if that needs no further segment.
    pub(crate) fn try_lease(&self, bytes: u64) -> Result<Option<LeasedSlot>, Error> {
        Ok(self.lease_or_growth(bytes)?.ok())
    }

    /// Leases a slot for an input, growing the arena when that is needed. Blocks then.
    pub(crate) fn lease(&self, bytes: u64) -> Result<LeasedSlot, Error> {
        {
            let mut own = lock(&self.own);
            own.largest_input_bytes = own.largest_input_bytes.max(bytes);
        }
        self.lease_slot(bytes)
    }

    fn lease_slot(&self, bytes: u64) -> Result<LeasedSlot, Error> {
        if let Some(slot) = self.try_lease(bytes)? {
            return Ok(slot);
        }
        let mut exchange = lock(&self.exchange);
        // Others may have grown or released meanwhile, and may take what this one adds: so in turns, each of which adds a
        // segment, up to the arena's limit.
        loop {
            match self.lease_or_growth(bytes)? {
                Ok(slot) => return Ok(slot),
                Err(growth) => self.grow(&mut exchange, growth)?,
            }
        }
    }

    /// Whether a result of so many bytes is worth a slot, and may have one: half of the arena, and as much as the largest
    /// input took, is kept for inputs, without which nothing can be submitted.
    pub(crate) fn has_room_for_result(&self, bytes: u64) -> bool {
        if bytes < MAPPED_BYTES_MIN {
            return false;
        }
        let own = lock(&self.own);
        let kept = own.largest_input_bytes.max(self.limit_bytes / KEPT_FOR_INPUTS);
        own.arena.usage().in_use_bytes.saturating_add(bytes).saturating_add(kept) <= self.limit_bytes
    }

    /// Leases a slot for a result, if it [may have one](Self::has_room_for_result); blocks while the arena grows.
    pub(crate) fn lease_result(&self, bytes: u64) -> Option<LeasedSlot> {
        if !self.has_room_for_result(bytes) {
            return None;
        }
        let leased = self.lease_slot(bytes);
        leased.inspect_err(|error| tracing::debug!(target: "ronde", %error, "a result is copied")).ok()
    }

    /// Numbers of the worker's own segments.
    pub(crate) fn usage(&self) -> ArenaUsage {
        lock(&self.own).arena.usage()
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

    /// A slot, or the bytes of a segment that has to be added for it.
    fn lease_or_growth(&self, bytes: u64) -> Result<Result<LeasedSlot, u64>, Error> {
        let mut own = lock(&self.own);
        let lease = own.arena.lease(bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let slot = match lease {
            Lease::Grow { bytes } => return Ok(Err(bytes)),
            Lease::Slot(slot) => slot,
        };
        // Slots are leased from segments of the map only, and none is ever removed.
        let unknown = || Error::Protocol { reason: format!("segment {} is not known", slot.segment) };
        let segment = own.segments.get(&slot.segment).cloned().ok_or_else(unknown)?;
        Ok(Ok(LeasedSlot { own: Arc::downgrade(&self.own), segment, slot, fork_guard: self.fork_guard }))
    }

    fn grow(&self, exchange: &mut Exchange, bytes: u64) -> Result<(), Error> {
        let id = SegmentId(exchange.next);
        let size = usize::try_from(bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let segment = OwnedSegment::create("ronde-input", size, Share::Writable)?;
        exchange.client.attach(&self.token, id, &segment)?;
        exchange.next += 1;
        let mut own = lock(&self.own);
        own.arena.add_segment(id, segment.len()).map_err(|error| Error::Limit { reason: error.to_string() })?;
        own.segments.insert(id, Arc::new(segment));
        Ok(())
    }
}

/// Bytes of a segment of the worker's own that are this value's until it is dropped, also when the session is over.
#[derive(Debug)]
pub(crate) struct LeasedSlot {
    /// Gone with the session.
    own: Weak<Mutex<Own>>,
    segment: Arc<OwnedSegment>,
    slot: Slot,
    fork_guard: ForkGuard,
}

impl LeasedSlot {
    /// Writes the tensor, which is as long as the slot.
    pub(crate) fn write(&self, tensor: &[u8]) -> Result<(), Error> {
        Ok(self.segment.copy_from(self.slot.offset, tensor)?)
    }

    /// Reads as many bytes as the target has.
    pub(crate) fn read(&self, target: &mut [u8]) -> Result<(), Error> {
        Ok(self.segment.copy_to(self.slot.offset, target)?)
    }

    /// Where its bytes lie in this process, for as long as it lives.
    pub(crate) fn address(&self) -> Result<usize, Error> {
        let length = usize::try_from(self.slot.len).map_err(|error| Error::Limit { reason: error.to_string() })?;
        Ok(self.segment.address(self.slot.offset, length)?)
    }

    /// Where it is.
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }
}

impl Drop for LeasedSlot {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that does not exist there.
        if self.fork_guard.is_child() {
            return;
        }
        let Some(own) = self.own.upgrade() else { return };
        let released = lock(&own).arena.release(self.slot);
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
/// A smaller result is copied: below this a slot saves nothing.
const MAPPED_BYTES_MIN: u64 = 64 << 10;
/// Results that stay in shared memory leave this part of the arena alone: a half.
const KEPT_FOR_INPUTS: u64 = 2;
/// A cache line, and what vector instructions like.
const ALIGNMENT_BYTES: u64 = 64;
