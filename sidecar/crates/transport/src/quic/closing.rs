//! Why connections end: the codes that ronde closes with, and what the other side makes of them.

use quinn::{Connection, ConnectionError, VarInt};
use ronde_wire::SidecarIndex;

use crate::port::DownReason;

/// The code of a close frame; its reason is a text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum CloseCode {
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
    fn of(number: VarInt) -> Option<Self> {
        [Self::Closed, Self::Refused, Self::Protocol, Self::Expired, Self::Duplicate, Self::Replaced, Self::Unused]
            .into_iter()
            .find(|code| VarInt::from_u32(*code as u32) == number)
    }
}

/// Closes a connection with a reason that the peer is told.
pub(super) fn close(connection: &Connection, code: CloseCode, reason: &str) {
    let end = reason.floor_char_boundary(REASON_BYTES_MAX);
    connection.close(VarInt::from_u32(code as u32), &reason.as_bytes()[..end]);
}

/// A connection that is closed as unused unless it is kept.
pub(super) struct Unused(Option<Connection>);

impl Unused {
    pub(super) fn new(connection: Connection) -> Self {
        Self(Some(connection))
    }

    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            close(connection, CloseCode::Unused, "the connection was not needed");
        }
    }
}

/// Whether the peer has closed a connection without having used it.
pub(super) fn was_unused(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::ApplicationClosed(close) if CloseCode::of(close.error_code) == Some(CloseCode::Unused))
}

/// What the end of a connection means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// This side does not accept the peer.
    RefusedHere(String),
    /// The peer does not accept this side.
    RefusedThere(String),
    /// Anything else.
    Other(DownReason),
}

impl Ending {
    pub(super) fn of(error: &ConnectionError) -> Self {
        match error {
            ConnectionError::TransportError(error) if is_tls_alert(error.code.into()) => {
                Self::RefusedHere(explained(&error.reason))
            }
            ConnectionError::TransportError(error) => Self::Other(DownReason::Protocol(error.to_string())),
            ConnectionError::ConnectionClosed(close) if is_tls_alert(close.error_code.into()) => {
                Self::RefusedThere(explained(&text(&close.reason)))
            }
            ConnectionError::ApplicationClosed(close) => {
                Self::of_code(CloseCode::of(close.error_code), text(&close.reason))
            }
            ConnectionError::TimedOut => Self::Other(DownReason::Lost("nothing was heard any more".to_owned())),
            ConnectionError::Reset => {
                Self::Other(DownReason::Lost("the peer does not know this connection".to_owned()))
            }
            other => Self::Other(DownReason::Lost(other.to_string())),
        }
    }

    fn of_code(code: Option<CloseCode>, reason: String) -> Self {
        match code {
            Some(CloseCode::Refused) => Self::RefusedThere(reason),
            Some(CloseCode::Expired) => Self::Other(DownReason::Expired(reason)),
            Some(CloseCode::Duplicate | CloseCode::Replaced | CloseCode::Unused) => {
                Self::Other(DownReason::Lost(reason))
            }
            Some(CloseCode::Protocol) => Self::Other(DownReason::ClosedByPeer(format!("protocol violation: {reason}"))),
            Some(CloseCode::Closed) | None => Self::Other(DownReason::ClosedByPeer(reason)),
        }
    }

    /// The reason as the owner of the port is told.
    pub(super) fn down_reason(self, peer: SidecarIndex) -> DownReason {
        match self {
            Self::RefusedHere(text) => DownReason::Refused(format!("{peer} is not accepted here: {text}")),
            Self::RefusedThere(text) => DownReason::Refused(format!("{peer} does not accept this side: {text}")),
            Self::Other(reason) => reason,
        }
    }
}

/// RFC 9001 section 4.8: errors of TLS are 0x100 and the alert.
fn is_tls_alert(code: u64) -> bool {
    (0x100..0x200).contains(&code)
}

fn text(reason: &[u8]) -> String {
    String::from_utf8_lossy(reason).into_owned()
}

/// The text of rustls without the words around ronde's own.
fn explained(reason: &str) -> String {
    match reason.strip_prefix("other error: ").unwrap_or(reason) {
        "peer sent no certificates" => "the peer shows no certificate; both sides of a link need one".to_owned(),
        reason => reason.to_owned(),
    }
}

/// A close frame is one packet, and packets begin at 1,200 bytes.
const REASON_BYTES_MAX: usize = 1_000;
