//! Messages to checked types and back. Everything is parsed once, at the border; what comes out cannot be wrong.

mod collective;
mod failure;
mod plugin;
mod session;
mod submission;

pub use collective::{collective_from, dtype_from, reduce_op_from};
pub use session::{
    Claim, Claimed, Completion, EpochView, RankToken, SESSION_TOKEN_BYTES, TOKEN_BYTES, negotiate_protocol,
};
pub use submission::{OutputPlace, Place, Refused, Submission, group_from};

use ronde_wire::ids::NameError;
use ronde_wire::limits;
use ronde_wire::request::ShapeError;

/// What is wrong with a message. The text names the field and what it should be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// A field that must be there is not.
    #[error("{field} is not set; {hint}")]
    Missing {
        /// The field.
        field: &'static str,
        /// What to set.
        hint: &'static str,
    },
    /// An enum has a number that this release does not know.
    #[error("{field} {given} is not known to this release; install the same release of ronde on both sides")]
    Unknown {
        /// The field.
        field: &'static str,
        /// What was given.
        given: i32,
    },
    /// A number is out of its range.
    #[error("{field} is {given}, but must be at most {max}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// What was given.
        given: u64,
        /// The greatest value.
        max: u64,
    },
    /// A byte string has the wrong length.
    #[error("{field} has {given} bytes, not {wanted}")]
    Length {
        /// The field.
        field: &'static str,
        /// What was given.
        given: usize,
        /// The right length.
        wanted: usize,
    },
    /// A name breaks its rules.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A shape breaks its rules.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A scale factor is zero (unset), infinite or not a number.
    #[error("{field} is {given}, but must be finite and not zero; 1 means no scaling")]
    Scale {
        /// The field.
        field: &'static str,
        /// What was given.
        given: f64,
    },
    /// A scale factor was given to an operation that computes nothing.
    #[error("{field} is {given}, but {collective} does not scale; leave it at 1")]
    ScaleWithoutReduction {
        /// The field.
        field: &'static str,
        /// What was given.
        given: f64,
        /// The operation.
        collective: &'static str,
    },
    /// The bytes are not those of a tensor of this type and shape.
    #[error("a tensor of type {dtype} and shape {shape} has {wanted} bytes, but the input has {given}")]
    ByteLength {
        /// The element type.
        dtype: ronde_wire::DType,
        /// The shape.
        shape: ronde_wire::Shape,
        /// What type and shape ask for.
        wanted: u64,
        /// What was given.
        given: u64,
    },
    /// The place ends beyond what can be addressed.
    #[error("an input at offset {offset} of {bytes} bytes ends beyond what can be addressed")]
    PlaceOverflow {
        /// Where the input begins.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// An input was given to an operation that takes none.
    #[error("{collective} takes no input; leave the place unset")]
    UnexpectedInput {
        /// The operation.
        collective: &'static str,
    },
    /// Inputs in device memory are not supported.
    #[error("inputs in {kind} memory are not supported by this sidecar; copy the tensor into the arena")]
    Device {
        /// The kind of device, cut to a printable length.
        kind: String,
    },
    /// A place for a result that cannot be one.
    #[error("the output {what}")]
    Output {
        /// What is wrong with it.
        what: &'static str,
    },
    /// Inline bytes are for small tensors.
    #[error("{given} inline bytes are over the limit of {max}; use shared memory for large tensors", max = limits::INLINE_BYTES_MAX)]
    Inline {
        /// What was given.
        given: usize,
    },
    /// A codec that is none of the sidecar's own.
    #[error("codec {codec:?} is none of the sidecar's own; take float16, bfloat16, none, or a plugin")]
    Codec {
        /// What was asked for, cut to a printable length.
        codec: String,
    },
    /// A plugin where none can be, or none where one is needed.
    #[error("{what}")]
    Plugin {
        /// What is wrong and what to do.
        what: &'static str,
    },
    /// The splits of an all-to-all are not rows of the tensor.
    #[error("the splits of an all-to-all must add up to the {rows} rows of the tensor, one for each of at most {max} ranks", max = limits::RANKS_MAX)]
    Splits {
        /// Rows of the tensor.
        rows: u64,
    },
    /// No version of the session protocol is spoken by both sides.
    #[error(
        "the client speaks versions {min} to {max} of the session protocol, this sidecar {ours_min} to {ours_max}; install the same \
         release of ronde on both sides",
        ours_min = crate::paths::PROTOCOL_VERSION_MIN,
        ours_max = crate::paths::PROTOCOL_VERSION
    )]
    Protocol {
        /// The client's oldest.
        min: u32,
        /// The client's newest.
        max: u32,
    },
    /// Ranks and sizes that no world has.
    #[error("{field} {given} is not below {size}, the size it belongs to")]
    Position {
        /// The field.
        field: &'static str,
        /// What was given.
        given: u32,
        /// The number of positions.
        size: u32,
    },
}

/// The first characters of a peer's text, enough to recognize it.
fn printable(text: &str) -> String {
    text.chars().take(PRINTABLE_CHARS_MAX).collect()
}

const PRINTABLE_CHARS_MAX: usize = 64;
