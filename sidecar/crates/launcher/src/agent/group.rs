//! A process group, and the wait for its leader's end.

use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::envelope::Status;

/// What a group is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Let it run.
    Run,
    /// Ask it to end, and kill what is left after the grace.
    Stop(Duration),
    /// Kill it.
    Kill,
}

/// Asks those that run to end; later orders stand.
pub(super) fn stop(orders: &watch::Sender<Order>, grace: Duration) {
    orders.send_if_modified(|order| {
        let first = *order == Order::Run;
        if first {
            *order = Order::Stop(grace);
        }
        first
    });
}

/// A process group that was made for one process.
#[derive(Clone, Copy)]
pub(crate) struct Group(Pid);

impl Group {
    /// The group of a child that was started as a leader and has not been waited for.
    pub(crate) fn led_by(child: &Child) -> anyhow::Result<Self> {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).context("the process has no id")?;
        Ok(Self(Pid::from_raw(id)))
    }

    /// The process that leads it.
    pub(super) fn pid(self) -> u32 {
        self.0.as_raw().unsigned_abs()
    }

    /// Signals every process of the group; that none is left is as well.
    pub(crate) fn signal(self, signal: Signal) {
        let _ = killpg(self.0, signal);
    }

    /// Asks all processes to end.
    pub(crate) fn terminate(self) {
        self.signal(Signal::SIGTERM);
    }

    /// Waits for the end of the leader, and passes on what it is to do meanwhile. `ask` is how it is asked to end.
    pub(crate) async fn wait_for(
        self,
        child: &mut Child,
        mut order: watch::Receiver<Order>,
        ask: impl Fn(Self),
    ) -> Status {
        let mut kill_at = None;
        let mut obeys = true;
        order.mark_changed();
        loop {
            tokio::select! {
                status = child.wait() => return status.map_or(Status::Code(-1), Status::from),
                changed = order.changed(), if obeys => {
                    obeys = changed.is_ok();
                    match *order.borrow_and_update() {
                        Order::Run => {}
                        Order::Stop(grace) => {
                            ask(self);
                            // A stopped process hears only after it goes on.
                            self.signal(Signal::SIGCONT);
                            kill_at = Some(Instant::now() + grace);
                        }
                        Order::Kill => self.signal(Signal::SIGKILL),
                    }
                }
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    self.signal(Signal::SIGKILL);
                    kill_at = None;
                }
            }
        }
    }
}
