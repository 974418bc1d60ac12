//! TLS 1.3 between two buffers, without a socket: bytes of the peer are put in, sealed bytes are taken out.
//!
//! rustls is driven through its unbuffered interface, so that whole buffers are read from the socket and written to it.
//! What arrived and is not opened yet always stays with the session: rustls may hold places within it.

use std::sync::Arc;

use bytes::{Buf, BufMut, BytesMut};
use ronde_wire::copying;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus, WriteTraffic,
};
use rustls::{ClientConfig, CommonState, Error, ServerConfig};
use rustls_pki_types::{CertificateDer, ServerName};

use crate::tls;

/// One side of a TLS connection.
pub(super) struct Session {
    side: Side,
    incoming: Window,
    outgoing: Window,
    /// Opened before somebody asked for it.
    plain: BytesMut,
    has_peer_finished: bool,
    failed: Option<Error>,
}

enum Side {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// How far a handshake has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Both sides are authenticated.
    Established,
    /// More bytes of the peer are needed.
    Hungry,
}

/// What opening has given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// As much as was asked for.
    All,
    /// More bytes of the peer are needed.
    Hungry,
    /// The peer has ended its direction; nothing more comes.
    Finished,
}

impl Session {
    pub(super) fn client(config: Arc<ClientConfig>) -> Result<Self, Error> {
        let name = ServerName::try_from(tls::SERVER_NAME).expect("a good name");
        UnbufferedClientConnection::new(config, name).map(|side| Self::new(Side::Client(Box::new(side))))
    }

    pub(super) fn server(config: Arc<ServerConfig>) -> Result<Self, Error> {
        UnbufferedServerConnection::new(config).map(|side| Self::new(Side::Server(Box::new(side))))
    }

    fn new(side: Side) -> Self {
        let (incoming, outgoing) = (Window::new(INCOMING_BYTES), Window::new(OUTGOING_BYTES));
        Self { side, incoming, outgoing, plain: BytesMut::new(), has_peer_finished: false, failed: None }
    }

    /// Where bytes of the peer are to be put; [`Self::put`] says how many were. Never empty: a peer whose handshake does
    /// not fit is a violation that [`Self::advance`] and [`Self::open`] report.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.incoming.room()
    }

    pub(super) fn put(&mut self, bytes: usize) {
        self.incoming.end += bytes;
    }

    /// Sealed bytes that are to be written.
    pub(super) fn outgoing(&self) -> &[u8] {
        self.outgoing.filled()
    }

    pub(super) fn written(&mut self, bytes: usize) {
        self.outgoing.take(bytes);
    }

    /// Goes on with the handshake.
    pub(super) fn advance(&mut self) -> Result<Progress, Error> {
        match self.turn(&mut Task::Rest)? {
            Turn::Ready if !self.state().is_handshaking() => Ok(Progress::Established),
            _ => self.hungry(Progress::Hungry),
        }
    }

    /// Opens what has arrived until `want` bytes are in `out`; what was asked for and has come stays in `out`. Counts
    /// `want` down.
    pub(super) fn open(&mut self, out: &mut dyn BufMut, want: &mut usize) -> Result<Opened, Error> {
        let ready = self.plain.len().min(*want);
        put(out, &self.plain[..ready]);
        self.plain.advance(ready);
        *want -= ready;
        if *want == 0 {
            return Ok(Opened::All);
        }
        let mut task = Task::Open(out, *want);
        let turn = self.turn(&mut task);
        if let Task::Open(_, left) = task {
            *want = left;
        }
        match turn? {
            _ if *want == 0 => Ok(Opened::All),
            Turn::Finished => Ok(Opened::Finished),
            Turn::Ready | Turn::Blocked | Turn::Enough => self.hungry(Opened::Hungry),
        }
    }

    /// Seals as much of `data` as there is room for; how much that was. Nothing fits when there is much to write.
    pub(super) fn seal(&mut self, data: &[u8]) -> Result<usize, Error> {
        let fitting = data.len().min(plain_bytes_max(self.outgoing.room().len()));
        if fitting == 0 {
            return Ok(0);
        }
        let mut task = Task::Seal(&data[..fitting], 0);
        self.turn(&mut task)?;
        match task {
            Task::Seal(_, sealed) => Ok(sealed),
            Task::Rest | Task::Open(..) | Task::Finish(_) => unreachable!("made above"),
        }
    }

    /// Seals the end of this side's direction; false when there is no room yet.
    pub(super) fn finish(&mut self) -> Result<bool, Error> {
        let mut task = Task::Finish(false);
        self.turn(&mut task)?;
        Ok(matches!(task, Task::Finish(true)))
    }

    /// Whether the peer has ended its direction.
    pub(super) fn has_peer_finished(&self) -> bool {
        self.has_peer_finished
    }

    /// The peer's certificates, leaf first, when it has shown some.
    pub(super) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        self.state()
            .peer_certificates()
            .map(|chain| chain.iter().map(|der| der.clone().into_owned()).collect())
            .unwrap_or_default()
    }

    /// Whether both sides agree on what they speak.
    pub(super) fn speaks_ronde(&self) -> bool {
        self.state().alpn_protocol() == Some(tls::ALPN)
    }

    fn state(&self) -> &CommonState {
        match &self.side {
            Side::Client(side) => side,
            Side::Server(side) => side,
        }
    }

    /// A message that needs more bytes than there is room for is none that TLS allows.
    fn hungry<T>(&mut self, answer: T) -> Result<T, Error> {
        if self.incoming.room().is_empty() {
            let error = Error::General("a message of TLS has no end".to_owned());
            self.failed = Some(error.clone());
            return Err(error);
        }
        Ok(answer)
    }

    /// Lets rustls work until it has done the task or needs more bytes.
    fn turn(&mut self, task: &mut Task<'_>) -> Result<Turn, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        loop {
            let (incoming, plain) = (self.incoming.filled_mut(), &mut self.plain);
            let (discard, step) = match &mut self.side {
                Side::Client(side) => step(side.process_tls_records(incoming), &mut self.outgoing, plain, task),
                Side::Server(side) => step(side.process_tls_records(incoming), &mut self.outgoing, plain, task),
            };
            self.incoming.take(discard);
            match step {
                Ok(Step::Again) if task.has_enough() => return Ok(Turn::Enough),
                Ok(Step::Again) => {}
                Ok(Step::Finished) => self.has_peer_finished = true,
                Ok(Step::Blocked) => return Ok(Turn::Blocked),
                Ok(Step::Ready | Step::Closed) if self.has_peer_finished => return Ok(Turn::Finished),
                Ok(Step::Ready | Step::Closed) => return Ok(Turn::Ready),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Keeps the error for whoever comes next, and puts the alert that tells the peer behind what is to be written.
    fn fail(&mut self, error: Error) -> Error {
        self.failed = Some(error.clone());
        // One step and no more: it hands out the alert, and the next would look at the same bad bytes again, for which
        // rustls, having sent its alert, panics.
        let (incoming, plain) = (self.incoming.filled_mut(), &mut self.plain);
        let (_, alert) = match &mut self.side {
            Side::Client(side) => step(side.process_tls_records(incoming), &mut self.outgoing, plain, &mut Task::Rest),
            Side::Server(side) => step(side.process_tls_records(incoming), &mut self.outgoing, plain, &mut Task::Rest),
        };
        if let Err(other) = alert {
            tracing::debug!(%error, %other, "a TLS session ends without an alert");
        }
        error
    }
}

/// Copies opened bytes to where they are wanted.
fn put(out: &mut dyn BufMut, bytes: &[u8]) {
    let step = copying::step(out.chunk_mut().as_mut_ptr().addr(), bytes);
    for piece in bytes.chunks(step) {
        out.put_slice(piece);
    }
}

/// What a turn is for.
enum Task<'a> {
    /// Go as far as what has arrived allows.
    Rest,
    /// Open into the buffer until nothing is wanted any more.
    Open(&'a mut dyn BufMut, usize),
    /// Seal the bytes; how many were.
    Seal(&'a [u8], usize),
    /// Seal the end of this direction; whether that is done.
    Finish(bool),
}

impl Task<'_> {
    fn has_enough(&self) -> bool {
        matches!(self, Self::Open(_, 0))
    }

    /// Hands a record's bytes to who has asked for them; the rest is kept.
    fn give(&mut self, mut record: &[u8], plain: &mut BytesMut) {
        if let Self::Open(out, want) = self
            && plain.is_empty()
        {
            let now = record.len().min(*want);
            put(*out, &record[..now]);
            *want -= now;
            record = &record[now..];
        }
        put(plain, record);
    }

    /// When rustls may seal.
    fn write<D>(&mut self, mut traffic: WriteTraffic<'_, D>, outgoing: &mut Window) -> Result<(), Error> {
        match self {
            Self::Rest | Self::Open(..) | Self::Finish(true) | Self::Seal(_, 1..) => Ok(()),
            Self::Seal(data, sealed) => {
                if fit(outgoing.append(|room| traffic.encrypt(data, room)))? {
                    *sealed = data.len();
                }
                Ok(())
            }
            Self::Finish(done) => {
                *done = fit(outgoing.append(|room| traffic.queue_close_notify(room)))?;
                Ok(())
            }
        }
    }
}

/// Whether there was room; that there was none is no error.
fn fit(appended: Result<(), EncryptError>) -> Result<bool, Error> {
    match appended {
        Ok(()) => Ok(true),
        Err(EncryptError::InsufficientSize(_)) => Ok(false),
        Err(error) => Err(Error::General(error.to_string())),
    }
}

/// How a turn ends.
enum Turn {
    Ready,
    Blocked,
    Finished,
    Enough,
}

/// What one step of rustls was.
enum Step {
    Again,
    Blocked,
    Ready,
    Finished,
    Closed,
}

/// Does what rustls asks for. How many bytes of the peer are done with comes first.
fn step<D>(
    status: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut Window,
    plain: &mut BytesMut,
    task: &mut Task<'_>,
) -> (usize, Result<Step, Error>) {
    let mut discard = status.discard;
    let step = match status.state {
        Err(error) => Err(error),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                None => break Ok(Step::Again),
                Some(Ok(record)) => {
                    discard += record.discard;
                    task.give(record.payload, plain);
                }
                Some(Err(error)) => break Err(error),
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => match outgoing.append_growing(|room| data.encode(room)) {
            Ok(()) => Ok(Step::Again),
            Err(error) => Err(Error::General(error.to_string())),
        },
        // It is in the buffer, in front of everything that follows.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Step::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Blocked),
        Ok(ConnectionState::WriteTraffic(traffic)) => task.write(traffic, outgoing).map(|()| Step::Ready),
        Ok(ConnectionState::PeerClosed) => Ok(Step::Finished),
        Ok(ConnectionState::Closed) => Ok(Step::Closed),
        Ok(other) => Err(Error::General(format!("TLS is in a state that was not asked for: {other:?}"))),
    };
    (discard, step)
}

/// A buffer that is filled at its end and emptied at its beginning.
struct Window {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Window {
    fn new(bytes: usize) -> Self {
        // Zeros of the system: pages are taken when they are first used.
        Self { bytes: vec![0; bytes], start: 0, end: 0 }
    }

    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn filled_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// Room behind what there is, which moves to the front when little is left.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 && self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    fn take(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    fn append<E>(&mut self, write: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<(), E> {
        let written = write(self.room())?;
        self.end += written;
        Ok(())
    }

    /// For what cannot wait: messages of the handshake, which are few and small.
    fn append_growing(
        &mut self,
        mut write: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
    ) -> Result<(), EncodeError> {
        match self.append(&mut write) {
            Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                self.bytes.resize(self.end + required_size, 0);
                self.append(write)
            }
            done => done,
        }
    }
}

/// How many bytes fit `room` when they are sealed, in full records, with something left for a change of keys.
fn plain_bytes_max(room: usize) -> usize {
    let room = room.saturating_sub(KEY_UPDATE_BYTES);
    let (full, rest) = (room / (RECORD_BYTES + RECORD_OVERHEAD_BYTES), room % (RECORD_BYTES + RECORD_OVERHEAD_BYTES));
    full * RECORD_BYTES + if full == 0 { rest.saturating_sub(RECORD_OVERHEAD_BYTES) } else { 0 }
}

/// The most that one record holds (RFC 8446 section 5.1).
const RECORD_BYTES: usize = 16 << 10;
/// Its header, its kind and its tag.
const RECORD_OVERHEAD_BYTES: usize = 5 + 1 + 16;
const KEY_UPDATE_BYTES: usize = 64;
/// What one read may bring.
const INCOMING_BYTES: usize = 256 << 10;
/// What one write may take: 16 full records, and a small one in front of them.
const OUTGOING_BYTES: usize = 17 * (RECORD_BYTES + RECORD_OVERHEAD_BYTES) + KEY_UPDATE_BYTES;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_to_fit_fits() {
        for room in [0, 1, 64, 87, 1_000, 16_405, 16_406, 20_000, 40_000, OUTGOING_BYTES] {
            let plain = plain_bytes_max(room);
            let sealed = plain + plain.div_ceil(RECORD_BYTES) * RECORD_OVERHEAD_BYTES;
            assert!(plain == 0 || sealed + KEY_UPDATE_BYTES <= room, "{plain} in {room}");
        }
        assert_eq!(plain_bytes_max(OUTGOING_BYTES), 17 * RECORD_BYTES);
    }
}
