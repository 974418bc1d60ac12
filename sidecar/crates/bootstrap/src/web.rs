//! Options about gRPC-Web, which `ronde run` and `ronde sidecar` share.

use std::net::SocketAddr;

use anyhow::ensure;
use clap::Args;
use serde::{Deserialize, Serialize};

/// The options about the listener for gRPC-Web.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebArgs {
    /// Also serve workers over gRPC-Web at this address, port 0 for a free one: those that have no Unix sockets, such as
    /// WebAssembly. On the loopback with their rank's token; elsewhere over mutual TLS, too. [default: nowhere]
    #[arg(long, value_name = "ADDRESS:PORT")]
    #[serde(rename = "listen")]
    web_listen: Option<SocketAddr>,
    /// Ask for mutual TLS on a loopback address, too: certificates of the job on both sides.
    #[arg(long)]
    #[serde(rename = "tls")]
    web_tls: bool,
    /// Let pages of this origin, scheme and host as browsers write them, call over gRPC-Web. May be given several times.
    #[arg(long = "web-origin", value_name = "ORIGIN")]
    #[serde(rename = "origins")]
    web_origins: Vec<String>,
}

impl WebArgs {
    /// Switches TLS on wherever the address is not of the loopback, and checks that the options go together.
    /// `issues_certificates` says whether clients can have certificates of this job: not where its authority ends when the
    /// job has begun.
    ///
    /// # Errors
    /// What does not go together.
    pub(crate) fn resolve(mut self, issues_certificates: bool) -> anyhow::Result<Self> {
        let Some(listen) = self.web_listen else {
            ensure!(
                !self.web_tls && self.web_origins.is_empty(),
                "--web-tls and --web-origin go with --web-listen ADDRESS:PORT"
            );
            return Ok(self);
        };
        self.web_tls |= !is_loopback(listen);
        ensure!(
            issues_certificates || !self.web_tls,
            "--web-listen {listen} needs certificates for clients, and nobody could issue them in this job; listen on a \
             loopback address without --web-tls, or start `ronde sidecar` with --certs"
        );
        self.settings()?;
        Ok(self)
    }

    /// Where gRPC-Web is served, if anywhere.
    ///
    /// # Errors
    /// When it would be in the clear beyond this host, or an origin is none.
    pub fn settings(&self) -> anyhow::Result<Option<WebSettings>> {
        let Self { web_listen, web_tls, web_origins } = self;
        let settings = |listen| WebSettings { listen, tls: *web_tls, origins: web_origins.clone() }.checked();
        web_listen.map(settings).transpose()
    }
}

/// Where gRPC-Web is answered, and to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebSettings {
    /// The address; port 0 for a free one.
    pub listen: SocketAddr,
    /// Whether both sides show certificates of the job; without it the address is of the loopback.
    pub tls: bool,
    /// The origins whose pages may call, as browsers write them; none by default.
    pub origins: Vec<String>,
}

impl WebSettings {
    /// Checks that connections from other hosts require TLS, and that origins are valid.
    ///
    /// # Errors
    /// What is wrong and what to do.
    fn checked(self) -> anyhow::Result<Self> {
        ensure!(
            self.tls || is_loopback(self.listen),
            "gRPC-Web at {} would be in the clear beyond this host; it needs TLS there (--web-tls), or an address of the loopback",
            self.listen
        );
        for origin in &self.origins {
            let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let is_one = host.is_some_and(|host| !host.is_empty() && host.bytes().all(is_of_host));
            ensure!(
                is_one,
                "{origin:?} is no origin; write it as browsers do, without a path: https://lab.example or http://localhost:8080"
            );
        }
        Ok(self)
    }
}

/// Whether an address leads nowhere but to this host.
pub fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// A host's name or address and a port, in lower case as browsers write them.
fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-:[]".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(listen: Option<&str>, tls: bool, has_authority: bool) -> Result<Option<bool>, String> {
        let web_listen = listen.map(|listen| listen.parse().expect("an address"));
        let args = WebArgs { web_listen, web_tls: tls, web_origins: Vec::new() };
        let args = args.resolve(has_authority).map_err(|error| error.to_string())?;
        let settings = args.settings().map_err(|error| error.to_string())?;
        Ok(settings.map(|settings| settings.tls))
    }

    #[test]
    fn web_is_off_by_default_and_uses_tls_beyond_this_host() {
        assert_eq!(settings(None, false, true), Ok(None));
        assert_eq!(settings(Some("127.0.0.1:0"), false, false), Ok(Some(false)));
        assert_eq!(settings(Some("[::1]:80"), true, true), Ok(Some(true)));
        assert_eq!(settings(Some("10.0.0.1:80"), false, true), Ok(Some(true)), "without being asked for");
        assert_eq!(settings(Some("0.0.0.0:80"), false, true), Ok(Some(true)));
    }

    #[test]
    fn conflicting_options_are_rejected() {
        let refused = |listen, tls| settings(listen, tls, false).expect_err("refused");
        assert!(refused(None, true).contains("go with --web-listen"));
        for (listen, tls) in [("10.0.0.1:80", false), ("0.0.0.0:0", false), ("127.0.0.1:0", true)] {
            assert!(refused(Some(listen), tls).contains("nobody could issue them in this job"), "{listen}");
        }
    }

    fn checked(listen: &str, tls: bool, origins: &[&str]) -> anyhow::Result<WebSettings> {
        let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
        WebSettings { listen: listen.parse().expect("an address"), tls, origins }.checked()
    }

    #[test]
    fn listeners_beyond_this_host_require_tls() {
        for listen in ["127.0.0.1:0", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
            assert!(checked(listen, false, &[]).is_ok(), "{listen}");
        }
        for listen in ["0.0.0.0:0", "[::]:80", "10.0.0.1:80", "[fd00::1]:80", "[::ffff:10.0.0.1]:80"] {
            let error = checked(listen, false, &[]).expect_err(listen).to_string();
            assert!(error.contains(listen) && error.contains("in the clear beyond this host"), "{error}");
            assert!(checked(listen, true, &[]).is_ok(), "{listen} with TLS");
        }
    }

    #[test]
    fn origins_are_written_as_browsers_do() {
        let origins = |origin| checked("127.0.0.1:0", false, &[origin]);
        for good in ["https://lab.example", "http://localhost:8080", "http://[::1]:3000"] {
            assert!(origins(good).is_ok(), "{good}");
        }
        for bad in
            ["*", "null", "", "lab.example", "https://", "https://lab.example/", "https://LAB.example", "ftp://x"]
        {
            let error = origins(bad).expect_err(bad).to_string();
            assert!(error.contains("is no origin"), "{error}");
        }
    }
}
