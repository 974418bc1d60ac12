//! AES-128-GCM for records, by whichever of two libraries is faster on this processor: [`rates`](super::rates) measures
//! them.
//!
//! aws-lc-rs, which does everything else, processes four AES blocks at a time with AVX-512 and one otherwise. ring
//! processes two with AVX2, which helps on processors without AVX-512 or whose hypervisor hides it: there it is 1.6
//! times as fast ([ADR 21](../../../../../docs/adr/0021-records-encrypted-without-copies.md)). Both produce the same
//! bytes.

#[cfg(target_arch = "x86_64")]
use ronde_wire::copying::copy;
use rustls::Error;

use super::rates::{Library, fastest};

/// The key of one direction.
pub(super) enum Key {
    AwsLc(aws_lc_rs::aead::LessSafeKey),
    #[cfg(target_arch = "x86_64")]
    Ring(Box<ring::aead::LessSafeKey>),
}

impl Key {
    /// Creates a key in the faster library.
    pub(super) fn new(key: &[u8]) -> Result<Self, Error> {
        Self::of(fastest(), key)
    }

    pub(super) fn of(library: Library, key: &[u8]) -> Result<Self, Error> {
        match library {
            Library::AwsLc => Self::by_aws_lc(key),
            #[cfg(target_arch = "x86_64")]
            Library::Ring => Self::by_ring(key),
        }
    }

    fn by_aws_lc(key: &[u8]) -> Result<Self, Error> {
        use aws_lc_rs::aead::{AES_128_GCM, LessSafeKey, UnboundKey};
        let key = UnboundKey::new(&AES_128_GCM, key).map_err(|_| Error::EncryptError)?;
        Ok(Self::AwsLc(LessSafeKey::new(key)))
    }

    #[cfg(target_arch = "x86_64")]
    fn by_ring(key: &[u8]) -> Result<Self, Error> {
        use ring::aead::{AES_128_GCM, LessSafeKey, UnboundKey};
        let key = UnboundKey::new(&AES_128_GCM, key).map_err(|_| Error::EncryptError)?;
        Ok(Self::Ring(Box::new(LessSafeKey::new(key))))
    }

    /// Encrypts `plain`, followed by the byte `kind`, into `out`, whose length is that of `plain` plus one plus
    /// [`TAG_BYTES`]. The nonce must be unique for this key.
    pub(super) fn seal(
        &self,
        nonce: [u8; NONCE_BYTES],
        header: &[u8],
        (plain, kind): (&[u8], u8),
        out: &mut [u8],
    ) -> Result<(), Error> {
        match self {
            Self::AwsLc(key) => {
                use aws_lc_rs::aead::{Aad, Nonce};
                let (sealed, kind_and_tag) = out.split_at_mut(plain.len());
                let (nonce, header) = (Nonce::assume_unique_for_key(nonce), Aad::from(header));
                key.seal_out_of_place_scatter(nonce, header, plain, sealed, &[kind], kind_and_tag)
                    .map_err(|_| Error::EncryptError)
            }
            #[cfg(target_arch = "x86_64")]
            Self::Ring(key) => {
                use ring::aead::{Aad, Nonce};
                let (sealed, tag) = out.split_at_mut(plain.len() + 1);
                copy(&mut sealed[..plain.len()], plain);
                sealed[plain.len()] = kind;
                let nonce = Nonce::assume_unique_for_key(nonce);
                let made = key.seal_in_place_separate_tag(nonce, Aad::from(header), sealed);
                tag.copy_from_slice(made.map_err(|_| Error::EncryptError)?.as_ref());
                Ok(())
            }
        }
    }

    /// Decrypts into `out`, which has the length of the ciphertext. After an error the contents of `out` are
    /// unspecified.
    pub(super) fn open(
        &self,
        nonce: [u8; NONCE_BYTES],
        header: &[u8],
        (sealed, tag): (&[u8], [u8; TAG_BYTES]),
        out: &mut [u8],
    ) -> Result<(), Error> {
        match self {
            Self::AwsLc(key) => {
                use aws_lc_rs::aead::{Aad, Nonce};
                let (nonce, header) = (Nonce::assume_unique_for_key(nonce), Aad::from(header));
                key.open_separate_gather(nonce, header, sealed, &tag, out).map_err(|_| Error::DecryptError)
            }
            #[cfg(target_arch = "x86_64")]
            Self::Ring(key) => {
                use ring::aead::{Aad, Nonce, Tag};
                copy(out, sealed);
                let (nonce, tag) = (Nonce::assume_unique_for_key(nonce), Tag::from(tag));
                key.open_in_place_separate_tag(nonce, Aad::from(header), tag, out, 0..)
                    .map(drop)
                    .map_err(|_| Error::DecryptError)
            }
        }
    }
}

/// Bytes of a nonce.
pub(super) const NONCE_BYTES: usize = 12;
/// Bytes of a tag.
pub(super) const TAG_BYTES: usize = 16;

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn both_libraries_give_the_same_bytes() {
        let (key, nonce, header) = ([7; 16], [3; NONCE_BYTES], [23, 3, 3, 1, 2]);
        let keys = [Key::by_aws_lc(&key), Key::by_ring(&key)].map(|key| key.expect("a key of 16 bytes"));
        for length in [0, 1, 15, 16, 17, 1_000, 16_384] {
            let plain: Vec<u8> = (0..=250).cycle().take(length).collect();
            let sealed = keys.each_ref().map(|key| {
                let mut sealed = vec![0; length + 1 + TAG_BYTES];
                key.seal(nonce, &header, (&plain, 23), &mut sealed).expect("room");
                sealed
            });
            assert!(sealed[0] == sealed[1], "{length} bytes");
            let (content, tag) = sealed[0].split_last_chunk().expect("it has a tag");
            for key in &keys {
                let mut opened = vec![0; length + 1];
                key.open(nonce, &header, (content, *tag), &mut opened).expect("the same key");
                assert!(opened[..length] == plain && opened[length] == 23, "{length} bytes");
                let mut bad = *tag;
                bad[15] ^= 1;
                let refused = key.open(nonce, &header, (content, bad), &mut opened);
                assert_eq!(refused, Err(Error::DecryptError), "{length} bytes");
            }
        }
    }
}
