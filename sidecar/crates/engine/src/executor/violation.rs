//! Protocol violations on a lane. They are always the peer's fault: the caller closes the link.

use ronde_wire::{Lane, Seq};

/// A chunk or token that no correct peer sends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The chunk names another lane than the one it arrived on.
    #[error("a chunk of {seq} names {found}, but came on {lane}")]
    Lane {
        /// The operation.
        seq: Seq,
        /// The lane it arrived on.
        lane: Lane,
        /// The lane it names.
        found: Lane,
    },
    /// The plan receives nothing from this peer there.
    #[error("the plan of {seq} receives nothing from this peer in round {round} of sub-schedule {sub_schedule}")]
    Unexpected {
        /// The operation.
        seq: Seq,
        /// The sub-schedule it names.
        sub_schedule: u32,
        /// The round it names.
        round: u32,
    },
    /// The span differs from the plan, or the data differ in length from the span.
    #[error(
        "a chunk of {seq}, sub-schedule {sub_schedule}, round {round}, holds {bytes} bytes for elements {start} and {len} on, \
         which differs from the plan"
    )]
    Span {
        /// The operation.
        seq: Seq,
        /// The sub-schedule it names.
        sub_schedule: u32,
        /// The round it names.
        round: u32,
        /// The first element it names.
        start: u64,
        /// How many elements it names.
        len: u64,
        /// How many bytes it holds.
        bytes: usize,
    },
    /// The same transfer arrived before.
    #[error("the chunk of {seq}, sub-schedule {sub_schedule}, round {round}, came twice")]
    Duplicate {
        /// The operation.
        seq: Seq,
        /// The sub-schedule it names.
        sub_schedule: u32,
        /// The round it names.
        round: u32,
    },
    /// The operation is over here, or the peer takes no part in it. Not reported for a withdrawn schedule.
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
        /// Bytes already held.
        held_bytes: u64,
        /// Bytes of the new chunk.
        more_bytes: u64,
        /// The credit from the hello.
        granted_bytes: u64,
    },
    /// The peer is further ahead than the windows of a plan allow.
    #[error("chunks of more than {sub_schedules_max} sub-schedules of {seq} came before their turn")]
    Ahead {
        /// The operation.
        seq: Seq,
        /// The bound.
        sub_schedules_max: usize,
    },
}
