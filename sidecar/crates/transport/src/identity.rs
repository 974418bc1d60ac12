//! Who a sidecar is: a SPIFFE id of job and index, and the certificate and key that prove it.

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

/// The name of an authority in SPIFFE ids: 1 to 255 characters of `a-z 0-9 - _ .`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrustDomain(Arc<str>);

impl TrustDomain {
    /// Checks and wraps a name.
    ///
    /// # Errors
    /// [`IdentityError::TrustDomain`] when it is empty, too long or has other characters.
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

/// The name in a sidecar's certificate: `spiffe://<trust domain>/job/<job>/sidecar/<index>`, in exactly this spelling.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpiffeId {
    /// The authority that named it.
    pub trust_domain: TrustDomain,
    /// The job it belongs to.
    pub job: JobName,
    /// Its number within the job.
    pub sidecar: SidecarIndex,
}

impl SpiffeId {
    /// The id of another sidecar of the same job.
    #[must_use]
    pub fn of_sidecar(&self, sidecar: SidecarIndex) -> Self {
        Self { sidecar, ..self.clone() }
    }

    /// Whether both ids are of one job of one trust domain.
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
        // One id has one spelling: "+1" and "01" parse as numbers, but are not what Display writes.
        if id.to_string() == text { Ok(id) } else { Err(refuse()) }
    }
}

/// A sidecar's certificate chain and key, and the authorities whose certificates it accepts. Never prints the key.
pub struct Identity {
    id: SpiffeId,
    certificate_chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Vec<CertificateDer<'static>>,
    claims: CertificateClaims,
}

impl Identity {
    /// Checks that the parts belong together: the key is the certificate's, and the certificate names exactly `id`.
    /// Whether the certificate is valid now, and accepted by the roots, is for the peers to say.
    ///
    /// # Errors
    /// [`IdentityError`] that names the part that does not fit.
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

    /// Reads an identity that was kept: the chain (leaf first), its key, and the authorities. Its id is the certificate's.
    ///
    /// # Errors
    /// [`CaError`](crate::CaError) when a PEM cannot be read or the parts do not belong together.
    pub fn from_pem(certificate_pem: &str, key_pem: &str, ca_pem: &str) -> Result<Self, crate::CaError> {
        let chain = crate::ca::certificates(certificate_pem)?;
        let roots = crate::ca::certificates(ca_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(crate::CaError::Pem)?;
        let leaf = chain.first().ok_or(IdentityError::NoCertificate)?;
        let id = CertificateClaims::parse(leaf)?.id;
        Ok(Self::new(id, chain, key, roots)?)
    }

    /// Says before any peer does whether the certificate is valid at `now` and signed by an authority of the job.
    ///
    /// # Errors
    /// [`IdentityError::Expired`], [`IdentityError::NotYetValid`], [`IdentityError::OtherAuthority`], or what webpki says
    /// as [`IdentityError::Refused`].
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

    /// When the certificate begins to be valid.
    #[must_use]
    pub fn not_before(&self) -> UnixTime {
        self.claims.not_before
    }

    /// When the certificate stops being valid.
    #[must_use]
    pub fn not_after(&self) -> UnixTime {
        self.claims.not_after
    }

    /// The certificate's serial number, in hexadecimal.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.claims.serial
    }

    /// How many authorities are accepted.
    #[must_use]
    pub fn authorities(&self) -> usize {
        self.roots.len()
    }

    /// Whether every authority of a PEM is accepted.
    ///
    /// # Errors
    /// [`CaError`](crate::CaError) when the PEM cannot be read.
    pub fn accepts(&self, ca_pem: &str) -> Result<bool, crate::CaError> {
        Ok(crate::ca::certificates(ca_pem)?.iter().all(|authority| self.roots.contains(authority)))
    }

    /// Whether one of the authorities of a PEM has signed the certificate, whatever the time.
    ///
    /// # Errors
    /// [`CaError`](crate::CaError) when the PEM cannot be read or has no authority.
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

/// An identity that cannot be built, or a certificate that names none.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum IdentityError {
    /// The caller's trust domain breaks the rules.
    #[error("a trust domain has 1 to {max} characters of a-z, 0-9, '-', '_' and '.', not {given:?}", max = TRUST_DOMAIN_BYTES_MAX)]
    TrustDomain {
        /// What was given, cut to a printable length.
        given: String,
    },
    /// A text is no SPIFFE id of a sidecar.
    #[error("an id reads spiffe://<trust domain>/job/<job>/sidecar/<index>, not {given:?}")]
    SpiffeId {
        /// What was given, cut to a printable length.
        given: String,
    },
    /// The chain is empty.
    #[error("there is no certificate; issue one with the job's CA")]
    NoCertificate,
    /// A certificate is no X.509 certificate.
    #[error("the certificate cannot be read: {reason}")]
    Unreadable {
        /// What the parser says.
        reason: String,
    },
    /// The certificate has another number of names than one.
    #[error("the certificate has {found} subject alternative names, not exactly one")]
    NameCount {
        /// How many it has.
        found: usize,
    },
    /// The certificate's one name is no URI.
    #[error("the certificate's subject alternative name is {found}, not a URI")]
    NameKind {
        /// What it is.
        found: String,
    },
    /// The certificate does not say what it may be used for.
    #[error("the certificate has no extended key usage; it needs server and client authentication")]
    NoUsage,
    /// The certificate is someone else's.
    #[error("the certificate is {found}'s, expected {expected}")]
    OtherId {
        /// Who should be named.
        expected: Box<SpiffeId>,
        /// Who is.
        found: Box<SpiffeId>,
    },
    /// The certificate belongs to another job or trust domain.
    #[error("the certificate is {found}'s, expected a sidecar of job {} of trust domain {}", expected.job, expected.trust_domain)]
    OtherJob {
        /// An id of the job that is accepted.
        expected: Box<SpiffeId>,
        /// Who is named.
        found: Box<SpiffeId>,
    },
    /// The certificate's time is over.
    #[error(
        "the certificate expired at {at}, and the clock of the host that checked it says {now}; issue a fresh one, or correct that clock"
    )]
    Expired {
        /// When, in UTC.
        at: String,
        /// What time it is.
        now: String,
    },
    /// The certificate's time has not come.
    #[error(
        "the certificate is not valid before {from}, but the clock of the host that checked it says {now}; compare the clocks of the hosts"
    )]
    NotYetValid {
        /// From when on it is, in UTC.
        from: String,
        /// What time it is.
        now: String,
    },
    /// The certificate does not pass for another reason.
    #[error("the certificate is not accepted: {0}")]
    Refused(rustls::Error),
    /// No authority that is accepted here has signed the certificate.
    #[error("the certificate is not signed by an authority of this job")]
    OtherAuthority,
    /// The peer shows a certificate, but its handshake is not signed by the certificate's key.
    #[error("the peer does not prove that it holds the certificate's key")]
    NoProof,
    /// A chain or a list of authorities has no end.
    #[error("the {what} has {found} certificates; {max} are allowed", max = CERTIFICATES_MAX)]
    TooMany {
        /// Which of them.
        what: &'static str,
        /// How many there are.
        found: usize,
    },
    /// The key cannot be used, or is not the certificate's.
    #[error("the key does not serve the certificate: {0}")]
    Key(rustls::Error),
    /// An authority's certificate cannot be used.
    #[error("an authority's certificate cannot be used: {0}")]
    Root(rustls::Error),
    /// There is no authority.
    #[error("there is no authority's certificate; give the job CA's")]
    NoRoot,
}

/// What ronde reads in a certificate besides what webpki checks.
pub(crate) struct CertificateClaims {
    pub(crate) id: SpiffeId,
    /// In hexadecimal.
    pub(crate) serial: String,
    pub(crate) not_before: UnixTime,
    pub(crate) not_after: UnixTime,
}

impl CertificateClaims {
    /// Reads a certificate that has exactly one subject alternative name, a URI that is a sidecar's id, and a usage.
    pub(crate) fn parse(der: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let unreadable = |reason: String| IdentityError::Unreadable { reason };
        let (rest, certificate) = X509Certificate::from_der(der).map_err(|error| unreadable(error.to_string()))?;
        if !rest.is_empty() {
            return Err(unreadable(format!("{} bytes behind its end", rest.len())));
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

/// The cryptography of every link, given explicitly so that no default of the process decides it: aws-lc-rs, and of
/// suites and key exchanges one each. All sidecars of a job are of one release, so there is nothing to negotiate and
/// nothing to fall back to; what a link runs over is known without asking.
pub(crate) fn crypto_provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    // The fastest where AES is in hardware.
    provider.cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    // Recorded traffic stays closed to who breaks either of the two later on.
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768];
    Arc::new(provider)
}

/// The suite of [`crypto_provider`], as the standard writes it.
pub(crate) const SUITE: &str = "TLS_AES_128_GCM_SHA256";
/// Its key exchange.
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

/// A time as people write it: `2026-11-20 14:00:00Z`.
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
/// Of a chain, and of authorities: two of the latter while one takes the other's place, and room for more.
const CERTIFICATES_MAX: usize = 8;
/// Characters of a foreign text that an error repeats.
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
