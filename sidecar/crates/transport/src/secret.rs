//! A job's secret: 32 random bytes from which every host derives the same certificate authority.
//!
//! ```text
//! seed of the authority's key (Ed25519) = HKDF-SHA256(salt: label, key: the secret, info: trust domain, 0, job)
//! ```
//!
//! One secret therefore serves many jobs, and the authority of one job reveals nothing about that of another.

use std::fmt;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use aws_lc_rs::rand;
use ronde_wire::JobName;
use zeroize::Zeroizing;

use crate::identity::TrustDomain;

/// A job's secret. It is never printed, and overwritten when dropped.
pub struct JobSecret(Zeroizing<[u8; SECRET_BYTES]>);

impl JobSecret {
    /// Generates a secret with the system's random generator.
    ///
    /// # Errors
    /// [`SecretError::Random`] if the generator fails, which no working system does.
    pub fn generate() -> Result<Self, SecretError> {
        let mut bytes = Zeroizing::new([0; SECRET_BYTES]);
        rand::fill(&mut *bytes).map_err(|_| SecretError::Random)?;
        Ok(Self(bytes))
    }

    /// Parses the text that [`Self::to_text`] writes: a header line and 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`SecretError`] with the problem; it does not quote the text.
    pub fn from_text(text: &str) -> Result<Self, SecretError> {
        let (header, rest) = text.split_once('\n').unwrap_or((text, ""));
        if header.trim_end() != HEADER {
            return Err(SecretError::Header);
        }
        let digits = rest.trim();
        if digits.len() != 2 * SECRET_BYTES {
            return Err(SecretError::Length { found: digits.len() });
        }
        let mut bytes = Zeroizing::new([0; SECRET_BYTES]);
        for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
            *byte = pair
                .iter()
                .try_fold(0, |value, digit| Some(value << 4 | nibble(*digit)?))
                .ok_or(SecretError::Digits)?;
        }
        Ok(Self(bytes))
    }

    /// The secret as text, for a file that only its owner can read.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(HEADER.len() + 2 * SECRET_BYTES + 2));
        text.push_str(HEADER);
        text.push('\n');
        let digit = |value: u8| char::from_digit(u32::from(value), 16).expect("four bits are one digit");
        for byte in self.0.iter() {
            text.push(digit(byte >> 4));
            text.push(digit(byte & 15));
        }
        text.push('\n');
        text
    }

    /// The private key (PKCS #8) of the authority of a job.
    pub(crate) fn authority_key(&self, job: &JobName, trust_domain: &TrustDomain) -> Zeroizing<Vec<u8>> {
        let info = [trust_domain.as_str().as_bytes(), &[0], job.as_str().as_bytes()];
        let mut seed = Zeroizing::new([0; SEED_BYTES]);
        let derived = Salt::new(HKDF_SHA256, LABEL).extract(&*self.0);
        let filled = derived.expand(&info, SeedLength).and_then(|output| output.fill(&mut *seed));
        filled.expect("HKDF-SHA256 gives up to 8,160 bytes");
        let mut key = Zeroizing::new(Vec::with_capacity(PKCS8_OF_ED25519.len() + SEED_BYTES));
        key.extend_from_slice(&PKCS8_OF_ED25519);
        key.extend_from_slice(&*seed);
        key
    }
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret")
    }
}

/// Why a text is not a job's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The first line is not the header.
    #[error("its first line is not {HEADER:?}; make such a file with `ronde certs secret FILE`")]
    Header,
    /// The secret does not have 64 digits.
    #[error("the secret has {found} digits, not {}; was the file cut off?", 2 * SECRET_BYTES)]
    Length {
        /// Number of characters found.
        found: usize,
    },
    /// The secret contains characters other than hexadecimal digits.
    #[error("the secret has characters that are no hexadecimal digits")]
    Digits,
    /// The random generator failed.
    #[error("the system's random generator failed")]
    Random,
}

struct SeedLength;

impl KeyType for SeedLength {
    fn len(&self) -> usize {
        SEED_BYTES
    }
}

fn nibble(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// The first line of a secret's file.
const HEADER: &str = "ronde job secret 1";
const LABEL: &[u8] = b"ronde: the authority of a job from its secret, 1";
const SECRET_BYTES: usize = 32;
const SEED_BYTES: usize = 32;
/// The DER prefix of an Ed25519 seed in PKCS #8 (RFC 8410 section 7).
const PKCS8_OF_ED25519: [u8; 16] = [0x30, 0x2E, 2, 1, 0, 0x30, 5, 6, 3, 0x2B, 0x65, 0x70, 4, 0x22, 4, 0x20];

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::new(name).expect("a good name")
    }

    fn job(name: &str) -> JobName {
        JobName::new(name).expect("a good name")
    }

    #[test]
    fn a_secret_survives_its_text_and_nothing_else_is_taken() {
        let secret = JobSecret::generate().expect("a generator");
        let text = secret.to_text();
        let read = JobSecret::from_text(&text).expect("its own text");
        assert_eq!(*read.0, *secret.0);
        assert_ne!(*JobSecret::generate().expect("a generator").0, *secret.0);
        let digits = text.lines().nth(1).expect("two lines").to_owned();
        let refused = |text: &str| JobSecret::from_text(text).map(drop).expect_err("no secret");
        assert_eq!(refused(""), SecretError::Header);
        assert_eq!(refused(&digits), SecretError::Header);
        assert_eq!(refused(&format!("ronde job secret 2\n{digits}\n")), SecretError::Header);
        assert_eq!(refused(HEADER), SecretError::Length { found: 0 });
        assert_eq!(refused(&format!("{HEADER}\n{}\n", &digits[..63])), SecretError::Length { found: 63 });
        assert_eq!(refused(&format!("{HEADER}\n{digits}\n{digits}")), SecretError::Length { found: 129 });
        assert_eq!(refused(&format!("{HEADER}\n{}\n", digits.replace(&digits[..1], "x"))), SecretError::Digits);
        for error in [SecretError::Header, SecretError::Length { found: 1 }, SecretError::Digits] {
            assert!(!error.to_string().contains(&digits));
        }
        assert_eq!(format!("{secret:?}"), "JobSecret");
    }

    /// Releases must stay compatible: each derives the same authority.
    #[test]
    fn the_derivation_is_fixed_and_differs_by_job_and_trust_domain() {
        let secret = JobSecret::from_text(&format!("{HEADER}\n{}\n", "0123456789abcdef".repeat(4))).expect("good");
        let key = |job_name, domain_name| secret.authority_key(&job(job_name), &domain(domain_name));
        let fixed = key("night", "ronde.local");
        assert_eq!(*fixed, *key("night", "ronde.local"));
        let shown: String = fixed[16..].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(shown, "9921982dd36c113dbbd33515f4cc38b8b7cc31024be9d98bc6ef96635334ca8d");
        for other in [key("day", "ronde.local"), key("night", "ronde.test"), key("t.night", "ronde.loca")] {
            assert_ne!(*fixed, *other);
        }
    }
}
