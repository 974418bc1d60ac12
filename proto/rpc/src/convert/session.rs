//! Conversion of session messages: the claim, its answer, the epoch and completions.

use std::fmt;
use std::hint::black_box;

use bytes::Bytes;
use ronde_wire::{DType, Detail, Epoch, JobName, Rank, RequestId, Seq, SetId, Shape, WorkerNumber, limits};

use super::collective::{dtype_from, rank};
use super::submission::Place;
use super::{ConvertError, printable};
use crate::paths::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN};
use crate::v1;

/// The secret that authorises a client to claim a rank: the 32 bytes of its token file.
///
/// Comparison takes constant time; `Debug` does not reveal it.
#[derive(Clone, Copy)]
pub struct RankToken([u8; TOKEN_BYTES]);

impl RankToken {
    /// Parses the contents of a token file or claim.
    ///
    /// # Errors
    /// [`ConvertError::Length`] if there are not exactly [`TOKEN_BYTES`].
    pub fn new(bytes: &[u8]) -> Result<Self, ConvertError> {
        let error = ConvertError::Length { field: "the rank's token", given: bytes.len(), wanted: TOKEN_BYTES };
        bytes.try_into().map(Self).map_err(|_| error)
    }

    /// The bytes of the token.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq for RankToken {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |difference, (a, b)| black_box(difference | (a ^ b))) == 0
    }
}

impl Eq for RankToken {}

impl fmt::Debug for RankToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankToken(secret)")
    }
}

/// A worker's claim to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The job.
    pub job: JobName,
    /// The worker's number, its rank in a job that is not elastic.
    pub worker: WorkerNumber,
    /// Proves that the client may claim it.
    pub token: RankToken,
    /// The oldest and the newest protocol version that the client supports.
    pub protocols: (u32, u32),
    /// The client and its version, for logs; truncated.
    pub client: String,
    /// The client's process id, as reported by itself.
    pub pid: u32,
}

impl Claim {
    /// Parses a message.
    ///
    /// # Errors
    /// [`ConvertError`] with the first problem. Versions are not compared; see [`negotiate_protocol`].
    pub fn parse(message: &v1::Claim) -> Result<Self, ConvertError> {
        Ok(Self {
            job: JobName::new(message.job.as_str())?,
            // Numbers are not reused, so an elastic job may have more workers than ranks.
            worker: WorkerNumber(message.worker),
            token: RankToken::new(&message.token)?,
            protocols: (message.protocol_min, message.protocol_max),
            client: printable(&message.client),
            pid: message.pid,
        })
    }

    /// Converts back to a message.
    #[must_use]
    pub fn into_message(self) -> v1::Claim {
        v1::Claim {
            job: self.job.into(),
            worker: self.worker.0,
            token: Bytes::copy_from_slice(self.token.as_bytes()),
            protocol_min: self.protocols.0,
            protocol_max: self.protocols.1,
            client: self.client,
            pid: self.pid,
        }
    }
}

/// The newest protocol version that both a client with this range and this release support.
///
/// # Errors
/// [`ConvertError::Protocol`] if there is none.
pub fn negotiate_protocol(min: u32, max: u32) -> Result<u32, ConvertError> {
    let newest = max.min(PROTOCOL_VERSION);
    if newest < min.max(PROTOCOL_VERSION_MIN) {
        return Err(ConvertError::Protocol { min, max });
    }
    Ok(newest)
}

/// The answer to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The token that associates mem.sock connections with the session.
    pub session_token: [u8; SESSION_TOKEN_BYTES],
    /// The protocol version of the session.
    pub protocol: u32,
    /// Interval of heartbeats in milliseconds; at least 1.
    pub heartbeat_ms: u32,
    /// Silence in milliseconds after which the other side is considered dead; at least `heartbeat_ms`.
    pub peer_timeout_ms: u32,
    /// Limit for the bytes of input segments.
    pub arena_bytes_max: u64,
    /// Limit for the bytes of an inline input.
    pub inline_bytes_max: u64,
    /// Limit for pending requests; at least 1.
    pub pending_max: u32,
    /// Capacity of each direction of a ring in bytes; 0 if the sidecar does not support rings.
    pub ring_bytes: u64,
    /// Limit for the bytes of device memory that the session may pass to the sidecar; 0 if it uses no GPUs.
    pub device_bytes_max: u64,
}

impl Claimed {
    /// Parses a message.
    ///
    /// # Errors
    /// [`ConvertError`] for a token of the wrong length, an unsupported version, or a time of zero.
    pub fn parse(message: &v1::Claimed) -> Result<Self, ConvertError> {
        let given = message.session_token.len();
        let length = ConvertError::Length { field: "session token", given, wanted: SESSION_TOKEN_BYTES };
        Ok(Self {
            session_token: message.session_token.as_ref().try_into().map_err(|_| length)?,
            protocol: negotiate_protocol(message.protocol, message.protocol)?,
            heartbeat_ms: positive("heartbeat_ms", message.heartbeat_ms)?,
            peer_timeout_ms: positive("peer_timeout_ms", message.peer_timeout_ms)?.max(message.heartbeat_ms),
            arena_bytes_max: message.arena_bytes_max,
            inline_bytes_max: message.inline_bytes_max.min(limits::INLINE_BYTES_MAX as u64),
            pending_max: positive("pending_max", message.pending_max)?,
            ring_bytes: message.ring_bytes,
            device_bytes_max: message.device_bytes_max,
        })
    }

    /// Converts back to a message.
    #[must_use]
    pub fn into_message(self) -> v1::Claimed {
        v1::Claimed {
            session_token: Bytes::copy_from_slice(&self.session_token),
            protocol: self.protocol,
            heartbeat_ms: self.heartbeat_ms,
            peer_timeout_ms: self.peer_timeout_ms,
            arena_bytes_max: self.arena_bytes_max,
            inline_bytes_max: self.inline_bytes_max,
            pending_max: self.pending_max,
            ring_bytes: self.ring_bytes,
            device_bytes_max: self.device_bytes_max,
        }
    }
}

/// A rank's view of a new epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochView {
    /// The epoch.
    pub epoch: Epoch,
    /// The rank.
    pub rank: Rank,
    /// The number of ranks.
    pub size: u32,
    /// The position among the ranks of the same sidecar.
    pub local_rank: u32,
    /// The number of ranks of the same sidecar.
    pub local_size: u32,
    /// The position of the sidecar among those that have a rank with this local rank.
    pub cross_rank: u32,
    /// The number of sidecars that have a rank with this local rank.
    pub cross_size: u32,
    /// Whether all sidecars serve the same number of ranks.
    pub homogeneous: bool,
    /// The number of the membership; 1 in a job that is not elastic.
    pub membership: u64,
}

impl EpochView {
    /// Parses a message.
    ///
    /// # Errors
    /// [`ConvertError::Position`] if a position is not below its size, [`ConvertError::TooLarge`] if the world exceeds
    /// the limit.
    pub fn parse(message: &v1::EpochBegan) -> Result<Self, ConvertError> {
        let max = limits::RANKS_MAX as u64;
        if u64::from(message.size) > max {
            return Err(ConvertError::TooLarge { field: "size", given: message.size.into(), max });
        }
        position("rank", message.rank, message.size)?;
        position("local rank", message.local_rank, message.local_size)?;
        position("cross rank", message.cross_rank, message.cross_size)?;
        Ok(Self {
            epoch: Epoch(message.epoch),
            rank: Rank(message.rank),
            size: message.size,
            local_rank: message.local_rank,
            local_size: message.local_size,
            cross_rank: message.cross_rank,
            cross_size: message.cross_size,
            homogeneous: message.homogeneous,
            membership: message.membership,
        })
    }

    /// Converts back to a message.
    #[must_use]
    pub fn into_message(self) -> v1::EpochBegan {
        v1::EpochBegan {
            epoch: self.epoch.0,
            rank: self.rank.0,
            size: self.size,
            local_rank: self.local_rank,
            local_size: self.local_size,
            cross_rank: self.cross_rank,
            cross_size: self.cross_size,
            homogeneous: self.homogeneous,
            membership: self.membership,
        }
    }
}

/// A completed operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The worker's number of the request.
    pub request: RequestId,
    /// The epoch in which it was performed.
    pub epoch: Epoch,
    /// The operation's sequence number in the job.
    pub seq: Seq,
    /// The type of the result.
    pub dtype: DType,
    /// The shape of the result; `[0]` for a rank without a result.
    pub shape: Shape,
    /// Where the result is: in a result segment, or [`Place::None`] if there is none or it was sent in parts before.
    pub result: Place,
    /// Whether the result was written to the submission's output; `result` is [`Place::None`] in that case.
    pub in_output: bool,
    /// Further results for the caller.
    pub detail: Detail,
}

impl Completion {
    /// Parses a message.
    ///
    /// # Errors
    /// [`ConvertError`] for an invalid type, shape or place.
    pub fn parse(message: v1::Completed) -> Result<Self, ConvertError> {
        let detail = detail_from(&message)?;
        Ok(Self {
            request: RequestId(message.request),
            epoch: Epoch(message.epoch),
            seq: Seq(message.seq),
            dtype: dtype_from(message.dtype)?,
            shape: Shape::new(message.shape)?,
            in_output: message.in_output,
            result: Place::parse(message.result)?,
            detail,
        })
    }

    /// Converts back to a message.
    #[must_use]
    pub fn into_message(self) -> v1::Completed {
        let (mut splits, mut last_joined, mut set, mut source) = (Vec::new(), None, None, None);
        match self.detail {
            Detail::None => {}
            Detail::Splits(rows) => splits = rows,
            Detail::LastJoined(rank) => last_joined = Some(rank.0),
            Detail::Set(id) => set = Some(id.0),
            Detail::Source(rank) => source = Some(rank.0),
        }
        v1::Completed {
            request: self.request.0,
            epoch: self.epoch.0,
            seq: self.seq.0,
            dtype: v1::DType::from(self.dtype).into(),
            shape: self.shape.into(),
            result: self.result.into_message(),
            splits,
            last_joined,
            set,
            in_output: self.in_output,
            source,
        }
    }
}

fn detail_from(message: &v1::Completed) -> Result<Detail, ConvertError> {
    if let Some(given) = message.last_joined {
        return Ok(Detail::LastJoined(rank("last_joined", given)?));
    }
    if let Some(set) = message.set {
        return Ok(Detail::Set(SetId(set)));
    }
    if let Some(given) = message.source {
        return Ok(Detail::Source(rank("source", given)?));
    }
    let (given, max) = (message.splits.len(), limits::RANKS_MAX);
    if given > max {
        return Err(ConvertError::TooLarge { field: "splits", given: given as u64, max: max as u64 });
    }
    Ok(if given == 0 { Detail::None } else { Detail::Splits(message.splits.clone()) })
}

fn positive(field: &'static str, given: u32) -> Result<u32, ConvertError> {
    if given == 0 { Err(ConvertError::Missing { field, hint: "it is at least 1" }) } else { Ok(given) }
}

fn position(field: &'static str, given: u32, size: u32) -> Result<(), ConvertError> {
    if given < size { Ok(()) } else { Err(ConvertError::Position { field, given, size }) }
}

/// Bytes of a rank's token.
pub const TOKEN_BYTES: usize = 32;
/// Bytes of a session's token.
pub const SESSION_TOKEN_BYTES: usize = 16;
