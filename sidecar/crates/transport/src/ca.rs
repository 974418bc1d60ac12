//! The certificate authority of a job, and a sidecar's certificate request.
//!
//! The launcher holds the authority in memory; its key never leaves [`JobCa`]. Each sidecar generates its own key
//! ([`KeyRequest`]), sends the request over the launcher's pipe, and receives a certificate, so no private key is ever
//! transmitted. A job without the launcher keeps authority and keys in files ([`JobCa::key_pem`],
//! [`KeyRequest::key_pem`]).

use std::fmt;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519,
    PublicKeyData, SanType,
};
use ronde_wire::{JobName, SidecarIndex};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;

use crate::identity::{Identity, IdentityError, SpiffeId, TrustDomain};
use crate::secret::JobSecret;

/// The validity period of a certificate, by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first moment.
    pub not_before: SystemTime,
    /// The last moment.
    pub not_after: SystemTime,
}

impl Validity {
    /// A period of `length` that starts at `now`, with a margin before it because the clocks of hosts differ.
    #[must_use]
    pub fn starting(now: SystemTime, length: Duration) -> Self {
        Self { not_before: now - CLOCK_DIFFERENCE, not_after: now + length }
    }
}

/// The certificate authority of one job. The key is held in this value only, and never printed.
pub struct JobCa {
    job: JobName,
    trust_domain: TrustDomain,
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl JobCa {
    /// Creates an authority with a new P-256 key.
    ///
    /// # Errors
    /// [`CaError::Certificate`] if the key or the certificate cannot be made.
    pub fn generate(job: JobName, trust_domain: TrustDomain, validity: Validity) -> Result<Self, CaError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let params = parameters(&authority_name(&job), validity);
        Self::of(key, job, trust_domain, params)
    }

    fn of(
        key: KeyPair,
        job: JobName,
        trust_domain: TrustDomain,
        mut params: CertificateParams,
    ) -> Result<Self, CaError> {
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.subject_alt_names = vec![SanType::URI(authority_uri(&trust_domain, &job).try_into()?)];
        let certificate_pem = params.self_signed(&key)?.pem();
        Ok(Self { job, trust_domain, certificate_pem, issuer: Issuer::new(params, key) })
    }

    /// Derives the authority from a job's secret. Key and certificate are the same on every host, so sidecars that have
    /// the secret issue their own certificates. The authority's certificate does not expire; the certificates that it
    /// issues do.
    ///
    /// # Errors
    /// [`CaError::Certificate`] if the certificate cannot be made.
    pub fn from_secret(secret: &JobSecret, job: JobName, trust_domain: TrustDomain) -> Result<Self, CaError> {
        let key = PrivatePkcs8KeyDer::from(secret.authority_key(&job, &trust_domain).to_vec());
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ED25519).map_err(CaError::Key)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named(&authority_name(&job));
        Self::of(key, job, trust_domain, params)
    }

    /// Reads an authority from PEM: the first certificate of `certificate_pem`, and its key.
    ///
    /// # Errors
    /// [`CaError`] if a PEM cannot be read, the certificate names no job, or the key does not belong to it.
    pub fn from_pem(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let key = KeyPair::from_pem(key_pem).map_err(CaError::Key)?;
        let chain = certificates(certificate_pem)?;
        let certificate = chain.first().ok_or(CaError::NoAuthority)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|_| CaError::NoAuthority)?;
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(CaError::OtherKey);
        }
        let SpiffeId { job, trust_domain, .. } = id_by(&parsed)?;
        let issuer = Issuer::from_ca_cert_der(certificate, key)?;
        Ok(Self { job, trust_domain, certificate_pem: certificate_pem.to_owned(), issuer })
    }

    /// The authority's private key in PEM (PKCS #8). Keep it secret: whoever has it can impersonate any sidecar of the
    /// job. The launcher never calls this.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate for the public key of a certificate request (PEM). Everything else in the request is
    /// ignored: the certificate names exactly `sidecar` of this job.
    ///
    /// # Errors
    /// [`CaError::Request`] if the request cannot be read or is not signed by its own key.
    pub fn issue(&self, request_pem: &str, sidecar: SidecarIndex, validity: Validity) -> Result<String, CaError> {
        if request_pem.len() > REQUEST_BYTES_MAX {
            return Err(CaError::RequestLength { found: request_pem.len() });
        }
        let request = CertificateSigningRequestParams::from_pem(request_pem).map_err(CaError::Request)?;
        let mut params = parameters(&format!("ronde {sidecar}"), validity);
        params.subject_alt_names = vec![SanType::URI(self.id_of(sidecar).to_string().try_into()?)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(&request.public_key, &self.issuer)?.pem())
    }

    /// The authority's certificate, which every sidecar of the job accepts as a root.
    #[must_use]
    pub fn ca_certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// The id that this authority issues for a sidecar.
    #[must_use]
    pub fn id_of(&self, sidecar: SidecarIndex) -> SpiffeId {
        SpiffeId { trust_domain: self.trust_domain.clone(), job: self.job.clone(), sidecar }
    }
}

impl fmt::Debug for JobCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobCa")
            .field("job", &self.job)
            .field("trust_domain", &self.trust_domain)
            .finish_non_exhaustive()
    }
}

/// A sidecar's private key and its certificate request. The key is never printed; it leaves this value only as an
/// [`Identity`] or by [`Self::key_pem`].
pub struct KeyRequest {
    key: KeyPair,
    request_pem: String,
}

impl KeyRequest {
    /// Generates a P-256 key and a request signed by it.
    ///
    /// # Errors
    /// [`CaError::Certificate`] if either cannot be made.
    pub fn generate() -> Result<Self, CaError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named("ronde sidecar");
        let request_pem = params.serialize_request(&key)?.pem()?;
        Ok(Self { key, request_pem })
    }

    /// The request in PEM. It is not secret.
    #[must_use]
    pub fn request_pem(&self) -> &str {
        &self.request_pem
    }

    /// The private key in PEM (PKCS #8). Store it where only its sidecar can read it.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// Combines the key with the certificate (or chain, leaf first) issued for it, and with the authority's
    /// certificate.
    ///
    /// # Errors
    /// [`CaError`] if a PEM cannot be read, the certificate belongs to another key, or it names a sidecar other than
    /// `expected`.
    pub fn into_identity(self, certificate_pem: &str, ca_pem: &str, expected: SpiffeId) -> Result<Identity, CaError> {
        let chain = certificates(certificate_pem)?;
        let roots = certificates(ca_pem)?;
        Ok(Identity::new(expected, chain, PrivateKeyDer::from(self.key), roots)?)
    }
}

impl fmt::Debug for KeyRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRequest").finish_non_exhaustive()
    }
}

/// Why a certificate cannot be issued or used.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The request is not a valid certificate request signed by its own key.
    #[error("the certificate request cannot be used: {0}")]
    Request(rcgen::Error),
    /// The request is too long.
    #[error("a certificate request has at most {max} bytes, not {found}", max = REQUEST_BYTES_MAX)]
    RequestLength {
        /// Its length in bytes.
        found: usize,
    },
    /// The private key is in an unknown format.
    #[error("the private key cannot be read: {0}")]
    Key(rcgen::Error),
    /// The key does not belong to the authority's certificate.
    #[error("the authority's key is not the one of its certificate")]
    OtherKey,
    /// The certificate does not belong to the authority of a job.
    #[error("this is not the certificate of a job's authority: it names no spiffe://<trust domain>/job/<job>")]
    NoAuthority,
    /// A PEM that becomes public contains a private key.
    #[error(
        "there is a private key beside the certificate, and every sidecar would get it; give the certificate alone"
    )]
    HoldsKey,
    /// The key or certificate cannot be made.
    #[error("the certificate cannot be made: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The text is not a PEM of certificates.
    #[error("the PEM of a certificate cannot be read: {0}")]
    Pem(rustls_pki_types::pem::Error),
    /// The parts do not form an identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

fn authority_name(job: &JobName) -> String {
    format!("ronde job {job}")
}

fn authority_uri(trust_domain: &TrustDomain, job: &JobName) -> String {
    format!("spiffe://{trust_domain}/job/{job}")
}

/// Concatenates the certificates of authorities of one job, without duplicates.
///
/// # Errors
/// [`CaError`] if a PEM cannot be read, or one of them is not an authority for the job of `of`.
pub fn bundle(pems: &[&str], of: &SpiffeId) -> Result<String, CaError> {
    let (mut seen, mut bundle) = (Vec::new(), String::new());
    for pem in pems {
        let authorities = certificates(pem)?;
        if authorities.is_empty() {
            return Err(CaError::NoAuthority);
        }
        if pem.contains(PRIVATE_KEY) {
            return Err(CaError::HoldsKey);
        }
        for authority in &authorities {
            let (_, parsed) = x509_parser::parse_x509_certificate(authority).map_err(|_| CaError::NoAuthority)?;
            let found = id_by(&parsed)?;
            if !found.is_same_job(of) {
                let (expected, found) = (Box::new(of.clone()), Box::new(found));
                return Err(IdentityError::OtherJob { expected, found }.into());
            }
        }
        if authorities.iter().any(|authority| !seen.contains(authority)) {
            bundle.push_str(pem.trim_end());
            bundle.push('\n');
            seen.extend(authorities);
        }
    }
    Ok(bundle)
}

/// Marks a private key in a PEM. Bundles are public, so none may contain it.
const PRIVATE_KEY: &str = "PRIVATE KEY-----";

/// The id that the authority of this certificate gives to sidecar 0.
fn id_by(certificate: &X509Certificate<'_>) -> Result<SpiffeId, CaError> {
    let names = certificate.subject_alternative_name().ok().flatten();
    let uri = names.and_then(|names| match names.value.general_names[..] {
        [GeneralName::URI(uri)] => Some(uri.to_owned()),
        _ => None,
    });
    // The name of an authority is the prefix of its sidecars' ids.
    uri.and_then(|uri| format!("{uri}/sidecar/0").parse().ok()).ok_or(CaError::NoAuthority)
}

pub(crate) fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, CaError> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().map_err(CaError::Pem)
}

fn parameters(common_name: &str, validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(common_name);
    params.not_before = OffsetDateTime::from(validity.not_before);
    params.not_after = OffsetDateTime::from(validity.not_after);
    params
}

fn named(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    name
}

/// How far the clocks of two hosts may differ before a new certificate is "not yet valid" on one of them.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(300);
/// A P-256 request has about 500 bytes; the limit leaves room for other key types.
const REQUEST_BYTES_MAX: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use rustls_pki_types::{CertificateSigningRequestDer, UnixTime};

    use crate::identity::CertificateClaims;

    fn ca(job: &str) -> JobCa {
        let job = JobName::new(job).expect("a good name");
        JobCa::generate(job, TrustDomain::new("test.example").expect("a good name"), hour()).expect("an authority")
    }

    fn hour() -> Validity {
        Validity::starting(SystemTime::now(), Duration::from_secs(3_600))
    }

    #[test]
    fn a_certificate_names_the_sidecar_chosen_by_the_authority() {
        let key = KeyPair::generate().expect("a key");
        let mut wishes = CertificateParams::new(["evil.example".to_owned()]).expect("a name");
        wishes.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        wishes.subject_alt_names.push(SanType::URI("spiffe://test.example/job/a/sidecar/0".try_into().expect("ASCII")));
        let request = wishes.serialize_request(&key).and_then(|request| request.pem()).expect("a request");
        let ca = ca("a");
        let certificate = ca.issue(&request, SidecarIndex(7), hour()).expect("a certificate");
        let [certificate] = &certificates(&certificate).expect("PEM")[..] else { panic!("not one certificate") };
        let claims = CertificateClaims::parse(certificate).expect("exactly one name");
        assert_eq!(claims.id, ca.id_of(SidecarIndex(7)));
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).expect("X.509");
        assert!(!parsed.is_ca());
    }

    #[test]
    fn an_identity_is_whole_or_refused() {
        let ca = ca("a");
        let (one, other) = (KeyRequest::generate().expect("a key"), KeyRequest::generate().expect("a key"));
        let certificate = ca.issue(one.request_pem(), SidecarIndex(1), hour()).expect("a certificate");
        let id = ca.id_of(SidecarIndex(1));
        let of = |key: KeyRequest, certificate: &str, root: &str, id| key.into_identity(certificate, root, id);
        let fails = |result: Result<Identity, CaError>, with: &str| {
            let error = result.map(drop).expect_err("parts that do not belong together").to_string();
            assert!(error.contains(with), "{error:?} does not say {with:?}");
        };
        let root = ca.ca_certificate_pem();
        fails(of(other, &certificate, root, id.clone()), "the key does not serve the certificate");
        let again = || KeyRequest::generate().expect("a key");
        fails(of(again(), &certificate, root, ca.id_of(SidecarIndex(2))), "sidecar/1's, expected spiffe");
        fails(of(again(), "", root, id.clone()), "there is no certificate");
        fails(
            of(again(), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", root, id.clone()),
            "cannot be read",
        );
        fails(of(again(), root, root, id.clone()), "an id reads");
        let identity = of(one, &certificate, root, id).expect("its own key");
        assert!(identity.not_after().as_secs() > UnixTime::now().as_secs());
    }

    #[test]
    fn an_authority_that_was_kept_issues_as_before() {
        let ca = ca("a");
        let kept = JobCa::from_pem(ca.ca_certificate_pem(), &ca.key_pem()).expect("its own parts");
        let key = KeyRequest::generate().expect("a key");
        let certificate = kept.issue(key.request_pem(), SidecarIndex(3), hour()).expect("a certificate");
        let identity = Identity::from_pem(&certificate, &key.key_pem(), ca.ca_certificate_pem()).expect("an identity");
        assert_eq!(*identity.id(), ca.id_of(SidecarIndex(3)));
        identity.check(SystemTime::now()).expect("a fresh certificate of this authority");
        let fails = |certificate: &str, key: &str, with: &str| {
            let error = JobCa::from_pem(certificate, key).expect_err("parts that do not belong together").to_string();
            assert!(error.contains(with), "{error:?} does not say {with:?}");
        };
        fails(ca.ca_certificate_pem(), &key.key_pem(), "not the one of its certificate");
        fails(&certificate, &key.key_pem(), "names no spiffe://");
        fails("", &key.key_pem(), "names no spiffe://");
        fails(ca.ca_certificate_pem(), "no key", "private key cannot be read");
    }

    #[test]
    fn the_same_secret_gives_the_same_authority() {
        let secret = JobSecret::generate().expect("a generator");
        let job = |name: &str| JobName::new(name).expect("a good name");
        let domain = TrustDomain::new("test.example").expect("a good name");
        let make = |name: &str| JobCa::from_secret(&secret, job(name), domain.clone()).expect("an authority");
        let (here, there, other) = (make("a"), make("a"), make("b"));
        assert_eq!(here.ca_certificate_pem(), there.ca_certificate_pem());
        let key = KeyRequest::generate().expect("a key");
        let certificate = here.issue(key.request_pem(), SidecarIndex(3), hour()).expect("a certificate");
        let identity = |root: &JobCa| Identity::from_pem(&certificate, &key.key_pem(), root.ca_certificate_pem());
        identity(&there).expect("an identity").check(SystemTime::now()).expect("signed by the same authority");
        let error = identity(&other).expect("an identity").check(SystemTime::now()).expect_err("another job's");
        assert_eq!(error, IdentityError::OtherAuthority);
    }

    #[test]
    fn an_own_certificate_is_checked_as_a_peer_would() {
        let (ca, other) = (ca("a"), self::ca("a"));
        let words = |validity: Validity, root: &JobCa| {
            let key = KeyRequest::generate().expect("a key");
            let certificate = ca.issue(key.request_pem(), SidecarIndex(3), validity).expect("a certificate");
            let identity = Identity::from_pem(&certificate, &key.key_pem(), root.ca_certificate_pem());
            identity.expect("parts that fit").check(SystemTime::now()).map_err(|error| error.to_string())
        };
        let now = SystemTime::now();
        let hours = |from: u64, to: u64| Validity {
            not_before: now - Duration::from_secs(36_000) + Duration::from_secs(3_600 * from),
            not_after: now - Duration::from_secs(36_000) + Duration::from_secs(3_600 * to),
        };
        assert_eq!(words(hour(), &ca), Ok(()));
        assert_eq!(words(hour(), &other), Err("the certificate is not signed by an authority of this job".to_owned()));
        let expired = words(hours(0, 9), &ca).expect_err("it is over");
        assert!(expired.starts_with("the certificate expired at 20") && expired.contains('Z'), "{expired}");
        let early = words(hours(11, 12), &ca).expect_err("it has not begun");
        assert!(early.starts_with("the certificate is not valid before 20"), "{early}");
    }

    #[test]
    fn a_request_is_checked() {
        let ca = ca("a");
        let issue = |request: &str| ca.issue(request, SidecarIndex(0), hour());
        assert!(matches!(issue("no PEM"), Err(CaError::Request(_))));
        assert!(matches!(issue(&"x".repeat(REQUEST_BYTES_MAX + 1)), Err(CaError::RequestLength { .. })));
        // A request that its key did not sign, for the public key of another owner.
        let key = KeyRequest::generate().expect("a key");
        let der = CertificateSigningRequestDer::from_pem_slice(key.request_pem().as_bytes()).expect("PEM");
        let mut forged = der.to_vec();
        let at = forged.len() - 10;
        forged[at] ^= 1;
        let forged = CertificateSigningRequestParams::from_der(&forged.into());
        assert!(forged.is_err());
    }

    #[test]
    fn secrets_are_not_printed() {
        let ca = ca("a");
        let key = KeyRequest::generate().expect("a key");
        assert_eq!(format!("{key:?}"), "KeyRequest { .. }");
        assert_eq!(format!("{ca:?}"), "JobCa { job: JobName(\"a\"), trust_domain: TrustDomain(\"test.example\"), .. }");
        let certificate = ca.issue(key.request_pem(), SidecarIndex(1), hour()).expect("a certificate");
        let identity = key.into_identity(&certificate, ca.ca_certificate_pem(), ca.id_of(SidecarIndex(1)));
        let printed = format!("{:?}", identity.expect("an identity"));
        assert!(printed.starts_with("Identity { id: SpiffeId {") && printed.len() < 300, "{printed}");
    }
}
