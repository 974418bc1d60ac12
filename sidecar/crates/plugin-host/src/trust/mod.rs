//! Authenticity of plugins: keys, signatures, and the policy that decides which plugins are loaded.
//!
//! A signature is Ed25519 over `label || SHA-256(file)`, in its own file next to the plugin. It contains the public
//! key, so a damaged plugin or signature is detected even if the policy accepts any key.

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

/// Why a plugin is not trusted, or why a key or signature is unusable.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The signature is not valid for this file and the key that it contains.
    #[error(
        "the plugin's signature is wrong: it is not what {key} signs for this file; the plugin or the signature was changed"
    )]
    WrongSignature {
        /// The key in the signature.
        key: KeyId,
    },
    /// The policy requires a signature.
    #[error("the plugin is not signed, but this sidecar runs only plugins signed by {}", list(keys))]
    Unsigned {
        /// The accepted keys.
        keys: Vec<KeyId>,
    },
    /// The policy does not accept the key.
    #[error("the plugin is signed by {key}, but this sidecar runs only plugins signed by {}", list(keys))]
    UnknownKey {
        /// The key that signed the plugin.
        key: KeyId,
        /// The accepted keys.
        keys: Vec<KeyId>,
    },
    /// The policy does not accept the digest.
    #[error("the plugin's SHA-256 is {digest}, which is not on this sidecar's list")]
    UnlistedDigest {
        /// The plugin's digest.
        digest: String,
    },
    /// The text is not a signature, key or digest.
    #[error("this is not a {what}: {problem}")]
    Malformed {
        /// What was expected.
        what: &'static str,
        /// The problem.
        problem: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
    /// Other users can read a private key.
    #[error("the private key {} can be read by others (mode {mode:o}); run `chmod 600` on it", path.display())]
    Exposed {
        /// The key's file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The system's random generator failed.
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

/// Formats bytes in lower-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

/// Parses exactly `BYTES` bytes of hexadecimal.
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
