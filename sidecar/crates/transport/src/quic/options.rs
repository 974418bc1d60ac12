//! Settings of QUIC, with measurements for their defaults.

use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::{BbrConfig, CubicConfig};
use quinn::{AckFrequencyConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};
use ronde_wire::control::Purpose;

/// Settings of links over QUIC.
///
/// The defaults were measured with `examples/throughput.rs`: two ports on loopback, 1 MiB chunks, one thread each. The
/// table has GB received per second of processor time of the busier thread, in one direction / both directions summed,
/// on two cores that were also used by other programs. Compare ratios only.
///
/// | setting | GB/s | remark |
/// |---|---|---|
/// | `mtu_upper_bound` 1,452 | 0.5 / 0.7 | |
/// | 6,500; 8,952; 16,000; 32,000; 65,000 | 1.2-1.5 / 1.2-1.5 | no gain beyond jumbo frames |
/// | CUBIC | 1.3 / 1.2 | |
/// | BBR | 1.3 / 1.3 | the same without loss; experimental in quinn |
/// | `initial_window_bytes` 64 KiB; 1 MiB | equal | a larger one saves round trips at the start |
/// | `ack_threshold` 0; 10; 32 | 1.3 / 1.0; 1.3 / 1.0; 1.4 / 1.0 | |
/// | `window_bytes` 2 MiB; 16 MiB | 1.4 / 2.0; 1.3 / 1.9 | 16 MiB carries 100 Gbit/s over a round trip of 1 ms |
#[derive(Clone, Debug, PartialEq)]
pub struct QuicOptions {
    /// The initial datagram size in bytes of UDP payload, 1,200 to 1,452. A value above the path MTU makes the whole
    /// connection slow.
    pub initial_mtu: u16,
    /// The largest datagram that path MTU discovery probes, in bytes of UDP payload. The default fits a jumbo frame of
    /// 9,000 bytes over IPv6.
    pub mtu_upper_bound: u16,
    /// The congestion control algorithm.
    pub congestion: QuicCongestion,
    /// The initial congestion window in bytes.
    pub initial_window_bytes: u64,
    /// The flow control window in bytes: how far a peer may send ahead of the reader. It is lowered if the system
    /// grants a small receive buffer. Equally many bytes may be sent without being acknowledged.
    pub window_bytes: u32,
    /// How many datagrams the receiver may collect before it acknowledges them; 0 is QUIC's default, every second one.
    pub ack_threshold: u32,
}

/// Congestion control algorithms of QUIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuicCongestion {
    /// CUBIC, RFC 9438.
    Cubic,
    /// BBR (bottleneck bandwidth and round-trip time), experimental in quinn.
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
    /// quinn's settings for a port with a receive buffer of this size.
    pub(super) fn transport_config(&self, purpose: Purpose, receive_buffer_bytes: usize) -> TransportConfig {
        // Half of the buffer, because the kernel counts its own overhead in it.
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
            // Heartbeats keep a control link alive. A lane is idle during a long compute phase and needs keep-alive
            // packets.
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

/// Keeps a link usable if the system grants a small buffer: dropped datagrams are retransmitted.
const RECEIVE_WINDOW_BYTES_MIN: u32 = 1 << 20;
/// Hosts of a cluster are near: a lost first datagram is retransmitted after three times this value instead of a
/// second.
const INITIAL_RTT: Duration = Duration::from_millis(50);
/// A network interruption of some seconds looks like a path that stopped to carry large datagrams. They are probed
/// again after this time instead of a minute.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT_MS: u32 = 30_000;
/// A third of the idle timeout, so that two lost packets do not close a lane.
const LANE_KEEP_ALIVE: Duration = Duration::from_secs(10);
