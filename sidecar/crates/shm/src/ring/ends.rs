//! Creating, mapping and using a ring.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::bell::Bell;
use super::consumer::Consumer;
use super::memory::{Channel, Direction, RING, check_header, ring_bytes, write_header};
use super::producer::Producer;
use crate::error::ShmError;
use crate::mapping::{Mapping, ReadWrite, SealedFd};
use crate::segment::{SEALS_OF_PEER, sealed_memfd};

/// A ring created by this process, a worker. It has no bell yet.
#[derive(Debug)]
pub struct WorkerRing {
    mapping: Arc<Mapping<ReadWrite>>,
    fd: SealedFd,
    capacity: u64,
}

impl WorkerRing {
    /// Creates, maps, populates and seals the memfd of a ring with this capacity in each direction.
    ///
    /// # Errors
    /// [`ShmError::RingCapacity`]; [`ShmError::System`] if memory or descriptors are exhausted.
    pub fn create(capacity: u64) -> Result<Self, ShmError> {
        let bytes = ring_bytes(capacity)?;
        let (fd, mapping) = sealed_memfd("ronde-ring", RING, bytes)?;
        write_header(&mapping);
        Ok(Self { mapping: Arc::new(mapping), fd, capacity })
    }

    /// Capacity of each direction in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The memfd, to pass to the sidecar.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the worker's end. The sidecar has the memfd and the other end of the bell.
    #[must_use]
    pub fn into_end(self, bell: Bell) -> RingEnd {
        RingEnd::new(&self.mapping, self.capacity, (Direction::ToSidecar, Direction::ToWorker), bell)
    }
}

/// A worker's ring, mapped by its sidecar.
#[derive(Debug)]
pub struct PeerRing {
    mapping: Arc<Mapping<ReadWrite>>,
    capacity: u64,
}

impl PeerRing {
    /// Checks, maps and populates the worker's memfd. It must be sealed like an input segment and have exactly the size
    /// of a ring with this capacity.
    ///
    /// # Errors
    /// [`ShmError::RingCapacity`], [`ShmError::RingLayout`], [`ShmError::NotMemfd`], [`ShmError::MissingSeals`] or
    /// [`ShmError::WrongSize`] for mistakes of the worker; [`ShmError::System`] if memory is exhausted.
    pub fn map(fd: OwnedFd, capacity: u64) -> Result<Self, ShmError> {
        let announced = ring_bytes(capacity)?.get() as u64;
        let sealed = SealedFd::verify(fd, SEALS_OF_PEER, RING)?;
        let actual = sealed.bytes().get() as u64;
        if actual != announced {
            return Err(ShmError::WrongSize { segment: RING.to_owned(), announced, actual });
        }
        let mapping = Mapping::new(&sealed, RING, usize::MAX)?;
        check_header(&mapping)?;
        Ok(Self { mapping: Arc::new(mapping), capacity })
    }

    /// Capacity of each direction in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the sidecar's end.
    #[must_use]
    pub fn into_end(self, bell: Bell) -> RingEnd {
        RingEnd::new(&self.mapping, self.capacity, (Direction::ToWorker, Direction::ToSidecar), bell)
    }
}

/// One side of a ring: a producer, a consumer, and the bell.
#[derive(Debug)]
pub struct RingEnd {
    /// Sends to the other side.
    pub producer: Producer,
    /// Receives from the other side.
    pub consumer: Consumer,
    /// Wakes the other side, and is rung by it.
    pub bell: Arc<Bell>,
}

impl RingEnd {
    fn new(
        mapping: &Arc<Mapping<ReadWrite>>,
        capacity: u64,
        (writes, reads): (Direction, Direction),
        bell: Bell,
    ) -> Self {
        let bell = Arc::new(bell);
        Self {
            producer: Producer::new(Channel::new(mapping, writes, capacity), Arc::clone(&bell)),
            consumer: Consumer::new(Channel::new(mapping, reads, capacity), Arc::clone(&bell)),
            bell,
        }
    }
}
