//! Who may have written a plugin: keys, signatures, and the policy that lets plugins in.
//!
//! A signature is Ed25519 over `label || SHA-256(file)` and lies in a file of its own beside the plugin. It names the public
//! key, so that a damaged plugin or signature is noticed also where everybody may sign.

mod files;
mod key;
mod policy;
mod signature;

use std::path::PathBuf;

pub use files::{
    SIGNATURE_SUFFIX, create_key, read_public_key, read_signature, read_signing_key, signature_path, write_signature,
};
pub use key::{KeyId, PublicKey, SigningKey};
pub use policy::{Policy, digest, digest_from_text, digest_text};
pub use signature::Signature;

/// Why a plugin is not trusted, or a key or signature not usable.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The signature is not one of this file by the key that it names.
    #[error(
        "the plugin's signature is wrong: it is not what {key} signs for this file; the plugin or the signature was changed"
    )]
    WrongSignature {
        /// The key that it names.
        key: KeyId,
    },
    /// The policy asks for a signature.
    #[error("the plugin is not signed, but this sidecar runs only plugins signed by {}", list(keys))]
    Unsigned {
        /// The keys that may sign.
        keys: Vec<KeyId>,
    },
    /// The key is none of the policy's.
    #[error("the plugin is signed by {key}, but this sidecar runs only plugins signed by {}", list(keys))]
    UnknownKey {
        /// Who signed.
        key: KeyId,
        /// The keys that may sign.
        keys: Vec<KeyId>,
    },
    /// The digest is none of the policy's.
    #[error("the plugin's SHA-256 is {digest}, which is not on this sidecar's list")]
    UnlistedDigest {
        /// What the plugin has.
        digest: String,
    },
    /// Text is no signature, key or digest.
    #[error("this is no {what}: {problem}")]
    Malformed {
        /// What it should be.
        what: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// Others can read a private key.
    #[error("the private key {} can be read by others (mode {mode:o}); run `chmod 600` on it", path.display())]
    Exposed {
        /// The key's file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The system's generator of random numbers fails.
    #[error("no key can be made: the system's random numbers are not available")]
    Random,
}

impl TrustError {
    fn malformed(what: &'static str, problem: impl Into<String>) -> Self {
        Self::Malformed { what, problem: problem.into() }
    }
}

fn list(keys: &[KeyId]) -> String {
    let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
    if keys.is_empty() { "nobody (its list of keys is empty)".to_owned() } else { keys.join(", ") }
}

/// Bytes in small hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

/// So many bytes from hexadecimal digits.
fn unhex<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    if text.len() != 2 * BYTES || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit(0)? << 4 | digit(1)?;
    }
    Some(bytes)
}
