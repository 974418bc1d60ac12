//! Passing segments over `mem.sock`, a Unix stream socket: one line of text and at most one descriptor each way.
//!
//! | request | descriptor | reply | descriptor |
//! |---|---|---|---|
//! | `ATTACH <token> <segment> <bytes>` | the input segment | `OK` or `ERR <reason>` | none |
//! | `RESULT <token> <segment>` | none | `OK <bytes>` or `ERR <reason>` | the result segment with `OK` |
//! | `RING <token> <capacity>` | the session's ring ([`crate::ring`]) | `OK` or `ERR <reason>` | none |
//!
//! After the `OK` of a `RING` the connection carries no more lines: it is the ring's bell, a byte each way means "look".
//!
//! Lines end in `\n`, are printable ASCII and have at most [`LINE_BYTES_MAX`] bytes. Words are separated by exactly one space. A
//! token is 32 lowercase hex digits, numbers are decimal without sign or leading zeros, so each message has one spelling.
//! The worker asks, the sidecar answers, one request at a time. Whoever meets a line outside this closes the connection;
//! `ERR` answers a request that was understood, and the connection goes on.
//!
//! Both ends use blocking sockets with timeouts. The sidecar serves each connection on a blocking thread: it sees one
//! exchange for each segment of a session, a few in its life.

mod client;
pub(crate) mod connection;
mod credentials;
pub(crate) mod descriptor;
mod message;
mod serve;
mod token;

pub use client::{MemClient, MemClientConfig};
pub use credentials::{Credentials, peer_credentials};
pub use descriptor::{LINE_BYTES_MAX, LINE_READS_MAX, Received, recv_with_fd, send_with_fd};
pub use message::{MemReply, MemRequest};
pub use serve::{MemHost, ServeOutcome, serve_one};
pub use token::SessionToken;
