//! Streams: connections of NCCL's net plugin, which a lane's thread carries from the ring of one worker to that of another.
//!
//! | module | contents |
//! |---|---|
//! | [`gate`] | which workers may have streams, and how many; hands their rings to the lanes |
//! | [`table`] | the streams and listeners of one lane |
//! | `stream` | one stream: its ring and its state |
//! | `frames` | what arrives from other sidecars |
//!
//! A message that a worker writes is copied once, to private memory, and encrypted from there; at the receiver it is
//! copied once, to the ring of its worker. No message waits in a sidecar for a slow receiver: data are popped only with
//! its credit, and while few bytes are queued for the peer.

mod frames;
pub(crate) mod gate;
mod stream;
pub(crate) mod table;
#[cfg(test)]
mod tests;

pub(crate) use gate::{NewStream, Permit, StreamGate};
pub(crate) use table::{StreamConfig, StreamEvent, StreamStats, Streams};
