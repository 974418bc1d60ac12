//! The listener for gRPC-Web: sessions of workers that have neither Unix sockets nor shared memory, such as WebAssembly in a
//! browser or in Node. Off unless asked for; docs/WEB.md says how it is used, docs/adr/0019-grpc-web.md why it is so.
//!
//! A request is judged by its head ([`gate`]), read within bounds ([`listener`]), and answered ([`calls`]); a session is the
//! very one that the service of rpc.sock has, with another way of its messages ([`sessions`]). All of it runs on a thread of
//! its own, because TLS does not belong on the control thread.

mod calls;
mod gate;
mod listener;
mod sessions;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use anyhow::{Context, ensure};
use ronde_rpc::RankToken;
use ronde_transport::{Identity, MutualTls};
use ronde_wire::Rank;
use serde::{Deserialize, Serialize};

use crate::admin::Pages;
use crate::cli::codes::Code;
use crate::service::Service;
use calls::Calls;
use gate::Gate;
use listener::Door;

/// Where gRPC-Web is answered, and to whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WebSettings {
    /// The address; port 0 for a free one.
    pub(crate) listen: SocketAddr,
    /// Whether both sides show certificates of the job; without it the address is of the loopback.
    #[serde(default)]
    pub(crate) tls: bool,
    /// The origins whose pages may call, as browsers write them; none by default.
    #[serde(default)]
    pub(crate) origins: Vec<String>,
}

impl WebSettings {
    /// Checks that nothing is said in the clear beyond this host, and that origins are some.
    ///
    /// # Errors
    /// What is wrong and what to do.
    pub(crate) fn checked(self) -> anyhow::Result<Self> {
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
pub(crate) fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// A host's name or address and a port, in lower case as browsers write them.
fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-:[]".contains(&byte)
}

/// The listener, as the rest of the sidecar knows it.
pub(crate) struct Web {
    /// Where it is.
    pub(crate) address: SocketAddr,
    /// What takes fresh certificates, where there are some.
    pub(crate) tls: Option<Arc<MutualTls>>,
}

/// Binds the listener and serves it on a thread of its own, for as long as the process runs.
///
/// # Errors
/// When the address cannot be bound, or TLS cannot be configured.
pub(crate) fn serve(
    settings: &WebSettings,
    identity: &Identity,
    service: Arc<Service>,
    pages: Pages,
    tokens: impl IntoIterator<Item = (Rank, RankToken)>,
) -> anyhow::Result<Web> {
    let tls = settings.tls.then(|| MutualTls::new(identity).map(Arc::new)).transpose();
    let tls = tls.context("cannot configure TLS for gRPC-Web")?;
    let listen = settings.listen;
    let bound = || -> std::io::Result<(TcpListener, SocketAddr)> {
        let listener = TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    let (listener, address) =
        bound().with_context(|| format!("cannot bind {listen} for gRPC-Web (--web-listen)")).context(Code::PortBind)?;
    let gate = Gate::new(tokens, settings.origins.clone());
    let door = Door::new(gate, Calls::new(service, pages), tls.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start a runtime for gRPC-Web")?;
    let serve = move || {
        if let Err(error) = runtime.block_on(listener::run(listener, Arc::new(door))) {
            tracing::error!(%error, "gRPC-Web is not answered any more");
        }
    };
    std::thread::Builder::new().name("ronde-web".into()).spawn(serve).context("cannot start the gRPC-Web thread")?;
    tracing::info!(%address, tls = settings.tls, "gRPC-Web is answered");
    Ok(Web { address, tls })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(listen: &str, tls: bool, origins: &[&str]) -> anyhow::Result<WebSettings> {
        let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
        WebSettings { listen: listen.parse().expect("an address"), tls, origins }.checked()
    }

    #[test]
    fn beyond_this_host_nothing_is_in_the_clear() {
        for listen in ["127.0.0.1:0", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
            assert!(settings(listen, false, &[]).is_ok(), "{listen}");
        }
        for listen in ["0.0.0.0:0", "[::]:80", "10.0.0.1:80", "[fd00::1]:80", "[::ffff:10.0.0.1]:80"] {
            let error = settings(listen, false, &[]).expect_err(listen).to_string();
            assert!(error.contains(listen) && error.contains("in the clear beyond this host"), "{error}");
            assert!(settings(listen, true, &[]).is_ok(), "{listen} with TLS");
        }
    }

    #[test]
    fn origins_are_written_as_browsers_do() {
        let origins = |origin| settings("127.0.0.1:0", false, &[origin]);
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
