//! How a command ends: exit statuses, what it prints, and why it fails.

use std::io::Write;
use std::process::ExitCode;

use crate::codes::Code;

/// The exit status of a command line or input file that cannot be used (`EX_USAGE`).
pub const EXIT_USAGE: u8 = 64;
/// The exit status when a service, a host or a sidecar is not available (`EX_UNAVAILABLE`).
pub const EXIT_UNAVAILABLE: u8 = 69;

/// Writes why a command fails to standard error, with the error's code, and gives its exit status.
pub fn fail(code: Code, text: &str, exit: u8) -> ExitCode {
    // Fails only if the terminal is closed; the exit status reports the result as well.
    let _ = writeln!(std::io::stderr(), "ronde: {}", code.mark(text));
    ExitCode::from(exit)
}

/// Writes an answer to standard output. A reader that has gone is no error.
pub fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
