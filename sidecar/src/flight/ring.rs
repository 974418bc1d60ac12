//! A ring of notes that keeps the newest ones.

use std::collections::VecDeque;

use ronde_bootstrap::flight::OPERATIONS_MAX;

/// The newest notes, oldest first. A note is bounded in bytes, because the texts of requests are.
#[derive(Clone)]
pub(super) struct Ring<T> {
    notes: VecDeque<T>,
    /// How many there were.
    pushed: u64,
}

impl<T> Ring<T> {
    /// A ring with room for all notes, so that adding one allocates nothing.
    pub(super) fn new() -> Self {
        Self { notes: VecDeque::with_capacity(OPERATIONS_MAX), pushed: 0 }
    }

    /// A ring that is never used.
    pub(super) fn empty() -> Self {
        Self { notes: VecDeque::new(), pushed: 0 }
    }

    /// Adds a note; the oldest one makes room.
    pub(super) fn push(&mut self, note: T) {
        self.pushed += 1;
        if self.notes.len() >= OPERATIONS_MAX {
            self.notes.pop_front();
        }
        self.notes.push_back(note);
    }

    /// How many notes were added.
    pub(super) fn pushed(&self) -> u64 {
        self.pushed
    }

    /// The newest note.
    pub(super) fn newest(&self) -> Option<&T> {
        self.notes.back()
    }

    /// The note that is so many before the newest one.
    pub(super) fn before_newest_mut(&mut self, back: usize) -> Option<&mut T> {
        let index = self.notes.len().checked_sub(1)?.checked_sub(back)?;
        self.notes.get_mut(index)
    }

    /// Changes the newest note that matches.
    pub(super) fn change_newest(&mut self, matches: impl Fn(&T) -> bool, change: impl FnOnce(&mut T)) {
        if let Some(note) = self.notes.iter_mut().rev().find(|note| matches(note)) {
            change(note);
        }
    }

    /// The notes, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.notes.iter()
    }

    /// The notes, oldest first.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.notes.iter_mut()
    }
}
