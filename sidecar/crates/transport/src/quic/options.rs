//! Settings of QUIC, with the figures behind their defaults.

use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::{BbrConfig, CubicConfig};
use quinn::{AckFrequencyConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};
use ronde_wire::control::Purpose;

/// Settings of links over QUIC.
///
/// The defaults come from `examples/throughput.rs`: two ports on loopback, 1 MiB chunks, a thread each. The figures are GB
/// received in each second of the busier thread's processor, one way / both ways summed, on two cores that others kept
/// busy too: ratios matter.
///
/// | what is varied | figures |
/// |---|---|
/// | `mtu_upper_bound` 1,452 | 0.5 / 0.7 |
/// | 6,500; 8,952; 16,000; 32,000; 65,000 | 1.2-1.5 / 1.2-1.5: beyond jumbo frames nothing is gained |
/// | Cubic; BBR | 1.3 / 1.2; 1.3 / 1.3: the same without loss, and quinn calls its BBR experimental |
/// | `initial_window_bytes` 64 KiB; 1 MiB | the same; a larger one saves round trips at the start |
/// | `ack_threshold` 0; 10; 32 | 1.3 / 1.0; 1.3 / 1.0; 1.4 / 1.0 |
/// | `window_bytes` 2 MiB; 16 MiB | 1.4 / 2.0; 1.3 / 1.9: 16 MiB carries 100 Gbit/s over a round trip of 1 ms |
#[derive(Clone, Debug, PartialEq)]
pub struct QuicOptions {
    /// The datagram size to begin with, in bytes of UDP payload: 1,200 to 1,452. A start above what the network carries
    /// is slow for the whole connection.
    pub initial_mtu: u16,
    /// The largest datagram that discovery tries, in bytes of UDP payload. The default is what a jumbo frame of 9,000
    /// bytes carries over IPv6.
    pub mtu_upper_bound: u16,
    /// How the sending rate is found.
    pub congestion: QuicCongestion,
    /// The congestion window to begin with, in bytes.
    pub initial_window_bytes: u64,
    /// The most that a peer may send ahead of what was read, in bytes; less where the system grants a small receive
    /// buffer. As much may be sent and not yet acknowledged.
    pub window_bytes: u32,
    /// How many datagrams a receiver may collect before it acknowledges; 0 asks for QUIC's default, every second one.
    pub ack_threshold: u32,
}

/// Algorithms of congestion control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuicCongestion {
    /// RFC 9438.
    Cubic,
    /// Bottleneck bandwidth and round-trip time, experimental in quinn.
    Bbr,
}

impl Default for QuicOptions {
    fn default() -> Self {
        Self {
            initial_mtu: 1_452,
            mtu_upper_bound: 8_952,
            congestion: QuicCongestion::Cubic,
            initial_window_bytes: 1 << 20,
            window_bytes: 16 << 20,
            ack_threshold: 10,
        }
    }
}

impl QuicOptions {
    /// quinn's settings for a port that was granted this receive buffer.
    pub(super) fn transport_config(&self, purpose: Purpose, receive_buffer_bytes: usize) -> TransportConfig {
        // Half of the granted buffer, because the system counts its own overhead in it.
        let granted = u32::try_from(receive_buffer_bytes / 2).unwrap_or(u32::MAX).max(RECEIVE_WINDOW_BYTES_MIN);
        let window = VarInt::from_u32(self.window_bytes.min(granted));
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.mtu_upper_bound).black_hole_cooldown(BLACK_HOLE_COOLDOWN);
        let mut config = TransportConfig::default();
        config
            .max_concurrent_bidi_streams(VarInt::from_u32(1))
            .max_concurrent_uni_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .stream_receive_window(window)
            .receive_window(window)
            .send_window(u64::from(self.window_bytes))
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
            QuicCongestion::Cubic => {
                let mut cubic = CubicConfig::default();
                cubic.initial_window(self.initial_window_bytes);
                config.congestion_controller_factory(Arc::new(cubic));
            }
            QuicCongestion::Bbr => {
                let mut bbr = BbrConfig::default();
                bbr.initial_window(self.initial_window_bytes);
                config.congestion_controller_factory(Arc::new(bbr));
            }
        }
        config
    }
}

/// Keeps a link useful where little is granted: a datagram that finds no room is sent again.
const RECEIVE_WINDOW_BYTES_MIN: u32 = 1 << 20;
/// Hosts of a cluster are near: a lost first datagram is sent again after three times this, not after a second.
const INITIAL_RTT: Duration = Duration::from_millis(50);
/// A network that was cut for seconds looks like one that has stopped to carry large datagrams; they are tried again after
/// this, not after a minute.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT_MS: u32 = 30_000;
/// A third of the idle timeout, so that two lost ones do not end a lane.
const LANE_KEEP_ALIVE: Duration = Duration::from_secs(10);
