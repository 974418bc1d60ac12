//! Fuzzes decoders with malformed input: see docs/adr/0020-fuzzing.md.
//!
//! A target is a test: it passes valid encodings to [`fuzz`], and a function that decodes an input, checks the result
//! and returns an outcome. The work on an input is a function of the seed and of the inputs before it, so a run can be
//! repeated. `RONDE_FUZZ_SECONDS` sets its length, `RONDE_FUZZ_SEED` its seed.

#![forbid(unsafe_code)]

mod mutate;
mod outcome;
mod search;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use outcome::Outcome;
use search::{Finding, Search};

/// Decodes an input, and panics when something is wrong.
pub type Decode = Box<dyn Fn(&[u8]) -> Outcome>;

/// A target: what [`Target::run`] and other fuzzers do with an input.
pub struct Target {
    /// Its name, which is that of its folder of the corpus.
    pub name: &'static str,
    /// Valid encodings.
    pub seeds: Vec<Vec<u8>>,
    /// Its decoder.
    pub decode: Decode,
}

impl Target {
    /// A target.
    #[must_use]
    pub fn new(name: &'static str, seeds: Vec<Vec<u8>>, decode: impl Fn(&[u8]) -> Outcome + 'static) -> Self {
        Self { name, seeds, decode: Box::new(decode) }
    }

    /// Fuzzes it.
    ///
    /// # Panics
    /// As [`fuzz`] does.
    pub fn run(self) {
        fuzz(self.name, self.seeds, self.decode);
    }

    /// Inputs at which it failed once.
    #[must_use]
    pub fn failures(&self) -> Vec<Vec<u8>> {
        kept(&corpus(self.name)).into_iter().map(|(_, input)| input).collect()
    }
}

/// Decodes the seeds, then inputs found earlier (`tests/corpus/<name>/`), then mutated inputs until the time is over.
///
/// `decode` panics when something is wrong: that is a finding.
///
/// # Panics
/// With the shortest input for which `decode` panics, after writing it to the corpus; and when a seed is refused.
pub fn fuzz(name: &'static str, seeds: Vec<Vec<u8>>, decode: impl Fn(&[u8]) -> Outcome) {
    let time = Duration::from_secs(setting("RONDE_FUZZ_SECONDS", SECONDS));
    let folder = corpus(name);
    let watch = watch::Watch::begin(name, folder.clone());
    let watched = |input: &[u8]| watch.over(input, || decode(input));
    let mut search = Search::new(name, setting("RONDE_FUZZ_SEED", SEED), watched);
    let found = search.take_seeds(seeds).and_then(|()| search.replay(kept(&folder))).and_then(|()| search.run(time));
    if let Err(finding) = found {
        let file = keep(&folder, &finding.input);
        panic!("{}", describe(name, &finding, &file));
    }
}

/// Describes a finding.
fn describe(name: &str, finding: &Finding, file: &str) -> String {
    let Finding { input, message, at } = finding;
    let shown: String = input.iter().take(SHOWN_BYTES).map(|byte| format!("{byte:02x}")).collect();
    let more = if input.len() > SHOWN_BYTES { "..." } else { "" };
    format!(
        "target {name}, {at}: {message}\nthe shortest input has {} bytes: {shown}{more}\nit is in {file}: correct the decoder, and commit the file with it",
        input.len()
    )
}

/// Writes an input to the corpus; returns the file's name, or why it could not be written.
fn keep(folder: &Path, input: &[u8]) -> String {
    // FNV-1a: a name for the content.
    let digest = input
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let file = folder.join(format!("{digest:016x}"));
    match fs::create_dir_all(folder).and_then(|()| fs::write(&file, input)) {
        Ok(()) => file.display().to_string(),
        Err(error) => format!("no file, because {} cannot be written: {error}", file.display()),
    }
}

/// The inputs of a folder with their names, ordered by name. None without a folder.
fn kept(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry can be read").path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let input = fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        (path.display().to_string(), input)
    };
    files.into_iter().map(read).collect()
}

fn corpus(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is in tests");
    tests.join("corpus").join(name)
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// The time of one target within `make test`.
const SECONDS: u64 = 5;
const SEED: u64 = 7;
/// Bytes of an input that a failure shows; the file has all.
const SHOWN_BYTES: usize = 512;
