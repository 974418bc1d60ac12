//! How the two sides of a connection authenticated: certificates, cipher suite and key exchange.

use std::sync::Arc;

use ronde_wire::control::Carrier;
use rustls_pki_types::{CertificateDer, UnixTime};

use super::connection::Connection;
use crate::identity::{CertificateClaims, Identity, IdentityError, KEY_EXCHANGE, SUITE};
use crate::verifier;

/// The certificates of both sides, as presented on this connection.
pub(super) struct LinkAuth {
    /// This side's identity.
    pub(super) own: Arc<Identity>,
    /// The claims of the peer's certificate.
    pub(super) peer: CertificateClaims,
    peer_chain: Vec<CertificateDer<'static>>,
    carrier: Carrier,
}

impl LinkAuth {
    /// Reads the peer's certificate from a connection that this side made with `own`.
    pub(super) fn of(connection: &Connection, own: Arc<Identity>) -> Result<Self, IdentityError> {
        let peer_chain = connection.peer_certificates();
        let leaf = peer_chain.first().ok_or(IdentityError::NoCertificate)?;
        Ok(Self { own, peer: CertificateClaims::parse(leaf)?, peer_chain, carrier: connection.carrier() })
    }

    /// When the first of the two certificates expires.
    pub(super) fn not_after(&self) -> UnixTime {
        let (own, peer) = (self.own.not_after(), self.peer.not_after);
        if own.as_secs() <= peer.as_secs() { own } else { peer }
    }

    /// Whether either side presented other certificates than in `other`.
    pub(super) fn differs_from(&self, other: &Self) -> bool {
        !Arc::ptr_eq(&self.own, &other.own) || self.peer_chain != other.peer_chain
    }

    /// Whether one of `identity`'s authorities signed the peer's certificate. Its validity period is not checked here:
    /// the handshake did so, and its expiry is watched separately.
    pub(super) fn is_accepted_by(&self, identity: &Identity) -> Result<(), IdentityError> {
        verifier::check_chain(&self.peer_chain, &identity.root_store()?, self.peer.not_after)
    }

    pub(super) fn security(&self) -> LinkSecurity {
        LinkSecurity {
            carrier: self.carrier,
            suite: SUITE,
            key_exchange: KEY_EXCHANGE,
            own: CertificateFacts { serial: self.own.serial().to_owned(), not_after: self.own.not_after() },
            peer: CertificateFacts { serial: self.peer.serial.clone(), not_after: self.peer.not_after },
        }
    }
}

/// How a link is protected: the only cipher suite and key exchange that ronde offers, and the certificates presented
/// when the connection was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSecurity {
    /// The protocol that carries the link.
    pub carrier: Carrier,
    /// The cipher suite.
    pub suite: &'static str,
    /// The key exchange.
    pub key_exchange: &'static str,
    /// This side's certificate.
    pub own: CertificateFacts,
    /// The peer's certificate.
    pub peer: CertificateFacts,
}

/// Identifies a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Its serial number in hexadecimal.
    pub serial: String,
    /// When it expires.
    pub not_after: UnixTime,
}
