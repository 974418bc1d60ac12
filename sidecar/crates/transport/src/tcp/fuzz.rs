//! Fuzz target for bytes of a TCP connection: arbitrary handshakes, and tampered records.

use std::sync::Arc;

use ronde_fuzz::{Outcome, fuzz};
use ronde_wire::SidecarIndex;

use super::session::{Opened, Progress, TlsSession};
use crate::fuzz::job;
use crate::tls;

/// Feeds a handshake, or tampered records, to a session. What is decrypted is always a prefix of what was encrypted.
/// The first byte of the input selects one of the two. Tampering uses four bytes each: which record, which byte, what
/// to add to it, and whether the record moves.
#[test]
fn fuzz_sealed_streams() {
    const PLAIN_TEXT: &[u8] = b"plain text that only the other side can encrypt";
    let (_, [one, other]) = job();
    let client_config = Arc::new(tls::client_config(&one, SidecarIndex(1)).expect("a configuration"));
    let server_config = Arc::new(tls::server_config(&other).expect("a configuration"));
    let first = {
        let mut client = TlsSession::client(client_config.clone()).expect("a session");
        client.advance().expect("it begins");
        client.outgoing().to_vec()
    };
    let seeds = vec![[&[0], &first[..]].concat(), vec![1, 0, 9, 0, 0], vec![1, 1, 0, 0, 0, 0, 3, 0, 0]];
    fuzz("sealed_streams", seeds, |bytes| {
        let Some((kind, input)) = bytes.split_first() else { return Outcome::refused(&"nothing") };
        if kind & 1 == 0 {
            let mut server = TlsSession::server(server_config.clone()).expect("a session");
            return Outcome::of(
                &feed(&mut server, input).inspect(|progress| assert_eq!(*progress, Progress::NeedsInput)),
            );
        }
        let (mut client, mut server) = established(client_config.clone(), server_config.clone());
        let mut records: Vec<Vec<u8>> = Vec::new();
        for part in PLAIN_TEXT.chunks(10) {
            assert_eq!(client.seal(part).expect("room"), part.len());
            records.push(taken(&mut client));
        }
        let mut changed = false;
        for step in input.chunks_exact(4).take(8) {
            let record = usize::from(step[0]) % records.len();
            let length = records[record].len();
            records[record][usize::from(step[1]) % length] ^= step[2];
            changed |= step[2] != 0;
            if step[3] == 1 {
                let second = usize::from(step[1]) % records.len();
                changed |= record != second;
                records.swap(record, second);
            }
        }
        opens_a_prefix(&mut server, &records.concat(), PLAIN_TEXT, changed)
    });
}

fn opens_a_prefix(server: &mut TlsSession, sealed: &[u8], plain_text: &[u8], changed: bool) -> Outcome {
    let (mut memory, mut want) = (vec![0; plain_text.len() + 1], plain_text.len());
    server.room()[..sealed.len()].copy_from_slice(sealed);
    server.put(sealed.len());
    let result = server.open(&mut &mut memory[..], &mut want);
    let opened = &memory[..plain_text.len() - want];
    assert!(plain_text.starts_with(opened), "bytes were decrypted that were not encrypted");
    if !changed {
        assert_eq!((result.as_ref(), opened.len()), (Ok(&Opened::All), plain_text.len()));
    }
    Outcome::of(&result)
}

/// Feeds bytes to a session's handshake.
fn feed(session: &mut TlsSession, bytes: &[u8]) -> Result<Progress, rustls::Error> {
    let room = session.room();
    let length = bytes.len().min(room.len());
    room[..length].copy_from_slice(&bytes[..length]);
    session.put(length);
    session.advance()
}

fn taken(session: &mut TlsSession) -> Vec<u8> {
    let bytes = session.outgoing().to_vec();
    session.written(bytes.len());
    bytes
}

fn established(client: Arc<rustls::ClientConfig>, server: Arc<rustls::ServerConfig>) -> (TlsSession, TlsSession) {
    let mut client = TlsSession::client(client).expect("a session");
    let mut server = TlsSession::server(server).expect("a session");
    let (mut here, mut there) = (client.advance().expect("a beginning"), Progress::NeedsInput);
    for _ in 0..4 {
        if (here, there) == (Progress::Established, Progress::Established) {
            return (client, server);
        }
        there = feed(&mut server, &taken(&mut client)).expect("good");
        here = feed(&mut client, &taken(&mut server)).expect("good");
    }
    panic!("the handshake does not end");
}
