//! [`Context`]: the primary context of a device, which PyTorch uses, too, with its streams, events and registered memory.
//!
//! Dropping any of these never panics: what the driver refuses then is logged, because the process may be ending. In a
//! forked child nothing is called.

#![allow(unsafe_code, reason = "calls of the driver")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUresult, CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use ronde_shm::{LeasedSlot, SegmentHold, SharedSlot};

use super::Driver;
use super::table::{DriverTable, Handle};
use super::vmm::VmmTable;
use crate::error::GpuError;
use crate::span::{CallerStream, DeviceSpan};

/// The primary context of a device, retained. Threads may share it.
#[derive(Debug)]
pub struct Context {
    driver: Arc<Driver>,
    ordinal: u32,
    device: c_int,
    handle: Handle,
}

impl Context {
    /// Retains the primary context of a device, which creates it in a process that has not used the device.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for a number without a device; [`GpuError::OutOfMemory`] and the driver's other errors.
    pub fn retain(driver: &Arc<Driver>, ordinal: u32) -> Result<Arc<Self>, GpuError> {
        let device = driver.device(ordinal)?;
        let mut handle = 0;
        // SAFETY: the place for the result is a local of the right type.
        let code = unsafe { (driver.table.cuDevicePrimaryCtxRetain)(&raw mut handle, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Self { driver: Arc::clone(driver), ordinal, device, handle }))
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Describes the device.
    ///
    /// # Errors
    /// The driver's.
    pub fn info(&self) -> Result<super::DeviceInfo, GpuError> {
        self.driver.info(self.ordinal)
    }

    /// The driver's handle of the device.
    pub(super) fn device(&self) -> c_int {
        self.device
    }

    /// The driver's functions for memory that processes share.
    pub(super) fn vmm(&self) -> &VmmTable {
        &self.driver.vmm
    }

    /// Calls the driver with this context on top of the calling thread's stack.
    pub(super) fn call(
        &self,
        function: &'static str,
        call: impl FnOnce(&DriverTable) -> c_int,
    ) -> Result<(), GpuError> {
        let code = self.with(|| call(&self.driver.table))?;
        self.driver.check(function, code)
    }

    /// Acts with this context on top of the calling thread's stack.
    pub(crate) fn with<R>(&self, act: impl FnOnce() -> R) -> Result<R, GpuError> {
        let Driver { table, .. } = &*self.driver;
        self.driver.check_process()?;
        // SAFETY: the context is retained for the life of this value.
        self.driver.check("cuCtxPushCurrent", unsafe { (table.cuCtxPushCurrent_v2)(self.handle) })?;
        let acted = act();
        let mut popped = 0;
        // SAFETY: the place for the result is a local of the right type, and the stack has the context pushed above.
        let code = unsafe { (table.cuCtxPopCurrent_v2)(&raw mut popped) };
        self.driver.check("cuCtxPopCurrent", code).map(|()| acted)
    }

    /// Calls the driver when a value is dropped.
    pub(super) fn call_on_drop(&self, function: &'static str, call: impl FnOnce(&DriverTable) -> c_int) {
        if !self.driver.is_own_process() {
            return;
        }
        if let Err(error) = self.call(function, call) {
            tracing::debug!(target: "ronde", %error, "a GPU's resource was not released");
        }
    }

    /// Checks that a stream does not capture a CUDA graph, which could not contain what ronde does on the host.
    pub(super) fn check_not_capturing(&self, stream: CallerStream) -> Result<(), GpuError> {
        let mut status = 0;
        // SAFETY: the place for the result is a local of the right type; the stream exists by the contract of
        // `CallerStream::new`.
        self.call("cuStreamIsCapturing", |table| unsafe {
            (table.cuStreamIsCapturing)(stream.handle(), &raw mut status)
        })?;
        if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int {
            return Ok(());
        }
        Err(GpuError::argument(
            "the stream captures a CUDA graph, and an operation of ronde cannot be part of one; submit it, and wait for it, outside the capture",
        ))
    }

    /// Checks that memory is this device's: its first and its last byte. Between them there may be several allocations, as in
    /// PyTorch's expandable segments.
    ///
    /// # Errors
    /// [`GpuError::Argument`] with the memory's actual place.
    pub(crate) fn check_span(&self, span: &DeviceSpan) -> Result<(), GpuError> {
        let (address, ordinal) = (span.address(), self.ordinal);
        if span.device() != ordinal {
            let device = span.device();
            return Err(GpuError::argument(format!(
                "the tensor is on GPU {device}, and this copy is one of GPU {ordinal}"
            )));
        }
        let Some(rest) = span.bytes().checked_sub(1) else { return Ok(()) };
        let found = self.with(|| self.driver.device_of(address))??;
        if found != ordinal {
            return Err(GpuError::argument(format!(
                "the memory at {address:#x} is on GPU {found}, but the tensor was given as one on GPU {ordinal}; move it there"
            )));
        }
        if self.with(|| self.driver.device_of(address + rest as u64))? != Ok(ordinal) {
            let bytes = span.bytes();
            return Err(GpuError::argument(format!(
                "the tensor of {bytes} bytes at {address:#x} reaches past the memory of GPU {ordinal} there"
            )));
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.driver.is_own_process() {
            // SAFETY: retained once by this value, and this is the only release.
            let code = unsafe { (self.driver.table.cuDevicePrimaryCtxRelease_v2)(self.device) };
            if let Err(error) = self.driver.check("cuDevicePrimaryCtxRelease", code) {
                tracing::debug!(target: "ronde", %error, "a GPU's context was not released");
            }
        }
    }
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Device memory to a slot.
    ToHost,
    /// A slot to device memory.
    ToDevice,
}

/// A stream of ronde's own. It does not wait for the legacy default stream, nor that for it.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] and the driver's other errors.
    pub fn new(context: &Arc<Context>) -> Result<Self, GpuError> {
        let mut handle = 0;
        // SAFETY: the place for the result is a local of the right type.
        context.call("cuStreamCreate", |table| unsafe {
            (table.cuStreamCreate)(&raw mut handle, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint)
        })?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// The context of the stream's device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Lets this thread query events while other threads capture CUDA graphs: in the default mode a query makes their captures
    /// invalid.
    ///
    /// # Errors
    /// The driver's.
    pub fn relax_capture(&self) -> Result<(), GpuError> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the place for the mode is a local of the right type.
        self.context.call("cuThreadExchangeStreamCaptureMode", |table| unsafe {
            (table.cuThreadExchangeStreamCaptureMode)(&raw mut mode)
        })
    }

    /// Makes later work of this stream wait for an event, without blocking the thread.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        event.order(self.handle)
    }

    /// Starts a copy between `range` of the memory and of the slot. The caller keeps both, and leaves them alone, until an
    /// event after the copy has occurred.
    pub(crate) fn copy(
        &self,
        direction: Direction,
        memory: &DeviceSpan,
        slot: &LeasedSlot,
        range: std::ops::Range<usize>,
    ) -> Result<(), GpuError> {
        self.copy_at(direction, memory, (slot.address(), slot.slot().len), range)
    }

    /// Starts a copy between all of the memory and a shared slot from an offset on, as [`Stream::copy`] does.
    pub(crate) fn copy_shared(
        &self,
        direction: Direction,
        memory: &DeviceSpan,
        (slot, offset): (&SharedSlot, usize),
    ) -> Result<(), GpuError> {
        let room = slot.slot().len.checked_sub(offset as u64);
        let room = room.ok_or_else(|| GpuError::argument(format!("byte {offset} is after the end of its slot")))?;
        self.copy_at(direction, memory, (slot.address() + offset, room), 0..memory.bytes())
    }

    fn copy_at(
        &self,
        direction: Direction,
        memory: &DeviceSpan,
        (host, room): (usize, u64),
        range: std::ops::Range<usize>,
    ) -> Result<(), GpuError> {
        let (offset, bytes) = (range.start, range.len());
        if range.end > memory.bytes() || range.end as u64 > room {
            return Err(GpuError::argument(format!("a copy of bytes {range:?} of {} bytes", memory.bytes())));
        }
        let (device, host) = (memory.address() + offset as u64, host + offset);
        let host = std::ptr::with_exposed_provenance_mut::<c_void>(host);
        // SAFETY: both ranges were checked above to lie within the device's memory and the slot. Until the copy ends, the
        // span's owner keeps that memory (contract of `DeviceSpan::new`), and the callers, `Staging` and `Transfers`, keep the
        // slot: they own it and make no reference to its bytes.
        self.context.call("cuMemcpyAsync", |table| unsafe {
            match direction {
                Direction::ToHost => (table.cuMemcpyDtoHAsync_v2)(host, device, bytes, self.handle),
                Direction::ToDevice => (table.cuMemcpyHtoDAsync_v2)(device, host.cast_const(), bytes, self.handle),
            }
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by this value and destroyed once. The driver finishes the stream's work by itself.
        self.context.call_on_drop("cuStreamDestroy", |table| unsafe { (table.cuStreamDestroy_v2)(self.handle) });
    }
}

/// A point in the work of a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

impl Event {
    /// An event after all work that `stream` has now.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] and the driver's other errors.
    pub fn after(stream: &Stream) -> Result<Self, GpuError> {
        Self::recorded(&stream.context, stream.handle)
    }

    /// An event after all work that a stream of the caller's has now.
    ///
    /// # Errors
    /// Those of [`Event::after`], and [`GpuError::Argument`] while the stream captures a CUDA graph.
    pub fn after_caller(context: &Arc<Context>, stream: CallerStream) -> Result<Self, GpuError> {
        context.check_not_capturing(stream)?;
        Self::recorded(context, stream.handle())
    }

    fn recorded(context: &Arc<Context>, stream: Handle) -> Result<Self, GpuError> {
        let (mut handle, flags) =
            (0, CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint | CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint);
        // SAFETY: the place for the result is a local of the right type.
        context.call("cuEventCreate", |table| unsafe { (table.cuEventCreate)(&raw mut handle, flags) })?;
        let event = Self { context: Arc::clone(context), handle };
        // SAFETY: the event is new; the stream is one of `Stream`, or the caller's by the contract of `CallerStream::new`.
        context.call("cuEventRecord", |table| unsafe { (table.cuEventRecord)(event.handle, stream) })?;
        Ok(event)
    }

    /// Makes later work of a stream of the caller's wait for the event, without blocking the thread.
    ///
    /// # Errors
    /// The driver's, and [`GpuError::Argument`] while the stream captures a CUDA graph.
    pub fn order_caller(&self, stream: CallerStream) -> Result<(), GpuError> {
        self.context.check_not_capturing(stream)?;
        self.order(stream.handle())
    }

    fn order(&self, stream: Handle) -> Result<(), GpuError> {
        // SAFETY: the event lives; the stream is one of `Stream`, or the caller's by the contract of `CallerStream::new`.
        self.context.call("cuStreamWaitEvent", |table| unsafe { (table.cuStreamWaitEvent)(stream, self.handle, 0) })
    }

    /// Whether the event has occurred.
    ///
    /// # Errors
    /// The failure of the work before it.
    pub fn has_occurred(&self) -> Result<bool, GpuError> {
        let mut is_pending = false;
        let queried = self.context.call("cuEventQuery", |table| {
            // SAFETY: the event lives.
            let code = unsafe { (table.cuEventQuery)(self.handle) };
            is_pending = code == CUresult::CUDA_ERROR_NOT_READY as c_int;
            if is_pending { CUresult::CUDA_SUCCESS as c_int } else { code }
        });
        queried.map(|()| !is_pending)
    }

    /// Blocks the thread until the event has occurred.
    ///
    /// # Errors
    /// The failure of the work before it.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        // SAFETY: the event lives.
        self.context.call("cuEventSynchronize", |table| unsafe { (table.cuEventSynchronize)(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by this value and destroyed once. The driver keeps what still waits for it.
        self.context.call_on_drop("cuEventDestroy", |table| unsafe { (table.cuEventDestroy_v2)(self.handle) });
    }
}

/// A registered (page-locked) segment of shared memory. It stays mapped while this value lives.
#[derive(Debug)]
pub(crate) struct Registration {
    context: Arc<Context>,
    /// Keeps the segment mapped.
    segment: SegmentHold,
}

impl Registration {
    /// Registers a segment, at about 1 GB/s.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] when the system cannot lock so much memory, and the driver's other errors.
    pub(crate) fn new(context: &Arc<Context>, segment: SegmentHold) -> Result<Self, GpuError> {
        let (address, bytes) = (std::ptr::with_exposed_provenance_mut::<c_void>(segment.address()), segment.len());
        // SAFETY: `segment` keeps so many bytes mapped there.
        context.call("cuMemHostRegister", |table| unsafe { (table.cuMemHostRegister_v2)(address, bytes, PORTABLE) })?;
        Ok(Self { context: Arc::clone(context), segment })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let address = std::ptr::with_exposed_provenance_mut::<c_void>(self.segment.address());
        // SAFETY: registered by this value and released once, before the mapping is.
        self.context.call_on_drop("cuMemHostUnregister", |table| unsafe { (table.cuMemHostUnregister)(address) });
    }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for all contexts of the process.
const PORTABLE: c_uint = 1;
