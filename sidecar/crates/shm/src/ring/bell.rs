//! The bell: a Unix socket between worker and sidecar on which a byte means "look at the ring".

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::error::ShmError;
use crate::fork::{ForkSafe, UsedAfterFork};
use crate::passing::connection::Connection;

/// One end of a bell. It is shut down when dropped, and closed in forked children as they start.
///
/// Nothing here ever waits, whatever the other end does: see the module's header for why it is no eventfd.
#[derive(Debug)]
pub struct Bell {
    stream: ForkSafe<Connection>,
    fd: RawFd,
}

impl Bell {
    /// A bell over a connected stream.
    ///
    /// # Errors
    /// [`ShmError::ForkTableFull`].
    pub fn over(stream: UnixStream) -> Result<Self, ShmError> {
        Self::of(ForkSafe::with_fd(Connection(stream))?).map_err(ShmError::from)
    }

    /// A bell over a connection that served for something else before.
    pub(crate) fn of(stream: ForkSafe<Connection>) -> Result<Self, UsedAfterFork> {
        let fd = stream.get()?.as_fd().as_raw_fd();
        Ok(Self { stream, fd })
    }

    /// Wakes the other side.
    pub fn ring(&self) {
        if self.stream.is_child() {
            return;
        }
        // A socket without room holds wake-ups that were not looked at; one that is closed has nobody to wake, which the
        // session's stream tells. Each retry answers one signal to this thread.
        while send(self.fd, &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) == Err(Errno::EINTR) {}
    }

    /// Takes what the other side has rung so far, up to a bound. Says whether there may be more: then look again before
    /// waiting for readiness.
    pub fn hush(&self) -> Rung {
        if self.stream.is_child() {
            return Rung::Ended;
        }
        let mut rung = [0; RUNG_MAX];
        match recv(self.fd, &mut rung, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Rung::Ended,
            Ok(RUNG_MAX) | Err(Errno::EINTR) => Rung::MaybeMore,
            Ok(_) | Err(Errno::EAGAIN) => Rung::All,
            Err(_) => Rung::Ended,
        }
    }
}

/// What [`Bell::hush`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// All that was rung is taken.
    All,
    /// There may be more to take.
    MaybeMore,
    /// The other end is closed.
    Ended,
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

/// Wake-ups taken at once.
const RUNG_MAX: usize = 1_024;
