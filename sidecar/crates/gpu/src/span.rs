//! [`DeviceSpan`] and [`CallerStream`]: memory and streams that the caller owns.

#![allow(unsafe_code, reason = "addresses and handles that the caller vouches for")]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::GpuError;

/// Keeps the caller's memory until the last copy from or to it has ended.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Bytes of device memory, such as a contiguous tensor.
#[derive(Clone)]
pub struct DeviceSpan {
    device: u32,
    address: u64,
    bytes: usize,
    keep: Option<Keep>,
}

impl DeviceSpan {
    /// Describes `bytes` bytes at `address` of the device with number `device`.
    ///
    /// # Safety
    /// While `keep` lives, and for its own life if that is `None`, this memory stays allocated. Nothing but work of streams
    /// that are ordered with the copies uses it in a way that conflicts with them.
    #[must_use]
    pub unsafe fn new(device: u32, address: u64, bytes: usize, keep: Option<Keep>) -> Self {
        Self { device, address, bytes, keep }
    }

    /// The same memory, kept by a value that owns this description of it.
    #[must_use]
    pub fn and_keep(self, owner: impl FnOnce(Self) -> Keep) -> Self {
        let Self { device, address, bytes, .. } = self;
        Self { device, address, bytes, keep: Some(owner(self)) }
    }

    /// The device's number.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The address, which the host must not access.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A part of it, which keeps the same memory.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for a range that is not within the span.
    pub fn part(&self, range: Range<usize>) -> Result<Self, GpuError> {
        if range.start > range.end || range.end > self.bytes {
            return Err(GpuError::argument(format!("bytes {range:?} of {} bytes", self.bytes)));
        }
        Ok(Self { address: self.address + range.start as u64, bytes: range.len(), ..self.clone() })
    }
}

impl fmt::Debug for DeviceSpan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, address, bytes, keep } = self;
        write!(formatter, "{bytes} bytes at {address:#x} of GPU {device} (kept: {})", keep.is_some())
    }
}

/// A stream of the caller's, as CUDA's handle: 0 is the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerStream(usize);

impl CallerStream {
    /// The legacy default stream, which always exists.
    pub const LEGACY: Self = Self(0);

    /// Names a stream by its handle.
    ///
    /// # Safety
    /// It is a stream of the device with whose memory it is used, and it exists whenever the value is used.
    #[must_use]
    pub unsafe fn new(handle: usize) -> Self {
        Self(handle)
    }

    pub(crate) fn handle(self) -> usize {
        self.0
    }
}
