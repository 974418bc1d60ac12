//! [`DeviceBuffer`]: device memory of ronde's own, and copies within a device.

#![allow(unsafe_code, reason = "calls of the driver")]

use std::ffi::c_void;
use std::sync::Arc;

use super::context::{Context, Event, Stream};
use crate::error::GpuError;
use crate::span::{CallerStream, DeviceSpan};

/// Device memory that this process has allocated. Its contents are unspecified at first.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes, at least 1.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] and the driver's other errors.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, GpuError> {
        let mut address = 0;
        // SAFETY: the place for the result is a local of the right type.
        context.call("cuMemAlloc", |table| unsafe { (table.cuMemAlloc_v2)(&raw mut address, bytes.max(1)) })?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// The length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All of it, which keeps the buffer.
    #[must_use]
    pub fn span(self: &Arc<Self>) -> DeviceSpan {
        let keep: crate::span::Keep = Arc::clone(self) as _;
        // SAFETY: the span keeps the buffer, whose memory lives as long as it does. It is ronde's own, and all work on it is
        // ordered by streams and events.
        unsafe { DeviceSpan::new(self.context.ordinal(), self.address, self.bytes, Some(keep)) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by this value and freed once. Whoever drops it has seen the end of the work on it.
        self.context.call_on_drop("cuMemFree", |table| unsafe { (table.cuMemFree_v2)(self.address) });
    }
}

impl Stream {
    /// Starts to copy device memory to as many bytes of device memory. The caller keeps both until an event after it.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of other lengths; the driver's.
    pub fn copy_device(&self, source: &DeviceSpan, target: &DeviceSpan) -> Result<(), GpuError> {
        copy(self.context(), self.handle(), source, target)
    }
}

impl Context {
    /// Starts to copy device memory to as many bytes of device memory on a stream of the caller's. Returns the event after
    /// the copy; the caller of this function keeps both spans until it has occurred.
    ///
    /// # Errors
    /// Those of [`Stream::copy_device`], and [`GpuError::Argument`] while the stream captures a CUDA graph.
    pub fn copy_on(
        self: &Arc<Self>,
        stream: CallerStream,
        source: &DeviceSpan,
        target: &DeviceSpan,
    ) -> Result<Arc<Event>, GpuError> {
        self.check_not_capturing(stream)?;
        copy(self, stream.handle(), source, target)?;
        Event::after_caller(self, stream).map(Arc::new)
    }
}

impl Context {
    /// Copies device memory to main memory, and waits for that. The work that computes it has ended.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of another length; the driver's.
    pub fn read(&self, source: &DeviceSpan, target: &mut [u8]) -> Result<(), GpuError> {
        let (from, bytes) = (source.address(), source.bytes());
        if bytes != target.len() {
            return Err(GpuError::argument(format!("{bytes} bytes into {}; give as many", target.len())));
        }
        self.check_span(source)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = target.as_mut_ptr().cast::<c_void>();
        // SAFETY: the span was checked to be this device's, and the target has as many bytes. The call returns after the copy.
        self.call("cuMemcpyDtoH", |table| unsafe { (table.cuMemcpyDtoH_v2)(to, from, bytes) })
    }
}

fn copy(context: &Context, stream: usize, source: &DeviceSpan, target: &DeviceSpan) -> Result<(), GpuError> {
    let (from, to, bytes) = (source.address(), target.address(), source.bytes());
    if bytes != target.bytes() {
        let given = target.bytes();
        return Err(GpuError::argument(format!("a copy of {bytes} bytes to {given} bytes; give as many")));
    }
    context.check_span(source)?;
    context.check_span(target)?;
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: both spans were checked to be this device's, and their owners keep them (contract of `DeviceSpan::new`). The
    // stream is one of `Stream`, or the caller's by the contract of `CallerStream::new`.
    context.call("cuMemcpyDtoDAsync", |table| unsafe { (table.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) })
}
