//! `ronde exec-worker`: ties its life to the agent's, then becomes the worker.
//!
//! The kernel ends a process with its parent only if the process itself asks for it; between the agent's fork and the
//! worker's first instruction this is the place to do so without unsafe code.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::Args;
use nix::sys::signal::Signal;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::fail;

/// Arguments of `ronde exec-worker`.
#[derive(Args, Debug)]
pub struct ExecArgs {
    /// The process id of the agent.
    #[arg(long)]
    parent: i32,
    /// Ask the command to end with the agent, by SIGTERM, and do not kill it.
    #[arg(long)]
    asked: bool,
    /// Program and arguments.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

/// Becomes the worker; returns only when that is not possible.
pub fn main(args: &ExecArgs) -> ExitCode {
    let end = if args.asked { Signal::SIGTERM } else { Signal::SIGKILL };
    if let Err(error) = nix::sys::prctl::set_pdeathsig(end) {
        let text = format!("cannot tie the worker's lifetime to its agent: {error}");
        return fail(Code::WorkerNotRun, &text, EXIT_CANNOT_EXECUTE);
    }
    // An agent that had ended before the line above cannot end this process any more.
    if nix::unistd::getppid().as_raw() != args.parent {
        return ExitCode::from(EXIT_CANNOT_EXECUTE);
    }
    become_worker(&args.command, |command| command)
}

/// Becomes the worker, whose environment `change` may change; returns only when that is not possible.
pub(crate) fn become_worker(command: &[String], change: impl FnOnce(&mut Command) -> &mut Command) -> ExitCode {
    let (program, arguments) = command.split_first().expect("clap requires one");
    let error = change(Command::new(program).args(arguments)).exec();
    let (code, advice) = match error.kind() {
        std::io::ErrorKind::NotFound => (EXIT_NOT_FOUND, "; is it installed on this host and in PATH?"),
        std::io::ErrorKind::PermissionDenied => (EXIT_CANNOT_EXECUTE, "; is it executable?"),
        _ => (EXIT_CANNOT_EXECUTE, ""),
    };
    fail(Code::WorkerNotRun, &format!("cannot run {program:?}: {error}{advice}"), code)
}

/// As shells use them.
pub(crate) const EXIT_NOT_FOUND: u8 = 127;
const EXIT_CANNOT_EXECUTE: u8 = 126;
