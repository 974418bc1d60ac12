//! Writes keys and certificates: atomically, without overwriting silently, and unreadable for others.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use zeroize::Zeroizing;

use ronde_bootstrap::codes::Code;

/// A file to write.
pub(super) struct NewFile {
    path: PathBuf,
    text: Zeroizing<String>,
    mode: u32,
}

impl NewFile {
    /// Creates one that only its owner may read.
    pub(super) fn secret(path: PathBuf, text: Zeroizing<String>) -> Self {
        Self { path, text, mode: 0o600 }
    }

    /// Creates one that everybody with access to the directory may read.
    pub(super) fn public(path: PathBuf, text: String) -> Self {
        Self { path, text: text.into(), mode: 0o644 }
    }
}

/// Writes files and their directories (mode 0700); nothing if one of them exists already.
///
/// # Errors
/// When a file exists, or one cannot be written.
pub(super) fn create_all(files: &[NewFile]) -> anyhow::Result<()> {
    if let Some(found) = files.iter().find(|file| file.path.symlink_metadata().is_ok()) {
        return Err(exists(&found.path));
    }
    files.iter().try_for_each(|file| make_directory(file).and_then(|()| write_new(&file.path, file)))
}

/// Writes files and their directories, and overwrites existing ones.
///
/// # Errors
/// When one cannot be written.
pub(super) fn replace_all(files: &[NewFile]) -> anyhow::Result<()> {
    files.iter().try_for_each(|file| make_directory(file).and_then(|()| replace(file)))
}

fn make_directory(file: &NewFile) -> anyhow::Result<()> {
    let directory = file.path.parent().unwrap_or(Path::new("."));
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.with_context(|| format!("cannot make the directory {}", directory.display())).context(Code::CertificateFiles)
}

/// Replaces a file atomically: a reader finds the old text or the new one.
///
/// # Errors
/// When it cannot be written; the old one then stays.
pub(super) fn replace(file: &NewFile) -> anyhow::Result<()> {
    let mut name = file.path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let fresh = file.path.with_file_name(name);
    // An interrupted attempt may have left one.
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(unwritable(&fresh, error)),
        _ => {}
    }
    write_new(&fresh, file)?;
    fs::rename(&fresh, &file.path).map_err(|error| unwritable(&file.path, error))
}

fn write_new(path: &Path, file: &NewFile) -> anyhow::Result<()> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(file.mode).open(path);
    let mut opened = opened.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => exists(path),
        _ => unwritable(path, error),
    })?;
    let written = opened.write_all(file.text.as_bytes()).and_then(|()| opened.sync_all());
    written.map_err(|error| unwritable(path, error))
}

fn exists(path: &Path) -> anyhow::Error {
    let text = format!(
        "{} exists and is not overwritten; choose another directory, or renew certificates with `ronde certs rotate`",
        path.display()
    );
    anyhow!(text).context(Code::FileExists)
}

fn unwritable(path: &Path, error: std::io::Error) -> anyhow::Error {
    anyhow!(error).context(format!("cannot write {}", path.display())).context(Code::CertificateFiles)
}
