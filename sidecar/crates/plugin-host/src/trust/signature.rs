//! Signatures of plugins.

use aws_lc_rs::signature::{ED25519, UnparsedPublicKey};

use super::key::KEY_BYTES;
use super::{PublicKey, SigningKey, TrustError, digest, hex, unhex};

/// Bytes of a signature.
const SIGNATURE_BYTES: usize = 64;
/// The prefix of the signed message, so that other uses of a key never sign a plugin.
const LABEL: &[u8] = b"ronde plugin signature 1\0";
/// The first line of a signature's file.
const HEADER: &str = "ronde plugin signature 1";

/// The key that signed a plugin, and its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    key: PublicKey,
    bytes: [u8; SIGNATURE_BYTES],
}

impl Signature {
    /// Signs a plugin.
    #[must_use]
    pub fn of(plugin: &[u8], key: &SigningKey) -> Self {
        let signature = key.sign(&message(plugin));
        let bytes = signature.as_ref().try_into().expect("an Ed25519 signature has 64 bytes");
        Self { key: key.public_key(), bytes }
    }

    /// The key in the signature.
    #[must_use]
    pub const fn key(&self) -> &PublicKey {
        &self.key
    }

    /// Verifies the signature of a plugin with the key that it contains.
    ///
    /// # Errors
    /// [`TrustError::WrongSignature`] if it is invalid.
    pub fn verify(&self, plugin: &[u8]) -> Result<(), TrustError> {
        let key = UnparsedPublicKey::new(&ED25519, self.key.bytes());
        let verified = key.verify(&message(plugin), &self.bytes);
        verified.map_err(|_| TrustError::WrongSignature { key: self.key.id() })
    }

    /// Parses the text that [`Self::to_text`] writes.
    ///
    /// # Errors
    /// [`TrustError::Malformed`] with the problem.
    pub fn from_text(text: &str) -> Result<Self, TrustError> {
        let malformed = |problem: &str| TrustError::malformed("signature of a plugin", problem);
        let mut lines = text.lines().map(str::trim_end);
        if lines.next() != Some(HEADER) {
            return Err(malformed("its first line is not \"ronde plugin signature 1\""));
        }
        let key = lines.next().and_then(|line| unhex::<KEY_BYTES>(line.strip_prefix("key: ")?));
        let key = key.ok_or_else(|| malformed("its second line is not \"key: \" and 64 hexadecimal digits"))?;
        let bytes = lines.next().and_then(|line| unhex(line.strip_prefix("signature: ")?));
        let bytes =
            bytes.ok_or_else(|| malformed("its third line is not \"signature: \" and 128 hexadecimal digits"))?;
        if lines.any(|line| !line.is_empty()) {
            return Err(malformed("it has more than three lines"));
        }
        Ok(Self { key: PublicKey::from_bytes(key), bytes })
    }

    /// The signature as three lines of text.
    #[must_use]
    pub fn to_text(&self) -> String {
        format!("{HEADER}\nkey: {}\nsignature: {}\n", hex(self.key.bytes()), hex(&self.bytes))
    }
}

fn message(plugin: &[u8]) -> Vec<u8> {
    [LABEL, &digest(plugin)].concat()
}
