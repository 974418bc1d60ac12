//! A simulated worker: attaches, asks for its part of the workload in its own order, and may leave or hang.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Rank, RequestId};

use super::workload::Workload;

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) rank: Rank,
    /// The sidecar's position among all.
    pub(super) host: usize,
    /// Counts the sessions: what was scheduled for an earlier one is void.
    pub(super) session: u32,
    pub(super) alive: bool,
    /// A stopped worker gives no sign of life until then.
    pub(super) hung_until_us: u64,
    pub(super) state: State,
}

#[derive(Debug)]
pub(super) enum State {
    /// Without a session.
    Detached,
    /// Has claimed its rank and waits for an epoch.
    Waiting,
    /// Takes part.
    Active(Part),
}

/// A worker's part of an epoch.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) workload: Arc<Workload>,
    /// Items to ask for, in this rank's own order.
    pub(super) todo: VecDeque<usize>,
    /// Requests that it will withdraw.
    pub(super) regrets: VecDeque<RequestId>,
    /// Items with an answer.
    pub(super) over: BTreeSet<usize>,
}

impl Worker {
    pub(super) fn new(rank: Rank, host: usize) -> Self {
        Self { rank, host, session: 0, alive: true, hung_until_us: 0, state: State::Detached }
    }

    /// The part of the current epoch.
    pub(super) fn part(&mut self) -> Option<&mut Part> {
        match &mut self.state {
            State::Active(part) => Some(part),
            State::Detached | State::Waiting => None,
        }
    }

    /// Whether it has asked for everything in an epoch that nobody leaves.
    pub(super) fn is_content(&self) -> bool {
        matches!(&self.state, State::Active(part) if part.todo.is_empty() && part.workload.leaver.is_none())
    }
}

impl Part {
    /// The next item that may be asked for: one that follows another by the same name waits for that.
    pub(super) fn next(&mut self) -> Option<usize> {
        let ready = |item: &usize| self.workload.items[*item].follows.is_none_or(|before| self.over.contains(&before));
        let at = self.todo.iter().position(ready)?;
        self.todo.remove(at)
    }
}
