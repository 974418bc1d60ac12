//! The identity of a sidecar: its SPIFFE id, and the certificate and key that prove it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ronde_wire::{JobName, SidecarIndex};
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

/// The trust domain of a SPIFFE id: 1 to 255 characters of `a-z 0-9 - _ .`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrustDomain(Arc<str>);

impl TrustDomain {
    /// Validates and wraps a name.
    ///
    /// # Errors
    /// [`IdentityError::TrustDomain`] if the name is empty, too long, or contains other characters.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, IdentityError> {
        let name = name.into();
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        if name.is_empty() || name.len() > TRUST_DOMAIN_BYTES_MAX || !name.chars().all(allowed) {
            return Err(IdentityError::TrustDomain { given: shortened(&name) });
        }
        Ok(Self(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The id in a sidecar's certificate, `spiffe://<trust domain>/job/<job>/sidecar/<index>`, in exactly this spelling.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpiffeId {
    /// The trust domain of the authority that issues the id.
    pub trust_domain: TrustDomain,
    /// The job.
    pub job: JobName,
    /// The index of the sidecar within the job.
    pub sidecar: SidecarIndex,
}

impl SpiffeId {
    /// The id of another sidecar of the same job.
    #[must_use]
    pub fn of_sidecar(&self, sidecar: SidecarIndex) -> Self {
        Self { sidecar, ..self.clone() }
    }

    /// Whether both ids belong to the same job of the same trust domain.
    #[must_use]
    pub fn is_same_job(&self, other: &Self) -> bool {
        self.trust_domain == other.trust_domain && self.job == other.job
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/job/{}/sidecar/{}", self.trust_domain, self.job, self.sidecar.0)
    }
}

impl FromStr for SpiffeId {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let refuse = || IdentityError::SpiffeId { given: shortened(text) };
        let rest = text.strip_prefix("spiffe://").ok_or_else(refuse)?;
        let parts: Vec<&str> = rest.splitn(6, '/').collect();
        let [trust_domain, "job", job, "sidecar", index] = parts[..] else { return Err(refuse()) };
        let sidecar = SidecarIndex(index.parse().map_err(|_| refuse())?);
        let id = Self {
            trust_domain: TrustDomain::new(trust_domain).map_err(|_| refuse())?,
            job: JobName::new(job).map_err(|_| refuse())?,
            sidecar,
        };
        // `"+1"` and `"01"` parse as numbers; comparing with `Display` leaves one valid spelling for each id.
        if id.to_string() == text { Ok(id) } else { Err(refuse()) }
    }
}

/// A sidecar's certificate chain and key, and the authorities that it accepts. `Debug` does not print the key.
pub struct Identity {
    id: SpiffeId,
    certificate_chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Vec<CertificateDer<'static>>,
    claims: CertificateClaims,
}

impl Identity {
    /// Checks that the key belongs to the certificate and that the certificate names exactly `id`. Peers check whether
    /// the certificate is valid at present and signed by an accepted authority; see [`Self::check`].
    ///
    /// # Errors
    /// [`IdentityError`] that names the part that does not match.
    pub fn new(
        id: SpiffeId,
        certificate_chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        roots: Vec<CertificateDer<'static>>,
    ) -> Result<Self, IdentityError> {
        let leaf = certificate_chain.first().ok_or(IdentityError::NoCertificate)?;
        let claims = CertificateClaims::parse(leaf)?;
        if claims.id != id {
            return Err(IdentityError::OtherId { expected: Box::new(id), found: Box::new(claims.id) });
        }
        for (what, found) in [("certificate chain", certificate_chain.len()), ("list of authorities", roots.len())] {
            if found > CERTIFICATES_MAX {
                return Err(IdentityError::TooMany { what, found });
            }
        }
        let signer = crypto_provider().key_provider.load_private_key(key.clone_key()).map_err(IdentityError::Key)?;
        CertifiedKey::new(certificate_chain.clone(), signer).keys_match().map_err(IdentityError::Key)?;
        let identity = Self { id, certificate_chain, key, roots, claims };
        identity.root_store()?;
        Ok(identity)
    }

    /// Reads an identity from PEM: the chain (leaf first), its key, and the authorities. The id is the certificate's.
    ///
    /// # Errors
    /// [`CaError`](crate::CaError) if a PEM cannot be read or the parts do not belong together.
    pub fn from_pem(certificate_pem: &str, key_pem: &str, ca_pem: &str) -> Result<Self, crate::CaError> {
        let chain = crate::ca::certificates(certificate_pem)?;
        let roots = crate::ca::certificates(ca_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(crate::CaError::Pem)?;
        let leaf = chain.first().ok_or(IdentityError::NoCertificate)?;
        let id = CertificateClaims::parse(leaf)?.id;
        Ok(Self::new(id, chain, key, roots)?)
    }

    /// Checks that the certificate is valid at `now` and signed by an authority of the job, as a peer would.
    ///
    /// # Errors
    /// [`IdentityError::Expired`], [`IdentityError::NotYetValid`], [`IdentityError::OtherAuthority`], or
    /// [`IdentityError::Refused`] with webpki's reason.
    pub fn check(&self, now: SystemTime) -> Result<(), IdentityError> {
        let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or_default());
        let (not_before, not_after) = (self.not_before(), self.not_after());
        if now > not_after {
            return Err(IdentityError::Expired { at: utc(not_after), now: utc(now) });
        }
        if now < not_before {
            return Err(IdentityError::NotYetValid { from: utc(not_before), now: utc(now) });
        }
        crate::verifier::check_chain(&self.certificate_chain, &self.root_store()?, now)
    }

    /// The id in the certificate.
    #[must_use]
    pub fn id(&self) -> &SpiffeId {
        &self.id
    }

    /// The time from which the certificate is valid.
    #[must_use]
    pub fn not_before(&self) -> UnixTime {
        self.claims.not_before
    }

    /// The time at which the certificate expires.
    #[must_use]
    pub fn not_after(&self) -> UnixTime {
        self.claims.not_after
    }

    /// The certificate's serial number, in hexadecimal.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.claims.serial
    }

    /// Number of accepted authorities.
    #[must_use]
    pub fn authorities(&self) -> usize {
        self.roots.len()
    }

    /// Whether all authorities in a PEM are accepted.
    ///
    /// # Errors
    /// [`CaError`](crate::CaError) if the PEM cannot be read.
    pub fn accepts(&self, ca_pem: &str) -> Result<bool, crate::CaError> {
        Ok(crate::ca::certificates(ca_pem)?.iter().all(|authority| self.roots.contains(authority)))
    }

    /// Whether one of the authorities in a PEM signed the certificate, regardless of the time.
    ///
    /// # Errors
    /// [`CaError`](crate::CaError) if the PEM cannot be read or contains no authority.
    pub fn is_accepted_by(&self, ca_pem: &str) -> Result<bool, crate::CaError> {
        let roots = root_store(&crate::ca::certificates(ca_pem)?)?;
        Ok(crate::verifier::check_chain(&self.certificate_chain, &roots, self.not_after()).is_ok())
    }

    pub(crate) fn certificate_chain(&self) -> Vec<CertificateDer<'static>> {
        self.certificate_chain.clone()
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }

    pub(crate) fn root_store(&self) -> Result<RootCertStore, IdentityError> {
        root_store(&self.roots)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("id", &self.id).field("not_after", &self.not_after()).finish_non_exhaustive()
    }
}

/// Why an identity cannot be built, or why a certificate does not identify a sidecar.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum IdentityError {
    /// The trust domain is invalid.
    #[error("a trust domain has 1 to {max} characters of a-z, 0-9, '-', '_' and '.', not {given:?}", max = TRUST_DOMAIN_BYTES_MAX)]
    TrustDomain {
        /// The given text, truncated.
        given: String,
    },
    /// The text is not the SPIFFE id of a sidecar.
    #[error("an id reads spiffe://<trust domain>/job/<job>/sidecar/<index>, not {given:?}")]
    SpiffeId {
        /// The given text, truncated.
        given: String,
    },
    /// The certificate chain is empty.
    #[error("there is no certificate; issue one with the job's CA")]
    NoCertificate,
    /// The certificate is not X.509.
    #[error("the certificate cannot be read: {reason}")]
    Unreadable {
        /// The parser's reason.
        reason: String,
    },
    /// The certificate does not have exactly one subject alternative name.
    #[error("the certificate has {found} subject alternative names, not exactly one")]
    NameCount {
        /// The number of names.
        found: usize,
    },
    /// The certificate's subject alternative name is not a URI.
    #[error("the certificate's subject alternative name is {found}, not a URI")]
    NameKind {
        /// The name's kind and value.
        found: String,
    },
    /// The certificate has no extended key usage.
    #[error("the certificate has no extended key usage; it needs server and client authentication")]
    NoUsage,
    /// The certificate names another sidecar.
    #[error("the certificate is {found}'s, expected {expected}")]
    OtherId {
        /// The expected id.
        expected: Box<SpiffeId>,
        /// The certificate's id.
        found: Box<SpiffeId>,
    },
    /// The certificate names a sidecar of another job or trust domain.
    #[error("the certificate is {found}'s, expected a sidecar of job {} of trust domain {}", expected.job, expected.trust_domain)]
    OtherJob {
        /// An id of the accepted job.
        expected: Box<SpiffeId>,
        /// The certificate's id.
        found: Box<SpiffeId>,
    },
    /// The certificate has expired.
    #[error(
        "the certificate expired at {at}, and the clock of the host that checked it says {now}; issue a fresh one, or correct that clock"
    )]
    Expired {
        /// Its last moment, in UTC.
        at: String,
        /// The clock of the host that checked it, in UTC.
        now: String,
    },
    /// The certificate is not valid yet.
    #[error(
        "the certificate is not valid before {from}, but the clock of the host that checked it says {now}; compare the clocks of the hosts"
    )]
    NotYetValid {
        /// Its first moment, in UTC.
        from: String,
        /// The clock of the host that checked it, in UTC.
        now: String,
    },
    /// webpki rejects the certificate for another reason.
    #[error("the certificate is not accepted: {0}")]
    Refused(rustls::Error),
    /// None of the accepted authorities signed the certificate.
    #[error("the certificate is not signed by an authority of this job")]
    OtherAuthority,
    /// The handshake signature was not made with the certificate's key.
    #[error("the peer does not prove that it holds the certificate's key")]
    NoProof,
    /// The chain or the list of authorities is too long.
    #[error("the {what} has {found} certificates; {max} are allowed", max = CERTIFICATES_MAX)]
    TooMany {
        /// The list that is too long.
        what: &'static str,
        /// Its number of certificates.
        found: usize,
    },
    /// The key is unusable or does not belong to the certificate.
    #[error("the key does not serve the certificate: {0}")]
    Key(rustls::Error),
    /// The certificate of an authority is unusable.
    #[error("an authority's certificate cannot be used: {0}")]
    Root(rustls::Error),
    /// There is no authority.
    #[error("there is no authority's certificate; give the job CA's")]
    NoRoot,
}

/// The certificate fields that ronde checks in addition to webpki's checks.
pub(crate) struct CertificateClaims {
    pub(crate) id: SpiffeId,
    /// In hexadecimal.
    pub(crate) serial: String,
    pub(crate) not_before: UnixTime,
    pub(crate) not_after: UnixTime,
}

impl CertificateClaims {
    /// Parses a certificate, which must have an extended key usage and exactly one subject alternative name: a
    /// sidecar's URI.
    pub(crate) fn parse(der: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let unreadable = |reason: String| IdentityError::Unreadable { reason };
        let (rest, certificate) = X509Certificate::from_der(der).map_err(|error| unreadable(error.to_string()))?;
        if !rest.is_empty() {
            return Err(unreadable(format!("{} bytes follow its end", rest.len())));
        }
        let names = certificate.subject_alternative_name().map_err(|error| unreadable(error.to_string()))?;
        let names = names.map_or(&[][..], |names| &names.value.general_names[..]);
        let [name] = names else { return Err(IdentityError::NameCount { found: names.len() }) };
        let GeneralName::URI(uri) = name else { return Err(IdentityError::NameKind { found: name.to_string() }) };
        let id = uri.parse()?;
        if certificate.extended_key_usage().map_err(|error| unreadable(error.to_string()))?.is_none() {
            return Err(IdentityError::NoUsage);
        }
        let validity = certificate.validity();
        let serial = certificate.raw_serial().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { id, serial, not_before: unix_time(&validity.not_before), not_after: unix_time(&validity.not_after) })
    }
}

/// The cryptography of every link, independent of any process-wide default: aws-lc-rs with one cipher suite and one key
/// exchange. All sidecars of a job run the same release, so there is nothing to negotiate and no weaker algorithm to
/// fall back to.
pub(crate) fn crypto_provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    // The fastest suite on processors with AES instructions.
    provider.cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    // A hybrid key exchange: recorded traffic stays secret unless both of its parts are broken.
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768];
    Arc::new(provider)
}

/// The IANA name of the cipher suite of [`crypto_provider`].
pub(crate) const SUITE: &str = "TLS_AES_128_GCM_SHA256";
/// The name of the key exchange of [`crypto_provider`].
pub(crate) const KEY_EXCHANGE: &str = "X25519MLKEM768";

fn root_store(roots: &[CertificateDer<'static>]) -> Result<RootCertStore, IdentityError> {
    let mut store = RootCertStore::empty();
    for root in roots {
        store.add(root.clone()).map_err(IdentityError::Root)?;
    }
    if store.is_empty() { Err(IdentityError::NoRoot) } else { Ok(store) }
}

fn unix_time(time: &x509_parser::time::ASN1Time) -> UnixTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds))
}

/// Formats a time in UTC as `2026-11-20 14:00:00Z`.
#[must_use]
pub fn utc(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let Ok(time) = time::OffsetDateTime::from_unix_timestamp(seconds) else { return "the far future".to_owned() };
    let (year, month, day) = time.to_calendar_date();
    let (hour, minute, second) = time.to_hms();
    format!("{year:04}-{:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z", u8::from(month))
}

fn shortened(text: &str) -> String {
    text.chars().take(SHOWN_CHARACTERS_MAX).collect()
}

const TRUST_DOMAIN_BYTES_MAX: usize = 255;
/// Limit for the certificates of a chain and for the authorities; during a rotation of the authority there are two.
const CERTIFICATES_MAX: usize = 8;
/// Limit for the characters of a peer's text that an error quotes.
const SHOWN_CHARACTERS_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_spelling() {
        let text = "spiffe://cluster.local/job/night-run_1/sidecar/17";
        let id: SpiffeId = text.parse().expect("a good id");
        assert_eq!((id.job.as_str(), id.sidecar), ("night-run_1", SidecarIndex(17)));
        assert_eq!(id.to_string(), text);
        for bad in [
            "",
            "spiffe://",
            "https://d/job/j/sidecar/1",
            "SPIFFE://d/job/j/sidecar/1",
            "spiffe:///job/j/sidecar/1",
            "spiffe://D/job/j/sidecar/1",
            "spiffe://d:1/job/j/sidecar/1",
            "spiffe://d/job//sidecar/1",
            "spiffe://d/job/../sidecar/1",
            "spiffe://d/job/a%20b/sidecar/1",
            "spiffe://d/job/j/sidecar/",
            "spiffe://d/job/j/sidecar/01",
            "spiffe://d/job/j/sidecar/+1",
            "spiffe://d/job/j/sidecar/-1",
            "spiffe://d/job/j/sidecar/4294967296",
            "spiffe://d/job/j/sidecar/1/",
            "spiffe://d/job/j/sidecar/1?x",
            "spiffe://d/job/j/sidecar/1#x",
            "spiffe://d/set/j/sidecar/1",
            "spiffe://d/job/j/worker/1",
            " spiffe://d/job/j/sidecar/1",
        ] {
            assert!(bad.parse::<SpiffeId>().is_err(), "{bad:?} passes");
        }
    }

    #[test]
    fn there_is_one_suite_and_one_key_exchange_by_these_names() {
        let provider = crypto_provider();
        let [suite] = provider.cipher_suites[..] else { panic!("not one suite") };
        assert_eq!(suite.suite(), rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
        assert_eq!(suite.suite().as_str(), Some("TLS13_AES_128_GCM_SHA256"));
        assert_eq!(SUITE.replace("TLS_", "TLS13_"), "TLS13_AES_128_GCM_SHA256");
        let [group] = provider.kx_groups[..] else { panic!("not one key exchange") };
        assert_eq!(group.name().as_str(), Some(KEY_EXCHANGE));
    }
}
