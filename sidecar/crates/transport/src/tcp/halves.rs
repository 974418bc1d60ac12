//! The two halves of a connection.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ronde_wire::control::{self, Close};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{FrameHeader, FrameKind};
use rustls::Error;
use tokio::time::timeout;

use super::connection::{Inner, lost, refused};
use super::session::Opened;
use crate::links::close::{CloseCode, CloseReason};
use crate::port::DownReason;

/// The half that sends to the peer.
pub(crate) struct SendHalf(pub(super) Arc<Inner>);

impl SendHalf {
    /// Sends all buffers. Returns once the kernel has accepted them.
    ///
    /// # Errors
    /// The connection is closed; reading returns the reason.
    pub(crate) async fn write(&mut self, pieces: Vec<Bytes>) -> io::Result<()> {
        {
            let mut state = self.0.lock();
            if state.finishing {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            state.pending.extend(pieces.into_iter().filter(|piece| !piece.is_empty()));
        }
        self.0.flush().await
    }

    /// Finishes the half after what was written.
    pub(crate) fn finish(&mut self) {
        self.0.lock().finishing = true;
        let inner = self.0.clone();
        self.0.runtime.spawn(async move {
            // If the peer does not accept the rest, closing the connection drops it.
            let _ = timeout(FINISH_TIMEOUT, inner.flush()).await;
        });
    }

    /// Waits until `close_notify` is sent or the connection is closed.
    pub(crate) async fn wait_finished(&mut self) {
        loop {
            let changed = self.0.changed.notified();
            if self.0.lock().is_write_shut_down || self.0.close_reason().is_some() {
                return;
            }
            changed.await;
        }
    }
}

/// The half that receives from the peer.
pub(crate) struct RecvHalf(pub(super) Arc<Inner>);

/// Why reading ended.
pub(crate) enum ReadError {
    /// The peer has finished its half, this many bytes short of the request.
    Finished(usize),
    /// The connection is closed.
    Closed(CloseReason),
}

impl RecvHalf {
    /// Fills `out`.
    pub(crate) async fn read(&mut self, out: &mut [u8]) -> Result<(), ReadError> {
        let want = out.len();
        self.read_to(out, want).await
    }

    /// Reads `bytes` bytes into a buffer.
    pub(crate) async fn read_bytes(&mut self, bytes: usize) -> Result<Bytes, ReadError> {
        if bytes < POOLED_BYTES_MIN {
            let mut memory = vec![0; bytes];
            self.read(&mut memory).await?;
            return Ok(memory.into());
        }
        // Decrypting in place needs room for the record's type byte after the content.
        let mut memory = self.0.pool.take(bytes + 1);
        self.read_to(&mut memory, bytes).await?;
        Ok(self.0.pool.freeze(memory, bytes))
    }

    async fn read_to(&mut self, mut out: &mut [u8], mut want: usize) -> Result<(), ReadError> {
        let inner = &self.0;
        loop {
            let opened = {
                let mut state = inner.lock();
                if state.is_closed {
                    let reason = state.close_reason.clone();
                    return Err(ReadError::Closed(reason.expect("it was set when it was closed")));
                }
                state.session.open(&mut out, &mut want)
            };
            match opened {
                Ok(Opened::All) => return Ok(()),
                Ok(Opened::Finished) => return Err(ReadError::Finished(want)),
                Ok(Opened::NeedsInput) => {}
                Err(error) => return Err(self.fail_session(&error)),
            }
            match inner.read_some().await {
                Ok(0) => {
                    let gone = "its process is gone (the connection ended without a close frame)";
                    return Err(ReadError::Closed(
                        inner.set_close_reason(CloseReason::Other(DownReason::Lost(gone.to_owned()))),
                    ));
                }
                // Yields, so that a fast peer does not starve the thread's other tasks.
                Ok(bytes) if bytes >= LARGE_READ_BYTES => tokio::task::yield_now().await,
                Ok(_) => tokio::task::coop::consume_budget().await,
                Err(error) => return Err(ReadError::Closed(inner.set_close_reason(lost(&error)))),
            }
        }
    }

    /// Reads the rest of a close frame and returns the peer's reason.
    pub(crate) async fn read_close(&mut self, header: &FrameHeader) -> Result<CloseReason, ReadError> {
        let payload = self.read_bytes(header.length as usize).await?;
        let reason = match control::decode::<Close>(FrameKind::Close, &payload) {
            Ok(close) => CloseReason::of_code(CloseCode::of(close.code), close.reason),
            Err(error) => CloseReason::Other(DownReason::Protocol(error.to_string())),
        };
        Ok(self.0.set_close_reason(reason))
    }

    fn fail_session(&self, error: &Error) -> ReadError {
        // Sends the alert as far as the socket accepts it; closing the connection sends the rest.
        let _ = self.0.write_once();
        let reason = match error {
            Error::AlertReceived(_) => refused(error),
            other => CloseReason::Other(DownReason::Protocol(format!("TLS: {other}"))),
        };
        ReadError::Closed(self.0.set_close_reason(reason))
    }

    /// Reads and discards frames until the connection is closed.
    pub(super) async fn discard_frames(&mut self) {
        while self.0.close_reason().is_none() {
            self.discard_frame().await;
        }
    }

    /// Reads and discards one frame. The end of the stream closes the connection.
    async fn discard_frame(&mut self) {
        let mut header = [0; HEADER_BYTES];
        if let Err(stop) = self.read(&mut header).await {
            return self.record_read_end(&stop);
        }
        let passed = match FrameHeader::decode(&header) {
            Ok(header) if header.kind == FrameKind::Close => self.read_close(&header).await.map(drop),
            Ok(header) => self.read_bytes(header.length as usize).await.map(drop),
            Err(error) => {
                self.0.set_close_reason(CloseReason::Other(DownReason::Protocol(error.to_string())));
                return;
            }
        };
        if let Err(stop) = passed {
            self.record_read_end(&stop);
        }
    }

    fn record_read_end(&self, stop: &ReadError) {
        if let ReadError::Finished(_) = stop {
            self.0.set_close_reason(CloseReason::Other(DownReason::Lost("the peer ended the connection".to_owned())));
        }
    }
}

/// After a read of this size more bytes are likely to be waiting.
const LARGE_READ_BYTES: usize = 64 << 10;
/// Buffers of at least this size are pooled.
const POOLED_BYTES_MIN: usize = 16 << 10;
/// Limit for sending the last bytes of a finished half.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
