//! What a peer can do wrong on a lane. Always the peer's fault: the caller closes the link.

use ronde_wire::{Lane, Seq};

/// A chunk or token that no correct peer sends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The chunk names another lane than the one it came on.
    #[error("a chunk of {seq} names {found}, but came on {lane}")]
    Lane {
        /// The operation.
        seq: Seq,
        /// The lane it came on.
        lane: Lane,
        /// The lane it names.
        found: Lane,
    },
    /// The plan receives nothing from this peer there.
    #[error("the plan of {seq} receives nothing from this peer in round {round} of strand {strand}")]
    Unexpected {
        /// The operation.
        seq: Seq,
        /// The strand it names.
        strand: u32,
        /// The round it names.
        round: u32,
    },
    /// The span is not the plan's, or the data are not as long as the span.
    #[error(
        "a chunk of {seq}, strand {strand}, round {round}, holds {bytes} bytes for elements {start} and {len} on, \
         which is not what the plan says"
    )]
    Span {
        /// The operation.
        seq: Seq,
        /// The strand it names.
        strand: u32,
        /// The round it names.
        round: u32,
        /// The first element it names.
        start: u64,
        /// How many elements it names.
        len: u64,
        /// How many bytes it holds.
        bytes: usize,
    },
    /// The same transfer came before.
    #[error("the chunk of {seq}, strand {strand}, round {round}, came twice")]
    Duplicate {
        /// The operation.
        seq: Seq,
        /// The strand it names.
        strand: u32,
        /// The round it names.
        round: u32,
    },
    /// The operation is over here, or the peer has no part in it; none of a schedule that was withdrawn.
    #[error("a chunk of {seq} came, which is over on this lane or was never performed here")]
    Over {
        /// The operation.
        seq: Seq,
    },
    /// The operation is not admitted here, and the chunk was not sent on credit.
    #[error("a chunk of {seq} came without credit before the operation was admitted here")]
    Unadmitted {
        /// The operation.
        seq: Seq,
    },
    /// More was sent on credit than was granted.
    #[error("{held_bytes} bytes are held for this peer; {more_bytes} more exceed its credit of {granted_bytes}")]
    Credit {
        /// Bytes that are held already.
        held_bytes: u64,
        /// Bytes that came.
        more_bytes: u64,
        /// What the hello granted.
        granted_bytes: u64,
    },
    /// The peer is further ahead than the windows of a plan allow.
    #[error("chunks of more than {strands_max} strands of {seq} came before their turn")]
    Ahead {
        /// The operation.
        seq: Seq,
        /// The bound.
        strands_max: usize,
    },
}
