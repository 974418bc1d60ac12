//! The status codes that XLA and TensorFlow share, and the code of each error. So a failure has the same code in both.

use ronde::{Cause, Error};

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

/// The code of an error. `Aborted` means that the epoch is over, and the program may continue in another one.
pub(super) fn code_of(error: &Error) -> Code {
    match error {
        Error::Argument { .. } => Code::InvalidArgument,
        Error::Limit { .. } => Code::ResourceExhausted,
        Error::Closed => Code::Aborted,
        Error::UsedAfterFork(_) => Code::FailedPrecondition,
        Error::Failure(failure) => match failure.cause {
            Cause::Mismatch | Cause::Refused => Code::InvalidArgument,
            Cause::TimedOut => Code::DeadlineExceeded,
            Cause::RankLost | Cause::SidecarLost | Cause::ShutDown => Code::Aborted,
            _ => Code::Internal,
        },
        _ => Code::Unknown,
    }
}
