//! Raw peers for tests: any certificate, any bytes.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, ConnectionError, Endpoint, RecvStream, SendStream, ServerConfig};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};
use ronde_transport::{Identity, SpiffeId};
use ronde_wire::SidecarIndex;
use ronde_wire::control::{Hello, Transport, encode};
use ronde_wire::{Epoch, Frame, FrameKind, Seq};
use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName as Subject, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

/// An authority that signs any certificate.
pub(crate) struct RawCa {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl RawCa {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).expect("an authority").der().clone();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    /// A certificate for a sidecar of the test's job, changed by `change`.
    pub(crate) fn issue(&self, sidecar: u32, change: impl FnOnce(&mut CertificateParams)) -> Credentials {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![uri(&id(sidecar).to_string())];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
        params.not_after = (SystemTime::now() + Duration::from_secs(600)).into();
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Credentials { chain: vec![certificate.der().clone()], key: key.into() }
    }

    pub(crate) fn good(&self, sidecar: u32) -> Credentials {
        self.issue(sidecar, |_| {})
    }

    /// A valid identity for the port under test.
    pub(crate) fn identity(&self, sidecar: u32) -> Arc<Identity> {
        let Credentials { chain, key } = self.good(sidecar);
        Arc::new(Identity::new(id(sidecar), chain, key, vec![self.certificate.clone()]).expect("an identity"))
    }
}

pub(crate) struct Credentials {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl Credentials {
    pub(crate) fn with_key_of(self, other: Credentials) -> Self {
        Self { chain: self.chain, key: other.key }
    }

    fn certified(self) -> CertifiedKey {
        let key = aws_lc_rs::sign::any_supported_type(&self.key).expect("a key");
        CertifiedKey::new(self.chain, key)
    }
}

pub(crate) fn id(sidecar: u32) -> SpiffeId {
    let (trust_domain, job) = (super::trust_domain(), super::job());
    SpiffeId { trust_domain, job, sidecar: SidecarIndex(sidecar) }
}

pub(crate) fn uri(text: &str) -> SanType {
    SanType::URI(text.try_into().expect("ASCII"))
}

/// Invalid certificates, with the text of each refusal.
pub(crate) fn bad_certificates(ca: &RawCa) -> Vec<(&'static str, Credentials)> {
    let later = || SystemTime::now() + Duration::from_secs(3_600);
    let named = |name: &str| {
        let name = uri(name);
        ca.issue(1, |params| params.subject_alt_names = vec![name])
    };
    let issue = |change: fn(&mut CertificateParams)| ca.issue(1, change);
    vec![
        ("not signed by an authority of this job", RawCa::new().good(1)),
        ("day-run/sidecar/1's, expected", named("spiffe://test.example/job/day-run/sidecar/1")),
        ("spiffe://other.example/job/night-run/sidecar/1's", named("spiffe://other.example/job/night-run/sidecar/1")),
        ("an id reads", named("spiffe://test.example/job/night-run/sidecar/01")),
        ("an id reads", named("https://test.example/sidecar/1")),
        ("the certificate expired at 20", issue(|p| p.not_after = (SystemTime::now() - Duration::from_secs(5)).into())),
        ("compare the clocks of the hosts", {
            ca.issue(1, |params| {
                params.not_before = later().into();
                params.not_after = (later() + Duration::from_secs(60)).into();
            })
        }),
        ("has 0 subject alternative names", issue(|params| params.subject_alt_names.clear())),
        ("has 2 subject alternative names", issue(|params| params.subject_alt_names.push(uri("spiffe://a/b")))),
        ("not a URI", issue(|params| params.subject_alt_names = vec![dns("test.example")])),
        ("extended key usage for", issue(|p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning])),
        ("has no extended key usage", issue(|params| params.extended_key_usages.clear())),
        ("CaUsedAsEndEntity", issue(|p| p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained))),
        ("does not prove that it holds", ca.good(1).with_key_of(ca.good(1))),
    ]
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().expect("ASCII"))
}

/// A TLS client with any credentials, or none, that does not verify the server.
pub(crate) fn client(credentials: Option<Credentials>, protocol: &[u8]) -> rustls::ClientConfig {
    client_of(provider(), credentials, protocol)
}

/// Like [`client`], with other cryptography.
pub(crate) fn client_of(
    cryptography: Arc<CryptoProvider>,
    credentials: Option<Credentials>,
    protocol: &[u8],
) -> rustls::ClientConfig {
    let builder = rustls::ClientConfig::builder_with_provider(cryptography)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider())));
    let mut tls = match credentials {
        Some(credentials) => builder.with_client_cert_resolver(Arc::new(Always(Arc::new(credentials.certified())))),
        None => builder.with_no_client_auth(),
    };
    tls.alpn_protocols = vec![protocol.to_vec()];
    tls
}

/// A TLS server with any credentials that accepts every client.
pub(crate) fn server(credentials: Credentials) -> rustls::ServerConfig {
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has TLS 1.3")
        .with_client_cert_verifier(Arc::new(Anybody(provider())))
        .with_cert_resolver(Arc::new(Always(Arc::new(credentials.certified()))));
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls
}

/// Dials a port over QUIC.
pub(crate) async fn dial(
    to: SocketAddr,
    credentials: Option<Credentials>,
    protocol: &[u8],
) -> Result<Connection, ConnectionError> {
    dial_from(Ipv4Addr::LOCALHOST, to, credentials, protocol).await
}

/// Dials a port over QUIC from an address of this host.
async fn dial_from(
    from: Ipv4Addr,
    to: SocketAddr,
    credentials: Option<Credentials>,
    protocol: &[u8],
) -> Result<Connection, ConnectionError> {
    let tls = client(credentials, protocol);
    let mut endpoint = Endpoint::client((from, 0).into()).expect("a free port");
    endpoint.set_default_client_config(ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("AES"))));
    endpoint.connect(to, "anything").expect("a good address").await
}

/// Dials with valid credentials and completes the exchange of hellos.
pub(crate) async fn greet(
    to: SocketAddr,
    credentials: Credentials,
    hello: &Hello,
) -> (Connection, SendStream, RecvStream) {
    greet_from(Ipv4Addr::LOCALHOST, to, credentials, hello).await.expect("good credentials and a place")
}

/// Like [`greet`], from an address of this host.
pub(crate) async fn greet_from(
    from: Ipv4Addr,
    to: SocketAddr,
    credentials: Credentials,
    hello: &Hello,
) -> Result<(Connection, SendStream, RecvStream), ConnectionError> {
    let connection = dial_from(from, to, Some(credentials), ALPN).await?;
    let (mut send, mut recv) = connection.open_bi().await?;
    let mut answer = [0; 28];
    let answered = async {
        send.write_all(&first_frame(hello)).await.ok()?;
        recv.read_exact(&mut answer).await.ok()
    };
    if answered.await.is_none() {
        return Err(connection.closed().await);
    }
    assert_eq!(answer[6], FrameKind::Hello as u8);
    Ok((connection, send, recv))
}

pub(crate) fn first_frame(hello: &Hello) -> Vec<u8> {
    first_frame_over(Transport::Quic, hello)
}

pub(crate) fn first_frame_over(transport: Transport, hello: &Hello) -> Vec<u8> {
    let hello = Hello { transport, ..hello.clone() };
    let frame = Frame::new(FrameKind::Hello, Epoch(0), Seq(0), encode(&hello));
    [&frame.header.encode()[..], &frame.payload].concat()
}

/// Listens with any credentials and accepts every client.
pub(crate) fn listen(credentials: Credentials) -> Endpoint {
    let tls = server(credentials);
    let config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).expect("AES")));
    Endpoint::server(config, (Ipv4Addr::LOCALHOST, 0).into()).expect("a free port")
}

/// The reason with which the peer closed a connection.
pub(crate) fn reason(error: &ConnectionError) -> String {
    match error {
        ConnectionError::ConnectionClosed(close) => String::from_utf8_lossy(&close.reason).into_owned(),
        ConnectionError::ApplicationClosed(close) => String::from_utf8_lossy(&close.reason).into_owned(),
        other => panic!("not closed by the far side: {other}"),
    }
}

/// All algorithms of the library.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

#[derive(Debug)]
struct Always(Arc<CertifiedKey>);

impl ResolvesClientCert for Always {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl rustls::server::ResolvesServerCert for Always {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unreachable!("TLS 1.3 only")
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Anybody {
    fn root_hint_subjects(&self) -> &[Subject] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unreachable!("TLS 1.3 only")
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

pub(crate) const ALPN: &[u8] = b"ronde/1";
