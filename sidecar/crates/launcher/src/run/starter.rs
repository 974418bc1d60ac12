//! The command of `--starter`, such as `mpirun`: it runs on this host and starts the workers in place of the agents.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::watch;
use tokio::time::timeout;

use super::agents::{Event, Receivers};
use super::output::Item;
use crate::agent::{Group, Order};
use crate::envelope::{Environment, ToAgent};

/// The running command.
pub(super) struct Starter {
    order: watch::Sender<Order>,
}

impl Starter {
    /// Starts `command` as the leader of a process group that gets SIGTERM when the launcher exits. It inherits standard output;
    /// its standard error is forwarded, and its last lines are kept.
    ///
    /// # Errors
    /// When the process cannot be started. A command that does not exist exits with code 127.
    pub(super) fn start(
        ronde: &Path,
        command: &[String],
        environment: Environment,
        directory: &Path,
        receivers: Receivers,
    ) -> io::Result<Self> {
        let child = Command::new(ronde)
            .args(["exec-worker", "--asked", "--parent", &std::process::id().to_string(), "--"])
            .args(command)
            .env_clear()
            .envs(environment)
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::inherit())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let group = Group::led_by(&child).map_err(io::Error::other)?;
        let (order, orders) = watch::channel(Order::Run);
        tokio::spawn(supervise(child, group, orders, receivers));
        Ok(Self { order })
    }

    /// Executes the commands that agents execute for workers: stop and kill.
    pub(super) fn send(&self, command: &ToAgent) {
        let order = match command {
            ToAgent::StopWorkers { grace_ms } => Order::Stop(Duration::from_millis(*grace_ms)),
            ToAgent::Kill => Order::Kill,
            _ => return,
        };
        self.order.send_replace(order);
    }
}

async fn supervise(mut child: Child, group: Group, orders: watch::Receiver<Order>, receivers: Receivers) {
    let stderr = child.stderr.take().expect("piped at start");
    let mut reader = tokio::spawn(pass_on(stderr, receivers.clone()));
    let status = group.wait_for(&mut child, orders, Group::terminate).await;
    // Ends the rest of its group.
    group.signal(Signal::SIGKILL);
    // Another process may hold the pipe open; the launcher does not wait for it.
    let _ = timeout(REST_WAIT, &mut reader).await;
    reader.abort();
    // Fails only when the launcher exits.
    let _ = receivers.events.send((0, Event::StarterEnded(status))).await;
}

/// Forwards lines unchanged, a long one in parts.
async fn pass_on(stderr: ChildStderr, receivers: Receivers) {
    let mut stderr = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        match (&mut stderr).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await {
            Ok(count) if count > 0 => {}
            _ => return,
        }
        let text = String::from_utf8_lossy(&line).into_owned();
        let event = Event::StarterOutput(text.trim_end().to_owned());
        // Fails only when the launcher exits.
        receivers.output.send(Item::Passed(text)).await;
        let _ = receivers.events.send((0, event)).await;
    }
}

const LINE_BYTES_MAX: u64 = 8 << 10;
/// The longest wait for the last lines of the ended command.
const REST_WAIT: Duration = Duration::from_secs(2);
