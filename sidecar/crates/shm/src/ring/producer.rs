//! The writing end of one direction.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::bell::Bell;
use super::consumer::{AWAKE, ON_FUTEX};
use super::memory::{ALIGNMENT, Channel, LENGTH_BYTES, framed};
use super::{RingError, futex};
use crate::fork::ForkGuard;

/// Writes messages. One at a time: whoever shares it locks it.
#[derive(Debug)]
pub struct Producer {
    channel: Channel,
    bell: Arc<Bell>,
    /// The own position: never read back from shared memory.
    produced: u64,
    /// The peer's position as accepted last.
    consumed: u64,
    fork_guard: ForkGuard,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It is published. Nobody has been woken.
    Done,
    /// There is no room; nothing was written.
    Full,
}

impl Producer {
    pub(super) fn new(channel: Channel, bell: Arc<Bell>) -> Self {
        Self { channel, bell, produced: 0, consumed: 0, fork_guard: ForkGuard::new() }
    }

    /// The longest message, in bytes.
    #[must_use]
    pub fn message_bytes_max(&self) -> u64 {
        self.channel.message_bytes_max()
    }

    /// Publishes a message where there is room. [`Producer::wake`] is another step, so that several messages cost one.
    ///
    /// # Errors
    /// [`RingError::TooLong`]; [`RingError::Position`] when the peer broke the ring; [`RingError::UsedAfterFork`].
    pub fn push(&mut self, message: &[u8]) -> Result<Pushed, RingError> {
        self.fork_guard.check()?;
        let (bytes, limit) = (message.len() as u64, self.message_bytes_max());
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= limit);
        let length = length.ok_or(RingError::TooLong { bytes, limit })?;
        if !self.has_room(bytes)? {
            return Ok(Pushed::Full);
        }
        self.channel.write(self.produced, &length.to_le_bytes());
        self.channel.write(self.produced + LENGTH_BYTES as u64, message);
        self.produced += framed(bytes);
        // Published: the message's bytes come before the position.
        self.channel.produced().store(self.produced, Ordering::Release);
        Ok(Pushed::Done)
    }

    /// Wakes the consumer if it sleeps. One system call then, otherwise none.
    pub fn wake(&self) {
        if self.fork_guard.is_child() {
            return;
        }
        // Our position comes before the look at the consumer: see the module's header.
        fence(Ordering::SeqCst);
        let sleeps = self.channel.sleeps();
        if sleeps.load(Ordering::Relaxed) == AWAKE {
            return;
        }
        match sleeps.swap(AWAKE, Ordering::SeqCst) {
            AWAKE => {}
            ON_FUTEX => futex::wake(sleeps),
            // A peer that writes other numbers there rings its own bell.
            _ => self.bell.ring(),
        }
    }

    /// Asks to be rung for when there is room again. True when there is room already for a message of `bytes`.
    ///
    /// # Errors
    /// [`RingError::Position`].
    pub fn want_room(&mut self, bytes: u64) -> Result<bool, RingError> {
        self.channel.wants_room().store(1, Ordering::Relaxed);
        // The wish comes before the look at the consumer's position: see the module's header.
        fence(Ordering::SeqCst);
        self.has_room(bytes)
    }

    /// Whether a message of `bytes` fits now.
    fn has_room(&mut self, bytes: u64) -> Result<bool, RingError> {
        if self.room() < framed(bytes) {
            self.consumed = self.load_consumed()?;
        }
        Ok(self.room() >= framed(bytes))
    }

    fn room(&self) -> u64 {
        self.channel.capacity() - (self.produced - self.consumed)
    }

    /// The peer's position, loaded once and checked. Acquire: what it has read may be overwritten.
    fn load_consumed(&self) -> Result<u64, RingError> {
        let position = self.channel.consumed().load(Ordering::Acquire);
        let (least, most) = (self.consumed, self.produced);
        if !(least..=most).contains(&position) || !position.is_multiple_of(ALIGNMENT) {
            return Err(RingError::Position { position, least, most });
        }
        Ok(position)
    }
}
