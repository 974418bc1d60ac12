//! Shared memory between a worker and its sidecar, and all of ronde's system calls for it.
//!
//! - [`segment`]: sealed memfds that are mapped, populated, and accessed by copies only.
//! - [`arena`]: an allocator for ranges of segments. Bookkeeping only.
//! - [`worker_arena`]: a worker's segments with an arena; their slots can be accessed in place.
//! - [`passing`]: passes memfds over a Unix socket (`mem.sock`).
//! - [`ring`]: a pair of message rings that need no system calls while both sides are awake.
//! - [`heap`]: settings of the C library's allocator.
//! - [`fork`]: keeps forked children from holding or using their parent's session.
//! - [`error`]: [`ShmError`], which says who can fix the problem.
//!
//! **The peer process can write shared bytes at any time.** A sidecar gets neither references nor slices to shared
//! memory: it copies in and out, and decides on private bytes only. A worker may access its own bytes by slices
//! ([`LeasedSlot`]) or by address; its sidecar fills them on request and is trusted not to write them afterwards.
//!
//! # Unsafe code
//!
//! This crate is one of the few that may contain `unsafe`. Each block has a `SAFETY:` comment that can be checked by
//! reading its module. The modules with unsafe code are `mapping` (mappings and atomics in them), `copy` (copies from
//! and to mappings), [`worker_arena`] (slices of a worker's slots), `passing::descriptor` (control messages with
//! descriptors), `ring::futex` (futex calls), [`fork`] (the fork handler) and [`heap`] (allocator settings).
//!
//! All calls block. Async callers run them on blocking threads.

pub mod arena;
mod copy;
pub mod error;
pub mod fork;
pub mod heap;
mod mapping;
pub mod passing;
pub mod ring;
pub mod segment;
pub mod worker_arena;

pub use arena::{Arena, ArenaConfig, ArenaError, ArenaUsage, Lease, LeaseError, SegmentId, Slot};
pub use copy::NON_TEMPORAL_BYTES_MIN;
pub use error::{Blame, ShmError};
pub use fork::{FdRegistration, ForkGuard, ForkSafe, UsedAfterFork};
pub use passing::{
    Credentials, MemClient, MemClientConfig, MemHost, MemReply, MemRequest, PciAddress, ServeOutcome, SessionToken,
    StreamRequest, WorkerToken, peer_credentials, serve_one,
};
pub use segment::{OwnedSegment, PeerSegment, Share, WorkerSegment};
pub use worker_arena::{LeaseOutcome, LeasedSlot, SegmentHold, SharedSlot, SlotHold, WeakSlot, WorkerArena};
