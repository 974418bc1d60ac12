//! TLS 1.3 between two buffers, without a socket: bytes of the peer are put in, sealed bytes are taken out.
//!
//! rustls shakes hands; then [`records`] take over. Whole buffers are read from the socket and written to it.

use std::sync::Arc;

use bytes::{Buf, BytesMut};
use rustls::{AlertDescription, ClientConfig, ContentType, Error, ServerConfig};
use rustls_pki_types::CertificateDer;

use super::handshake::{Buffers, Handshake, HandshakeResult};
use super::records::{self, PostHandshake};
use super::socket_buffer::SocketBuffer;

/// One side of a TLS connection.
pub(super) struct TlsSession {
    stage: Stage,
    incoming: SocketBuffer,
    outgoing: SocketBuffer,
    /// Opened before somebody asked for it.
    plain: BytesMut,
    has_peer_finished: bool,
    failed: Option<Error>,
}

enum Stage {
    Handshake(Handshake),
    Established(Box<HandshakeResult>),
    /// The handshake was over, but could not be taken over.
    Broken,
}

/// How far a handshake has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Both sides are authenticated.
    Established,
    /// More bytes of the peer are needed.
    NeedsInput,
}

/// What opening has given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// As much as was asked for.
    All,
    /// More bytes of the peer are needed.
    NeedsInput,
    /// The peer has ended its direction; nothing more comes.
    Finished,
}

impl TlsSession {
    pub(super) fn client(config: Arc<ClientConfig>) -> Result<Self, Error> {
        Handshake::client(config).map(Self::new)
    }

    pub(super) fn server(config: Arc<ServerConfig>) -> Result<Self, Error> {
        Handshake::server(config).map(Self::new)
    }

    fn new(handshake: Handshake) -> Self {
        let (incoming, outgoing) = (SocketBuffer::new(INCOMING_BYTES), SocketBuffer::new(OUTGOING_BYTES));
        let stage = Stage::Handshake(handshake);
        Self { stage, incoming, outgoing, plain: BytesMut::new(), has_peer_finished: false, failed: None }
    }

    /// Where bytes of the peer are to be put; [`Self::put`] says how many were. Never empty: a peer whose handshake does
    /// not fit is a violation that [`Self::advance`] reports, and a record fits.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.incoming.room()
    }

    pub(super) fn put(&mut self, bytes: usize) {
        self.incoming.put(bytes);
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
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Stage::Handshake(handshake) = &mut self.stage else { return Ok(Progress::Established) };
        let mut buffers = Buffers {
            incoming: &mut self.incoming,
            outgoing: &mut self.outgoing,
            plain: &mut self.plain,
            has_peer_finished: &mut self.has_peer_finished,
        };
        match handshake.advance(&mut buffers) {
            Ok(true) => self.take_over().map(|()| Progress::Established),
            // A message that needs more bytes than there is room for is none that TLS allows.
            Ok(false) if buffers.incoming.room().is_empty() => {
                Err(self.failed.insert(Error::General("a message of TLS has no end".to_owned())).clone())
            }
            Ok(false) => Ok(Progress::NeedsInput),
            Err(error) => {
                handshake.alert(&mut buffers);
                Err(self.failed.insert(error).clone())
            }
        }
    }

    /// From here on, records are sealed and opened without rustls.
    fn take_over(&mut self) -> Result<(), Error> {
        if let Stage::Handshake(handshake) = std::mem::replace(&mut self.stage, Stage::Broken) {
            let agreed = handshake.into_result().map_err(|error| self.failed.insert(error).clone())?;
            self.stage = Stage::Established(Box::new(agreed));
        }
        Ok(())
    }

    /// Opens what has arrived into the beginning of `out` until `want` bytes are there; counts `want` down, and `out` begins
    /// behind what is there. One byte more than is wanted lets the last record be opened in its place, too; what lies behind
    /// what was wanted is waste.
    pub(super) fn open(&mut self, out: &mut &mut [u8], want: &mut usize) -> Result<Opened, Error> {
        loop {
            let ready = self.plain.len().min(*want);
            advance(out, ready).copy_from_slice(&self.plain[..ready]);
            self.plain.advance(ready);
            *want -= ready;
            if *want == 0 {
                return Ok(Opened::All);
            }
            if self.has_peer_finished {
                return Ok(Opened::Finished);
            }
            if let Some(error) = &self.failed {
                return Err(error.clone());
            }
            match self.open_record(out, want) {
                Ok(true) => {}
                Ok(false) => return Ok(Opened::NeedsInput),
                Err(error) => return Err(self.fail_session(error)),
            }
        }
    }

    /// Opens a record to where it is wanted, or to what is kept, which is empty. False when none has arrived whole.
    fn open_record(&mut self, out: &mut &mut [u8], want: &mut usize) -> Result<bool, Error> {
        let Stage::Established(agreed) = &mut self.stage else { return Err(Error::HandshakeNotComplete) };
        let arrived = self.incoming.filled();
        let Some(bytes) = records::record_bytes(arrived)?.filter(|bytes| *bytes <= arrived.len()) else {
            return Ok(false);
        };
        let inner_bytes = records::inner_bytes(bytes);
        let is_wanted = inner_bytes - 1 <= *want && inner_bytes <= out.len();
        let place = if is_wanted {
            &mut out[..inner_bytes]
        } else {
            self.plain.resize(inner_bytes, 0);
            &mut self.plain[..]
        };
        let (kind, length) = match agreed.records.open(&arrived[..bytes], place) {
            Ok(opened) => opened,
            Err(error) => {
                self.plain.clear();
                return Err(error);
            }
        };
        self.incoming.take(bytes);
        if kind != ContentType::ApplicationData {
            let message = agreed.records.handle_message(kind, &place[..length]);
            self.plain.clear();
            self.has_peer_finished = message? == PostHandshake::CloseNotify;
        } else if is_wanted {
            advance(out, length);
            *want -= length;
        } else {
            self.plain.truncate(length);
        }
        Ok(true)
    }

    /// Seals as much of `data` as there is room for; how much that was. Nothing fits when there is much to write.
    pub(super) fn seal(&mut self, data: &[u8]) -> Result<usize, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Stage::Established(agreed) = &mut self.stage else { return Ok(0) };
        let fitting = data.len().min(plain_bytes_max(self.outgoing.room().len()));
        for plain in data[..fitting].chunks(records::PLAIN_BYTES_MAX) {
            let sealed = agreed.records.seal(plain, self.outgoing.room())?;
            self.outgoing.put(sealed);
        }
        Ok(fitting)
    }

    /// Seals the end of this side's direction; false when there is no room yet, or nothing to end.
    pub(super) fn finish(&mut self) -> Result<bool, Error> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => self.seal_alert(AlertDescription::CloseNotify),
        }
    }

    fn seal_alert(&mut self, alert: AlertDescription) -> Result<bool, Error> {
        let room = self.outgoing.room();
        let Stage::Established(agreed) = &mut self.stage else { return Ok(false) };
        if room.len() < records::ALERT_BYTES {
            return Ok(false);
        }
        let sealed = agreed.records.seal_alert(alert, room)?;
        self.outgoing.put(sealed);
        Ok(true)
    }

    /// Keeps the error for whoever comes next, and tells the peer, unless it is what the peer has told.
    fn fail_session(&mut self, error: Error) -> Error {
        if !matches!(error, Error::AlertReceived(_))
            && let Err(other) = self.seal_alert(records::alert_of(&error))
        {
            tracing::debug!(%error, %other, "a TLS session ends without an alert");
        }
        self.failed.insert(error).clone()
    }

    /// Whether the peer has ended its direction.
    pub(super) fn has_peer_finished(&self) -> bool {
        self.has_peer_finished
    }

    /// The peer's certificates, leaf first, when it has shown some and the handshake is over.
    pub(super) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        match &self.stage {
            Stage::Established(agreed) => agreed.certificates.clone(),
            Stage::Handshake(_) | Stage::Broken => Vec::new(),
        }
    }

    /// Whether both sides have agreed on what they speak.
    pub(super) fn has_ronde_alpn(&self) -> bool {
        matches!(&self.stage, Stage::Established(agreed) if agreed.has_ronde_alpn)
    }
}

#[cfg(test)]
impl TlsSession {
    pub(super) fn records(&mut self) -> &mut records::Records {
        match &mut self.stage {
            Stage::Established(agreed) => &mut agreed.records,
            Stage::Handshake(_) | Stage::Broken => panic!("the handshake is not over"),
        }
    }
}

/// The first so many bytes of `out`, which begins behind them then.
fn advance<'a>(out: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    let (first, rest) = std::mem::take(out).split_at_mut(bytes);
    *out = rest;
    first
}

/// How many bytes fit `room` when they are sealed, in full records, with something left for a change of keys.
fn plain_bytes_max(room: usize) -> usize {
    let room = room.saturating_sub(records::KEY_UPDATE_BYTES);
    let full_bytes = records::PLAIN_BYTES_MAX + records::OVERHEAD_BYTES;
    let (full, rest) = (room / full_bytes, room % full_bytes);
    full * records::PLAIN_BYTES_MAX + if full == 0 { rest.saturating_sub(records::OVERHEAD_BYTES) } else { 0 }
}

/// What one read may bring.
const INCOMING_BYTES: usize = 256 << 10;
/// What one write may take: 16 full records, and a small one in front of them.
const OUTGOING_BYTES: usize = 17 * (records::PLAIN_BYTES_MAX + records::OVERHEAD_BYTES) + records::KEY_UPDATE_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_bytes_max_fits_the_room() {
        for room in [0, 1, 49, 64, 87, 1_000, 16_405, 16_406, 20_000, 40_000, OUTGOING_BYTES] {
            let plain = plain_bytes_max(room);
            let sealed = plain + plain.div_ceil(records::PLAIN_BYTES_MAX) * records::OVERHEAD_BYTES;
            assert!(plain == 0 || sealed + records::KEY_UPDATE_BYTES <= room, "{plain} in {room}");
        }
        assert_eq!(plain_bytes_max(OUTGOING_BYTES), 17 * records::PLAIN_BYTES_MAX);
    }
}
