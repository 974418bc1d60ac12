//! Settings of a port.

use std::time::Duration;

use crate::quic::QuicOptions;
use crate::tcp::Congestion;

/// The buffer sizes to request for a UDP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Receive buffer in bytes; the system may grant less.
    pub receive_buffer_bytes: usize,
    /// Send buffer in bytes; the system may grant less.
    pub send_buffer_bytes: usize,
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self { receive_buffer_bytes: 32 << 20, send_buffer_bytes: 8 << 20 }
    }
}

/// Settings of a port's links.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkOptions {
    /// How long an opened link may take until it is up; after that it is down.
    pub start_timeout: Duration,
    /// How long a link stays up after the peer's authority is removed, while the peer presents no other certificate.
    pub untrusted_grace: Duration,
    /// Settings of QUIC.
    pub quic: QuicOptions,
    /// Congestion control of TCP connections.
    pub congestion: Congestion,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            start_timeout: Duration::from_secs(30),
            untrusted_grace: Duration::from_secs(30),
            quic: QuicOptions::default(),
            congestion: Congestion::default(),
        }
    }
}
