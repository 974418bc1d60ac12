//! `ronde._ronde`: the blocking client for Python. The package `ronde` wraps it; nothing here is for users.
//!
//! Tensors are passed as address and length, because the stable ABI of Python 3.9 has no buffer protocol. Unsafe code
//! is in `address.rs`, and in `frameworks`, for functions of TensorFlow that it finds at run time and for calls of XLA.
//! Blocking calls detach from the interpreter and wait in slices, between which they check for signals. No lock is held
//! while attached.

#![deny(unsafe_code)]

mod address;
mod arguments;
mod completions;
mod device;
mod errors;
mod frameworks;
mod launched;
mod memory;
mod operation;
mod session;
mod warnings;

use pyo3::prelude::*;

/// The native part of ronde.
#[pymodule]
mod _ronde {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::completions::Completions;
    #[pymodule_export]
    use crate::device::{Arrival, gpu_allocate, gpu_free, gpu_of, gpus, has_gpu_driver, nccl_version};
    #[pymodule_export]
    use crate::frameworks::tensorflow::{
        attach_tensorflow, detach_tensorflow, register_tensorflow, use_horovods_codes,
    };
    #[pymodule_export]
    use crate::frameworks::xla::{xla_bind, xla_failure, xla_handler, xla_register};
    #[pymodule_export]
    use crate::launched::LaunchedBy;
    #[pymodule_export]
    use crate::memory::Memory;
    #[pymodule_export]
    use crate::operation::Operation;
    #[pymodule_export]
    use crate::session::Session;
    #[pymodule_export]
    use crate::warnings::take_warnings;

    /// Returns the operations that clients of this process have submitted, the bytes of their inputs, and for how many seconds
    /// operations were in flight and threads waited for results.
    #[pyfunction]
    fn usage() -> (u64, u64, f64, f64) {
        let usage = ronde::usage();
        (usage.operations, usage.bytes, usage.in_flight.as_secs_f64(), usage.waiting.as_secs_f64())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::warnings::collect();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let dtypes: Vec<&str> = ronde::DType::ALL.iter().map(|dtype| dtype.name()).collect();
        module.add("DTYPES", dtypes)?;
        module.add("TENSORFLOW_SELF_TEST", crate::frameworks::tensorflow::SELF_TEST_ANSWER)?;
        module.add("XLA_SELF_TEST", crate::frameworks::xla::SELF_TEST_ANSWER)
    }
}

/// Runs a wait of any length in slices, detached from the interpreter. It checks for signals between slices, for Ctrl-C.
fn wait_in_slices<T: Send>(
    py: Python<'_>,
    mut slice: impl FnMut(std::time::Duration) -> PyResult<Option<T>> + Send,
) -> PyResult<T> {
    loop {
        if let Some(value) = py.detach(|| slice(SLICE))? {
            return Ok(value);
        }
        py.check_signals()?;
    }
}

/// Short enough for Ctrl-C to feel immediate, long enough to cost nothing.
const SLICE: std::time::Duration = std::time::Duration::from_millis(50);
