//! Private buffers: the values of registers, and the buffers that are kept for reuse.

use bytes::{Bytes, BytesMut};
use ronde_wire::limits;

/// The value of a register. A sent buffer stays readable, and is writable again once no one else holds it.
#[derive(Debug, Default)]
pub(super) enum Value {
    /// No value.
    #[default]
    Empty,
    /// A buffer with a single owner.
    Private(BytesMut),
    /// A buffer that a port or a receive buffer may also hold.
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

    /// The bytes for sending, without a copy.
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

    /// The buffer for writing, if no one else holds it.
    pub(super) fn try_private(self) -> Result<BytesMut, Self> {
        match self {
            Self::Empty => Err(Self::Empty),
            Self::Private(buffer) => Ok(buffer),
            Self::Shared(bytes) => bytes.try_into_mut().map_err(Self::Shared),
        }
    }
}

/// A pool of buffers, which sub-schedules leave to later ones.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: Vec<BytesMut>,
    free_bytes: usize,
}

/// Bounds what an idle executor keeps: eight chunks of the largest size, or more smaller ones.
const FREE_BYTES_MAX: usize = 8 * limits::CHUNK_BYTES_MAX;
/// Bounds the search for one that fits: two for each member of a direct plan among 32.
const FREE_MAX: usize = 64;

impl Buffers {
    /// A buffer of some length with unspecified contents: the smallest one that is large enough, or a new one. A new
    /// one replaces an old one, so that the pool adapts to the lengths in use.
    pub(super) fn take(&mut self, len: usize) -> BytesMut {
        let fitting = self.free.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= len);
        match fitting.min_by_key(|(_, buffer)| buffer.capacity()).map(|(index, _)| index) {
            Some(index) => {
                let mut buffer = self.free.swap_remove(index);
                self.free_bytes -= buffer.capacity();
                buffer.resize(len, 0);
                buffer
            }
            None => {
                self.free_bytes -= self.free.pop().map_or(0, |unfit| unfit.capacity());
                BytesMut::zeroed(len)
            }
        }
    }

    /// A buffer of some length with unspecified contents: that of the value if possible, or another one.
    pub(super) fn renew(&mut self, value: Value, len: usize) -> BytesMut {
        match value.try_private() {
            Ok(mut buffer) if buffer.capacity() >= len => {
                buffer.resize(len, 0);
                buffer
            }
            Ok(small) => {
                self.give(Value::Private(small));
                self.take(len)
            }
            Err(_) => self.take(len),
        }
    }

    pub(super) fn give(&mut self, value: Value) {
        if let Ok(buffer) = value.try_private()
            && buffer.capacity() > 0
            && self.free.len() < FREE_MAX
            && self.free_bytes + buffer.capacity() <= FREE_BYTES_MAX
        {
            self.free_bytes += buffer.capacity();
            self.free.push(buffer);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.free_bytes as u64
    }
}
