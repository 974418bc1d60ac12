//! The send queue of one link.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use ronde_wire::control::Purpose;
use ronde_wire::frame::{CHUNK_HEADER_BYTES, HEADER_BYTES};
use ronde_wire::limits::{CHUNK_BYTES_MAX, CONTROL_FRAME_BYTES_MAX, WINDOW_MAX};
use ronde_wire::{Frame, FrameKind, SidecarIndex};
use tokio::sync::Notify;

use crate::port::{Outgoing, SendError};

/// The limit of one link's queue in bytes.
pub(crate) fn outbox_bytes_max(purpose: Purpose) -> usize {
    match purpose {
        Purpose::Control => CONTROL_OUTBOX_BYTES_MAX,
        Purpose::Data(_) => LANE_OUTBOX_BYTES_MAX,
    }
}

/// A bounded queue between a port's owner, which must not block, and the link's writer.
pub(super) struct Outbox {
    queue: Mutex<Queue>,
    changed: Notify,
    limit_bytes: usize,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Outgoing>,
    /// Bytes queued that the connection has not accepted yet.
    bytes: usize,
    close_reason: Option<String>,
    /// Ask the peer to replace the connection, before anything queued is sent.
    renew: bool,
}

/// What the writer does next.
pub(super) enum OutboxItem {
    /// Write these buffers in order.
    Write(Batch),
    /// Everything is written: close with this reason.
    Close(String),
}

/// Messages combined into one write.
pub(super) struct Batch {
    pub(super) buffers: Vec<Bytes>,
    pub(super) frames: u64,
    pub(super) chunks: u32,
    /// Bytes of frames about streams.
    pub(super) stream_bytes: usize,
    pub(super) bytes: usize,
}

impl Outbox {
    pub(super) fn new(purpose: Purpose) -> Self {
        Self { queue: Mutex::default(), changed: Notify::new(), limit_bytes: outbox_bytes_max(purpose) }
    }

    pub(super) fn push(&self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError> {
        let mut queue = self.lock();
        let bytes = wire_bytes(&message);
        if queue.bytes + bytes > self.limit_bytes {
            return Err(SendError::Full { peer: to, queued_bytes: queue.bytes, limit_bytes: self.limit_bytes });
        }
        queue.bytes += bytes;
        queue.messages.push_back(message);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// Bytes queued that the connection has not accepted yet.
    pub(super) fn queued_bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Has the writer ask the peer, which dialled, to replace the connection.
    pub(super) fn request_replacement(&self) {
        self.lock().renew = true;
        self.changed.notify_one();
    }

    /// Has the writer close the link after the queue is sent.
    pub(super) fn close(&self, reason: &str) {
        self.lock().close_reason.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_one();
    }

    /// Waits for the next item. Only the link's writer calls this.
    pub(super) async fn next(&self) -> OutboxItem {
        loop {
            if let Some(next) = self.take() {
                return next;
            }
            self.changed.notified().await;
        }
    }

    /// Frees the queue space of a batch that the connection has accepted.
    pub(super) fn written(&self, bytes: usize) {
        let mut queue = self.lock();
        queue.bytes = queue.bytes.saturating_sub(bytes);
    }

    fn take(&self) -> Option<OutboxItem> {
        let mut queue = self.lock();
        let renew = std::mem::take(&mut queue.renew);
        if queue.messages.is_empty() && !renew {
            return queue.close_reason.clone().map(OutboxItem::Close);
        }
        let mut builder = BatchBuilder::default();
        if renew {
            builder.small.put_slice(&Frame::renew().header.encode());
        }
        while builder.batch_bytes < BATCH_BYTES {
            let Some(message) = queue.messages.pop_front() else { break };
            builder.add(message);
        }
        Some(OutboxItem::Write(builder.finish()))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // The queue is consistent between any two statements, so a panic elsewhere does not corrupt it.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies small frames into one buffer and references the data of large ones.
#[derive(Default)]
struct BatchBuilder {
    buffers: Vec<Bytes>,
    small: BytesMut,
    frames: u64,
    chunks: u32,
    stream_bytes: usize,
    batch_bytes: usize,
}

impl BatchBuilder {
    fn add(&mut self, message: Outgoing) {
        self.frames += 1;
        self.batch_bytes += wire_bytes(&message);
        match message {
            Outgoing::Frame(frame) => {
                if frame.header.kind == FrameKind::Stream {
                    self.stream_bytes += frame.wire_bytes();
                }
                self.small.put_slice(&frame.header.encode());
                self.add_data(frame.payload);
            }
            Outgoing::Chunk(chunk) => {
                self.chunks += 1;
                self.small.put_slice(&chunk.encode_head());
                self.add_data(chunk.data);
            }
        }
    }

    fn add_data(&mut self, data: Bytes) {
        if data.len() <= COPIED_BYTES_MAX {
            self.small.put_slice(&data);
            return;
        }
        self.buffers.push(self.small.split().freeze());
        self.buffers.push(data);
    }

    fn finish(mut self) -> Batch {
        if !self.small.is_empty() {
            self.buffers.push(self.small.freeze());
        }
        Batch {
            buffers: self.buffers,
            frames: self.frames,
            chunks: self.chunks,
            stream_bytes: self.stream_bytes,
            bytes: self.batch_bytes,
        }
    }
}

fn wire_bytes(message: &Outgoing) -> usize {
    match message {
        Outgoing::Frame(frame) => frame.wire_bytes(),
        Outgoing::Chunk(chunk) => HEADER_BYTES + CHUNK_HEADER_BYTES + chunk.data.len(),
    }
}

/// Two buckets in flight whose windows are full of chunks of the maximum size.
const LANE_OUTBOX_BYTES_MAX: usize = 2 * WINDOW_MAX * (CHUNK_BYTES_MAX + HEADER_BYTES + CHUNK_HEADER_BYTES);
/// Sixteen control frames of the maximum size.
const CONTROL_OUTBOX_BYTES_MAX: usize = 16 * (CONTROL_FRAME_BYTES_MAX + HEADER_BYTES);
/// Up to this size a copy is cheaper than another buffer in the write.
const COPIED_BYTES_MAX: usize = 1 << 10;
/// Approximate size of one write.
const BATCH_BYTES: usize = 256 << 10;
