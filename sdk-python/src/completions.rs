//! A counter of completed operations that no thread waits for.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Counts operations submitted with `notify` that complete or fail while no thread waits for them. The end of the session
/// counts, too.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Completions(ronde::Completions);

impl Completions {
    pub(crate) fn new(completions: ronde::Completions) -> Self {
        Self(completions)
    }
}

#[pymethods]
impl Completions {
    /// Wakes all waiting threads, as a completion does.
    fn wake(&self) {
        self.0.wake();
    }

    /// Waits at most `timeout` seconds until the count is no longer `seen`; returns the count. It does not check for
    /// signals, so call it from a thread other than the main one.
    fn wait(&self, py: Python<'_>, seen: u64, timeout: f64) -> PyResult<u64> {
        let timeout = Duration::try_from_secs_f64(timeout).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(py.detach(|| self.0.wait(seen, timeout)))
    }
}
