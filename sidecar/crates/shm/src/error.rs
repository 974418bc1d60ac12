//! [`ShmError`]: everything that can go wrong here, as data, with the one to blame.

use std::io;

use crate::fork::UsedAfterFork;

/// A failure of shared memory, of passing it, or of the fork guard.
///
/// Messages say what failed, where, and what to do. [`ShmError::blame`] says who can do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A copy would leave the segment. Nothing was copied.
    #[error(
        "bytes {offset}..{offset}+{len} lie outside {segment} of {size} bytes; use the offset and length of a leased slot"
    )]
    OutOfRange {
        /// The segment, in words.
        segment: String,
        /// First byte asked for.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
        /// Size of the segment in bytes.
        size: u64,
    },
    /// A segment of zero bytes, or of more bytes than can be addressed, was asked for.
    #[error("{segment} cannot have {bytes} bytes; a segment has at least one byte and fits the address space")]
    SegmentSize {
        /// The segment, in words.
        segment: String,
        /// The size asked for.
        bytes: u64,
    },
    /// The name of a new segment holds a zero byte or is too long for the kernel.
    #[error("{name:?} cannot name a segment: at most {SEGMENT_NAME_BYTES_MAX} bytes, none of them zero")]
    SegmentName {
        /// The name that was refused.
        name: String,
    },
    /// The peer's segment is larger than this side is willing to map.
    #[error(
        "{segment} has {bytes} bytes, over the limit of {limit_bytes} left to this session; send smaller segments or raise the limit"
    )]
    OverLimit {
        /// The segment, in words.
        segment: String,
        /// Size of the segment in bytes.
        bytes: u64,
        /// What may still be mapped, in bytes.
        limit_bytes: u64,
    },
    /// The descriptor does not belong to a memfd of ordinary pages.
    #[error(
        "{segment} is not a memfd of ordinary pages ({found}); create it with memfd_create and MFD_ALLOW_SEALING, without MFD_HUGETLB"
    )]
    NotMemfd {
        /// The segment, in words.
        segment: String,
        /// What was found instead.
        found: &'static str,
    },
    /// The memfd lacks seals without which its owner could shrink it under our mapping.
    #[error("{segment} lacks the seals {missing}; add them with F_ADD_SEALS before passing it")]
    MissingSeals {
        /// The segment, in words.
        segment: String,
        /// Names of the missing seals, separated by `|`.
        missing: String,
    },
    /// The memfd has another size than its owner announced.
    #[error("{segment} was announced with {announced} bytes but has {actual}; announce the size of the memfd")]
    WrongSize {
        /// The segment, in words.
        segment: String,
        /// The size in the message, in bytes.
        announced: u64,
        /// The size of the memfd, in bytes.
        actual: u64,
    },
    /// A ring cannot have this capacity.
    #[error("a ring of {capacity} bytes a direction cannot be; it is a power of two from {least} to {most}")]
    RingCapacity {
        /// What was asked for, in bytes.
        capacity: u64,
        /// The smallest, in bytes.
        least: u64,
        /// The largest, in bytes.
        most: u64,
    },
    /// The memfd does not begin like a ring of this release.
    #[error(
        "the memfd holds no ring of layout {ours} (it says {version}); install the same release of ronde on both sides"
    )]
    RingLayout {
        /// The number where the version stands.
        version: u32,
        /// The version of this release.
        ours: u32,
    },
    /// The kernel refused an operation.
    #[error("{operation} failed for {subject}: {source}")]
    System {
        /// The system call or what it was to achieve.
        operation: &'static str,
        /// The segment, socket or descriptor, in words.
        subject: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The peer said something outside the protocol of `mem.sock`. The connection is of no further use.
    #[error("the peer broke the protocol of mem.sock: {0}; close the connection")]
    Protocol(#[from] ProtocolError),
    /// The peer closed the connection in the middle of an exchange.
    #[error("the peer closed mem.sock while {waiting_for}; connect again if the session still lives")]
    PeerClosed {
        /// What this side was waiting for.
        waiting_for: &'static str,
    },
    /// The peer did not answer in time. The connection is of no further use.
    #[error(
        "the peer left mem.sock silent for the whole timeout while {waiting_for}; see whether it is alive, or raise the timeout"
    )]
    TimedOut {
        /// What this side was waiting for.
        waiting_for: &'static str,
    },
    /// The sidecar understood the request and declined it. The connection remains usable.
    #[error("the sidecar refused {request}: {reason}")]
    Refused {
        /// The request, without its token.
        request: String,
        /// The sidecar's reason.
        reason: String,
    },
    /// An earlier exchange on this connection failed midway, so replies no longer match requests.
    #[error("this connection to mem.sock failed earlier and cannot be used again; connect again")]
    ConnectionBroken,
    /// The calling process is a forked child of the one that opened the session.
    #[error(transparent)]
    UsedAfterFork(#[from] UsedAfterFork),
    /// Too many descriptors are registered to be closed in forked children.
    #[error(
        "{limit} descriptors are already registered with the fork guard of this process; close clients that are no longer used"
    )]
    ForkTableFull {
        /// Capacity of the table.
        limit: usize,
    },
}

impl ShmError {
    /// Who can put it right.
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

    /// An operating system's refusal, in the form of this crate.
    pub(crate) fn system(operation: &'static str, subject: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { operation, subject: subject.into(), source: source.into() }
    }
}

/// How a message or a reply on `mem.sock` is wrong.
///
/// Never quotes the offending line, because lines carry session tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A line did not end within [`LINE_BYTES_MAX`](crate::passing::LINE_BYTES_MAX).
    #[error("a line is longer than {limit} bytes")]
    LineTooLong {
        /// The limit in bytes, the newline included.
        limit: usize,
    },
    /// A line came in more pieces than any honest writer makes of it.
    #[error("a line came in more than {limit} pieces")]
    LineFragmented {
        /// The limit.
        limit: usize,
    },
    /// Bytes followed the newline: exchanges are one request, one reply.
    #[error("bytes follow the end of a line; send one line and wait for the reply")]
    TrailingBytes,
    /// A byte outside printable ASCII.
    #[error("a line holds a byte that is not printable ASCII")]
    NotText,
    /// The first word is none of the protocol's.
    #[error("a line starts with a word that is neither ATTACH, RESULT nor RING, or in a reply neither OK nor ERR")]
    UnknownWord,
    /// Too few or too many words.
    #[error("a line has the wrong number of words, or words not separated by exactly one space")]
    WordCount,
    /// The token is not 32 lowercase hex digits.
    #[error("the session token is not 32 lowercase hex digits")]
    Token,
    /// A number is not a plain decimal in range.
    #[error("the {what} is not a plain decimal number in range")]
    Number {
        /// The number's meaning.
        what: &'static str,
    },
    /// More than one descriptor came with one message.
    #[error("more than one descriptor came with one line")]
    TooManyDescriptors,
    /// Control data was cut off, by its length or by this process's limit of open files.
    #[error("control data was cut off: too many descriptors sent, or too many files open here")]
    ControlTruncated,
    /// Control data of a kind that is not part of the protocol.
    #[error("control data of a kind other than SCM_RIGHTS")]
    ControlKind,
    /// A line that must carry a descriptor came without.
    #[error("a line that must carry a descriptor came without one")]
    MissingDescriptor,
    /// A line that carries no descriptor came with one.
    #[error("a line that carries no descriptor came with one")]
    UnexpectedDescriptor,
    /// A reply that does not fit the request.
    #[error("the reply does not fit the request")]
    UnexpectedReply,
}

/// Who can put an error right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Blame {
    /// The code that called this crate.
    Caller,
    /// The process at the other end.
    Peer,
    /// This machine: memory, limits, kernel.
    Local,
}

/// Length of a memfd's name that the kernel accepts (`NAME_MAX` less the prefix `memfd:`).
pub(crate) const SEGMENT_NAME_BYTES_MAX: usize = 249;
