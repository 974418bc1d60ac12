//! A worker: its process group, its output, its exit.

use std::path::Path;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use ronde_bootstrap::messages::{ToSidecar, WorkerExited};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::group::{Group, Order};
use super::memory::WorkerWatch;
use super::{ToLauncher, stream};
use crate::envelope::{FromAgent, Status, Stream};

/// A running worker.
pub(super) struct Worker {
    number: u32,
    child: Child,
    group: Group,
    takes_input: bool,
}

impl Worker {
    /// Starts `command` as the leader of a process group.
    ///
    /// # Errors
    /// When the process cannot be started. For a command that does not exist the worker exits with code 127.
    pub(super) fn start(
        number: u32,
        command: &[String],
        environment: impl Iterator<Item = (String, String)>,
        directory: &Path,
        takes_input: bool,
    ) -> anyhow::Result<Self> {
        let child = Command::new(super::own_binary()?)
            .args(["exec-worker", "--parent", &std::process::id().to_string(), "--"])
            .args(command)
            .env_clear()
            .envs(environment)
            .current_dir(directory)
            .stdin(if takes_input { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start a process")?;
        let group = Group::led_by(&child)?;
        Ok(Self { number, child, group, takes_input })
    }

    /// Returns the queue of its standard input, if that is a pipe. Each text is reported when the pipe has taken it.
    pub(super) fn pass_input(&mut self, launcher: ToLauncher) -> Option<mpsc::Sender<String>> {
        let mut input = self.child.stdin.take()?;
        let (sender, mut texts) = mpsc::channel::<String>(1);
        let worker = self.number;
        tokio::spawn(async move {
            while let Some(text) = texts.recv().await {
                // A worker that has closed its input takes everything.
                let _ = input.write_all(text.as_bytes()).await;
                // Sending fails only when the agent exits.
                let _ = launcher.send(FromAgent::InputTaken { worker }).await;
            }
        });
        Some(sender)
    }

    /// The process id.
    pub(super) fn pid(&self) -> u32 {
        self.group.pid()
    }

    /// Forwards its output and exit, and ends it on request.
    pub(super) async fn supervise(
        mut self,
        receivers: Receivers,
        mut memory: WorkerWatch,
        order: watch::Receiver<Order>,
    ) {
        let (worker, launcher) = (self.number, receivers.launcher.clone());
        let output = |stream| move |text| FromAgent::Output { worker, stream, text };
        let stdout = self.child.stdout.take().expect("piped at start");
        let stderr = self.child.stderr.take().expect("piped at start");
        let tail = stream::Tail::default();
        let (unseen, seen) = (stream::Tail::default(), tail.clone());
        // A prompt has no end of line.
        let patience = self.takes_input.then_some(PARTIAL_LINE_WAIT);
        let (out, err) = (output(Stream::Stdout), output(Stream::Stderr));
        let (ended, exited) = watch::channel(false);
        let stdout = stream::forward(stdout, launcher.clone(), unseen, patience, exited.clone(), out);
        let stderr = stream::forward(stderr, launcher.clone(), seen, patience, exited, err);
        let (stdout, mut stderr) = (tokio::spawn(stdout), tokio::spawn(stderr));
        let status = wait(&mut self.child, self.group, &mut memory, order).await;
        ended.send_replace(true);
        // Ends the rest of the worker's group. The leader's id was freed just now, so it is not reused yet.
        self.group.signal(Signal::SIGKILL);
        self.group.reap().await;
        // Sending fails only when the agent exits.
        let _ = launcher.send(FromAgent::WorkerExited { worker, status }).await;
        // The last lines are in the pipe when the worker has exited; a process outside its group may hold the other end longer.
        let is_read = timeout(FINAL_OUTPUT_WAIT, &mut stderr).await.is_ok();
        receivers
            .sidecar(WorkerExited { worker, pid: self.group.pid(), exit: status.into(), stderr_tail: tail.lines() })
            .await;
        // Fails only with a panic, which is reported where it happens.
        let _ = stdout.await;
        if !is_read {
            let _ = stderr.await;
        }
        let _ = launcher.send(FromAgent::WorkerDrained { worker, stderr_tail: tail.lines() }).await;
    }
}

/// The receivers of a worker's exit status.
pub(super) struct Receivers {
    /// The launcher.
    pub(super) launcher: ToLauncher,
    /// The sidecar that serves it, which notifies the other ranks.
    pub(super) sidecar: Option<mpsc::WeakSender<ToSidecar>>,
}

impl Receivers {
    /// Notifies the sidecar, unless it has exited.
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

/// Polls for a moment, as the agent's own read may fail at first when memory has run out.
async fn memory_has_run_out(memory: &WorkerWatch) -> bool {
    for _ in 0..MEMORY_POLLS {
        if memory.has_run_out() {
            return true;
        }
        sleep(MEMORY_POLL_PAUSE).await;
    }
    memory.has_run_out()
}

/// How long the begin of a line waits for the rest, if the worker takes input.
const PARTIAL_LINE_WAIT: Duration = Duration::from_millis(50);
const MEMORY_POLLS: u32 = 4;
const MEMORY_POLL_PAUSE: Duration = Duration::from_millis(20);
/// The interval at which the control group of a worker is polled.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The longest wait for a worker's last lines before its sidecar is notified without them; less than a sidecar waits.
const FINAL_OUTPUT_WAIT: Duration = Duration::from_millis(150);
