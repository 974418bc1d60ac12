//! Sidecars that issue their own certificates: the job's secret yields the same authority on each host.

use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use ronde_bootstrap::codes::Code;
use ronde_transport::{CaError, Identity, JobCa, JobSecret, KeyRequest, TrustDomain, Validity};
use ronde_wire::{JobName, SidecarIndex};

use super::private_file;

/// The job's authority in memory, and when this sidecar's certificate must be replaced.
pub(crate) struct OwnAuthority {
    ca: JobCa,
    sidecar: SidecarIndex,
    life: Duration,
    due: SystemTime,
}

impl OwnAuthority {
    /// Reads the secret, and drops it once the authority is derived.
    ///
    /// # Errors
    /// When the file is readable by others, belongs to another user, is missing, or contains no secret.
    pub(super) fn read(
        file: &Path,
        job: JobName,
        trust_domain: TrustDomain,
        sidecar: SidecarIndex,
        life: Duration,
    ) -> anyhow::Result<Self> {
        let text = private_file::read(file)?;
        let secret = JobSecret::from_text(&text);
        let secret = secret.map_err(|error| anyhow!("{} is not a job's secret: {error}", file.display()));
        let secret = secret.context(Code::JobSecret)?;
        let ca = JobCa::from_secret(&secret, job, trust_domain).context(Code::CertificateNotIssued)?;
        Ok(Self { ca, sidecar, life, due: SystemTime::now() })
    }

    /// Generates a new key and a certificate for it.
    ///
    /// # Errors
    /// When either cannot be generated.
    pub(super) fn issue(&mut self) -> anyhow::Result<Identity> {
        let now = SystemTime::now();
        let identity = self.make(Validity::starting(now, self.life)).context(Code::CertificateNotIssued)?;
        self.due = now + self.life * RENEWED_AT.0 / RENEWED_AT.1;
        Ok(identity)
    }

    /// Returns a new identity when the certificate must be replaced.
    ///
    /// # Errors
    /// As [`Self::issue`].
    pub(super) fn renew(&mut self) -> anyhow::Result<Option<Identity>> {
        if SystemTime::now() < self.due { Ok(None) } else { self.issue().map(Some) }
    }

    fn make(&self, validity: Validity) -> Result<Identity, CaError> {
        let key = KeyRequest::generate()?;
        let certificate = self.ca.issue(key.request_pem(), self.sidecar, validity)?;
        key.into_identity(&certificate, self.ca.ca_certificate_pem(), self.ca.id_of(self.sidecar))
    }
}

/// The part of a certificate's life after which it is replaced; in the rest, links are replaced.
const RENEWED_AT: (u32, u32) = (2, 3);
