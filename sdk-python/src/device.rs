//! GPUs for Python: copies to them, and what this machine has.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ronde::Error;
use ronde::gpu::nccl::Nccl;
use ronde::gpu::{self, Driver, GpuError};

use crate::address::caller_stream;
use crate::errors::raise;
use crate::session::search_path;

/// A copy to a GPU that has been started.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Arrival(gpu::Arrival);

impl Arrival {
    pub(crate) fn new(arrival: gpu::Arrival) -> Self {
        Self(arrival)
    }
}

#[pymethods]
impl Arrival {
    /// Makes later work of a stream, given as its handle, wait for the copy. Does not block.
    fn order(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        py.detach(|| self.0.order(caller_stream(stream)).map_err(|error| raise(&error.into())))
    }

    /// Returns whether the copy has ended. Raises why it failed.
    fn has_occurred(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.0.has_occurred().map_err(|error| raise(&error.into())))
    }

    /// Waits until the copy has ended. Raises why it failed.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.synchronize().map_err(|error| raise(&error.into())))
    }
}

/// Returns the GPUs of this machine, each with `ordinal`, `name`, `bus_id`, `memory_bytes` and `peers`. Raises why there are
/// none.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let found = py.detach(|| -> Result<Vec<gpu::DeviceInfo>, GpuError> {
        let driver = Driver::get()?;
        (0..driver.devices()).map(|ordinal| driver.info(ordinal)).collect()
    });
    let found = found.map_err(|error| raise(&Error::from(error)))?;
    found.into_iter().map(|info| described(py, info)).collect()
}

/// Returns the number of the GPU with memory at an address. Raises ValueError if there is none, and why there are no GPUs.
#[pyfunction]
pub(crate) fn gpu_of(py: Python<'_>, address: u64) -> PyResult<u32> {
    py.detach(|| Driver::get().and_then(|driver| driver.device_with(address)))
        .map_err(|error| raise(&Error::from(error)))
}

/// Allocates memory of a GPU that a session can share with its sidecar, and returns its address. Raises RefusedError with the
/// cause "device" if there is none left, and why there are no GPUs.
#[pyfunction]
pub(crate) fn gpu_allocate(py: Python<'_>, ordinal: u32, nbytes: usize) -> PyResult<u64> {
    py.detach(|| gpu::exports::allocate(ordinal, nbytes)).map_err(|error| raise(&Error::from(error)))
}

/// Frees memory that `gpu_allocate` has allocated.
#[pyfunction]
pub(crate) fn gpu_free(py: Python<'_>, address: u64) {
    py.detach(|| gpu::exports::free(address));
}

/// Returns whether NVIDIA's driver is installed. Does not initialize it, which forked children would not survive.
#[pyfunction]
pub(crate) fn has_gpu_driver() -> bool {
    Driver::is_installed()
}

/// Returns the version of NCCL that this process would use, such as 22304. Raises why there is none that ronde supports.
#[pyfunction]
pub(crate) fn nccl_version(py: Python<'_>) -> PyResult<u32> {
    let folders = search_path(py)?;
    let found = py.detach(|| Nccl::find(&folders).map(|nccl| nccl.version_number()));
    found.map_err(|error| raise(&Error::from(error)))
}

fn described(py: Python<'_>, info: gpu::DeviceInfo) -> PyResult<Bound<'_, PyDict>> {
    let gpu::DeviceInfo { ordinal, name, bus_id, memory_bytes, peers } = info;
    let entry = PyDict::new(py);
    entry.set_item("ordinal", ordinal)?;
    entry.set_item("name", name)?;
    entry.set_item("bus_id", bus_id)?;
    entry.set_item("memory_bytes", memory_bytes)?;
    entry.set_item("peers", peers)?;
    Ok(entry)
}
