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

/// The sessions behind `mem.sock`. Reasons travel to the worker's user: say what is wrong and what to do.
///
/// Two checks are the host's, as only it knows sessions: it compares the connection's
/// [`peer_credentials`](super::peer_credentials) with the uid of the session that a token names, and it bounds the number of
/// segments of a session (each costs one of the about 65,000 mappings that a process may have) beside their bytes.
pub trait MemHost {
    /// How many bytes of input segments this session may still attach. Asked before anything is mapped, so that a peer without
    /// a session costs nothing.
    ///
    /// # Errors
    ///
    /// The reason why nothing may be attached, such as an unknown token.
    fn attach_limit_bytes(&mut self, token: &SessionToken) -> Result<u64, String>;

    /// Takes over a worker's input segment, mapped and checked.
    ///
    /// # Errors
    ///
    /// The reason why it is declined; it is then unmapped.
    fn attach(&mut self, token: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String>;

    /// A result segment whose descriptor the worker may have.
    ///
    /// # Errors
    ///
    /// The reason why there is none.
    fn result(&mut self, token: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String>;

    /// Whether this session may have a ring of this capacity. Asked before anything is mapped.
    ///
    /// # Errors
    ///
    /// The reason why not, such as an unknown token.
    fn check_ring(&mut self, token: &SessionToken, capacity: u64) -> Result<(), String>;

    /// Takes over a worker's ring, mapped and checked, and its bell, which is the connection on which it came. The reply is
    /// still to be sent on it: do not ring before the worker says in another way that it has got it.
    ///
    /// # Errors
    ///
    /// The reason why it is declined; it is then unmapped.
    fn ring(&mut self, token: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String>;
}

/// What [`serve_one`] came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServeOutcome {
    /// A request was granted.
    Granted(MemRequest),
    /// A ring was attached: the connection is its bell, so serve no more on it.
    Ringing,
    /// A request was understood and declined; the worker was told.
    Refused {
        /// The request.
        request: MemRequest,
        /// The reason given.
        reason: String,
    },
    /// The read timeout passed without a request. Look whether to stop, then serve again.
    Idle,
    /// The worker closed the connection.
    Closed,
}

/// Waits for one request, at most the socket's read timeout, and answers it.
///
/// # Errors
///
/// What makes the connection unusable: [`ShmError::Protocol`] (the peer is told, as far as it listens), [`ShmError::TimedOut`],
/// [`ShmError::PeerClosed`], [`ShmError::System`]. Close the connection.
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

/// A granted request: the segment whose descriptor goes with the reply, and the reply.
type Granted = (Option<Arc<OwnedSegment>>, MemReply);

/// Decides on a request: granted, declined with a reason, or outside the protocol.
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

/// Tells the peer about an error that ends the connection, and passes the error on.
fn report_to_peer(stream: &UnixStream, error: ShmError) -> ShmError {
    if matches!(error, ShmError::Protocol(_)) {
        let reply = MemReply::Refused { reason: error.to_string() };
        // The connection ends either way, and the error itself is what the caller hears.
        let _ = send_with_fd(stream, reply.to_line().as_bytes(), None);
    }
    error
}
