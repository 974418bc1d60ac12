//! Configurations for quinn and rustls.

use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, EndpointConfig, ServerConfig, TransportConfig};
use ronde_wire::SidecarIndex;
use rustls::client::Resumption;

use super::QuicError;
use crate::identity::{Identity, crypto_provider};
use crate::verifier::{AcceptVerifier, DialVerifier};

/// For the side that accepts: any sidecar of the job, which must then be the one that its hello claims.
pub(super) fn server_config(identity: &Identity, transport: Arc<TransportConfig>) -> Result<ServerConfig, QuicError> {
    let provider = crypto_provider();
    let verifier = AcceptVerifier::new(identity.id().clone(), identity.root_store()?, provider.clone())
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(identity.certificate_chain(), identity.key())?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls.max_early_data_size = 0;
    tls.send_tls13_tickets = 0;
    tls.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    let crypto = QuicServerConfig::try_from(tls).expect("the provider has AES-128-GCM, which QUIC begins with");
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(transport).migration(false).max_incoming(INCOMING_MAX);
    config.incoming_buffer_size(INCOMING_BYTES_MAX).incoming_buffer_size_total(INCOMING_TOTAL_BYTES_MAX);
    Ok(config)
}

/// For the side that dials: exactly one sidecar of the job.
pub(super) fn client_config(
    identity: &Identity,
    peer: SidecarIndex,
    transport: Arc<TransportConfig>,
) -> Result<ClientConfig, QuicError> {
    let provider = crypto_provider();
    let roots = identity.root_store()?;
    let verifier = DialVerifier { expected: identity.id().of_sidecar(peer), roots, provider: provider.clone() };
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(identity.certificate_chain(), identity.key())?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls.enable_early_data = false;
    tls.enable_sni = false;
    tls.resumption = Resumption::disabled();
    let crypto = QuicClientConfig::try_from(tls).expect("the provider has AES-128-GCM, which QUIC begins with");
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport);
    Ok(config)
}

/// Takes datagrams of any size that a peer's discovery tries.
pub(super) fn endpoint_config() -> EndpointConfig {
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(UDP_PAYLOAD_BYTES_MAX).expect("the largest value of the protocol");
    config
}

/// The name under which both sides offer the protocol; others are turned away by TLS.
const ALPN: &[u8] = b"ronde/1";
const UDP_PAYLOAD_BYTES_MAX: u16 = 65_527;
/// Connections that have sent a first datagram and are not yet being accepted.
const INCOMING_MAX: usize = 1_024;
const INCOMING_BYTES_MAX: u64 = 64 << 10;
const INCOMING_TOTAL_BYTES_MAX: u64 = 16 << 20;
