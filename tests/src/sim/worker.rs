//! A simulated worker: attaches, submits its part of the workload in its own order, and may leave or hang.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Rank, RequestId};

use super::item::Added;
use super::workload::Workload;

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) rank: Rank,
    /// The sidecar's position among all.
    pub(super) host: usize,
    /// Counts the sessions: events of an earlier one are void.
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
    /// Items to submit, in this rank's own order.
    todo: VecDeque<usize>,
    /// All of them.
    mine: BTreeSet<usize>,
    asked: BTreeSet<usize>,
    /// Whether it goes through a loop in order, waiting where necessary.
    orderly: bool,
    /// Items with an answer.
    over: BTreeSet<usize>,
    /// Process sets that this rank knows.
    pub(super) added: Added,
    /// Requests that it will withdraw.
    pub(super) regrets: VecDeque<RequestId>,
    pub(super) rate: Rate,
}

/// How fast a worker submits requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    /// Everything at once, far ahead of others.
    Burst,
    /// A few requests now and then.
    Steady,
    /// Much later than the others.
    Slow,
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

    /// Whether it has submitted everything in an epoch that lasts.
    pub(super) fn is_content(&self) -> bool {
        matches!(&self.state, State::Active(part) if part.todo.is_empty() && part.workload.lasts())
    }
}

impl Part {
    pub(super) fn new(workload: Arc<Workload>, todo: Vec<usize>, rate: Rate, orderly: bool) -> Self {
        let mine = todo.iter().copied().collect();
        let (asked, over, added, regrets) = Default::default();
        Self { workload, todo: todo.into(), mine, asked, orderly, over, added, regrets, rate }
    }

    /// Returns the next item whose conditions are met.
    pub(super) fn next(&mut self) -> Option<usize> {
        let first = self.todo.iter().find(|item| self.workload.items[**item].turn.is_some()).copied();
        let waits = |item: usize| self.orderly && self.workload.items[item].turn.is_some() && Some(item) != first;
        let at = self.todo.iter().position(|item| !waits(*item) && self.may_ask(*item))?;
        let item = self.todo.remove(at)?;
        self.asked.insert(item);
        Some(item)
    }

    pub(super) fn is_over(&mut self, item: usize) {
        self.over.insert(item);
    }

    pub(super) fn has_asked_all(&self) -> bool {
        self.todo.is_empty()
    }

    fn may_ask(&self, item: usize) -> bool {
        let item = &self.workload.items[item];
        let over = |before: &usize| self.over.contains(before) || !self.mine.contains(before);
        let asked = |before: &usize| self.asked.contains(before) || !self.mine.contains(before);
        item.after.iter().all(over) && item.asked_before.iter().all(asked)
    }
}
