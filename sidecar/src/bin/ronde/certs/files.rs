//! Writing keys and certificates: never over something silently, never half, never readable by others.

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
    /// One that only its owner reads.
    pub(super) fn secret(path: PathBuf, text: Zeroizing<String>) -> Self {
        Self { path, text, mode: 0o600 }
    }

    /// One that everybody may read who comes to the directory.
    pub(super) fn public(path: PathBuf, text: String) -> Self {
        Self { path, text: text.into(), mode: 0o644 }
    }
}

/// Writes files with the directories that they lie in (mode 0700); nothing when one of them is there already.
///
/// # Errors
/// When a file exists, or one cannot be written.
pub(super) fn create_all(files: &[NewFile]) -> anyhow::Result<()> {
    if let Some(found) = files.iter().find(|file| file.path.symlink_metadata().is_ok()) {
        return Err(exists(&found.path));
    }
    files.iter().try_for_each(|file| make_directory(file).and_then(|()| write_new(&file.path, file)))
}

/// Writes files with the directories that they lie in, over those that are there.
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

/// Replaces a file at one moment: whoever reads it finds the old text or the new one.
///
/// # Errors
/// When it cannot be written; the old one then stays.
pub(super) fn replace(file: &NewFile) -> anyhow::Result<()> {
    let mut name = file.path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let fresh = file.path.with_file_name(name);
    // One may be left of a try that was ended in the middle.
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
        "{} exists and is not overwritten; give another place, or renew certificates with `ronde certs rotate`",
        path.display()
    );
    anyhow!(text).context(Code::FileExists)
}

fn unwritable(path: &Path, error: std::io::Error) -> anyhow::Error {
    anyhow!(error).context(format!("cannot write {}", path.display())).context(Code::CertificateFiles)
}
