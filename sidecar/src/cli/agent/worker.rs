//! One worker: its process group, its output, its end.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::{ToLauncher, WorkersOrder, stream};
use crate::cli::envelope::{FromAgent, Status, Stream};

/// A running worker.
pub(super) struct Worker {
    rank: u32,
    child: Child,
    group: Group,
}

impl Worker {
    /// Starts `command` as the leader of a process group.
    ///
    /// # Errors
    /// When the process cannot be made. A command that does not exist is the worker's own end, with code 127.
    pub(super) fn start(
        rank: u32,
        command: &[String],
        environment: impl Iterator<Item = (String, String)>,
        directory: &Path,
    ) -> anyhow::Result<Self> {
        let child = Command::new(super::own_binary()?)
            .args(["exec-worker", "--parent", &std::process::id().to_string(), "--"])
            .args(command)
            .env_clear()
            .envs(environment)
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start a process")?;
        let group = Group::led_by(&child)?;
        Ok(Self { rank, child, group })
    }

    /// The process id.
    pub(super) fn pid(&self) -> u32 {
        self.group.0.as_raw().unsigned_abs()
    }

    /// Passes on its output and its end, and ends it when told to.
    pub(super) async fn watch_over(mut self, launcher: ToLauncher, order: watch::Receiver<WorkersOrder>) {
        let rank = self.rank;
        let output = |stream| move |text| FromAgent::Output { rank, stream, text };
        let stdout = self.child.stdout.take().expect("piped at start");
        let stderr = self.child.stderr.take().expect("piped at start");
        let mut stdout = tokio::spawn(stream::forward(stdout, launcher.clone(), output(Stream::Stdout)));
        let mut stderr = tokio::spawn(stream::forward(stderr, launcher.clone(), output(Stream::Stderr)));
        let status = wait(&mut self.child, self.group, order).await;
        // What a worker leaves in its group has lost its purpose. The leader's number cannot belong to others yet: it was
        // freed an instant ago.
        self.group.signal(Signal::SIGKILL);
        // The receiver of both messages has gone only when the agent leaves.
        let _ = launcher.send(FromAgent::WorkerExited { rank, status }).await;
        let read_all = async { (&mut stdout).await.and((&mut stderr).await) };
        let stderr_tail = match timeout(OUTPUT_WAIT, read_all).await {
            Ok(read) => read.unwrap_or_default(),
            // Somebody that left the group still holds the pipes.
            Err(_) => Vec::new(),
        };
        stdout.abort();
        stderr.abort();
        let _ = launcher.send(FromAgent::WorkerDrained { rank, stderr_tail }).await;
    }
}

/// A process group that was made for one process.
#[derive(Clone, Copy)]
pub(super) struct Group(Pid);

impl Group {
    /// The group of a child that was started as a leader and has not been waited for.
    pub(super) fn led_by(child: &Child) -> anyhow::Result<Self> {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).context("the process has no id")?;
        Ok(Self(Pid::from_raw(id)))
    }

    /// Signals every process of the group; that none is left is as well.
    pub(super) fn signal(self, signal: Signal) {
        let _ = killpg(self.0, signal);
    }
}

async fn wait(child: &mut Child, group: Group, mut order: watch::Receiver<WorkersOrder>) -> Status {
    let mut kill_at = None;
    let mut obeys = true;
    order.mark_changed();
    loop {
        tokio::select! {
            status = child.wait() => return status.map_or(Status::Code(-1), Status::from),
            changed = order.changed(), if obeys => {
                obeys = changed.is_ok();
                match *order.borrow_and_update() {
                    WorkersOrder::Run => {}
                    WorkersOrder::Stop(grace) => {
                        group.signal(Signal::SIGTERM);
                        // A stopped process hears only after it goes on.
                        group.signal(Signal::SIGCONT);
                        kill_at = Some(Instant::now() + grace);
                    }
                    WorkersOrder::Kill => group.signal(Signal::SIGKILL),
                }
            }
            () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                group.signal(Signal::SIGKILL);
                kill_at = None;
            }
        }
    }
}

/// How long an ended worker's output may still be on its way.
const OUTPUT_WAIT: Duration = Duration::from_secs(2);
