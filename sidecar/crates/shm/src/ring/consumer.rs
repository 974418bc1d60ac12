//! The consumer of one direction of a ring.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::bell::Bell;
use super::memory::{ALIGNMENT, Channel, LENGTH_BYTES, framed};
use super::{RingError, futex};

/// Reads messages. It has one user at a time; share it behind a lock.
#[derive(Debug)]
pub struct Consumer {
    channel: Channel,
    bell: Arc<Bell>,
    /// This side's position; never read back from shared memory.
    consumed: u64,
    /// The last accepted position of the peer.
    produced: u64,
    /// The length of the next message, once it has been loaded.
    next_bytes: Option<u32>,
}

/// How a consumer waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// By [`Consumer::sleep`].
    Futex,
    /// By waiting until the bell is readable.
    Bell,
}

impl Consumer {
    pub(super) fn new(channel: Channel, bell: Arc<Bell>) -> Self {
        Self { channel, bell, consumed: 0, produced: 0, next_bytes: None }
    }

    /// Pops the next message into `message`, replacing its contents. Returns false if the ring is empty.
    ///
    /// # Errors
    /// [`RingError::Position`], [`RingError::Length`]: the peer violated the layout of the ring.
    pub fn pop(&mut self, message: &mut Vec<u8>) -> Result<bool, RingError> {
        let Some(length) = self.next_bytes()? else { return Ok(false) };
        message.clear();
        message.resize(length, 0);
        self.pop_to(0, message)?;
        Ok(true)
    }

    /// The length of the next message in bytes, or `None` if the ring is empty. The length is loaded once: the peer cannot
    /// change it afterwards.
    ///
    /// # Errors
    /// [`RingError::Position`], [`RingError::Length`]: the peer violated the layout of the ring.
    pub fn next_bytes(&mut self) -> Result<Option<usize>, RingError> {
        if let Some(known) = self.next_bytes {
            return Ok(Some(known as usize));
        }
        if !self.is_ready()? {
            return Ok(None);
        }
        let mut length = [0; LENGTH_BYTES];
        self.channel.read(self.consumed, &mut length);
        let length = u32::from_le_bytes(length);
        let bytes = u64::from(length);
        let limit = self.channel.message_bytes_max().min(self.produced - self.consumed - LENGTH_BYTES as u64);
        if bytes > limit {
            return Err(RingError::Length { bytes, limit });
        }
        self.next_bytes = Some(length);
        Ok(Some(length as usize))
    }

    /// Copies the first bytes of the next message, of which there are as many, without popping it. The peer may change
    /// them afterwards, so read each byte only once.
    ///
    /// # Errors
    /// As [`Self::next_bytes`]; [`RingError::Length`] if the message is shorter or there is none.
    pub fn peek(&mut self, head: &mut [u8]) -> Result<(), RingError> {
        self.check_part(0, head.len())?;
        self.channel.read(self.consumed + LENGTH_BYTES as u64, head);
        Ok(())
    }

    /// Pops the next message and copies those of its bytes that begin at `offset` to `part`.
    ///
    /// # Errors
    /// As [`Self::peek`].
    pub fn pop_to(&mut self, offset: usize, part: &mut [u8]) -> Result<(), RingError> {
        let length = self.check_part(offset, part.len())?;
        self.channel.read(self.consumed + (LENGTH_BYTES + offset) as u64, part);
        // All positions are multiples of 8, so the padding lies within the published bytes.
        self.consumed += framed(length as u64);
        self.next_bytes = None;
        // Release: the copy happens before the store that allows the peer to overwrite the bytes.
        self.channel.consumed().store(self.consumed, Ordering::Release);
        self.notify_room();
        Ok(())
    }

    /// The length of the next message, which has these bytes.
    fn check_part(&mut self, offset: usize, bytes: usize) -> Result<usize, RingError> {
        let length = self.next_bytes()?.unwrap_or(0);
        let end = offset.saturating_add(bytes);
        if end > length {
            return Err(RingError::Length { bytes: end as u64, limit: length as u64 });
        }
        Ok(length)
    }

    /// Whether there is a message.
    ///
    /// # Errors
    /// [`RingError::Position`]: the peer violated the layout of the ring.
    pub fn is_ready(&mut self) -> Result<bool, RingError> {
        if self.produced == self.consumed {
            self.produced = self.load_produced()?;
        }
        Ok(self.produced != self.consumed)
    }

    /// Announces that this consumer is going to wait, so that the next message wakes it. Returns false if there is a
    /// message already; do not wait in that case.
    ///
    /// # Errors
    /// [`RingError::Position`]: the peer violated the layout of the ring.
    pub fn arm(&mut self, wait: Wait) -> Result<bool, RingError> {
        let word = match wait {
            Wait::Futex => ON_FUTEX,
            Wait::Bell => ON_BELL,
        };
        self.channel.sleeps().store(word, Ordering::SeqCst);
        // The state is stored before `produced` is loaded; see "Sleeping and waking" in the documentation of
        // [`ring`](super).
        fence(Ordering::SeqCst);
        let ready = self.is_ready()?;
        if ready {
            self.disarm();
        }
        Ok(!ready)
    }

    /// Announces that this consumer is awake, so that producers make no system call.
    pub fn disarm(&self) {
        self.channel.sleeps().store(AWAKE, Ordering::SeqCst);
    }

    /// Sleeps, after [`Consumer::arm`] with [`Wait::Futex`], until a message arrives, [`Kick`] is used, or the timeout
    /// expires. May return early.
    pub fn sleep(&self, timeout: Duration) {
        futex::wait(self.channel.sleeps(), ON_FUTEX, timeout);
        self.disarm();
    }

    /// A handle that wakes this consumer from within its process.
    #[must_use]
    pub fn kick(&self) -> Kick {
        Kick { channel: self.channel.clone() }
    }

    /// Rings the bell if the producer waits for room.
    fn notify_room(&self) {
        // `consumed` is stored before `wants_room` is loaded; see the documentation of [`ring`](super).
        fence(Ordering::SeqCst);
        let wants_room = self.channel.wants_room();
        if wants_room.load(Ordering::Relaxed) != 0 && wants_room.swap(0, Ordering::SeqCst) != 0 {
            self.bell.ring();
        }
    }

    /// Loads and checks the peer's position. Acquire: the messages before it are complete.
    fn load_produced(&self) -> Result<u64, RingError> {
        let position = self.channel.produced().load(Ordering::Acquire);
        let (least, most) = (self.produced, self.consumed + self.channel.capacity());
        if !(least..=most).contains(&position) || !position.is_multiple_of(ALIGNMENT) {
            return Err(RingError::Position { position, least, most });
        }
        Ok(position)
    }
}

/// Wakes a consumer of the same process from [`Consumer::sleep`].
#[derive(Clone, Debug)]
pub struct Kick {
    channel: Channel,
}

impl Kick {
    /// Wakes the consumer if it sleeps. Store what it should see before this call; the consumer must check for it
    /// between [`Consumer::arm`] and [`Consumer::sleep`].
    pub fn now(&self) {
        let sleeps = self.channel.sleeps();
        // The consumer may sleep although the word says awake: a peer may have died between changing the word and the
        // wake-up.
        let _ = sleeps.compare_exchange(ON_FUTEX, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
        futex::wake(sleeps);
    }
}

/// The consumer is awake and polls the ring.
pub(super) const AWAKE: u32 = 0;
/// The consumer sleeps on the futex.
pub(super) const ON_FUTEX: u32 = 1;
/// The consumer waits for the bell.
pub(super) const ON_BELL: u32 = 2;
