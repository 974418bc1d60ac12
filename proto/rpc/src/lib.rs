//! The interface between a worker and its sidecar: the gRPC services `ronde/v1/ronde.proto` and, for workers without
//! sockets and shared memory, `ronde/v1/web.proto`; the code generated from them; and checked conversions to and from
//! the types of `ronde-wire`.
//!
//! The messages of [`v1`] are used only in the service and the SDKs. [`convert`] parses them into types without invalid
//! values. [`paths`] has the names of the files in a session directory, [`ring`] encodes messages for a session's ring,
//! and [`web`] checks calls over gRPC-Web before they are decoded.

#![forbid(unsafe_code)]

pub mod v1 {
    //! Generated from the files in `ronde/v1`; `tests/generated_is_current.rs` compares and regenerates.
    #![allow(
        missing_docs,
        unreachable_pub,
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code; the proto file carries the documentation"
    )]
    include!("generated/ronde.v1.rs");
}

pub mod convert;
pub mod paths;
pub mod ring;
pub mod web;

pub use convert::{
    Claim, Claimed, Completion, ConvertError, EpochView, OutputPlace, Place, RankToken, Refused, SegmentKind,
    Submission, negotiate_protocol,
};
pub use paths::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN};
