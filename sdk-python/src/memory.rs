//! A result that stays in shared memory, as Python holds it: the owner of the bytes that arrays and tensors view.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ronde::Mapped;

use crate::errors::raise;

/// Bytes of a result. They are given back when this dies, which the last array or tensor that views them keeps alive.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Memory {
    mapped: Mapped,
}

impl Memory {
    pub(crate) fn new(mapped: Mapped) -> Self {
        Self { mapped }
    }
}

#[pymethods]
impl Memory {
    /// The bytes, writable, as NumPy takes them in.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let address = self.mapped.address().map_err(|error| raise(&error))?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (self.mapped.len(),))?;
        interface.set_item("data", (address, false))?;
        Ok(interface)
    }
}
