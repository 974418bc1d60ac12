//! One TLS connection over TCP: reading, writing, and an end that the other side is told.
//!
//! The two halves and the end share the session, and with it the order in which things are sealed. All of them run on one
//! thread, so its lock is never waited for.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use ronde_wire::control::{self, Close};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{Epoch, Frame, FrameHeader, FrameKind, Seq};
use rustls::{AlertDescription, Error};
use rustls_pki_types::CertificateDer;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::open::Open;
use super::session::{Opened, Progress, Session};
use crate::links::closing::{CloseCode, Ending};
use crate::port::DownReason;
use crate::tls;

/// A connection; clones are the same one.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Inner>);

/// A connection that nobody needs to have any more.
pub(super) type Faint = Weak<Inner>;

pub(super) struct Inner {
    stream: TcpStream,
    peer: SocketAddr,
    core: Mutex<Core>,
    /// Told when the connection has ended, and when this side's direction has.
    changed: Notify,
    runtime: Handle,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    /// The endpoint knows that it is there.
    _open: Open,
}

struct Core {
    session: Session,
    /// Given to be sealed.
    pending: VecDeque<Bytes>,
    /// Nothing more is given.
    finishing: bool,
    is_end_sealed: bool,
    is_end_sent: bool,
    /// This side has ended the connection.
    is_closed: bool,
    ended: Option<Ending>,
}

/// How far writing has come.
enum Pushed {
    All,
    Some,
    Blocked,
}

impl Connection {
    /// Makes a connection of a stream: both sides are authenticated when this returns.
    pub(super) async fn establish(stream: TcpStream, session: Session, open: Open) -> Result<Self, Ending> {
        let peer = stream.peer_addr().map_err(|error| lost(&error))?;
        let core = Core {
            session,
            pending: VecDeque::new(),
            finishing: false,
            is_end_sealed: false,
            is_end_sent: false,
            is_closed: false,
            ended: None,
        };
        let connection = Self(Arc::new(Inner {
            stream,
            peer,
            core: Mutex::new(core),
            changed: Notify::new(),
            runtime: Handle::current(),
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            _open: open,
        }));
        match connection.0.shake_hands().await {
            Ok(()) if connection.0.lock().session.speaks_ronde() => Ok(connection),
            Ok(()) => {
                connection.close(CloseCode::Refused, "the peer does not offer the ronde protocol");
                Err(Ending::RefusedHere("it does not offer the ronde protocol".to_owned()))
            }
            Err(ending) => {
                // The alert that tells the peer why is sealed already.
                connection.end(ending.clone());
                Err(ending)
            }
        }
    }

    pub(super) fn faint(&self) -> Faint {
        Arc::downgrade(&self.0)
    }

    /// The connection, while there is one.
    pub(super) fn of(faint: &Faint) -> Option<Self> {
        faint.upgrade().map(Self)
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

    /// Bytes of payload in a segment, as the system knows it.
    pub(crate) fn segment_bytes(&self) -> u32 {
        // A socket that is gone has none.
        SockRef::from(&self.0.stream).tcp_mss().unwrap_or_default()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.lock().ended.is_some()
    }

    /// The two directions. Whoever has them is alone with them.
    pub(crate) fn halves(&self) -> (SendHalf, RecvHalf) {
        (SendHalf(self.0.clone()), RecvHalf(self.0.clone()))
    }

    /// Waits until the connection has ended. Nobody may read meanwhile: what still comes is passed over, but for a reason.
    pub(crate) async fn closed(&self) -> Ending {
        let mut reader = RecvHalf(self.0.clone());
        loop {
            if let Some(ending) = self.0.ended() {
                return ending;
            }
            let changed = self.0.changed.notified();
            tokio::select! {
                () = changed => {}
                () = reader.pass_frame() => {}
            }
        }
    }

    /// Ends the connection with a reason that the peer is told, behind what was given before.
    pub(crate) fn close(&self, code: CloseCode, reason: &str) {
        let mut core = self.0.lock();
        if !core.finishing && core.ended.is_none() {
            let end = reason.floor_char_boundary(REASON_BYTES_MAX);
            let close = Close { code: code as u32, reason: reason[..end].to_owned() };
            let frame = Frame::new(FrameKind::Close, Epoch(0), Seq(0), control::encode(&close));
            core.pending.push_back(Bytes::copy_from_slice(&frame.header.encode()));
            core.pending.push_back(frame.payload);
        }
        drop(core);
        self.end(Ending::Other(DownReason::Lost("closed on this side".to_owned())));
    }

    /// Sends what there is, the end behind it, and hears the peer out for a moment: a socket that is closed while bytes
    /// of the peer lie in it takes back what was sent last.
    fn end(&self, ending: Ending) {
        let mut core = self.0.lock();
        core.finishing = true;
        core.ended.get_or_insert(ending);
        if std::mem::replace(&mut core.is_closed, true) {
            return;
        }
        drop(core);
        self.0.changed.notify_waiters();
        // At once as far as it goes: a runtime that is about to end polls no task any more.
        while let Ok(Pushed::Some) = self.0.push() {}
        let inner = self.0.clone();
        self.0.runtime.spawn(async move {
            // A peer that does not listen any more is not waited for.
            let _ = timeout(GOODBYE_TIMEOUT, inner.say_goodbye()).await;
        });
    }
}

impl Inner {
    async fn shake_hands(&self) -> Result<(), Ending> {
        loop {
            let progress = self.lock().session.advance();
            // Also behind a failure, because of the alert.
            let sent = self.pump().await;
            match progress.map_err(|error| refused(&error))? {
                Progress::Established => return sent.map_err(|error| lost(&error)),
                Progress::Hungry => sent.map_err(|error| lost(&error))?,
            }
            if self.read_some().await.map_err(|error| lost(&error))? == 0 {
                return Err(Ending::Other(DownReason::Lost("the peer ended the handshake".to_owned())));
            }
        }
    }

    /// Reads what there is, as much as fits.
    async fn read_some(&self) -> io::Result<usize> {
        loop {
            match self.try_read() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.readable().await?,
                done => return done,
            }
        }
    }

    fn try_read(&self) -> io::Result<usize> {
        let mut core = self.lock();
        let bytes = self.stream.try_read(core.session.room())?;
        core.session.put(bytes);
        self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Writes until everything that was given has been handed to the system.
    async fn pump(&self) -> io::Result<()> {
        loop {
            match self.push()? {
                Pushed::All => return Ok(()),
                // What arrives in the meantime has its turn.
                Pushed::Some => tokio::task::yield_now().await,
                Pushed::Blocked => self.stream.writable().await?,
            }
        }
    }

    /// Seals a buffer's worth when the last one is written, and writes once.
    fn push(&self) -> io::Result<Pushed> {
        let mut core = self.lock();
        core.seal()?;
        if !core.session.outgoing().is_empty() {
            match self.stream.try_write(core.session.outgoing()) {
                Ok(bytes) => {
                    core.session.written(bytes);
                    self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Pushed::Blocked),
                Err(error) => return Err(error),
            }
        }
        if !core.session.outgoing().is_empty() || !core.pending.is_empty() || core.finishing && !core.is_end_sealed {
            return Ok(Pushed::Some);
        }
        if core.is_end_sealed && !core.is_end_sent {
            core.is_end_sent = true;
            drop(core);
            // Fails when the connection is gone, which reading finds out.
            let _ = SockRef::from(&self.stream).shutdown(Shutdown::Write);
            self.changed.notify_waiters();
        }
        Ok(Pushed::All)
    }

    async fn say_goodbye(&self) -> io::Result<()> {
        self.pump().await?;
        let mut passed_over = vec![0; PASSED_OVER_BYTES];
        loop {
            match self.stream.try_read(&mut passed_over) {
                Ok(0) => return Ok(()),
                Ok(_) => tokio::task::yield_now().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.readable().await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Why it has ended, also when it has by itself, because both directions have.
    fn ended(&self) -> Option<Ending> {
        let core = self.lock();
        let both = || Ending::Other(DownReason::Lost("both directions have ended".to_owned()));
        core.ended.clone().or_else(|| (core.is_end_sent && core.session.has_peer_finished()).then(both))
    }

    /// Keeps why the connection has ended, the first time; what that is.
    fn note_end(&self, ending: Ending) -> Ending {
        let mut core = self.lock();
        // Nobody reads it any more.
        core.pending.clear();
        let kept = core.ended.get_or_insert(ending).clone();
        drop(core);
        self.changed.notify_waiters();
        kept
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic of one task must not take the other direction's reason with it; rustls keeps its own state whole.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    /// Fills the buffer of sealed bytes when it is empty, so that writes are large.
    fn seal(&mut self) -> io::Result<()> {
        if !self.session.outgoing().is_empty() {
            return Ok(());
        }
        while let Some(piece) = self.pending.front_mut() {
            let sealed = self.session.seal(piece).map_err(io::Error::other)?;
            if sealed < piece.len() {
                // No room: the buffer is written first.
                bytes::Buf::advance(piece, sealed);
                return Ok(());
            }
            self.pending.pop_front();
        }
        if self.finishing && !self.is_end_sealed {
            // A session that has failed ends with its alert.
            self.is_end_sealed = self.session.finish().unwrap_or(true);
        }
        Ok(())
    }
}

/// The direction to the peer.
pub(crate) struct SendHalf(Arc<Inner>);

impl SendHalf {
    /// Sends all pieces; they are with the system when this returns.
    ///
    /// # Errors
    /// The connection is gone; reading says why.
    pub(crate) async fn write(&mut self, pieces: Vec<Bytes>) -> io::Result<()> {
        {
            let mut core = self.0.lock();
            if core.finishing {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            core.pending.extend(pieces.into_iter().filter(|piece| !piece.is_empty()));
        }
        self.0.pump().await
    }

    /// Ends the direction behind what was written.
    pub(crate) fn finish(&mut self) {
        self.0.lock().finishing = true;
        let inner = self.0.clone();
        self.0.runtime.spawn(async move {
            // One that the peer does not take ends with the connection.
            let _ = timeout(FINISH_TIMEOUT, inner.pump()).await;
        });
    }

    /// Waits until the end of the direction is on its way, or the connection has ended.
    pub(crate) async fn finished(&mut self) {
        loop {
            let changed = self.0.changed.notified();
            if self.0.lock().is_end_sent || self.0.ended().is_some() {
                return;
            }
            changed.await;
        }
    }
}

/// The direction from the peer.
pub(crate) struct RecvHalf(Arc<Inner>);

/// Why nothing more can be read.
pub(crate) enum Stop {
    /// The peer has ended its direction; so many bytes short of what was asked for.
    Finished(usize),
    /// The connection has ended.
    Ended(Ending),
}

impl RecvHalf {
    /// Reads exactly so many bytes.
    pub(crate) async fn read(&mut self, out: &mut dyn BufMutSend, mut want: usize) -> Result<(), Stop> {
        let inner = &self.0;
        loop {
            let opened = {
                let mut core = inner.lock();
                if core.is_closed {
                    let ending = core.ended.clone();
                    return Err(Stop::Ended(ending.expect("it was set when it was closed")));
                }
                core.session.open(out.as_buf(), &mut want)
            };
            match opened {
                Ok(Opened::All) => return Ok(()),
                Ok(Opened::Finished) => return Err(Stop::Finished(want)),
                Ok(Opened::Hungry) => {}
                Err(error) => return Err(self.fail(&error)),
            }
            match inner.read_some().await {
                Ok(0) => {
                    let gone = "its process is gone (the connection ended without a goodbye)";
                    return Err(Stop::Ended(inner.note_end(Ending::Other(DownReason::Lost(gone.to_owned())))));
                }
                Ok(_) => {}
                Err(error) => return Err(Stop::Ended(inner.note_end(lost(&error)))),
            }
        }
    }

    /// The rest of a frame that ends the connection, as the peer's reason.
    pub(crate) async fn end(&mut self, header: &FrameHeader) -> Result<Ending, Stop> {
        let mut payload = BytesMut::with_capacity(header.length as usize);
        self.read(&mut payload, header.length as usize).await?;
        let ending = match control::decode::<Close>(FrameKind::Close, &payload) {
            Ok(close) => Ending::of_code(CloseCode::of(close.code), close.reason),
            Err(error) => Ending::Other(DownReason::Protocol(error.to_string())),
        };
        Ok(self.0.note_end(ending))
    }

    fn fail(&self, error: &Error) -> Stop {
        // The alert goes out at once, as far as it goes; closing the connection takes care of the rest.
        let _ = self.0.push();
        let ending = match error {
            Error::AlertReceived(_) => refused(error),
            other => Ending::Other(DownReason::Protocol(format!("TLS: {other}"))),
        };
        Stop::Ended(self.0.note_end(ending))
    }

    /// Reads a frame that nobody wants any more; notes the end of the connection.
    async fn pass_frame(&mut self) {
        let mut header = [0; HEADER_BYTES];
        if let Err(stop) = self.read(&mut Fixed(&mut header), HEADER_BYTES).await {
            return self.note_stop(stop);
        }
        let passed = match FrameHeader::decode(&header) {
            Ok(header) if header.kind == FrameKind::Close => self.end(&header).await.map(drop),
            Ok(header) => self.read(&mut BytesMut::new(), header.length as usize).await,
            Err(error) => {
                self.0.note_end(Ending::Other(DownReason::Protocol(error.to_string())));
                return;
            }
        };
        if let Err(stop) = passed {
            self.note_stop(stop);
        }
    }

    fn note_stop(&self, stop: Stop) {
        if let Stop::Finished(_) = stop {
            self.0.note_end(Ending::Other(DownReason::Lost("the peer ended the connection".to_owned())));
        }
    }
}

/// A buffer to read into, held across waits.
pub(crate) trait BufMutSend: Send {
    /// As what is written to.
    fn as_buf(&mut self) -> &mut dyn BufMut;
}

impl BufMutSend for BytesMut {
    fn as_buf(&mut self) -> &mut dyn BufMut {
        self
    }
}

/// Bytes of a fixed number, filled from the beginning.
pub(crate) struct Fixed<'a>(pub(crate) &'a mut [u8]);

impl BufMutSend for Fixed<'_> {
    fn as_buf(&mut self) -> &mut dyn BufMut {
        &mut self.0
    }
}

/// What an error of TLS means during a handshake, and of an alert at any time.
fn refused(error: &Error) -> Ending {
    match error {
        Error::InvalidMessage(_) => Ending::Other(DownReason::Protocol(format!("this is not TLS: {error}"))),
        Error::AlertReceived(alert) => Ending::RefusedThere(alert_text(*alert)),
        other => Ending::RefusedHere(tls::explained(&other.to_string())),
    }
}

/// TLS has a number where QUIC has a text: the text is in the log of the other side.
fn alert_text(alert: AlertDescription) -> String {
    format!("it does not accept this side's certificate or handshake (TLS alert {alert:?}); its log says why")
}

fn lost(error: &io::Error) -> Ending {
    Ending::Other(DownReason::Lost(error.to_string()))
}

/// A frame of an end has a text for people.
const REASON_BYTES_MAX: usize = 1_000;
/// How long an end waits for the peer to hear it.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the last bytes of a direction may take.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
const PASSED_OVER_BYTES: usize = 64 << 10;
