//! The reading end of one direction.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::bell::Bell;
use super::memory::{ALIGNMENT, Channel, LENGTH_BYTES, framed};
use super::{RingError, futex};

/// Reads messages. One at a time: whoever shares it locks it.
#[derive(Debug)]
pub struct Consumer {
    channel: Channel,
    bell: Arc<Bell>,
    /// The own position: never read back from shared memory.
    consumed: u64,
    /// The peer's position as accepted last.
    produced: u64,
}

/// How a consumer waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// In [`Consumer::sleep`].
    Futex,
    /// Until the bell is readable.
    Bell,
}

impl Consumer {
    pub(super) fn new(channel: Channel, bell: Arc<Bell>) -> Self {
        Self { channel, bell, consumed: 0, produced: 0 }
    }

    /// Takes the next message into `message`, whose content is replaced. False when there is none.
    ///
    /// # Errors
    /// [`RingError::Position`], [`RingError::Length`]: the peer broke the ring.
    pub fn pop(&mut self, message: &mut Vec<u8>) -> Result<bool, RingError> {
        if !self.is_ready()? {
            return Ok(false);
        }
        let mut length = [0; LENGTH_BYTES];
        self.channel.read(self.consumed, &mut length);
        let length = u32::from_le_bytes(length);
        let bytes = u64::from(length);
        let limit = self.channel.message_bytes_max().min(self.produced - self.consumed - LENGTH_BYTES as u64);
        if bytes > limit {
            return Err(RingError::Length { bytes, limit });
        }
        message.clear();
        message.resize(length as usize, 0);
        self.channel.read(self.consumed + LENGTH_BYTES as u64, message);
        // All positions are multiples of 8, so the padding is within what is published as well.
        self.consumed += framed(bytes);
        // Release: the copy comes before the position that lets the peer write there again.
        self.channel.consumed().store(self.consumed, Ordering::Release);
        self.notify_room();
        Ok(true)
    }

    /// Whether there is a message.
    ///
    /// # Errors
    /// [`RingError::Position`]: the peer broke the ring.
    pub fn is_ready(&mut self) -> Result<bool, RingError> {
        if self.produced == self.consumed {
            self.produced = self.load_produced()?;
        }
        Ok(self.produced != self.consumed)
    }

    /// Says how this consumer is going to wait; what comes from now on wakes it. False when there is a message already:
    /// then do not wait.
    ///
    /// # Errors
    /// [`RingError::Position`]: the peer broke the ring.
    pub fn arm(&mut self, wait: Wait) -> Result<bool, RingError> {
        let word = match wait {
            Wait::Futex => ON_FUTEX,
            Wait::Bell => ON_BELL,
        };
        self.channel.sleeps().store(word, Ordering::SeqCst);
        // The word comes before the look at the producer: see the module's header.
        fence(Ordering::SeqCst);
        let ready = self.is_ready()?;
        if ready {
            self.disarm();
        }
        Ok(!ready)
    }

    /// Awake: what comes costs the producer no system call.
    pub fn disarm(&self) {
        self.channel.sleeps().store(AWAKE, Ordering::SeqCst);
    }

    /// Sleeps, after [`Consumer::arm`] with [`Wait::Futex`], until a message comes, [`Kick`] is used or the time is over.
    /// May return early.
    pub fn sleep(&self, timeout: Duration) {
        futex::wait(self.channel.sleeps(), ON_FUTEX, timeout);
        self.disarm();
    }

    /// What wakes this consumer for a reason of its own process.
    #[must_use]
    pub fn kick(&self) -> Kick {
        Kick { channel: self.channel.clone() }
    }

    /// Rings when the producer waits for room.
    fn notify_room(&self) {
        // Our position comes before the look at the wish: see the module's header.
        fence(Ordering::SeqCst);
        let wants_room = self.channel.wants_room();
        if wants_room.load(Ordering::Relaxed) != 0 && wants_room.swap(0, Ordering::SeqCst) != 0 {
            self.bell.ring();
        }
    }

    /// The peer's position, loaded once and checked. Acquire: the messages before it are whole.
    fn load_produced(&self) -> Result<u64, RingError> {
        let position = self.channel.produced().load(Ordering::Acquire);
        let (least, most) = (self.produced, self.consumed + self.channel.capacity());
        if !(least..=most).contains(&position) || !position.is_multiple_of(ALIGNMENT) {
            return Err(RingError::Position { position, least, most });
        }
        Ok(position)
    }
}

/// Wakes a consumer of the same process that is in [`Consumer::sleep`].
#[derive(Clone, Debug)]
pub struct Kick {
    channel: Channel,
}

impl Kick {
    /// Wakes it, if it sleeps. What it is to see must be in place before; and it must look for that once more between
    /// [`Consumer::arm`] and [`Consumer::sleep`].
    pub fn now(&self) {
        let sleeps = self.channel.sleeps();
        // It may sleep although the word says that it is awake: a peer that died between changing the word and waking it.
        let _ = sleeps.compare_exchange(ON_FUTEX, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
        futex::wake(sleeps);
    }
}

/// Looks at the ring by itself.
pub(super) const AWAKE: u32 = 0;
/// Sleeps on the word.
pub(super) const ON_FUTEX: u32 = 1;
/// Sleeps until the bell rings.
pub(super) const ON_BELL: u32 = 2;
