//! Conversion of the client's errors to Python exceptions. `ronde/errors.py` defines the classes and selects one.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ronde::gpu::GpuError;
use ronde::{Cause, Error, Exit, Record};

/// Returns the exception for an error. It attaches to the interpreter, so call it with no lock held.
pub(crate) fn raise(error: &Error) -> PyErr {
    if let Error::Argument { .. } | Error::Device(GpuError::Argument { .. }) = error {
        return PyValueError::new_err(error.to_string());
    }
    let failure = error.failure();
    let parts = (
        cause_name(error),
        error.to_string(),
        failure.and_then(|failure| failure.rank).map(|rank| rank.0),
        failure.and_then(|failure| failure.sidecar).map(|sidecar| sidecar.0),
        failure.and_then(|failure| failure.tensor.as_ref()).map(|name| name.as_str().to_owned()),
        error.blame().name(),
        failure.and_then(|failure| failure.record.as_deref()).map(record_parts),
    );
    Python::attach(|py| {
        let make = py.import("ronde.errors").and_then(|errors| errors.getattr("from_parts"));
        match make.and_then(|make| make.call1(parts)) {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        }
    })
}

/// The arguments of `ronde.FailureRecord`, in order.
#[expect(clippy::type_complexity, reason = "a tuple becomes the arguments of a call in Python")]
fn record_parts(
    record: &Record,
) -> (u32, &str, Option<u32>, Option<String>, Option<i32>, Option<i32>, bool, Option<CallParts<'_>>, &[String]) {
    let (exit_code, signal) = match record.exit {
        Some(Exit::Code(code)) => (Some(code), None),
        Some(Exit::Signal(signal)) => (None, Some(signal)),
        Some(Exit::OutOfMemory) | None => (None, None),
    };
    let call = record.last_call.as_ref().map(|call| {
        (
            call.collective.as_str(),
            call.operation.as_str(),
            call.site.as_deref(),
            Duration::from_millis(call.age_ms).as_secs_f64(),
        )
    });
    let ended = record.exit.map(|exit| exit.to_string());
    let out_of_memory = record.exit == Some(Exit::OutOfMemory);
    (record.rank.0, &record.host, record.pid, ended, exit_code, signal, out_of_memory, call, &record.stderr_tail)
}

/// Collective, operation, call site, age in seconds.
type CallParts<'a> = (&'a str, &'a str, Option<&'a str>, f64);

/// Returns the value of `RondeError.cause`.
pub(crate) fn cause_name(error: &Error) -> &'static str {
    match error {
        Error::Settings { .. } => "settings",
        Error::Token { .. } | Error::SidecarUser { .. } => "token",
        Error::Connect { .. } => "connect",
        Error::Claim { .. } => "claim",
        Error::Start { .. } => "start",
        Error::Limit { .. } => "limit",
        Error::Closed => "closed",
        Error::UsedAfterFork(_) => "used_after_fork",
        Error::Memory(_) => "memory",
        Error::Device(_) => "device",
        Error::Protocol { .. } => "protocol",
        Error::Thread { .. } => "thread",
        Error::Timeline { .. } => "timeline",
        Error::Failure(failure) => match failure.cause {
            Cause::Mismatch => "mismatch",
            Cause::Refused => "refused",
            Cause::RankLost => "rank_lost",
            Cause::SidecarLost => "sidecar_lost",
            Cause::ShutDown => "shut_down",
            Cause::TimedOut => "timed_out",
            _ => "bug",
        },
        _ => "error",
    }
}
