//! A connection over QUIC or TCP, and its two halves.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use quinn::{ReadError, ReadExactError};
use ronde_wire::control::Carrier;
use ronde_wire::{FrameHeader, FrameKind};
use rustls_pki_types::CertificateDer;

use super::close::{CloseCode, CloseReason};
use super::{PathStats, canonical};
use crate::{quic, tcp};

/// An authenticated connection. Clones refer to the same connection.
#[derive(Clone)]
pub(crate) enum Connection {
    Quic(quinn::Connection),
    Tcp(tcp::Connection),
}

/// Why a connection could not be made.
pub(crate) enum ConnectError {
    /// A problem of this side; nothing was sent.
    Local(String),
    /// The peer does not answer, or not yet.
    NoAnswer(String),
    /// The peer closed the connection or was rejected.
    Closed(CloseReason),
}

impl Connection {
    pub(crate) fn carrier(&self) -> Carrier {
        match self {
            Self::Quic(_) => Carrier::Quic,
            Self::Tcp(_) => Carrier::Tls,
        }
    }

    pub(crate) fn remote_address(&self) -> SocketAddr {
        match self {
            Self::Quic(connection) => connection.remote_address(),
            Self::Tcp(connection) => connection.remote_address(),
        }
    }

    /// The peer's certificates, leaf first.
    pub(super) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        match self {
            Self::Quic(connection) => quic::peer_certificates(connection),
            Self::Tcp(connection) => connection.peer_certificates(),
        }
    }

    /// Closes the connection and sends the reason to the peer.
    pub(crate) fn close(&self, code: CloseCode, reason: &str) {
        match self {
            Self::Quic(connection) => quic::close(connection, code, reason),
            // A spawned task finishes the close.
            Self::Tcp(connection) => drop(connection.close(code, reason)),
        }
    }

    /// Waits until the connection is closed. Do not read from it at the same time.
    pub(super) async fn closed(&self) -> CloseReason {
        match self {
            Self::Quic(connection) => quic::close_reason(&connection.closed().await),
            Self::Tcp(connection) => connection.closed().await,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::Quic(connection) => connection.close_reason().is_some(),
            Self::Tcp(connection) => connection.is_closed(),
        }
    }

    /// Opens the stream as the dialler.
    pub(super) async fn open(&self) -> Result<(SendHalf, RecvHalf), CloseReason> {
        match self {
            Self::Quic(connection) => match connection.open_bi().await {
                Ok((send, recv)) => Ok((SendHalf::Quic(send), RecvHalf::Quic(recv))),
                Err(error) => Err(quic::close_reason(&error)),
            },
            Self::Tcp(connection) => Ok(halves(connection)),
        }
    }

    /// Accepts the stream as the acceptor.
    pub(super) async fn accept(&self) -> Result<(SendHalf, RecvHalf), CloseReason> {
        match self {
            Self::Quic(connection) => match connection.accept_bi().await {
                Ok((send, recv)) => Ok((SendHalf::Quic(send), RecvHalf::Quic(recv))),
                Err(error) => Err(quic::close_reason(&error)),
            },
            Self::Tcp(connection) => Ok(halves(connection)),
        }
    }

    /// Returns when the peer's host reports that the peer's process has exited. TCP reports this as the end of the
    /// connection.
    pub(super) async fn wait_unreachable(&self) {
        match self {
            Self::Quic(connection) => quic::wait_unreachable(connection).await,
            Self::Tcp(_) => std::future::pending().await,
        }
    }

    /// Statistics of the network path.
    pub(super) fn path(&self) -> PathStats {
        match self {
            Self::Quic(connection) => quic::path(connection),
            Self::Tcp(connection) => {
                let (sent_bytes, received_bytes) = connection.bytes();
                PathStats {
                    carrier: Carrier::Tls,
                    peer_address: canonical(connection.remote_address()),
                    sent_bytes,
                    received_bytes,
                    quic: None,
                }
            }
        }
    }
}

fn halves(connection: &tcp::Connection) -> (SendHalf, RecvHalf) {
    let (send, recv) = connection.halves();
    (SendHalf::Tcp(send), RecvHalf::Tcp(recv))
}

/// The half that sends to the peer.
pub(super) enum SendHalf {
    Quic(quinn::SendStream),
    Tcp(tcp::SendHalf),
}

/// The connection is closed; reading returns the reason.
pub(super) struct ConnectionLost;

impl SendHalf {
    /// Writes all buffers.
    pub(super) async fn write(&mut self, mut buffers: Vec<Bytes>) -> Result<(), ConnectionLost> {
        match self {
            Self::Quic(stream) => stream.write_all_chunks(&mut buffers).await.map_err(|_| ConnectionLost),
            Self::Tcp(half) => half.write(buffers).await.map_err(|_| ConnectionLost),
        }
    }

    /// Finishes the half after what was written.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Quic(stream) => {
                // This fails if the connection is closed; the reader gets the reason.
                let _ = stream.finish();
            }
            Self::Tcp(half) => half.finish(),
        }
    }

    /// Finishes the half after a refusal. Over TCP the close frame that follows does so.
    pub(super) fn finish_refusal(&mut self) {
        if let Self::Quic(_) = self {
            self.finish();
        }
    }

    /// Waits, after [`Self::finish`], until the peer has received everything or the connection is closed.
    pub(super) async fn wait_finished(&mut self) {
        match self {
            Self::Quic(stream) => {
                // The half has ended in either case.
                let _ = stream.stopped().await;
            }
            Self::Tcp(half) => half.wait_finished().await,
        }
    }

    /// Waits until the peer has received what was written, so that a close cannot overtake it. Over TCP it cannot.
    pub(super) async fn flush(&mut self) {
        if let Self::Quic(stream) = self
            && stream.finish().is_ok()
        {
            // The half has ended in either case.
            let _ = stream.stopped().await;
        }
    }
}

/// The half that receives from the peer.
pub(super) enum RecvHalf {
    Quic(quinn::RecvStream),
    Tcp(tcp::RecvHalf),
}

/// Why no further frame can be read.
pub(super) enum ReadStop {
    /// The peer violated the protocol.
    Violation(String),
    /// The stream ended between two frames.
    Finished,
    /// The connection is closed.
    Lost(CloseReason),
}

/// Why fewer bytes were read than requested.
pub(super) enum ShortRead {
    /// The stream ended after this many bytes.
    Finished(usize),
    Ended(ReadStop),
}

impl RecvHalf {
    /// Fills `out`.
    pub(super) async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), ShortRead> {
        match self {
            Self::Quic(stream) => stream.read_exact(out).await.map_err(|error| match error {
                ReadExactError::FinishedEarly(got) => ShortRead::Finished(got),
                ReadExactError::ReadError(error) => ShortRead::Ended(error.into()),
            }),
            Self::Tcp(half) => {
                let length = out.len();
                half.read(out).await.map_err(|stop| ShortRead::of(stop, length))
            }
        }
    }

    /// Reads `length` bytes into a new buffer.
    pub(super) async fn read(&mut self, length: usize) -> Result<Bytes, ShortRead> {
        match self {
            Self::Quic(stream) => {
                let mut out = BytesMut::with_capacity(length);
                while out.len() < length {
                    match stream.read_chunk(length - out.len(), true).await {
                        Ok(Some(chunk)) => out.extend_from_slice(&chunk.bytes),
                        Ok(None) => return Err(ShortRead::Finished(out.len())),
                        Err(error) => return Err(ShortRead::Ended(error.into())),
                    }
                }
                Ok(out.freeze())
            }
            Self::Tcp(half) => half.read_bytes(length).await.map_err(|stop| ShortRead::of(stop, length)),
        }
    }

    /// The reason in a close frame, if the frame with this header is one. QUIC has its own close frames.
    pub(super) async fn read_close(&mut self, header: &FrameHeader) -> Option<ReadStop> {
        match self {
            Self::Tcp(half) if header.kind == FrameKind::Close => Some(match half.read_close(header).await {
                Ok(reason) | Err(tcp::ReadError::Closed(reason)) => ReadStop::Lost(reason),
                Err(tcp::ReadError::Finished(_)) => {
                    ReadStop::Violation("the stream ended within its close frame".to_owned())
                }
            }),
            Self::Tcp(_) | Self::Quic(_) => None,
        }
    }
}

impl ShortRead {
    fn of(stop: tcp::ReadError, wanted: usize) -> Self {
        match stop {
            tcp::ReadError::Finished(missing) => Self::Finished(wanted - missing),
            tcp::ReadError::Closed(reason) => Self::Ended(ReadStop::Lost(reason)),
        }
    }
}

impl From<ReadError> for ReadStop {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::ConnectionLost(error) => Self::Lost(quic::close_reason(&error)),
            other => Self::Violation(format!("the stream broke: {other}")),
        }
    }
}
