//! A sidecar process: its bootstrap lines in both directions, its log, its exit.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use ronde_bootstrap::messages::{FromSidecar, ToSidecar};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::group::{Group, Order};
use super::{ToLauncher, stream};
use crate::envelope::{self, Environment, FromAgent};

/// How long a sidecar may take to drain before it is killed.
pub(super) const DRAIN_WAIT: Duration = Duration::from_secs(10);

/// A running sidecar.
pub(super) struct Sidecar {
    index: u32,
    child: Child,
    group: Group,
    lines: mpsc::Receiver<ToSidecar>,
}

impl Sidecar {
    /// Starts a sidecar and returns the queue of its input lines.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(super) fn start(
        index: u32,
        program: Option<Vec<String>>,
        environment: Environment,
    ) -> anyhow::Result<(Self, mpsc::Sender<ToSidecar>)> {
        let own = || Ok::<_, anyhow::Error>(vec![super::own_binary()?, "sidecar".into(), "--bootstrap".into()]);
        let program = program.map_or_else(own, |words| Ok(words.into_iter().map(PathBuf::from).collect()))?;
        let (first, arguments) = program.split_first().context("the sidecar's command is empty")?;
        let child = Command::new(first)
            .args(arguments)
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", first.display()))?;
        let group = Group::led_by(&child)?;
        let (sender, lines) = mpsc::channel(QUEUE_OF_LINES);
        Ok((Self { index, child, group, lines }, sender))
    }

    /// Forwards lines in both directions until it exits, reports the exit, and removes the files of a killed one.
    pub(super) async fn supervise(mut self, launcher: ToLauncher, order: watch::Receiver<Order>) {
        let index = self.index;
        let input = self.child.stdin.take().expect("piped at start");
        let output = self.child.stdout.take().expect("piped at start");
        let log = self.child.stderr.take().expect("piped at start");
        let writer = tokio::spawn(write_lines(input, self.lines));
        let directory = Arc::new(OnceLock::new());
        let mut reader = tokio::spawn(read_lines(index, output, launcher.clone(), directory.clone()));
        let wrap = move |text| FromAgent::SidecarLog { sidecar: index, text };
        // Its log is read for a bounded time below.
        let (_, exited) = watch::channel(false);
        let log = stream::forward(log, launcher.clone(), stream::Tail::default(), None, exited, wrap);
        let mut log = tokio::spawn(log);
        // Its input ends with the writer.
        let status = self.group.wait_for(&mut self.child, order, |_| writer.abort()).await;
        writer.abort();
        // The last lines and log of a sidecar explain its exit, so they are sent first.
        let explained = async { ((&mut reader).await, (&mut log).await) };
        let _ = timeout(FINAL_OUTPUT_WAIT, explained).await;
        reader.abort();
        log.abort();
        // Sending fails only when the agent leaves.
        if let Some(directory) = directory.get().filter(|directory| directory.is_dir())
            && let Err(error) = std::fs::remove_dir_all(directory)
        {
            let text = format!("cannot remove {}, which sidecar {index} left behind: {error}", directory.display());
            let _ = launcher.send(FromAgent::Notice { text }).await;
        }
        let _ = launcher.send(FromAgent::SidecarExited { sidecar: index, status }).await;
    }
}

/// Writes lines and ends the input when the queue is closed. The waiting task detects a sidecar that has exited.
async fn write_lines(mut input: ChildStdin, mut lines: mpsc::Receiver<ToSidecar>) {
    while let Some(line) = lines.recv().await {
        if envelope::write(&mut input, &line).await.is_err() || input.flush().await.is_err() {
            return;
        }
    }
}

/// Forwards a sidecar's messages, and records its session directory.
async fn read_lines(sidecar: u32, output: ChildStdout, launcher: ToLauncher, directory: Arc<OnceLock<PathBuf>>) {
    let mut output = BufReader::new(output);
    loop {
        let (line, understood) = match envelope::read::<FromSidecar>(&mut output).await {
            Ok(Some(line)) => (line, true),
            Ok(None) => return,
            Err(error) => (FromSidecar::Fatal { reason: format!("its output cannot be parsed: {error}") }, false),
        };
        if let FromSidecar::Serving { socket_dir, .. } = &line {
            directory.get_or_init(|| socket_dir.clone());
        }
        // Fails only when the agent leaves.
        let _ = launcher.send(FromAgent::Sidecar { sidecar, line }).await;
        if !understood {
            return;
        }
    }
}

const QUEUE_OF_LINES: usize = 4;
/// The longest wait for the last lines of a sidecar that has exited.
const FINAL_OUTPUT_WAIT: Duration = Duration::from_secs(2);
