//! The bell: a Unix socket between worker and sidecar on which a byte means "look at the ring".

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use crate::error::ShmError;
use crate::fork::ForkSafe;
use crate::passing::connection::Connection;

/// One end of a bell. It is shut down when dropped, and closed in forked children as they start.
///
/// Ringing never waits, whatever the other end does: see the module's header for why it is no eventfd.
#[derive(Debug)]
pub struct Bell {
    stream: ForkSafe<Connection>,
}

impl Bell {
    /// A bell over a connected stream.
    ///
    /// # Errors
    /// [`ShmError::ForkTableFull`].
    pub fn over(stream: UnixStream) -> Result<Self, ShmError> {
        Ok(Self::of(ForkSafe::with_fd(Connection(stream))?))
    }

    /// A bell over a connection that served for something else before.
    pub(crate) fn of(stream: ForkSafe<Connection>) -> Self {
        Self { stream }
    }

    /// Wakes the other side.
    pub fn ring(&self) {
        let Ok(stream) = self.stream.get() else { return };
        let fd = stream.as_fd().as_raw_fd();
        // A socket without room holds wake-ups that were not looked at; one that is closed has nobody to wake, which the
        // session's stream tells. Each retry answers one signal to this thread.
        while send(fd, &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) == Err(Errno::EINTR) {}
    }

    /// What an event loop waits for: readable when the other side has rung, at its end when the other side is gone. It does
    /// not block. In a process that forks, register it with the fork guard.
    ///
    /// Wait for reading alone: room for writing comes back with every ring that the other side has heard, and would wake the
    /// loop each time.
    ///
    /// # Errors
    /// [`ShmError::System`] when descriptors run out; [`ShmError::UsedAfterFork`].
    pub fn listen(&self) -> Result<UnixStream, ShmError> {
        let copy = || -> std::io::Result<UnixStream> {
            let copy = self.stream.get().map_err(std::io::Error::other)?.0.try_clone()?;
            copy.set_nonblocking(true)?;
            Ok(copy)
        };
        copy().map_err(|error| ShmError::system("duplicating", "the bell", error))
    }
}
