//! [`HostQueue`]: commands for the lanes on the host, which take operations in the order of their numbers.
//!
//! An operation whose contributions are on their way from devices is *awaited*; what follows it waits in the queue. Without
//! such operations the queue is empty, and each command passes at once.

use std::collections::VecDeque;

use ronde_wire::Seq;

/// The queue. `A` is what is known of an awaited operation, and `C` a command.
#[derive(Debug)]
pub(crate) struct HostQueue<A, C>(VecDeque<Entry<A, C>>);

#[derive(Debug)]
enum Entry<A, C> {
    Awaited(Seq, A),
    /// With the number of the operation that it admits.
    Ready(Option<Seq>, C),
}

impl<A, C> Default for HostQueue<A, C> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<A, C> HostQueue<A, C> {
    /// Adds a command that admits an operation, or another one; take it with [`HostQueue::pop`].
    pub(crate) fn push(&mut self, admits: Option<Seq>, command: C) {
        self.0.push_back(Entry::Ready(admits, command));
    }

    /// Adds an operation whose contributions are on their way.
    pub(crate) fn await_one(&mut self, seq: Seq, known: A) {
        self.0.push_back(Entry::Awaited(seq, known));
    }

    /// The contributions of an operation are on the host; `command` makes its command. An operation that has been dropped is
    /// not in the queue.
    pub(crate) fn arrived(&mut self, seq: Seq, command: impl FnOnce(A) -> C) {
        let awaited = self.0.iter().position(|entry| matches!(entry, Entry::Awaited(of, _) if *of == seq));
        if let Some(at) = awaited
            && let Some(Entry::Awaited(_, known)) = self.0.remove(at)
        {
            self.0.insert(at, Entry::Ready(Some(seq), command(known)));
        }
    }

    /// Removes operations.
    pub(crate) fn remove(&mut self, dropped: &[Seq]) {
        self.0.retain(|entry| match entry {
            Entry::Awaited(seq, _) | Entry::Ready(Some(seq), _) => !dropped.contains(seq),
            Entry::Ready(None, _) => true,
        });
    }

    /// Removes everything.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes the first command, unless an awaited operation is before it.
    pub(crate) fn pop(&mut self) -> Option<C> {
        match self.0.pop_front_if(|entry| matches!(entry, Entry::Ready(..))) {
            Some(Entry::Ready(_, command)) => Some(command),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(queue: &mut HostQueue<&'static str, String>) -> Vec<String> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn what_follows_an_awaited_operation_waits_in_order() {
        let mut queue = HostQueue::default();
        queue.push(Some(Seq(1)), "one".to_owned());
        queue.await_one(Seq(2), "two");
        queue.push(Some(Seq(3)), "three".to_owned());
        queue.await_one(Seq(4), "four");
        queue.push(None, "cancel".to_owned());
        assert_eq!(all(&mut queue), ["one"]);
        queue.arrived(Seq(4), |known| format!("{known} came"));
        assert_eq!(all(&mut queue), [""; 0]);
        queue.arrived(Seq(2), |known| format!("{known} came"));
        assert_eq!(all(&mut queue), ["two came", "three", "four came", "cancel"]);
    }

    #[test]
    fn dropped_operations_hold_up_nothing() {
        let mut queue = HostQueue::default();
        queue.await_one(Seq(2), "two");
        queue.push(Some(Seq(3)), "three".to_owned());
        queue.push(Some(Seq(5)), "five".to_owned());
        queue.remove(&[Seq(2), Seq(5)]);
        assert_eq!(all(&mut queue), ["three"]);
        queue.arrived(Seq(2), |known| format!("{known} came too late"));
        assert_eq!(all(&mut queue), [""; 0]);
        queue.await_one(Seq(6), "six");
        queue.clear();
        queue.arrived(Seq(6), |known| format!("{known} of an epoch that is over"));
        assert_eq!(all(&mut queue), [""; 0]);
    }
}
