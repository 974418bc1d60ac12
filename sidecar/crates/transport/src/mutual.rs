//! TLS for clients that are no sidecars: callers of the sidecar's listener for gRPC-Web.
//!
//! Both sides show certificates of the job, as on links, and both are checked by the same verifiers. Clients come with
//! libraries of their own, so there is more to agree on: any suite of TLS 1.3, and X25519 besides the hybrid key exchange of
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

/// Accepts connections of whoever has a certificate of the job.
pub struct MutualTls {
    /// What new connections take.
    current: RwLock<CurrentConfig>,
}

struct CurrentConfig {
    config: Arc<ServerConfig>,
    /// When the sidecar's own certificate ends, since the Unix epoch.
    not_after: Duration,
}

/// A connection whose client has shown a certificate of the job.
pub struct Accepted {
    /// What is said on it.
    pub stream: TlsStream<TcpStream>,
    /// The client's certificate's id.
    pub peer: String,
    /// How long both certificates are valid from now on.
    pub valid_for: Duration,
}

impl MutualTls {
    /// With the certificate and the authorities of an identity.
    ///
    /// # Errors
    /// When TLS cannot be configured with them.
    pub fn new(identity: &Identity) -> Result<Self, PortError> {
        Ok(Self { current: RwLock::new(CurrentConfig::of(identity)?) })
    }

    /// Takes another identity for the connections that come from now on.
    ///
    /// # Errors
    /// When TLS cannot be configured with it; the one before stays.
    pub fn install_identity(&self, identity: &Identity) -> Result<(), PortError> {
        let fresh = CurrentConfig::of(identity)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }

    /// Shakes hands with a client. How long that may take is for the caller to say.
    ///
    /// # Errors
    /// Why the client is refused.
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

/// The suites of TLS 1.3 and two key exchanges, of which the one is taken that the client prefers.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![
        aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
        aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
        aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768, aws_lc_rs::kx_group::X25519];
    Arc::new(provider)
}

/// gRPC-Web needs no more than HTTP/1.1.
const ALPN: &[u8] = b"http/1.1";
