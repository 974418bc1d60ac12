//! A link that is up: frames in both directions until it ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use quinn::{Connection, ConnectionError, ReadError, ReadExactError, RecvStream, SendStream, WriteError};
use ronde_wire::control::{self, Hello, Purpose};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{Epoch, Frame, FrameHeader, FrameKind, Seq, SidecarIndex};
use rustls_pki_types::UnixTime;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::closing::{self, CloseCode, Ending};
use super::handover::Handover;
use super::outbox::{Next, Outbox};
use super::proof::Proof;
use super::state::{Installed, Shared};
use super::{probe, replace};
use crate::hello;
use crate::port::DownReason;

/// A connection with its one stream, authenticated.
pub(super) struct Wire {
    pub(super) connection: Connection,
    pub(super) send: SendStream,
    pub(super) recv: RecvStream,
    pub(super) peer: SidecarIndex,
    pub(super) proof: Proof,
}

/// How a link ends.
enum End {
    /// The owner asked for it, behind everything queued.
    Closed(String),
    /// The peer sent what is not the protocol.
    Violation(String),
    Expired(String),
    /// The peer's authority is not accepted any more.
    Disowned(String),
    Unreachable,
    Gone(Ending),
}

/// A link while it is up: the parts that its reader, its writer and its watch have in common.
struct Running<'a> {
    shared: &'a Arc<Shared>,
    peer: SidecarIndex,
    generation: u64,
    dialled: bool,
    handover: &'a Handover,
    /// The peer, which was dialled, asks for a replacement.
    asked: Notify,
}

/// Runs a link until it is down, and tells the owner why.
pub(super) async fn run(shared: Arc<Shared>, wire: Wire, installed: Installed) {
    let Wire { connection, send, recv, peer, proof } = wire;
    let Installed { generation, outbox, handover, dialled } = installed;
    let running = Running { shared: &shared, peer, generation, dialled, handover: &handover, asked: Notify::new() };
    let mut current = (connection.clone(), proof);
    let mut reader = pin!(running.read_frames(connection, recv));
    let mut writer = pin!(running.write_frames(&outbox, send));
    let end = tokio::select! {
        end = &mut reader => end,
        end = &mut writer => end,
        end = running.watch(&outbox, &mut current) => end,
    };
    let close = |code, reason: &str| {
        closing::close(&current.0, code, reason);
        handover.close(code, reason);
    };
    let reason = match end {
        End::Closed(reason) => {
            close(CloseCode::Closed, &reason);
            return;
        }
        End::Violation(text) => {
            close(CloseCode::Protocol, &text);
            DownReason::Protocol(text)
        }
        End::Expired(text) => {
            close(CloseCode::Expired, &text);
            DownReason::Expired(text)
        }
        End::Disowned(text) => {
            close(CloseCode::Refused, &text);
            shared.note_refusal(current.0.remote_address(), &text);
            DownReason::Refused(text)
        }
        End::Unreachable => {
            close(CloseCode::Closed, "your port was unreachable");
            DownReason::PortUnreachable
        }
        End::Gone(ending) => {
            close(CloseCode::Closed, "the connection before this one was lost");
            if let Ending::RefusedHere(text) | Ending::RefusedThere(text) = &ending {
                shared.note_refusal(current.0.remote_address(), text);
            }
            ending.down_reason(peer)
        }
    };
    shared.link_down(peer, generation, reason);
}

impl Running<'_> {
    async fn read_frames(&self, mut connection: Connection, mut recv: RecvStream) -> End {
        let Self { shared, peer, generation, .. } = *self;
        let purpose = shared.hello.purpose;
        let mut before = None;
        loop {
            let frame = match read_frame(&mut recv, |header| hello::check_kind(header, purpose)).await {
                Ok(frame) => frame,
                Err(ReadStop::Finished) => match self.handover.recv_half() {
                    Some(next) => {
                        (before, recv) = (Some(std::mem::replace(&mut connection, next.0)), next.1);
                        continue;
                    }
                    None => return ReadStop::Finished.into_end(&connection).await,
                },
                // The peer's old stream did not end because it goes on in the new one, but because the peer ends the link.
                Err(ReadStop::Lost(error)) if closing::was_unused(&error) && before.is_some() => {
                    let old = before.expect("the guard has looked");
                    return ReadStop::Finished.into_end(&old).await;
                }
                Err(stop) => return stop.into_end(&connection).await,
            };
            if let Err(text) = hello::check_lane(&frame, purpose) {
                return End::Violation(text);
            }
            if frame.header.kind == FrameKind::Renew {
                if !self.dialled {
                    return End::Violation("only the side that was dialled asks for a replacement".to_owned());
                }
                self.asked.notify_one();
                continue;
            }
            shared.counters.add(&shared.counters.frames_received, 1);
            shared.counters.add(&shared.counters.opened_bytes, frame.wire_bytes() as u64);
            // Closed here meanwhile: what still comes is read and dropped, so that the peer's last acknowledgements flow.
            shared.deliver(peer, generation, frame).await;
        }
    }

    async fn write_frames(&self, outbox: &Outbox, mut send: SendStream) -> End {
        let shared = self.shared;
        // What was sent last in the old stream may be on its way for a while.
        let mut before: Option<SendStream> = None;
        loop {
            let next = tokio::select! {
                biased;
                fresh = self.handover.send_half() => {
                    let mut old = std::mem::replace(&mut send, fresh);
                    // Fails when the connection is gone, which the reader finds out with its reason.
                    let _ = old.finish();
                    before = Some(old);
                    continue;
                }
                next = outbox.next() => next,
            };
            let mut batch = match next {
                Next::Write(batch) => batch,
                Next::Close(reason) => {
                    flush(before.as_mut(), &mut send).await;
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
            shared.sent(self.peer, self.generation, batch.chunks);
        }
    }

    /// Ends a link whose time is over or whose peer is gone, and replaces its connection when there are fresh certificates.
    async fn watch(&self, outbox: &Outbox, current: &mut (Connection, Proof)) -> End {
        let shared = self.shared;
        let mut identities = shared.identities();
        let mut disowned: Option<(Instant, String)> = None;
        loop {
            let identity = identities.borrow_and_update().clone();
            if !self.dialled && !Arc::ptr_eq(&identity, &current.1.own) {
                outbox.ask_for_replacement();
            }
            disowned = match current.1.is_accepted_by(&identity) {
                Ok(()) => None,
                // An expired one is ended below, with its own words.
                Err(error) => disowned.or_else(|| {
                    tracing::warn!(peer = %self.peer, %error, "the peer's certificate is not accepted any more");
                    Some((Instant::now() + shared.options.disowned_grace, error.to_string()))
                }),
            };
            let (connection, proof) = (&current.0, &current.1);
            let may_dial = self.dialled && self.handover.is_idle();
            let moved = tokio::select! {
                end = wait_for_expiry(proof.not_after()) => return end,
                end = watch_process(connection, shared.hello.purpose) => return end,
                end = wait_for_disowned(&disowned) => return end,
                changed = identities.changed() => {
                    changed.expect("the port outlives its links");
                    continue;
                }
                moved = self.handover.moved() => moved,
                next = replace::next_connection(shared, self.peer, connection, proof, &self.asked), if may_dial => {
                    self.handover.begin(next);
                    continue;
                }
            };
            let (old, proof) = std::mem::replace(current, moved);
            shared.note_replaced(self.peer, self.generation, &current.0, &current.1);
            if self.dialled {
                closing::close(&old, CloseCode::Replaced, "both directions have gone over to another connection");
            } else {
                tokio::spawn(linger(old, proof, self.handover.lingering()));
            }
        }
    }
}

/// Keeps the acceptor's old connection until the dialler, who reads its last bytes, closes it.
async fn linger(connection: Connection, proof: Proof, counted: Arc<()>) {
    tokio::select! {
        _ = connection.closed() => {}
        _ = wait_for_expiry(proof.not_after()) => {}
        () = tokio::time::sleep(LINGER_MAX) => {}
    }
    closing::close(&connection, CloseCode::Replaced, "another connection has taken this one's place");
    drop(counted);
}

async fn wait_for_disowned(disowned: &Option<(Instant, String)>) -> End {
    match disowned {
        Some((at, reason)) => {
            tokio::time::sleep_until(*at).await;
            End::Disowned(format!(
                "the peer shows no other certificate than one that is not accepted any more: {reason}"
            ))
        }
        None => std::future::pending().await,
    }
}

/// Waits until the peer has acknowledged everything, within a bound.
async fn flush(before: Option<&mut SendStream>, send: &mut SendStream) {
    let acknowledged = async {
        if let Some(before) = before {
            let _ = before.stopped().await;
        }
        if send.finish().is_ok() {
            let _ = send.stopped().await;
        }
    };
    // A peer that does not acknowledge in time is not waited for: the close frame follows anyway.
    let _ = tokio::time::timeout(FLUSH_TIMEOUT, acknowledged).await;
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

/// How long a close waits for acknowledgements of what was sent before it.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);
/// How often the wall clock is looked at while a certificate is valid.
const CLOCK_LOOK: Duration = Duration::from_secs(60);
/// How long a replaced connection waits for the dialler to read its last bytes.
const LINGER_MAX: Duration = Duration::from_secs(60);
const FIRST_FRAME_BYTES_MAX: u32 = 8 << 10;
