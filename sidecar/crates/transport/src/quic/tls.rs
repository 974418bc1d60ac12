//! TLS configurations in the form that quinn needs.

use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, EndpointConfig, ServerConfig, TransportConfig};
use ronde_wire::SidecarIndex;

use crate::identity::Identity;
use crate::links::PortError;
use crate::tls;

/// The configuration of the accepting side.
pub(super) fn server_config(identity: &Identity, transport: Arc<TransportConfig>) -> Result<ServerConfig, PortError> {
    let tls = tls::server_config(identity)?;
    let crypto = QuicServerConfig::try_from(tls).expect("the provider has AES-128-GCM, which QUIC begins with");
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(transport).migration(false).max_incoming(INCOMING_MAX);
    config.incoming_buffer_size(INCOMING_BYTES_MAX).incoming_buffer_size_total(INCOMING_TOTAL_BYTES_MAX);
    Ok(config)
}

/// The configuration of the dialling side.
pub(super) fn client_config(
    identity: &Identity,
    peer: SidecarIndex,
    transport: Arc<TransportConfig>,
) -> Result<ClientConfig, PortError> {
    let tls = tls::client_config(identity, peer)?;
    let crypto = QuicClientConfig::try_from(tls).expect("the provider has AES-128-GCM, which QUIC begins with");
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport);
    Ok(config)
}

/// Accepts datagrams of any size that the peer's path MTU discovery probes.
pub(super) fn endpoint_config() -> EndpointConfig {
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(UDP_PAYLOAD_BYTES_MAX).expect("the largest value of the protocol");
    config
}

const UDP_PAYLOAD_BYTES_MAX: u16 = 65_527;
/// Limit for connections whose first datagram has arrived and that are not accepted yet.
const INCOMING_MAX: usize = 1_024;
const INCOMING_BYTES_MAX: u64 = 64 << 10;
const INCOMING_TOTAL_BYTES_MAX: u64 = 16 << 20;
