//! Keys and certificates of sidecars without a launcher: three files in a directory.
//!
//! | file | what | mode |
//! |---|---|---|
//! | `cert.pem` | the sidecar's certificate chain, leaf first; it says which sidecar of which job this is | any |
//! | `key.pem` | its private key | 0600 or 0400 |
//! | `ca.pem` | the certificates of the job's authorities | any |
//!
//! The files may be replaced while the sidecar runs ([`watch`]).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use ronde_transport::{CaError, Identity, IdentityError, utc};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::cli::codes::{Code, coded};
use crate::service::Command;

/// The sidecar's certificate chain.
pub(crate) const CERTIFICATE_FILE: &str = "cert.pem";
/// The sidecar's private key.
pub(crate) const KEY_FILE: &str = "key.pem";
/// The certificates of the job's authorities.
pub(crate) const AUTHORITY_FILE: &str = "ca.pem";

/// Reads a directory and checks that its parts belong together, are valid now and of one authority.
///
/// # Errors
/// What is wrong with which file, with the code that explains it.
pub(crate) fn load(directory: &Path) -> anyhow::Result<Identity> {
    let identity = read(directory)?;
    identity.check(SystemTime::now()).map_err(|error| {
        let code = code_of(&error);
        anyhow!(error).context(directory.join(CERTIFICATE_FILE).display().to_string()).context(code)
    })?;
    Ok(identity)
}

/// Reads a directory and checks that its parts belong together; whether they are valid now is another question.
///
/// # Errors
/// As [`load`].
pub(crate) fn read(directory: &Path) -> anyhow::Result<Identity> {
    let key = read_key(&directory.join(KEY_FILE))?;
    let certificate = read_text(&directory.join(CERTIFICATE_FILE))?;
    let authority = read_text(&directory.join(AUTHORITY_FILE))?;
    Identity::from_pem(&certificate, &key, &authority).map_err(|error| {
        let code = match &error {
            CaError::Identity(error) => code_of(error),
            _ => Code::CertificateFiles,
        };
        anyhow!(error).context(format!("the credentials in {} cannot be used", directory.display())).context(code)
    })
}

/// Reads a private key that nobody else can read.
///
/// # Errors
/// When the file is open to others, with the command that closes it, or cannot be read.
pub(crate) fn read_key(path: &Path) -> anyhow::Result<String> {
    let mode = fs::metadata(path).map(|metadata| metadata.mode() & 0o777);
    let mode = mode.with_context(|| format!("cannot read {}", path.display())).context(Code::CertificateFiles)?;
    if mode & 0o077 != 0 {
        let path = path.display();
        return Err(anyhow!("the key {path} has mode {mode:04o}, others may read it; run: chmod 600 {path}"))
            .context(Code::KeyMode);
    }
    read_text(path)
}

/// Reads a file that is text, with its name in the error.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    text.context(Code::CertificateFiles)
}

/// Looks once a second whether the files have changed, and hands a fresh identity to the driver. What cannot be used
/// is warned of, and the old one stays. Ends with the driver.
pub(crate) async fn watch(directory: PathBuf, mut current: Arc<Identity>, commands: mpsc::Sender<Command>) {
    let mut changes = Changes::since(Fingerprint::of(&directory));
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if commands.is_closed() {
            return;
        }
        if !changes.observe(Fingerprint::of(&directory)) {
            continue;
        }
        match load(&directory).and_then(|fresh| same_sidecar(&current, fresh)) {
            Ok(fresh) => {
                tracing::info!(until = utc(fresh.not_after()), "new links take the fresh certificate");
                current = Arc::new(fresh);
                if commands.send(Command::Identity(Arc::clone(&current))).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let until = utc(current.not_after());
                let reason = coded(&error, Code::CertificateFiles);
                tracing::warn!(until, "the changed credentials cannot be used, the old ones stay: {reason}");
            }
        }
    }
}

fn same_sidecar(current: &Identity, fresh: Identity) -> anyhow::Result<Identity> {
    let (expected, found) = (current.id(), fresh.id());
    anyhow::ensure!(expected == found, "the certificate is {found}'s, this sidecar is {expected}");
    Ok(fresh)
}

fn code_of(error: &IdentityError) -> Code {
    match error {
        IdentityError::Expired { .. } => Code::CertificateExpired,
        IdentityError::NotYetValid { .. } => Code::CertificateNotYetValid,
        IdentityError::OtherAuthority | IdentityError::OtherId { .. } | IdentityError::OtherJob { .. } => {
            Code::CertificateForeign
        }
        _ => Code::CertificateFiles,
    }
}

/// What tells one state of the three files from another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fingerprint([Option<(u64, i64, i64, u64)>; 3]);

impl Fingerprint {
    fn of(directory: &Path) -> Self {
        let file = |name: &str| {
            let metadata = fs::metadata(directory.join(name)).ok()?;
            Some((metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.len()))
        };
        Self([CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE].map(file))
    }
}

/// Which state was handled, and which was seen last: a change counts when two looks in a row see the same, because three
/// files are not replaced at one moment.
struct Changes {
    handled: Fingerprint,
    seen: Fingerprint,
}

impl Changes {
    fn since(handled: Fingerprint) -> Self {
        Self { seen: handled.clone(), handled }
    }

    /// Whether this state is new and has settled.
    fn observe(&mut self, now: Fingerprint) -> bool {
        let settled = std::mem::replace(&mut self.seen, now) == self.seen;
        if !settled || self.seen == self.handled {
            return false;
        }
        self.handled.clone_from(&self.seen);
        true
    }
}

/// How often the files are looked at.
const POLL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn state(number: u64) -> Fingerprint {
        Fingerprint([Some((number, 0, 0, 0)), None, None])
    }

    #[test]
    fn a_change_counts_once_when_it_has_settled() {
        let mut changes = Changes::since(state(1));
        let seen = [1, 1, 2, 3, 3, 3, 1, 2, 2, 3];
        let counted: Vec<bool> = seen.into_iter().map(|number| changes.observe(state(number))).collect();
        assert_eq!(counted, [false, false, false, false, true, false, false, false, true, false]);
    }
}
