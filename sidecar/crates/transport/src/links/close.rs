//! Why connections end: the codes that ronde closes with, and what the other side makes of them.

use ronde_wire::SidecarIndex;

use super::connection::Connection;
use crate::port::DownReason;

/// The code of a close frame; its reason is a text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CloseCode {
    /// The owner closed the link, or the port.
    Closed = 1,
    /// The hello or identity is not acceptable; dialling again does not help.
    Refused = 2,
    /// What came is not the protocol.
    Protocol = 3,
    /// A certificate of the link has expired.
    Expired = 4,
    /// Both sides dial; the lower index's connection is kept.
    Duplicate = 5,
    /// The same peer has connected anew, or both sides have gone over to another connection.
    Replaced = 6,
    /// A connection that should have taken the place of another was not needed after all.
    Unused = 7,
}

impl CloseCode {
    /// The code with a number that a peer has sent.
    pub(crate) fn of(number: u32) -> Option<Self> {
        [Self::Closed, Self::Refused, Self::Protocol, Self::Expired, Self::Duplicate, Self::Replaced, Self::Unused]
            .into_iter()
            .find(|code| *code as u32 == number)
    }
}

/// A connection that is closed as unused unless it is kept.
pub(super) struct CloseIfUnused(Option<Connection>);

impl CloseIfUnused {
    pub(super) fn new(connection: Connection) -> Self {
        Self(Some(connection))
    }

    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseIfUnused {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.close(CloseCode::Unused, "the connection was not needed");
        }
    }
}

/// What the end of a connection means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// This side does not accept the peer.
    RefusedLocally(String),
    /// The peer does not accept this side.
    RefusedByPeer(String),
    /// The peer has closed a connection without having used it.
    Unused(String),
    /// Anything else.
    Other(DownReason),
}

impl CloseReason {
    /// What a close of the peer means.
    pub(crate) fn of_code(code: Option<CloseCode>, reason: String) -> Self {
        match code {
            Some(CloseCode::Refused) => Self::RefusedByPeer(reason),
            Some(CloseCode::Expired) => Self::Other(DownReason::Expired(reason)),
            Some(CloseCode::Duplicate | CloseCode::Replaced) => Self::Other(DownReason::Lost(reason)),
            Some(CloseCode::Unused) => Self::Unused(reason),
            Some(CloseCode::Protocol) => Self::Other(DownReason::ClosedByPeer(format!("protocol violation: {reason}"))),
            Some(CloseCode::Closed) | None => Self::Other(DownReason::ClosedByPeer(reason)),
        }
    }

    /// The text, when one of the two sides does not accept the other.
    pub(crate) fn refusal(&self) -> Option<&str> {
        match self {
            Self::RefusedLocally(text) | Self::RefusedByPeer(text) => Some(text),
            Self::Unused(_) | Self::Other(_) => None,
        }
    }

    /// The reason as the owner of the port is told.
    pub(crate) fn down_reason(self, peer: SidecarIndex) -> DownReason {
        match self {
            Self::RefusedLocally(text) => DownReason::Refused(format!("{peer} is not accepted here: {text}")),
            Self::RefusedByPeer(text) => DownReason::Refused(format!("{peer} does not accept this side: {text}")),
            Self::Unused(reason) => DownReason::Lost(reason),
            Self::Other(reason) => reason,
        }
    }
}
