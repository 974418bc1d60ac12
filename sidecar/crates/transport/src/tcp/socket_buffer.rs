//! A byte queue between the socket and TLS: filled at its end, consumed from its start.

use rustls::unbuffered::{EncodeError, InsufficientSizeError};

pub(super) struct SocketBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl SocketBuffer {
    pub(super) fn new(bytes: usize) -> Self {
        // Zeroed by the kernel: pages are allocated on first use.
        Self { bytes: vec![0; bytes], start: 0, end: 0 }
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn filled_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// The free space after the contents. Moves the contents to the front when little space is left.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.start > 0 && self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Marks the first `bytes` bytes of the free space as filled.
    pub(super) fn put(&mut self, bytes: usize) {
        self.end += bytes;
    }

    pub(super) fn take(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Appends handshake messages, growing the buffer if needed. They are few and small.
    pub(super) fn append_growing(
        &mut self,
        mut write: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
    ) -> Result<(), EncodeError> {
        let written = match write(self.room()) {
            Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                self.bytes.resize(self.end + required_size, 0);
                write(self.room())?
            }
            done => done?,
        };
        self.put(written);
        Ok(())
    }
}
