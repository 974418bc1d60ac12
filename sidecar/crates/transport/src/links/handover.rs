//! How a link goes over from one connection to the next, without losing, doubling or overtaking a frame.
//!
//! ```text
//! dialler                                              acceptor
//! dials anew; hello that replaces ──────────────────▸  keeps the connection at hand, answers
//! ends its old stream, writes on in the new one  ────▸ has read the old stream to its end: reads on in the new one,
//! has read the old stream to its end: reads on   ◂──── ends its own old stream, writes on in the new one
//! in the new one, closes the old connection
//! ```
//!
//! Each receiver reads the old stream to its end first, and no side ends its stream before it knows that the other has
//! the new connection: the dialler by the answer to its hello, the acceptor by the end of the dialler's stream.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::auth::LinkAuth;
use super::close::CloseCode;
use super::connection::{Connection, RecvHalf, SendHalf};
use super::link::LinkStream;

/// The next connection of a link, while there is one.
#[derive(Default)]
pub(super) struct Handover {
    next: Mutex<Option<NextConnection>>,
    changed: Notify,
    /// One for each old connection that the peer has not closed yet, and this one.
    lingering: Arc<()>,
}

struct NextConnection {
    connection: Connection,
    auth: LinkAuth,
    /// Until the writer has gone over.
    send: Option<SendHalf>,
    /// Until the reader has.
    recv: Option<RecvHalf>,
    /// The acceptor's writer waits for its reader.
    writer_may_switch: bool,
}

impl Handover {
    /// The dialler's: the writer goes over now.
    pub(super) fn begin(&self, stream: LinkStream) {
        self.set_next(stream, true);
    }

    /// The acceptor's: nothing changes until the peer's old stream ends. One that was offered before and not used is
    /// closed.
    pub(super) fn offer(&self, stream: LinkStream) {
        self.set_next(stream, false);
    }

    /// Whether the dialler may go on to another connection: not while it goes over to one.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().is_none()
    }

    /// Whether the acceptor takes another offer: one that the peer has not begun to use is forgotten, one that it has is
    /// not, and old connections do not pile up.
    pub(super) fn accepts_offers(&self) -> bool {
        let is_used = |next: &NextConnection| next.send.is_none() || next.recv.is_none();
        !self.lock().as_ref().is_some_and(is_used) && Arc::strong_count(&self.lingering) <= LINGERING_MAX
    }

    /// Held by whoever keeps an old connection.
    pub(super) fn lingering(&self) -> Arc<()> {
        self.lingering.clone()
    }

    /// The writer's: waits until it may go over, and goes.
    pub(super) async fn send_half(&self) -> SendHalf {
        loop {
            let changed = self.changed.notified();
            if let Some(next) = self.lock().as_mut().filter(|next| next.writer_may_switch)
                && let Some(send) = next.send.take()
            {
                self.changed.notify_waiters();
                return send;
            }
            changed.await;
        }
    }

    /// The reader's, at the end of the old stream: goes over when there is a next connection that still stands.
    pub(super) fn recv_half(&self) -> Option<(Connection, RecvHalf)> {
        let mut held = self.lock();
        let next = held.as_mut().filter(|next| !next.connection.is_closed() || next.send.is_none())?;
        let recv = next.recv.take()?;
        next.writer_may_switch = true;
        let connection = next.connection.clone();
        drop(held);
        self.changed.notify_waiters();
        Some((connection, recv))
    }

    /// Waits until both directions have gone over; gives the connection that is the link's from then on.
    pub(super) async fn completed(&self) -> (Connection, LinkAuth) {
        loop {
            let changed = self.changed.notified();
            {
                let mut held = self.lock();
                if held.as_ref().is_some_and(|next| next.send.is_none() && next.recv.is_none())
                    && let Some(NextConnection { connection, auth, .. }) = held.take()
                {
                    return (connection, auth);
                }
            }
            changed.await;
        }
    }

    /// Closes the next connection, if any, for the same reason as the link.
    pub(super) fn close(&self, code: CloseCode, reason: &str) {
        if let Some(next) = self.lock().take() {
            next.connection.close(code, reason);
        }
    }

    fn set_next(&self, stream: LinkStream, writer_may_switch: bool) {
        let LinkStream { connection, send, recv, auth, .. } = stream;
        let next = NextConnection { connection, auth, send: Some(send), recv: Some(recv), writer_may_switch };
        if let Some(unused) = self.lock().replace(next) {
            unused.connection.close(CloseCode::Replaced, "another replacement came");
        }
        self.changed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Option<NextConnection>> {
        // Each change is one assignment, so a panic elsewhere leaves it whole.
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Old connections of one link that wait for the peer to read their last bytes.
const LINGERING_MAX: usize = 4;
