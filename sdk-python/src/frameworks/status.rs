//! The status codes that XLA and TensorFlow share, and what an error becomes there: so a failure has the same status and the
//! same text in both.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use ronde::{Cause, Error};

use crate::errors::cause_name;

/// Status codes, as many as are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Code {
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    Internal = 13,
}

/// Whether ranks that disagree fail as in Horovod.
static HAS_HOROVODS_CODES: AtomicBool = AtomicBool::new(false);

/// Makes ranks that disagree fail with `FailedPrecondition` from now on, as in Horovod, rather than `InvalidArgument`.
pub(super) fn use_horovods_codes() {
    HAS_HOROVODS_CODES.store(true, Ordering::Relaxed);
}

/// The code of an error. `Aborted` means that the epoch is over, and the program may continue in another one.
pub(super) fn code_of(error: &Error) -> Code {
    match error {
        Error::Argument { .. } => Code::InvalidArgument,
        Error::Limit { .. } => Code::ResourceExhausted,
        Error::Closed => Code::Aborted,
        Error::UsedAfterFork(_) => Code::FailedPrecondition,
        Error::Failure(failure) => match failure.cause {
            Cause::Mismatch if HAS_HOROVODS_CODES.load(Ordering::Relaxed) => Code::FailedPrecondition,
            Cause::Mismatch | Cause::Refused => Code::InvalidArgument,
            Cause::TimedOut => Code::DeadlineExceeded,
            Cause::RankLost | Cause::SidecarLost | Cause::ShutDown => Code::Aborted,
            _ => Code::Internal,
        },
        _ => Code::Unknown,
    }
}

/// For each `cause` of an exception, the code that `ronde explain` knows.
static CODES: OnceLock<HashMap<String, String>> = OnceLock::new();

/// Reads the codes from `ronde.codes`, so that threads without Python can add them to texts. Later calls do nothing.
pub(super) fn load_codes(py: Python<'_>) -> PyResult<()> {
    if CODES.get().is_none() {
        let codes = py.import("ronde.codes")?.getattr("CAUSES")?.extract()?;
        // Another thread has read the same ones.
        let _ = CODES.set(codes);
    }
    Ok(())
}

/// The text of an error with its code after the first line, as in an exception of Python.
pub(super) fn text_of(error: &Error) -> String {
    let text = error.to_string();
    let Some(code) = CODES.get().and_then(|codes| codes.get(cause_name(error))) else { return text };
    let (first, rest) = text.split_at(text.find('\n').unwrap_or(text.len()));
    if first.contains(MARK) { text } else { format!("{first} [{code}]{rest}") }
}

/// How the code of an error begins in its text.
const MARK: &str = "[RONDE-E";
