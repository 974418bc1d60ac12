//! [`Mapped`]: a result that stays where it was written.

use ronde_wire::DType;

use crate::error::Error;
use crate::memory::LeasedSlot;
use crate::tensor::Tensor;

/// A result as it lies there: in this worker's shared memory, where its bytes stay until the value is dropped, also when
/// the client is closed; or as a copy, where it was small or there was no room.
#[derive(Debug)]
pub struct Mapped {
    dtype: DType,
    shape: Vec<u64>,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Slot(LeasedSlot),
    Copied(Vec<u8>),
}

impl Mapped {
    pub(crate) fn in_slot(dtype: DType, shape: Vec<u64>, slot: LeasedSlot) -> Self {
        Self { dtype, shape, bytes: Bytes::Slot(slot) }
    }

    pub(crate) fn copied(tensor: Tensor) -> Self {
        Self { dtype: tensor.dtype, shape: tensor.shape, bytes: Bytes::Copied(tensor.bytes) }
    }

    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The number of bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "as with a tensor, none is worth asking whether it is empty")]
    pub fn len(&self) -> u64 {
        match &self.bytes {
            Bytes::Slot(slot) => slot.slot().len,
            Bytes::Copied(bytes) => bytes.len() as u64,
        }
    }

    /// Whether it lies in shared memory.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        matches!(self.bytes, Bytes::Slot(_))
    }

    /// A copy.
    ///
    /// # Errors
    /// [`Error::Limit`] when this process cannot have so many bytes.
    pub fn to_tensor(&self) -> Result<Tensor, Error> {
        let length = usize::try_from(self.len()).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let mut bytes = vec![0; length];
        match &self.bytes {
            Bytes::Slot(slot) => slot.read(&mut bytes)?,
            Bytes::Copied(copied) => bytes.copy_from_slice(copied),
        }
        Ok(Tensor { dtype: self.dtype, shape: self.shape.clone(), bytes })
    }

    /// Where the bytes lie in this process, for programs that can use an address: readable and writable for as long as this
    /// value lives. A forked child sees what its parent writes there, but not the
    /// other way round.
    ///
    /// # Errors
    /// [`Error::Memory`], which would be a bug.
    pub fn address(&self) -> Result<usize, Error> {
        match &self.bytes {
            Bytes::Slot(slot) => slot.address(),
            Bytes::Copied(bytes) => Ok(bytes.as_ptr().expose_provenance()),
        }
    }
}

/// What a worker has in shared memory: inputs in flight, and results that stay there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedMemory {
    /// Bytes of all segments.
    pub mapped_bytes: u64,
    /// Of these, bytes that are in use.
    pub in_use_bytes: u64,
    /// Inputs and results that use them.
    pub slots: usize,
    /// Segments.
    pub segments: usize,
}
