//! Fuzz targets for certificates and certificate requests of unauthenticated peers.

use std::time::{Duration, SystemTime};

use ronde_fuzz::{Outcome, fuzz};
use ronde_wire::{JobName, SidecarIndex};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};

use crate::identity::CertificateClaims;
use crate::{Identity, JobCa, KeyRequest, TrustDomain, Validity};

/// A job's authority, and the identities of its sidecars 0 and 1.
pub(crate) fn job() -> (JobCa, [Identity; 2]) {
    let validity = || Validity::starting(SystemTime::now(), Duration::from_secs(86_400));
    let (job, domain) = (JobName::new("digits").expect("a name"), TrustDomain::new("ronde.local").expect("a domain"));
    let ca = JobCa::generate(job, domain, validity()).expect("an authority");
    let identity = |index| {
        let (key, index) = (KeyRequest::generate().expect("a key"), SidecarIndex(index));
        let certificate = ca.issue(key.request_pem(), index, validity()).expect("a certificate");
        key.into_identity(&certificate, ca.ca_certificate_pem(), ca.id_of(index)).expect("an identity")
    };
    let identities = [identity(0), identity(1)];
    (ca, identities)
}

/// Parses arbitrary bytes as a certificate. If parsing succeeds, the certificate contains the parsed id in its
/// canonical spelling. webpki checks the chain.
#[test]
fn fuzz_certificates() {
    let (_, identities) = job();
    let seeds = identities.iter().map(|identity| identity.certificate_chain()[0].to_vec()).collect();
    fuzz("certificates", seeds, |bytes| {
        let claims = CertificateClaims::parse(&CertificateDer::from(bytes));
        if let Ok(claims) = &claims {
            let again = claims.id.to_string();
            assert!(
                bytes.windows(again.len()).any(|window| window == again.as_bytes()),
                "{again} does not stand there"
            );
        }
        Outcome::of(&claims.map(|claims| claims.id.job.as_str().len()))
    });
}

/// Issues certificates for arbitrary requests. Whatever the request asks for, the certificate names the sidecar that
/// the launcher chose.
#[test]
fn fuzz_certificate_requests() {
    let (ca, _) = job();
    let key = KeyRequest::generate().expect("a key");
    let der = CertificateSigningRequestDer::from_pem_slice(key.request_pem().as_bytes()).expect("PEM");
    let seeds = vec![[&[0], &der[..]].concat(), [&[1], key.request_pem().as_bytes()].concat()];
    let validity = || Validity::starting(SystemTime::now(), Duration::from_secs(60));
    fuzz("certificate_requests", seeds, |bytes| {
        let Some((kind, request)) = bytes.split_first() else { return Outcome::refused(&"nothing") };
        // Mutated PEM is rarely valid base64, so the other kind of input mutates the DER inside.
        let pem = match kind & 1 {
            0 => pem::encode(&pem::Pem::new("CERTIFICATE REQUEST", request)),
            _ => String::from_utf8_lossy(request).into_owned(),
        };
        let issued = ca.issue(&pem, SidecarIndex(7), validity());
        if let Ok(certificate) = &issued {
            let der = CertificateDer::from_pem_slice(certificate.as_bytes()).expect("a certificate");
            let claims = CertificateClaims::parse(&der).expect("a sidecar's");
            assert_eq!(claims.id, ca.id_of(SidecarIndex(7)), "a request decides the name");
        }
        Outcome::of(&issued.map(|_| "issued"))
    });
}
