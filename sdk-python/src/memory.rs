//! Shared memory in Python: the owner of the bytes that arrays and tensors view.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ronde::Buffer;

/// The bytes of a result, or of a tensor to submit. Dropping it releases them. Arrays and tensors that view the bytes keep it
/// alive.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Memory {
    buffer: Buffer,
}

impl Memory {
    pub(crate) fn new(buffer: Buffer) -> Self {
        Self { buffer }
    }
}

#[pymethods]
impl Memory {
    /// The writable bytes in NumPy's array interface.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (self.buffer.len(),))?;
        interface.set_item("data", (self.buffer.address(), false))?;
        Ok(interface)
    }
}
