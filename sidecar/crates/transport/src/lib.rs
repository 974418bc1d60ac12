//! Authenticated links between sidecars: the [`Port`] trait and the two transports that implement it.
//!
//! [`memory`] joins ports of one process, for tests and simulations. [`quic`] joins sidecars over QUIC with TLS 1.3 and
//! mutual authentication; [`identity`], `verifier`, [`ca`] and [`secret`] say who may talk to whom. There is no plaintext transport.
//! One test list (`tests/port_list.rs`) holds for both.

#![forbid(unsafe_code)]

pub mod ca;
mod hello;
pub mod identity;
pub mod memory;
pub mod port;
pub mod quic;
pub mod secret;
mod verifier;

pub use ca::{CaError, JobCa, KeyRequest, Validity, bundle};
pub use hello::LocalHello;
pub use identity::{Identity, IdentityError, SpiffeId, TrustDomain, utc};
pub use memory::{MemoryMesh, MemoryPort};
pub use port::{DownReason, Outgoing, Port, PortEvent, PortStats, Role, SendError, next_event};
pub use quic::{
    BoundPort, CertificateFacts, LinkSecurity, PathStats, QuicError, QuicOptions, QuicPort, Routes, SocketOptions,
};
pub use secret::{JobSecret, SecretError};
