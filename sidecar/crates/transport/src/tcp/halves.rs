//! The two directions of a connection.

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
use crate::links::closing::{CloseCode, Ending};
use crate::port::DownReason;

/// The direction to the peer.
pub(crate) struct SendHalf(pub(super) Arc<Inner>);

impl SendHalf {
    /// Sends all pieces; they are with the system when this returns.
    ///
    /// # Errors
    /// The connection is gone; reading says why.
    pub(crate) async fn write(&mut self, pieces: Vec<Bytes>) -> io::Result<()> {
        {
            let mut core = self.0.lock();
            if core.finishing {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            core.pending.extend(pieces.into_iter().filter(|piece| !piece.is_empty()));
        }
        self.0.pump().await
    }

    /// Ends the direction behind what was written.
    pub(crate) fn finish(&mut self) {
        self.0.lock().finishing = true;
        let inner = self.0.clone();
        self.0.runtime.spawn(async move {
            // One that the peer does not take ends with the connection.
            let _ = timeout(FINISH_TIMEOUT, inner.pump()).await;
        });
    }

    /// Waits until the end of the direction is on its way, or the connection has ended.
    pub(crate) async fn finished(&mut self) {
        loop {
            let changed = self.0.changed.notified();
            if self.0.lock().is_end_sent || self.0.ended().is_some() {
                return;
            }
            changed.await;
        }
    }
}

/// The direction from the peer.
pub(crate) struct RecvHalf(pub(super) Arc<Inner>);

/// Why nothing more can be read.
pub(crate) enum Stop {
    /// The peer has ended its direction; so many bytes short of what was asked for.
    Finished(usize),
    /// The connection has ended.
    Ended(Ending),
}

impl RecvHalf {
    /// Fills the whole of `out`.
    pub(crate) async fn read(&mut self, out: &mut [u8]) -> Result<(), Stop> {
        let want = out.len();
        self.read_to(out, want).await
    }

    /// Reads so many bytes into memory of their own.
    pub(crate) async fn read_bytes(&mut self, bytes: usize) -> Result<Bytes, Stop> {
        if bytes < POOLED_BYTES_MIN {
            let mut memory = vec![0; bytes];
            self.read(&mut memory).await?;
            return Ok(memory.into());
        }
        // What is opened right into it has a byte behind its content.
        let mut memory = self.0.pool.take(bytes + 1);
        self.read_to(&mut memory, bytes).await?;
        Ok(self.0.pool.lend(memory, bytes))
    }

    async fn read_to(&mut self, mut out: &mut [u8], mut want: usize) -> Result<(), Stop> {
        let inner = &self.0;
        loop {
            let opened = {
                let mut core = inner.lock();
                if core.is_closed {
                    let ending = core.ended.clone();
                    return Err(Stop::Ended(ending.expect("it was set when it was closed")));
                }
                core.session.open(&mut out, &mut want)
            };
            match opened {
                Ok(Opened::All) => return Ok(()),
                Ok(Opened::Finished) => return Err(Stop::Finished(want)),
                Ok(Opened::Hungry) => {}
                Err(error) => return Err(self.fail(&error)),
            }
            match inner.read_some().await {
                Ok(0) => {
                    let gone = "its process is gone (the connection ended without a goodbye)";
                    return Err(Stop::Ended(inner.note_end(Ending::Other(DownReason::Lost(gone.to_owned())))));
                }
                // A peer that sends as fast as this side reads does not keep the other tasks of the thread from their turn.
                Ok(bytes) if bytes >= LARGE_READ_BYTES => tokio::task::yield_now().await,
                Ok(_) => tokio::task::coop::consume_budget().await,
                Err(error) => return Err(Stop::Ended(inner.note_end(lost(&error)))),
            }
        }
    }

    /// The rest of a frame that ends the connection, as the peer's reason.
    pub(crate) async fn end(&mut self, header: &FrameHeader) -> Result<Ending, Stop> {
        let payload = self.read_bytes(header.length as usize).await?;
        let ending = match control::decode::<Close>(FrameKind::Close, &payload) {
            Ok(close) => Ending::of_code(CloseCode::of(close.code), close.reason),
            Err(error) => Ending::Other(DownReason::Protocol(error.to_string())),
        };
        Ok(self.0.note_end(ending))
    }

    fn fail(&self, error: &Error) -> Stop {
        // The alert goes out at once, as far as it goes; closing the connection takes care of the rest.
        let _ = self.0.push();
        let ending = match error {
            Error::AlertReceived(_) => refused(error),
            other => Ending::Other(DownReason::Protocol(format!("TLS: {other}"))),
        };
        Stop::Ended(self.0.note_end(ending))
    }

    /// Reads frames that nobody wants any more, until the connection has ended.
    pub(super) async fn pass_frames(&mut self) {
        while self.0.ended().is_none() {
            self.pass_frame().await;
        }
    }

    /// Reads one; that there is none is noted as the end of the connection.
    async fn pass_frame(&mut self) {
        let mut header = [0; HEADER_BYTES];
        if let Err(stop) = self.read(&mut header).await {
            return self.note_stop(&stop);
        }
        let passed = match FrameHeader::decode(&header) {
            Ok(header) if header.kind == FrameKind::Close => self.end(&header).await.map(drop),
            Ok(header) => self.read_bytes(header.length as usize).await.map(drop),
            Err(error) => {
                self.0.note_end(Ending::Other(DownReason::Protocol(error.to_string())));
                return;
            }
        };
        if let Err(stop) = passed {
            self.note_stop(&stop);
        }
    }

    fn note_stop(&self, stop: &Stop) {
        if let Stop::Finished(_) = stop {
            self.0.note_end(Ending::Other(DownReason::Lost("the peer ended the connection".to_owned())));
        }
    }
}

/// A read after which there is likely to be more.
const LARGE_READ_BYTES: usize = 64 << 10;
/// From here on memory is used again.
const POOLED_BYTES_MIN: usize = 16 << 10;
/// How long the last bytes of a direction may take.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
