//! How a command ends: exit statuses, what it prints, and why it fails.

use std::io::Write;
use std::process::ExitCode;

use crate::codes::Code;

/// The exit status when the answer is no: a check, a test or a file failed, and everything else worked.
pub const EXIT_FAILURE: u8 = 1;
/// The exit status of a command line or input file that cannot be used (`EX_USAGE`).
pub const EXIT_USAGE: u8 = 64;
/// The exit status when a service, a host or a sidecar is not available (`EX_UNAVAILABLE`).
pub const EXIT_UNAVAILABLE: u8 = 69;
/// The exit status when the system denies something that every command needs (`EX_OSERR`).
pub const EXIT_SYSTEM: u8 = 71;
/// The exit status when a file cannot be made (`EX_CANTCREAT`).
pub const EXIT_CANNOT_CREATE: u8 = 73;
/// The exit status when output cannot be written (`EX_IOERR`).
pub const EXIT_IO: u8 = 74;
/// The exit status of a shell for a command that cannot be executed.
pub const EXIT_CANNOT_EXECUTE: u8 = 126;
/// The exit status of a shell for a command that does not exist.
pub const EXIT_NOT_FOUND: u8 = 127;
/// What a shell adds to the number of the signal that ended a process.
pub const EXIT_SIGNAL: u8 = 128;

/// An exit status, or several of one kind, with the same meaning in all commands.
#[derive(Debug)]
pub struct ExitEntry {
    /// The status, as text.
    pub status: &'static str,
    /// What happened.
    pub meaning: &'static str,
    /// Where: the commands that give it.
    pub commands: &'static str,
}

/// All exit statuses, in the order of their numbers. `docs/ERRORS.md` has this table.
pub const EXITS: &[ExitEntry] = &[
    ExitEntry { status: "0", meaning: "success: the job, the check or the answer is complete", commands: "all" },
    ExitEntry {
        status: "1",
        meaning: "the answer is no: `check` found a host on which jobs cannot run, or a file, certificate, plugin, flight record or library failed its test",
        commands: "`check`, `certs`, `plugin`, `sidecar`, `debug`, `bench`",
    },
    ExitEntry {
        status: "64",
        meaning: "the command line, a variable or a configuration file cannot be used; nothing was started",
        commands: "all",
    },
    ExitEntry {
        status: "69",
        meaning: "a host, a sidecar or a running job cannot be reached or used, or not everything started in time",
        commands: "`run`, `status`, `top`, `debug`, `job`, `tune`, `bench`",
    },
    ExitEntry {
        status: "71",
        meaning: "the system denies something that the launcher needs, such as a thread",
        commands: "`run`",
    },
    ExitEntry {
        status: "73",
        meaning: "the file of --report, --output-filename or --plot, a flight record or its timeline cannot be made",
        commands: "`run`, `debug`, `bench`",
    },
    ExitEntry { status: "74", meaning: "the output of the workers cannot be written", commands: "`run`" },
    ExitEntry { status: "126", meaning: "the worker's command cannot be executed", commands: "`run`, `worker`" },
    ExitEntry { status: "127", meaning: "the worker's command does not exist", commands: "`run`, `worker`" },
    ExitEntry {
        status: "128 + N",
        meaning: "signal N ended the process that failed first, or the user's signal N ended the job: 130 for Ctrl-C, 137 for SIGKILL, 143 for SIGTERM; or signal N ended the view of `top`, where Ctrl-C is a key and gives 0",
        commands: "`run`, `tune`, `top`",
    },
    ExitEntry {
        status: "any other",
        meaning: "the exit status of the process that failed first: of a worker, a sidecar or the command of --starter",
        commands: "`run`",
    },
];

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
