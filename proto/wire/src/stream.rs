//! Streams: connections of NCCL's net plugin between two workers, carried by the links of lanes.
//!
//! A worker writes [`WorkerMessage`]s to a ring in shared memory and reads [`SidecarMessage`]s from it. Sidecars exchange
//! [`StreamFrame`]s. A [`WorkerMessage::Data`] is forwarded as it is: its bytes are the body of a frame, and then a message
//! of the receiver's ring. So the payload is parsed by the two plugins only.
//!
//! ```text
//! a message of a ring               the payload of a frame
//! offset  bytes  field              offset  bytes  field
//!      0      1  kind                    0      1  kind
//!      1      7  zero                    1      7  zero
//!      8      8  number                  8      8  stream, as the receiver numbers it
//!     16         body                   16         body
//! ```
//!
//! Integers are little-endian. A stream carries data from the worker that connects to the one that listens. The receiver
//! grants *credit* in bytes of its ring; a sidecar sends data only with credit, so it holds none for a slow receiver.

use std::fmt;
use std::hint::black_box;

use bytes::{BufMut, Bytes, BytesMut};

use crate::ids::{JobName, Lane, SidecarIndex};
use crate::limits::STREAM_TEXT_BYTES_MAX;

/// Bytes of a [`Handle`], as NCCL reserves them.
pub const HANDLE_BYTES: usize = 128;
/// Bytes of the header of a ring's message, and of that of a frame's payload.
pub const STREAM_HEADER_BYTES: usize = 16;
const SECRET_BYTES: usize = 16;
const HANDLE_MAGIC: [u8; 8] = *b"rondenet";
const HANDLE_VERSION: u32 = 1;
/// Where a handle has bytes for its holder.
const SCRATCH: usize = HANDLE_BYTES - 8;

/// Why bytes are not a valid message of a stream. Always the sender's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no message of a stream: {0}")]
pub struct StreamError(pub &'static str);

/// A listener's secret. Comparison takes constant time; `Debug` does not reveal it.
#[derive(Clone, Copy)]
pub struct ListenSecret(pub [u8; SECRET_BYTES]);

impl PartialEq for ListenSecret {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |difference, (a, b)| black_box(difference | (a ^ b))) == 0
    }
}

impl Eq for ListenSecret {}

impl fmt::Debug for ListenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ListenSecret(secret)")
    }
}

/// Identifies a listener to those who may connect to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The listener's sidecar.
    pub sidecar: SidecarIndex,
    /// The lane that carries its streams.
    pub lane: Lane,
    /// The listener's number there.
    pub listener: u64,
    /// Proves that the holder received the handle.
    pub secret: ListenSecret,
    /// Distinguishes jobs for error messages. The certificate is what authenticates.
    pub job: u64,
}

impl Handle {
    /// The bytes that the one side gives to the other.
    #[must_use]
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        let mut out = &mut bytes[..];
        out.put_slice(&HANDLE_MAGIC);
        out.put_u32_le(HANDLE_VERSION);
        self.put(&mut out);
        bytes
    }

    /// Parses what [`Self::encode`] wrote. The last 8 bytes belong to the holder, see [`scratch`].
    ///
    /// # Errors
    /// [`StreamError`] if another program or another version made the handle.
    pub fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, StreamError> {
        let mut input = Input(bytes);
        if input.take::<8>()? != HANDLE_MAGIC {
            return Err(StreamError("the handle is not one of ronde's plugin; all ranks need NCCL_NET_PLUGIN=ronde"));
        }
        if input.u32()? != HANDLE_VERSION {
            return Err(StreamError("the handle is of another version; install the same release on all hosts"));
        }
        let handle = Self::get(&mut input)?;
        if input.0[..input.0.len() - 8].iter().any(|byte| *byte != 0) {
            return Err(StreamError("the handle has bytes where there are none"));
        }
        Ok(handle)
    }

    fn put(&self, out: &mut impl BufMut) {
        out.put_u32_le(self.sidecar.0);
        out.put_u16_le(self.lane.0);
        out.put_u16_le(0);
        out.put_u64_le(self.listener);
        out.put_slice(&self.secret.0);
        out.put_u64_le(self.job);
    }

    fn get(input: &mut Input<'_>) -> Result<Self, StreamError> {
        let sidecar = SidecarIndex(input.u32()?);
        let lane = Lane(u16::from_le_bytes(input.take()?));
        if input.take()? != [0; 2] {
            return Err(StreamError("the handle has bytes where there are none"));
        }
        let (listener, secret, job) = (input.u64()?, ListenSecret(input.take()?), input.u64()?);
        Ok(Self { sidecar, lane, listener, secret, job })
    }
}

/// The bytes of a handle that its holder may use; zero in a handle that was not used yet.
#[must_use]
pub fn scratch(handle: &[u8; HANDLE_BYTES]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&handle[SCRATCH..]);
    u64::from_le_bytes(bytes)
}

/// Sets the bytes of [`scratch`].
pub fn set_scratch(handle: &mut [u8; HANDLE_BYTES], value: u64) {
    handle[SCRATCH..].copy_from_slice(&value.to_le_bytes());
}

/// A number that differs between jobs, nearly always.
#[must_use]
pub fn job_number(job: &JobName) -> u64 {
    // FNV-1a: no secret depends on it.
    job.as_str()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// A message of a worker to its sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerMessage {
    /// The first message of a ring: listen.
    Listen,
    /// The first message of a ring: take the next stream of a listener that this worker has.
    Accept {
        /// The listener.
        listener: u64,
        /// Its secret.
        secret: ListenSecret,
    },
    /// The first message of a ring: connect to a listener.
    Connect(Handle),
    /// A part of a message, see [`DataHeader`]. Its body is not looked at.
    Data,
    /// Bytes of the ring that the receiver has read since its last credit.
    Credit(u64),
    /// The sender sends nothing more.
    Finish,
}

/// A message of a sidecar to a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SidecarMessage {
    /// The listener exists.
    Listening(Handle),
    /// The stream is up.
    Connected {
        /// The peer's sidecar.
        peer: SidecarIndex,
        /// The receiver's first credit in bytes of its ring. A part of a message takes at most a quarter of it.
        window: u32,
    },
    /// A part of a message, as the sender's worker wrote it.
    Data,
    /// The sender has finished. Nothing follows.
    Finished,
    /// The stream is over. Nothing follows.
    Failed(String),
}

/// What sidecars send to each other about streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamFrame {
    /// Connect to a listener. `stream` is the sender's own number.
    Open {
        /// The listener.
        listener: u64,
        /// Its secret.
        secret: ListenSecret,
    },
    /// The answer to `Open`: the stream is up.
    Accept {
        /// The number by which the sender of this frame knows the stream.
        number: u64,
        /// The first credit, in bytes of a ring.
        credit: u64,
    },
    /// The stream is over, or was not accepted.
    Close(String),
    /// A [`WorkerMessage::Data`], with its header.
    Data(Bytes),
    /// More credit, in bytes of a ring.
    Credit(u64),
    /// The sender has finished.
    Finish,
    /// Shows that the sender is alive; answered by nothing.
    Alive,
    /// An `Open` that was not answered is over. `stream` is the sender's own number, as there.
    Abandon {
        /// The listener.
        listener: u64,
    },
}

/// The kinds of messages and frames, which have one numbering.
mod kind {
    pub(super) const LISTEN: u8 = 1;
    pub(super) const ACCEPT: u8 = 2;
    pub(super) const CONNECT: u8 = 3;
    pub(super) const DATA: u8 = 4;
    pub(super) const CREDIT: u8 = 5;
    pub(super) const FINISH: u8 = 6;
    pub(super) const CLOSE: u8 = 7;
    pub(super) const ALIVE: u8 = 8;
    pub(super) const ABANDON: u8 = 9;
}

/// Starts a message or a payload.
fn header(kind: u8, number: u64) -> BytesMut {
    let mut out = BytesMut::with_capacity(STREAM_HEADER_BYTES + HANDLE_BYTES);
    put_header(&mut out, kind, number);
    out
}

fn put_header(out: &mut impl BufMut, kind: u8, number: u64) {
    out.put_u64_le(u64::from(kind));
    out.put_u64_le(number);
}

/// Splits header and body.
fn split(bytes: &[u8]) -> Result<(u8, u64, Input<'_>), StreamError> {
    let mut input = Input(bytes);
    let kind = input.u64()?;
    let kind = u8::try_from(kind).map_err(|_| StreamError("bytes are set where there are none"))?;
    Ok((kind, input.u64()?, input))
}

fn text(body: &[u8]) -> String {
    let body = &body[..body.len().min(STREAM_TEXT_BYTES_MAX)];
    String::from_utf8_lossy(body).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn truncated(text: &str) -> &[u8] {
    let mut end = text.len().min(STREAM_TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text.as_bytes()[..end]
}

/// Whether a message of a ring is data, which is forwarded as it is. Only its first bytes are needed.
#[must_use]
pub fn is_data(message: &[u8]) -> bool {
    message.len() >= STREAM_HEADER_BYTES && message[0] == kind::DATA
}

/// Whether a message of a ring says that the sender has finished.
#[must_use]
pub fn is_finish(message: &[u8]) -> bool {
    message.len() == STREAM_HEADER_BYTES && message[0] == kind::FINISH
}

impl WorkerMessage {
    /// The bytes of the message. A message of data has no body here.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Listen => header(kind::LISTEN, 0),
            Self::Accept { listener, secret } => {
                let mut out = header(kind::ACCEPT, *listener);
                out.put_slice(&secret.0);
                out
            }
            Self::Connect(handle) => {
                let mut out = header(kind::CONNECT, 0);
                handle.put(&mut out);
                out
            }
            Self::Data => header(kind::DATA, 0),
            Self::Credit(bytes) => header(kind::CREDIT, *bytes),
            Self::Finish => header(kind::FINISH, 0),
        }
        .freeze()
    }

    /// Parses a message.
    ///
    /// # Errors
    /// [`StreamError`] for everything that [`Self::encode`] does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, StreamError> {
        let (kind, number, mut input) = split(bytes)?;
        let message = match kind {
            kind::LISTEN => Self::Listen,
            kind::ACCEPT => Self::Accept { listener: number, secret: ListenSecret(input.take()?) },
            kind::CONNECT => Self::Connect(Handle::get(&mut input)?),
            kind::DATA => return Ok(Self::Data),
            kind::CREDIT => Self::Credit(number),
            kind::FINISH => Self::Finish,
            _ => return Err(StreamError("its kind does not exist")),
        };
        if number != 0 && !matches!(message, Self::Accept { .. } | Self::Credit(_)) {
            return Err(StreamError("a number is set where there is none"));
        }
        input.last(message)
    }
}

impl SidecarMessage {
    /// The bytes of the message. A message of data has no body here.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Listening(handle) => {
                let mut out = header(kind::LISTEN, 0);
                handle.put(&mut out);
                out
            }
            Self::Connected { peer, window } => header(kind::ACCEPT, u64::from(*window) << 32 | u64::from(peer.0)),
            Self::Data => header(kind::DATA, 0),
            Self::Finished => header(kind::FINISH, 0),
            Self::Failed(reason) => {
                let mut out = header(kind::CLOSE, 0);
                out.put_slice(truncated(reason));
                out
            }
        }
        .freeze()
    }

    /// Parses a message.
    ///
    /// # Errors
    /// [`StreamError`] for everything that [`Self::encode`] does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, StreamError> {
        let (kind, number, mut input) = split(bytes)?;
        match kind {
            kind::LISTEN => {
                let handle = Handle::get(&mut input)?;
                input.last(Self::Listening(handle))
            }
            kind::ACCEPT => {
                let (window, peer) = halves(number);
                input.last(Self::Connected { peer: SidecarIndex(peer), window })
            }
            kind::DATA => Ok(Self::Data),
            kind::FINISH => input.last(Self::Finished),
            kind::CLOSE => Ok(Self::Failed(text(input.0))),
            _ => Err(StreamError("its kind does not exist")),
        }
    }
}

impl StreamFrame {
    /// The payload of a frame for the receiver's `stream`.
    #[must_use]
    pub fn encode(&self, stream: u64) -> Bytes {
        match self {
            Self::Open { listener, secret } => {
                let mut out = header(kind::CONNECT, stream);
                out.put_u64_le(*listener);
                out.put_slice(&secret.0);
                out
            }
            Self::Accept { number, credit } => {
                let mut out = header(kind::ACCEPT, stream);
                out.put_u64_le(*number);
                out.put_u64_le(*credit);
                out
            }
            Self::Close(reason) => {
                let mut out = header(kind::CLOSE, stream);
                out.put_slice(truncated(reason));
                out
            }
            Self::Data(body) => {
                let mut out = header(kind::DATA, stream);
                out.put_slice(body);
                out
            }
            Self::Credit(bytes) => {
                let mut out = header(kind::CREDIT, stream);
                out.put_u64_le(*bytes);
                out
            }
            Self::Finish => header(kind::FINISH, stream),
            Self::Alive => header(kind::ALIVE, stream),
            Self::Abandon { listener } => {
                let mut out = header(kind::ABANDON, stream);
                out.put_u64_le(*listener);
                out
            }
        }
        .freeze()
    }

    /// Writes the header of a [`Self::Data`] payload, whose body the caller puts after it without another copy.
    pub fn data_header(stream: u64, out: &mut [u8; STREAM_HEADER_BYTES]) {
        put_header(&mut &mut out[..], kind::DATA, stream);
    }

    /// Parses a payload: the receiver's number of the stream, and the frame. Data are not copied.
    ///
    /// # Errors
    /// [`StreamError`] for everything that [`Self::encode`] does not write.
    pub fn decode(payload: &Bytes) -> Result<(u64, Self), StreamError> {
        let (kind, stream, mut input) = split(payload)?;
        let frame = match kind {
            kind::CONNECT => Self::Open { listener: input.u64()?, secret: ListenSecret(input.take()?) },
            kind::ACCEPT => Self::Accept { number: input.u64()?, credit: input.u64()? },
            kind::CLOSE => return Ok((stream, Self::Close(text(input.0)))),
            kind::DATA if is_data(input.0) => return Ok((stream, Self::Data(payload.slice(STREAM_HEADER_BYTES..)))),
            kind::DATA => return Err(StreamError("data without its header")),
            kind::CREDIT => Self::Credit(input.u64()?),
            kind::FINISH => Self::Finish,
            kind::ALIVE => Self::Alive,
            kind::ABANDON => Self::Abandon { listener: input.u64()? },
            _ => return Err(StreamError("its kind does not exist")),
        };
        Ok((stream, input.last(frame)?))
    }
}

/// The header of a part of a message. Parts of a message follow each other without gaps, and the first one says how many
/// bytes the message has, so a part of 0 bytes is a whole message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// Bytes of the message that were in earlier parts.
    pub offset: u32,
    /// Bytes of the message.
    pub total: u32,
}

impl DataHeader {
    /// The header's bytes.
    #[must_use]
    pub fn encode(self) -> [u8; STREAM_HEADER_BYTES] {
        let mut bytes = [0; STREAM_HEADER_BYTES];
        put_header(&mut &mut bytes[..], kind::DATA, u64::from(self.total) << 32 | u64::from(self.offset));
        bytes
    }

    /// Parses a header. `None` for another message than data.
    #[must_use]
    pub fn decode(bytes: &[u8; STREAM_HEADER_BYTES]) -> Option<Self> {
        let (kind, number, _) = split(bytes).ok()?;
        let (total, offset) = halves(number);
        (kind == kind::DATA).then_some(Self { offset, total })
    }
}

/// The upper and the lower half of a number.
fn halves(number: u64) -> (u32, u32) {
    let bytes = number.to_le_bytes();
    let half = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(4), half(0))
}

/// Bytes that are parsed from the front.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], StreamError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(StreamError("it is too short"))?;
        self.0 = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, StreamError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, StreamError> {
        self.take().map(u64::from_le_bytes)
    }

    /// Returns a value if nothing follows it.
    fn last<T>(&self, value: T) -> Result<T, StreamError> {
        if self.0.is_empty() { Ok(value) } else { Err(StreamError("it is too long")) }
    }
}

#[cfg(test)]
mod tests;
