//! The contract between a worker and the sidecar on its host: `ronde/v1/ronde.proto`, for workers without sockets and shared
//! memory `ronde/v1/web.proto`, the code generated from both, and
//! checked conversions to and from the types of `ronde-wire`.
//!
//! The messages of [`v1`] stay in the service and the SDK; what goes further in has passed [`convert`], which parses
//! once into types that cannot be wrong. [`paths`] names the files by which the two find each other;
//! [`ring`] writes and reads the messages that go over a session's ring, [`web`] looks at calls over gRPC-Web.

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
    Claim, Claimed, Completion, ConvertError, EpochView, OutputPlace, Place, RankToken, Refused, Submission,
    negotiate_protocol,
};
pub use paths::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN};
