//! The policy that decides which plugins are loaded.

use sha2::{Digest as _, Sha256};

use super::{KeyId, PublicKey, Signature, TrustError, hex, unhex};

/// Which plugins are loaded. A signature must be valid if there is one, whatever the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// All plugins, signed or not.
    #[default]
    Unsigned,
    /// Plugins that one of these keys signed.
    Keys(Vec<PublicKey>),
    /// Plugins with one of these SHA-256 digests.
    Digests(Vec<[u8; 32]>),
}

impl Policy {
    /// Checks whether a plugin may be loaded, and returns the key that signed it.
    ///
    /// # Errors
    /// [`TrustError`] with the requirement that is not met.
    pub fn admit(&self, plugin: &[u8], signature: Option<&Signature>) -> Result<Option<KeyId>, TrustError> {
        if let Some(signature) = signature {
            signature.verify(plugin)?;
        }
        let signer = signature.map(|signature| signature.key().id());
        match self {
            Self::Unsigned => {}
            Self::Keys(keys) => {
                let ids = || keys.iter().map(PublicKey::id).collect();
                let Some(signature) = signature else { return Err(TrustError::Unsigned { keys: ids() }) };
                // The whole key is compared; its short name is for people.
                if !keys.contains(signature.key()) {
                    return Err(TrustError::UnknownKey { key: signature.key().id(), keys: ids() });
                }
            }
            Self::Digests(digests) => {
                let digest = digest(plugin);
                if !digests.contains(&digest) {
                    return Err(TrustError::UnlistedDigest { digest: hex(&digest) });
                }
            }
        }
        Ok(signer)
    }
}

/// A plugin's digest: SHA-256 of the whole file.
#[must_use]
pub fn digest(plugin: &[u8]) -> [u8; 32] {
    Sha256::digest(plugin).into()
}

/// Formats a digest in hexadecimal, as `sha256sum` does.
#[must_use]
pub fn digest_text(digest: &[u8; 32]) -> String {
    hex(digest)
}

/// Parses a digest of 64 hexadecimal digits.
///
/// # Errors
/// [`TrustError::Malformed`] if the text is something else.
pub fn digest_from_text(text: &str) -> Result<[u8; 32], TrustError> {
    unhex(text.trim()).ok_or_else(|| TrustError::malformed("SHA-256 digest", "it has not 64 hexadecimal digits"))
}
