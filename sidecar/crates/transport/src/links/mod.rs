//! Links to other sidecars over the network: QUIC or TLS 1.3 over TCP, always with mutual authentication.
//!
//! Two sidecars have one connection per port. The dialler sends its hello; the acceptor checks it against the
//! certificate and answers with its own hello or a refusal. Then frames follow in both directions. All tasks run on the
//! current-thread tokio runtime on which the port was started, so encryption happens on the owner's thread.
//!
//! | module | contents |
//! |---|---|
//! | this one | the port and its public methods |
//! | `accept`, `dial` | incoming connections up to the hello; outgoing ones, with retries until the start timeout |
//! | `handshakes` | how many handshakes may be in progress at a listener, and which one gives way |
//! | `address_race` | dials a peer's addresses in parallel (Happy Eyeballs) |
//! | `auth` | the certificates by which both sides authenticated |
//! | `close` | close codes and reasons |
//! | `connection`, `endpoints` | one connection, and the sockets, of either carrier |
//! | `link`, `outbox` | reading and writing frames while a link is up; its send queue |
//! | `replace`, `handover` | replaces a link's connection when a certificate was renewed |
//! | `options`, `routes` | settings; the addresses at which peers were reached |
//! | `state` | links and events, shared by the tasks behind one lock |

mod accept;
mod address_race;
mod auth;
pub(crate) mod close;
pub(crate) mod connection;
mod dial;
mod endpoints;
mod handover;
mod handshakes;
mod link;
mod options;
mod outbox;
mod replace;
mod routes;
mod state;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ronde_wire::SidecarIndex;
use ronde_wire::control::{Carrier, Hello, Purpose, Transport};

use crate::hello::LocalHello;
use crate::identity::{Identity, IdentityError};
use crate::port::{Outgoing, Port, PortEvent, PortStats, Role, SendError};
use crate::{quic, tcp};
pub use auth::{CertificateFacts, LinkSecurity};
use endpoints::Endpoints;
pub use handshakes::{Evicted, HandshakePermit, Handshakes};
pub use options::{LinkOptions, SocketOptions};
#[cfg(feature = "test-util")]
pub(crate) use outbox::outbox_bytes_max;
pub use routes::Routes;
use state::Shared;

/// Bound sockets of a port that is not started yet. Their port number can be sent to peers already; what arrives before
/// [`Self::start`] waits in the kernel.
#[derive(Debug)]
pub struct BoundPort {
    udp: Option<(UdpSocket, usize)>,
    tcp: Option<TcpListener>,
    local_addr: SocketAddr,
    transport: Transport,
    routes: Routes,
    own_addresses: Vec<IpAddr>,
}

impl BoundPort {
    /// Shares the addresses at which peers were reached with the sidecar's other ports.
    #[must_use]
    pub fn with_routes(self, routes: Routes) -> Self {
        Self { routes, ..self }
    }

    /// Accepts only connections to these local addresses, for sockets that are bound to the wildcard address.
    #[must_use]
    pub fn accept_only_at(self, own_addresses: Vec<IpAddr>) -> Self {
        Self { own_addresses, ..self }
    }

    /// The address that peers dial.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Starts the port on the tokio runtime of the calling thread. `peers` are the sidecars that may connect, and the
    /// addresses at which to dial them; a peer without addresses can only dial this side.
    ///
    /// # Errors
    /// [`PortError`] if the identity is unusable or a socket cannot be registered with the runtime.
    ///
    /// # Panics
    /// If called outside a tokio runtime.
    pub fn start(
        self,
        identity: Arc<Identity>,
        local: &LocalHello,
        peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
        options: LinkOptions,
    ) -> Result<NetworkPort, PortError> {
        let hello = local.hello(identity.id().sidecar);
        self.start_with_hello(identity, hello, peers, options)
    }

    /// Like [`Self::start`], with a custom hello: for tests of other releases and of false claims.
    ///
    /// # Errors
    /// As [`Self::start`].
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_with_hello(
        self,
        identity: Arc<Identity>,
        hello: Hello,
        peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
        options: LinkOptions,
    ) -> Result<NetworkPort, PortError> {
        let local_addr = self.local_addr;
        let hello = Hello { transport: self.transport, ..hello };
        let quic = match self.udp {
            Some(udp) => Some(quic::Endpoint::new(udp, hello.purpose, &options.quic)?),
            None => None,
        };
        let tcp = self
            .tcp
            .map(|listener| tcp::Endpoint::new(listener, &options.congestion))
            .transpose()
            .map_err(PortError::Socket)?;
        let endpoints = Endpoints { quic, tcp };
        let servers = endpoints.servers(&identity)?;
        endpoints.install(&servers);
        let accepting = (endpoints, servers);
        let shared = Shared::new(identity, hello, peers, options, accepting, self.routes);
        let shared = Arc::new(shared);
        tokio::spawn(accept::accept_all(shared.clone(), self.own_addresses));
        Ok(NetworkPort { shared, local_addr })
    }
}

/// A port over the network. Poll and drop it on the thread of the runtime on which it was started.
pub struct NetworkPort {
    shared: Arc<Shared>,
    local_addr: SocketAddr,
}

impl NetworkPort {
    /// Binds the sockets that a port for this purpose needs; port 0 lets the kernel choose. TCP and UDP get the same
    /// number. A control port binds both, so that a peer with another `transport` setting receives an error instead of
    /// a timeout.
    ///
    /// # Errors
    /// [`PortError::Bind`] if the address cannot be bound.
    pub fn bind(
        addr: SocketAddr,
        transport: Transport,
        purpose: Purpose,
        options: &SocketOptions,
    ) -> Result<BoundPort, PortError> {
        let carrier = transport.carrier(purpose);
        let wanted = |of| carrier == of || purpose == Purpose::Control;
        let mut tries = if addr.port() == 0 { BIND_TRIES } else { 1 };
        loop {
            tries -= 1;
            match bind_all(addr, (wanted(Carrier::Quic), wanted(Carrier::Tls)), options) {
                // The number is free for only one of the two protocols: try another one.
                Err(error) if tries > 0 && error.is_taken() => {}
                Err(error) => return Err(error),
                Ok((udp, tcp, local_addr)) => {
                    let (routes, own_addresses) = (Routes::default(), Vec::new());
                    return Ok(BoundPort { udp, tcp, local_addr, transport, routes, own_addresses });
                }
            }
        }
    }

    /// The address that peers dial.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Installs renewed certificates. New links use them, and open links are moved to a connection that does. A link
    /// that cannot be moved closes when its first certificate expires, or after `untrusted_grace` if the peer's
    /// authority is not accepted any more.
    ///
    /// # Errors
    /// [`PortError`] if the identity is unusable or names another sidecar.
    pub fn install_identity(&self, identity: Arc<Identity>) -> Result<(), PortError> {
        let servers = self.shared.endpoints.servers(&identity)?;
        Ok(self.shared.set_identity(identity, servers)?)
    }

    /// Enters another membership of the job: closes all links and, from now on, admits and dials only its sidecars. The
    /// owner receives no further events of the closed links. Both sides of a link must have entered the same membership.
    pub fn enter(&mut self, membership: u64, peers: HashMap<SidecarIndex, Vec<SocketAddr>>) {
        self.shared.enter(membership, peers);
    }

    /// Bytes queued for a peer that its connection has not accepted yet.
    #[must_use]
    pub fn queued_bytes(&self, peer: SidecarIndex) -> usize {
        self.shared.queued_bytes(peer)
    }

    /// Statistics of the network path to a peer whose link is up.
    #[must_use]
    pub fn path(&self, peer: SidecarIndex) -> Option<PathStats> {
        Some(self.shared.connection(peer)?.path())
    }

    /// Statistics of the network paths to all peers whose links are up, in the order of their indices.
    #[must_use]
    pub fn paths(&self) -> Vec<(SidecarIndex, PathStats)> {
        let mut peers: Vec<SidecarIndex> = self.shared.peers();
        peers.sort_unstable();
        peers.into_iter().filter_map(|peer| Some((peer, self.path(peer)?))).collect()
    }

    /// How the link to a peer is protected, if it is up.
    #[must_use]
    pub fn security(&self, peer: SidecarIndex) -> Option<LinkSecurity> {
        self.shared.security(peer)
    }

    /// Closes every link with a reason and waits, for at most one second, until the peers have received it. Without
    /// this, peers of a port that is dropped just before its runtime shuts down learn of it only by a timeout.
    pub async fn shutdown(self, reason: &str) {
        self.shared.close_links(reason);
        let quiet = self.shared.endpoints.wait_idle();
        // The timeout bounds the wait for peers that no longer answer.
        let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, quiet).await;
    }
}

impl Port for NetworkPort {
    fn open(&mut self, peer: SidecarIndex, role: Role) {
        let Some(generation) = self.shared.open(peer, role) else { return };
        let task = match role {
            Role::Dial => tokio::spawn(dial::dial(self.shared.clone(), peer, generation)),
            Role::Await => tokio::spawn(accept::accept_timeout(self.shared.clone(), peer, generation)),
        };
        self.shared.set_opening_task(peer, generation, task.abort_handle());
    }

    fn send(&mut self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError> {
        self.shared.send(to, message)
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<PortEvent> {
        self.shared.poll_event(cx)
    }

    fn close(&mut self, peer: SidecarIndex, reason: &str) {
        self.shared.close(peer, reason);
    }

    fn stats(&self) -> PortStats {
        self.shared.counters.snapshot()
    }
}

impl Drop for NetworkPort {
    fn drop(&mut self) {
        self.shared.close_endpoint("the port was closed");
    }
}

impl fmt::Debug for NetworkPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetworkPort").field("local_addr", &self.local_addr).finish_non_exhaustive()
    }
}

/// Statistics of the network path to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// The protocol that carries the connection.
    pub carrier: Carrier,
    /// The peer's address.
    pub peer_address: SocketAddr,
    /// Bytes sent, encrypted: UDP payload, or the TCP stream.
    pub sent_bytes: u64,
    /// Bytes received, encrypted.
    pub received_bytes: u64,
    /// QUIC's own measurements; `None` for TCP.
    pub quic: Option<QuicPath>,
}

/// QUIC's measurements of a network path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuicPath {
    /// The smoothed round-trip time.
    pub round_trip: Duration,
    /// The path MTU, in bytes of UDP payload.
    pub datagram_bytes: u16,
    /// The congestion window, in bytes.
    pub window_bytes: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets declared lost.
    pub packets_lost: u64,
    /// Bytes in lost packets; they are retransmitted.
    pub lost_bytes: u64,
}

/// Why a port cannot be bound or started.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The address is in use or does not belong to this host.
    #[error("{protocol} at {addr} cannot be bound")]
    Bind {
        /// TCP or UDP.
        protocol: &'static str,
        /// The address.
        addr: SocketAddr,
        /// The operating system's error.
        source: io::Error,
    },
    /// The runtime does not accept the socket.
    #[error("the socket cannot be used: {0}")]
    Socket(io::Error),
    /// The identity has no usable authorities.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// TLS does not accept the certificate and key.
    #[error("the identity cannot be used for TLS: {0}")]
    Tls(#[from] rustls::Error),
}

impl PortError {
    /// Whether another socket uses the address.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}

type Sockets = (Option<(UdpSocket, usize)>, Option<TcpListener>, SocketAddr);

/// Binds UDP, TCP, or both, at one port number.
fn bind_all(addr: SocketAddr, (udp, tcp): (bool, bool), options: &SocketOptions) -> Result<Sockets, PortError> {
    let failed = |protocol, addr| move |source| PortError::Bind { protocol, addr, source };
    let mut at = addr;
    let udp = if udp {
        let bound = quic::bind(at, options).map_err(failed("UDP", at))?;
        at = bound.0.local_addr().map_err(failed("UDP", at))?;
        Some(bound)
    } else {
        None
    };
    let tcp = if tcp {
        let bound = tcp::bind(at).map_err(failed("TCP", at))?;
        at = bound.local_addr().map_err(failed("TCP", at))?;
        Some(bound)
    } else {
        None
    };
    Ok((udp, tcp, at))
}

/// Normalises an address: a dual-stack socket reports IPv4 addresses in IPv6 form.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Limit for the wait for peers' acknowledgements during a shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit for the attempts to find a port number that is free for both UDP and TCP. The first one nearly always is.
const BIND_TRIES: u32 = 16;
