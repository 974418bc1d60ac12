//! The sidecar's end of `mem.sock`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::descriptor::{Received, recv_with_fd, send_with_fd};
use super::message::{MemReply, MemRequest};
use super::token::SessionToken;
use crate::arena::SegmentId;
use crate::error::{ProtocolError, ShmError};
use crate::ring::PeerRing;
use crate::segment::{OwnedSegment, WorkerSegment};

/// Handles the requests of `mem.sock`. Reasons are shown to the worker's user, so they say what is wrong and what to
/// do.
///
/// The host must perform two checks that need knowledge of sessions: it compares the connection's
/// [`peer_credentials`](super::peer_credentials) with the uid of the token's session, and it limits the number of
/// segments of a session in addition to their bytes, because each costs one of the about 65,000 mappings of a process.
pub trait MemHost {
    /// The bytes of input segments that this session may still attach. Called before anything is mapped, so that a peer
    /// without a session costs nothing.
    ///
    /// # Errors
    ///
    /// The reason why nothing may be attached, for example an unknown token.
    fn attach_limit_bytes(&mut self, token: &SessionToken) -> Result<u64, String>;

    /// Takes over a worker's input segment, which is mapped and checked.
    ///
    /// # Errors
    ///
    /// The reason why it is rejected; the segment is then unmapped.
    fn attach(&mut self, token: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String>;

    /// The result segment whose descriptor the worker may receive.
    ///
    /// # Errors
    ///
    /// The reason why there is none.
    fn result(&mut self, token: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String>;

    /// Checks that this session may have a ring of this capacity. Called before anything is mapped.
    ///
    /// # Errors
    ///
    /// The reason why it may not, for example an unknown token.
    fn check_ring(&mut self, token: &SessionToken, capacity: u64) -> Result<(), String>;

    /// Takes over a worker's ring, which is mapped and checked, and the connection as its bell. The reply is sent on
    /// the connection afterwards, so do not ring before the worker has confirmed the ring by another message.
    ///
    /// # Errors
    ///
    /// The reason why it is rejected; the ring is then unmapped.
    fn ring(&mut self, token: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String>;
}

/// The result of [`serve_one`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServeOutcome {
    /// A request was granted.
    Granted(MemRequest),
    /// A ring was attached. The connection is its bell, so do not serve it any more.
    Ringing,
    /// A valid request was rejected, and the worker received the reason.
    Refused {
        /// The request.
        request: MemRequest,
        /// The reason.
        reason: String,
    },
    /// The read timeout expired without a request. Check whether to stop, then serve again.
    Idle,
    /// The worker closed the connection.
    Closed,
}

/// Waits for one request, for at most the socket's read timeout, and replies.
///
/// # Errors
///
/// Errors that make the connection unusable: [`ShmError::Protocol`] (the peer receives it, if possible),
/// [`ShmError::TimedOut`], [`ShmError::PeerClosed`], [`ShmError::System`]. Close the connection.
pub fn serve_one(stream: &UnixStream, host: &mut dyn MemHost) -> Result<ServeOutcome, ShmError> {
    let (line, fd) = match recv_with_fd(stream) {
        Ok(Received::Line { line, fd }) => (line, fd),
        Ok(Received::Closed) => return Ok(ServeOutcome::Closed),
        Ok(Received::Idle) => return Ok(ServeOutcome::Idle),
        Err(error) => return Err(report_to_peer(stream, error)),
    };
    let request = MemRequest::parse(&line).map_err(|error| report_to_peer(stream, error.into()))?;
    let (granted, reply) =
        match handle_request(stream, request, fd, host).map_err(|error| report_to_peer(stream, error.into()))? {
            Ok(granted) => granted,
            Err(reason) => {
                send_with_fd(stream, MemReply::Refused { reason: reason.clone() }.to_line().as_bytes(), None)?;
                return Ok(ServeOutcome::Refused { request, reason });
            }
        };
    let fd = granted.as_ref().map(|segment| segment.fd());
    send_with_fd(stream, reply.to_line().as_bytes(), fd)?;
    Ok(match request {
        MemRequest::Ring { .. } => ServeOutcome::Ringing,
        MemRequest::Attach { .. } | MemRequest::Result { .. } => ServeOutcome::Granted(request),
    })
}

/// The segment whose descriptor is sent with the reply, and the reply.
type Granted = (Option<Arc<OwnedSegment>>, MemReply);

/// Handles a request: granted, rejected with a reason, or a protocol violation.
fn handle_request(
    stream: &UnixStream,
    request: MemRequest,
    fd: Option<OwnedFd>,
    host: &mut dyn MemHost,
) -> Result<Result<Granted, String>, ProtocolError> {
    match (request, fd) {
        (MemRequest::Attach { token, segment, bytes }, Some(fd)) => {
            Ok(attach(host, &token, segment, bytes, fd).map(|()| (None, MemReply::Attached)))
        }
        (MemRequest::Result { token, segment }, None) => Ok(host.result(&token, segment).map(|segment| {
            let bytes = segment.len();
            (Some(segment), MemReply::Result { bytes })
        })),
        (MemRequest::Ring { token, capacity }, Some(fd)) => {
            Ok(ring(stream, host, &token, capacity, fd).map(|()| (None, MemReply::Attached)))
        }
        (MemRequest::Attach { .. } | MemRequest::Ring { .. }, None) => Err(ProtocolError::MissingDescriptor),
        (MemRequest::Result { .. }, Some(_)) => Err(ProtocolError::UnexpectedDescriptor),
    }
}

fn attach(
    host: &mut dyn MemHost,
    token: &SessionToken,
    segment: SegmentId,
    bytes: u64,
    fd: OwnedFd,
) -> Result<(), String> {
    let limit_bytes = host.attach_limit_bytes(token)?;
    let name = format!("input segment {segment}");
    let mapped = WorkerSegment::map_named(&name, fd, bytes, limit_bytes).map_err(|error| error.to_string())?;
    host.attach(token, segment, mapped)
}

fn ring(
    stream: &UnixStream,
    host: &mut dyn MemHost,
    token: &SessionToken,
    capacity: u64,
    fd: OwnedFd,
) -> Result<(), String> {
    host.check_ring(token, capacity)?;
    let ring = PeerRing::map(fd, capacity).map_err(|error| error.to_string())?;
    let bell = stream.try_clone().map_err(|error| format!("the sidecar has no descriptor left: {error}"))?;
    host.ring(token, ring, bell)
}

/// Sends the peer an error that ends the connection, and returns it.
fn report_to_peer(stream: &UnixStream, error: ShmError) -> ShmError {
    if matches!(error, ShmError::Protocol(_)) {
        let reply = MemReply::Refused { reason: error.to_string() };
        // The connection ends in either case, and the caller gets the error.
        let _ = send_with_fd(stream, reply.to_line().as_bytes(), None);
    }
    error
}
