//! A connection that is shut down when dropped.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A stream that ends for all copies of its descriptor when this value is dropped.
#[derive(Debug)]
pub(crate) struct Connection(pub(crate) UnixStream);

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // This fails only if the peer has closed the connection already.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}
