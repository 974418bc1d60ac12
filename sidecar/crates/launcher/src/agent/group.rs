//! Process groups: signals, and waiting for the leader's exit.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use crate::envelope::Status;

/// What a process group is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Let it run.
    Run,
    /// Send SIGTERM, and SIGKILL after the grace period.
    Stop(Duration),
    /// Kill it.
    Kill,
}

/// Orders running groups to stop; does not replace an earlier order to stop or kill.
fn stop(orders: &watch::Sender<Order>, grace: Duration) {
    orders.send_if_modified(|order| {
        let first = *order == Order::Run;
        if first {
            *order = Order::Stop(grace);
        }
        first
    });
}

/// The orders of all groups of one kind, each with a number.
#[derive(Default)]
pub(super) struct Orders {
    /// What groups that start now get.
    all: Option<Order>,
    each: BTreeMap<u32, watch::Sender<Order>>,
}

impl Orders {
    /// The orders of a group that starts.
    pub(super) fn subscribe(&mut self, number: u32) -> watch::Receiver<Order> {
        // Groups that have ended get no orders any more.
        self.each.retain(|_, orders| !orders.is_closed());
        let (orders, receiver) = watch::channel(self.all.unwrap_or(Order::Run));
        self.each.insert(number, orders);
        receiver
    }

    /// Orders one group to stop.
    pub(super) fn stop(&self, number: u32, grace: Duration) {
        self.each.get(&number).into_iter().for_each(|orders| stop(orders, grace));
    }

    /// Whether a group was ordered to end, or has ended.
    pub(super) fn is_ordered(&self, number: u32) -> bool {
        self.each.get(&number).is_none_or(|orders| orders.is_closed() || *orders.borrow() != Order::Run)
    }

    /// Orders all groups to stop, also those that start later.
    pub(super) fn stop_all(&mut self, grace: Duration) {
        self.all.get_or_insert(Order::Stop(grace));
        self.each.values().for_each(|orders| stop(orders, grace));
    }

    /// Kills all groups, also those that start later.
    pub(super) fn kill_all(&mut self) {
        self.all = Some(Order::Kill);
        for orders in self.each.values() {
            orders.send_replace(Order::Kill);
        }
    }
}

/// The process group of one child process.
#[derive(Clone, Copy)]
pub(crate) struct Group(Pid);

impl Group {
    /// Returns the group of a child that leads one and has not been waited for.
    pub(crate) fn led_by(child: &Child) -> anyhow::Result<Self> {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).context("the process has no id")?;
        Ok(Self(Pid::from_raw(id)))
    }

    /// The process id of the leader.
    pub(super) fn pid(self) -> u32 {
        self.0.as_raw().unsigned_abs()
    }

    /// Signals every process of the group; an empty group is fine.
    pub(crate) fn signal(self, signal: Signal) {
        let _ = killpg(self.0, signal);
    }

    /// Reaps killed processes of the group whose parents have exited, as their parent is now this process, a subreaper. Call it
    /// right after the leader's exit: later the number may be that of another worker.
    pub(super) async fn reap(self) {
        let group = Pid::from_raw(-self.0.as_raw());
        for _ in 0..REAP_TRIES {
            loop {
                match waitpid(group, Some(WaitPidFlag::WNOHANG)) {
                    Ok(WaitStatus::StillAlive) => break,
                    Ok(_) => {}
                    // There is none, or none any more.
                    Err(_) => return,
                }
            }
            sleep(REAP_PAUSE).await;
        }
    }

    /// Sends SIGTERM to all processes.
    pub(crate) fn terminate(self) {
        self.signal(Signal::SIGTERM);
    }

    /// Waits for the leader's exit and executes orders meanwhile. `ask` requests its end.
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
                            // A stopped process handles signals only after SIGCONT.
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

const REAP_TRIES: u32 = 5;
const REAP_PAUSE: Duration = Duration::from_millis(10);
