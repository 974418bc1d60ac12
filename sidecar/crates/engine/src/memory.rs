//! The memory that an executor works on, as a trait: shared memory in a sidecar, plain vectors in simulations.

use ronde_wire::{Rank, Seq};

use crate::plugins::Plugins;

/// What local ranks contribute to admitted operations. Every access copies: the bytes behind it may change at any time.
pub trait Contributions {
    /// Copies bytes of a local rank's contribution into private memory.
    ///
    /// # Errors
    /// [`MemoryError`] when the place does not hold them any more; the operation then fails for all.
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError>;
}

/// Access to the tensors of admitted operations.
pub trait Memory {
    /// Copies private bytes into a result. Written bytes are never read back.
    ///
    /// # Errors
    /// [`MemoryError`] when the result's place is gone.
    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError>;

    /// What is read, and what computes on private copies of it where an operation names a plugin: both at once, so that bytes
    /// are copied straight to where a plugin works. `None` where there are no plugins.
    fn parts(&mut self) -> (&mut dyn Contributions, Option<&mut dyn Plugins>);
}

/// Bytes of one rank's contribution to one tensor of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputPlace {
    /// The operation.
    pub seq: Seq,
    /// The tensor's index in the operation.
    pub tensor: u32,
    /// The local rank.
    pub rank: Rank,
    /// The first byte.
    pub offset: u64,
}

/// Bytes of the result of one tensor of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputPlace {
    /// The operation.
    pub seq: Seq,
    /// The tensor's index in the operation.
    pub tensor: u32,
    /// The local rank whose own result it is; `None` for the one that the local ranks share.
    pub rank: Option<Rank>,
    /// The first byte.
    pub offset: u64,
}

/// A place that cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MemoryError(pub String);
