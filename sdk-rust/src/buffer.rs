//! [`Buffer`]: a tensor in shared memory, for submissions and results without a copy.

use ronde_shm::LeasedSlot;
use ronde_wire::{DType, Shape};

use crate::error::Error;
use crate::session::Session;
use crate::tensor::{Element, Tensor, TensorRef, check_type};

/// A tensor in this worker's shared memory: allocated by [`Client::buffer`](crate::Client::buffer), or a result. Submitting it
/// ([`Buffer::tensor`]) makes no copy, because the sidecar reads it in place. So it cannot be written while an operation on it
/// is in flight. The bytes stay until the value is dropped, also after the client is closed.
///
/// A result that is small, or for which there is no room, is in private memory and is copied like any tensor: see
/// [`Buffer::is_mapped`].
///
/// ```no_run
/// # async fn run(client: ronde::Client) -> Result<(), ronde::Error> {
/// use ronde::{DType, Operation, ReduceOp};
///
/// let mut gradient = client.buffer(DType::F32, &[1_000_000]).await?;
/// gradient.elements_mut::<f32>()?.fill(1.0);
/// let sum = Operation::allreduce("gradient", gradient.tensor(), ReduceOp::Sum).mapped();
/// let sum = client.submit(&sum).await?.wait_buffer().await?;
/// println!("{}", sum.elements::<f32>()?[0]);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Buffer {
    dtype: DType,
    shape: Vec<u64>,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Slot(LeasedSlot),
    Private(Vec<u8>),
}

impl Buffer {
    pub(crate) fn in_slot(dtype: DType, shape: Vec<u64>, slot: LeasedSlot) -> Self {
        Self { dtype, shape, bytes: Bytes::Slot(slot) }
    }

    pub(crate) fn copied(tensor: Tensor) -> Self {
        Self { dtype: tensor.dtype, shape: tensor.shape, bytes: Bytes::Private(tensor.bytes) }
    }

    /// Zeros in private memory.
    pub(crate) fn zeros(dtype: DType, shape: &[u64], bytes: u64) -> Result<Self, Error> {
        let length = usize::try_from(bytes).map_err(|error| Error::Limit { reason: error.to_string() })?;
        Ok(Self::copied(Tensor { dtype, shape: shape.to_vec(), bytes: vec![0; length] }))
    }

    /// Its slot, if it is in shared memory.
    pub(crate) fn slot(&self) -> Option<&LeasedSlot> {
        match &self.bytes {
            Bytes::Slot(slot) => Some(slot),
            Bytes::Private(_) => None,
        }
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
    #[expect(clippy::len_without_is_empty, reason = "callers do not need to know whether a tensor is empty")]
    pub fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Whether it is in shared memory.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        matches!(self.bytes, Bytes::Slot(_))
    }

    /// The bytes of its elements in row-major order, little-endian. The contents of a new buffer are unspecified.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Slot(slot) => slot.bytes(),
            Bytes::Private(bytes) => bytes,
        }
    }

    /// The bytes, for writing.
    ///
    /// # Errors
    /// [`Error::Argument`] while an operation on them is in flight, and after a session that ended with one in flight.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        match &mut self.bytes {
            Bytes::Private(bytes) => Ok(bytes),
            Bytes::Slot(slot) => slot.bytes_mut().ok_or_else(|| {
                Error::argument(
                    "an operation on the buffer is in flight; wait for it before you write to the buffer. If the session has ended, the sidecar may still read it: use a new buffer",
                )
            }),
        }
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Argument`] when they are of another type.
    pub fn elements<T: Element>(&self) -> Result<&[T], Error> {
        check_type::<T>(self.dtype)?;
        bytemuck::try_cast_slice(self.bytes()).map_err(|error| Error::argument(error.to_string()))
    }

    /// The elements, for writing.
    ///
    /// # Errors
    /// Those of [`Buffer::elements`] and [`Buffer::bytes_mut`].
    pub fn elements_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        check_type::<T>(self.dtype)?;
        bytemuck::try_cast_slice_mut(self.bytes_mut()?).map_err(|error| Error::argument(error.to_string()))
    }

    /// A reference to it, for a submission.
    #[must_use]
    pub fn tensor(&self) -> TensorRef<'_> {
        TensorRef { dtype: self.dtype, shape: &self.shape, bytes: self.bytes() }
    }

    /// A copy in private memory.
    #[must_use]
    pub fn to_tensor(&self) -> Tensor {
        Tensor { dtype: self.dtype, shape: self.shape.clone(), bytes: self.bytes().to_vec() }
    }

    /// The address of the bytes in this process, readable and writable while this value exists. A forked child sees what its
    /// parent writes there, but not the other way round.
    #[must_use]
    pub fn address(&self) -> usize {
        match &self.bytes {
            Bytes::Slot(slot) => slot.address(),
            Bytes::Private(bytes) => bytes.as_ptr().expose_provenance(),
        }
    }
}

impl<'a> From<&'a Buffer> for TensorRef<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        buffer.tensor()
    }
}

/// The bytes of a tensor.
pub(crate) fn bytes_of(dtype: DType, shape: &[u64]) -> Result<u64, Error> {
    let shape = Shape::new(shape.to_vec()).map_err(|error| Error::argument(error.to_string()))?;
    let bytes = shape.elements().checked_mul(dtype.size_bytes() as u64);
    bytes.ok_or_else(|| Error::argument(format!("a tensor of shape {shape} has too many bytes")))
}

/// What a worker has in shared memory: inputs in flight, buffers, and results that stay there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedMemory {
    /// Bytes of all segments.
    pub mapped_bytes: u64,
    /// The part of them that is in use.
    pub in_use_bytes: u64,
    /// Inputs, buffers and results that use them.
    pub slots: usize,
    /// Segments.
    pub segments: usize,
}

impl Session {
    /// Allocates a buffer in shared memory. Blocks while the arena grows.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub(crate) fn buffer(&self, dtype: DType, shape: &[u64]) -> Result<Buffer, Error> {
        drop(self.open()?);
        let bytes = bytes_of(dtype, shape)?;
        match &self.memory {
            Some(memory) if bytes > 0 => Ok(Buffer::in_slot(dtype, shape.to_vec(), memory.lease_registered(bytes)?)),
            _ => Buffer::zeros(dtype, shape, bytes),
        }
    }
}
