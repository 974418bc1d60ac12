//! Files with keys and signatures.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{PublicKey, Signature, SigningKey, TrustError};

/// The suffix of a signature's file.
pub const SIGNATURE_SUFFIX: &str = ".sig";
/// The suffix of a public key's file.
const PUBLIC_SUFFIX: &str = ".pub";
/// Limit for the size of a file; keys and signatures are much smaller.
const FILE_BYTES_MAX: u64 = 16 << 10;

/// Generates a key and writes it to a file with mode 0600, and its public key to a file with the suffix `.pub`.
/// Existing files are not overwritten.
///
/// # Errors
/// [`TrustError`] if no key can be generated, or a file exists or cannot be written.
pub fn create_key(path: &Path) -> Result<(PublicKey, PathBuf), TrustError> {
    let key = SigningKey::generate()?;
    let public = with_suffix(path, PUBLIC_SUFFIX);
    write_new(&public, key.public_key().to_pem().as_bytes(), 0o644)?;
    if let Err(error) = write_new(path, key.to_pem().as_bytes(), 0o600) {
        // A public key without its private key is useless. The error reports why there is none.
        let _ = fs::remove_file(&public);
        return Err(error);
    }
    Ok((key.public_key(), public))
}

/// Reads a private key, whose file only its owner may be able to read.
///
/// # Errors
/// [`TrustError`] if others can read the file, or it does not contain a key.
pub fn read_signing_key(path: &Path) -> Result<SigningKey, TrustError> {
    let failed = |error| TrustError::File { path: path.to_owned(), error };
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(TrustError::Exposed { path: path.to_owned(), mode });
    }
    SigningKey::from_pem(&Zeroizing::new(read(file).map_err(failed)?))
}

/// Reads a public key.
///
/// # Errors
/// [`TrustError`] if the file cannot be read or does not contain one.
pub fn read_public_key(path: &Path) -> Result<PublicKey, TrustError> {
    PublicKey::from_pem(&read_text(path)?)
}

/// The path of a plugin's signature: the plugin's path with the suffix `.sig`.
#[must_use]
pub fn signature_path(plugin: &Path) -> PathBuf {
    with_suffix(plugin, SIGNATURE_SUFFIX)
}

/// Reads a plugin's signature, if it has one.
///
/// # Errors
/// [`TrustError`] if the file cannot be read or does not contain a signature.
pub fn read_signature(plugin: &Path) -> Result<Option<Signature>, TrustError> {
    match read_text(&signature_path(plugin)) {
        Ok(text) => Signature::from_text(&text).map(Some),
        Err(TrustError::File { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a plugin's signature, replacing an earlier one.
///
/// # Errors
/// [`TrustError::File`] if it cannot be written.
pub fn write_signature(plugin: &Path, signature: &Signature) -> Result<PathBuf, TrustError> {
    let path = signature_path(plugin);
    match fs::write(&path, signature.to_text()) {
        Ok(()) => Ok(path),
        Err(error) => Err(TrustError::File { path, error }),
    }
}

fn read_text(path: &Path) -> Result<String, TrustError> {
    let failed = |error| TrustError::File { path: path.to_owned(), error };
    read(File::open(path).map_err(failed)?).map_err(failed)
}

/// Reads a short file. A longer one is truncated, and then is not a valid key.
fn read(file: File) -> std::io::Result<String> {
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<(), TrustError> {
    let failed = |error| TrustError::File { path: path.to_owned(), error };
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = file.map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}
