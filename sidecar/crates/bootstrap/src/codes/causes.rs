//! The codes of the exceptions that workers raise.

use super::Code;

/// For each `cause` of an exception of the SDK for Python, its code. `sdk-python/python/ronde/codes.py` has the same table.
pub const CAUSES: &[(&str, Code)] = &[
    ("bug", Code::Bug),
    ("claim", Code::ClaimRejected),
    ("closed", Code::ClientClosed),
    ("connect", Code::SidecarNotFound),
    ("device", Code::WorkerSystem),
    ("limit", Code::LimitReached),
    ("memory", Code::WorkerSystem),
    ("mismatch", Code::RanksDisagree),
    ("protocol", Code::SessionProtocol),
    ("rank_lost", Code::WorkerFailed),
    ("refused", Code::RequestRejected),
    ("settings", Code::SidecarNotFound),
    ("shut_down", Code::LeftEarly),
    ("sidecar_lost", Code::SidecarEnded),
    ("start", Code::StartTimeout),
    ("thread", Code::WorkerSystem),
    ("timed_out", Code::OperationTimedOut),
    ("timeline", Code::TimelineFailed),
    ("token", Code::ClaimRejected),
    ("used_after_fork", Code::UsedAfterFork),
];
