//! Authenticated links between sidecars: the [`Port`] trait and the transports that implement it.
//!
//! [`links`] connects sidecars over the network with mutual authentication, over QUIC ([`quic`]) or TLS 1.3 over TCP
//! (`tcp`). [`identity`], `verifier`, [`ca`] and [`secret`] define who may connect to whom. [`MutualTls`] serves
//! clients that are not sidecars, and [`ServerTls`] connects to servers outside of the job. There is no plaintext transport. The feature `test-util` adds `memory`, a transport
//! within one process. `tests/ports/port_list.rs` runs one list of tests for every transport.

#![forbid(unsafe_code)]

pub mod ca;
#[cfg(test)]
mod fuzz;
mod hello;
pub mod identity;
pub mod links;
#[cfg(feature = "test-util")]
pub mod memory;
mod mutual;
pub mod port;
pub mod quic;
pub mod secret;
mod server_tls;
mod tcp;
mod tls;
mod verifier;

pub use ca::{CaError, JobCa, KeyRequest, Validity, bundle};
pub use hello::LocalHello;
pub use identity::{Identity, IdentityError, SpiffeId, TrustDomain, utc};
pub use links::{
    BoundPort, CertificateFacts, Evicted, HandshakePermit, Handshakes, LinkOptions, LinkSecurity, NetworkPort,
    PathStats, PortError, QuicPath, Routes, SocketOptions,
};
#[cfg(feature = "test-util")]
pub use memory::{MemoryMesh, MemoryPort};
pub use mutual::{Accepted, MutualTls};
pub use port::{DownReason, Outgoing, Port, PortEvent, PortStats, Role, SendError, next_event};
pub use quic::QuicOptions;
pub use secret::{JobSecret, SecretError};
pub use server_tls::ServerTls;
pub use tcp::{
    CIPHER_RECORD_BYTES, CipherError, CipherRate, Congestion, ParseCongestionError, Pool as FramePool, cipher_rates,
};
