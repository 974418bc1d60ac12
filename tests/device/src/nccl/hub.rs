//! How the ranks of a communicator meet: the process that makes a unique id serves a socket, to which all ranks connect.
//!
//! Each collective is a round: every rank sends what it contributes, and gets the contributions of all. Ranks that call
//! different collectives in one round wait for ever, as NCCL's kernels do, and so do those that wait for a process that has
//! died. An abort is announced to all.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use crate::lock;

/// What a frame is.
pub(super) const HELLO: u8 = 0;
pub(super) const JOINED: u8 = 1;
pub(super) const ROUND: u8 = 2;
pub(super) const ABORT: u8 = 3;
/// The most bytes of a frame: a test that sends more is wrong.
const FRAME_BYTES_MAX: u64 = 1 << 30;

/// A message: its kind, the round or the rank, and its content.
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) number: u64,
    pub(super) content: Vec<u8>,
}

pub(super) fn send(mut stream: &UnixStream, kind: u8, number: u64, content: &[u8]) -> std::io::Result<()> {
    let mut header = [0; 17];
    header[0] = kind;
    header[1..9].copy_from_slice(&number.to_le_bytes());
    header[9..].copy_from_slice(&(content.len() as u64).to_le_bytes());
    stream.write_all(&header)?;
    stream.write_all(content)
}

pub(super) fn receive(mut stream: &UnixStream) -> std::io::Result<Frame> {
    let mut header = [0; 17];
    stream.read_exact(&mut header)?;
    let number = |range: std::ops::Range<usize>| u64::from_le_bytes(header[range].try_into().unwrap_or_default());
    let length = number(9..17);
    if length > FRAME_BYTES_MAX {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut content = vec![0; usize::try_from(length).unwrap_or_default()];
    stream.read_exact(&mut content)?;
    Ok(Frame { kind: header[0], number: number(1..9), content })
}

fn address(name: &[u8]) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

pub(super) fn connect(name: &[u8]) -> std::io::Result<UnixStream> {
    UnixStream::connect_addr(&address(name)?)
}

/// What the ranks have sent.
#[derive(Default)]
struct Hub {
    /// By rank.
    ranks: BTreeMap<u64, UnixStream>,
    /// By round: the contributions by rank.
    rounds: HashMap<u64, BTreeMap<u64, Vec<u8>>>,
}

impl Hub {
    fn send_to_all(&self, kind: u8, number: u64, content: &[u8]) {
        for stream in self.ranks.values() {
            // One that has gone receives nothing.
            let _ = send(stream, kind, number, content);
        }
    }

    fn join(&mut self, rank: u64, ranks: usize, stream: UnixStream) {
        self.ranks.insert(rank, stream);
        if self.ranks.len() == ranks {
            self.send_to_all(JOINED, 0, &[]);
        }
    }

    /// Adds a contribution, and answers when all are there. The headers of all have to be equal.
    fn contribute(&mut self, rank: u64, round: u64, content: Vec<u8>) {
        let all = self.rounds.entry(round).or_default();
        all.insert(rank, content);
        if all.len() < self.ranks.len() {
            return;
        }
        let header = |content: &Vec<u8>| content.get(..HEADER_BYTES).map(<[u8]>::to_vec);
        let first = all.values().next().and_then(header);
        if first.is_none() || all.values().any(|content| header(content) != first) {
            return;
        }
        let parts = all.values().map(|content| &content[HEADER_BYTES..]);
        let framed = parts.flat_map(|part| [&(part.len() as u64).to_le_bytes()[..], part].concat());
        let answer: Vec<u8> = framed.collect();
        self.rounds.remove(&round);
        self.send_to_all(ROUND, round, &answer);
    }
}

/// The bytes in which a collective is described.
pub(super) const HEADER_BYTES: usize = 24;

/// The contributions in the answer of a round, by rank.
pub(super) fn parts(mut answer: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while let Some((length, rest)) = answer.split_first_chunk::<8>() {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let Some((part, others)) = rest.split_at_checked(length) else { break };
        found.push(part.to_vec());
        answer = others;
    }
    found
}

/// Serves a communicator that does not exist yet, on a socket of this name.
pub(super) fn serve(name: &[u8]) -> std::io::Result<()> {
    let listener = UnixListener::bind_addr(&address(name)?)?;
    let hub = Arc::new(Mutex::new(Hub::default()));
    // Detached: it ends with the process, as NCCL's own thread does.
    drop(std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let hub = Arc::clone(&hub);
            drop(std::thread::spawn(move || serve_rank(&hub, &stream)));
        }
    }));
    Ok(())
}

fn serve_rank(hub: &Mutex<Hub>, stream: &UnixStream) {
    let Ok(Frame { kind: HELLO, number: rank, content }) = receive(stream) else { return };
    let ranks = content.try_into().map_or(0, u64::from_le_bytes);
    let Ok(writer) = stream.try_clone() else { return };
    lock(hub).join(rank, usize::try_from(ranks).unwrap_or_default(), writer);
    // Ends when the rank's process does: the others are not notified, as within a host by NCCL.
    while let Ok(Frame { kind, number, content }) = receive(stream) {
        match kind {
            ROUND => lock(hub).contribute(rank, number, content),
            ABORT => lock(hub).send_to_all(ABORT, 0, &[]),
            _ => {}
        }
    }
}
