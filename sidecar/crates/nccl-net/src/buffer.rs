//! NCCL's buffers: addresses that NCCL keeps valid until their request is complete.
#![expect(unsafe_code, reason = "NCCL passes addresses; this module makes slices of them")]

/// A buffer of NCCL's.
#[derive(Debug)]
pub(crate) struct Buffer {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: NCCL's threads share their memory; a buffer is used by one call at a time, under the lock of its connection.
unsafe impl Send for Buffer {}

impl Buffer {
    /// A buffer of `bytes` bytes.
    ///
    /// # Safety
    /// Until the value is dropped, `bytes` bytes at `address` can be read and written, and nobody else writes them. The
    /// address may be anything if `bytes` is 0.
    pub(crate) unsafe fn new(address: *mut u8, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// The number of its bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Its bytes from `from` to `to`. An empty slice if there are none.
    pub(crate) fn part(&self, from: usize, to: usize) -> &[u8] {
        if from >= to || to > self.bytes {
            return &[];
        }
        // SAFETY: the range is within the buffer, which the caller of `new` keeps valid and unwritten.
        unsafe { std::slice::from_raw_parts(self.address.add(from), to - from) }
    }

    /// As [`Self::part`], to be written.
    pub(crate) fn part_mut(&mut self, from: usize, to: usize) -> &mut [u8] {
        if from >= to || to > self.bytes {
            return &mut [];
        }
        // SAFETY: as in `part`; `&mut self` excludes other slices of it.
        unsafe { std::slice::from_raw_parts_mut(self.address.add(from), to - from) }
    }
}
