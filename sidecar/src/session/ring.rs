//! The sidecar's end of a session's ring: the direction that its reader waits for, and the one that the control thread
//! writes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ronde_rpc::{ring, v1};
use ronde_shm::ring::{Bell, Consumer, PeerRing, Producer, Pushed, RingEnd, RingError, Wait};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use crate::session::service::OUTGOING_MAX;

/// A ring that a worker has attached and that is not used yet.
pub(crate) struct AttachedRing {
    /// The memory.
    pub(crate) ring: PeerRing,
    /// The connection that serves as the doorbell.
    pub(crate) bell: std::os::unix::net::UnixStream,
}

impl AttachedRing {
    /// Prepares the ring for use on the control thread's runtime; its reader spins for an expected message for at most
    /// `spin`.
    ///
    /// # Errors
    /// When the doorbell cannot be polled.
    pub(crate) fn open(self, spin: Duration) -> Result<(RingIn, RingOut), String> {
        let bell = Bell::over(self.bell).map_err(|error| error.to_string())?;
        let listening = bell.listen().map_err(|error| error.to_string())?;
        // As a pipe, so that only its readability is polled; see `Bell::listen`.
        let listening = pipe::Receiver::from_owned_fd_unchecked(listening.into())
            .map_err(|error| format!("the sidecar cannot poll the ring's doorbell: {error}"))?;
        let RingEnd { producer, consumer, .. } = self.ring.into_end(bell);
        let waits_for_room = Arc::new(AtomicBool::new(false));
        let incoming = RingIn {
            bell: Some(listening),
            consumer,
            message: Vec::new(),
            spin,
            expected: None,
            room: Arc::clone(&waits_for_room),
        };
        let outgoing = RingOut { producer, backlog: VecDeque::new(), message: Vec::new(), waits_for_room };
        Ok((incoming, outgoing))
    }
}

/// The direction from the worker.
pub(crate) struct RingIn {
    /// `None` once the worker has closed it.
    bell: Option<pipe::Receiver>,
    consumer: Consumer,
    /// The buffer of the last message.
    message: Vec<u8>,
    /// How long the reader spins for the next message before it parks on the bell.
    spin: Duration,
    /// When it stops spinning, if a message is expected soon.
    expected: Option<Instant>,
    room: Arc<AtomicBool>,
}

impl RingIn {
    /// Returns the next message, if there is one.
    ///
    /// # Errors
    /// When the worker broke the ring.
    pub(crate) fn pop(&mut self) -> Result<Option<v1::ClientMessage>, String> {
        if !self.consumer.pop(&mut self.message).map_err(|error| error.to_string())? {
            return Ok(None);
        }
        let message = ring::decode(&self.message);
        message.map(Some).map_err(|error| format!("its ring contains an invalid message: {error}"))
    }

    /// Starts to spin for the next message, because it may arrive soon.
    pub(crate) fn expect_next(&mut self) {
        self.expected = Instant::now().checked_add(self.spin);
    }

    /// Returns whether the reader still spins for the next message.
    pub(crate) fn is_spinning(&self) -> bool {
        self.expected.is_some_and(|until| Instant::now() < until)
    }

    /// Returns whether the ring is empty, so that the reader may park on the bell.
    ///
    /// # Errors
    /// When the worker broke the ring.
    pub(crate) fn arm(&mut self) -> Result<bool, RingError> {
        self.consumer.arm(Wait::Bell)
    }

    /// Waits for the bell. Cancel safe.
    pub(crate) async fn rung(&mut self) {
        let Some(bell) = &mut self.bell else { return std::future::pending().await };
        if !matches!(bell.read(&mut [0; RUNG_MAX]).await, Ok(1..)) {
            // The worker has closed it; its stream reports why.
            self.bell = None;
        }
    }

    /// Returns whether messages for the worker wait for room, which the bell may have announced.
    pub(crate) fn is_awaited(&self) -> bool {
        self.room.load(Ordering::Relaxed)
    }
}

/// The direction to the worker.
pub(crate) struct RingOut {
    producer: Producer,
    /// Messages that wait for room, oldest first; at most [`OUTGOING_MAX`].
    backlog: VecDeque<v1::ServerMessage>,
    /// The buffer of the last message.
    message: Vec<u8>,
    waits_for_room: Arc<AtomicBool>,
}

impl RingOut {
    /// Sends a message, or queues it until there is room.
    ///
    /// # Errors
    /// When the session must end: the worker does not read, or broke the ring.
    pub(crate) fn send(&mut self, message: v1::ServerMessage) -> Result<(), String> {
        if self.backlog.is_empty() && self.push(&message)? == Pushed::Done {
            self.producer.wake();
            return Ok(());
        }
        if self.backlog.len() >= OUTGOING_MAX {
            return Err(NOT_READING.to_owned());
        }
        self.backlog.push_back(message);
        self.flush()
    }

    /// Returns whether no message waits for room. If some do, the worker's bell announces room.
    pub(crate) fn has_room(&self) -> bool {
        self.backlog.is_empty()
    }

    /// Sends queued messages, as far as there is room.
    ///
    /// # Errors
    /// Those of [`RingOut::send`].
    pub(crate) fn flush(&mut self) -> Result<(), String> {
        while let Some(message) = self.backlog.pop_front() {
            if self.push(&message)? == Pushed::Full && !self.retry(&message)? {
                self.backlog.push_front(message);
                break;
            }
        }
        self.waits_for_room.store(!self.backlog.is_empty(), Ordering::Relaxed);
        self.producer.wake();
        Ok(())
    }

    fn push(&mut self, message: &v1::ServerMessage) -> Result<Pushed, String> {
        ring::encode(message, &mut self.message);
        self.producer.push(&self.message).map_err(|error| error.to_string())
    }

    /// Requests a wake-up for room, and uses room that appeared in this moment.
    fn retry(&mut self, message: &v1::ServerMessage) -> Result<bool, String> {
        let room = self.producer.want_room(self.message.len() as u64).map_err(|error| error.to_string())?;
        Ok(room && self.push(message)? == Pushed::Done)
    }
}

/// Why a session with a worker that does not read ends.
pub(crate) const NOT_READING: &str = "it does not read the messages of its session";
/// Wake-ups handled at once; more are handled in the next turn.
const RUNG_MAX: usize = 1_024;
