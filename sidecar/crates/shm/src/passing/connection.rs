//! A connection that ends for everybody when its owner drops it.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A stream that ends for all copies of its descriptor when this one is dropped.
#[derive(Debug)]
pub(crate) struct Connection(pub(crate) UnixStream);

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Fails only when the peer has gone already.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}
