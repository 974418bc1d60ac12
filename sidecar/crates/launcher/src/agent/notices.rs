//! Notices that this host is about to be taken away, in an elastic job: SIGTERM to the agent, or to a worker that reports it.
//!
//! The SDK for Python handles SIGTERM while it trains. It asks here whether the signal is an order of the launcher: then the
//! worker ends at once. Else the launcher is notified, and the worker trains on until its next commit.

use std::time::Duration;

use anyhow::Context;
use ronde_bootstrap::directory;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep_until};

use crate::private_socket::{self, PrivateSocket};

/// A worker's report that it has received SIGTERM.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Terminated {
    /// Its number.
    pub(super) worker: u32,
}

/// The answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Advice {
    /// Whether it is to end now.
    pub(super) end_now: bool,
}

/// A report, and where its answer goes.
pub(super) type Reported = private_socket::Asked<Terminated, Advice>;

/// The notices of an agent.
pub(super) struct Notices {
    /// How long the agent goes on after its own notice.
    limit: Duration,
    /// When the agent ends.
    leave_at: Option<Instant>,
    socket: PrivateSocket<Terminated, Advice>,
}

impl Notices {
    /// Takes notices from now on.
    ///
    /// # Errors
    /// When the socket for workers cannot be made.
    pub(super) fn start(limit: Duration) -> anyhow::Result<Self> {
        // A line that is no report gets the answer of a world without notices.
        let socket =
            PrivateSocket::open(&directory::default_base(), (PREFIX, SOCKET_FILE), |_| Advice { end_now: true });
        Ok(Self { limit, leave_at: None, socket: socket.context("workers cannot report SIGTERM")? })
    }

    /// The variable for workers.
    pub(super) fn variable(&self) -> (String, String) {
        (VARIABLE.to_owned(), self.socket.path().to_string_lossy().into_owned())
    }

    /// Takes a notice to the agent; returns whether it is the first.
    pub(super) fn take(&mut self) -> bool {
        let is_first = self.leave_at.is_none();
        // The launcher, which counts from the notice's arrival, ends the connection first.
        self.leave_at.get_or_insert(Instant::now() + self.limit + SLACK);
        is_first
    }
}

/// The next report of a worker.
pub(super) async fn next(notices: &mut Option<Notices>) -> Result<Reported, Over> {
    let Some(notices) = notices else { return std::future::pending().await };
    let leave_at = notices.leave_at;
    tokio::select! {
        reported = notices.socket.next() => Ok(reported),
        () = sleep_until(leave_at.unwrap_or_else(Instant::now)), if leave_at.is_some() => Err(Over),
    }
}

/// The time after the agent's notice is over.
#[derive(Debug)]
pub(super) struct Over;

/// The variable with the path of the socket.
const VARIABLE: &str = "RONDE_NOTICE_SOCKET";
const PREFIX: &str = "ronde-agent-";
const SOCKET_FILE: &str = "notice.sock";
const SLACK: Duration = Duration::from_secs(5);
