//! The virtual clock and the queue of events.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ronde_engine::Time;
use ronde_wire::{Epoch, Rank};

use super::faults::Fault;
use super::link::{ConnectionId, Direction};

/// An event at a time. An event of a process names its life, so that it is void after a crash.
#[derive(Clone, Copy, Debug)]
pub(super) enum SimEvent {
    /// The oldest message of one direction of a connection arrives.
    Deliver { direction: Direction, generation: u64 },
    /// An attempt to make a connection ends.
    Connect { connection: ConnectionId, generation: u64, give_up_us: u64 },
    /// A connection has been silent for longer than a transport accepts.
    Expire { connection: ConnectionId, generation: u64 },
    /// A chunk has left a port's queue.
    Sent { direction: Direction, generation: u64 },
    /// A sidecar's control thread performs what its engine wants.
    Drain { host: usize, life: u32 },
    /// The engine's timeout.
    Timeout { host: usize, life: u32 },
    /// A lane receives the oldest command of the control thread.
    Command { host: usize, life: u32, lane: usize },
    /// The control thread receives the oldest report of a lane.
    Report { host: usize, life: u32, lane: usize },
    /// A lane's executor runs.
    Work { host: usize, life: u32, lane: usize },
    /// A worker continues its script.
    Step { rank: Rank, session: u32 },
    /// A worker withdraws its oldest request that is to be withdrawn.
    Withdraw { rank: Rank, session: u32 },
    /// A hostile sidecar sends something.
    Intrude { host: usize, life: u32 },
    /// A fault occurs.
    Break(Fault),
    /// A sidecar is started again.
    StartHost { host: usize },
    /// A worker is started again.
    StartWorker { rank: Rank },
    /// A member of an epoch must have noticed by now that another one ended.
    Overdue { host: usize, life: u32, epoch: Epoch, since_us: u64 },
}

/// The queue of what will happen.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    now_us: u64,
    count: u64,
    heap: BinaryHeap<Reverse<Entry>>,
}

#[derive(Debug)]
struct Entry {
    at_us: u64,
    count: u64,
    event: SimEvent,
}

impl Schedule {
    pub(super) fn now(&self) -> Time {
        Time(self.now_us)
    }

    pub(super) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Events of the same time come in the order in which they were scheduled.
    pub(super) fn at(&mut self, at_us: u64, event: SimEvent) {
        self.count += 1;
        self.heap.push(Reverse(Entry { at_us: at_us.max(self.now_us), count: self.count, event }));
    }

    pub(super) fn after(&mut self, delay_us: u64, event: SimEvent) {
        self.at(self.now_us + delay_us, event);
    }

    /// Takes the next event, and sets the clock to its time.
    pub(super) fn pop(&mut self) -> Option<SimEvent> {
        let Reverse(entry) = self.heap.pop()?;
        self.now_us = entry.at_us;
        Some(entry.event)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at_us, self.count) == (other.at_us, other.count)
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.count).cmp(&(other.at_us, other.count))
    }
}
