//! How fast each AES library encrypts and decrypts records on this processor.
//!
//! Measured once per process, at the first connection or when a benchmark asks. A figure decides, not a list of
//! processor features: hypervisors hide features, and libraries learn to use others.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustls::Error;

use super::aead::{Key, NONCE_BYTES, TAG_BYTES};

/// A library that implements AES-128-GCM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Library {
    AwsLc,
    #[cfg(target_arch = "x86_64")]
    Ring,
}

/// The rate of a library at which one core processes records of [`CIPHER_RECORD_BYTES`] whose memory is in its cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CipherRate {
    /// `aws-lc` or `ring`.
    pub library: &'static str,
    /// Bytes encrypted per second.
    pub encrypts: f64,
    /// Bytes decrypted per second.
    pub decrypts: f64,
    /// Whether this process uses this library for the records of tensors.
    pub is_used: bool,
}

/// Returns the rates of all libraries for AES-128-GCM. The first call of a process measures them, which takes about a
/// millisecond, and some tens of milliseconds on a processor without AES instructions.
///
/// # Errors
/// When a library cannot encrypt or decrypt a record. Connections then use another one.
pub fn cipher_rates() -> Result<Vec<CipherRate>, CipherError> {
    let Measured { rates: measured, failed } = measured();
    if let Some(&(library, ref error)) = failed.first() {
        return Err(CipherError { library: library.name(), error: error.clone() });
    }
    let used = choose(measured);
    let rate = |&(library, times): &(Library, Times)| CipherRate {
        library: library.name(),
        encrypts: CIPHER_RECORD_BYTES as f64 / times.seal.as_secs_f64(),
        decrypts: CIPHER_RECORD_BYTES as f64 / times.open.as_secs_f64(),
        is_used: library == used,
    };
    Ok(measured.iter().map(rate).collect())
}

/// A library cannot process a record.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the library {library} cannot encrypt and decrypt a record by AES-128-GCM")]
pub struct CipherError {
    /// `aws-lc` or `ring`.
    pub library: &'static str,
    /// Its error.
    #[source]
    error: Error,
}

/// The library to use for records.
pub(super) fn fastest() -> Library {
    choose(&measured().rates)
}

/// What was measured.
#[derive(Debug, Default)]
struct Measured {
    rates: Vec<(Library, Times)>,
    /// Libraries that cannot process a record; none of them is chosen while there is another one.
    failed: Vec<(Library, Error)>,
}

/// Least times of one record.
#[derive(Debug, Clone, Copy)]
struct Times {
    seal: Duration,
    open: Duration,
}

impl Library {
    fn name(self) -> &'static str {
        match self {
            Self::AwsLc => "aws-lc",
            #[cfg(target_arch = "x86_64")]
            Self::Ring => "ring",
        }
    }
}

const LIBRARIES: &[Library] = &[
    Library::AwsLc,
    #[cfg(target_arch = "x86_64")]
    Library::Ring,
];

/// aws-lc-rs, which does all other cryptography, unless another library takes less than [`WORTH_ANOTHER`] of its time, or
/// only another one works.
fn choose(measured: &[(Library, Times)]) -> Library {
    let seconds = |times: &Times| (times.seal + times.open).as_secs_f64();
    let least = measured.iter().min_by(|(_, one), (_, other)| seconds(one).total_cmp(&seconds(other)));
    let usual = measured.iter().find(|(library, _)| *library == Library::AwsLc);
    match (least, usual) {
        (Some((library, times)), Some((_, usual))) if seconds(times) < seconds(usual) * WORTH_ANOTHER => *library,
        (Some((library, _)), None) => *library,
        _ => Library::AwsLc,
    }
}

fn measured() -> &'static Measured {
    static MEASURED: OnceLock<Measured> = OnceLock::new();
    MEASURED.get_or_init(|| {
        let mut memory = Memory::new();
        let measured = measure(|library| Key::of(library, &[0; KEY_BYTES]), |key, turn| memory.one_turn(key, turn));
        for (library, error) in &measured.failed {
            let library = library.name();
            tracing::warn!(library, %error, "a library cannot encrypt and decrypt records by AES-128-GCM; it is not used");
        }
        measured
    })
}

/// Libraries take turns, so that other work on the machine affects all; the least time of each counts.
fn measure<K>(
    key_of: impl Fn(Library) -> Result<K, Error>,
    mut one_turn: impl FnMut(&K, u8) -> Result<Times, Error>,
) -> Measured {
    let longest = Times { seal: Duration::MAX, open: Duration::MAX };
    let mut found: Vec<_> =
        LIBRARIES.iter().map(|&library| (library, key_of(library).map(|key| (key, longest)))).collect();
    for turn in 0..TURNS {
        for (_, state) in &mut found {
            let Ok((key, least)) = state else { continue };
            match one_turn(key, turn) {
                // Neither is zero: rates divide by them.
                Ok(times) => {
                    least.seal = least.seal.min(times.seal).max(Duration::from_nanos(1));
                    least.open = least.open.min(times.open).max(Duration::from_nanos(1));
                }
                Err(error) => *state = Err(error),
            }
        }
    }
    let mut measured = Measured::default();
    for (library, state) in found {
        match state {
            Ok((_, times)) => measured.rates.push((library, times)),
            Err(error) => measured.failed.push((library, error)),
        }
    }
    measured
}

/// A record before and after encryption.
struct Memory {
    plain: Vec<u8>,
    sealed: Vec<u8>,
    opened: Vec<u8>,
}

impl Memory {
    fn new() -> Self {
        let [plain, sealed, opened] = [0, 1 + TAG_BYTES, 1].map(|more| vec![0; CIPHER_RECORD_BYTES + more]);
        Self { plain, sealed, opened }
    }

    /// The time of one record, from [`RECORDS`]. The key encrypts nothing but zeros, so its nonces may repeat.
    fn one_turn(&mut self, key: &Key, turn: u8) -> Result<Times, Error> {
        let (nonce, header) = ([turn; NONCE_BYTES], [0; 5]);
        let start = Instant::now();
        for _ in 0..RECORDS {
            key.seal(nonce, &header, (&self.plain, 0), &mut self.sealed)?;
        }
        let seal = start.elapsed() / RECORDS;
        let (content, tag) = self.sealed.split_last_chunk().ok_or(Error::DecryptError)?;
        let start = Instant::now();
        for _ in 0..RECORDS {
            key.open(nonce, &header, (content, *tag), &mut self.opened)?;
        }
        Ok(Times { seal, open: start.elapsed() / RECORDS })
    }
}

/// Bytes of a record that is measured, as long as TLS allows.
pub const CIPHER_RECORD_BYTES: usize = 16 << 10;
const KEY_BYTES: usize = 16;
/// Turns of each library.
const TURNS: u8 = 8;
/// Records that a library encrypts in its turn, and then decrypts.
const RECORDS: u32 = 4;
/// The share of aws-lc-rs' time that another library must stay below: one implementation of cryptography is better than
/// two that are alike.
const WORTH_ANOTHER: f64 = 0.9;

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn another_library_is_used_where_it_is_clearly_faster() {
        let times = |micros: u64| Times { seal: Duration::from_micros(micros), open: Duration::from_micros(micros) };
        let choice = |aws_lc, ring| choose(&[(Library::AwsLc, times(aws_lc)), (Library::Ring, times(ring))]);
        assert_eq!(choice(100, 120), Library::AwsLc);
        assert_eq!(choice(100, 100), Library::AwsLc);
        assert_eq!(choice(100, 95), Library::AwsLc);
        assert_eq!(choice(100, 80), Library::Ring);
        assert_eq!(choose(&[]), Library::AwsLc);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_library_that_fails_is_not_used_and_the_other_one_has_its_times() {
        let times = Times { seal: Duration::from_micros(3), open: Duration::ZERO };
        let turn = |library: &Library, turn| match (library, turn) {
            (Library::AwsLc, 2) => Err(Error::EncryptError),
            _ => Ok(times),
        };
        let Measured { rates, failed } = measure(Ok, turn);
        assert_eq!(failed, [(Library::AwsLc, Error::EncryptError)]);
        assert_eq!(rates.iter().map(|(library, _)| *library).collect::<Vec<_>>(), [Library::Ring]);
        assert_eq!(rates[0].1.seal, Duration::from_micros(3));
        assert_eq!(choose(&rates), Library::Ring);
        let no_key = |library: Library| if library == Library::Ring { Err(Error::EncryptError) } else { Ok(library) };
        let Measured { rates, failed } = measure(no_key, turn);
        assert!(rates.is_empty());
        assert_eq!(failed.len(), 2);
        assert_eq!(choose(&rates), Library::AwsLc, "connections then report its error");
    }

    #[test]
    fn one_library_of_all_is_used_and_each_has_rates() {
        let rates = cipher_rates().expect("each library works");
        assert_eq!(rates.len(), LIBRARIES.len());
        assert_eq!(rates.iter().filter(|rate| rate.is_used).count(), 1, "{rates:?}");
        // Slower than any processor without AES instructions, and faster than any with.
        let range = 1e5..1e12;
        assert!(rates.iter().all(|rate| range.contains(&rate.encrypts) && range.contains(&rate.decrypts)), "{rates:?}");
    }
}
