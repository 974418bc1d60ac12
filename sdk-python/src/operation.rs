//! Handles of operations in flight, for Python.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use ronde::blocking::{Handle, Progress};
use ronde::{Detail, Error};

use crate::address::{Device, Target};
use crate::device::Arrival;
use crate::errors::raise;
use crate::memory::Memory;
use crate::wait_in_slices;

/// An operation in flight. Dropping it withdraws the operation unless it is complete.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Operation {
    /// Locked for at most one slice of a wait. Threads take the lock detached or without waiting.
    handle: Mutex<Handle>,
}

impl Operation {
    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle: Mutex::new(handle) }
    }

    /// Locks the handle without waiting: another thread may wait on this operation, and in a forked child no thread would
    /// release the lock.
    fn lock(&self) -> PyResult<MutexGuard<'_, Handle>> {
        match self.handle.try_lock() {
            Ok(handle) => Ok(handle),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(PyRuntimeError::new_err("another thread waits on this operation")),
        }
    }
}

impl Operation {
    fn detail(&self) -> PyResult<Detail> {
        let detail = self.lock()?.detail().cloned();
        detail.map_err(|error| raise(&error))
    }
}

#[pymethods]
impl Operation {
    /// Returns whether it is complete or has failed; false also while another thread waits on it.
    fn poll(&self) -> bool {
        self.lock().is_ok_and(|handle| handle.poll())
    }

    /// Its name, by which ranks match operations.
    #[getter]
    fn name(&self) -> PyResult<String> {
        let name = self.lock()?.name().map(str::to_owned);
        name.map_err(|error| raise(&error))
    }

    /// Waits at most `timeout` seconds (None: no limit). Returns whether it is complete or has failed.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = match timeout {
            None => None,
            Some(seconds) => {
                let duration =
                    Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(error.to_string()))?;
                Instant::now().checked_add(duration)
            }
        };
        wait_in_slices(py, |slice| {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let ready = self.lock()?.wait_timeout(left.map_or(slice, |left| left.min(slice)));
            match ready.map_err(|error| raise(&error))? {
                Progress::Ready => Ok(Some(true)),
                Progress::NotReady if left.is_some_and(|left| left.is_zero()) => Ok(Some(false)),
                Progress::NotReady => Ok(None),
            }
        })
    }

    /// Returns the shape of the result, once it is complete. Raises the error if it failed.
    fn shape(&self) -> PyResult<Vec<u64>> {
        let shape = self.lock()?.shape().map(|shape| shape.dimensions().to_vec());
        shape.map_err(|error| raise(&error))
    }

    /// Returns the type of the result, once it is complete. Raises the error if it failed.
    fn dtype(&self) -> PyResult<&'static str> {
        let dtype = self.lock()?.dtype().map(ronde::DType::name);
        dtype.map_err(|error| raise(&error))
    }

    /// Returns the rows that a complete all-to-all received from each rank. Raises the error if it failed.
    fn splits(&self) -> PyResult<Vec<u64>> {
        match self.detail()? {
            Detail::Splits(splits) => Ok(splits),
            other => Err(lacks("splits", &other)),
        }
    }

    /// Returns the rank that joined last, for a complete join. Raises the error if it failed.
    fn last_joined(&self) -> PyResult<u32> {
        match self.detail()? {
            Detail::LastJoined(rank) => Ok(rank.0),
            other => Err(lacks("the rank that joined last", &other)),
        }
    }

    /// Returns the rank that sent a received message. Raises the error if the operation failed.
    fn source(&self) -> PyResult<u32> {
        match self.detail()? {
            Detail::Source(rank) => Ok(rank.0),
            _ => Err(PyValueError::new_err(
                "this operation receives no message, so it has no source; ask the handle of a recv",
            )),
        }
    }

    /// Returns the number of an added process set. Raises the error if it failed.
    fn set_id(&self) -> PyResult<u32> {
        match self.detail()? {
            Detail::Set(set) => Ok(set.0),
            other => Err(lacks("the process set's number", &other)),
        }
    }

    /// Returns the result if it stays in shared memory, or None if `read_into` has to copy it. Raises the error if it failed.
    fn take_mapped(&self) -> PyResult<Option<Memory>> {
        let mapped = self.lock()?.take_mapped();
        mapped.map(|mapped| mapped.map(Memory::new)).map_err(|error| raise(&error))
    }

    /// Whether its session sends tensors inside messages, so that `deliver` fails.
    #[getter]
    fn is_inline(&self) -> PyResult<bool> {
        Ok(self.lock()?.is_inline())
    }

    /// Starts to copy the result to `address` of a GPU, where there are exactly `nbytes` bytes, and returns at once. `device` is
    /// as for `Session.submit`; the copy is ordered after the present work of its stream. With `at_submission`, and if the input
    /// was of the same GPU and stream, it is ordered after the work at the time of the submission. Call it once only.
    #[pyo3(signature = (device, address, nbytes, *, at_submission=false))]
    fn deliver(
        &self,
        py: Python<'_>,
        device: Device,
        address: usize,
        nbytes: usize,
        at_submission: bool,
    ) -> PyResult<Arrival> {
        let (memory, stream) = device.memory(address, nbytes);
        py.detach(|| {
            let delivered = self.lock()?.deliver(memory, stream, at_submission);
            delivered.map(Arrival::new).map_err(|error| raise(&error))
        })
    }

    /// Copies the result to `address`, where there must be exactly `nbytes` bytes. Call it once only.
    fn read_into(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<()> {
        let mut target = Target::new(address, nbytes)?;
        py.detach(|| {
            let outcome = self.lock().map(|mut handle| target.with(|bytes| handle.read_into(bytes)))?;
            outcome.map_err(|error| raise(&error))
        })
    }
}

fn lacks(what: &str, detail: &Detail) -> PyErr {
    let reason = format!("the answer to the operation lacks {what}: {detail:?}");
    raise(&Error::Protocol { reason })
}
