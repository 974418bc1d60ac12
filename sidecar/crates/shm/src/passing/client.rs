//! The worker's end of `mem.sock`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::connection::Connection;
use super::credentials::{Credentials, peer_credentials};
use super::descriptor::{Received, recv_with_fd, send_with_fd};
use super::message::{MemReply, MemRequest, StreamRequest};
use super::pci::PciAddress;
use super::token::SessionToken;
use crate::arena::SegmentId;
use crate::error::{ProtocolError, ShmError};
use crate::fork::ForkSafe;
use crate::ring::{Bell, RingEnd, WorkerRing};
use crate::segment::{OwnedSegment, PeerSegment};

/// The configuration of a [`MemClient`].
#[derive(Debug, Clone, Copy)]
pub struct MemClientConfig {
    /// Timeout for sending a request, and again for its reply. The sidecar populates a segment before it replies, which
    /// takes up to about 0.5 ms per MiB. Must not be zero.
    pub timeout: Duration,
    /// Largest result segment to map, in bytes.
    pub result_bytes_max: u64,
}

/// A blocking client for one exchange at a time. It cannot be used after an exchange fails, nor in forked children.
///
/// Its socket is closed in forked children, and shut down when the client is dropped in its own process, so that no
/// child's copy keeps the connection open.
#[derive(Debug)]
pub struct MemClient {
    stream: ForkSafe<Connection>,
    config: MemClientConfig,
    broken: bool,
}

impl MemClient {
    /// Connects to the sidecar's `mem.sock`.
    ///
    /// # Errors
    ///
    /// [`ShmError::System`] with the path, [`ShmError::ForkTableFull`].
    pub fn connect(path: &Path, config: MemClientConfig) -> Result<Self, ShmError> {
        let stream = UnixStream::connect(path)
            .map_err(|error| ShmError::system("connecting", path.display().to_string(), error))?;
        Self::over(stream, config)
    }

    /// Creates a client over a connected stream.
    ///
    /// # Errors
    ///
    /// [`ShmError::System`] (for example, for a timeout of zero), [`ShmError::ForkTableFull`].
    pub fn over(stream: UnixStream, config: MemClientConfig) -> Result<Self, ShmError> {
        stream
            .set_read_timeout(Some(config.timeout))
            .and_then(|()| stream.set_write_timeout(Some(config.timeout)))
            .map_err(|error| ShmError::system("setting timeouts", "mem.sock", error))?;
        Ok(Self { stream: ForkSafe::with_fd(Connection(stream))?, config, broken: false })
    }

    /// Passes an input segment to the sidecar, which maps it before this returns.
    ///
    /// # Errors
    ///
    /// [`ShmError::Refused`] with the sidecar's reason; [`ShmError::TimedOut`], [`ShmError::PeerClosed`],
    /// [`ShmError::Protocol`] or [`ShmError::System`], after which the client cannot be used;
    /// [`ShmError::UsedAfterFork`].
    pub fn attach(&mut self, token: &SessionToken, id: SegmentId, segment: &OwnedSegment) -> Result<(), ShmError> {
        self.pass(MemRequest::Attach { token: *token, segment: id, bytes: segment.len() }, segment.fd())
    }

    /// Passes device memory to the sidecar, which imports it before this returns.
    ///
    /// # Errors
    ///
    /// Those of [`MemClient::attach`].
    pub fn attach_device(
        &mut self,
        token: &SessionToken,
        id: SegmentId,
        (bytes, gpu): (u64, PciAddress),
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), ShmError> {
        self.pass(MemRequest::Device { token: *token, segment: id, bytes, gpu }, descriptor)
    }

    /// Sends a request with a descriptor, and waits until the sidecar has taken it over.
    fn pass(&mut self, request: MemRequest, descriptor: BorrowedFd<'_>) -> Result<(), ShmError> {
        match self.exchange(request, Some(descriptor))? {
            (MemReply::Attached, None) => Ok(()),
            (MemReply::Refused { reason }, None) => Err(refused(request, reason)),
            (MemReply::Attached | MemReply::Refused { .. }, Some(_)) => {
                Err(self.mark_broken(ProtocolError::UnexpectedDescriptor))
            }
            (MemReply::Result { .. }, _) => Err(self.mark_broken(ProtocolError::UnexpectedReply)),
        }
    }

    /// Requests a result segment and maps it.
    ///
    /// # Errors
    ///
    /// Those of [`MemClient::attach`], and those of [`PeerSegment::map_named`].
    pub fn result(&mut self, token: &SessionToken, id: SegmentId) -> Result<PeerSegment, ShmError> {
        let request = MemRequest::Result { token: *token, segment: id };
        match self.exchange(request, None)? {
            (MemReply::Result { bytes }, Some(fd)) => {
                PeerSegment::map_named(&format!("result segment {id}"), fd, bytes, self.config.result_bytes_max)
            }
            (MemReply::Result { .. }, None) => Err(self.mark_broken(ProtocolError::MissingDescriptor)),
            (MemReply::Refused { reason }, None) => Err(refused(request, reason)),
            (MemReply::Refused { .. }, Some(_)) => Err(self.mark_broken(ProtocolError::UnexpectedDescriptor)),
            (MemReply::Attached, _) => Err(self.mark_broken(ProtocolError::UnexpectedReply)),
        }
    }

    /// Passes a ring to the sidecar, which maps it before this returns. The connection becomes the ring's bell.
    ///
    /// # Errors
    ///
    /// Those of [`MemClient::attach`].
    pub fn ring(self, token: &SessionToken, ring: WorkerRing) -> Result<RingEnd, ShmError> {
        let request = MemRequest::Ring { token: *token, capacity: ring.capacity() };
        self.pass_ring(request, ring)
    }

    /// Opens a stream of a worker with a ring, whose capacity is that of the request. The connection becomes its bell.
    ///
    /// # Errors
    ///
    /// Those of [`MemClient::attach`].
    pub fn stream(self, request: StreamRequest, ring: WorkerRing) -> Result<RingEnd, ShmError> {
        self.pass_ring(MemRequest::Stream(StreamRequest { capacity: ring.capacity(), ..request }), ring)
    }

    fn pass_ring(mut self, request: MemRequest, ring: WorkerRing) -> Result<RingEnd, ShmError> {
        match self.exchange(request, Some(ring.fd()))? {
            (MemReply::Attached, None) => {}
            (MemReply::Refused { reason }, None) => return Err(refused(request, reason)),
            (MemReply::Attached | MemReply::Refused { .. }, Some(_)) => {
                return Err(ProtocolError::UnexpectedDescriptor.into());
            }
            (MemReply::Result { .. }, _) => return Err(ProtocolError::UnexpectedReply.into()),
        }
        self.stream.get()?;
        Ok(ring.into_end(Bell::of(self.stream)))
    }

    /// The sidecar's credentials, as reported by the kernel.
    ///
    /// # Errors
    ///
    /// [`ShmError::System`], [`ShmError::UsedAfterFork`].
    pub fn peer_credentials(&self) -> Result<Credentials, ShmError> {
        peer_credentials(&self.stream.get()?.0)
    }

    /// Sends a request and waits for its reply. After any failure the client is unusable, because a late reply would be
    /// taken for the reply to the next request.
    fn exchange(
        &mut self,
        request: MemRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(MemReply, Option<OwnedFd>), ShmError> {
        let stream = &self.stream.get()?.0;
        if self.broken {
            return Err(ShmError::ConnectionBroken);
        }
        let outcome = send_with_fd(stream, request.to_line().as_bytes(), fd).and_then(|()| receive_reply(stream));
        self.broken = outcome.is_err();
        outcome
    }

    fn mark_broken(&mut self, error: ProtocolError) -> ShmError {
        self.broken = true;
        error.into()
    }
}

fn receive_reply(stream: &UnixStream) -> Result<(MemReply, Option<OwnedFd>), ShmError> {
    match recv_with_fd(stream)? {
        Received::Line { line, fd } => Ok((MemReply::parse(&line)?, fd)),
        Received::Closed => Err(ShmError::PeerClosed { waiting_for: REPLY }),
        Received::Idle => Err(ShmError::TimedOut { waiting_for: REPLY }),
    }
}

fn refused(request: MemRequest, reason: String) -> ShmError {
    ShmError::Refused { request: request.describe(), reason }
}

const REPLY: &str = "waiting for a reply";
