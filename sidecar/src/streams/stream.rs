//! One stream: the ring of its worker, and its state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ronde_shm::ring::{Bell, Pushed, RingEnd};
use ronde_wire::stream::SidecarMessage;
use ronde_wire::{SidecarIndex, limits};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::gate::{NewStream, Permit};

/// A stream's or a listener's number in its lane; never reused.
pub(super) type Number = u64;

/// One stream or listener.
pub(super) struct Stream {
    pub(super) ring: RingEnd,
    capacity: u64,
    pub(super) role: Role,
    /// When the worker's end was closed; what it wrote before is still sent.
    pub(super) gone_since: Option<Instant>,
    /// Whether it is in the table's queue.
    pub(super) is_queued: bool,
    rung: Arc<AtomicBool>,
    listening: AbortHandle,
    pub(super) permit: Permit,
}

/// What a stream does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Its worker's first message decides.
    New,
    /// It is a listener.
    Listener,
    /// It waits for the next stream of a listener.
    Accepting(Number),
    /// It waits for the answer of the peer, to this listener there.
    Connecting(SidecarIndex, Number),
    /// It sends.
    Sending {
        /// To whom.
        peer: SidecarIndex,
        /// The peer's number.
        remote: Number,
        /// Bytes of the receiver's ring that may be sent.
        credit: u64,
        /// The first credit.
        window: u64,
    },
    /// It receives.
    Receiving {
        /// From whom.
        peer: SidecarIndex,
        /// The peer's number.
        remote: Number,
        /// Bytes that the peer may still send.
        granted: u64,
    },
    /// It is over; the worker has been notified.
    Ended,
}

impl Role {
    /// The peer, if there is one.
    pub(super) fn peer(&self) -> Option<SidecarIndex> {
        match self {
            Self::Connecting(peer, _) | Self::Sending { peer, .. } | Self::Receiving { peer, .. } => Some(*peer),
            Self::New | Self::Listener | Self::Accepting(_) | Self::Ended => None,
        }
    }
}

/// What a bell reports to the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BellEvent {
    /// The worker has rung.
    Rung(Number),
    /// The worker's end is closed.
    Gone(Number),
}

impl Stream {
    /// Begins to use a ring; its bell reports to `events`. At most two reports of one stream are in the queue.
    ///
    /// # Errors
    /// When the bell cannot be polled.
    pub(super) fn open(new: NewStream, number: Number, events: mpsc::Sender<BellEvent>) -> Result<Self, String> {
        let bell = Bell::over(new.bell).map_err(|error| error.to_string())?;
        let listening = bell.listen().map_err(|error| error.to_string())?;
        // As a pipe, so that only its readability is polled; see `Bell::listen`.
        let mut listening = pipe::Receiver::from_owned_fd_unchecked(listening.into())
            .map_err(|error| format!("the sidecar cannot poll a stream's bell: {error}"))?;
        let rung = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&rung);
        let listen = async move {
            while let Ok(1..) = listening.read(&mut [0; RUNG_MAX]).await {
                if !flag.swap(true, Ordering::Relaxed) && events.send(BellEvent::Rung(number)).await.is_err() {
                    return;
                }
            }
            // The lane may have ended.
            let _ = events.send(BellEvent::Gone(number)).await;
        };
        let (capacity, ring) = (new.ring.capacity(), new.ring.into_end(bell));
        Ok(Self {
            ring,
            capacity,
            role: Role::New,
            gone_since: None,
            is_queued: false,
            rung,
            listening: tokio::spawn(listen).abort_handle(),
            permit: new.permit,
        })
    }

    /// Takes note of a report of the bell, so that it may report again.
    pub(super) fn take_bell(&self) {
        self.rung.store(false, Ordering::Relaxed);
    }

    /// The bytes of the worker's ring that a peer may fill.
    pub(super) fn window(&self) -> u64 {
        self.capacity - limits::STREAM_RING_RESERVE_BYTES
    }

    /// Writes a message for the worker. Messages other than data have room that is never granted.
    ///
    /// # Errors
    /// The worker broke the ring, or granted room that there is not.
    pub(super) fn push(&mut self, message: &[u8]) -> Result<(), String> {
        match self.ring.producer.push(message) {
            Ok(Pushed::Done) => {
                self.ring.producer.wake();
                Ok(())
            }
            Ok(Pushed::Full) => Err("its ring has no room, although it was granted".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Notifies the worker that the stream is over, and why. It may be gone, or have filled its ring with garbage: its end of
    /// the bell is closed in any case when the stream is dropped.
    pub(super) fn fail(&mut self, reason: &str) {
        self.role = Role::Ended;
        let message = SidecarMessage::Failed(reason.to_owned()).encode();
        if let Err(error) = self.push(&message) {
            tracing::debug!(worker = self.permit.worker.0, error, "the end of a stream is not reported to its worker");
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

/// Wake-ups handled at once.
const RUNG_MAX: usize = 64;
