//! How TCP keeps from sending more than the way takes.

use std::fmt;
use std::io;
use std::str::FromStr;

use socket2::SockRef;

/// Which congestion control the connections of a port have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// The host's, but CUBIC (RFC 9438) where that is BBR: BBR paces what is sent by timers, which on the short ways within a
    /// cluster costs a fifth to a third of the processor time of a byte and gains nothing.
    #[default]
    Auto,
    /// The host's, whatever it is.
    System,
    /// One that the host knows by this name.
    Named(String),
}

/// What is no congestion control's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is neither auto nor system nor the name of a congestion control, of up to {NAME_BYTES_MAX} letters, digits, - and _"
)]
pub struct ParseCongestionError(String);

impl Congestion {
    /// Sets it for a socket. Connections that a listener accepts have the listener's.
    pub(super) fn apply(&self, socket: &SockRef<'_>) -> io::Result<()> {
        match self {
            Self::System => Ok(()),
            Self::Named(name) => socket.set_tcp_congestion(name.as_bytes()).map_err(|error| {
                let words = "is not a congestion control that this process may use on this host";
                let list = "net.ipv4.tcp_allowed_congestion_control lists those";
                io::Error::new(error.kind(), format!("{name} {words} ({error}); {list}"))
            }),
            Self::Auto => {
                let own = socket.tcp_congestion().unwrap_or_default();
                if let Some(other) = replacement_for(&own)
                    && let Err(error) = socket.set_tcp_congestion(other)
                {
                    tracing::debug!(%error, "the host's congestion control stays");
                }
                Ok(())
            }
        }
    }
}

/// What is taken instead of the host's own, whose name may have zeros behind it.
fn replacement_for(own: &[u8]) -> Option<&'static [u8]> {
    (own.split(|byte| *byte == 0).next() == Some(b"bbr")).then_some(b"cubic")
}

impl FromStr for Congestion {
    type Err = ParseCongestionError;

    fn from_str(text: &str) -> Result<Self, ParseCongestionError> {
        let is_letter = |letter: u8| letter.is_ascii_alphanumeric() || matches!(letter, b'-' | b'_');
        match text {
            "auto" => Ok(Self::Auto),
            "system" => Ok(Self::System),
            name if (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_letter) => {
                Ok(Self::Named(name.to_owned()))
            }
            other => Err(ParseCongestionError(other.to_owned())),
        }
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::System => "system",
            Self::Named(name) => name,
        })
    }
}

/// The kernel's bound, without the zero behind a name.
const NAME_BYTES_MAX: usize = 15;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What a socket has when it was asked for something.
    fn applied(host: &str, asked: &Congestion) -> io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        SockRef::from(&listener).set_tcp_congestion(host.as_bytes())?;
        asked.apply(&SockRef::from(&listener))?;
        let name = SockRef::from(&listener).tcp_congestion()?;
        Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
    }

    #[test]
    fn the_hosts_stays_unless_something_else_is_asked_for() {
        // Reno is everywhere, and everybody may use it.
        for asked in [Congestion::Auto, Congestion::System, Congestion::Named("reno".to_owned())] {
            assert_eq!(applied("reno", &asked).expect("every host has it"), "reno");
        }
        let unknown = applied("reno", &Congestion::Named("nosuch".to_owned())).expect_err("no host has it");
        assert!(unknown.to_string().contains("nosuch is not a congestion control"), "{unknown}");
    }

    #[test]
    fn bbr_is_replaced_by_cubic() {
        assert_eq!(replacement_for(b"bbr"), Some(&b"cubic"[..]));
        assert_eq!(replacement_for(b"bbr\0\0\0"), Some(&b"cubic"[..]));
        for own in [&b"cubic"[..], b"reno\0", b"dctcp", b"bbrx", b""] {
            assert_eq!(replacement_for(own), None);
        }
        // Where this host has both, and this process may use them.
        let ways = ["bbr", "cubic"].map(|name| applied(name, &Congestion::Auto));
        assert!(ways.iter().flatten().all(|name| name == "cubic") || ways.iter().any(Result::is_err), "{ways:?}");
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["auto", "system", "dctcp", "reno", "bbr3-x_y"] {
            assert_eq!(name.parse::<Congestion>().expect("a name").to_string(), name);
        }
        for bad in ["", "two words", "sixteen-letters-", "ä", "a\0"] {
            assert!(bad.parse::<Congestion>().is_err(), "{bad:?}");
        }
    }
}
