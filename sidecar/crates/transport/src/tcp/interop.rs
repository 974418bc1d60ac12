//! Interoperability with rustls' own connections, and invalid records.

use std::io::{Read, Write};
use std::sync::Arc;

use ronde_wire::SidecarIndex;
use rustls::{AlertDescription, ContentType, Error};

use super::records;
use super::session::{Opened, Progress, TlsSession};
use crate::fuzz::job;
use crate::tls;

/// A session whose peer is a rustls connection, after the handshake.
struct Pair {
    session: TlsSession,
    peer: rustls::Connection,
}

impl Pair {
    fn new(is_client: bool) -> Self {
        let (client_config, server_config) = configs();
        let (mut session, mut peer) = if is_client {
            let peer = rustls::ServerConnection::new(server_config).expect("a configuration");
            (TlsSession::client(client_config).expect("a session"), rustls::Connection::from(peer))
        } else {
            let name = tls::SERVER_NAME.try_into().expect("a name");
            let peer = rustls::ClientConnection::new(client_config, name).expect("a configuration");
            (TlsSession::server(server_config).expect("a session"), rustls::Connection::from(peer))
        };
        for _ in 0..6 {
            let progress = session.advance().expect("a good peer");
            flush(&mut session, &mut peer).expect("a good session");
            feed(&mut peer, &mut session);
            if progress == Progress::Established && !peer.is_handshaking() {
                assert!(session.has_ronde_alpn());
                assert_eq!(session.peer_certificates().len(), 1);
                return Self { session, peer };
            }
        }
        panic!("the handshake does not end");
    }

    /// One pair with each role.
    fn both() -> [Self; 2] {
        [Self::new(true), Self::new(false)]
    }

    /// Sends bytes to rustls, which must receive exactly these.
    fn send(&mut self, bytes: &[u8]) {
        let mut left = bytes;
        while !left.is_empty() {
            let (sealed, rest) = left.split_at(self.session.seal(left).expect("a good session"));
            assert!(flush(&mut self.session, &mut self.peer).expect("a good session") == sealed, "other bytes");
            left = rest;
        }
    }

    /// Receives bytes from rustls, into a buffer with `spare` bytes more than needed.
    fn receive(&mut self, bytes: &[u8], spare: usize) -> Result<Opened, Error> {
        let (mut memory, mut want) = (vec![0; bytes.len() + spare], bytes.len());
        let mut out = &mut memory[..];
        let mut left = bytes;
        loop {
            let written = self.peer.writer().write(left).expect("memory");
            left = &left[written..];
            feed(&mut self.peer, &mut self.session);
            match self.session.open(&mut out, &mut want)? {
                Opened::NeedsInput => assert!(!left.is_empty() || self.peer.wants_write(), "something is lost"),
                opened => {
                    assert_eq!(out.len(), want + spare);
                    assert!(bytes.starts_with(&memory[..bytes.len() - want]), "other bytes");
                    return Ok(opened);
                }
            }
        }
    }
}

fn configs() -> (Arc<rustls::ClientConfig>, Arc<rustls::ServerConfig>) {
    let (_, [one, other]) = job();
    let client = tls::client_config(&one, SidecarIndex(1)).expect("a configuration");
    (Arc::new(client), Arc::new(tls::server_config(&other).expect("a configuration")))
}

/// Two sessions after their handshake; tests use the first to send invalid records.
fn sessions() -> (TlsSession, TlsSession) {
    let (client_config, server_config) = configs();
    let mut client = TlsSession::client(client_config).expect("a session");
    let mut server = TlsSession::server(server_config).expect("a session");
    for _ in 0..4 {
        let here = client.advance().expect("good");
        pass(&mut client, &mut server);
        let there = server.advance().expect("good");
        pass(&mut server, &mut client);
        if (here, there) == (Progress::Established, Progress::Established) {
            return (client, server);
        }
    }
    panic!("the handshake does not end");
}

fn pass(from: &mut TlsSession, to: &mut TlsSession) {
    let sealed = from.outgoing().to_vec();
    from.written(sealed.len());
    put(to, &sealed);
}

fn put(to: &mut TlsSession, bytes: &[u8]) {
    to.room()[..bytes.len()].copy_from_slice(bytes);
    to.put(bytes.len());
}

/// Passes the session's encrypted bytes to rustls, and returns what it decrypts.
fn flush(session: &mut TlsSession, peer: &mut rustls::Connection) -> Result<Vec<u8>, Error> {
    let mut received = Vec::new();
    while !session.outgoing().is_empty() {
        let mut sealed = session.outgoing();
        let taken = peer.read_tls(&mut sealed).expect("memory");
        assert!(taken > 0, "rustls takes no more");
        session.written(taken);
        let start = received.len();
        received.resize(start + peer.process_new_packets()?.plaintext_bytes_to_read(), 0);
        peer.reader().read_exact(&mut received[start..]).expect("so many bytes");
    }
    Ok(received)
}

/// Passes rustls' encrypted bytes to the session, as far as there is room.
fn feed(peer: &mut rustls::Connection, session: &mut TlsSession) {
    while peer.wants_write() {
        let mut room = session.room();
        if room.len() < 2 * records::PLAIN_BYTES_MAX {
            return;
        }
        let taken = peer.write_tls(&mut room).expect("memory");
        session.put(taken);
    }
}

/// A pattern with a period that differs from the size of records.
fn bytes(length: usize) -> Vec<u8> {
    (0..=250).cycle().take(length).collect()
}

fn opened(session: &mut TlsSession) -> Result<Opened, Error> {
    session.open(&mut &mut [0; 100][..], &mut 1)
}

#[test]
fn rustls_opens_our_records_and_we_open_its() {
    for mut pair in Pair::both() {
        for length in [1, 2, 1_000, 16_383, 16_384, 16_385, 100_000, 1_000_000, 7] {
            pair.send(&bytes(length));
            // Once with room to decrypt in place, and once without.
            assert_eq!(pair.receive(&bytes(length), 1), Ok(Opened::All), "{length} bytes");
            assert_eq!(pair.receive(&bytes(length), 0), Ok(Opened::All), "{length} bytes");
        }
    }
}

#[test]
fn reads_of_any_size_give_the_same_bytes() {
    for mut pair in Pair::both() {
        let sent = bytes(150_000);
        assert_eq!(pair.peer.writer().write(&sent[..60_000]).expect("memory"), 60_000);
        feed(&mut pair.peer, &mut pair.session);
        assert_eq!(pair.peer.writer().write(&sent[60_000..120_000]).expect("memory"), 60_000);
        feed(&mut pair.peer, &mut pair.session);
        let (mut place, mut step) = (0, 1);
        while place < 120_000 {
            let length = step.min(120_000 - place);
            let mut memory = vec![0; length + step % 3];
            assert_eq!(pair.session.open(&mut &mut memory[..], &mut { length }), Ok(Opened::All));
            assert!(memory[..length] == sent[place..place + length], "{length} bytes at {place}");
            (place, step) = (place + length, step * 3 % 30_011);
        }
    }
}

#[test]
fn keys_change_when_the_peer_asks() {
    for mut pair in Pair::both() {
        for _ in 0..3 {
            pair.peer.refresh_traffic_keys().expect("TLS 1.3");
            assert_eq!(pair.receive(&bytes(20_000), 1), Ok(Opened::All));
            // rustls has requested a key update of the other direction, which precedes the next data.
            pair.send(&bytes(20_000));
        }
    }
}

#[test]
fn keys_change_when_they_have_sealed_enough() {
    for mut pair in Pair::both() {
        pair.session.records().change_keys_after(3);
        for _ in 0..10 {
            pair.send(&bytes(100_000));
        }
        assert!(pair.session.records().sealed_by_this_key() <= 3);
    }
}

#[test]
fn each_direction_ends_independently() {
    for mut pair in Pair::both() {
        assert_eq!(pair.session.finish(), Ok(true));
        flush(&mut pair.session, &mut pair.peer).expect("a good session");
        assert_eq!(pair.peer.reader().read(&mut [0; 1]).expect("an end"), 0);
        assert!(!pair.session.has_peer_finished());
        assert_eq!(pair.receive(&bytes(1_000), 1), Ok(Opened::All));
        pair.peer.send_close_notify();
        assert_eq!(pair.receive(&[1], 1), Ok(Opened::Finished));
        assert!(pair.session.has_peer_finished());
    }
}

#[test]
fn a_bad_record_is_answered_with_an_alert() {
    for mut pair in Pair::both() {
        pair.peer.writer().write_all(&bytes(100)).expect("memory");
        let mut sealed = Vec::new();
        pair.peer.write_tls(&mut sealed).expect("memory");
        sealed[50] ^= 1;
        put(&mut pair.session, &sealed);
        assert_eq!(opened(&mut pair.session), Err(Error::DecryptError));
        assert_eq!(opened(&mut pair.session), Err(Error::DecryptError));
        assert_eq!(pair.session.seal(&[1]), Err(Error::DecryptError));
        let received = flush(&mut pair.session, &mut pair.peer);
        assert_eq!(received, Err(Error::AlertReceived(AlertDescription::BadRecordMac)));
    }
}

/// Records of an authenticated peer that TLS does not allow. Each ends the session with an alert; none is decrypted.
#[test]
fn records_that_tls_does_not_allow() {
    const DATA: ContentType = ContentType::ApplicationData;
    const MESSAGE: ContentType = ContentType::Handshake;
    let update = [24, 0, 0, 1, 0];
    let cases: [(&str, ContentType, Vec<u8>, AlertDescription); 9] = [
        ("too long", DATA, vec![7; records::PLAIN_BYTES_MAX + 1], AlertDescription::RecordOverflow),
        ("of no kind", ContentType::Unknown(0), vec![0; 9], AlertDescription::UnexpectedMessage),
        ("of another kind", ContentType::ChangeCipherSpec, vec![1], AlertDescription::UnexpectedMessage),
        ("half an alert", ContentType::Alert, vec![2], AlertDescription::DecodeError),
        ("a key that changes by two", MESSAGE, vec![24, 0, 0, 1, 2], AlertDescription::IllegalParameter),
        ("two messages", MESSAGE, [update, update].concat(), AlertDescription::UnexpectedMessage),
        ("half a message", MESSAGE, update[..4].to_vec(), AlertDescription::UnexpectedMessage),
        ("another handshake", MESSAGE, vec![1, 0, 0, 1, 0], AlertDescription::UnexpectedMessage),
        ("no message", MESSAGE, Vec::new(), AlertDescription::UnexpectedMessage),
    ];
    for (what, kind, content, alert) in cases {
        let (mut bad, mut good) = sessions();
        let mut sealed = vec![0; content.len() + records::OVERHEAD_BYTES];
        bad.records().forge(kind, &content, &mut sealed);
        put(&mut good, &sealed);
        let (mut memory, mut want) = (vec![0; 2 * records::PLAIN_BYTES_MAX], 2 * records::PLAIN_BYTES_MAX);
        let error = good.open(&mut &mut memory[..], &mut want);
        assert!(error.is_err() && want == memory.len(), "{what}: {error:?}");
        pass(&mut good, &mut bad);
        assert_eq!(opened(&mut bad), Err(Error::AlertReceived(alert)), "{what}");
        assert!(bad.outgoing().is_empty(), "an alert is answered");
    }
}

#[test]
fn records_that_are_not_sealed() {
    let cases: [(&[u8], AlertDescription); 4] = [
        (&[21, 3, 3, 0, 2, 2, 40], AlertDescription::UnexpectedMessage),
        (&[20, 3, 3, 0, 1, 1], AlertDescription::UnexpectedMessage),
        (&[23, 3, 3, 0, 16, 0], AlertDescription::BadRecordMac),
        (&[23, 3, 3, 0x41, 1, 0], AlertDescription::RecordOverflow),
    ];
    for (bytes, alert) in cases {
        let (mut other, mut good) = sessions();
        put(&mut good, bytes);
        assert!(opened(&mut good).is_err(), "{bytes:?}");
        pass(&mut good, &mut other);
        assert_eq!(opened(&mut other), Err(Error::AlertReceived(alert)), "{bytes:?}");
    }
}

#[test]
fn a_record_may_be_padded_and_may_be_empty() {
    let (mut other, mut good) = sessions();
    let mut sealed = vec![0; 3 * 100];
    // Three bytes of content, the content type, then zero padding; `forge` appends a zero as well.
    let padded = other.records().forge(ContentType::Unknown(0), &[1, 2, 3, 23, 0, 0, 0], &mut sealed);
    let empty = other.records().forge(ContentType::ApplicationData, &[], &mut sealed[padded..]);
    let last = other.records().forge(ContentType::ApplicationData, &[4], &mut sealed[padded + empty..]);
    put(&mut good, &sealed[..padded + empty + last]);
    let mut memory = [0; 100];
    assert_eq!(good.open(&mut &mut memory[..], &mut { 4 }), Ok(Opened::All));
    assert_eq!(memory[..4], [1, 2, 3, 4]);
}
