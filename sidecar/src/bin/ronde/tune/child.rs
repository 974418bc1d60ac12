//! Jobs as child processes, which end with this process, however it ends.

use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ronde_bootstrap::exit::EXIT_SIGNAL;
use ronde_bootstrap::signals::is_ignored;

/// The signals by which a user ends this process: the newest one that was not handled yet, or 0.
pub(super) struct Signals(Arc<AtomicUsize>);

/// A signal of the user has ended the job.
#[derive(Debug)]
pub(super) struct Interrupted(Signal);

impl Interrupted {
    /// The status that a shell would show.
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(EXIT_SIGNAL + u8::try_from(self.0 as i32).unwrap_or_default())
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} has ended the job", self.0)
    }
}

impl std::error::Error for Interrupted {}

impl Signals {
    /// Handles the signals from now on. One that is ignored from the start, as under `nohup`, stays ignored.
    ///
    /// # Errors
    /// When the system refuses a handler.
    pub(super) fn install() -> anyhow::Result<Self> {
        let newest = Arc::new(AtomicUsize::new(0));
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            let number = signal as i32;
            if !is_ignored(number) {
                let value = usize::try_from(number).unwrap_or_default();
                let installed = signal_hook::flag::register_usize(number, Arc::clone(&newest), value);
                installed.context("signals cannot be handled")?;
            }
        }
        Ok(Self(newest))
    }

    /// Runs a job to its end, without input. Signals are passed on to it, and then its end is awaited; if this process is
    /// killed, the job gets SIGTERM.
    ///
    /// # Errors
    /// When it cannot be started or fails, or [`Interrupted`].
    pub(super) fn run(&self, command: &Command) -> anyhow::Result<()> {
        // A process group of its own, as a terminal would send Ctrl-C to the job, too: a second signal kills its ranks.
        let job = bound(command).stdin(Stdio::null()).process_group(0).spawn();
        let mut job = job.context("the job cannot be started")?;
        let id = Pid::from_raw(i32::try_from(job.id()).context("a process id of another system")?);
        let mut received = None;
        let status = loop {
            if let Some(signal) = self.take() {
                received = Some(signal);
                // It is there until its end is collected below.
                let _ = kill(id, signal);
            }
            match job.try_wait().context("the job cannot be waited for")? {
                Some(status) => break status,
                None => std::thread::sleep(TURN),
            }
        };
        if let Some(signal) = received.or_else(|| self.take()) {
            return Err(Interrupted(signal).into());
        }
        ensure!(status.success(), "the job ended with {status}; its messages are above");
        Ok(())
    }

    fn take(&self) -> Option<Signal> {
        let number = i32::try_from(self.0.swap(0, Ordering::Relaxed)).ok()?;
        Signal::try_from(number).ok()
    }
}

/// A command of `ronde` that gets SIGTERM when this thread, the program's first, ends.
fn bound(command: &Command) -> Command {
    let mut bound = Command::new(command.get_program());
    bound.args(["exec-worker", "--asked", "--parent", &std::process::id().to_string(), "--"]);
    bound.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bound.env(name, value),
            None => bound.env_remove(name),
        };
    }
    bound
}

/// How often signals and the end of a job are looked for.
const TURN: Duration = Duration::from_millis(50);
