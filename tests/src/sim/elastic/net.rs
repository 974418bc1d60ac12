//! Links between sidecars: they belong to a membership, keep messages in order, and hold them while they are cut.

use std::collections::{BTreeMap, VecDeque};

use ronde_wire::{Control, Epoch, Seq};

/// A control message with its frame's numbers.
pub(super) type Message = (Epoch, Seq, Control);

/// All links.
#[derive(Default)]
pub(super) struct Network {
    links: BTreeMap<(usize, usize), Link>,
    /// Pairs that do not reach each other until a time.
    cuts: Vec<(usize, usize, u64)>,
    next: u64,
}

/// An open link.
struct Link {
    id: u64,
    membership: u64,
    /// In both directions, from the lower index first.
    wires: [Wire; 2],
}

#[derive(Default)]
struct Wire {
    messages: VecDeque<Message>,
    /// The last arrival, so that messages keep their order.
    last_us: u64,
}

fn key(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl Network {
    /// Opens a link, in place of an earlier one.
    pub(super) fn open(&mut self, a: usize, b: usize, membership: u64) {
        self.next += 1;
        self.links.insert(key(a, b), Link { id: self.next, membership, wires: Default::default() });
    }

    /// The number of the link and its membership.
    pub(super) fn link(&self, a: usize, b: usize) -> Option<(u64, u64)> {
        self.links.get(&key(a, b)).map(|link| (link.id, link.membership))
    }

    /// Closes a link; messages under way are lost.
    pub(super) fn close(&mut self, a: usize, b: usize) -> bool {
        self.links.remove(&key(a, b)).is_some()
    }

    /// The hosts that a host is linked to.
    pub(super) fn peers(&self, host: usize) -> Vec<usize> {
        let other = |(a, b): &(usize, usize)| if *a == host { Some(*b) } else { (*b == host).then_some(*a) };
        self.links.keys().filter_map(other).collect()
    }

    /// Cuts a pair until a time.
    pub(super) fn cut(&mut self, a: usize, b: usize, until_us: u64) {
        self.cuts.push((a.min(b), a.max(b), until_us));
    }

    /// When a pair reaches each other again, if it is cut.
    pub(super) fn cut_until(&self, a: usize, b: usize, now_us: u64) -> Option<u64> {
        let of = |(x, y, until): &&(usize, usize, u64)| (*x, *y) == key(a, b) && *until > now_us;
        self.cuts.iter().filter(of).map(|(_, _, until)| *until).max()
    }

    /// Queues a message; returns when it arrives, and the number of the link.
    pub(super) fn send(&mut self, (from, to): (usize, usize), message: Message, at_us: u64) -> Option<(u64, u64)> {
        let link = self.links.get_mut(&key(from, to))?;
        let wire = &mut link.wires[usize::from(from > to)];
        wire.messages.push_back(message);
        wire.last_us = wire.last_us.max(at_us);
        Some((wire.last_us, link.id))
    }

    /// Takes the oldest message of a direction, if the link is still the same.
    pub(super) fn take(&mut self, (from, to): (usize, usize), id: u64) -> Option<Message> {
        let link = self.links.get_mut(&key(from, to)).filter(|link| link.id == id)?;
        link.wires[usize::from(from > to)].messages.pop_front()
    }
}
