//! `ronde exec-worker`: ties its lifetime to the agent, then executes the worker's command.
//!
//! The kernel ends a process with its parent only if the process itself requests it (`PR_SET_PDEATHSIG`). This program does
//! so between the agent's fork and the worker's first instruction, without unsafe code.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use clap::Args;
use nix::sys::signal::Signal;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, notice};

use crate::envelope::Status;

/// Arguments of `ronde exec-worker`.
#[derive(Args, Debug)]
pub struct ExecArgs {
    /// The process id of the agent.
    #[arg(long)]
    parent: i32,
    /// End the command with the agent by SIGTERM instead of SIGKILL.
    #[arg(long)]
    asked: bool,
    /// Program and arguments.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Executes the worker's command in this process; returns only on failure.
pub fn main(args: &ExecArgs) -> ExitCode {
    let end = if args.asked { Signal::SIGTERM } else { Signal::SIGKILL };
    if let Err(error) = nix::sys::prctl::set_pdeathsig(end) {
        let text = format!("cannot tie the worker's lifetime to its agent: {error}");
        return not_run(&text, EXIT_CANNOT_EXECUTE);
    }
    // If the agent ended before prctl, no signal comes.
    if nix::unistd::getppid().as_raw() != args.parent {
        let text = format!(
            "process {} is not this one's parent: it has ended, or it started a wrapper that does not exec ronde",
            args.parent
        );
        return not_run(&text, EXIT_CANNOT_EXECUTE);
    }
    become_worker(&args.command, |command| command)
}

/// Executes the worker's command, after `change` of its environment; returns only on failure.
pub(crate) fn become_worker(
    command: &[impl AsRef<OsStr>],
    change: impl FnOnce(&mut Command) -> &mut Command,
) -> ExitCode {
    let (program, arguments) = command.split_first().expect("clap requires one");
    let program = program.as_ref();
    let error = change(Command::new(program).args(arguments)).exec();
    let (code, advice) = advice(program, error.kind());
    not_run(&format!("{}{error}{advice}", beginning(program)), code)
}

/// The exit status of a shell for a program that cannot be executed, and what to do.
fn advice(program: &OsStr, kind: ErrorKind) -> (u8, &'static str) {
    let text = program.to_string_lossy();
    // Without a slash it is a name, which is looked up in PATH.
    let is_there = text.contains('/') && Path::new(program).exists();
    let variable = || text.split_once('=').is_some_and(|(name, _)| !name.is_empty() && !name.contains('/'));
    match kind {
        ErrorKind::NotFound if is_there => (
            EXIT_CANNOT_EXECUTE,
            "; it is there, but not the interpreter that its first line or its header names, or that line ends with a carriage \
             return",
        ),
        ErrorKind::NotFound if text.is_empty() => {
            (EXIT_NOT_FOUND, "; its name is empty, as that of a shell's variable that is not set")
        }
        // A folder of a path may have a space, too.
        ErrorKind::NotFound if text.split_once(' ').is_some_and(|(first, _)| !first.contains('/')) => {
            (EXIT_NOT_FOUND, "; quotes make it one word with its arguments: leave them out, or give sh -c '...'")
        }
        ErrorKind::NotFound if variable() => (EXIT_NOT_FOUND, "; -x NAME=VALUE sets a variable of the workers"),
        ErrorKind::NotFound => (EXIT_NOT_FOUND, "; is it installed on this host and in PATH?"),
        ErrorKind::PermissionDenied if is_there && Path::new(program).is_dir() => {
            (EXIT_CANNOT_EXECUTE, "; it is a folder")
        }
        ErrorKind::PermissionDenied => (EXIT_CANNOT_EXECUTE, "; is it executable?"),
        _ => (EXIT_CANNOT_EXECUTE, ""),
    }
}

/// Whether a process ended because this program did not execute the worker's command.
///
/// The exit status does not show it: a shell ends with 126 and 127, too. The agent's only other source is the output, so the
/// last line of standard error decides: [`not_run`] writes it.
pub(crate) fn is_not_run(status: Status, stderr_tail: &[String]) -> bool {
    let is_status = [EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND].iter().any(|code| status == Status::Code((*code).into()));
    let mark = format!("[{}]", Code::WorkerNotRun);
    is_status && stderr_tail.last().is_some_and(|last| last.starts_with(NOTICE) && last.ends_with(&mark))
}

/// Whether a process ended because the program of the worker's command does not exist.
pub(crate) fn is_not_found(status: Status, program: &str, stderr_tail: &[String]) -> bool {
    let line = format!("{NOTICE}{}", beginning(OsStr::new(program)));
    status == Status::Code(EXIT_NOT_FOUND.into()) && stderr_tail.last().is_some_and(|last| last.starts_with(&line))
}

/// How the message about a program begins that cannot be executed.
fn beginning(program: &OsStr) -> String {
    format!("cannot run {program:?}: ")
}

/// Writes why the command is not run. The exit status is a shell's, which distinguishes two reasons of one error code.
fn not_run(text: &str, status: u8) -> ExitCode {
    notice(&Code::WorkerNotRun.append_to(text));
    ExitCode::from(status)
}

/// How [`notice`] begins a line.
const NOTICE: &str = "ronde: ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shells_exit_is_not_taken_for_a_program_that_is_not_run() {
        let missing =
            Code::WorkerNotRun.append_to("ronde: cannot run \"bash\": No such file or directory (os error 2)");
        let orphan = Code::WorkerNotRun.append_to("ronde: process 7 is not this one's parent: it has ended");
        let of = |code, lines: &[&str]| {
            let (status, lines) = (Status::Code(code), lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
            (is_not_run(status, &lines), is_not_found(status, "bash", &lines))
        };
        assert_eq!(of(127, &[&missing]), (true, true));
        assert_eq!(of(126, &["ld.so: a warning", &missing]), (true, false), "it cannot be executed");
        assert_eq!(of(126, &[&orphan]), (true, false));
        assert_eq!(of(1, &[&missing]), (false, false), "another status");
        assert_eq!(of(127, &[&missing.replace("bash", "sh")]), (true, false), "a script has run `ronde worker sh`");
        assert_eq!(of(127, &["bash: nosuch.sh: No such file or directory"]), (false, false), "bash ran");
        assert_eq!(of(126, &["bash: [RONDE-E302]"]), (false, false), "bash ran");
        assert_eq!(of(127, &[]), (false, false));
    }

    #[test]
    fn a_program_that_cannot_be_executed_is_explained() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = folder.path().join("train.sh");
        std::fs::write(&script, "#!/bin/bash\r\n").expect("it is ours");
        let script = script.to_str().expect("a temporary folder has a plain name");
        let missing = folder.path().join("none").display().to_string();
        for (program, kind, status, text) in [
            ("pyhton", ErrorKind::NotFound, 127, "in PATH?"),
            (missing.as_str(), ErrorKind::NotFound, 127, "in PATH?"),
            (script, ErrorKind::NotFound, 126, "not the interpreter that its first line"),
            ("", ErrorKind::NotFound, 127, "a shell's variable that is not set"),
            ("python train.py", ErrorKind::NotFound, 127, "leave them out"),
            ("/my folder/train", ErrorKind::NotFound, 127, "in PATH?"),
            ("OMP_NUM_THREADS=1", ErrorKind::NotFound, 127, "; -x NAME=VALUE sets a variable"),
            ("/opt/a=b/python", ErrorKind::NotFound, 127, "in PATH?"),
            (script, ErrorKind::PermissionDenied, 126, "is it executable?"),
            ("/tmp", ErrorKind::PermissionDenied, 126, "; it is a folder"),
            (script, ErrorKind::ArgumentListTooLong, 126, ""),
        ] {
            let found = advice(OsStr::new(program), kind);
            assert_eq!(found.0, status, "{program}");
            assert!(found.1.contains(text) && found.1.is_empty() == text.is_empty(), "{program}: {}", found.1);
        }
    }
}
