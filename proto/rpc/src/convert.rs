//! Converts messages to checked types and back. Messages are parsed once, at the boundary, into types without invalid
//! values.

mod collective;
mod failure;
mod plugin;
mod session;
mod submission;

pub use collective::{collective_from, dtype_from, reduce_op_from};
pub use session::{
    Claim, Claimed, Completion, EpochView, RankToken, SESSION_TOKEN_BYTES, TOKEN_BYTES, negotiate_protocol,
};
pub use submission::{OutputPlace, Place, Refused, SegmentKind, Submission, group_from};

use ronde_wire::ids::NameError;
use ronde_wire::limits;
use ronde_wire::request::ShapeError;

/// What is wrong with a message. The text names the field and its valid values.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// A required field is not set.
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
    /// A name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A shape is invalid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A scale factor is zero (unset), infinite, or NaN.
    #[error("{field} is {given}, but must be finite and not zero; 1 means no scaling")]
    Scale {
        /// The field.
        field: &'static str,
        /// What was given.
        given: f64,
    },
    /// A scale factor was given to an operation without a reduction.
    #[error("{field} is {given}, but {collective} does not scale; leave it at 1")]
    ScaleWithoutReduction {
        /// The field.
        field: &'static str,
        /// What was given.
        given: f64,
        /// The operation.
        collective: &'static str,
    },
    /// The length of the input does not match its type and shape.
    #[error("a tensor of type {dtype} and shape {shape} has {wanted} bytes, but the input has {given}")]
    ByteLength {
        /// The element type.
        dtype: ronde_wire::DType,
        /// The shape.
        shape: ronde_wire::Shape,
        /// The length that type and shape require.
        wanted: u64,
        /// What was given.
        given: u64,
    },
    /// The input exceeds the address range.
    #[error("an input at offset {offset} of {bytes} bytes ends beyond what can be addressed")]
    PlaceOverflow {
        /// Offset of the input.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// An input was given to an operation without one.
    #[error("{collective} takes no input; leave the place unset")]
    UnexpectedInput {
        /// The operation.
        collective: &'static str,
    },
    /// Device memory of this kind is not supported.
    #[error("inputs in {kind} memory are not supported by this sidecar; copy the tensor into the arena")]
    Device {
        /// The kind of device, truncated.
        kind: String,
    },
    /// This operation takes no tensors in device memory.
    #[error(
        "{collective} takes no tensors in device memory, only all-reduce and broadcast do; copy the tensor into the arena"
    )]
    DeviceCollective {
        /// The operation.
        collective: &'static str,
    },
    /// A requested output location is invalid.
    #[error("the output {what}")]
    Output {
        /// The problem.
        what: &'static str,
    },
    /// The inline input is too large.
    #[error("{given} inline bytes are over the limit of {max}; use shared memory for large tensors", max = limits::INLINE_BYTES_MAX)]
    Inline {
        /// What was given.
        given: usize,
    },
    /// The codec is not built in.
    #[error("codec {codec:?} is not built into the sidecar; use float16, bfloat16, none, or a plugin")]
    Codec {
        /// The requested codec, truncated.
        codec: String,
    },
    /// A plugin where none is allowed, or a missing one.
    #[error("{what}")]
    Plugin {
        /// The problem and its solution.
        what: &'static str,
    },
    /// The splits of an all-to-all do not add up to the rows of the tensor.
    #[error("the splits of an all-to-all must add up to the {rows} rows of the tensor, one for each of at most {max} ranks", max = limits::RANKS_MAX)]
    Splits {
        /// Number of rows.
        rows: u64,
    },
    /// Client and sidecar have no version of the session protocol in common.
    #[error(
        "the client supports versions {min} to {max} of the session protocol, this sidecar {ours_min} to {ours_max}; install the same \
         release of ronde on both sides",
        ours_min = crate::paths::PROTOCOL_VERSION_MIN,
        ours_max = crate::paths::PROTOCOL_VERSION
    )]
    Protocol {
        /// The client's oldest version.
        min: u32,
        /// The client's newest version.
        max: u32,
    },
    /// A rank or position is not below its size.
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

/// The first characters of a peer's text, enough to recognise it.
fn printable(text: &str) -> String {
    text.chars().take(PRINTABLE_CHARS_MAX).collect()
}

const PRINTABLE_CHARS_MAX: usize = 64;
