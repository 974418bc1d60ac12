//! Shared memory between a worker and its sidecar, and the one place where ronde talks to the kernel about it.
//!
//! - [`segment`]: sealed memfds, mapped and populated, reached by copies only.
//! - [`arena`]: which bytes of which segment are leased. Pure bookkeeping.
//! - [`worker_arena`]: a worker's segments with an arena on them, whose slots are read and written where they lie.
//! - [`passing`]: handing segments over a Unix socket (`mem.sock`), a protocol of three requests.
//! - [`ring`]: messages of a session without system calls, over a pair of rings.
//! - [`heap`]: what the allocator keeps of freed memory.
//! - [`fork`]: what keeps a forked child from holding or using its parent's session.
//! - [`error`]: [`ShmError`], which says who is to blame.
//!
//! **The peer process can write shared bytes at any time.** A sidecar gets no reference and no slice to shared
//! memory; it copies in and out, and whatever it decides, it decides on private bytes. A worker may look at its own bytes, by
//! slices ([`LeasedSlot`]) or by address: its sidecar was asked to fill them and is trusted to leave them alone afterwards.
//!
//! # unsafe
//!
//! This crate is one of the few where `unsafe` is allowed. Each block carries a `SAFETY:` comment that can be checked by
//! reading its own module, and each idea has a module of its own: `mapping` (a mapping, copies out of and into it, and
//! its atomic numbers), `copy` (those copies), [`worker_arena`] (slices of a worker's own slots), `passing::descriptor` (control messages that carry descriptors), `ring::futex` (sleeping on such a
//! number), [`fork`] (a fork handler), [`heap`] (two settings of the allocator).
//!
//! Everything blocks; no async runtime is involved. Callers who have one wrap these calls.

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
    Credentials, MemClient, MemClientConfig, MemHost, MemReply, MemRequest, ServeOutcome, SessionToken,
    peer_credentials, serve_one,
};
pub use segment::{OwnedSegment, PeerSegment, Share, WorkerSegment};
pub use worker_arena::{LeaseOutcome, LeasedSlot, SlotHold, WeakSlot, WorkerArena};
