//! Frames: the units of control streams and lanes.
//!
//! ```text
//! offset  bytes  field
//!      0      4  magic "RNDE"
//!      4      2  wire version
//!      6      1  kind
//!      7      1  flags
//!      8      4  payload length
//!     12      8  epoch
//!     20      8  seq
//!     28         payload
//! ```
//!
//! Integers are little-endian. A chunk's payload begins with its own header:
//!
//! ```text
//!      0      2  lane
//!      2      4  sub-schedule
//!      6      4  round
//!     10      8  span start, elements of the bucket
//!     18      8  span length, elements
//!     26         data
//! ```

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::ids::{Epoch, Lane, Seq};
use crate::limits;

/// The first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"RNDE";
/// The version of the wire that this build writes.
pub const WIRE_VERSION: u16 = 7;
/// The oldest version that this build reads.
pub const WIRE_VERSION_MIN: u16 = 7;
/// The version of the planners; equal on all sidecars of an epoch, because plans are computed on each of them.
pub const PLANNER_VERSION: u32 = 3;
/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 28;
/// Bytes of a chunk's own header.
pub const CHUNK_HEADER_BYTES: usize = 26;
/// Flag of a chunk that was sent on credit, before the receiver reported the operation as admitted.
pub const FLAG_EARLY: u8 = 1;
/// The round of a token: an empty chunk that reports the end of a sub-schedule. A member sends it to each member from
/// which it receives in the sub-schedule without sending anything back; otherwise nothing would slow down a fast
/// sender.
pub const ROUND_TAKEN: u32 = u32::MAX;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// The first frame of each side on each connection: a [`crate::control::Hello`].
    Hello = 1,
    /// The answer to a hello that is not acceptable: a [`crate::control::Refusal`].
    Refusal = 2,
    /// A [`crate::Control`] message.
    Control = 3,
    /// Bytes of a span of an ordered operation.
    Chunk = 4,
    /// The sender has admitted every operation up to this frame's seq; no payload.
    Admitted = 5,
    /// To the side that dialled: the sender has a new certificate, so the connection should be replaced; no payload.
    Renew = 6,
    /// The last frame of a side that ends a connection over TCP: a [`crate::control::Close`]. QUIC has its own.
    Close = 7,
    /// About a stream of NCCL's net plugin: a [`crate::stream::StreamFrame`]; on lanes only.
    Stream = 8,
}

impl FrameKind {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Hello, Self::Refusal, Self::Control, Self::Chunk, Self::Admitted, Self::Renew, Self::Close, Self::Stream]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }

    /// The most payload that a frame of this kind may have, in bytes.
    #[must_use]
    pub const fn payload_bytes_max(self) -> usize {
        match self {
            Self::Hello | Self::Refusal | Self::Control => limits::CONTROL_FRAME_BYTES_MAX,
            Self::Chunk => limits::CHUNK_FRAME_BYTES_MAX,
            Self::Admitted | Self::Renew => 0,
            Self::Close => limits::CLOSE_FRAME_BYTES_MAX,
            Self::Stream => limits::STREAM_FRAME_BYTES_MAX,
        }
    }
}

/// Why bytes are not a valid frame. Always the peer's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The stream is not at a frame's beginning, or the peer does not speak this protocol.
    #[error("a frame begins with {MAGIC:02x?}, not {found:02x?}; the peer does not speak the ronde protocol")]
    Magic {
        /// The bytes found.
        found: [u8; 4],
    },
    /// The peer writes a version that this build does not read.
    #[error("wire version {found} is not supported; this build reads {WIRE_VERSION_MIN} to {WIRE_VERSION}")]
    Version {
        /// The peer's version.
        found: u16,
    },
    /// A kind that this version does not have.
    #[error("frame kind {found} does not exist in wire version {WIRE_VERSION}")]
    Kind {
        /// The number found.
        found: u8,
    },
    /// The payload is larger than its kind may have.
    #[error("a {kind:?} frame may have {max} bytes of payload, not {found}")]
    Length {
        /// The frame's kind.
        kind: FrameKind,
        /// The claimed length, in bytes.
        found: u32,
        /// The limit, in bytes.
        max: usize,
    },
    /// The payload does not decode.
    #[error("the payload of a {kind:?} frame does not decode: {reason}")]
    Payload {
        /// The frame's kind.
        kind: FrameKind,
        /// The decoder's message.
        reason: String,
    },
}

/// The checked header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the payload is.
    pub kind: FrameKind,
    /// Bits that belong to the kind, see [`FLAG_EARLY`].
    pub flags: u8,
    /// Bytes of payload that follow.
    pub length: u32,
    /// The epoch that the sender is in; frames of another epoch are dropped and counted.
    pub epoch: Epoch,
    /// The operation that it belongs to; 0 for none.
    pub seq: Seq,
}

impl FrameHeader {
    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut out = &mut bytes[..];
        out.put_slice(&MAGIC);
        out.put_u16_le(WIRE_VERSION);
        out.put_u8(self.kind as u8);
        out.put_u8(self.flags);
        out.put_u32_le(self.length);
        out.put_u64_le(self.epoch.0);
        out.put_u64_le(self.seq.0);
        bytes
    }

    /// Parses and checks a header.
    ///
    /// # Errors
    /// [`FrameError`] when the bytes are no header, or announce more than their kind may carry.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let mut input = &bytes[..];
        let mut found = [0; 4];
        input.copy_to_slice(&mut found);
        if found != MAGIC {
            return Err(FrameError::Magic { found });
        }
        let version = input.get_u16_le();
        if !(WIRE_VERSION_MIN..=WIRE_VERSION).contains(&version) {
            return Err(FrameError::Version { found: version });
        }
        let number = input.get_u8();
        let kind = FrameKind::from_number(number).ok_or(FrameError::Kind { found: number })?;
        let flags = input.get_u8();
        let length = input.get_u32_le();
        let max = kind.payload_bytes_max();
        if length as usize > max {
            return Err(FrameError::Length { kind, found: length, max });
        }
        let epoch = Epoch(input.get_u64_le());
        let seq = Seq(input.get_u64_le());
        Ok(Self { kind, flags, length, epoch, seq })
    }
}

/// A whole frame. For a chunk, `payload` is its own header followed by data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The checked header; `length` equals the payload's.
    pub header: FrameHeader,
    /// The bytes after the header.
    pub payload: Bytes,
}

impl Frame {
    /// A frame of a kind with a payload that is within the kind's bound.
    ///
    /// # Panics
    /// When the payload is longer than its kind allows: the caller splits it beforehand.
    #[must_use]
    pub fn new(kind: FrameKind, epoch: Epoch, seq: Seq, payload: Bytes) -> Self {
        assert!(payload.len() <= kind.payload_bytes_max(), "{kind:?} payload of {} bytes", payload.len());
        let length = u32::try_from(payload.len()).expect("bounded by payload_bytes_max, which is below 2^32");
        Self { header: FrameHeader { kind, flags: 0, length, epoch, seq }, payload }
    }

    /// The frame that reports every operation up to `seq` as admitted.
    #[must_use]
    pub fn admitted(epoch: Epoch, seq: Seq) -> Self {
        Self::new(FrameKind::Admitted, epoch, seq, Bytes::new())
    }

    /// The frame that asks the side that dialled to replace the connection.
    #[must_use]
    pub fn renew() -> Self {
        Self::new(FrameKind::Renew, Epoch(0), Seq(0), Bytes::new())
    }

    /// A frame about a stream, with the payload of [`crate::stream::StreamFrame`].
    ///
    /// # Panics
    /// As [`Self::new`].
    #[must_use]
    pub fn stream(payload: Bytes) -> Self {
        Self::new(FrameKind::Stream, Epoch(0), Seq(0), payload)
    }

    /// Bytes on the stream, header included.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        HEADER_BYTES + self.payload.len()
    }
}

/// Where a chunk's data belongs within its operation's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkHeader {
    /// The lane on which it travels.
    pub lane: Lane,
    /// The sub-schedule of the plan, counted over all lanes.
    pub sub_schedule: u32,
    /// The round of the sub-schedule.
    pub round: u32,
    /// The first element, in the bucket's coordinates.
    pub start: u64,
    /// The number of elements.
    pub len: u64,
}

impl ChunkHeader {
    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; CHUNK_HEADER_BYTES] {
        let mut bytes = [0; CHUNK_HEADER_BYTES];
        let mut out = &mut bytes[..];
        out.put_u16_le(self.lane.0);
        out.put_u32_le(self.sub_schedule);
        out.put_u32_le(self.round);
        out.put_u64_le(self.start);
        out.put_u64_le(self.len);
        bytes
    }

    /// Splits a chunk frame's payload into header and data.
    ///
    /// # Errors
    /// [`FrameError::Payload`] when the payload is shorter than a header.
    pub fn split(mut payload: Bytes) -> Result<(Self, Bytes), FrameError> {
        if payload.len() < CHUNK_HEADER_BYTES {
            let reason = format!("{} bytes are less than a chunk's header of {CHUNK_HEADER_BYTES}", payload.len());
            return Err(FrameError::Payload { kind: FrameKind::Chunk, reason });
        }
        let header = Self {
            lane: Lane(payload.get_u16_le()),
            sub_schedule: payload.get_u32_le(),
            round: payload.get_u32_le(),
            start: payload.get_u64_le(),
            len: payload.get_u64_le(),
        };
        Ok((header, payload))
    }
}

/// A chunk ready to be sent: its two headers, and the data in private memory, which are sent without a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The epoch of the operation.
    pub epoch: Epoch,
    /// The operation.
    pub seq: Seq,
    /// Whether it is sent on credit ([`FLAG_EARLY`]).
    pub early: bool,
    /// Where the data belong.
    pub header: ChunkHeader,
    /// The elements' bytes.
    pub data: Bytes,
}

impl Chunk {
    /// Both headers as they precede the data on the stream.
    #[must_use]
    pub fn encode_head(&self) -> Bytes {
        let length = u32::try_from(CHUNK_HEADER_BYTES + self.data.len()).expect("chunks are at most CHUNK_BYTES_MAX");
        let flags = if self.early { FLAG_EARLY } else { 0 };
        let frame = FrameHeader { kind: FrameKind::Chunk, flags, length, epoch: self.epoch, seq: self.seq };
        let mut head = BytesMut::with_capacity(HEADER_BYTES + CHUNK_HEADER_BYTES);
        head.put_slice(&frame.encode());
        head.put_slice(&self.header.encode());
        head.freeze()
    }

    /// Parses a chunk frame.
    ///
    /// # Errors
    /// [`FrameError::Payload`] when the payload is shorter than a chunk's header.
    pub fn from_frame(frame: Frame) -> Result<Self, FrameError> {
        let (header, data) = ChunkHeader::split(frame.payload)?;
        let early = frame.header.flags & FLAG_EARLY != 0;
        Ok(Self { epoch: frame.header.epoch, seq: frame.header.seq, early, header, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn header_survives_the_wire(epoch: u64, seq: u64, flags: u8, length in 0..=1_u32 << 20) {
            let header = FrameHeader { kind: FrameKind::Control, flags, length, epoch: Epoch(epoch), seq: Seq(seq) };
            prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = FrameHeader::decode(&bytes) {
                prop_assert!(header.length as usize <= header.kind.payload_bytes_max());
            }
        }

        #[test]
        fn chunk_survives_the_wire(lane: u16, sub_schedule: u32, round: u32, start: u64, len: u64, early: bool, data: Vec<u8>) {
            let header = ChunkHeader { lane: Lane(lane), sub_schedule, round, start, len };
            let chunk = Chunk { epoch: Epoch(3), seq: Seq(4), early, header, data: data.into() };
            let head = chunk.encode_head();
            let (frame, own) = head.split_at(HEADER_BYTES);
            let frame = FrameHeader::decode(frame.try_into().expect("split there")).expect("own header");
            let payload = [own, &chunk.data].concat();
            prop_assert_eq!(frame.length as usize, payload.len());
            let parsed = Chunk::from_frame(Frame { header: frame, payload: payload.into() });
            prop_assert_eq!(parsed, Ok(chunk));
        }
    }

    #[test]
    fn refusals_name_what_they_found() {
        let good =
            FrameHeader { kind: FrameKind::Admitted, flags: 0, length: 0, epoch: Epoch(1), seq: Seq(1) }.encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            FrameHeader::decode(&bytes)
        };
        assert_eq!(with(0, b'X'), Err(FrameError::Magic { found: *b"XNDE" }));
        assert_eq!(with(4, 9), Err(FrameError::Version { found: 9 }));
        assert_eq!(with(6, 200), Err(FrameError::Kind { found: 200 }));
        assert_eq!(with(8, 1), Err(FrameError::Length { kind: FrameKind::Admitted, found: 1, max: 0 }));
    }

    #[test]
    fn a_short_chunk_is_refused() {
        let frame = Frame::new(FrameKind::Chunk, Epoch(1), Seq(1), Bytes::from_static(b"short"));
        assert!(matches!(Chunk::from_frame(frame), Err(FrameError::Payload { kind: FrameKind::Chunk, .. })));
    }
}
