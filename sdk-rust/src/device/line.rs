//! [`Line`]: requests that are not sent yet, in the order of their calls.
//!
//! A held request waits for its input. Requests after it may overtake it, because ranks match operations by name, with three
//! exceptions: a message does not overtake an earlier one to the same rank with the same tag, nothing overtakes a join or
//! the removal of a process set, and these two overtake nothing.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ronde_rpc::Place;
use ronde_wire::{Collective, PluginCall, Rank, RequestId};

use super::InputHold;

/// The unsent requests of a session.
#[derive(Debug, Default)]
pub(crate) struct Line(Mutex<Queue>);

/// What a request needs to be sent, besides what [`crate::pending::Pending`] has.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) plugin: Option<PluginCall>,
    pub(crate) place: Place,
    pub(crate) site: Option<String>,
    /// The input, which the sidecar will read.
    pub(crate) input: Option<InputHold>,
}

/// Which earlier requests a request does not overtake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Joins and removals only.
    Free,
    /// These, and messages to the same rank with the same tag.
    Message { to: Rank, tag: u32 },
    /// None at all: a join or a removal.
    Last,
}

impl Order {
    pub(crate) fn of(collective: &Collective) -> Self {
        match collective {
            Collective::Send { to, tag } => Self::Message { to: *to, tag: *tag },
            Collective::Join | Collective::RemoveSet { .. } => Self::Last,
            _ => Self::Free,
        }
    }

    fn follows(self, earlier: Self) -> bool {
        earlier == Self::Last || self == Self::Last || (self == earlier && self != Self::Free)
    }
}

#[derive(Debug)]
struct Entry {
    id: RequestId,
    order: Order,
    /// `None` until its input has arrived.
    unsent: Option<Unsent>,
}

/// The queue. Whoever sends requests of it holds its lock, so that they are sent in the order in which they are taken.
#[derive(Debug, Default)]
pub(crate) struct Queue(VecDeque<Entry>);

impl Line {
    /// Locks it. A panic elsewhere leaves the queue whole: each change is a single call.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Whether a new request has to wait for others.
    pub(crate) fn delays(&self, order: Order) -> bool {
        self.0.iter().any(|earlier| order.follows(earlier.order))
    }

    /// Adds a request; without `unsent` its input is on its way.
    pub(crate) fn push(&mut self, id: RequestId, order: Order, unsent: Option<Unsent>) {
        self.0.push_back(Entry { id, order, unsent });
    }

    /// The input of a request has arrived.
    pub(crate) fn fill(&mut self, id: RequestId, unsent: Unsent) {
        if let Some(entry) = self.0.iter_mut().find(|entry| entry.id == id) {
            entry.unsent = Some(unsent);
        }
    }

    /// Whether no earlier request has to be sent before this one.
    pub(crate) fn is_next(&self, id: RequestId) -> bool {
        let Some(at) = self.0.iter().position(|entry| entry.id == id) else { return true };
        let order = self.0[at].order;
        !self.0.iter().take(at).any(|earlier| order.follows(earlier.order))
    }

    /// Removes a request that will not be sent.
    pub(crate) fn remove(&mut self, id: RequestId) {
        self.0.retain(|entry| entry.id != id);
    }

    /// Takes the first request that can be sent now.
    pub(crate) fn pop(&mut self) -> Option<(RequestId, Unsent)> {
        let is_next = |at: usize| {
            let entry = &self.0[at];
            entry.unsent.is_some() && !self.0.iter().take(at).any(|earlier| entry.order.follows(earlier.order))
        };
        let at = (0..self.0.len()).find(|at| is_next(*at))?;
        let Entry { id, unsent, .. } = self.0.remove(at)?;
        unsent.map(|unsent| (id, unsent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO_1: Order = Order::Message { to: Rank(1), tag: 7 };
    const OTHER_TAG: Order = Order::Message { to: Rank(1), tag: 8 };

    fn unsent() -> Unsent {
        Unsent { plugin: None, place: Place::None, site: None, input: None }
    }

    /// The requests that are sent after these have been added, each with whether its input is there.
    fn sent(added: &[(Order, bool)]) -> Vec<u64> {
        let mut queue = Queue::default();
        for (id, (order, is_there)) in (0..).zip(added) {
            queue.push(RequestId(id), *order, is_there.then(unsent));
        }
        std::iter::from_fn(|| queue.pop()).map(|(id, _)| id.0).collect()
    }

    #[test]
    fn requests_wait_for_those_that_they_must_not_overtake() {
        assert_eq!(sent(&[(Order::Free, false), (Order::Free, true)]), [1]);
        assert_eq!(sent(&[(TO_1, false), (TO_1, true), (OTHER_TAG, true)]), [2]);
        assert_eq!(sent(&[(Order::Free, false), (Order::Last, true), (Order::Free, true)]), [0_u64; 0]);
        assert_eq!(sent(&[(TO_1, true), (TO_1, true), (Order::Last, true), (Order::Free, true)]), [0, 1, 2, 3]);
    }

    #[test]
    fn a_request_that_arrives_or_is_removed_admits_those_after_it() {
        let mut queue = Queue::default();
        queue.push(RequestId(1), TO_1, None);
        queue.push(RequestId(2), Order::Free, None);
        assert!(queue.delays(TO_1) && queue.delays(Order::Last) && !queue.delays(Order::Free));
        queue.push(RequestId(3), Order::Last, Some(unsent()));
        assert!(queue.pop().is_none());
        queue.push(RequestId(4), Order::Free, None);
        assert!(queue.is_next(RequestId(1)) && queue.is_next(RequestId(2)), "nothing has to be sent before them");
        assert!(!queue.is_next(RequestId(3)) && !queue.is_next(RequestId(4)), "a join waits, and what follows it");
        queue.remove(RequestId(4));
        assert!(queue.is_next(RequestId(4)), "it does not wait any more");
        queue.fill(RequestId(1), unsent());
        assert_eq!(queue.pop().map(|(id, _)| id), Some(RequestId(1)));
        assert!(queue.pop().is_none(), "2 is on its way");
        queue.remove(RequestId(2));
        assert_eq!(queue.pop().map(|(id, _)| id), Some(RequestId(3)));
        assert!(!queue.delays(Order::Last));
    }
}
