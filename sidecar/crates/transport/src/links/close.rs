//! Close codes of connections, and what a close means to the other side.

use ronde_wire::SidecarIndex;

use super::connection::Connection;
use crate::port::DownReason;

/// The code in a close frame. The reason beside it is text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CloseCode {
    /// The owner closed the link, or the port.
    Closed = 1,
    /// The hello or identity is not acceptable; a retry is pointless.
    Refused = 2,
    /// The peer violated the protocol.
    Protocol = 3,
    /// A certificate of the link has expired.
    Expired = 4,
    /// Both sides dialled; the connection of the lower index is kept.
    Duplicate = 5,
    /// The peer connected again, or both directions have moved to another connection.
    Replaced = 6,
    /// A replacement connection turned out to be unnecessary.
    Unused = 7,
}

impl CloseCode {
    /// The close code with this number.
    pub(crate) fn of(number: u32) -> Option<Self> {
        [Self::Closed, Self::Refused, Self::Protocol, Self::Expired, Self::Duplicate, Self::Replaced, Self::Unused]
            .into_iter()
            .find(|code| *code as u32 == number)
    }
}

/// Closes a connection as unused when dropped, unless it is kept.
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
            connection.close(CloseCode::Unused, "this replacement was not needed");
        }
    }
}

/// Why a connection is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// This side rejected the peer.
    RefusedLocally(String),
    /// The peer rejected this side.
    RefusedByPeer(String),
    /// The peer closed a connection that was not used.
    Unused(String),
    /// Any other reason.
    Other(DownReason),
}

impl CloseReason {
    /// Interprets the peer's close code.
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

    /// The refusal's text, if one side rejected the other.
    pub(crate) fn refusal(&self) -> Option<&str> {
        match self {
            Self::RefusedLocally(text) | Self::RefusedByPeer(text) => Some(text),
            Self::Unused(_) | Self::Other(_) => None,
        }
    }

    /// The reason as reported to the port's owner.
    pub(crate) fn down_reason(self, peer: SidecarIndex) -> DownReason {
        match self {
            Self::RefusedLocally(text) => DownReason::Refused(format!("{peer} is not accepted here: {text}")),
            Self::RefusedByPeer(text) => DownReason::Refused(format!("{peer} does not accept this side: {text}")),
            Self::Unused(reason) => DownReason::Lost(reason),
            Self::Other(reason) => reason,
        }
    }
}
