//! Settings of a port.

use std::time::Duration;

use crate::quic::QuicOptions;
use crate::tcp::Congestion;

/// What to ask of the operating system for a UDP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Receive buffer to ask for, in bytes; the system may grant less.
    pub receive_buffer_bytes: usize,
    /// Send buffer to ask for, in bytes.
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
    /// How long an opened link may take until it is up; then it is down.
    pub start_timeout: Duration,
    /// How long a link stays whose peer shows no other certificate than one of an authority that is not accepted any more.
    pub untrusted_grace: Duration,
    /// For links over QUIC.
    pub quic: QuicOptions,
    /// Of connections over TCP.
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
