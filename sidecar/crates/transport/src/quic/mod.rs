//! QUIC over UDP, by quinn.
//!
//! A port has one endpoint on one UDP socket. Two sidecars have one connection per port, with one bidirectional stream
//! that the dialler opens.
//!
//! | module | contents |
//! |---|---|
//! | this one | the endpoint, close reasons |
//! | `options` | settings, with measurements for their defaults |
//! | `socket` | the UDP socket and its batches |
//! | `tls` | TLS configurations for quinn |
//! | `probe` | checks whether the process of a silent peer still exists |

mod options;
mod probe;
mod socket;
mod tls;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use quinn::{
    AsyncUdpSocket, Connection, ConnectionError, Runtime, ServerConfig, TokioRuntime, TransportConfig, VarInt,
};
use ronde_wire::SidecarIndex;
use ronde_wire::control::{Carrier, Purpose};
use rustls_pki_types::CertificateDer;

pub use options::{QuicCongestion, QuicOptions};
pub(crate) use probe::wait_unreachable;
use socket::BatchLimitedSocket;
pub(crate) use socket::bind;

use crate::identity::Identity;
use crate::links::close::{CloseCode, CloseReason};
use crate::links::connection::ConnectError;
use crate::links::{PathStats, PortError, QuicPath, canonical};
use crate::port::DownReason;
use crate::tls::{SERVER_NAME, reason_text};

/// A port's QUIC endpoint.
pub(crate) struct Endpoint {
    pub(crate) quinn: quinn::Endpoint,
    transport: Arc<TransportConfig>,
}

impl Endpoint {
    /// Starts the endpoint on the runtime of the calling thread. It accepts connections once it has a server
    /// configuration.
    pub(crate) fn new(
        (socket, receive_buffer_bytes): (UdpSocket, usize),
        purpose: Purpose,
        options: &QuicOptions,
    ) -> Result<Self, PortError> {
        let transport = Arc::new(options.transport_config(purpose, receive_buffer_bytes));
        let socket = TokioRuntime.wrap_udp_socket(socket).map_err(PortError::Socket)?;
        let socket: Arc<dyn AsyncUdpSocket> = Arc::new(BatchLimitedSocket::new(socket));
        let made =
            quinn::Endpoint::new_with_abstract_socket(tls::endpoint_config(), None, socket, Arc::new(TokioRuntime));
        Ok(Self { quinn: made.map_err(PortError::Socket)?, transport })
    }

    /// Builds the server configuration for an identity.
    pub(crate) fn server_config(&self, identity: &Identity) -> Result<ServerConfig, PortError> {
        tls::server_config(identity, self.transport.clone())
    }

    /// Dials a peer.
    pub(crate) async fn connect(
        &self,
        identity: &Identity,
        peer: SidecarIndex,
        address: SocketAddr,
    ) -> Result<Connection, ConnectError> {
        let config = tls::client_config(identity, peer, self.transport.clone());
        let config = config.map_err(|error| ConnectError::Local(error.to_string()))?;
        let connecting = self.quinn.connect_with(config, address, SERVER_NAME);
        let connecting = connecting.map_err(|error| ConnectError::Local(error.to_string()))?;
        connecting.await.map_err(|error| ConnectError::Closed(close_reason(&error)))
    }

    /// Closes all connections.
    pub(crate) fn close(&self, reason: &str) {
        self.quinn.close(VarInt::from_u32(CloseCode::Closed as u32), reason.as_bytes());
    }
}

/// Closes a connection and sends the reason to the peer.
pub(crate) fn close(connection: &Connection, code: CloseCode, reason: &str) {
    let end = reason.floor_char_boundary(REASON_BYTES_MAX);
    connection.close(VarInt::from_u32(code as u32), &reason.as_bytes()[..end]);
}

/// The peer's certificates, leaf first.
pub(crate) fn peer_certificates(connection: &Connection) -> Vec<CertificateDer<'static>> {
    let chain = connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    chain.map(|chain| *chain).unwrap_or_default()
}

/// quinn's statistics of the path to a peer.
pub(crate) fn path(connection: &Connection) -> PathStats {
    let stats = connection.stats();
    let path = stats.path;
    PathStats {
        carrier: Carrier::Quic,
        peer_address: canonical(connection.remote_address()),
        sent_bytes: stats.udp_tx.bytes,
        received_bytes: stats.udp_rx.bytes,
        quic: Some(QuicPath {
            round_trip: path.rtt,
            datagram_bytes: path.current_mtu,
            window_bytes: path.cwnd,
            packets_sent: path.sent_packets,
            packets_lost: path.lost_packets,
            lost_bytes: path.lost_bytes,
        }),
    }
}

/// Interprets the end of a connection.
pub(crate) fn close_reason(error: &ConnectionError) -> CloseReason {
    match error {
        ConnectionError::TransportError(error) if is_tls_alert(error.code.into()) => {
            CloseReason::RefusedLocally(reason_text(&error.reason))
        }
        ConnectionError::TransportError(error) => CloseReason::Other(DownReason::Protocol(error.to_string())),
        ConnectionError::ConnectionClosed(close) if is_tls_alert(close.error_code.into()) => {
            CloseReason::RefusedByPeer(reason_text(&text(&close.reason)))
        }
        ConnectionError::ApplicationClosed(close) => {
            let code = u32::try_from(close.error_code.into_inner()).ok().and_then(CloseCode::of);
            CloseReason::of_code(code, text(&close.reason))
        }
        ConnectionError::TimedOut => {
            CloseReason::Other(DownReason::Lost("the idle timeout passed without a packet from the peer".to_owned()))
        }
        ConnectionError::Reset => {
            CloseReason::Other(DownReason::Lost("the peer does not know this connection".to_owned()))
        }
        other => CloseReason::Other(DownReason::Lost(other.to_string())),
    }
}

/// TLS errors are 0x100 plus the alert (RFC 9001 section 4.8).
fn is_tls_alert(code: u64) -> bool {
    (0x100..0x200).contains(&code)
}

fn text(reason: &[u8]) -> String {
    String::from_utf8_lossy(reason).into_owned()
}

/// A close frame must fit one packet, and packets have at least 1,200 bytes.
const REASON_BYTES_MAX: usize = 1_000;
