//! Tests that are left out because the machine lacks something. Whoever runs them says with RONDE_REQUIRE what it has: then
//! the lack is a failure. RONDE_LEFT_OUT names a file that gets a line for each, to be counted.

use std::fs::OpenOptions;
use std::io::Write;

/// Says that a test is left out for want of something, and why.
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
