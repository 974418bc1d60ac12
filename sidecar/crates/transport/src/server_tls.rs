//! TLS to servers that are no part of a job, such as a collector of metrics: their certificates name their host.

use std::io;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::ca::certificates;
use crate::mutual::provider;

/// Connects to servers whose certificates lead to given authorities. TLS 1.3 only.
pub struct ServerTls(TlsConnector);

impl ServerTls {
    /// Trusts these authorities, a bundle in PEM, and no others. The bundle of a system may have certificates that are not
    /// supported here: they are left out, and the log says how many.
    ///
    /// # Errors
    /// What is wrong with the bundle, as a sentence without its file.
    pub fn trusting(ca_pem: &str) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        let bundle = certificates(ca_pem).map_err(|error| error.to_string())?;
        let (used, left_out) = roots.add_parsable_certificates(bundle);
        if used == 0 {
            return Err(format!("it has no certificate of an authority that is supported, and {left_out} others"));
        }
        if left_out > 0 {
            tracing::warn!(
                used,
                left_out,
                "certificates of a bundle of authorities are not supported, and not trusted"
            );
        }
        let tls = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]);
        let tls = tls.map_err(|error| error.to_string())?.with_root_certificates(roots);
        let mut tls = tls.with_no_client_auth();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        tls.enable_early_data = false;
        tls.resumption = Resumption::disabled();
        Ok(Self(TlsConnector::from(Arc::new(tls))))
    }

    /// Performs the TLS handshake with the server of this name or address. The caller sets a timeout.
    ///
    /// # Errors
    /// Why the server is not accepted.
    pub async fn connect(&self, stream: TcpStream, host: &str) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::ServerConfig;
    use rustls_pki_types::PrivateKeyDer;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// An authority's certificate, and a server of that authority with a certificate for `localhost`.
    fn server() -> (String, TlsAcceptor) {
        let key = || KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
        let own = key();
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        let leaf = leaf.signed_by(&own, &authority).expect("a certificate");
        let tls = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]);
        let private = PrivateKeyDer::try_from(own.serialize_der()).expect("a key");
        let tls = tls.expect("TLS 1.3").with_no_client_auth().with_single_cert(vec![leaf.der().clone()], private);
        (authority.pem(), TlsAcceptor::from(Arc::new(tls.expect("they belong together"))))
    }

    /// Connects to a server by a name, trusting an authority; returns how the handshake ends.
    async fn connected(trusted: &str, acceptor: TlsAcceptor, host: &str) -> io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.expect("it connects");
            acceptor.accept(stream).await.map(drop)
        });
        let stream = TcpStream::connect(address).await.expect("it listens");
        let client = ServerTls::trusting(trusted).expect("an authority").connect(stream, host).await;
        drop(server);
        client.map(drop)
    }

    #[tokio::test]
    async fn only_a_server_of_the_authority_that_has_the_name_is_accepted() {
        let (authority, acceptor) = server();
        connected(&authority, acceptor.clone(), "localhost").await.expect("it is the one");
        let other = connected(&authority, acceptor.clone(), "collector.example").await.expect_err("another name");
        assert!(other.to_string().contains("not valid for name"), "{other}");
        let (foreign, _) = server();
        let unknown = connected(&foreign, acceptor, "localhost").await.expect_err("another authority");
        assert!(unknown.to_string().contains("invalid peer certificate"), "{unknown}");
    }

    /// A certificate in PEM that cannot be parsed.
    const UNREADABLE: &str = "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----\n";

    #[tokio::test]
    async fn a_certificate_that_is_not_supported_does_not_reject_the_others() {
        let (authority, acceptor) = server();
        connected(&format!("{UNREADABLE}{authority}"), acceptor, "localhost").await.expect("its authority is trusted");
    }

    #[test]
    fn a_file_without_authorities_is_rejected() {
        for text in ["", "no certificate", UNREADABLE] {
            assert!(ServerTls::trusting(text).is_err(), "{text:?}");
        }
    }
}
