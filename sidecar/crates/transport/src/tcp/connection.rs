//! One TLS connection over TCP: reading, writing, and closing with a reason.
//!
//! The two halves and the close share the session, and thereby the order in which records are encrypted. All of them
//! run on one thread, so the lock is never contended.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::{Buf, Bytes};
use ronde_wire::control::{self, Close};
use ronde_wire::{Epoch, Frame, FrameKind, Seq};
use rustls::{AlertDescription, Error};
use rustls_pki_types::CertificateDer;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::connection_count::ConnectionGuard;
use super::halves::{RecvHalf, SendHalf};
use super::pool::Pool;
use super::session::{Progress, TlsSession};
use crate::links::close::{CloseCode, CloseReason};
use crate::port::DownReason;
use crate::tls;

/// A connection. Clones refer to the same connection.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Inner>);

/// A reference that does not keep the connection open.
pub(super) type WeakConnection = Weak<Inner>;

pub(super) struct Inner {
    stream: TcpStream,
    peer: SocketAddr,
    pub(super) state: Mutex<ConnectionState>,
    /// Notified when the connection is closed, and when this side's direction is.
    pub(super) changed: Notify,
    pub(super) runtime: Handle,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    pub(super) pool: Pool,
    /// Counts this connection as open.
    _guard: ConnectionGuard,
}

pub(super) struct ConnectionState {
    pub(super) session: TlsSession,
    /// Buffers to encrypt and send.
    pub(super) pending: VecDeque<Bytes>,
    /// No further buffers follow.
    pub(super) finishing: bool,
    is_close_notify_sealed: bool,
    pub(super) is_write_shut_down: bool,
    /// This side has closed the connection.
    pub(super) is_closed: bool,
    pub(super) close_reason: Option<CloseReason>,
}

/// Finishes when the socket of a closed connection is closed.
pub(super) type CloseTask = JoinHandle<()>;

/// A handshake that failed.
pub(super) struct HandshakeFailed {
    pub(super) reason: CloseReason,
    pub(super) close_task: Option<CloseTask>,
}

/// How much was written.
pub(super) enum WriteProgress {
    Done,
    Partial,
    Blocked,
}

impl Connection {
    /// Performs the handshake on a stream. Both sides are authenticated when this returns.
    pub(super) async fn establish(
        stream: TcpStream,
        session: TlsSession,
        guard: ConnectionGuard,
        pool: Pool,
    ) -> Result<Self, HandshakeFailed> {
        let peer = stream.peer_addr().map_err(|error| HandshakeFailed { reason: lost(&error), close_task: None })?;
        let state = ConnectionState {
            session,
            pending: VecDeque::new(),
            finishing: false,
            is_close_notify_sealed: false,
            is_write_shut_down: false,
            is_closed: false,
            close_reason: None,
        };
        let connection = Self(Arc::new(Inner {
            stream,
            peer,
            state: Mutex::new(state),
            changed: Notify::new(),
            runtime: Handle::current(),
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            pool,
            _guard: guard,
        }));
        match connection.0.handshake().await {
            Ok(()) if connection.0.lock().session.has_ronde_alpn() => Ok(connection),
            Ok(()) => {
                let close_task = connection.close(CloseCode::Refused, "the peer does not offer the ronde protocol");
                Err(HandshakeFailed {
                    reason: CloseReason::RefusedLocally("it does not offer the ronde protocol".to_owned()),
                    close_task,
                })
            }
            Err(reason) => {
                // The alert for the peer is encrypted already.
                let close_task = connection.end(reason.clone());
                Err(HandshakeFailed { reason, close_task })
            }
        }
    }

    pub(super) fn downgrade(&self) -> WeakConnection {
        Arc::downgrade(&self.0)
    }

    /// The connection, if it is still open.
    pub(super) fn upgrade(weak: &WeakConnection) -> Option<Self> {
        weak.upgrade().map(Self)
    }

    pub(crate) fn remote_address(&self) -> SocketAddr {
        self.0.peer
    }

    pub(crate) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        self.0.lock().session.peer_certificates()
    }

    /// Encrypted bytes sent and received.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.0.sent_bytes.load(Ordering::Relaxed), self.0.received_bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.lock().close_reason.is_some()
    }

    /// The two halves. There must be at most one user of each.
    pub(crate) fn halves(&self) -> (SendHalf, RecvHalf) {
        (SendHalf(self.0.clone()), RecvHalf(self.0.clone()))
    }

    /// Waits until the connection is closed. Discards incoming frames until a close frame arrives, so nothing else may
    /// read.
    pub(crate) async fn closed(&self) -> CloseReason {
        let mut reader = RecvHalf(self.0.clone());
        // Keeps one future: a new one would start in the middle of a frame.
        let mut passing = pin!(reader.discard_frames());
        loop {
            let changed = self.0.changed.notified();
            if let Some(reason) = self.0.close_reason() {
                return reason;
            }
            tokio::select! {
                () = changed => {}
                () = &mut passing => {}
            }
        }
    }

    /// Closes the connection: sends the reason to the peer after what was written.
    pub(crate) fn close(&self, code: CloseCode, reason: &str) -> Option<CloseTask> {
        let mut state = self.0.lock();
        if !state.finishing && state.close_reason.is_none() {
            let end = reason.floor_char_boundary(REASON_BYTES_MAX);
            let close = Close { code: code as u32, reason: reason[..end].to_owned() };
            let frame = Frame::new(FrameKind::Close, Epoch(0), Seq(0), control::encode(&close));
            state.pending.push_back(Bytes::copy_from_slice(&frame.header.encode()));
            state.pending.push_back(frame.payload);
        }
        drop(state);
        self.end(CloseReason::Other(DownReason::Lost("this side closed the connection".to_owned())))
    }

    /// Sends what is pending and `close_notify`, then discards incoming bytes for a moment: closing a socket with
    /// unread bytes would reset the connection and discard what was sent last.
    fn end(&self, reason: CloseReason) -> Option<CloseTask> {
        let mut state = self.0.lock();
        state.finishing = true;
        state.close_reason.get_or_insert(reason);
        if std::mem::replace(&mut state.is_closed, true) {
            return None;
        }
        drop(state);
        self.0.changed.notify_waiters();
        // Writes immediately what the socket accepts: a runtime that is shutting down does not poll further tasks.
        while let Ok(WriteProgress::Partial) = self.0.write_once() {}
        let inner = self.0.clone();
        Some(self.0.runtime.spawn(async move {
            // The timeout bounds the wait for a peer that no longer reads.
            let _ = timeout(CLOSE_TIMEOUT, inner.drain_until_closed()).await;
        }))
    }
}

impl Inner {
    async fn handshake(&self) -> Result<(), CloseReason> {
        loop {
            let progress = self.lock().session.advance();
            // Also after a failure, to send the alert.
            let sent = self.flush().await;
            match progress.map_err(|error| refused(&error))? {
                Progress::Established => return sent.map_err(|error| lost(&error)),
                Progress::NeedsInput => sent.map_err(|error| lost(&error))?,
            }
            if self.read_some().await.map_err(|error| lost(&error))? == 0 {
                return Err(CloseReason::Other(DownReason::Lost(
                    "the peer closed the connection during the handshake".to_owned(),
                )));
            }
        }
    }

    /// Reads what has arrived, as far as the buffer has room.
    pub(super) async fn read_some(&self) -> io::Result<usize> {
        loop {
            match self.try_read() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.readable().await?,
                done => return done,
            }
        }
    }

    fn try_read(&self) -> io::Result<usize> {
        let mut state = self.lock();
        let bytes = self.stream.try_read(state.session.room())?;
        state.session.put(bytes);
        self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Writes until the kernel has accepted everything.
    pub(super) async fn flush(&self) -> io::Result<()> {
        loop {
            match self.write_once()? {
                WriteProgress::Done => return Ok(()),
                // Lets other tasks of the thread run, such as those that receive.
                WriteProgress::Partial => tokio::task::yield_now().await,
                WriteProgress::Blocked => self.stream.writable().await?,
            }
        }
    }

    /// Encrypts up to one buffer, unless an earlier one is not written yet, and writes once.
    pub(super) fn write_once(&self) -> io::Result<WriteProgress> {
        let mut state = self.lock();
        state.seal()?;
        if !state.session.outgoing().is_empty() {
            match self.stream.try_write(state.session.outgoing()) {
                Ok(bytes) => {
                    state.session.written(bytes);
                    self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(WriteProgress::Blocked),
                Err(error) => return Err(error),
            }
        }
        if !state.session.outgoing().is_empty()
            || !state.pending.is_empty()
            || state.finishing && !state.is_close_notify_sealed
        {
            return Ok(WriteProgress::Partial);
        }
        if state.is_close_notify_sealed && !state.is_write_shut_down {
            state.is_write_shut_down = true;
            drop(state);
            // This fails if the connection is closed, which the reader notices.
            let _ = SockRef::from(&self.stream).shutdown(Shutdown::Write);
            self.changed.notify_waiters();
        }
        Ok(WriteProgress::Done)
    }

    async fn drain_until_closed(&self) -> io::Result<()> {
        self.flush().await?;
        let mut discarded = vec![0; DISCARD_BUFFER_BYTES];
        loop {
            match self.stream.try_read(&mut discarded) {
                Ok(0) => return Ok(()),
                Ok(_) => tokio::task::yield_now().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.readable().await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// The close reason, if the connection is closed by either side or because both directions have ended.
    pub(super) fn close_reason(&self) -> Option<CloseReason> {
        let state = self.lock();
        let both = || CloseReason::Other(DownReason::Lost("both directions have ended".to_owned()));
        state
            .close_reason
            .clone()
            .or_else(|| (state.is_write_shut_down && state.session.has_peer_finished()).then(both))
    }

    /// Sets the close reason unless there is one already. Returns the reason that is set.
    pub(super) fn set_close_reason(&self, reason: CloseReason) -> CloseReason {
        let mut state = self.lock();
        // The peer does not read these any more.
        state.pending.clear();
        let kept = state.close_reason.get_or_insert(reason).clone();
        drop(state);
        self.changed.notify_waiters();
        kept
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        // A panic of one task must not lose the other direction's reason; rustls keeps its own state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionState {
    /// Fills the buffer of encrypted bytes when it is empty, so that writes are large.
    fn seal(&mut self) -> io::Result<()> {
        if !self.session.outgoing().is_empty() {
            return Ok(());
        }
        while let Some(piece) = self.pending.front_mut() {
            let sealed = self.session.seal(piece).map_err(io::Error::other)?;
            if sealed == 0 && self.session.outgoing().is_empty() {
                return Err(io::Error::other("nothing can be encrypted any more"));
            }
            if sealed < piece.len() {
                // The buffer is full and must be written first.
                piece.advance(sealed);
                return Ok(());
            }
            self.pending.pop_front();
        }
        if self.finishing && !self.is_close_notify_sealed {
            // A session without a finished handshake cannot send `close_notify`, and a failed one ends with its alert.
            self.is_close_notify_sealed = self.session.finish().unwrap_or(true) || self.session.outgoing().is_empty();
        }
        Ok(())
    }
}

/// Interprets a TLS error during a handshake, or an alert at any time.
pub(super) fn refused(error: &Error) -> CloseReason {
    match error {
        Error::InvalidMessage(_) => CloseReason::Other(DownReason::Protocol(format!("this is not TLS: {error}"))),
        Error::AlertReceived(alert) => CloseReason::RefusedByPeer(alert_text(*alert)),
        other => CloseReason::RefusedLocally(tls::reason_text(&other.to_string())),
    }
}

/// TLS alerts carry a number only; the text is in the peer's log.
fn alert_text(alert: AlertDescription) -> String {
    format!("it does not accept this side's certificate or handshake (TLS alert {alert:?}); its log says why")
}

pub(super) fn lost(error: &io::Error) -> CloseReason {
    CloseReason::Other(DownReason::Lost(error.to_string()))
}

/// Limit for the reason's text in a close frame.
const REASON_BYTES_MAX: usize = 1_000;
/// Limit for the wait until the peer has read the close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const DISCARD_BUFFER_BYTES: usize = 64 << 10;
