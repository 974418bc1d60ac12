//! One worker: its process group, its output, its end.

use std::path::Path;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use ronde_bootstrap::messages::{ToSidecar, WorkerExited};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::group::{Group, Order};
use super::memory::WorkerWatch;
use super::{ToLauncher, stream};
use crate::envelope::{FromAgent, Status, Stream};

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
        self.group.pid()
    }

    /// Passes on its output and its end, and ends it when told to.
    pub(super) async fn supervise(
        mut self,
        receivers: Receivers,
        mut memory: WorkerWatch,
        order: watch::Receiver<Order>,
    ) {
        let (rank, launcher) = (self.rank, receivers.launcher.clone());
        let output = |stream| move |text| FromAgent::Output { rank, stream, text };
        let stdout = self.child.stdout.take().expect("piped at start");
        let stderr = self.child.stderr.take().expect("piped at start");
        let tail = stream::Tail::default();
        let (unseen, seen) = (stream::Tail::default(), tail.clone());
        let mut stdout = tokio::spawn(stream::forward(stdout, launcher.clone(), unseen, output(Stream::Stdout)));
        let mut stderr = tokio::spawn(stream::forward(stderr, launcher.clone(), seen, output(Stream::Stderr)));
        let status = wait(&mut self.child, self.group, &mut memory, order).await;
        // What a worker leaves in its group has lost its purpose. The leader's number cannot belong to others yet: it was
        // freed an instant ago.
        self.group.signal(Signal::SIGKILL);
        // The receiver of both messages has gone only when the agent leaves.
        let _ = launcher.send(FromAgent::WorkerExited { rank, status }).await;
        // Its last words are in the pipe when it has ended; who left the group may hold the other end for longer.
        let is_read = timeout(FINAL_OUTPUT_WAIT, &mut stderr).await.is_ok();
        receivers
            .sidecar(WorkerExited { rank, pid: self.group.pid(), exit: status.into(), stderr_tail: tail.lines() })
            .await;
        let read_all = async {
            // Fails only with a panic, which is reported where it happens.
            let _ = (&mut stdout).await;
            if !is_read {
                let _ = (&mut stderr).await;
            }
        };
        let _ = timeout(OUTPUT_WAIT, read_all).await;
        stdout.abort();
        stderr.abort();
        let _ = launcher.send(FromAgent::WorkerDrained { rank, stderr_tail: tail.lines() }).await;
    }
}

/// Who is notified how a worker ended.
pub(super) struct Receivers {
    /// The launcher.
    pub(super) launcher: ToLauncher,
    /// The sidecar that serves it, which tells the other ranks.
    pub(super) sidecar: Option<mpsc::WeakSender<ToSidecar>>,
}

impl Receivers {
    /// A sidecar reads all the time; one that has ended tells nobody any more.
    async fn sidecar(&self, exited: WorkerExited) {
        if let Some(lines) = self.sidecar.as_ref().and_then(mpsc::WeakSender::upgrade) {
            let _ = lines.send(ToSidecar::WorkerExited(exited)).await;
        }
    }
}

async fn wait(child: &mut Child, group: Group, memory: &mut WorkerWatch, order: watch::Receiver<Order>) -> Status {
    let mut polls = interval(MEMORY_POLL_INTERVAL);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ended = pin!(group.wait_for(child, order, Group::terminate));
    loop {
        tokio::select! {
            status = &mut ended => {
                let killed = status == Status::Signal(Signal::SIGKILL as i32);
                return if killed && memory_has_run_out(memory).await { Status::OutOfMemory } else { status };
            }
            _ = polls.tick() => memory.poll(),
        }
    }
}

/// Asks for a moment: where memory has run out, the agent's own reading may fail at first.
async fn memory_has_run_out(memory: &WorkerWatch) -> bool {
    for _ in 0..MEMORY_POLLS {
        if memory.has_run_out() {
            return true;
        }
        sleep(MEMORY_POLL_PAUSE).await;
    }
    memory.has_run_out()
}

const MEMORY_POLLS: u32 = 4;
const MEMORY_POLL_PAUSE: Duration = Duration::from_millis(20);
/// How often the control group of a worker is looked at.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long an ended worker's last words may be on their way, before its sidecar is told of its end without them; less
/// than a sidecar waits for that.
const FINAL_OUTPUT_WAIT: Duration = Duration::from_millis(150);
/// How long an ended worker's output may still be on its way.
const OUTPUT_WAIT: Duration = Duration::from_secs(2);
