//! TLS 1.3 records after the handshake (RFC 8446 sections 5, 4.6.3 and 6).
//!
//! rustls hands over the keys, as it does for kernel TLS, and still derives their successors. Its own record layer
//! copies every byte twice in each direction; this one encrypts from and decrypts to the caller's buffers ([ADR
//! 21](../../../../../docs/adr/0021-records-encrypted-without-copies.md)).

use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{Iv, Nonce, make_tls13_aad};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, HandshakeType, InvalidMessage,
    PeerMisbehaved,
};

use super::aead::{Key, NONCE_BYTES, TAG_BYTES};

/// The record protection of both directions.
pub(super) struct Records {
    next_keys: NextKeys,
    sealing: Direction,
    opening: Direction,
    /// The peer has requested a key update of this side's direction.
    is_update_due: bool,
    records_per_key_max: u64,
}

/// Derives the next keys.
enum NextKeys {
    Client(Box<KernelConnection<ClientConnectionData>>),
    Server(Box<KernelConnection<ServerConnectionData>>),
}

/// The key of one direction, and the number of records that it has protected.
struct Direction {
    key: Key,
    iv: Iv,
    sequence: u64,
}

/// The meaning of a TLS message after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PostHandshake {
    /// No action is needed.
    Handled,
    /// The peer has finished its direction.
    CloseNotify,
}

impl Records {
    pub(super) fn of_client(
        (secrets, next_keys): (ExtractedSecrets, KernelConnection<ClientConnectionData>),
    ) -> Result<Self, Error> {
        Self::new(secrets, NextKeys::Client(Box::new(next_keys)))
    }

    pub(super) fn of_server(
        (secrets, next_keys): (ExtractedSecrets, KernelConnection<ServerConnectionData>),
    ) -> Result<Self, Error> {
        Self::new(secrets, NextKeys::Server(Box::new(next_keys)))
    }

    fn new(secrets: ExtractedSecrets, next_keys: NextKeys) -> Result<Self, Error> {
        let (sealing, opening) = (Direction::new(secrets.tx)?, Direction::new(secrets.rx)?);
        Ok(Self { next_keys, sealing, opening, is_update_due: false, records_per_key_max: RECORDS_PER_KEY_MAX })
    }

    /// Encrypts `plain`, of at most [`PLAIN_BYTES_MAX`] bytes, into the start of `room`, which must be larger by
    /// [`OVERHEAD_BYTES`] and [`KEY_UPDATE_BYTES`]. Returns the number of bytes written.
    pub(super) fn seal(&mut self, plain: &[u8], room: &mut [u8]) -> Result<usize, Error> {
        let mut start = 0;
        if self.is_update_due || self.sealing.sequence >= self.records_per_key_max {
            start = self.update_key(room)?;
        }
        self.sealing.seal(ContentType::ApplicationData, plain, &mut room[start..]).map(|bytes| start + bytes)
    }

    /// Sends a key update to the peer and switches to the next key.
    fn update_key(&mut self, room: &mut [u8]) -> Result<usize, Error> {
        // The last byte says that the peer need not update its own key.
        let message = [HandshakeType::KeyUpdate.into(), 0, 0, 1, 0];
        let bytes = self.sealing.seal(ContentType::Handshake, &message, room)?;
        self.sealing = Direction::new(match &mut self.next_keys {
            NextKeys::Client(keys) => keys.update_tx_secret(),
            NextKeys::Server(keys) => keys.update_tx_secret(),
        }?)?;
        self.is_update_due = false;
        Ok(bytes)
    }

    /// Encrypts an alert, [`ALERT_BYTES`] long: `close_notify` or the reason of a failure.
    pub(super) fn seal_alert(&mut self, alert: AlertDescription, room: &mut [u8]) -> Result<usize, Error> {
        let level = if alert == AlertDescription::CloseNotify { ALERT_WARNING } else { ALERT_FATAL };
        self.sealing.seal(ContentType::Alert, &[level, alert.into()], room)
    }

    /// Decrypts one complete record into the start of `out`, which must have exactly [`inner_bytes`] of it. Returns the
    /// content type and length. Bytes after the content, and all of `out` after an error, are unspecified.
    pub(super) fn open(&mut self, record: &[u8], out: &mut [u8]) -> Result<(ContentType, usize), Error> {
        self.opening.open(record, out)
    }

    /// Processes an alert or a handshake message of the peer.
    pub(super) fn handle_message(&mut self, kind: ContentType, message: &[u8]) -> Result<PostHandshake, Error> {
        match (kind, message) {
            (ContentType::Alert, [_, alert]) => match AlertDescription::from(*alert) {
                AlertDescription::CloseNotify => Ok(PostHandshake::CloseNotify),
                AlertDescription::UserCanceled => Ok(PostHandshake::Handled),
                alert => Err(Error::AlertReceived(alert)),
            },
            (ContentType::Alert, _) => Err(InvalidMessage::MessageTooShort.into()),
            (ContentType::Handshake, message) => self.handle_handshake(message).map(|()| PostHandshake::Handled),
            (got_type, _) => {
                let expect_types = vec![ContentType::ApplicationData, ContentType::Alert, ContentType::Handshake];
                Err(Error::InappropriateMessage { expect_types, got_type })
            }
        }
    }

    /// Post-handshake messages must fit one record. ronde's sidecars send a key update only, one for each record.
    fn handle_handshake(&mut self, message: &[u8]) -> Result<(), Error> {
        let &[kind, 0, 0, 1, asked] = message else {
            return Err(PeerMisbehaved::KeyEpochWithPendingFragment.into());
        };
        let got_type = HandshakeType::from(kind);
        if got_type != HandshakeType::KeyUpdate {
            let expect_types = vec![HandshakeType::KeyUpdate];
            return Err(Error::InappropriateHandshakeMessage { expect_types, got_type });
        }
        if asked > 1 {
            return Err(InvalidMessage::InvalidKeyUpdate.into());
        }
        self.is_update_due |= asked == 1;
        self.opening = Direction::new(match &mut self.next_keys {
            NextKeys::Client(keys) => keys.update_rx_secret(),
            NextKeys::Server(keys) => keys.update_rx_secret(),
        }?)?;
        Ok(())
    }
}

/// Support for tests of misbehaving peers.
#[cfg(test)]
impl Records {
    /// Encrypts a record that no peer may send.
    pub(super) fn forge(&mut self, kind: ContentType, content: &[u8], room: &mut [u8]) -> usize {
        self.sealing.seal(kind, content, room).expect("room")
    }

    pub(super) fn change_keys_after(&mut self, records: u64) {
        self.records_per_key_max = records;
    }

    pub(super) fn sealed_by_this_key(&self) -> u64 {
        self.sealing.sequence
    }
}

impl Direction {
    fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, Error> {
        let ConnectionTrafficSecrets::Aes128Gcm { key, iv } = secrets else {
            return Err(Error::General("TLS negotiated a cipher suite that neither side offers".to_owned()));
        };
        Ok(Self { key: Key::new(key.as_ref())?, iv, sequence })
    }

    /// The next nonce, unique for this key.
    fn next_nonce(&mut self) -> Result<[u8; NONCE_BYTES], Error> {
        let nonce = Nonce::new(&self.iv, self.sequence);
        self.sequence = self.sequence.checked_add(1).ok_or(Error::EncryptError)?;
        Ok(nonce.0)
    }

    fn seal(&mut self, kind: ContentType, plain: &[u8], room: &mut [u8]) -> Result<usize, Error> {
        let bytes = plain.len() + OVERHEAD_BYTES;
        let header = make_tls13_aad(bytes - HEADER_BYTES);
        let (head, sealed) = room[..bytes].split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&header);
        let nonce = self.next_nonce()?;
        self.key.seal(nonce, &header, (plain, kind.into()), sealed).map(|()| bytes)
    }

    fn open(&mut self, record: &[u8], out: &mut [u8]) -> Result<(ContentType, usize), Error> {
        let (header, sealed) = record.split_first_chunk::<HEADER_BYTES>().ok_or(Error::DecryptError)?;
        let (sealed, tag) = sealed.split_last_chunk::<TAG_BYTES>().ok_or(Error::DecryptError)?;
        let nonce = self.next_nonce()?;
        self.key.open(nonce, header, (sealed, *tag), out)?;
        // The content type follows the content, and zero padding follows the content type.
        let kind = out.iter().rposition(|byte| *byte != 0).ok_or(PeerMisbehaved::IllegalTlsInnerPlaintext)?;
        if kind > PLAIN_BYTES_MAX {
            return Err(Error::PeerSentOversizedRecord);
        }
        Ok((ContentType::from(out[kind]), kind))
    }
}

/// The length of the record that starts with these bytes; `None` if its header is incomplete.
pub(super) fn record_bytes(bytes: &[u8]) -> Result<Option<usize>, Error> {
    let Some(&[kind, _, _, high, low]) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let got_type = ContentType::from(kind);
    if got_type != ContentType::ApplicationData {
        // An unencrypted alert proves nothing: an attacker on the path can send it.
        return Err(Error::InappropriateMessage { expect_types: vec![ContentType::ApplicationData], got_type });
    }
    match usize::from(u16::from_be_bytes([high, low])) {
        ..=TAG_BYTES => Err(Error::DecryptError),
        sealed if sealed > SEALED_BYTES_MAX => Err(Error::PeerSentOversizedRecord),
        sealed => Ok(Some(HEADER_BYTES + sealed)),
    }
}

/// The number of decrypted bytes of a record, with content type and padding.
pub(super) fn inner_bytes(record_bytes: usize) -> usize {
    record_bytes - HEADER_BYTES - TAG_BYTES
}

/// The alert to send for an error.
pub(super) fn alert_of(error: &Error) -> AlertDescription {
    match error {
        Error::DecryptError => AlertDescription::BadRecordMac,
        Error::PeerSentOversizedRecord => AlertDescription::RecordOverflow,
        Error::InvalidMessage(InvalidMessage::InvalidKeyUpdate) => AlertDescription::IllegalParameter,
        Error::InvalidMessage(_) => AlertDescription::DecodeError,
        Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } | Error::PeerMisbehaved(_) => {
            AlertDescription::UnexpectedMessage
        }
        _ => AlertDescription::InternalError,
    }
}

/// The largest content of a record.
pub(super) const PLAIN_BYTES_MAX: usize = 16 << 10;
const HEADER_BYTES: usize = 5;
/// What encryption adds to a record: header, content type and tag.
pub(super) const OVERHEAD_BYTES: usize = HEADER_BYTES + 1 + TAG_BYTES;
/// Bytes of a key update record.
pub(super) const KEY_UPDATE_BYTES: usize = 5 + OVERHEAD_BYTES;
/// Bytes of an alert record.
pub(super) const ALERT_BYTES: usize = 2 + OVERHEAD_BYTES;
/// The largest record after its header; the excess over the content is padding.
const SEALED_BYTES_MAX: usize = PLAIN_BYTES_MAX + 256;
/// Limit for records per key: half of the 2^24.5 full records that RFC 8446 section 5.5 allows for AES-GCM, 128 GiB.
const RECORDS_PER_KEY_MAX: u64 = 1 << 23;
const ALERT_WARNING: u8 = 1;
const ALERT_FATAL: u8 = 2;
