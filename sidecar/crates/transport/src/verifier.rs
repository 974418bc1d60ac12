//! Certificate verifiers for both sides of a handshake: webpki's checks, then exactly one accepted name.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::identity::{CertificateClaims, IdentityError, SpiffeId, utc};

/// Verifies the peer of a dial: chain, expiry, key usage, signature, and exactly the id of the dialled sidecar.
#[derive(Debug)]
pub(crate) struct DialedPeerVerifier {
    pub(crate) expected: SpiffeId,
    pub(crate) roots: RootCertStore,
    pub(crate) provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for DialedPeerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)
            .map_err(|error| explain_verification(error, IdentityError::OtherAuthority))?;
        let found = CertificateClaims::parse(end_entity).map_err(refuse)?.id;
        if found != self.expected {
            let expected = Box::new(self.expected.clone());
            return Err(refuse(IdentityError::OtherId { expected, found: Box::new(found) }));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
            .map_err(|error| explain_verification(error, IdentityError::NoProof))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies a peer that dialled this side: chain, expiry, key usage, signature, and an id of the same job. The hello
/// must then claim the index in that id.
#[derive(Debug)]
pub(crate) struct AcceptedPeerVerifier {
    own: SpiffeId,
    webpki: Arc<dyn ClientCertVerifier>,
}

impl AcceptedPeerVerifier {
    pub(crate) fn new(
        own: SpiffeId,
        roots: RootCertStore,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let webpki = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        Ok(Self { own, webpki })
    }
}

impl ClientCertVerifier for AcceptedPeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.webpki.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .webpki
            .verify_client_cert(end_entity, intermediates, now)
            .map_err(|error| explain_verification(error, IdentityError::OtherAuthority))?;
        let found = CertificateClaims::parse(end_entity).map_err(refuse)?.id;
        if !found.is_same_job(&self.own) {
            let expected = Box::new(self.own.clone());
            return Err(refuse(IdentityError::OtherJob { expected, found: Box::new(found) }));
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki
            .verify_tls13_signature(message, certificate, signature)
            .map_err(|error| explain_verification(error, IdentityError::NoProof))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}

/// Checks this sidecar's own chain as a peer would.
pub(crate) fn check_chain(
    chain: &[CertificateDer<'_>],
    roots: &RootCertStore,
    now: UnixTime,
) -> Result<(), IdentityError> {
    let (leaf, intermediates) = chain.split_first().ok_or(IdentityError::NoCertificate)?;
    let provider = crate::identity::crypto_provider();
    let algorithms = provider.signature_verification_algorithms.all;
    let certificate = ParsedCertificate::try_from(leaf).map_err(IdentityError::Refused)?;
    verify_server_cert_signed_by_trust_anchor(&certificate, roots, intermediates, now, algorithms).map_err(|error| {
        match error {
            Error::InvalidCertificate(CertificateError::BadSignature | CertificateError::UnknownIssuer) => {
                IdentityError::OtherAuthority
            }
            other => IdentityError::Refused(other),
        }
    })
}

/// Wraps the error so that its text reaches both sides: QUIC sends it as the reason of its close frame.
fn refuse(error: IdentityError) -> Error {
    Error::Other(OtherError(Arc::new(error)))
}

/// Replaces rustls' error by a specific one. rustls reports "bad signature" for a certificate chain, for a handshake,
/// and for a chain whose authority has the right name but another key; `meaning` says which of them it is.
fn explain_verification(error: Error, meaning: IdentityError) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::BadSignature | CertificateError::UnknownIssuer) => refuse(meaning),
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            refuse(IdentityError::Expired { at: utc(not_after), now: utc(time) })
        }
        Error::InvalidCertificate(CertificateError::NotValidYetContext { time, not_before }) => {
            refuse(IdentityError::NotYetValid { from: utc(not_before), now: utc(time) })
        }
        other => other,
    }
}
