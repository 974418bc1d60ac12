//! Congestion control of TCP connections.

use std::fmt;
use std::io;
use std::str::FromStr;

use socket2::SockRef;

/// The congestion control algorithm of a port's connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// The host's default, or CUBIC (RFC 9438) if that default is BBR. BBR paces by timers, which on the short round
    /// trips within a cluster costs 20 to 33 % of the processor time for each byte and gains nothing.
    #[default]
    Auto,
    /// The host's default.
    System,
    /// The algorithm with this name.
    Named(String),
}

/// A text that names no congestion control.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is neither auto nor system nor the name of a congestion control, of up to {NAME_BYTES_MAX} letters, digits, - and _"
)]
pub struct ParseCongestionError(String);

impl Congestion {
    /// Sets the algorithm of a socket. Accepted connections inherit the listener's.
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
                    tracing::debug!(%error, "the host's default congestion control is kept");
                }
                Ok(())
            }
        }
    }
}

/// The algorithm to use instead of the host's default. The kernel pads its name with zeros.
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

/// The kernel's limit for a name, without the terminating zero.
const NAME_BYTES_MAX: usize = 15;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// The algorithm of a socket after `asked` was applied.
    fn applied(host: &str, asked: &Congestion) -> io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        SockRef::from(&listener).set_tcp_congestion(host.as_bytes())?;
        asked.apply(&SockRef::from(&listener))?;
        let name = SockRef::from(&listener).tcp_congestion()?;
        Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
    }

    #[test]
    fn the_hosts_stays_unless_something_else_is_asked_for() {
        // Every kernel has Reno, and every process may use it.
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
        // Both must be available on this host and allowed for this process.
        let chosen = ["bbr", "cubic"].map(|name| applied(name, &Congestion::Auto));
        assert!(chosen.iter().flatten().all(|name| name == "cubic") || chosen.iter().any(Result::is_err), "{chosen:?}");
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
