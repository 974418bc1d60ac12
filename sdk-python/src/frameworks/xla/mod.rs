//! XLA: the handler by which programs that it has compiled perform collectives, without Python.
//!
//! `ronde.jax` registers [`ffi::handler_address`] with JAX, and `ronde.tensorflow` by [`xla_register`] with the XLA in
//! TensorFlow's library. Both bind the session. XLA calls the handler on one of its threads, with the operation as attributes.
//! The handler submits it and returns; a thread of the session completes the call when the result is there. So no thread of
//! XLA waits, and none takes the interpreter lock.

mod call;
mod completion;
mod ffi;
mod self_test;

use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::prelude::*;
use ronde::Error;
use ronde::blocking::Client;

use self::completion::{Completer, InFlight};
use self::ffi::{Call, Failure, Handler};
use crate::errors::raise;
use crate::frameworks::library::Library;
use crate::frameworks::status::{Code, code_of, load_codes, text_of};
use crate::session::Session;

/// Returns the address of the handler.
#[pyfunction]
pub(crate) fn xla_handler() -> usize {
    ffi::handler_address()
}

/// Registers the handler with the XLA in a library that the process has loaded from this path, once in a process. Raises
/// ImportError with what is missing.
#[pyfunction]
pub(crate) fn xla_register(library: &str) -> PyResult<()> {
    let mut registered = lock(&REGISTERED);
    let outcome = registered.get_or_insert_with(|| {
        let library = Library::loaded(library)?;
        ffi::register(library.function(TABLE).or_else(|_| library.function(EARLIER_TABLE))?)
    });
    outcome.clone().map_err(PyImportError::new_err)
}

/// Makes compiled programs use this session from now on.
#[pyfunction]
pub(crate) fn xla_bind(py: Python<'_>, session: &Session) -> PyResult<()> {
    load_codes(py)?;
    let client = session.client()?;
    let completions = client.completions().map_err(|error| raise(&error))?;
    let completer = Completer::start(Arc::downgrade(&client), completions).map_err(|error| {
        PyRuntimeError::new_err(format!("the thread that completes calls cannot be started: {error}"))
    })?;
    *lock(&BOUND) = Some(Bound { client: Arc::downgrade(&client), completer });
    Ok(())
}

/// Returns the exception of ronde whose text is part of this one, if a compiled program has failed with it lately.
#[pyfunction]
pub(crate) fn xla_failure(text: &str) -> Option<PyErr> {
    let found = lock(&RECENT).iter().rev().find(|error| text.contains(&text_of(error))).cloned();
    found.map(|error| raise(&error))
}

/// What the self-test returns.
pub(crate) const SELF_TEST_ANSWER: i32 = self_test::ANSWER;

/// The session of compiled programs. It does not keep the session open.
struct Bound {
    client: Weak<Client>,
    completer: Completer,
}

struct Submitter;

impl Handler for Submitter {
    fn call(call: &Call<'_>) -> Result<(), Failure> {
        if call.text("kind")? == self_test::KIND {
            return self_test::answer(call);
        }
        let bound = lock(&BOUND).as_ref().map(|bound| (bound.client.upgrade(), bound.completer.clone()));
        let Some((Some(client), completer)) = bound else {
            let text = "ronde has no open session in this process; call init() first, and not shutdown() before the results \
                        are there";
            return Err(Failure { code: Code::FailedPrecondition, text: text.to_owned() });
        };
        let (handles, results) = call::submit(&client, call)?;
        let in_flight = InFlight::new(handles, results);
        match call.promise() {
            // The completer gets it before this function drops the client, at whose end the completer stops.
            Some(promise) => completer.add(in_flight, promise),
            None => in_flight.wait()?,
        }
        Ok(())
    }
}

/// Returns an error as XLA's, and keeps it for `xla_failure`.
fn failure(error: &Error) -> Failure {
    let mut recent = lock(&RECENT);
    if recent.len() == RECENT_MAX {
        recent.pop_front();
    }
    recent.push_back(error.clone());
    drop(recent);
    Failure { code: code_of(error), text: text_of(error) }
}

/// Ignores poisoning: what is locked is valid after each statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The function that returns XLA's table of functions.
const TABLE: &CStr = c"XLA_FFI_GetApi";
/// `xla::ffi::GetXlaFfiApi()`, which earlier releases have instead.
const EARLIER_TABLE: &CStr = c"_ZN3xla3ffi12GetXlaFfiApiEv";
/// What became of the registration. XLA rejects a second one of the same name.
static REGISTERED: Mutex<Option<Result<(), String>>> = Mutex::new(None);
static BOUND: Mutex<Option<Bound>> = Mutex::new(None);
/// The last errors, oldest first.
static RECENT: Mutex<VecDeque<Error>> = Mutex::new(VecDeque::new());
const RECENT_MAX: usize = 16;
