//! Skips tests for which the machine lacks something. RONDE_REQUIRE lists what the machine has: then the lack is a
//! failure. RONDE_LEFT_OUT names a file that gets a line for each skipped test.

use std::fs::OpenOptions;
use std::io::Write;

/// Reports that a test is skipped, and what is missing.
///
/// # Panics
/// When RONDE_REQUIRE, a list with commas, names what is missing: the test then fails.
pub fn note(what: &str, test: &str, why: &str) {
    let required = std::env::var("RONDE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|item| item == what), "RONDE_REQUIRE names {what}, but {test} cannot run: {why}");
    let line = format!("LEFT OUT: {test}, because {why}");
    eprintln!("{line}");
    let Some(path) = std::env::var_os("RONDE_LEFT_OUT") else { return };
    let written =
        OpenOptions::new().create(true).append(true).open(&path).and_then(|mut file| writeln!(file, "{line}"));
    if let Err(error) = written {
        panic!("cannot write to RONDE_LEFT_OUT, {}: {error}", path.display());
    }
}

/// Whether a test is skipped because this user is not root; it is reported then.
///
/// # Panics
/// When RONDE_REQUIRE names `root`.
#[must_use]
pub fn without_root(test: &str, why: &str) -> bool {
    let is_skipped = !nix::unistd::geteuid().is_root();
    if is_skipped {
        note("root", test, why);
    }
    is_skipped
}
