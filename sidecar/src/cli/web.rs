//! Options about gRPC-Web, which `ronde run` and `ronde sidecar` share.

use std::net::SocketAddr;

use anyhow::ensure;
use clap::Args;

use crate::web::{WebSettings, is_loopback};

/// The options about the listener for gRPC-Web.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct WebArgs {
    /// Also serve workers over gRPC-Web at this address, port 0 for a free one: those that have no Unix sockets, such as
    /// WebAssembly. On the loopback with their rank's token; elsewhere over mutual TLS, too. [default: nowhere]
    #[arg(long, value_name = "ADDRESS:PORT")]
    web_listen: Option<SocketAddr>,
    /// Ask for mutual TLS on a loopback address, too: certificates of the job on both sides.
    #[arg(long)]
    web_tls: bool,
    /// Let pages of this origin, scheme and host as browsers write them, call over gRPC-Web. May be given several times.
    #[arg(long = "web-origin", value_name = "ORIGIN")]
    web_origins: Vec<String>,
}

impl WebArgs {
    /// As a sidecar is told. Where certificates are of an authority that nobody keeps, no client can have one.
    ///
    /// # Errors
    /// What does not go together.
    pub(crate) fn settings(&self, has_authority: bool) -> anyhow::Result<Option<WebSettings>> {
        let Self { web_listen, web_tls, web_origins } = self;
        let Some(listen) = *web_listen else {
            ensure!(!web_tls && web_origins.is_empty(), "--web-tls and --web-origin go with --web-listen ADDRESS:PORT");
            return Ok(None);
        };
        let tls = *web_tls || !is_loopback(listen);
        ensure!(
            has_authority || !tls,
            "--web-listen {listen} needs certificates for clients, and nobody could issue them in this job; listen on a \
             loopback address without --web-tls, or start `ronde sidecar` with --certs"
        );
        WebSettings { listen, tls, origins: web_origins.clone() }.checked().map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(listen: Option<&str>, tls: bool, has_authority: bool) -> Result<Option<bool>, String> {
        let web_listen = listen.map(|listen| listen.parse().expect("an address"));
        let args = WebArgs { web_listen, web_tls: tls, web_origins: Vec::new() };
        let settings = args.settings(has_authority).map_err(|error| error.to_string())?;
        Ok(settings.map(|settings| settings.tls))
    }

    #[test]
    fn it_is_off_by_default_and_speaks_tls_beyond_this_host() {
        assert_eq!(settings(None, false, true), Ok(None));
        assert_eq!(settings(Some("127.0.0.1:0"), false, false), Ok(Some(false)));
        assert_eq!(settings(Some("[::1]:80"), true, true), Ok(Some(true)));
        assert_eq!(settings(Some("10.0.0.1:80"), false, true), Ok(Some(true)), "without being asked for");
        assert_eq!(settings(Some("0.0.0.0:80"), false, true), Ok(Some(true)));
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let refused = |listen, tls| settings(listen, tls, false).expect_err("refused");
        assert!(refused(None, true).contains("go with --web-listen"));
        for (listen, tls) in [("10.0.0.1:80", false), ("0.0.0.0:0", false), ("127.0.0.1:0", true)] {
            assert!(refused(Some(listen), tls).contains("nobody could issue them in this job"), "{listen}");
        }
    }
}
