//! Credentials in a directory of three files.
//!
//! | file | what | mode |
//! |---|---|---|
//! | `cert.pem` | the sidecar's certificate chain, leaf first; it names the sidecar and its job | 0644 or stricter |
//! | `key.pem` | its private key | 0600 or 0400 |
//! | `ca.pem` | the certificates of the job's authorities | 0644 or stricter |
//!
//! The files may be replaced while the sidecar runs; `Directory::poll` notices it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::anyhow;
use ronde_bootstrap::codes::Code;
use ronde_transport::{CaError, Identity};

use super::{code_of, named, private_file};

/// The sidecar's certificate chain.
pub const CERTIFICATE_FILE: &str = "cert.pem";
/// The sidecar's private key.
pub const KEY_FILE: &str = "key.pem";
/// The certificates of the job's authorities.
pub const AUTHORITY_FILE: &str = "ca.pem";

/// A directory that is polled for changes.
pub struct Directory {
    path: PathBuf,
    changes: Changes,
}

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        let changes = Changes::since(Fingerprint::of(&path));
        Self { path, changes }
    }

    /// Reads the initial identity.
    ///
    /// # Errors
    /// As [`load`].
    pub(super) fn load(&mut self) -> anyhow::Result<Identity> {
        // Taken before the files are read: the next poll notices a change in between.
        self.changes = Changes::since(Fingerprint::of(&self.path));
        load(&self.path)
    }

    /// Returns a new identity when the files have changed. Files that cannot be used are read again at the next poll: a
    /// mismatched pair may be half of a replacement, and the clock may be set.
    ///
    /// # Errors
    /// As [`load`].
    pub(super) fn poll(&mut self) -> anyhow::Result<Option<Identity>> {
        if !self.changes.observe(Fingerprint::of(&self.path)) {
            return Ok(None);
        }
        let fresh = load(&self.path)?;
        self.changes.handled();
        Ok(Some(fresh))
    }
}

/// Reads a directory and checks that its files match, are valid now and are of one authority.
///
/// # Errors
/// Which file is wrong and how, with the code that explains it.
pub fn load(directory: &Path) -> anyhow::Result<Identity> {
    let identity = read(directory)?;
    identity.check(SystemTime::now()).map_err(|error| {
        let code = code_of(&error);
        anyhow!(error).context(named(&directory.join(CERTIFICATE_FILE))).context(code)
    })?;
    Ok(identity)
}

/// Reads a directory and checks that its files match, but not whether they are valid now.
///
/// # Errors
/// As [`load`].
pub fn read(directory: &Path) -> anyhow::Result<Identity> {
    let key = private_file::read(&directory.join(KEY_FILE))?;
    let certificate = private_file::read_public(&directory.join(CERTIFICATE_FILE))?;
    let authority = private_file::read_public(&directory.join(AUTHORITY_FILE))?;
    Identity::from_pem(&certificate, &key, &authority).map_err(|error| {
        let code = match &error {
            CaError::Identity(error) => code_of(error),
            _ => Code::CertificateFiles,
        };
        anyhow!(error).context(format!("the credentials in {} cannot be used", directory.display())).context(code)
    })
}

/// Identifies one state of the three files.
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

/// The state that is in use, and the one seen last. A change counts when two polls in a row see the same state, because
/// three files are not replaced atomically.
struct Changes {
    taken: Fingerprint,
    seen: Fingerprint,
}

impl Changes {
    fn since(taken: Fingerprint) -> Self {
        Self { seen: taken.clone(), taken }
    }

    /// Returns whether this state differs from the one in use and is stable.
    fn observe(&mut self, now: Fingerprint) -> bool {
        let is_stable = std::mem::replace(&mut self.seen, now) == self.seen;
        is_stable && self.seen != self.taken
    }

    /// Marks the state that was seen last as the one in use.
    fn handled(&mut self) {
        self.taken.clone_from(&self.seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(number: u64) -> Fingerprint {
        Fingerprint([Some((number, 0, 0, 0)), None, None])
    }

    #[test]
    fn changed_files_are_ready_once_they_stay_the_same_between_two_polls() {
        let mut changes = Changes::since(state(1));
        let mut poll = |number, usable| {
            let counts = changes.observe(state(number));
            if counts && usable {
                changes.handled();
            }
            counts
        };
        assert!([1, 1, 2, 3].into_iter().all(|number| !poll(number, true)));
        // A mismatched pair is read again until the files are as before or usable.
        assert!(poll(3, false) && poll(3, false));
        assert!(!poll(1, true) && !poll(1, true));
        assert!(!poll(3, true) && poll(3, true) && !poll(3, true));
    }
}
