//! Authenticated links between sidecars: the [`Port`] trait and the transports that implement it.
//!
//! [`memory`] joins ports of one process, for tests and simulations. [`links`] joins sidecars over the network with mutual
//! authentication, by [`quic`] or by TLS 1.3 over TCP (`tcp`); [`identity`], `verifier`, [`ca`] and [`secret`] say who may
//! talk to whom. There is no plaintext transport. [`MutualTls`] is for clients that are no sidecars. One test list (`tests/port_list.rs`) holds for all of them.

#![forbid(unsafe_code)]

pub mod ca;
#[cfg(test)]
mod fuzz;
mod hello;
pub mod identity;
pub mod links;
pub mod memory;
mod mutual;
pub mod port;
pub mod quic;
pub mod secret;
mod tcp;
mod tls;
mod verifier;

pub use ca::{CaError, JobCa, KeyRequest, Validity, bundle};
pub use hello::LocalHello;
pub use identity::{Identity, IdentityError, SpiffeId, TrustDomain, utc};
pub use links::{
    BoundPort, CertificateFacts, LinkOptions, LinkSecurity, NetworkPort, PathStats, PortError, QuicPath, Routes,
    SocketOptions,
};
pub use memory::{MemoryMesh, MemoryPort};
pub use mutual::{Accepted, MutualTls};
pub use port::{DownReason, Outgoing, Port, PortEvent, PortStats, Role, SendError, next_event};
pub use quic::QuicOptions;
pub use secret::{JobSecret, SecretError};
pub use tcp::{Congestion, ParseCongestionError};
