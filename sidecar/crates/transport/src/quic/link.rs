//! A link that is up: frames in both directions until it ends.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use quinn::{Connection, ConnectionError, ReadError, ReadExactError, RecvStream, SendStream, WriteError};
use ronde_wire::control::{self, Hello, Purpose};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{Epoch, Frame, FrameHeader, FrameKind, Seq, SidecarIndex};
use rustls_pki_types::UnixTime;

use super::closing::{self, CloseCode, Ending};
use super::outbox::{Next, Outbox};
use super::probe;
use super::state::{Installed, Shared};
use crate::hello;
use crate::port::DownReason;

/// A connection with its one stream, authenticated.
pub(super) struct Wire {
    pub(super) connection: Connection,
    pub(super) send: SendStream,
    pub(super) recv: RecvStream,
    pub(super) peer: SidecarIndex,
    /// When the first of the two certificates expires.
    pub(super) not_after: UnixTime,
}

/// How a link ends.
enum End {
    /// The owner asked for it, behind everything queued.
    Closed(String),
    /// The peer sent what is not the protocol.
    Violation(String),
    Expired(String),
    Unreachable,
    Gone(Ending),
}

/// Runs a link until it is down, and tells the owner why.
pub(super) async fn run(shared: Arc<Shared>, wire: Wire, installed: Installed) {
    let Wire { connection, mut send, mut recv, peer, not_after } = wire;
    let Installed { generation, outbox } = installed;
    let end = tokio::select! {
        end = read_frames(&shared, peer, generation, &connection, &mut recv) => end,
        end = write_frames(&shared, peer, generation, &outbox, &mut send) => end,
        end = wait_for_expiry(not_after) => end,
        end = watch_process(&connection, shared.hello.purpose) => end,
    };
    let reason = match end {
        End::Closed(reason) => {
            closing::close(&connection, CloseCode::Closed, &reason);
            return;
        }
        End::Violation(text) => {
            closing::close(&connection, CloseCode::Protocol, &text);
            DownReason::Protocol(text)
        }
        End::Expired(text) => {
            closing::close(&connection, CloseCode::Expired, &text);
            DownReason::Expired(text)
        }
        End::Unreachable => {
            closing::close(&connection, CloseCode::Closed, "your port was unreachable");
            DownReason::PortUnreachable
        }
        End::Gone(ending) => {
            if let Ending::RefusedHere(text) | Ending::RefusedThere(text) = &ending {
                shared.note_refusal(connection.remote_address(), text);
            }
            ending.down_reason(peer)
        }
    };
    shared.link_down(peer, generation, reason);
}

async fn read_frames(
    shared: &Shared,
    peer: SidecarIndex,
    generation: u64,
    connection: &Connection,
    recv: &mut RecvStream,
) -> End {
    let purpose = shared.hello.purpose;
    loop {
        let frame = match read_frame(recv, |header| hello::check_kind(header, purpose)).await {
            Ok(frame) => frame,
            Err(stop) => return stop.into_end(connection).await,
        };
        if let Err(text) = hello::check_lane(&frame, purpose) {
            return End::Violation(text);
        }
        shared.counters.add(&shared.counters.frames_received, 1);
        shared.counters.add(&shared.counters.opened_bytes, frame.wire_bytes() as u64);
        // Closed here meanwhile: what still comes is read and dropped, so that the peer's last acknowledgements flow.
        shared.deliver(peer, generation, frame).await;
    }
}

async fn write_frames(
    shared: &Shared,
    peer: SidecarIndex,
    generation: u64,
    outbox: &Outbox,
    send: &mut SendStream,
) -> End {
    loop {
        let mut batch = match outbox.next().await {
            Next::Write(batch) => batch,
            Next::Close(reason) => {
                flush(send).await;
                return End::Closed(reason);
            }
        };
        shared.counters.add(&shared.counters.frames_sent, batch.frames);
        shared.counters.add(&shared.counters.sealed_bytes, batch.bytes as u64);
        if send.write_all_chunks(&mut batch.pieces).await.is_err() {
            // The reader finds out why, behind the frames that have arrived.
            return std::future::pending().await;
        }
        outbox.written(batch.bytes);
        shared.sent(peer, generation, batch.chunks);
    }
}

/// Waits until the peer has acknowledged everything, within a bound.
async fn flush(send: &mut SendStream) {
    if send.finish().is_ok() {
        // A peer that does not acknowledge in time is not waited for: the close frame follows anyway.
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, send.stopped()).await;
    }
}

/// Sleeps until the wall clock says that a certificate has expired. In slices, because the clock may be set.
async fn wait_for_expiry(not_after: UnixTime) -> End {
    let not_after = Duration::from_secs(not_after.as_secs());
    loop {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let Some(left) = not_after.checked_sub(now).filter(|left| !left.is_zero()) else {
            return End::Expired(format!("a certificate of this link was valid until {} (UNIX)", not_after.as_secs()));
        };
        tokio::time::sleep(left.min(CLOCK_LOOK)).await;
    }
}

/// Control links notice a process that is gone; lanes leave that to them.
async fn watch_process(connection: &Connection, purpose: Purpose) -> End {
    if purpose == Purpose::Control {
        probe::until_unreachable(connection).await;
        return End::Unreachable;
    }
    std::future::pending().await
}

/// Why no further frame can be read.
pub(super) enum ReadStop {
    /// The peer sent what is not the protocol.
    Violation(String),
    /// The stream ended at a frame's border.
    Finished,
    /// The connection is gone.
    Lost(ConnectionError),
}

impl ReadStop {
    async fn into_end(self, connection: &Connection) -> End {
        match self {
            Self::Violation(text) => End::Violation(text),
            Self::Lost(error) => End::Gone(Ending::of(&error)),
            // The close frame with the reason is on its way.
            Self::Finished => match tokio::time::timeout(FLUSH_TIMEOUT, connection.closed()).await {
                Ok(error) => End::Gone(Ending::of(&error)),
                Err(_) => End::Violation("the stream ended, but the connection did not".to_owned()),
            },
        }
    }
}

impl From<ReadError> for ReadStop {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::ConnectionLost(error) => Self::Lost(error),
            other => Self::Violation(format!("the stream broke: {other}")),
        }
    }
}

/// Reads one frame into memory of its own with one copy. `admit` judges the header before anything is allocated.
pub(super) async fn read_frame(
    recv: &mut RecvStream,
    admit: impl Fn(&FrameHeader) -> Result<(), String>,
) -> Result<Frame, ReadStop> {
    let mut header = [0; HEADER_BYTES];
    match recv.read_exact(&mut header).await {
        Ok(()) => {}
        Err(ReadExactError::FinishedEarly(0)) => return Err(ReadStop::Finished),
        Err(ReadExactError::FinishedEarly(got)) => {
            return Err(ReadStop::Violation(format!("the stream ended within a header, behind {got} bytes")));
        }
        Err(ReadExactError::ReadError(error)) => return Err(error.into()),
    }
    let header = FrameHeader::decode(&header).map_err(|error| ReadStop::Violation(error.to_string()))?;
    admit(&header).map_err(ReadStop::Violation)?;
    let length = header.length as usize;
    let mut payload = BytesMut::with_capacity(length);
    while payload.len() < length {
        match recv.read_chunk(length - payload.len(), true).await? {
            Some(chunk) => payload.extend_from_slice(&chunk.bytes),
            None => {
                let text = format!("the stream ended within a frame, behind {} of {length} bytes", payload.len());
                return Err(ReadStop::Violation(text));
            }
        }
    }
    Ok(Frame { header, payload: payload.freeze() })
}

/// Writes one of the two frames that open a connection.
pub(super) async fn write_first(
    send: &mut SendStream,
    kind: FrameKind,
    payload: bytes::Bytes,
) -> Result<(), WriteError> {
    let frame = Frame::new(kind, Epoch(0), Seq(0), payload);
    send.write_all(&frame.header.encode()).await?;
    send.write_all(&frame.payload).await
}

/// The hello of this side, as the first frame.
pub(super) async fn write_hello(send: &mut SendStream, hello: &Hello) -> Result<(), WriteError> {
    write_first(send, FrameKind::Hello, control::encode(hello)).await
}

/// Hellos are small; nobody may announce more before being known.
pub(super) fn admit_first(header: &FrameHeader) -> Result<(), String> {
    if !matches!(header.kind, FrameKind::Hello | FrameKind::Refusal) {
        return Err(format!("the first frame is {:?}, not a hello", header.kind));
    }
    if header.length > FIRST_FRAME_BYTES_MAX {
        return Err(format!("a first frame has at most {FIRST_FRAME_BYTES_MAX} bytes, not {}", header.length));
    }
    Ok(())
}

/// The earlier of two moments.
pub(super) fn earlier(one: UnixTime, other: UnixTime) -> UnixTime {
    if one.as_secs() <= other.as_secs() { one } else { other }
}

/// How long a close waits for acknowledgements of what was sent before it.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);
/// How often the wall clock is looked at while a certificate is valid.
const CLOCK_LOOK: Duration = Duration::from_secs(60);
const FIRST_FRAME_BYTES_MAX: u32 = 8 << 10;
