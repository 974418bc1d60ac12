//! TLS 1.3 between two buffers, without a socket: received bytes go in, encrypted bytes come out.
//!
//! rustls performs the handshake; [`records`] takes over afterwards. The socket reads and writes whole buffers.

use std::sync::Arc;

use bytes::{Buf, BytesMut};
use rustls::{AlertDescription, ClientConfig, ContentType, Error, ServerConfig};
use rustls_pki_types::CertificateDer;

use super::handshake::{Buffers, Handshake, HandshakeResult};
use super::records::{self, PostHandshake};
use super::socket_buffer::SocketBuffer;

/// One side of a TLS session.
pub(super) struct TlsSession {
    stage: Stage,
    incoming: SocketBuffer,
    outgoing: SocketBuffer,
    /// Decrypted bytes that were not requested yet.
    plain: BytesMut,
    has_peer_finished: bool,
    failed: Option<Error>,
}

enum Stage {
    Handshake(Handshake),
    Established(Box<HandshakeResult>),
    /// The handshake finished, but the session could not be taken over from rustls.
    Broken,
}

/// The progress of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Both sides are authenticated.
    Established,
    /// More bytes of the peer are needed.
    NeedsInput,
}

/// The result of [`TlsSession::open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// All requested bytes were decrypted.
    All,
    /// More bytes of the peer are needed.
    NeedsInput,
    /// The peer has finished its direction.
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

    /// The buffer for received bytes; report their number with [`Self::put`]. It is never empty: every record fits, and
    /// [`Self::advance`] rejects a handshake that does not.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.incoming.room()
    }

    pub(super) fn put(&mut self, bytes: usize) {
        self.incoming.put(bytes);
    }

    /// Encrypted bytes to send.
    pub(super) fn outgoing(&self) -> &[u8] {
        self.outgoing.filled()
    }

    pub(super) fn written(&mut self, bytes: usize) {
        self.outgoing.take(bytes);
    }

    /// Advances the handshake.
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
            // TLS allows no message that is larger than the buffer.
            Ok(false) if buffers.incoming.room().is_empty() => {
                Err(self.failed.insert(Error::General("a TLS handshake message is too long".to_owned())).clone())
            }
            Ok(false) => Ok(Progress::NeedsInput),
            Err(error) => {
                handshake.alert(&mut buffers);
                Err(self.failed.insert(error).clone())
            }
        }
    }

    /// Takes over from rustls: from here on [`records`] encrypts and decrypts.
    fn take_over(&mut self) -> Result<(), Error> {
        if let Stage::Handshake(handshake) = std::mem::replace(&mut self.stage, Stage::Broken) {
            let agreed = handshake.into_result().map_err(|error| self.failed.insert(error).clone())?;
            self.stage = Stage::Established(Box::new(agreed));
        }
        Ok(())
    }

    /// Decrypts received bytes into the start of `out` until `want` bytes are there. Reduces `want` and advances `out`
    /// accordingly. If `out` has one byte more than wanted, the last record can be decrypted in place, too; the
    /// contents after the wanted bytes are unspecified.
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

    /// Decrypts one record into `out` if it fits, otherwise into the (empty) buffer of decrypted bytes. Returns false
    /// if no complete record has arrived.
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

    /// Encrypts as much of `data` as fits the outgoing buffer. Returns the number of bytes encrypted, which is 0 if the
    /// buffer is full.
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

    /// Encrypts `close_notify`. Returns false if the buffer is full or there is no session to finish.
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

    /// Records the error for later calls, and sends an alert unless the error is the peer's own alert.
    fn fail_session(&mut self, error: Error) -> Error {
        if !matches!(error, Error::AlertReceived(_))
            && let Err(other) = self.seal_alert(records::alert_of(&error))
        {
            tracing::debug!(%error, %other, "a TLS session ends without an alert");
        }
        self.failed.insert(error).clone()
    }

    /// Whether the peer has finished its direction.
    pub(super) fn has_peer_finished(&self) -> bool {
        self.has_peer_finished
    }

    /// The peer's certificates, leaf first; empty before the handshake is finished.
    pub(super) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        match &self.stage {
            Stage::Established(agreed) => agreed.certificates.clone(),
            Stage::Handshake(_) | Stage::Broken => Vec::new(),
        }
    }

    /// Whether both sides agreed on ronde's ALPN protocol.
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

/// Splits off the first `bytes` bytes of `out`.
fn advance<'a>(out: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    let (first, rest) = std::mem::take(out).split_at_mut(bytes);
    *out = rest;
    first
}

/// How many bytes of content fit `room` once encrypted, in full records, with room for a key update.
fn plain_bytes_max(room: usize) -> usize {
    let room = room.saturating_sub(records::KEY_UPDATE_BYTES);
    let full_bytes = records::PLAIN_BYTES_MAX + records::OVERHEAD_BYTES;
    let (full, rest) = (room / full_bytes, room % full_bytes);
    full * records::PLAIN_BYTES_MAX + if full == 0 { rest.saturating_sub(records::OVERHEAD_BYTES) } else { 0 }
}

/// Limit for one read.
const INCOMING_BYTES: usize = 256 << 10;
/// Limit for one write: 16 full records, and a small one before them.
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
