//! Keys and certificates of sidecars without a launcher: from a directory, or from the job's secret.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use ronde_bootstrap::codes::{Code, coded};
use ronde_transport::{Identity, IdentityError, utc};
use ronde_wire::{JobName, SidecarIndex, limits};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::driver::command::ControlCommand;
use crate::process::arguments::SidecarArgs;

use directory::Directory;
pub use directory::{AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE};
use secret::OwnAuthority;

pub mod directory;
pub mod private_file;
mod secret;

/// The source of a sidecar's identity, at the start and while it runs.
pub(crate) enum Credentials {
    /// Files that another program replaces.
    Directory(Directory),
    /// The job's secret: the sidecar issues its own certificates.
    Secret(OwnAuthority),
}

impl Credentials {
    /// Takes the source that the command line or configuration names.
    ///
    /// # Errors
    /// When it names none, two, or half of one; and when a secret cannot be used.
    pub(crate) fn named(args: &SidecarArgs) -> anyhow::Result<Self> {
        match (&args.certs, &args.job_secret_file) {
            (Some(_), Some(_)) => {
                Err(anyhow::anyhow!("--certs and --job-secret-file exclude each other; use one of them"))
                    .context(Code::SidecarSettings)
            }
            (None, None) => Err(anyhow::anyhow!(NO_CREDENTIALS)).context(Code::NoCredentials),
            (Some(directory), None) => {
                ensure_absent(args).context(Code::SidecarSettings)?;
                Ok(Self::Directory(Directory::new(directory.clone())))
            }
            (None, Some(file)) => {
                let (job, sidecar) = named_sidecar(args).context(Code::SidecarSettings)?;
                let life = Duration::from_secs(args.certificate_life);
                Ok(Self::Secret(OwnAuthority::read(file, job, args.trust_domain.clone(), sidecar, life)?))
            }
        }
    }

    /// Returns the initial identity.
    ///
    /// # Errors
    /// Which file is wrong and how, with the code that explains it.
    pub(crate) fn load(&mut self) -> anyhow::Result<Identity> {
        match self {
            Self::Directory(directory) => directory.load(),
            Self::Secret(authority) => authority.issue(),
        }
    }

    /// Returns a new identity, if there is one.
    fn fresh(&mut self) -> anyhow::Result<Option<Identity>> {
        match self {
            Self::Directory(directory) => directory.poll(),
            Self::Secret(authority) => authority.renew(),
        }
    }
}

/// Passes each new identity to the driver. Logs a warning about unusable files and keeps the old identity. Ends with
/// the driver, or immediately if there is no source of identities.
pub(crate) async fn keep_fresh(
    credentials: Option<Credentials>,
    mut current: Arc<Identity>,
    commands: mpsc::Sender<ControlCommand>,
) {
    let Some(mut credentials) = credentials else { return };
    let mut last_warning = None;
    let mut ticks = interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !commands.is_closed() {
        ticks.tick().await;
        // The files may be on storage where reading takes long.
        let polled = tokio::task::spawn_blocking(move || {
            let fresh = credentials.fresh();
            (credentials, fresh)
        });
        let Ok((returned, fresh)) = polled.await else {
            tracing::error!("checking the credentials has failed; this sidecar keeps the current ones");
            return;
        };
        credentials = returned;
        match fresh.and_then(|fresh| fresh.map(|fresh| same_sidecar(&current, fresh)).transpose()) {
            Ok(None) => {}
            Ok(Some(fresh)) => {
                let (serial, until, authorities) = (fresh.serial(), utc(fresh.not_after()), fresh.authorities());
                tracing::info!(serial, until, authorities, "links use the new certificate");
                last_warning = None;
                current = Arc::new(fresh);
                if commands.send(ControlCommand::Identity(Arc::clone(&current))).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                // Every poll tries again, but logs the same mistake only once.
                let reason = coded(&error, Code::CertificateFiles);
                if last_warning.as_ref() != Some(&reason) {
                    let until = utc(current.not_after());
                    tracing::warn!(until, "the changed credentials cannot be used, the old ones stay: {reason}");
                    last_warning = Some(reason);
                }
            }
        }
    }
}

fn ensure_absent(args: &SidecarArgs) -> anyhow::Result<()> {
    let given = [("--job", args.job.is_some()), ("--index", args.index.is_some())];
    match given.iter().find(|(_, given)| *given) {
        Some((option, _)) => {
            anyhow::bail!("{option} needs --job-secret-file; with --certs the certificate contains it")
        }
        None => Ok(()),
    }
}

fn named_sidecar(args: &SidecarArgs) -> anyhow::Result<(JobName, SidecarIndex)> {
    let job = args.job.clone().context("--job-secret-file needs --job NAME, the same on all hosts")?;
    let index = args.index.context("--job-secret-file needs --index I, this sidecar's index in --peers, from 0")?;
    ensure!(
        (index as usize) < limits::SIDECARS_MAX,
        "--index {index} is out of range; there are {}",
        limits::SIDECARS_MAX
    );
    Ok((job, SidecarIndex(index)))
}

fn same_sidecar(current: &Identity, fresh: Identity) -> anyhow::Result<Identity> {
    let (expected, found) = (current.id(), fresh.id());
    ensure!(expected == found, "the certificate is {found}'s, this sidecar is {expected}");
    Ok(fresh)
}

/// Returns the error code of an unusable identity.
pub fn code_of(error: &IdentityError) -> Code {
    match error {
        IdentityError::Expired { .. } => Code::CertificateExpired,
        IdentityError::NotYetValid { .. } => Code::CertificateNotYetValid,
        IdentityError::OtherAuthority | IdentityError::OtherId { .. } | IdentityError::OtherJob { .. } => {
            Code::CertificateForeign
        }
        _ => Code::CertificateFiles,
    }
}

/// The name of a file or directory in an error.
fn named(path: &std::path::Path) -> String {
    path.display().to_string()
}

const NO_CREDENTIALS: &str = "there are no credentials; give --certs DIR with what `ronde certs issue` has made, or \
     --job-secret-file FILE with what `ronde certs secret` has made, or start the job with `ronde run`, which hands them over a pipe";
/// How often the files are polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
