//! The memory of Python's tensors, by address and length. The one file of this crate with unsafe code.
//!
//! The contract that safe Rust cannot express is kept by `ronde/tensors.py`, the only caller: an address is that of a live,
//! contiguous tensor with at least that many bytes, which its caller holds for the whole call and, as for every function of
//! NumPy or PyTorch that releases the interpreter lock, does not write in another thread meanwhile.

#![allow(unsafe_code, reason = "addresses of tensors that Python owns; see the module's contract")]

use pyo3::PyResult;
use pyo3::exceptions::PyValueError;

/// The bytes of a tensor that is read.
pub(crate) struct Source(Span);

impl Source {
    pub(crate) fn new(address: usize, bytes: usize) -> PyResult<Self> {
        Span::new(address, bytes).map(Self)
    }

    /// Gives the bytes to `read`.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        read(self.bytes())
    }

    /// Gives the bytes of several tensors to `read`.
    pub(crate) fn with_all<R>(sources: &[Self], read: impl FnOnce(&[&[u8]]) -> R) -> R {
        let contents: Vec<&[u8]> = sources.iter().map(Self::bytes).collect();
        read(&contents)
    }

    /// Only for as long as the source itself, which does not outlive the call from Python that made it.
    fn bytes(&self) -> &[u8] {
        let Span { address, bytes } = self.0;
        if bytes == 0 {
            return &[];
        }
        // SAFETY: `Span::new` has checked that the address is not null and the length is that of a possible object. That
        // `bytes` readable bytes lie there for the duration of the call is the contract of the module's only caller. Bytes have
        // no invalid values and no alignment.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
    }
}

/// The bytes of a tensor that is written.
pub(crate) struct Target(Span);

impl Target {
    pub(crate) fn new(address: usize, bytes: usize) -> PyResult<Self> {
        Span::new(address, bytes).map(Self)
    }

    /// Gives the bytes to `write`.
    pub(crate) fn with<R>(&mut self, write: impl FnOnce(&mut [u8]) -> R) -> R {
        let Span { address, bytes } = self.0;
        if bytes == 0 {
            return write(&mut []);
        }
        // SAFETY: as for a source; that the bytes are writable is checked by the caller in Python, and nobody else uses
        // them during the call by the module's contract.
        write(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }
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
            return Err(PyValueError::new_err(format!("no tensor of {bytes} bytes can lie at address {address:#x}")));
        }
        Ok(Self { address, bytes })
    }
}
