//! Authenticated links between sidecars.

#![forbid(unsafe_code)]

pub mod port;

pub use port::{DownReason, Outgoing, Port, PortEvent, PortStats, Role, SendError, next_event};
