//! Moves a link from one connection to the next without losing, duplicating or reordering frames.
//!
//! ```text
//! dialler                                              acceptor
//! dials again; hello with `replaces` ────────────────▸  stores the connection, answers with its hello
//! finishes its old stream, writes to the new one  ───▸  reads the old stream to its end, then from the new one,
//! reads the old stream to its end, then from     ◂────  finishes its own old stream, writes to the new one
//! the new one; closes the old connection
//! ```
//!
//! Each receiver reads the old stream to its end before it reads from the new one. Neither side finishes its old stream
//! before it knows that the other has the new connection: the dialler learns it from the answer to its hello, the
//! acceptor from the end of the dialler's stream.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::auth::LinkAuth;
use super::close::CloseCode;
use super::connection::{Connection, RecvHalf, SendHalf};
use super::link::LinkStream;

/// The next connection of a link, if there is one.
#[derive(Default)]
pub(super) struct Handover {
    next: Mutex<Option<NextConnection>>,
    changed: Notify,
    /// One clone for each old connection that the peer has not closed yet, besides this one.
    lingering: Arc<()>,
}

struct NextConnection {
    connection: Connection,
    auth: LinkAuth,
    /// Taken when the writer switches.
    send: Option<SendHalf>,
    /// Taken when the reader switches.
    recv: Option<RecvHalf>,
    /// False while the acceptor's writer waits for its reader to switch.
    writer_may_switch: bool,
}

impl Handover {
    /// Called by the dialler: the writer switches immediately.
    pub(super) fn begin(&self, stream: LinkStream) {
        self.set_next(stream, true);
    }

    /// Called by the acceptor: both halves switch when the peer's old stream ends. Replaces and closes an earlier offer
    /// that was not used.
    pub(super) fn offer(&self, stream: LinkStream) {
        self.set_next(stream, false);
    }

    /// Whether the dialler may make another connection: not while it switches to one.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().is_none()
    }

    /// Whether the acceptor takes another offer: it does unless the peer has begun to use the last one or too many old
    /// connections are still open.
    pub(super) fn accepts_offers(&self) -> bool {
        let is_used = |next: &NextConnection| next.send.is_none() || next.recv.is_none();
        !self.lock().as_ref().is_some_and(is_used) && Arc::strong_count(&self.lingering) <= LINGERING_MAX
    }

    /// Held for as long as an old connection is kept open.
    pub(super) fn lingering(&self) -> Arc<()> {
        self.lingering.clone()
    }

    /// Waits until the writer may switch, and returns the new send half.
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

    /// Returns the new receive half at the end of the old stream, if there is a next connection that is still open.
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

    /// Waits until both halves have switched, and returns the link's new connection.
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
        // Every change is a single assignment, so a panic elsewhere leaves the state consistent.
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Limit for old connections of one link whose last bytes the peer has not read.
const LINGERING_MAX: usize = 4;
