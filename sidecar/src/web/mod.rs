//! The gRPC-Web listener: sessions of workers that have neither Unix sockets nor shared memory, such as WebAssembly in
//! a browser or in Node. It is off by default; docs/WEB.md describes its use, docs/adr/0019-grpc-web.md the reasons.
//!
//! A request is checked by its head ([`gate`]), read within bounds ([`listener`]) that are divided between ranks
//! ([`shares`]), and answered ([`calls`]). A session
//! is the same as that of rpc.sock, but its messages travel differently ([`sessions`]). All of it runs on a separate
//! thread, because TLS does not belong on the control thread.

mod calls;
mod gate;
mod listener;
mod sessions;
mod shares;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use anyhow::Context;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::web::WebSettings;
use ronde_rpc::RankToken;
use ronde_transport::{Identity, MutualTls};
use ronde_wire::Rank;

use crate::admin::Pages;
use crate::session::service::Service;
use calls::Calls;
use gate::Gate;
use listener::Endpoint;

/// The handle of the listener for the rest of the sidecar.
pub(crate) struct Web {
    /// Its address.
    pub(crate) address: SocketAddr,
    /// Receives new certificates, if TLS is on.
    pub(crate) tls: Option<Arc<MutualTls>>,
}

/// Binds the listener and serves it on its own thread, for as long as the process runs.
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
    let endpoint = Endpoint::new(gate, Calls::new(service, pages), tls.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start a runtime for gRPC-Web")?;
    let serve = move || {
        if let Err(error) = runtime.block_on(listener::run(listener, Arc::new(endpoint))) {
            tracing::error!(%error, "the gRPC-Web listener has ended");
        }
    };
    std::thread::Builder::new().name("ronde-web".into()).spawn(serve).context("cannot start the gRPC-Web thread")?;
    tracing::info!(%address, tls = settings.tls, "the gRPC-Web listener serves");
    Ok(Web { address, tls })
}
