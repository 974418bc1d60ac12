//! How a command ends: exit statuses, what it prints, and why it fails.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::Context;

use crate::codes::{Code, coded};

/// The exit status when the answer is no: a check, a test or a file failed, and everything else worked.
pub const EXIT_FAILURE: u8 = 1;
/// The exit status of a command line or input file that cannot be used (`EX_USAGE`).
pub const EXIT_USAGE: u8 = 64;
/// The exit status when a service, a host or a sidecar is not available (`EX_UNAVAILABLE`).
pub const EXIT_UNAVAILABLE: u8 = 69;
/// The exit status when an invariant of ronde broke (`EX_SOFTWARE`).
pub const EXIT_BUG: u8 = 70;
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
        commands: "`check`, `certs`, `plugin`, `run`, `sidecar`, `debug`, `bench`",
    },
    ExitEntry {
        status: "64",
        meaning: "the command line, a variable, a configuration file or a file that one of them names cannot be used; no worker was started",
        commands: "all",
    },
    ExitEntry {
        status: "69",
        meaning: "a host, a sidecar or a running job cannot be reached or used, not everything started in time, or a sidecar, a search or a benchmark could not go on",
        commands: "`run`, `sidecar`, `status`, `top`, `debug`, `job`, `tune`, `bench`",
    },
    ExitEntry { status: "70", meaning: "an invariant of ronde broke: please report it", commands: "all" },
    ExitEntry {
        status: "71",
        meaning: "the system denies something that the launcher needs, such as a thread",
        commands: "`run`",
    },
    ExitEntry {
        status: "73",
        meaning: "a file cannot be made: of --report, --output-filename, --autotune-log-file, --plot or --output, or a flight record or its timeline",
        commands: "`run`, `sidecar`, `debug`, `tune`, `bench`",
    },
    ExitEntry {
        status: "74",
        meaning: "the output of the workers, or the answer of a command, cannot be written",
        commands: "all",
    },
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

/// Writes why a command fails, with the code, to standard error. Returns the exit status of the code.
pub fn fail(code: Code, text: &str) -> ExitCode {
    notice(&code.append_to(text));
    ExitCode::from(code.exit_status())
}

/// Writes an error with its causes and its code, or else `otherwise`, to standard error. Returns the exit status of the
/// code.
pub fn fail_with(error: &anyhow::Error, otherwise: Code) -> ExitCode {
    notice(&coded(error, otherwise));
    ExitCode::from(Code::of_error(error, otherwise).exit_status())
}

/// Writes a message of `ronde` to standard error.
pub fn notice(text: &str) {
    write_error(&format!("ronde: {text}"));
}

/// Writes a line to standard error. A reader that has gone is no error: nobody would see the message.
pub fn write_error(line: &str) {
    write_line(&mut std::io::stderr(), line);
}

fn write_line(out: &mut impl Write, line: &str) {
    // In one piece, so that lines of several processes do not mix.
    let _ = out.write_all(format!("{line}\n").as_bytes());
}

/// Writes an answer to standard output. Returns the exit status of a command that ends with it.
pub fn answer(text: &str) -> ExitCode {
    status_of(print(text))
}

/// Returns the exit status of a command that ends with an answer that somebody else has written.
pub fn answered(written: std::io::Result<()>) -> ExitCode {
    status_of(unless_reader_left(written.and_then(|()| std::io::stdout().flush())))
}

/// Writes to standard output.
///
/// # Errors
/// When it cannot be written. A reader that has gone is no error.
pub fn print(text: &str) -> anyhow::Result<()> {
    print_to(&mut std::io::stdout().lock(), text)
}

fn print_to(out: &mut impl Write, text: &str) -> anyhow::Result<()> {
    unless_reader_left(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Returns the error of an answer that was not written, with its code. A reader that has gone is no error.
///
/// # Errors
/// When it was not written for another reason, such as a full disk.
pub fn unless_reader_left(written: std::io::Result<()>) -> anyhow::Result<()> {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write the answer to standard output").context(Code::OutputLost)
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn status_of(written: anyhow::Result<()>) -> ExitCode {
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail_with(&error, Code::OutputLost),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::codes::TABLE;

    #[test]
    fn every_code_has_an_exit_status_of_the_table() {
        let rows: BTreeSet<u8> = EXITS.iter().filter_map(|entry| entry.status.parse().ok()).collect();
        let used: BTreeSet<u8> = TABLE.iter().map(|entry| entry.exit).collect();
        assert!(used.is_subset(&rows), "{used:?} are not all among {rows:?}");
        // A shell's own status for a command that does not exist belongs to no code.
        let others: Vec<u8> = rows.difference(&used).copied().collect();
        assert_eq!(others, [0, EXIT_NOT_FOUND]);
    }

    #[test]
    fn a_reader_that_has_gone_is_no_error() {
        let (reader, mut out) = std::io::pipe().expect("a pipe");
        drop(reader);
        write_line(&mut out, "nobody reads this");
        print_to(&mut out, "nor this").expect("no error");
    }

    #[test]
    fn an_answer_that_a_full_disk_does_not_take_is_an_error() {
        let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
        let error = print_to(&mut full, "an answer\n").expect_err("nothing fits");
        assert_eq!(Code::of_error(&error, Code::Bug), Code::OutputLost);
        let text = coded(&error, Code::Bug);
        assert!(text.starts_with("cannot write the answer to standard output: No space left on device"), "{text}");
        assert!(text.ends_with("[RONDE-E209]"), "{text}");
    }
}
