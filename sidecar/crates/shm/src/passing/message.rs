//! Requests and replies of `mem.sock`, parsed into types without invalid values.

use std::str::FromStr;

use super::descriptor::LINE_BYTES_MAX;
use super::pci::PciAddress;
use super::token::{SessionToken, WorkerToken};
use crate::arena::SegmentId;
use crate::error::ProtocolError;

/// A worker's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemRequest {
    /// Maps the input segment whose descriptor comes with this line.
    Attach {
        /// The worker's session.
        token: SessionToken,
        /// The segment's number among the session's input segments.
        segment: SegmentId,
        /// Size of the memfd in bytes.
        bytes: u64,
    },
    /// Requests the descriptor of a result segment.
    Result {
        /// The worker's session.
        token: SessionToken,
        /// The segment's number among the result segments.
        segment: SegmentId,
    },
    /// Maps the ring whose descriptor comes with this line. After the reply the connection is the ring's bell.
    Ring {
        /// The worker's session.
        token: SessionToken,
        /// Capacity of each direction in bytes.
        capacity: u64,
    },
    /// Imports the device memory whose descriptor comes with this line.
    Device {
        /// The worker's session.
        token: SessionToken,
        /// The segment's number among the session's segments of device memory.
        segment: SegmentId,
        /// Size of the allocation in bytes.
        bytes: u64,
        /// The GPU.
        gpu: PciAddress,
    },
    /// Maps the ring of a stream, whose descriptor comes with this line. After the reply the connection is its bell.
    Stream(StreamRequest),
}

/// A request for a stream of NCCL's net plugin, which needs no session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRequest {
    /// The worker's number, its rank in a job that is not elastic.
    pub worker: u32,
    /// The contents of its token file.
    pub token: WorkerToken,
    /// Capacity of each direction of the ring in bytes.
    pub capacity: u64,
    /// The lane that carries the stream, modulo the number of lanes.
    pub lane: u16,
}

impl MemRequest {
    /// Parses a line without its newline.
    ///
    /// # Errors
    ///
    /// [`ProtocolError`] for every line that [`MemRequest::to_line`] does not write.
    pub fn parse(line: &str) -> Result<Self, ProtocolError> {
        let mut words = WordParser::new(line)?;
        let request = match words.next()? {
            "ATTACH" => Self::Attach {
                token: words.next()?.parse()?,
                segment: SegmentId(decimal(words.next()?, "segment number")?),
                bytes: decimal(words.next()?, "number of bytes")?,
            },
            "RESULT" => Self::Result {
                token: words.next()?.parse()?,
                segment: SegmentId(decimal(words.next()?, "segment number")?),
            },
            "RING" => {
                Self::Ring { token: words.next()?.parse()?, capacity: decimal(words.next()?, "number of bytes")? }
            }
            "STREAM" => Self::Stream(StreamRequest {
                worker: decimal(words.next()?, "worker's number")?,
                token: words.next()?.parse()?,
                capacity: decimal(words.next()?, "number of bytes")?,
                lane: decimal(words.next()?, "lane")?,
            }),
            "DEVICE" => Self::Device {
                token: words.next()?.parse()?,
                segment: SegmentId(decimal(words.next()?, "segment number")?),
                bytes: decimal(words.next()?, "number of bytes")?,
                gpu: words.next()?.parse()?,
            },
            _ => return Err(ProtocolError::UnknownWord),
        };
        words.end()?;
        // One spelling for each request.
        if request.to_line().trim_end() == line { Ok(request) } else { Err(ProtocolError::UnknownWord) }
    }

    /// The line, including the newline.
    #[must_use]
    pub fn to_line(&self) -> String {
        match self {
            Self::Attach { token, segment, bytes } => format!("ATTACH {token} {segment} {bytes}\n"),
            Self::Result { token, segment } => format!("RESULT {token} {segment}\n"),
            Self::Ring { token, capacity } => format!("RING {token} {capacity}\n"),
            Self::Stream(StreamRequest { worker, token, capacity, lane }) => {
                format!("STREAM {worker} {token} {capacity} {lane}\n")
            }
            Self::Device { token, segment, bytes, gpu } => format!("DEVICE {token} {segment} {bytes} {gpu}\n"),
        }
    }

    /// Describes the request, without its token.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Attach { segment, bytes, .. } => format!("to attach input segment {segment} of {bytes} bytes"),
            Self::Result { segment, .. } => format!("result segment {segment}"),
            Self::Ring { capacity, .. } => format!("a ring of {capacity} bytes a direction"),
            Self::Stream(StreamRequest { worker, capacity, .. }) => {
                format!("a stream of worker {worker} with a ring of {capacity} bytes a direction")
            }
            Self::Device { segment, bytes, gpu, .. } => {
                format!("to import segment {segment} of {bytes} bytes of the GPU at {gpu}")
            }
        }
    }
}

/// A sidecar's reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemReply {
    /// The input segment or the ring is mapped.
    Attached,
    /// The result segment's descriptor comes with this line.
    Result {
        /// Size of the memfd in bytes.
        bytes: u64,
    },
    /// The request was valid and is rejected.
    Refused {
        /// The reason, for the worker's user. Printable ASCII.
        reason: String,
    },
}

impl MemReply {
    /// Parses a line without its newline.
    ///
    /// # Errors
    ///
    /// [`ProtocolError`] for every line that [`MemReply::to_line`] does not write.
    pub fn parse(line: &str) -> Result<Self, ProtocolError> {
        if let Some(reason) = line.strip_prefix("ERR ") {
            check_text(line)?;
            return Ok(Self::Refused { reason: reason.to_owned() });
        }
        let mut words = WordParser::new(line)?;
        match words.next()? {
            "OK" => {}
            "ERR" => return Err(ProtocolError::WordCount),
            _ => return Err(ProtocolError::UnknownWord),
        }
        if words.end().is_ok() {
            return Ok(Self::Attached);
        }
        let bytes = decimal(words.next()?, "number of bytes")?;
        words.end()?;
        Ok(Self::Result { bytes })
    }

    /// The line, including the newline. A reason is truncated to the length of a line, and characters other than
    /// printable ASCII become `?`.
    #[must_use]
    pub fn to_line(&self) -> String {
        match self {
            Self::Attached => "OK\n".to_owned(),
            Self::Result { bytes } => format!("OK {bytes}\n"),
            Self::Refused { reason } => {
                let room = LINE_BYTES_MAX - "ERR \n".len();
                let plain = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
                format!("ERR {}\n", reason.chars().take(room).map(plain).collect::<String>())
            }
        }
    }
}

/// Splits a line into words separated by exactly one space.
struct WordParser<'a> {
    rest: Option<&'a str>,
}

impl<'a> WordParser<'a> {
    fn new(line: &'a str) -> Result<Self, ProtocolError> {
        check_text(line)?;
        Ok(Self { rest: Some(line) })
    }

    fn next(&mut self) -> Result<&'a str, ProtocolError> {
        let rest = self.rest.ok_or(ProtocolError::WordCount)?;
        let (word, rest) = rest.split_once(' ').map_or((rest, None), |(word, rest)| (word, Some(rest)));
        self.rest = rest;
        if word.is_empty() { Err(ProtocolError::WordCount) } else { Ok(word) }
    }

    fn end(&self) -> Result<(), ProtocolError> {
        if self.rest.is_some() { Err(ProtocolError::WordCount) } else { Ok(()) }
    }
}

fn check_text(line: &str) -> Result<(), ProtocolError> {
    if line.len() >= LINE_BYTES_MAX {
        return Err(ProtocolError::LineTooLong { limit: LINE_BYTES_MAX });
    }
    if line.bytes().all(|byte| matches!(byte, b' '..=b'~')) { Ok(()) } else { Err(ProtocolError::NotText) }
}

/// Parses a number in its only valid spelling: digits without a leading zero.
fn decimal<N: FromStr>(word: &str, what: &'static str) -> Result<N, ProtocolError> {
    let plain = word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
    word.parse().ok().filter(|_| plain).ok_or(ProtocolError::Number { what })
}

#[cfg(test)]
mod tests;
