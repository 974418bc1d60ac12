//! A pair of message rings in one sealed memfd: a worker and its sidecar exchange messages without system calls while
//! both are awake.
//!
//! The worker creates the memfd and passes it over a connection to `mem.sock`, which from then on is the *bell* of both
//! sides (a doorbell: one byte means "poll the ring"). Each direction has one [`Producer`] and one [`Consumer`].
//!
//! # Layout
//!
//! | bytes | contents |
//! |---|---|
//! | 0..8, 8..12 | the magic number and the layout version, written once by the worker |
//! | 512 + 512 d .. | the control words of direction d (0: worker to sidecar, 1: sidecar to worker), each on its own cache lines: `produced` (u64) at 0, `consumed` (u64) at 128, `sleeps` (u32) at 256, `wants_room` (u32) at 384 |
//! | 4096 + capacity d .. | the data of direction d: `capacity` bytes, a power of two |
//!
//! Positions count bytes since the start and never decrease; a position modulo the capacity is an offset in the data. A
//! message consists of its length (u32), its bytes, and padding to a multiple of 8. It may wrap around the end of the
//! data, and has at most half the capacity.
//!
//! # Sleeping and waking
//!
//! `sleeps` is the consumer's state: 0 awake, 1 waiting on the futex `sleeps`, 2 waiting for the bell. A consumer that
//! finds no message stores 1 or 2, executes a fence, and loads `produced` again before it sleeps. A producer stores
//! `produced`, executes a fence, and loads `sleeps`. One of the two sequentially consistent fences comes first: if it
//! is the consumer's, the producer sees the sleeping state; if it is the producer's, the consumer sees the message. So
//! no wake-up is lost. A producer that sees 1 or 2 swaps it for 0 before it wakes the consumer, so one sleep costs one
//! wake-up regardless of how many messages follow. `wants_room` works the same in the other direction: a producer that
//! finds no room sets it and checks again; a consumer that has made room checks it, clears it, and rings the bell.
//!
//! # Hostile peers
//!
//! The peer can write every byte of the ring at any time. Each side keeps its own position, and the last position
//! accepted from the peer, in private memory. The peer's position is loaded once, and must be a multiple of 8 between
//! the last accepted position and the largest possible one. A length must be within the limit and within the published
//! bytes. Messages are copied out before they are parsed. Any violation is a [`RingError`] and ends the session.
//! Arbitrary values of `sleeps` and `wants_room` cost at most one non-blocking system call per message: a futex
//! wake-up, or one byte sent to a socket without waiting for room (a full socket contains a wake-up already). An
//! eventfd is not used, because its other holder could make writes to it block.

mod bell;
mod consumer;
mod ends;
mod futex;
mod memory;
mod producer;

pub use bell::Bell;
pub use consumer::{Consumer, Kick, Wait};
pub use ends::{PeerRing, RingEnd, WorkerRing};
pub use memory::{RING_BYTES_MAX, RING_BYTES_MIN, framed};
pub use producer::{Producer, Pushed};

use crate::fork::UsedAfterFork;

/// Why a ring, and with it the session, fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The peer's position is impossible.
    #[error("the peer broke the ring: its position {position} is not a multiple of 8 from {least} to {most}")]
    Position {
        /// The peer's position.
        position: u64,
        /// The last position that was accepted.
        least: u64,
        /// The largest possible position.
        most: u64,
    },
    /// The peer's message has an impossible length.
    #[error("the peer broke the ring: a message of {bytes} bytes where at most {limit} can be")]
    Length {
        /// The message's length.
        bytes: u64,
        /// The largest possible length.
        limit: u64,
    },
    /// The message to send is too long. Nothing was written.
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
