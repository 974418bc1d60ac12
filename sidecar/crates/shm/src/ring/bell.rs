//! The bell: a Unix socket between worker and sidecar on which a byte means "poll the ring".

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use crate::error::ShmError;
use crate::fork::ForkSafe;
use crate::passing::connection::Connection;

/// One end of a bell. It is shut down when dropped, and closed in forked children.
///
/// Ringing never blocks, whatever the other end does; the documentation of [`ring`](super) says why it is not an
/// eventfd.
#[derive(Debug)]
pub struct Bell {
    stream: ForkSafe<Connection>,
}

impl Bell {
    /// Creates a bell over a connected stream.
    ///
    /// # Errors
    /// [`ShmError::ForkTableFull`].
    pub fn over(stream: UnixStream) -> Result<Self, ShmError> {
        Ok(Self::of(ForkSafe::with_fd(Connection(stream))?))
    }

    /// Creates a bell over a connection that was used for requests before.
    pub(crate) fn of(stream: ForkSafe<Connection>) -> Self {
        Self { stream }
    }

    /// Wakes the other side.
    pub fn ring(&self) {
        let Ok(stream) = self.stream.get() else { return };
        let fd = stream.as_fd().as_raw_fd();
        // A full socket contains unread wake-ups already; a closed one has no peer to wake, which the session's stream
        // reports. Each retry handles one signal to this thread.
        while send(fd, &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) == Err(Errno::EINTR) {}
    }

    /// A nonblocking stream for an event loop: readable when the other side has rung, at its end when the other side is
    /// gone. In a process that forks, register it with the fork guard.
    ///
    /// Wait for readability only: the stream becomes writable with every byte that the other side reads, which would
    /// wake the loop each time.
    ///
    /// # Errors
    /// [`ShmError::System`] if descriptors are exhausted; [`ShmError::UsedAfterFork`].
    pub fn listen(&self) -> Result<UnixStream, ShmError> {
        let copy = || -> std::io::Result<UnixStream> {
            let copy = self.stream.get().map_err(std::io::Error::other)?.0.try_clone()?;
            copy.set_nonblocking(true)?;
            Ok(copy)
        };
        copy().map_err(|error| ShmError::system("duplicating", "the bell", error))
    }
}
