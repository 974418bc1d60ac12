//! Configurations of TLS 1.3 that both carriers share: mutual authentication, and nothing of an earlier connection.

use std::sync::Arc;

use ronde_wire::SidecarIndex;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, ServerConfig};

use crate::identity::{Identity, crypto_provider};
use crate::links::PortError;
use crate::verifier::{AcceptedPeerVerifier, DialedPeerVerifier};

/// For the side that accepts: any sidecar of the job, which must then be the one that its hello claims.
pub(crate) fn server_config(identity: &Identity) -> Result<ServerConfig, PortError> {
    server_config_with(identity, crypto_provider(), ALPN)
}

/// For a side that accepts whoever has a certificate of the job, with this cryptography, for one protocol.
pub(crate) fn server_config_with(
    identity: &Identity,
    provider: Arc<CryptoProvider>,
    protocol: &[u8],
) -> Result<ServerConfig, PortError> {
    let verifier = AcceptedPeerVerifier::new(identity.id().clone(), identity.root_store()?, provider.clone())
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    let mut tls = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(identity.certificate_chain(), identity.key())?;
    tls.alpn_protocols = vec![protocol.to_vec()];
    tls.max_early_data_size = 0;
    tls.send_tls13_tickets = 0;
    tls.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok(tls)
}

/// For the side that dials: exactly one sidecar of the job.
pub(crate) fn client_config(identity: &Identity, peer: SidecarIndex) -> Result<ClientConfig, PortError> {
    let provider = crypto_provider();
    let roots = identity.root_store()?;
    let verifier = DialedPeerVerifier { expected: identity.id().of_sidecar(peer), roots, provider: provider.clone() };
    let mut tls = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(identity.certificate_chain(), identity.key())?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls.enable_early_data = false;
    tls.enable_sni = false;
    tls.resumption = Resumption::disabled();
    Ok(tls)
}

/// The text of rustls without the words around ronde's own.
pub(crate) fn reason_text(reason: &str) -> String {
    match reason.strip_prefix("other error: ").unwrap_or(reason) {
        "peer sent no certificates" => "the peer shows no certificate; both sides of a link need one".to_owned(),
        reason => reason.to_owned(),
    }
}

/// Names play no part: the verifier looks for an id, and no name is sent.
pub(crate) const SERVER_NAME: &str = "sidecar.invalid";
/// The name under which both sides offer the protocol; others are turned away by TLS.
pub(crate) const ALPN: &[u8] = b"ronde/1";
