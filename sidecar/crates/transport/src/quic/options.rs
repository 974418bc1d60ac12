//! Settings of a port, with the figures behind their defaults.

use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::{BbrConfig, CubicConfig};
use quinn::{AckFrequencyConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};
use ronde_wire::control::Purpose;

/// What to ask of the operating system for a socket.
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

/// Settings of a QUIC port.
#[derive(Clone, Debug, PartialEq)]
pub struct QuicOptions {
    /// How long an opened link may take until it is up; then it is down.
    pub start_timeout: Duration,
    /// The datagram size to begin with, in bytes of UDP payload: 1,200 to 1,452. A start above what the network carries
    /// is slow for the whole connection.
    pub initial_mtu: u16,
    /// The largest datagram that discovery tries, in bytes of UDP payload.
    pub mtu_upper_bound: u16,
    /// How the sending rate is found.
    pub congestion: Congestion,
    /// The window to begin with, in bytes.
    pub initial_window_bytes: u64,
    /// How many datagrams a receiver may collect before it acknowledges; 0 asks for QUIC's default, every second one.
    pub ack_threshold: u32,
}

/// Algorithms of congestion control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Congestion {
    /// RFC 9438.
    Cubic,
    /// Bottleneck bandwidth and round-trip time, experimental in quinn.
    Bbr,
}

impl Default for QuicOptions {
    fn default() -> Self {
        Self {
            start_timeout: Duration::from_secs(30),
            initial_mtu: 1_452,
            mtu_upper_bound: 8_952,
            congestion: Congestion::Cubic,
            initial_window_bytes: 1 << 20,
            ack_threshold: 10,
        }
    }
}

impl QuicOptions {
    /// quinn's settings for a port that was granted this receive buffer.
    pub(super) fn transport_config(&self, purpose: Purpose, receive_buffer_bytes: usize) -> TransportConfig {
        let window = receive_window_bytes(receive_buffer_bytes);
        let window = VarInt::from_u32(u32::try_from(window).unwrap_or(u32::MAX));
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.mtu_upper_bound);
        let mut config = TransportConfig::default();
        config
            .max_concurrent_bidi_streams(VarInt::from_u32(1))
            .max_concurrent_uni_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .stream_receive_window(window)
            .receive_window(window)
            .send_window(SEND_WINDOW_BYTES)
            .initial_rtt(INITIAL_RTT)
            .initial_mtu(self.initial_mtu)
            .mtu_discovery_config(Some(discovery))
            .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(IDLE_TIMEOUT_MS))))
            // Heartbeats keep a control link alive. A lane says nothing during a long compute phase and must outlive it.
            .keep_alive_interval((purpose != Purpose::Control).then_some(LANE_KEEP_ALIVE));
        if self.ack_threshold > 0 {
            let mut acks = AckFrequencyConfig::default();
            acks.ack_eliciting_threshold(VarInt::from_u32(self.ack_threshold));
            config.ack_frequency_config(Some(acks));
        }
        match self.congestion {
            Congestion::Cubic => {
                let mut cubic = CubicConfig::default();
                cubic.initial_window(self.initial_window_bytes);
                config.congestion_controller_factory(Arc::new(cubic));
            }
            Congestion::Bbr => {
                let mut bbr = BbrConfig::default();
                bbr.initial_window(self.initial_window_bytes);
                config.congestion_controller_factory(Arc::new(bbr));
            }
        }
        config
    }
}

/// Half of the granted buffer, because the system counts its own overhead in it; within bounds that keep a link useful
/// where little is granted, and memory bounded where much is.
fn receive_window_bytes(receive_buffer_bytes: usize) -> usize {
    (receive_buffer_bytes / 2).clamp(RECEIVE_WINDOW_BYTES_MIN, RECEIVE_WINDOW_BYTES_MAX)
}

const RECEIVE_WINDOW_BYTES_MIN: usize = 1 << 20;
const RECEIVE_WINDOW_BYTES_MAX: usize = 32 << 20;
/// Bytes that a connection may have written and not yet acknowledged; as much as the largest receive window.
const SEND_WINDOW_BYTES: u64 = RECEIVE_WINDOW_BYTES_MAX as u64;
/// Hosts of a cluster are near: a lost first datagram is sent again after three times this, not after a second.
const INITIAL_RTT: Duration = Duration::from_millis(50);
const IDLE_TIMEOUT_MS: u32 = 30_000;
/// A third of the idle timeout, so that two lost ones do not end a lane.
const LANE_KEEP_ALIVE: Duration = Duration::from_secs(10);
