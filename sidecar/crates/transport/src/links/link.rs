//! A link while it is up: its reader, its writer, and the task that watches certificates and the peer's process.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use ronde_wire::control::{self, Hello, Purpose};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{Epoch, Frame, FrameHeader, FrameKind, Seq, SidecarIndex};
use rustls_pki_types::UnixTime;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::auth::LinkAuth;
use super::close::{CloseCode, CloseReason};
use super::connection::{Connection, ConnectionLost, ReadStop, RecvHalf, SendHalf, ShortRead};
use super::handover::Handover;
use super::outbox::{Outbox, OutboxItem};
use super::replace;
use super::state::{ActiveLink, Shared};
use crate::hello;
use crate::port::DownReason;

/// An authenticated connection with the two halves of its one stream.
pub(super) struct LinkStream {
    pub(super) connection: Connection,
    pub(super) send: SendHalf,
    pub(super) recv: RecvHalf,
    pub(super) peer: SidecarIndex,
    pub(super) auth: LinkAuth,
}

/// Why a link ends.
enum LinkEnd {
    /// The owner closed it; everything queued was sent.
    Closed(String),
    /// The peer violated the protocol.
    Violation(String),
    Expired(String),
    /// No accepted authority signed the peer's certificate any more.
    Untrusted(String),
    Unreachable,
    Gone(CloseReason),
}

/// What the reader, writer and watcher of one link share.
struct RunningLink<'a> {
    shared: &'a Arc<Shared>,
    peer: SidecarIndex,
    generation: u64,
    dialled: bool,
    handover: &'a Handover,
    /// Notified when the acceptor asks the dialler to replace the connection.
    replacement_requested: Notify,
}

/// Runs a link until it ends, then reports `Down` with the reason to the owner.
pub(super) async fn run(shared: Arc<Shared>, stream: LinkStream, installed: ActiveLink) {
    let LinkStream { connection, send, recv, peer, auth } = stream;
    let ActiveLink { generation, outbox, handover, dialled } = installed;
    let running = RunningLink {
        shared: &shared,
        peer,
        generation,
        dialled,
        handover: &handover,
        replacement_requested: Notify::new(),
    };
    let mut current = (connection.clone(), auth);
    let mut reader = pin!(running.read_frames(connection, recv));
    let mut writer = pin!(running.write_frames(&outbox, send));
    let end = tokio::select! {
        end = &mut reader => end,
        end = &mut writer => end,
        end = running.watch(&outbox, &mut current) => end,
    };
    let close = |code, reason: &str| {
        current.0.close(code, reason);
        handover.close(code, reason);
    };
    let reason = match end {
        LinkEnd::Closed(reason) => {
            close(CloseCode::Closed, &reason);
            return;
        }
        LinkEnd::Violation(text) => {
            close(CloseCode::Protocol, &text);
            DownReason::Protocol(text)
        }
        LinkEnd::Expired(text) => {
            close(CloseCode::Expired, &text);
            DownReason::Expired(text)
        }
        LinkEnd::Untrusted(text) => {
            close(CloseCode::Refused, &text);
            shared.record_refusal(current.0.remote_address(), &text);
            DownReason::Refused(text)
        }
        LinkEnd::Unreachable => {
            close(CloseCode::Closed, "the peer's port was unreachable");
            DownReason::PortUnreachable
        }
        LinkEnd::Gone(reason) => {
            close(CloseCode::Closed, "the link's earlier connection was lost");
            if let Some(text) = reason.refusal() {
                shared.record_refusal(current.0.remote_address(), text);
            }
            reason.down_reason(peer)
        }
    };
    shared.report_down(peer, generation, reason);
}

impl RunningLink<'_> {
    async fn read_frames(&self, mut connection: Connection, mut recv: RecvHalf) -> LinkEnd {
        let Self { shared, peer, generation, .. } = *self;
        let purpose = shared.hello.purpose;
        let mut previous = None;
        loop {
            let frame = match read_frame(&mut recv, |header| hello::check_kind(header, purpose)).await {
                Ok(frame) => {
                    // The peer uses the new connection, so the old one is not needed any more.
                    previous = None;
                    frame
                }
                Err(ReadStop::Finished) => match self.handover.recv_half() {
                    Some(next) => {
                        (previous, recv) = (Some(std::mem::replace(&mut connection, next.0)), next.1);
                        continue;
                    }
                    None => return into_link_end(ReadStop::Finished, &connection).await,
                },
                // The peer closed the link while it was being moved: the old stream's end was not the switch to the new
                // connection.
                Err(ReadStop::Lost(CloseReason::Unused(_))) if previous.is_some() => {
                    let old = previous.expect("the guard checks it");
                    return into_link_end(ReadStop::Finished, &old).await;
                }
                Err(stop) => return into_link_end(stop, &connection).await,
            };
            if let Err(text) = hello::check_lane(&frame, purpose) {
                return LinkEnd::Violation(text);
            }
            if frame.header.kind == FrameKind::Renew {
                if !self.dialled {
                    return LinkEnd::Violation("only the side that was dialled may ask for a replacement".to_owned());
                }
                self.replacement_requested.notify_one();
                continue;
            }
            shared.counters.add(&shared.counters.frames_received, 1);
            shared.counters.add(&shared.counters.opened_bytes, frame.wire_bytes() as u64);
            // If the owner has closed the link, frames are read and dropped so that the peer's acknowledgements still
            // arrive.
            shared.deliver(peer, generation, frame).await;
        }
    }

    async fn write_frames(&self, outbox: &Outbox, mut send: SendHalf) -> LinkEnd {
        let shared = self.shared;
        // The half of the old connection, whose last bytes may still be in flight.
        let mut previous: Option<SendHalf> = None;
        loop {
            let next = tokio::select! {
                biased;
                fresh = self.handover.send_half() => {
                    let mut old = std::mem::replace(&mut send, fresh);
                    old.finish();
                    previous = Some(old);
                    continue;
                }
                () = wait_finished(&mut previous) => {
                    previous = None;
                    continue;
                }
                next = outbox.next() => next,
            };
            let batch = match next {
                OutboxItem::Write(batch) => batch,
                OutboxItem::Close(reason) => {
                    flush(previous.as_mut(), &mut send).await;
                    return LinkEnd::Closed(reason);
                }
            };
            shared.counters.add(&shared.counters.frames_sent, batch.frames);
            shared.counters.add(&shared.counters.sealed_bytes, batch.bytes as u64);
            if send.write(batch.buffers).await.is_err() {
                // The reader reports the reason, after the frames that have arrived.
                return std::future::pending().await;
            }
            outbox.written(batch.bytes);
            shared.report_sent(self.peer, self.generation, batch.chunks);
            shared.report_stream_sent(self.peer, self.generation, batch.stream_bytes);
        }
    }

    /// Ends the link when a certificate expires, the peer's authority is removed or its process has exited, and
    /// replaces the connection when a certificate was renewed.
    async fn watch(&self, outbox: &Outbox, current: &mut (Connection, LinkAuth)) -> LinkEnd {
        let shared = self.shared;
        let mut identities = shared.subscribe_identity();
        let mut untrusted: Option<(Instant, String)> = None;
        loop {
            let identity = identities.borrow_and_update().clone();
            if !self.dialled && !Arc::ptr_eq(&identity, &current.1.own) {
                outbox.request_replacement();
            }
            untrusted = match current.1.is_accepted_by(&identity) {
                Ok(()) => None,
                // An expired certificate is reported by `wait_for_expiry` below.
                Err(error) => untrusted.or_else(|| {
                    tracing::warn!(peer = %self.peer, %error, "the peer's certificate is not accepted any more");
                    Some((Instant::now() + shared.options.untrusted_grace, error.to_string()))
                }),
            };
            let (connection, auth) = (&current.0, &current.1);
            let may_dial = self.dialled && self.handover.is_idle();
            let completed = tokio::select! {
                end = wait_for_expiry(auth.not_after()) => return end,
                end = watch_process(connection, shared.hello.purpose) => return end,
                end = wait_for_untrusted(&untrusted) => return end,
                changed = identities.changed() => {
                    changed.expect("the port outlives its links");
                    continue;
                }
                completed = self.handover.completed() => completed,
                next = replace::next_connection(shared, self.peer, connection, auth, &self.replacement_requested), if may_dial => {
                    self.handover.begin(next);
                    continue;
                }
            };
            let (old, auth) = std::mem::replace(current, completed);
            shared.record_replaced(self.peer, self.generation, &current.0, &current.1);
            if self.dialled {
                old.close(CloseCode::Replaced, "both directions have moved to another connection");
            } else {
                tokio::spawn(linger(old, auth, self.handover.lingering()));
            }
        }
    }
}

/// Keeps the acceptor's old connection open until the dialler has read its last bytes and closes it.
async fn linger(connection: Connection, auth: LinkAuth, counted: Arc<()>) {
    tokio::select! {
        _ = connection.closed() => {}
        _ = wait_for_expiry(auth.not_after()) => {}
        () = tokio::time::sleep(LINGER_MAX) => {}
    }
    connection.close(CloseCode::Replaced, "another connection has replaced this one");
    drop(counted);
}

async fn wait_for_untrusted(untrusted: &Option<(Instant, String)>) -> LinkEnd {
    match untrusted {
        Some((at, reason)) => {
            tokio::time::sleep_until(*at).await;
            LinkEnd::Untrusted(format!(
                "the peer has presented no other certificate than one that is not accepted any more: {reason}"
            ))
        }
        None => std::future::pending().await,
    }
}

/// Waits until the peer has received everything that the half of the old connection has sent.
async fn wait_finished(previous: &mut Option<SendHalf>) {
    match previous {
        Some(previous) => previous.wait_finished().await,
        None => std::future::pending().await,
    }
}

/// Waits until the peer has acknowledged everything, for at most [`FLUSH_TIMEOUT`].
async fn flush(previous: Option<&mut SendHalf>, send: &mut SendHalf) {
    let acknowledged = async {
        if let Some(previous) = previous {
            previous.wait_finished().await;
        }
        send.flush().await;
    };
    // If the peer does not acknowledge in time, the close frame is sent anyway.
    let _ = tokio::time::timeout(FLUSH_TIMEOUT, acknowledged).await;
}

/// Waits until a certificate has expired by the wall clock. It polls the clock, because the clock may be set.
async fn wait_for_expiry(not_after: UnixTime) -> LinkEnd {
    let not_after = Duration::from_secs(not_after.as_secs());
    loop {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let Some(left) = not_after.checked_sub(now).filter(|left| !left.is_zero()) else {
            return LinkEnd::Expired(format!(
                "a certificate of this link was valid until {} (UNIX)",
                not_after.as_secs()
            ));
        };
        tokio::time::sleep(left.min(CLOCK_POLL)).await;
    }
}

/// Waits until the peer's process has exited. Only control links check this.
async fn watch_process(connection: &Connection, purpose: Purpose) -> LinkEnd {
    if purpose == Purpose::Control {
        connection.wait_unreachable().await;
        return LinkEnd::Unreachable;
    }
    std::future::pending().await
}

/// Converts the reason why reading stopped into the reason why the link ends.
async fn into_link_end(stop: ReadStop, connection: &Connection) -> LinkEnd {
    match stop {
        ReadStop::Violation(text) => LinkEnd::Violation(text),
        ReadStop::Lost(reason) => LinkEnd::Gone(reason),
        // The peer's close frame follows.
        ReadStop::Finished => match tokio::time::timeout(FLUSH_TIMEOUT, connection.closed()).await {
            Ok(reason) => LinkEnd::Gone(reason),
            Err(_) => LinkEnd::Violation("the stream ended, but the connection did not".to_owned()),
        },
    }
}

/// Reads one frame with one copy. `admit` checks the header before the payload is allocated.
pub(super) async fn read_frame(
    recv: &mut RecvHalf,
    admit: impl Fn(&FrameHeader) -> Result<(), String>,
) -> Result<Frame, ReadStop> {
    let mut header = [0; HEADER_BYTES];
    recv.read_exact(&mut header).await.map_err(|short| match short {
        ShortRead::Finished(0) => ReadStop::Finished,
        ShortRead::Finished(got) => ReadStop::Violation(format!("the stream ended within a header, after {got} bytes")),
        ShortRead::Ended(stop) => stop,
    })?;
    let header = FrameHeader::decode(&header).map_err(|error| ReadStop::Violation(error.to_string()))?;
    if let Some(stop) = recv.read_close(&header).await {
        return Err(stop);
    }
    admit(&header).map_err(ReadStop::Violation)?;
    let length = header.length as usize;
    let payload = recv.read(length).await.map_err(|short| match short {
        ShortRead::Finished(got) => {
            ReadStop::Violation(format!("the stream ended within a frame, after {got} of {length} bytes"))
        }
        ShortRead::Ended(stop) => stop,
    })?;
    Ok(Frame { header, payload })
}

/// Writes the first frame of a connection: a hello or a refusal.
pub(super) async fn write_first(send: &mut SendHalf, kind: FrameKind, payload: Bytes) -> Result<(), ConnectionLost> {
    let frame = Frame::new(kind, Epoch(0), Seq(0), payload);
    send.write(vec![Bytes::copy_from_slice(&frame.header.encode()), frame.payload]).await
}

/// Writes this side's hello as the first frame.
pub(super) async fn write_hello(send: &mut SendHalf, hello: &Hello) -> Result<(), ConnectionLost> {
    write_first(send, FrameKind::Hello, control::encode(hello)).await
}

/// Checks that the first frame is a small hello or refusal, before the peer is known.
pub(super) fn check_first_header(header: &FrameHeader) -> Result<(), String> {
    if !matches!(header.kind, FrameKind::Hello | FrameKind::Refusal) {
        return Err(format!("the first frame is {:?}, not a hello", header.kind));
    }
    if header.length > FIRST_FRAME_BYTES_MAX {
        return Err(format!("a first frame has at most {FIRST_FRAME_BYTES_MAX} bytes, not {}", header.length));
    }
    Ok(())
}

/// Limit for the wait for acknowledgements before a close.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);
/// How often the wall clock is polled while a certificate is valid.
const CLOCK_POLL: Duration = Duration::from_secs(60);
/// Limit for the wait until the dialler has read the last bytes of a replaced connection.
const LINGER_MAX: Duration = Duration::from_secs(60);
const FIRST_FRAME_BYTES_MAX: u32 = 8 << 10;
