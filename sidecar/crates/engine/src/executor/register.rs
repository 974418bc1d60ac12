//! Private buffers: the registers of a strand, and the few buffers that are kept for reuse.

use bytes::{Bytes, BytesMut};

/// What a register holds. A buffer that was sent stays readable; it is written again once nobody else holds it.
#[derive(Debug, Default)]
pub(super) enum Value {
    /// Nothing, or nothing that may be read again.
    #[default]
    Empty,
    /// A buffer of our own.
    Private(BytesMut),
    /// A buffer that a port or a receive buffer may hold as well.
    Shared(Bytes),
}

impl Value {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Empty => &[],
            Self::Private(buffer) => buffer,
            Self::Shared(bytes) => bytes,
        }
    }

    /// The bytes for sending, not copied.
    pub(super) fn share(&mut self) -> Bytes {
        match std::mem::take(self) {
            Self::Empty => Bytes::new(),
            Self::Private(buffer) => {
                let bytes = buffer.freeze();
                *self = Self::Shared(bytes.clone());
                bytes
            }
            Self::Shared(bytes) => {
                *self = Self::Shared(bytes.clone());
                bytes
            }
        }
    }

    /// The buffer for writing, if nobody else holds it.
    pub(super) fn try_private(self) -> Result<BytesMut, Self> {
        match self {
            Self::Empty => Err(Self::Empty),
            Self::Private(buffer) => Ok(buffer),
            Self::Shared(bytes) => bytes.try_into_mut().map_err(Self::Shared),
        }
    }
}

/// Buffers between two uses: a strand that is over leaves them to the next one.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: Vec<BytesMut>,
}

/// Bounds what an idle executor keeps: as many chunks.
const FREE_MAX: usize = 8;

impl Buffers {
    /// A buffer of some length with any content.
    pub(super) fn take(&mut self, len: usize) -> BytesMut {
        match self.free.pop() {
            Some(mut buffer) if buffer.capacity() >= len => {
                buffer.resize(len, 0);
                buffer
            }
            _ => BytesMut::zeroed(len),
        }
    }

    /// Makes the register's own buffer, or another, one of some length with any content.
    pub(super) fn renew(&mut self, value: Value, len: usize) -> BytesMut {
        match value.try_private() {
            Ok(mut buffer) if buffer.capacity() >= len => {
                buffer.resize(len, 0);
                buffer
            }
            _ => self.take(len),
        }
    }

    pub(super) fn give(&mut self, value: Value) {
        if self.free.len() < FREE_MAX
            && let Ok(buffer) = value.try_private()
            && buffer.capacity() > 0
        {
            self.free.push(buffer);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.free.iter().map(|buffer| buffer.capacity() as u64).sum()
    }
}
