//! A connection over either carrier, and its two directions, as the links need them.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use quinn::{ReadError, ReadExactError};
use ronde_wire::control::Carrier;
use ronde_wire::{FrameHeader, FrameKind};
use rustls_pki_types::CertificateDer;

use super::close::{CloseCode, CloseReason};
use super::{PathStats, canonical};
use crate::{quic, tcp};

/// One authenticated connection; clones are the same one.
#[derive(Clone)]
pub(crate) enum Connection {
    Quic(quinn::Connection),
    Tcp(tcp::Connection),
}

/// Why an attempt to connect has failed.
pub(crate) enum ConnectError {
    /// This side cannot even try.
    Local(String),
    /// Nobody answers there, yet.
    NoAnswer(String),
    /// Somebody did.
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

    /// The certificates that the peer has shown, leaf first.
    pub(super) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        match self {
            Self::Quic(connection) => quic::peer_certificates(connection),
            Self::Tcp(connection) => connection.peer_certificates(),
        }
    }

    /// Closes it with a reason that the peer is told.
    pub(crate) fn close(&self, code: CloseCode, reason: &str) {
        match self {
            Self::Quic(connection) => quic::close(connection, code, reason),
            // Its goodbye goes on by itself.
            Self::Tcp(connection) => drop(connection.close(code, reason)),
        }
    }

    /// Waits until it has ended. Nobody may read from it any more.
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

    /// The dialler's directions.
    pub(super) async fn open(&self) -> Result<(SendHalf, RecvHalf), CloseReason> {
        match self {
            Self::Quic(connection) => match connection.open_bi().await {
                Ok((send, recv)) => Ok((SendHalf::Quic(send), RecvHalf::Quic(recv))),
                Err(error) => Err(quic::close_reason(&error)),
            },
            Self::Tcp(connection) => Ok(halves(connection)),
        }
    }

    /// The acceptor's.
    pub(super) async fn accept(&self) -> Result<(SendHalf, RecvHalf), CloseReason> {
        match self {
            Self::Quic(connection) => match connection.accept_bi().await {
                Ok((send, recv)) => Ok((SendHalf::Quic(send), RecvHalf::Quic(recv))),
                Err(error) => Err(quic::close_reason(&error)),
            },
            Self::Tcp(connection) => Ok(halves(connection)),
        }
    }

    /// Returns when the peer's host says that its process is gone. A connection over TCP hears that by itself.
    pub(super) async fn wait_unreachable(&self) {
        match self {
            Self::Quic(connection) => quic::wait_unreachable(connection).await,
            Self::Tcp(_) => std::future::pending().await,
        }
    }

    /// What is known of the way.
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

/// The direction to the peer.
pub(super) enum SendHalf {
    Quic(quinn::SendStream),
    Tcp(tcp::SendHalf),
}

/// The connection is gone; reading from it says why.
pub(super) struct ConnectionLost;

impl SendHalf {
    /// Hands all pieces to the connection.
    pub(super) async fn write(&mut self, mut buffers: Vec<Bytes>) -> Result<(), ConnectionLost> {
        match self {
            Self::Quic(stream) => stream.write_all_chunks(&mut buffers).await.map_err(|_| ConnectionLost),
            Self::Tcp(half) => half.write(buffers).await.map_err(|_| ConnectionLost),
        }
    }

    /// Ends the direction behind what was written.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Quic(stream) => {
                // Fails when the connection is gone, which the reader finds out with its reason.
                let _ = stream.finish();
            }
            Self::Tcp(half) => half.finish(),
        }
    }

    /// Behind a refusal nothing follows. Over TCP the close that follows says that.
    pub(super) fn finish_refusal(&mut self) {
        if let Self::Quic(_) = self {
            self.finish();
        }
    }

    /// Behind [`Self::finish`]: waits until the peer has everything, or the connection is gone.
    pub(super) async fn wait_finished(&mut self) {
        match self {
            Self::Quic(stream) => {
                // It has ended either way.
                let _ = stream.stopped().await;
            }
            Self::Tcp(half) => half.wait_finished().await,
        }
    }

    /// Makes sure that a close does not overtake what was written. Over TCP it cannot.
    pub(super) async fn flush(&mut self) {
        if let Self::Quic(stream) = self
            && stream.finish().is_ok()
        {
            // It has ended either way.
            let _ = stream.stopped().await;
        }
    }
}

/// The direction from the peer.
pub(super) enum RecvHalf {
    Quic(quinn::RecvStream),
    Tcp(tcp::RecvHalf),
}

/// Why no further frame can be read.
pub(super) enum ReadStop {
    /// The peer sent what is not the protocol.
    Violation(String),
    /// The direction ended at a frame's border.
    Finished,
    /// The connection is gone.
    Lost(CloseReason),
}

/// Why there are not as many bytes as were asked for.
pub(super) enum ShortRead {
    /// The direction ended behind so many.
    Finished(usize),
    Ended(ReadStop),
}

impl RecvHalf {
    /// Fills the whole of `out`.
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

    /// Reads so many bytes into memory of their own.
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

    /// How the connection has ended, when the frame with this header says so; QUIC has frames of its own for that.
    pub(super) async fn read_close(&mut self, header: &FrameHeader) -> Option<ReadStop> {
        match self {
            Self::Tcp(half) if header.kind == FrameKind::Close => Some(match half.read_close(header).await {
                Ok(reason) | Err(tcp::ReadError::Closed(reason)) => ReadStop::Lost(reason),
                Err(tcp::ReadError::Finished(_)) => {
                    ReadStop::Violation("the stream ended within its last frame".to_owned())
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
