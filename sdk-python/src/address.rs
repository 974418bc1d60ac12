//! Access to the memory of tensors by address and length.
//!
//! Safe Rust cannot express the contract, so the callers uphold it: an address belongs to a live, contiguous tensor with at
//! least that many bytes. `ronde/tensors.py` holds the tensor for the whole call and does not write to it from another thread
//! meanwhile, as for every function of NumPy or PyTorch that releases the interpreter lock. `frameworks/xla/call.rs` takes
//! addresses and dimensions of XLA, which keeps the tensors until the call is complete.

#![allow(unsafe_code, reason = "addresses of tensors that Python owns, under the module's contract")]

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::{FromPyObject, Py, PyAny, PyResult};
use ronde::gpu::{CallerStream, DeviceSpan};

/// The bytes of a tensor to read.
pub(crate) struct Source(Span);

impl Source {
    pub(crate) fn new(address: usize, bytes: usize) -> PyResult<Self> {
        Span::new(address, bytes).map(Self)
    }

    /// Calls `read` with the bytes.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        read(self.bytes())
    }

    /// Calls `read` with the bytes of several tensors.
    pub(crate) fn with_all<R>(sources: &[&Self], read: impl FnOnce(&[&[u8]]) -> R) -> R {
        let contents: Vec<&[u8]> = sources.iter().map(|source| source.bytes()).collect();
        read(&contents)
    }

    /// Returns the bytes. They live as long as the source, which does not outlive the call from Python that created it.
    fn bytes(&self) -> &[u8] {
        let Span { address, bytes } = self.0;
        if bytes == 0 {
            return &[];
        }
        // SAFETY: `Span::new` has checked that the address is not null and the length is that of a possible object. The
        // module's callers guarantee `bytes` readable bytes at that address for the duration of the call. Bytes have no
        // invalid values and no alignment.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
    }
}

/// The bytes of a tensor to write.
pub(crate) struct Target(Span);

impl Target {
    pub(crate) fn new(address: usize, bytes: usize) -> PyResult<Self> {
        Span::new(address, bytes).map(Self)
    }

    /// Calls `write` with the bytes.
    pub(crate) fn with<R>(&mut self, write: impl FnOnce(&mut [u8]) -> R) -> R {
        let Span { address, bytes } = self.0;
        if bytes == 0 {
            return write(&mut []);
        }
        // SAFETY: as for a source. The caller in Python checks that the bytes are writable, and by the module's contract
        // nothing else uses them during the call.
        write(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }
}

/// A tensor in device memory, in Python: its address, its GPU's number, the handle of the stream that computes it, and its
/// owner. By the module's contract the address belongs to a live, contiguous tensor of that GPU while the owner exists, and the
/// stream exists during the call that passes it.
#[derive(FromPyObject)]
pub(crate) struct Device {
    ordinal: u32,
    stream: usize,
    owner: Py<PyAny>,
}

impl Device {
    /// The tensor's memory. Copies keep the owner. The thread that copies drops it without the interpreter's lock, for which it
    /// must not wait: PyO3 then releases it with the next call from Python.
    pub(crate) fn memory(self, address: usize, bytes: usize) -> (DeviceSpan, CallerStream) {
        let (stream, keep) = (caller_stream(self.stream), Arc::new(self.owner));
        // SAFETY: by the module's contract the memory lives as long as the owner, which the span keeps.
        (unsafe { DeviceSpan::new(self.ordinal, address as u64, bytes, Some(keep)) }, stream)
    }
}

/// A stream by its handle.
pub(crate) fn caller_stream(handle: usize) -> CallerStream {
    // SAFETY: by the module's contract it exists during the call, and later it is only compared.
    unsafe { CallerStream::new(handle) }
}

#[derive(Clone, Copy)]
struct Span {
    address: usize,
    bytes: usize,
}

impl Span {
    fn new(address: usize, bytes: usize) -> PyResult<Self> {
        let end = address.checked_add(bytes);
        if bytes > isize::MAX as usize || end.is_none() || (address == 0 && bytes > 0) {
            return Err(PyValueError::new_err(format!("no tensor of {bytes} bytes can be at address {address:#x}")));
        }
        Ok(Self { address, bytes })
    }
}
