//! The rings of connections: connecting, sending and receiving.
//!
//! Everything that comes out of a ring was written by the sidecar or by the peer's process, and is checked here.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ronde_shm::ring::{Pushed, RingEnd, WorkerRing, framed};
use ronde_shm::{MemClient, MemClientConfig, StreamRequest};
use ronde_wire::limits;
use ronde_wire::stream::{DataHeader, STREAM_HEADER_BYTES, SidecarMessage, WorkerMessage};

use crate::buffer::Buffer;
use crate::error::Error;
use crate::settings::Settings;

/// A send or a receive that NCCL has requested.
#[derive(Debug, Default)]
pub(crate) struct Operation {
    is_done: AtomicBool,
    bytes: AtomicUsize,
}

impl Operation {
    /// The number of bytes that were sent or received, once it is done.
    pub(crate) fn done(&self) -> Option<usize> {
        self.is_done.load(Ordering::Acquire).then(|| self.bytes.load(Ordering::Relaxed))
    }

    fn finish(&self, bytes: usize) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.is_done.store(true, Ordering::Release);
    }
}

/// A ring of this process with the sidecar's other end.
pub(crate) struct Ring {
    end: RingEnd,
    bell: UnixStream,
    /// When the bell was polled last.
    polled: Instant,
    is_hung_up: bool,
}

impl Ring {
    /// Makes a ring and hands it to the sidecar, for a lane.
    pub(crate) fn open(settings: &Settings, ring_bytes: u64, lane: u16) -> Result<Self, Error> {
        let config = MemClientConfig { timeout: SIDECAR_TIMEOUT, result_bytes_max: 0 };
        let Settings { socket, worker, token, .. } = settings;
        let client = MemClient::connect(socket, config)?;
        let request = StreamRequest { worker: *worker, token: *token, capacity: ring_bytes, lane };
        let end = client.stream(request, WorkerRing::create(ring_bytes)?)?;
        let bell = end.bell.listen()?;
        Ok(Self { end, bell, polled: Instant::now(), is_hung_up: false })
    }

    /// Writes a message, for which there is room.
    fn push(&mut self, message: &[u8]) -> Result<Pushed, Error> {
        let pushed = self.end.producer.push(message)?;
        if pushed == Pushed::Done {
            self.end.producer.wake();
        }
        Ok(pushed)
    }

    /// Writes the first message of a ring.
    pub(crate) fn begin(&mut self, message: &WorkerMessage) -> Result<(), Error> {
        self.push(&message.encode()).map(drop)
    }

    /// Reads a message other than data.
    pub(crate) fn message(&mut self) -> Result<Option<SidecarMessage>, Error> {
        let Some(bytes) = self.end.consumer.next_bytes()? else { return self.check().map(|()| None) };
        let mut message = vec![0; bytes];
        self.end.consumer.pop_to(0, &mut message)?;
        match SidecarMessage::decode(&message)? {
            SidecarMessage::Failed(reason) => Err(Error::Over(reason)),
            message => Ok(Some(message)),
        }
    }

    /// Checks now and then whether the sidecar has closed its end; what it wrote before is read first.
    fn check(&mut self) -> Result<(), Error> {
        if self.is_hung_up {
            return Err(Error::Over("the sidecar has closed it or has ended; its log says why".to_owned()));
        }
        if self.polled.elapsed() < POLL_INTERVAL {
            return Ok(());
        }
        self.polled = Instant::now();
        match self.bell.read(&mut [0; 64]) {
            Ok(1..) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // The last messages may have come since the ring was empty.
            Ok(_) | Err(_) => self.is_hung_up = true,
        }
        Ok(())
    }
}

/// The sending end of a connection.
pub(crate) struct Sender {
    ring: Ring,
    part_bytes: usize,
    queue: VecDeque<Outgoing>,
}

struct Outgoing {
    operation: Arc<Operation>,
    buffer: Buffer,
    sent: usize,
}

impl Sender {
    /// Sends over a ring whose receiver has this window.
    pub(crate) fn new(ring: Ring, ring_bytes: u64, window: u32) -> Result<Self, Error> {
        let part_bytes = (ring_bytes / RING_PARTS).min(u64::from(window) / WINDOW_PARTS) as usize;
        if part_bytes <= STREAM_HEADER_BYTES {
            return Err(Error::Over(format!("the receiver's window has {window} bytes only")));
        }
        Ok(Self { ring, part_bytes, queue: VecDeque::new() })
    }

    /// Queues a message; `None` if there are too many already.
    pub(crate) fn send(&mut self, buffer: Buffer) -> Result<Option<Arc<Operation>>, Error> {
        if u32::try_from(buffer.len()).is_err() {
            return Err(Error::Usage(format!("a message of {} bytes is too long", buffer.len())));
        }
        if self.queue.len() >= REQUESTS_MAX {
            self.progress()?;
            return Ok(None);
        }
        let operation = Arc::new(Operation::default());
        self.queue.push_back(Outgoing { operation: Arc::clone(&operation), buffer, sent: 0 });
        self.progress()?;
        Ok(Some(operation))
    }

    /// Writes to the ring as far as there is room.
    pub(crate) fn progress(&mut self) -> Result<(), Error> {
        let mut has_written = false;
        while let Some(next) = self.queue.front_mut() {
            let total = next.buffer.len();
            let end = total.min(next.sent + self.part_bytes - STREAM_HEADER_BYTES);
            let header = DataHeader { offset: narrow(next.sent), total: narrow(total) }.encode();
            let parts = [&header[..], next.buffer.part(next.sent, end)];
            // There is always room left for the message that finishes.
            if self.ring.end.producer.push_parts(parts, STREAM_HEADER_BYTES as u64)? == Pushed::Full {
                break;
            }
            has_written = true;
            next.sent = end;
            if end == total {
                next.operation.finish(total);
                self.queue.pop_front();
            }
        }
        if has_written {
            self.ring.end.producer.wake();
        }
        // The sidecar writes only that the connection is over.
        match self.ring.message()? {
            None => Ok(()),
            Some(message) => Err(Error::Over(format!("the sidecar sent {message:?} to a sender"))),
        }
    }

    /// Notifies the receiver that nothing follows, if all was sent.
    pub(crate) fn close(mut self) {
        // If the ring is broken or the sidecar has ended, nobody is left to notify.
        if self.queue.is_empty() {
            let _ = self.ring.push(&WorkerMessage::Finish.encode());
        }
    }
}

/// The receiving end of a connection.
pub(crate) struct Receiver {
    ring: Ring,
    window: u64,
    queue: VecDeque<Incoming>,
    /// Bytes of the ring that were read and not granted again.
    unreturned: u64,
}

struct Incoming {
    operation: Arc<Operation>,
    buffer: Buffer,
    received: usize,
    /// The bytes of the message, once its first part has come.
    total: Option<usize>,
}

impl Receiver {
    /// Receives over a ring.
    pub(crate) fn new(ring: Ring, ring_bytes: u64) -> Self {
        let window = ring_bytes - limits::STREAM_RING_RESERVE_BYTES;
        Self { ring, window, queue: VecDeque::new(), unreturned: 0 }
    }

    /// Queues a buffer for the next message; `None` if there are too many already.
    pub(crate) fn receive(&mut self, buffer: Buffer) -> Result<Option<Arc<Operation>>, Error> {
        if self.queue.len() >= REQUESTS_MAX {
            self.progress()?;
            return Ok(None);
        }
        let operation = Arc::new(Operation::default());
        self.queue.push_back(Incoming { operation: Arc::clone(&operation), buffer, received: 0, total: None });
        self.progress()?;
        Ok(Some(operation))
    }

    /// Reads from the ring as far as there are messages and buffers.
    pub(crate) fn progress(&mut self) -> Result<(), Error> {
        while let Some(bytes) = self.ring.end.consumer.next_bytes()? {
            let Some(next) = self.queue.front_mut() else { break };
            let mut head = [0; STREAM_HEADER_BYTES];
            self.ring.end.consumer.peek(&mut head)?;
            let Some(header) = DataHeader::decode(&head) else {
                return match self.ring.message()? {
                    Some(SidecarMessage::Finished) => Err(Error::Over("the sender has closed it".to_owned())),
                    message => Err(Error::Over(format!("the sidecar sent {message:?} to a receiver"))),
                };
            };
            let end = next.end_of(header, bytes - STREAM_HEADER_BYTES)?;
            let part = next.buffer.part_mut(next.received, end);
            self.ring.end.consumer.pop_to(STREAM_HEADER_BYTES, part)?;
            next.received = end;
            self.unreturned += framed(bytes as u64);
            if next.total == Some(end) {
                next.operation.finish(end);
                self.queue.pop_front();
            }
        }
        if self.unreturned >= self.window / WINDOW_PARTS
            && self.ring.push(&WorkerMessage::Credit(self.unreturned).encode())? == Pushed::Done
        {
            self.unreturned = 0;
        }
        if self.queue.is_empty() { Ok(()) } else { self.ring.check() }
    }
}

impl Incoming {
    /// The number of bytes received after a part; the sender's numbers are checked.
    fn end_of(&mut self, header: DataHeader, bytes: usize) -> Result<usize, Error> {
        let (offset, total) = (header.offset as usize, header.total as usize);
        if offset != self.received || self.total.is_some_and(|known| known != total) {
            return Err(Error::Over("the sender's parts of a message do not follow each other".to_owned()));
        }
        if total > self.buffer.len() {
            let room = self.buffer.len();
            return Err(Error::Over(format!("a message of {total} bytes does not fit a buffer of {room}")));
        }
        let end = offset.saturating_add(bytes);
        if end > total || (bytes == 0 && total > 0) {
            return Err(Error::Over("a part of a message is longer than the message, or empty".to_owned()));
        }
        self.total = Some(total);
        Ok(end)
    }
}

/// A length that was checked to fit.
fn narrow(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Timeout of one exchange with the sidecar.
pub(crate) const SIDECAR_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a connection without news checks whether the sidecar has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Parts of a message that a ring holds: small enough for the cache, and for sidecar and worker to work at the same time.
const RING_PARTS: u64 = 8;
/// A part takes at most one in so many of the receiver's window, and so much is read before it is granted again.
const WINDOW_PARTS: u64 = 4;
/// Requests of a connection that are not complete. NCCL has 32.
const REQUESTS_MAX: usize = 1_024;
