//! Ed25519 keys in PEM.

use std::fmt;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::{TrustError, hex};

/// Bytes of a public key.
pub(super) const KEY_BYTES: usize = 32;

/// A key's short name: the first 8 bytes of the SHA-256 of the public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ed25519:{}", hex(&self.0))
    }
}

/// A public key, which verifies signatures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; KEY_BYTES]);

impl PublicKey {
    pub(super) const fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// The key's bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Reads a public key in PEM, as [`Self::to_pem`] and `openssl pkey -pubout` write it.
    ///
    /// # Errors
    /// [`TrustError::Malformed`] if the text is something else.
    pub fn from_pem(text: &str) -> Result<Self, TrustError> {
        let der = decode(text, PUBLIC_TAG, "public key")?;
        let key = der.strip_prefix(&PUBLIC_PREFIX[..]).and_then(|key| key.try_into().ok());
        key.map(Self).ok_or_else(|| TrustError::malformed("public key", "it is of another kind than Ed25519"))
    }

    /// The key in PEM.
    #[must_use]
    pub fn to_pem(&self) -> String {
        let der = [&PUBLIC_PREFIX[..], &self.0].concat();
        encode(PUBLIC_TAG, der)
    }

    /// The key's short name.
    #[must_use]
    pub fn id(&self) -> KeyId {
        let digest: [u8; 32] = Sha256::digest(self.0).into();
        let mut id = [0; 8];
        id.copy_from_slice(&digest[..8]);
        KeyId(id)
    }
}

/// A private key, which signs. It is never printed, and its PEM is overwritten when dropped.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    pem: Zeroizing<String>,
}

impl SigningKey {
    /// Generates a key with the system's random generator.
    ///
    /// # Errors
    /// [`TrustError::Random`] if the generator fails.
    pub fn generate() -> Result<Self, TrustError> {
        let pair = Ed25519KeyPair::generate().map_err(|_| TrustError::Random)?;
        let document = pair.to_pkcs8v1().map_err(|_| TrustError::Random)?;
        Self::from_pem(&Zeroizing::new(encode(PRIVATE_TAG, document.as_ref().to_vec())))
    }

    /// Reads a private key in PEM (PKCS #8), as [`Self::to_pem`] and `openssl genpkey -algorithm ed25519` write it.
    ///
    /// # Errors
    /// [`TrustError::Malformed`], which does not quote the text.
    pub fn from_pem(text: &str) -> Result<Self, TrustError> {
        let der = Zeroizing::new(decode(text, PRIVATE_TAG, "private key")?);
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der);
        let pair = pair.map_err(|_| TrustError::malformed("private key", "it is no Ed25519 key in PKCS #8"))?;
        Ok(Self { pair, pem: Zeroizing::new(text.to_owned()) })
    }

    /// The key in PEM, for a file that only its owner can read.
    #[must_use]
    pub fn to_pem(&self) -> &Zeroizing<String> {
        &self.pem
    }

    /// The public key of this key.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        PublicKey(self.pair.public_key().as_ref().try_into().expect("an Ed25519 key has 32 bytes"))
    }

    pub(super) fn sign(&self, message: &[u8]) -> aws_lc_rs::signature::Signature {
        self.pair.sign(message)
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public_key().id())
    }
}

fn encode(tag: &str, der: Vec<u8>) -> String {
    pem::encode_config(&pem::Pem::new(tag, der), pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF))
}

fn decode(text: &str, tag: &str, what: &'static str) -> Result<Vec<u8>, TrustError> {
    if text.len() > PEM_BYTES_MAX {
        return Err(TrustError::malformed(what, format!("it has {} bytes", text.len())));
    }
    let parsed = pem::parse(text).map_err(|_| TrustError::malformed(what, "it is no PEM"))?;
    if parsed.tag() != tag {
        return Err(TrustError::malformed(what, format!("it is a PEM of something else; one of {tag} is needed")));
    }
    Ok(parsed.into_contents())
}

const PRIVATE_TAG: &str = "PRIVATE KEY";
const PUBLIC_TAG: &str = "PUBLIC KEY";
/// Limit for the size of a PEM; those of Ed25519 keys are much smaller.
const PEM_BYTES_MAX: usize = 4 << 10;
/// The DER prefix of an Ed25519 key in a `SubjectPublicKeyInfo` (RFC 8410).
const PUBLIC_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
