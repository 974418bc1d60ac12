//! A pair of rings in one sealed memfd, over which a worker and its sidecar pass messages without a system call while both are
//! awake.
//!
//! The worker makes the memfd and hands it over on a connection to `mem.sock` that from then on is the *bell* of both
//! sides. Each direction has one [`Producer`] and one [`Consumer`].
//!
//! # Layout
//!
//! | bytes | what |
//! |---|---|
//! | 0..8, 8..12 | the magic number and the version of this layout, written once by the worker |
//! | 512 + 512 d .. | of direction d (0: worker to sidecar, 1: back), each on lines of its own: `produced` (u64) at 0, `consumed` (u64) at 128, `sleeps` (u32) at 256, `wants_room` (u32) at 384 |
//! | 4096 + capacity d .. | the data of direction d: `capacity` bytes, a power of two |
//!
//! Positions count bytes since the beginning and never turn back; a position modulo the capacity is a place in the data. A
//! message is its length (u32), its bytes, and padding up to a multiple of 8; it may run over the end of the data. It has
//! at most half the capacity.
//!
//! # Who sleeps, and who wakes whom
//!
//! `sleeps` says how the consumer waits: 0 awake, 1 on the futex `sleeps` itself, 2 for the bell. A consumer that found
//! nothing stores 1 or 2, passes a fence, and looks at `produced` again before it sleeps. A producer stores `produced`, passes a
//! fence, and looks at `sleeps`. Of two sequentially consistent fences one comes first: if it is the consumer's, the producer
//! sees that somebody sleeps; if it is the producer's, the consumer sees the message. So no wake-up is lost. The producer that
//! sees 1 or 2 exchanges it for 0 before it wakes, so that one sleep costs one wake-up however many messages follow.
//! `wants_room` is the same agreement the other way round: a producer that found no room sets it and looks again; a consumer
//! that has made room looks at it, clears it and rings.
//!
//! # What a hostile peer can do
//!
//! Every byte here is the peer's to write at any time. Each side keeps its own position and last what it accepted of the
//! peer's in private memory; the peer's position is loaded once and must be a multiple of 8 between what was accepted before
//! and what is possible. A length must be within the limit and within what is published. Messages are copied out
//! before anybody looks into them. Anything else is a [`RingError`], and the session ends. Whatever stands in `sleeps` and
//! `wants_room` costs at most one system call per message that never waits: a wake-up of a futex, or one byte to a socket
//! without waiting for room (a full socket has a wake-up in it already). An eventfd would not do: its other holder can make it
//! block.

mod bell;
mod consumer;
mod ends;
mod futex;
mod memory;
mod producer;

pub use bell::Bell;
pub use consumer::{Consumer, Kick, Wait};
pub use ends::{PeerRing, RingEnd, WorkerRing};
pub use memory::{RING_BYTES_MAX, RING_BYTES_MIN};
pub use producer::{Producer, Pushed};

use crate::fork::UsedAfterFork;

/// What ends a ring, and with it the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The peer's position is none that it can have.
    #[error("the peer broke the ring: its position {position} is not a multiple of 8 from {least} to {most}")]
    Position {
        /// What stands there.
        position: u64,
        /// What it was before.
        least: u64,
        /// What it can be at most.
        most: u64,
    },
    /// The peer's message has a length that none has.
    #[error("the peer broke the ring: a message of {bytes} bytes where at most {limit} can be")]
    Length {
        /// The length that stands there.
        bytes: u64,
        /// The longest that there can be.
        limit: u64,
    },
    /// A message of one's own is too long. Nothing was written.
    #[error("a message of {bytes} bytes is over the limit of {limit} that the ring takes")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The calling process is a forked child of the one that opened the session.
    #[error(transparent)]
    UsedAfterFork(#[from] UsedAfterFork),
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
