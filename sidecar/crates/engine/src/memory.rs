//! The memory that an executor works on, as a trait: shared memory in a sidecar, plain vectors in simulations.

use ronde_wire::{Rank, Seq};

use crate::plugins::Plugins;

/// The contributions of local ranks to admitted operations. Every access copies, because workers may change the bytes
/// at any time.
pub trait Contributions {
    /// Copies bytes of a local rank's contribution into private memory.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory is not accessible; the operation then fails on all ranks.
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError>;
}

/// Access to the tensors of admitted operations.
pub trait Memory {
    /// Copies private bytes into a result. Written bytes are never read back.
    ///
    /// # Errors
    /// [`MemoryError`] when the result's memory is not accessible.
    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError>;

    /// The contributions and the plugins. Both are borrowed together, so that bytes are copied directly into a plugin's
    /// memory. `None` where there are no plugins.
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
    /// The local rank of a separate result; `None` for the result that the local ranks share.
    pub rank: Option<Rank>,
    /// The first byte.
    pub offset: u64,
}

/// Why memory cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MemoryError(pub String);
