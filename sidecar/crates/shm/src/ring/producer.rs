//! The producer of one direction of a ring.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::bell::Bell;
use super::consumer::{AWAKE, ON_FUTEX};
use super::memory::{ALIGNMENT, Channel, framed};
use super::{RingError, futex};
use crate::fork::ForkGuard;

/// Writes messages. It has one user at a time; share it behind a lock.
#[derive(Debug)]
pub struct Producer {
    channel: Channel,
    bell: Arc<Bell>,
    /// This side's position; never read back from shared memory.
    produced: u64,
    /// The last accepted position of the peer.
    consumed: u64,
    fork_guard: ForkGuard,
}

/// The result of [`Producer::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The message is published. The consumer was not woken.
    Done,
    /// The ring has no room; nothing was written.
    Full,
}

impl Producer {
    pub(super) fn new(channel: Channel, bell: Arc<Bell>) -> Self {
        Self { channel, bell, produced: 0, consumed: 0, fork_guard: ForkGuard::new() }
    }

    /// Length of the longest message in bytes.
    #[must_use]
    pub fn message_bytes_max(&self) -> u64 {
        self.channel.message_bytes_max()
    }

    /// Publishes a message if there is room. [`Producer::wake`] is separate, so that several messages need one wake-up.
    ///
    /// # Errors
    /// [`RingError::TooLong`]; [`RingError::Position`] if the peer violated the layout of the ring;
    /// [`RingError::UsedAfterFork`].
    pub fn push(&mut self, message: &[u8]) -> Result<Pushed, RingError> {
        self.push_parts([message, &[]], 0)
    }

    /// Publishes a message that consists of two parts, if afterwards there still is room for a message of `spare` bytes.
    ///
    /// # Errors
    /// As [`Producer::push`].
    pub fn push_parts(&mut self, parts: [&[u8]; 2], spare: u64) -> Result<Pushed, RingError> {
        self.fork_guard.check()?;
        let (bytes, limit) = (parts[0].len() as u64 + parts[1].len() as u64, self.message_bytes_max());
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= limit);
        let length = length.ok_or(RingError::TooLong { bytes, limit })?;
        let reserved = if spare == 0 { 0 } else { framed(spare) };
        if !self.has_framed_room(framed(bytes) + reserved)? {
            return Ok(Pushed::Full);
        }
        let mut position = self.produced;
        for part in [&length.to_le_bytes()[..], parts[0], parts[1]] {
            self.channel.write(position, part);
            position += part.len() as u64;
        }
        self.produced += framed(bytes);
        // Release: the message is written before its position is published.
        self.channel.produced().store(self.produced, Ordering::Release);
        Ok(Pushed::Done)
    }

    /// Wakes the consumer if it sleeps: one system call in that case, none otherwise.
    pub fn wake(&self) {
        if self.fork_guard.is_child() {
            return;
        }
        // `produced` is stored before `sleeps` is loaded; see the documentation of [`ring`](super).
        fence(Ordering::SeqCst);
        let sleeps = self.channel.sleeps();
        if sleeps.load(Ordering::Relaxed) == AWAKE {
            return;
        }
        match sleeps.swap(AWAKE, Ordering::SeqCst) {
            AWAKE => {}
            ON_FUTEX => futex::wake(sleeps),
            // Any other value written by the peer rings the bell.
            _ => self.bell.ring(),
        }
    }

    /// Requests a ring of the bell once there is room. Returns true if there is room for a message of `bytes` already.
    ///
    /// # Errors
    /// [`RingError::Position`].
    pub fn want_room(&mut self, bytes: u64) -> Result<bool, RingError> {
        self.channel.wants_room().store(1, Ordering::Relaxed);
        // `wants_room` is stored before `consumed` is loaded; see the documentation of [`ring`](super).
        fence(Ordering::SeqCst);
        self.has_room(bytes)
    }

    /// Whether a message of `bytes` fits.
    fn has_room(&mut self, bytes: u64) -> Result<bool, RingError> {
        self.has_framed_room(framed(bytes))
    }

    fn has_framed_room(&mut self, framed_bytes: u64) -> Result<bool, RingError> {
        if self.room() < framed_bytes {
            self.consumed = self.load_consumed()?;
        }
        Ok(self.room() >= framed_bytes)
    }

    fn room(&self) -> u64 {
        self.channel.capacity() - (self.produced - self.consumed)
    }

    /// Loads and checks the peer's position. Acquire: what the peer has read may be overwritten.
    fn load_consumed(&self) -> Result<u64, RingError> {
        let position = self.channel.consumed().load(Ordering::Acquire);
        let (least, most) = (self.consumed, self.produced);
        if !(least..=most).contains(&position) || !position.is_multiple_of(ALIGNMENT) {
            return Err(RingError::Position { position, least, most });
        }
        Ok(position)
    }
}
