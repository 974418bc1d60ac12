//! What a connection has proven: who spoke, by which certificates, over which cryptography.

use std::sync::Arc;

use ronde_wire::control::Carrier;
use rustls_pki_types::{CertificateDer, UnixTime};

use super::connection::Connection;
use crate::identity::{CertificateClaims, Identity, IdentityError, KEY_EXCHANGE, SUITE};
use crate::verifier;

/// The certificates of both sides, as they were shown on this very connection.
pub(super) struct LinkAuth {
    /// What this side has shown.
    pub(super) own: Arc<Identity>,
    /// What the peer's certificate says.
    pub(super) peer: CertificateClaims,
    peer_chain: Vec<CertificateDer<'static>>,
    carrier: Carrier,
}

impl LinkAuth {
    /// Reads the peer's certificate from a connection that was made with `own`.
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

    /// Whether a connection with that proof would say anything that this one has not said.
    pub(super) fn differs_from(&self, other: &Self) -> bool {
        !Arc::ptr_eq(&self.own, &other.own) || self.peer_chain != other.peer_chain
    }

    /// Whether the peer's certificate is of an authority that an identity accepts. When it is valid was asked before, and
    /// when it expires is another question.
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

/// How a link is protected: the suite and key exchange, which are the only ones that are offered and taken, and the
/// certificates that were shown when its connection was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSecurity {
    /// What the link runs over.
    pub carrier: Carrier,
    /// The suite that seals every packet or record.
    pub suite: &'static str,
    /// How the keys were agreed on.
    pub key_exchange: &'static str,
    /// This side's certificate.
    pub own: CertificateFacts,
    /// The peer's.
    pub peer: CertificateFacts,
}

/// Which certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Its serial number, in hexadecimal.
    pub serial: String,
    /// Its last moment.
    pub not_after: UnixTime,
}
