//! Counters of an executor.

/// Counters since an executor was created. Bytes are those of elements, without headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutorStats {
    /// Operations of which this lane's part was completed.
    pub operations_done: u64,
    /// Operations that failed here.
    pub operations_failed: u64,
    /// Chunks passed to the port, tokens included.
    pub chunks_sent: u64,
    /// Their data.
    pub sent_bytes: u64,
    /// Chunks that were sent on credit.
    pub chunks_sent_early: u64,
    /// Chunks received, tokens included.
    pub chunks_received: u64,
    /// Their data.
    pub received_bytes: u64,
    /// Chunks that arrived before their operation was admitted.
    pub chunks_held: u64,
    /// Chunks of another epoch, or of an operation that failed or was withdrawn: dropped.
    pub chunks_dropped: u64,
    /// Bytes of local contributions that were read.
    pub contributed_bytes: u64,
    /// Bytes that were reduced into others; all operands of an n-ary reduction count.
    pub reduced_bytes: u64,
    /// Bytes of elements that a codec encoded.
    pub encoded_bytes: u64,
    /// Bytes of elements that a codec decoded.
    pub decoded_bytes: u64,
    /// Bytes of contributions that a prelude measured.
    pub measured_bytes: u64,
    /// Bytes of results that were written.
    pub published_bytes: u64,
    /// Copies of private buffers that a transport still held.
    pub copies: u64,
    /// The bytes of these.
    pub copied_bytes: u64,
}

/// Private memory of an executor, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrivateBytes {
    /// Registers of the sub-schedules in flight.
    pub registers: u64,
    /// Copies of local tensors that preludes measure.
    pub measured: u64,
    /// Chunks of admitted operations that wait for their round.
    pub parked: u64,
    /// Chunks of operations that are not yet admitted, with their headers.
    pub early: u64,
    /// Buffers kept for reuse.
    pub free: u64,
}

impl PrivateBytes {
    /// All of them.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.registers + self.measured + self.parked + self.early + self.free
    }
}
