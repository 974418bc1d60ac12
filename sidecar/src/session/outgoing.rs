//! The stream of messages to a worker, and the results that wait for room in it.
//!
//! A result inside messages is cut into parts, which are copied out of the result's slot only as far as the worker reads:
//! a worker that does not read keeps its slot, not copies in the sidecar's memory.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use ronde_rpc::v1;
use ronde_rpc::v1::server_message::Message;
use ronde_shm::OwnedSegment;
use ronde_wire::RequestId;
use tokio::sync::{Notify, mpsc};
use tokio_stream::Stream;
use tonic::Status;

use crate::session::request::ResultId;

type Item = Result<v1::ServerMessage, Status>;

/// The control thread's end.
pub(crate) struct Outgoing {
    sender: Option<mpsc::Sender<Item>>,
    state: Arc<State>,
}

/// The end that sends to the worker.
pub(crate) struct OutgoingStream {
    receiver: mpsc::Receiver<Item>,
    state: Arc<State>,
}

/// Observes the control thread's end, without keeping it open.
pub(crate) struct OutgoingWatch {
    sender: mpsc::WeakSender<Item>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Parts of results in the queue.
    parts: AtomicUsize,
    /// Whether another part waits for room.
    waits: AtomicBool,
    /// Room for another part, or the end of the control thread's end.
    changed: Notify,
}

/// Creates a stream whose queue has room for this many messages.
pub(crate) fn outgoing(messages_max: usize) -> (Outgoing, OutgoingStream) {
    let (sender, receiver) = mpsc::channel(messages_max);
    let state = Arc::<State>::default();
    (Outgoing { sender: Some(sender), state: Arc::clone(&state) }, OutgoingStream { receiver, state })
}

impl Outgoing {
    /// Queues a message. Returns whether there was room, or nobody who could read.
    pub(crate) fn try_send(&self, item: Item) -> bool {
        let Some(sender) = &self.sender else { return true };
        !matches!(sender.try_send(item), Err(mpsc::error::TrySendError::Full(_)))
    }

    /// Queues a message, and waits for room.
    pub(crate) async fn send(&self, item: Item) {
        if let Some(sender) = &self.sender {
            // The worker may be gone.
            let _ = sender.send(item).await;
        }
    }

    /// Returns whether there is room for another part. Without room, [`OutgoingWatch::changed`] resolves when there is.
    pub(crate) fn has_room_for_part(&self) -> bool {
        if self.state.parts.load(Ordering::SeqCst) < PARTS_MAX {
            return true;
        }
        self.state.waits.store(true, Ordering::SeqCst);
        // The worker may have read since.
        self.state.parts.load(Ordering::SeqCst) < PARTS_MAX
    }

    /// Counts a part that is queued next.
    pub(crate) fn add_part(&self) {
        self.state.parts.fetch_add(1, Ordering::SeqCst);
    }

    /// Observes this end.
    pub(crate) fn watch(&self) -> Option<OutgoingWatch> {
        let sender = self.sender.as_ref()?.downgrade();
        Some(OutgoingWatch { sender, state: Arc::clone(&self.state) })
    }
}

impl Clone for Outgoing {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), state: Arc::clone(&self.state) }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.sender = None;
        self.state.changed.notify_one();
    }
}

impl OutgoingWatch {
    /// Returns whether the control thread's end is open.
    pub(crate) fn is_open(&self) -> bool {
        self.sender.strong_count() > 0
    }

    /// Waits until there is room for another part that waits, or the control thread's end may be closed. Cancel safe.
    pub(crate) async fn changed(&self) {
        self.state.changed.notified().await;
    }
}

impl OutgoingStream {
    /// The messages that were not read.
    pub(crate) fn unread(&self) -> usize {
        self.receiver.len()
    }
}

#[cfg(test)]
impl OutgoingStream {
    /// Takes a message that is queued, as tests of the control thread do.
    pub(crate) fn try_recv(&mut self) -> Result<Item, mpsc::error::TryRecvError> {
        self.receiver.try_recv()
    }
}

impl Stream for OutgoingStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        let next = ready!(self.receiver.poll_recv(context));
        if let Some(Ok(v1::ServerMessage { message: Some(Message::ResultPart(_)) })) = &next {
            let left = self.state.parts.fetch_sub(1, Ordering::SeqCst) - 1;
            if left <= PARTS_MAX / 2 && self.state.waits.swap(false, Ordering::SeqCst) {
                self.state.changed.notify_one();
            }
        }
        Poll::Ready(next)
    }
}

/// A result that is sent inside messages.
pub(crate) struct InlineResult {
    /// The request.
    pub(crate) request: RequestId,
    /// The result, which keeps its slot until all of it is sent.
    pub(crate) result: ResultId,
    /// The slot's segment.
    pub(crate) segment: Arc<OwnedSegment>,
    /// The first byte that is not sent.
    pub(crate) offset: u64,
    /// The first byte after the result.
    pub(crate) end: u64,
    /// The bytes of the whole result.
    pub(crate) bytes: u64,
}

impl InlineResult {
    /// Copies the next part out of the slot; `None` after the last one.
    pub(crate) fn next_part(&mut self) -> Option<Message> {
        let bytes = (PART_BYTES as u64).min(self.end - self.offset);
        let mut data = vec![0; usize::try_from(bytes).ok().filter(|bytes| *bytes > 0)?];
        if let Err(error) = self.segment.copy_to(self.offset, &mut data) {
            tracing::error!(%error, "a result cannot be read; this is a bug in ronde");
        }
        self.offset += bytes;
        Some(Message::ResultPart(v1::ResultPart { request: self.request.0, data: data.into() }))
    }

    /// Returns whether all of it is sent.
    pub(crate) fn is_sent(&self) -> bool {
        self.offset == self.end
    }
}

/// Bytes of one part of an inline result: the most that the control thread copies at once.
pub(crate) const PART_BYTES: usize = 64 << 10;
/// Parts in the queue of one session: one result of the largest size, so that the writer never waits for the control
/// thread.
pub(crate) const PARTS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    fn part() -> Item {
        Ok(v1::ServerMessage { message: Some(Message::ResultPart(v1::ResultPart::default())) })
    }

    #[tokio::test]
    async fn parts_beyond_the_bound_wait_until_half_of_them_are_read() {
        let (outgoing, mut stream) = outgoing(100);
        let watch = outgoing.watch().expect("it is open");
        for _ in 0..PARTS_MAX {
            assert!(outgoing.has_room_for_part());
            outgoing.add_part();
            assert!(outgoing.try_send(part()));
        }
        assert!(!outgoing.has_room_for_part());
        for _ in 0..PARTS_MAX / 2 - 1 {
            assert!(stream.next().await.is_some());
        }
        let mut changed = Box::pin(watch.changed());
        assert!(std::future::poll_fn(|context| Poll::Ready(changed.as_mut().poll(context).is_pending())).await);
        assert!(stream.next().await.is_some());
        changed.await;
        assert!(outgoing.has_room_for_part() && watch.is_open());
        drop(outgoing);
        watch.changed().await;
        assert!(!watch.is_open());
    }
}
