//! Passes segments over `mem.sock`, a Unix stream socket. Request and reply are one line of text with at most one
//! descriptor each.
//!
//! | request | descriptor | reply | descriptor |
//! |---|---|---|---|
//! | `ATTACH <token> <segment> <bytes>` | the input segment | `OK` or `ERR <reason>` | none |
//! | `RESULT <token> <segment>` | none | `OK <bytes>` or `ERR <reason>` | the result segment with `OK` |
//! | `RING <token> <capacity>` | the session's ring ([`crate::ring`]) | `OK` or `ERR <reason>` | none |
//! | `STREAM <worker> <token> <capacity> <lane>` | the ring of a stream of NCCL's net plugin | `OK` or `ERR <reason>` | none |
//!
//! After the `OK` of a `RING` or `STREAM` request the connection carries no more lines: it becomes the ring's bell, on
//! which a byte in either direction means "poll the ring". A `STREAM` request needs no session: its token is the contents
//! of the worker's token file.
//!
//! Lines end in `\n`, are printable ASCII, and have at most [`LINE_BYTES_MAX`] bytes. Words are separated by exactly
//! one space. A session's token is 32 lowercase hex digits, a worker's 64; numbers are decimal without sign or leading zeros, so each message
//! has one spelling. The worker sends one request at a time and the sidecar replies. Either side closes the connection
//! when it receives an invalid line. `ERR` replies to a valid request that is rejected, and the connection stays open.
//!
//! Both ends use blocking sockets with timeouts. The sidecar serves each connection on a blocking thread; a session has
//! a few exchanges, one for each segment.

mod client;
pub(crate) mod connection;
mod credentials;
pub(crate) mod descriptor;
mod message;
mod pci;
mod serve;
mod token;

pub use client::{MemClient, MemClientConfig};
pub use credentials::{Credentials, peer_credentials};
pub use descriptor::{LINE_BYTES_MAX, LINE_READS_MAX, Received, recv_with_fd, send_with_fd};
pub use message::{MemReply, MemRequest, StreamRequest};
pub use pci::PciAddress;
pub use serve::{MemHost, ServeOutcome, serve_one};
pub use token::{SessionToken, WorkerToken};
