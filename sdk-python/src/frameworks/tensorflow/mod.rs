//! Operations of TensorFlow graphs.
//!
//! Python loads TensorFlow and calls [`register_tensorflow`], which registers operations and asynchronous kernels by the C
//! API that TensorFlow's own library exports. A kernel submits its operation with the memory of its input and returns;
//! the thread of [`in_flight`] ends it. docs/adr/0030 describes what this assumes of TensorFlow.
//!
//! | file | what |
//! |---|---|
//! | `abi.rs` | TensorFlow's C API |
//! | `done.rs` | the callback that ends a kernel |
//! | `ops.rs`, `shapes.rs` | the operations and their shape functions |
//! | `kernel.rs` | attributes, and the functions that TensorFlow calls |
//! | `in_flight.rs` | operations in flight |
//! | `session.rs` | the session that they use |
//! | `self_test.rs`, `types.rs` | the operation of the self-test, and numbers of types |

mod abi;
mod done;
mod in_flight;
mod kernel;
mod ops;
mod self_test;
mod session;
mod shapes;
mod types;

use std::collections::HashMap;
use std::sync::Mutex;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use ronde::SetId;

use crate::errors::raise;
use crate::frameworks::status;
use crate::session::Session;

/// What became of the registration. TensorFlow ends the process when an operation is registered twice.
static REGISTERED: Mutex<Option<Result<(), String>>> = Mutex::new(None);

/// Registers the operations in the TensorFlow whose library has this path, once in a process. Returns the names of all
/// operations, and of those that may run in any order. Raises ImportError with what is missing.
#[pyfunction]
pub(crate) fn register_tensorflow(path: &str) -> PyResult<(Vec<&'static str>, Vec<&'static str>)> {
    let mut registered = REGISTERED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let outcome = registered.get_or_insert_with(|| {
        abi::load(path)?;
        ops::register(abi::api().ok_or("the functions were not found")?)
    });
    match outcome {
        Ok(()) => Ok((ops::names(), ops::unordered())),
        Err(reason) => Err(PyImportError::new_err(reason.clone())),
    }
}

/// Makes operations of TensorFlow use a session, with the answers to queries about it: rank, size, local rank, local size,
/// and for each further process set how many ranks it has and whether this process is one of them.
#[pyfunction]
pub(crate) fn attach_tensorflow(
    py: Python<'_>,
    session: &Bound<'_, Session>,
    numbers: (i32, i32, i32, i32),
    sets: HashMap<u32, (i32, bool)>,
) -> PyResult<()> {
    status::load_codes(py)?;
    let client = session.get().client()?;
    let (rank, size, local_rank, local_size) = numbers;
    let sets = sets.into_iter().map(|(set, known)| (SetId(set), known)).collect();
    let facts = session::Facts { rank, size, local_rank, local_size, sets };
    session::attach(&client, facts).map_err(|error| raise(&error))
}

/// Makes operations of TensorFlow fail until the next session.
#[pyfunction]
pub(crate) fn detach_tensorflow() {
    session::detach();
}

/// Makes ranks that disagree fail with FailedPreconditionError from now on, for programs that were written for Horovod.
#[pyfunction]
pub(crate) fn use_horovods_codes() {
    status::use_horovods_codes();
}

/// What the operation of the self-test gives.
pub(crate) const SELF_TEST_ANSWER: i32 = self_test::ANSWER;
