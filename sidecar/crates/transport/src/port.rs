//! The trait that every transport implements, and the events it delivers.
//!
//! A *port* is one sidecar's end of one channel kind: the control plane, or one lane. It owns its sockets and links to
//! any number of peers. Whoever owns a port asks it to [`open`](Port::open) a link when a plan first needs one, hands it
//! messages, and polls it for events. A port never blocks its owner and never stops reading: what arrives is delivered in
//! the order of each link.

use std::future::poll_fn;
use std::task::{Context, Poll};

use ronde_wire::control::Hello;
use ronde_wire::frame::Chunk;
use ronde_wire::{Frame, SidecarIndex};

/// One sidecar's end of the control plane or of one lane.
pub trait Port: Send {
    /// Asks for a link to a peer; does nothing when there is one or one is being made, or when its `Down` was not polled
    /// yet. `Up` or `Down` follows: a peer that does not come within the port's own start timeout is `Down`. A peer that
    /// dials is let in, and `Up`, also when this side has not asked for the link yet.
    fn open(&mut self, peer: SidecarIndex, role: Role);

    /// Queues a message for a peer. Messages given before the link is up are sent when it is; those queued when it goes
    /// down are dropped.
    ///
    /// # Errors
    /// [`SendError`] when no link to the peer was asked for, or its queue is full.
    fn send(&mut self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError>;

    /// The next event, in the order of each link.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<PortEvent>;

    /// Closes the link to one peer with a reason that the peer is told, behind what was queued for it. The owner hears
    /// nothing more of the link, no `Down` either: what had arrived and was not yet polled is dropped.
    fn close(&mut self, peer: SidecarIndex, reason: &str);

    /// What this port has sent and received so far.
    fn stats(&self) -> PortStats;
}

/// Waits for a port's next event; cancel safe.
pub async fn next_event(port: &mut dyn Port) -> PortEvent {
    poll_fn(|cx| port.poll_event(cx)).await
}

/// Which side makes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// This side dials, again with growing pauses until the start timeout.
    Dial,
    /// This side waits until the peer dials.
    Await,
}

/// What a port can be given to send. Chunks keep their data as they lie in private memory; nothing is copied for sending.
#[derive(Clone, Debug)]
pub enum Outgoing {
    /// A whole frame.
    Frame(Frame),
    /// A chunk.
    Chunk(Chunk),
}

/// What happens on a port.
#[derive(Debug)]
pub enum PortEvent {
    /// The link to the peer is open, both hellos are exchanged and checked.
    Up {
        /// The peer, authenticated.
        peer: SidecarIndex,
        /// What it said.
        hello: Box<Hello>,
    },
    /// A frame arrived, other than hello and refusal.
    Frame {
        /// The authenticated sender.
        from: SidecarIndex,
        /// The frame; its payload is private memory.
        frame: Frame,
    },
    /// Chunks given to [`Port::send`] for this peer have left the port's own queue: the encryption layer has taken them.
    /// Counted in the order of sending; every chunk that was queued is reported once while its link is up. The executor's
    /// windows, and with them private memory, are bounded by this.
    Sent {
        /// The peer.
        peer: SidecarIndex,
        /// How many chunks since the last such event.
        chunks: u32,
    },
    /// The link is gone, or did not come. Nothing more arrives from this peer until a new `Up`.
    Down {
        /// The peer.
        peer: SidecarIndex,
        /// Why.
        reason: DownReason,
    },
}

/// Why a link is gone. The text of each says what was seen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownReason {
    /// The peer closed it.
    #[error("closed by the peer: {0}")]
    ClosedByPeer(String),
    /// The operating system of the peer's host says that nobody listens there any more.
    #[error("its process is gone (port unreachable)")]
    PortUnreachable,
    /// The link was lost, or could not be made, for a reason of the network.
    #[error("connection lost: {0}")]
    Lost(String),
    /// One of the two sides does not accept the other's identity or hello.
    #[error("refused: {0}")]
    Refused(String),
    /// The peer sent something that is not the protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A certificate of this link has expired.
    #[error("certificate expired: {0}")]
    Expired(String),
}

/// A message that cannot be queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// [`Port::open`] was not called for the peer, or the link is down.
    #[error("there is no link to {0}")]
    NoLink(SidecarIndex),
    /// The queue to the peer has reached its bound; the sender does not respect its windows.
    #[error("the queue to {peer} holds {queued_bytes} bytes; the limit is {limit_bytes}")]
    Full {
        /// The peer.
        peer: SidecarIndex,
        /// Bytes waiting.
        queued_bytes: usize,
        /// The bound.
        limit_bytes: usize,
    },
}

/// Counters of a port since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Payload and frame bytes handed to the encryption layer.
    pub sealed_bytes: u64,
    /// Payload and frame bytes that came out of it.
    pub opened_bytes: u64,
    /// Frames sent.
    pub frames_sent: u64,
    /// Frames received.
    pub frames_received: u64,
    /// Links that reached `Up`.
    pub links_opened: u64,
    /// Connections that took the place of others, because a certificate had.
    pub links_replaced: u64,
    /// Connections or hellos that were refused.
    pub refusals: u64,
}
