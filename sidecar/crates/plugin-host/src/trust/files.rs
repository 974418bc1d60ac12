//! Keys and signatures as files.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{PublicKey, Signature, SigningKey, TrustError};

/// What a plugin's path gets behind it for its signature.
pub const SIGNATURE_SUFFIX: &str = ".sig";
/// What a private key's path gets behind it for its public key.
const PUBLIC_SUFFIX: &str = ".pub";
/// More than any key or signature takes.
const FILE_BYTES_MAX: u64 = 16 << 10;

/// Draws a key and writes it to a file of mode 0600, and the public key beside it with `.pub` behind its name. Neither file
/// may be there yet.
///
/// # Errors
/// [`TrustError`] when there is no key, or a file is there or cannot be written.
pub fn create_key(path: &Path) -> Result<(PublicKey, PathBuf), TrustError> {
    let key = SigningKey::generate()?;
    let public = with_suffix(path, PUBLIC_SUFFIX);
    write_new(&public, key.public_key().to_pem().as_bytes(), 0o644)?;
    if let Err(error) = write_new(path, key.to_pem().as_bytes(), 0o600) {
        // A public key without its private key is of no use; that there is none is what the error says.
        let _ = fs::remove_file(&public);
        return Err(error);
    }
    Ok((key.public_key(), public))
}

/// Reads a private key that only its owner can read.
///
/// # Errors
/// [`TrustError`] when others can, too, or it is no key.
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
/// [`TrustError`] when there is none.
pub fn read_public_key(path: &Path) -> Result<PublicKey, TrustError> {
    PublicKey::from_pem(&read_text(path)?)
}

/// Where a plugin's signature lies: beside it, with `.sig` behind its name.
#[must_use]
pub fn signature_path(plugin: &Path) -> PathBuf {
    with_suffix(plugin, SIGNATURE_SUFFIX)
}

/// Reads the signature that lies beside a plugin, if one does.
///
/// # Errors
/// [`TrustError`] when there is one that is none.
pub fn read_signature(plugin: &Path) -> Result<Option<Signature>, TrustError> {
    match read_text(&signature_path(plugin)) {
        Ok(text) => Signature::from_text(&text).map(Some),
        Err(TrustError::File { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a signature beside its plugin, in the place of an earlier one.
///
/// # Errors
/// [`TrustError::File`] when it cannot be written.
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

/// Reads a short file; the rest of a long one makes it no key.
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
