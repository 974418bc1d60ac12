//! TLS 1.3 configurations that QUIC and TCP share: mutual authentication, without session resumption.

use std::sync::Arc;

use ronde_wire::SidecarIndex;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, ServerConfig};

use crate::identity::{Identity, crypto_provider};
use crate::links::PortError;
use crate::verifier::{AcceptedPeerVerifier, DialedPeerVerifier};

/// The configuration of the accepting side: it accepts any sidecar of the job, whose hello must then claim the same
/// index.
pub(crate) fn server_config(identity: &Identity) -> Result<ServerConfig, PortError> {
    server_config_with(identity, crypto_provider(), ALPN)
}

/// The configuration of a side that accepts any certificate of the job, with the given cryptography and ALPN protocol.
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

/// The configuration of the dialling side: it accepts exactly one sidecar of the job.
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

/// rustls' reason without its own prefix, so that ronde's error text remains.
pub(crate) fn reason_text(reason: &str) -> String {
    match reason.strip_prefix("other error: ").unwrap_or(reason) {
        "peer sent no certificates" => "the peer shows no certificate; both sides of a link need one".to_owned(),
        reason => reason.to_owned(),
    }
}

/// A placeholder: no server name is sent (SNI is off), and the verifier checks the SPIFFE id instead.
pub(crate) const SERVER_NAME: &str = "sidecar.invalid";
/// The ALPN protocol of links. TLS rejects peers that do not offer it.
pub(crate) const ALPN: &[u8] = b"ronde/1";
