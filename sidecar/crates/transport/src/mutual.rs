//! Mutual TLS for clients that are not sidecars: callers of the gRPC-Web listener.
//!
//! As on links, both sides present certificates of the job, which the same verifiers check. Clients bring their own TLS
//! libraries, so more is negotiable: any cipher suite of TLS 1.3, and X25519 in addition to the hybrid key exchange of
//! links.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::identity::{CertificateClaims, Identity};
use crate::links::PortError;
use crate::tls::server_config_with;

/// Accepts TLS connections from clients with a certificate of the job.
pub struct MutualTls {
    /// The configuration for new connections.
    current: RwLock<CurrentConfig>,
}

struct CurrentConfig {
    config: Arc<ServerConfig>,
    /// When the sidecar's own certificate expires, since the Unix epoch.
    not_after: Duration,
}

/// An accepted connection of an authenticated client.
pub struct Accepted {
    /// The connection.
    pub stream: TlsStream<TcpStream>,
    /// The SPIFFE id in the client's certificate.
    pub peer: String,
    /// How long both certificates remain valid.
    pub valid_for: Duration,
}

impl MutualTls {
    /// Creates an acceptor from an identity's certificate and authorities.
    ///
    /// # Errors
    /// [`PortError`] if TLS cannot be configured with them.
    pub fn new(identity: &Identity) -> Result<Self, PortError> {
        Ok(Self { current: RwLock::new(CurrentConfig::of(identity)?) })
    }

    /// Replaces the identity for new connections.
    ///
    /// # Errors
    /// [`PortError`] if TLS cannot be configured with the new identity; the earlier one stays in use.
    pub fn install_identity(&self, identity: &Identity) -> Result<(), PortError> {
        let fresh = CurrentConfig::of(identity)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }

    /// Performs the TLS handshake with a client. The caller sets a timeout.
    ///
    /// # Errors
    /// The reason why the client is rejected.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<Accepted> {
        let (config, own_end) = {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            (Arc::clone(&current.config), current.not_after)
        };
        let stream = TlsAcceptor::from(config).accept(stream).await?;
        let leaf = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let leaf = leaf.ok_or_else(|| io::Error::other("the client shows no certificate"))?;
        let claims = CertificateClaims::parse(leaf).map_err(io::Error::other)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let end = Duration::from_secs(claims.not_after.as_secs()).min(own_end);
        let peer = claims.id.to_string();
        Ok(Accepted { stream, peer, valid_for: end.saturating_sub(now) })
    }
}

impl CurrentConfig {
    fn of(identity: &Identity) -> Result<Self, PortError> {
        let config = Arc::new(server_config_with(identity, provider(), ALPN)?);
        Ok(Self { config, not_after: Duration::from_secs(identity.not_after().as_secs()) })
    }
}

/// All cipher suites of TLS 1.3 and two key exchanges; the client's preference decides.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![
        aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
        aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
        aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768, aws_lc_rs::kx_group::X25519];
    Arc::new(provider)
}

/// The ALPN protocol: gRPC-Web needs HTTP/1.1 only.
const ALPN: &[u8] = b"http/1.1";
