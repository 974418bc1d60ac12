//! [`ShmError`]: the errors of this crate, and who can fix each.

use std::io;

use crate::fork::UsedAfterFork;

/// An error of shared memory, of passing it between processes, or of the fork guard.
///
/// Messages say what failed, where, and what to do. [`ShmError::blame`] says who can do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A copy would exceed the segment. Nothing was copied.
    #[error(
        "bytes {offset}..{offset}+{len} lie outside {segment} of {size} bytes; use the offset and length of a leased slot"
    )]
    OutOfRange {
        /// Describes the segment.
        segment: String,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: u64,
        /// Size of the segment in bytes.
        size: u64,
    },
    /// A segment of zero bytes, or larger than the address space, was requested.
    #[error("{segment} cannot have {bytes} bytes; a segment has at least one byte and fits the address space")]
    SegmentSize {
        /// Describes the segment.
        segment: String,
        /// The requested size.
        bytes: u64,
    },
    /// The name of a new segment contains a zero byte or is too long for the kernel.
    #[error("{name:?} cannot name a segment: at most {SEGMENT_NAME_BYTES_MAX} bytes, none of them zero")]
    SegmentName {
        /// The rejected name.
        name: String,
    },
    /// The peer's segment exceeds the limit for what this side maps.
    #[error(
        "{segment} has {bytes} bytes, over the limit of {limit_bytes} left to this session; send smaller segments or raise the limit"
    )]
    OverLimit {
        /// Describes the segment.
        segment: String,
        /// Size of the segment in bytes.
        bytes: u64,
        /// Bytes that may still be mapped.
        limit_bytes: u64,
    },
    /// The descriptor is not a memfd of ordinary pages.
    #[error(
        "{segment} is not a memfd of ordinary pages ({found}); create it with memfd_create and MFD_ALLOW_SEALING, without MFD_HUGETLB"
    )]
    NotMemfd {
        /// Describes the segment.
        segment: String,
        /// What the descriptor is instead.
        found: &'static str,
    },
    /// The memfd lacks seals, so its owner could shrink it while it is mapped.
    #[error("{segment} lacks the seals {missing}; add them with F_ADD_SEALS before passing it")]
    MissingSeals {
        /// Describes the segment.
        segment: String,
        /// Names of the missing seals, separated by `|`.
        missing: String,
    },
    /// The memfd's size differs from the announced one.
    #[error("{segment} was announced with {announced} bytes but has {actual}; announce the size of the memfd")]
    WrongSize {
        /// Describes the segment.
        segment: String,
        /// The announced size in bytes.
        announced: u64,
        /// The memfd's size in bytes.
        actual: u64,
    },
    /// The requested ring capacity is invalid.
    #[error(
        "a ring cannot have {capacity} bytes in each direction; the capacity is a power of two from {least} to {most}"
    )]
    RingCapacity {
        /// The requested capacity in bytes.
        capacity: u64,
        /// The smallest capacity in bytes.
        least: u64,
        /// The largest capacity in bytes.
        most: u64,
    },
    /// The memfd does not start with the header of a ring of this release.
    #[error(
        "the memfd holds no ring of layout {ours} (it says {version}); install the same release of ronde on both sides"
    )]
    RingLayout {
        /// The version in its header.
        version: u32,
        /// This release's version.
        ours: u32,
    },
    /// A system call failed.
    #[error("{operation} failed for {subject}: {source}")]
    System {
        /// The system call, or its purpose.
        operation: &'static str,
        /// Describes the segment, socket or descriptor.
        subject: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The peer violated the protocol of `mem.sock`. The connection cannot be used any more.
    #[error("the peer broke the protocol of mem.sock: {0}; close the connection")]
    Protocol(#[from] ProtocolError),
    /// The peer closed the connection during an exchange.
    #[error("the peer closed mem.sock while {waiting_for}; connect again if the session still lives")]
    PeerClosed {
        /// What this side was waiting for.
        waiting_for: &'static str,
    },
    /// The peer did not answer in time. The connection cannot be used any more.
    #[error(
        "the peer left mem.sock silent for the whole timeout while {waiting_for}; see whether it is alive, or raise the timeout"
    )]
    TimedOut {
        /// What this side was waiting for.
        waiting_for: &'static str,
    },
    /// The sidecar rejected the request. The connection remains usable.
    #[error("the sidecar refused {request}: {reason}")]
    Refused {
        /// The request, without its token.
        request: String,
        /// The sidecar's reason.
        reason: String,
    },
    /// An earlier exchange failed midway, so replies would not match requests.
    #[error("this connection to mem.sock failed earlier and cannot be used again; connect again")]
    ConnectionBroken,
    /// The calling process is a forked child of the one that opened the session.
    #[error(transparent)]
    UsedAfterFork(#[from] UsedAfterFork),
    /// The table of descriptors to close in forked children is full.
    #[error(
        "{limit} descriptors are already registered with the fork guard of this process; close clients that are no longer used"
    )]
    ForkTableFull {
        /// The table's capacity.
        limit: usize,
    },
}

impl ShmError {
    /// Who can fix the problem.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::OutOfRange { .. }
            | Self::SegmentSize { .. }
            | Self::SegmentName { .. }
            | Self::ConnectionBroken
            | Self::RingCapacity { .. }
            | Self::UsedAfterFork(_)
            | Self::ForkTableFull { .. } => Blame::Caller,
            Self::OverLimit { .. }
            | Self::NotMemfd { .. }
            | Self::MissingSeals { .. }
            | Self::WrongSize { .. }
            | Self::RingLayout { .. }
            | Self::Protocol(_)
            | Self::PeerClosed { .. }
            | Self::TimedOut { .. }
            | Self::Refused { .. } => Blame::Peer,
            Self::System { .. } => Blame::Local,
        }
    }

    /// Wraps an operating system error.
    pub(crate) fn system(operation: &'static str, subject: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { operation, subject: subject.into(), source: source.into() }
    }
}

/// How a request or reply on `mem.sock` violates the protocol.
///
/// The messages never quote the line, because lines contain session tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A line is longer than [`LINE_BYTES_MAX`](crate::passing::LINE_BYTES_MAX).
    #[error("a line is longer than {limit} bytes")]
    LineTooLong {
        /// The limit in bytes, including the newline.
        limit: usize,
    },
    /// A line arrived in too many fragments.
    #[error("a line arrived in more than {limit} fragments")]
    LineFragmented {
        /// The limit for fragments.
        limit: usize,
    },
    /// Bytes follow the newline; each exchange is one request and one reply.
    #[error("bytes follow the end of a line; send one line and wait for the reply")]
    TrailingBytes,
    /// A line contains a byte that is not printable ASCII.
    #[error("a line contains a byte that is not printable ASCII")]
    NotText,
    /// The first word is not part of the protocol.
    #[error("a line starts with a word that is neither ATTACH, RESULT nor RING, or in a reply neither OK nor ERR")]
    UnknownWord,
    /// A line has the wrong number of words, or wrong spaces.
    #[error("a line has the wrong number of words, or words not separated by exactly one space")]
    WordCount,
    /// The token is not 32 lowercase hex digits.
    #[error("the session token is not 32 lowercase hex digits")]
    Token,
    /// A number is not a plain decimal within its range.
    #[error("the {what} is not a plain decimal number in range")]
    Number {
        /// The meaning of the number.
        what: &'static str,
    },
    /// More than one descriptor came with a line.
    #[error("more than one descriptor came with one line")]
    TooManyDescriptors,
    /// Control data was truncated, because of its length or of this process's limit of open files.
    #[error("control data was truncated: too many descriptors sent, or too many files open here")]
    ControlTruncated,
    /// Control data is not SCM_RIGHTS.
    #[error("control data of a kind other than SCM_RIGHTS")]
    ControlKind,
    /// A line came without its descriptor.
    #[error("a line that must carry a descriptor came without one")]
    MissingDescriptor,
    /// A line came with a descriptor that it must not have.
    #[error("a line that carries no descriptor came with one")]
    UnexpectedDescriptor,
    /// The reply does not match the request.
    #[error("the reply does not fit the request")]
    UnexpectedReply,
}

/// Who can fix an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Blame {
    /// The code that called this crate.
    Caller,
    /// The process at the other end.
    Peer,
    /// This machine: its memory, limits or kernel.
    Local,
}

/// The kernel's limit for a memfd's name (`NAME_MAX` less the prefix `memfd:`).
pub(crate) const SEGMENT_NAME_BYTES_MAX: usize = 249;
