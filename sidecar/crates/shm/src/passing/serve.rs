//! The sidecar's end of `mem.sock`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::descriptor::{Received, recv_with_fd, send_with_fd};
use super::message::{MemReply, MemRequest, StreamRequest};
use super::pci::PciAddress;
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
///
/// Several connections may name the same session at the same time. The host therefore reserves what a request needs
/// before anything is mapped, so that all connections together cost no more than the session's limits.
pub trait MemHost {
    /// Reserves the number and the bytes of an input segment, until [`attach`](Self::attach) takes it over or
    /// [`release`](Self::release) gives it back.
    ///
    /// # Errors
    ///
    /// The reason why nothing may be attached, for example an unknown token or a limit.
    fn reserve(&mut self, token: &SessionToken, segment: SegmentId, bytes: u64) -> Result<(), String>;

    /// Gives a reservation back: its segment cannot be mapped.
    fn release(&mut self, token: &SessionToken, segment: SegmentId);

    /// Takes over a worker's input segment, which is reserved, mapped and checked.
    ///
    /// # Errors
    ///
    /// The reason why it is rejected, for example the end of its session; the segment is then unmapped.
    fn attach(&mut self, token: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String>;

    /// The result segment whose descriptor the worker may receive.
    ///
    /// # Errors
    ///
    /// The reason why there is none.
    fn result(&mut self, token: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String>;

    /// Reserves the session's ring, until [`ring`](Self::ring) takes it over or [`release_ring`](Self::release_ring)
    /// gives it back.
    ///
    /// # Errors
    ///
    /// The reason why the session may not have one, for example an unknown token.
    fn reserve_ring(&mut self, token: &SessionToken, capacity: u64) -> Result<(), String>;

    /// Gives the session's ring back: it cannot be mapped.
    fn release_ring(&mut self, token: &SessionToken);

    /// Takes over a worker's ring, which is reserved, mapped and checked, and the connection as its bell. The reply is sent on
    /// the connection afterwards, so do not ring before the worker has confirmed the ring by another message.
    ///
    /// # Errors
    ///
    /// The reason why it is rejected; the ring is then unmapped.
    fn ring(&mut self, token: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String>;

    /// Admits a stream of a worker, before anything is mapped, until [`stream`](Self::stream) takes it over or
    /// [`release_stream`](Self::release_stream) gives it back.
    ///
    /// # Errors
    ///
    /// The reason why the worker may not have one, for example a wrong token. A host without streams refuses all.
    fn reserve_stream(&mut self, request: &StreamRequest) -> Result<(), String> {
        let _ = request;
        Err("this sidecar carries no streams".to_owned())
    }

    /// Gives an admitted stream back: its ring cannot be mapped.
    fn release_stream(&mut self) {}

    /// Takes over the ring of a stream that was admitted, and the connection as its bell, as [`ring`](Self::ring) does.
    ///
    /// # Errors
    ///
    /// The reason why it is rejected; the ring is then unmapped.
    fn stream(&mut self, request: &StreamRequest, ring: PeerRing, bell: UnixStream) -> Result<(), String> {
        let _ = (request, ring, bell);
        Err("this sidecar carries no streams".to_owned())
    }
    /// Imports device memory of a worker. Nothing about the descriptor is known: it may be one of anything.
    ///
    /// # Errors
    ///
    /// The reason why it is rejected, for example an unknown token, a limit, another size or another device; nothing is
    /// imported then.
    fn device(
        &mut self,
        token: &SessionToken,
        segment: SegmentId,
        memory: (u64, PciAddress),
        descriptor: OwnedFd,
    ) -> Result<(), String>;
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
        MemRequest::Ring { .. } | MemRequest::Stream(_) => ServeOutcome::Ringing,
        MemRequest::Attach { .. } | MemRequest::Result { .. } | MemRequest::Device { .. } => {
            ServeOutcome::Granted(request)
        }
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
        (MemRequest::Stream(request), Some(fd)) => {
            Ok(open_stream(stream, host, &request, fd).map(|()| (None, MemReply::Attached)))
        }
        (MemRequest::Device { token, segment, bytes, gpu }, Some(fd)) => {
            Ok(host.device(&token, segment, (bytes, gpu), fd).map(|()| (None, MemReply::Attached)))
        }
        (
            MemRequest::Attach { .. } | MemRequest::Ring { .. } | MemRequest::Stream(_) | MemRequest::Device { .. },
            None,
        ) => Err(ProtocolError::MissingDescriptor),
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
    host.reserve(token, segment, bytes)?;
    match WorkerSegment::map_named(&format!("input segment {segment}"), fd, bytes) {
        Ok(mapped) => host.attach(token, segment, mapped),
        Err(error) => {
            host.release(token, segment);
            Err(error.to_string())
        }
    }
}

fn ring(
    stream: &UnixStream,
    host: &mut dyn MemHost,
    token: &SessionToken,
    capacity: u64,
    fd: OwnedFd,
) -> Result<(), String> {
    host.reserve_ring(token, capacity)?;
    match map_ring(stream, capacity, fd) {
        Ok((ring, bell)) => host.ring(token, ring, bell),
        Err(reason) => {
            host.release_ring(token);
            Err(reason)
        }
    }
}

fn open_stream(
    stream: &UnixStream,
    host: &mut dyn MemHost,
    request: &StreamRequest,
    fd: OwnedFd,
) -> Result<(), String> {
    host.reserve_stream(request)?;
    match map_ring(stream, request.capacity, fd) {
        Ok((ring, bell)) => host.stream(request, ring, bell),
        Err(reason) => {
            host.release_stream();
            Err(reason)
        }
    }
}

/// Maps a worker's ring; the connection will be its bell.
fn map_ring(stream: &UnixStream, capacity: u64, fd: OwnedFd) -> Result<(PeerRing, UnixStream), String> {
    let ring = PeerRing::map(fd, capacity).map_err(|error| error.to_string())?;
    let bell = stream.try_clone().map_err(|error| format!("the sidecar has no descriptor left: {error}"))?;
    Ok((ring, bell))
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
