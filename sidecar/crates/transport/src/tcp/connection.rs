//! One TLS connection over TCP: reading, writing, and an end that the other side is told.
//!
//! The two halves and the end share the session, and with it the order in which things are sealed. All of them run on one
//! thread, so its lock is never waited for.

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

/// A connection; clones are the same one.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Inner>);

/// A connection that nobody needs to have any more.
pub(super) type WeakConnection = Weak<Inner>;

pub(super) struct Inner {
    stream: TcpStream,
    peer: SocketAddr,
    pub(super) state: Mutex<ConnectionState>,
    /// Told when the connection has ended, and when this side's direction has.
    pub(super) changed: Notify,
    pub(super) runtime: Handle,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    pub(super) pool: Pool,
    /// The endpoint knows that it is there.
    _guard: ConnectionGuard,
}

pub(super) struct ConnectionState {
    pub(super) session: TlsSession,
    /// Given to be sealed.
    pub(super) pending: VecDeque<Bytes>,
    /// Nothing more is given.
    pub(super) finishing: bool,
    is_close_notify_sealed: bool,
    pub(super) is_write_shut_down: bool,
    /// This side has ended the connection.
    pub(super) is_closed: bool,
    pub(super) close_reason: Option<CloseReason>,
}

/// Ends when the socket of a connection that was closed is.
pub(super) type CloseTask = JoinHandle<()>;

/// A handshake that made no connection.
pub(super) struct HandshakeFailed {
    pub(super) reason: CloseReason,
    pub(super) close_task: Option<CloseTask>,
}

/// How far writing has come.
pub(super) enum WriteProgress {
    Done,
    Partial,
    Blocked,
}

impl Connection {
    /// Makes a connection of a stream: both sides are authenticated when this returns.
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
                // The alert that tells the peer why is sealed already.
                let close_task = connection.end(reason.clone());
                Err(HandshakeFailed { reason, close_task })
            }
        }
    }

    pub(super) fn downgrade(&self) -> WeakConnection {
        Arc::downgrade(&self.0)
    }

    /// The connection, while there is one.
    pub(super) fn upgrade(weak: &WeakConnection) -> Option<Self> {
        weak.upgrade().map(Self)
    }

    pub(crate) fn remote_address(&self) -> SocketAddr {
        self.0.peer
    }

    pub(crate) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        self.0.lock().session.peer_certificates()
    }

    /// Bytes sent and received, sealed.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.0.sent_bytes.load(Ordering::Relaxed), self.0.received_bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.lock().close_reason.is_some()
    }

    /// The two directions. Whoever has them is alone with them.
    pub(crate) fn halves(&self) -> (SendHalf, RecvHalf) {
        (SendHalf(self.0.clone()), RecvHalf(self.0.clone()))
    }

    /// Waits until the connection has ended. Nobody may read meanwhile: what still comes is passed over, but for a reason.
    pub(crate) async fn closed(&self) -> CloseReason {
        let mut reader = RecvHalf(self.0.clone());
        // One future throughout: one that is begun anew would take the middle of a frame for a header.
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

    /// Ends the connection with a reason that the peer is told, behind what was given before.
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
        self.end(CloseReason::Other(DownReason::Lost("closed on this side".to_owned())))
    }

    /// Sends what there is, the end behind it, and hears the peer out for a moment: a socket that is closed while bytes
    /// of the peer lie in it takes back what was sent last.
    fn end(&self, reason: CloseReason) -> Option<CloseTask> {
        let mut state = self.0.lock();
        state.finishing = true;
        state.close_reason.get_or_insert(reason);
        if std::mem::replace(&mut state.is_closed, true) {
            return None;
        }
        drop(state);
        self.0.changed.notify_waiters();
        // At once as far as it goes: a runtime that is about to end polls no task any more.
        while let Ok(WriteProgress::Partial) = self.0.write_once() {}
        let inner = self.0.clone();
        Some(self.0.runtime.spawn(async move {
            // A peer that does not listen any more is not waited for.
            let _ = timeout(CLOSE_TIMEOUT, inner.drain_until_closed()).await;
        }))
    }
}

impl Inner {
    async fn handshake(&self) -> Result<(), CloseReason> {
        loop {
            let progress = self.lock().session.advance();
            // Also behind a failure, because of the alert.
            let sent = self.flush().await;
            match progress.map_err(|error| refused(&error))? {
                Progress::Established => return sent.map_err(|error| lost(&error)),
                Progress::NeedsInput => sent.map_err(|error| lost(&error))?,
            }
            if self.read_some().await.map_err(|error| lost(&error))? == 0 {
                return Err(CloseReason::Other(DownReason::Lost("the peer ended the handshake".to_owned())));
            }
        }
    }

    /// Reads what there is, as much as fits.
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

    /// Writes until everything that was given has been handed to the system.
    pub(super) async fn flush(&self) -> io::Result<()> {
        loop {
            match self.write_once()? {
                WriteProgress::Done => return Ok(()),
                // What arrives in the meantime has its turn.
                WriteProgress::Partial => tokio::task::yield_now().await,
                WriteProgress::Blocked => self.stream.writable().await?,
            }
        }
    }

    /// Seals a buffer's worth when the last one is written, and writes once.
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
            // Fails when the connection is gone, which reading finds out.
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

    /// Why it has ended, also when it has by itself, because both directions have.
    pub(super) fn close_reason(&self) -> Option<CloseReason> {
        let state = self.lock();
        let both = || CloseReason::Other(DownReason::Lost("both directions have ended".to_owned()));
        state
            .close_reason
            .clone()
            .or_else(|| (state.is_write_shut_down && state.session.has_peer_finished()).then(both))
    }

    /// Keeps why the connection has ended, the first time; what that is.
    pub(super) fn set_close_reason(&self, reason: CloseReason) -> CloseReason {
        let mut state = self.lock();
        // Nobody reads it any more.
        state.pending.clear();
        let kept = state.close_reason.get_or_insert(reason).clone();
        drop(state);
        self.changed.notify_waiters();
        kept
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        // A panic of one task must not take the other direction's reason with it; rustls keeps its own state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionState {
    /// Fills the buffer of sealed bytes when it is empty, so that writes are large.
    fn seal(&mut self) -> io::Result<()> {
        if !self.session.outgoing().is_empty() {
            return Ok(());
        }
        while let Some(piece) = self.pending.front_mut() {
            let sealed = self.session.seal(piece).map_err(io::Error::other)?;
            if sealed == 0 && self.session.outgoing().is_empty() {
                return Err(io::Error::other("nothing can be sealed any more"));
            }
            if sealed < piece.len() {
                // No room: the buffer is written first.
                piece.advance(sealed);
                return Ok(());
            }
            self.pending.pop_front();
        }
        if self.finishing && !self.is_close_notify_sealed {
            // One that was never established has no end to seal, and one that has failed ends with its alert.
            self.is_close_notify_sealed = self.session.finish().unwrap_or(true) || self.session.outgoing().is_empty();
        }
        Ok(())
    }
}

/// What an error of TLS means during a handshake, and of an alert at any time.
pub(super) fn refused(error: &Error) -> CloseReason {
    match error {
        Error::InvalidMessage(_) => CloseReason::Other(DownReason::Protocol(format!("this is not TLS: {error}"))),
        Error::AlertReceived(alert) => CloseReason::RefusedByPeer(alert_text(*alert)),
        other => CloseReason::RefusedLocally(tls::reason_text(&other.to_string())),
    }
}

/// TLS has a number where QUIC has a text: the text is in the log of the other side.
fn alert_text(alert: AlertDescription) -> String {
    format!("it does not accept this side's certificate or handshake (TLS alert {alert:?}); its log says why")
}

pub(super) fn lost(error: &io::Error) -> CloseReason {
    CloseReason::Other(DownReason::Lost(error.to_string()))
}

/// A frame of an end has a text for people.
const REASON_BYTES_MAX: usize = 1_000;
/// How long an end waits for the peer to hear it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const DISCARD_BUFFER_BYTES: usize = 64 << 10;
