//! The [`Port`] trait that every transport implements, and the events that it delivers.
//!
//! A *port* is one sidecar's endpoint for either the control plane or one data lane. It owns its sockets and its links
//! to any number of peers. Its owner calls [`open`](Port::open) when a plan first needs a link, sends messages, and
//! polls for events. A port never blocks its owner and never stops reading. Messages of one link are delivered in the
//! order in which they were sent.

use std::future::poll_fn;
use std::task::{Context, Poll};

use ronde_wire::control::Hello;
use ronde_wire::frame::Chunk;
use ronde_wire::{Frame, SidecarIndex};

/// One sidecar's endpoint for the control plane or for one lane.
pub trait Port: Send {
    /// Opens a link to a peer. Does nothing when a link is up or being opened, or when its `Down` event has not been
    /// polled yet. Either `Up` or `Down` follows; a peer that does not connect within the port's start timeout is
    /// reported as `Down`. A peer that dials is accepted and reported as `Up` even if this side has not called `open`.
    fn open(&mut self, peer: SidecarIndex, role: Role);

    /// Queues a message for a peer. Messages queued before the link is up are sent once it is; messages still queued
    /// when it goes down are dropped.
    ///
    /// # Errors
    /// [`SendError`] if the link was not opened or the peer's queue is full.
    fn send(&mut self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError>;

    /// Polls for the next event. Events of one link arrive in order.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<PortEvent>;

    /// Closes the link to one peer after its queue is sent, and sends `reason` to the peer. The owner receives no
    /// further events of this link, not even `Down`: events that were received but not polled are dropped.
    fn close(&mut self, peer: SidecarIndex, reason: &str);

    /// Counters of this port since it was created.
    fn stats(&self) -> PortStats;
}

/// Waits for a port's next event. This function is cancel safe.
pub async fn next_event(port: &mut dyn Port) -> PortEvent {
    poll_fn(|cx| port.poll_event(cx)).await
}

/// Which side dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// This side dials, and retries with exponential backoff until the start timeout.
    Dial,
    /// This side waits for the peer to dial.
    Await,
}

/// A message to send. A chunk's data stays in the private buffer that holds it; sending does not copy it.
#[derive(Clone, Debug)]
pub enum Outgoing {
    /// A complete frame.
    Frame(Frame),
    /// A chunk.
    Chunk(Chunk),
}

/// An event on a port.
#[derive(Debug)]
pub enum PortEvent {
    /// The link is open: both hellos were exchanged and accepted.
    Up {
        /// The authenticated peer.
        peer: SidecarIndex,
        /// The peer's hello.
        hello: Box<Hello>,
    },
    /// A frame arrived that is neither a hello nor a refusal.
    Frame {
        /// The authenticated sender.
        from: SidecarIndex,
        /// The frame. Its payload is private memory.
        frame: Frame,
    },
    /// The connection has accepted chunks that were queued for this peer. Every chunk is counted exactly once, in
    /// sending order, while its link is up. The executor bounds its send windows, and therefore its private memory, by
    /// this event.
    Sent {
        /// The peer.
        peer: SidecarIndex,
        /// Number of chunks since the last such event.
        chunks: u32,
    },
    /// The connection has accepted frames about streams that were queued for this peer.
    StreamSent {
        /// The peer.
        peer: SidecarIndex,
        /// Their bytes, headers included, since the last such event.
        bytes: usize,
    },
    /// The link closed or could not be opened. No event of this peer follows until its next `Up`.
    Down {
        /// The peer.
        peer: SidecarIndex,
        /// The reason.
        reason: DownReason,
    },
}

/// Why a link is down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownReason {
    /// The peer closed it.
    #[error("closed by the peer: {0}")]
    ClosedByPeer(String),
    /// The peer's host reports that no socket is bound to the peer's port any more.
    #[error("its process is gone (port unreachable)")]
    PortUnreachable,
    /// The network lost the connection, or the connection could not be made.
    #[error("connection lost: {0}")]
    Lost(String),
    /// The peer was dialled in vain for the start timeout.
    #[error("{0}")]
    Unanswered(String),
    /// One side rejected the other's identity or hello.
    #[error("refused: {0}")]
    Refused(String),
    /// The peer violated the protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A certificate of this link has expired.
    #[error("certificate expired: {0}")]
    Expired(String),
}

/// Why a message was not queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// [`Port::open`] was not called for the peer, or the link is down.
    #[error("there is no link to {0}")]
    NoLink(SidecarIndex),
    /// The queue to the peer is full: the sender does not honour its send window.
    #[error("the queue to {peer} holds {queued_bytes} bytes; the limit is {limit_bytes}")]
    Full {
        /// The peer.
        peer: SidecarIndex,
        /// Bytes in the queue.
        queued_bytes: usize,
        /// The queue's limit in bytes.
        limit_bytes: usize,
    },
}

/// Counters of a port since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Bytes of frames handed to the encryption layer.
    pub sealed_bytes: u64,
    /// Bytes of frames that the encryption layer decrypted.
    pub opened_bytes: u64,
    /// Frames sent.
    pub frames_sent: u64,
    /// Frames received.
    pub frames_received: u64,
    /// Links that reached `Up`.
    pub links_opened: u64,
    /// Connections that replaced an earlier connection of their link after a certificate was renewed.
    pub links_replaced: u64,
    /// Connections or hellos that one of the two sides rejected.
    pub refusals: u64,
}
