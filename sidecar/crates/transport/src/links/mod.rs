//! Links to other sidecars over the network, by QUIC or by TLS 1.3 over TCP, always with mutual authentication.
//!
//! Two sidecars have one connection per port, whose dialler says hello; the acceptor checks that hello against the
//! certificate and answers with its own or with a refusal; frames follow in both directions. All tasks run on the tokio
//! runtime in which the port was started, a current-thread one, so sealing and opening happen on the owner's thread.
//!
//! ```text
//! mod        the port, what its owner calls         accept   connections from peers, up to the hello
//! options    settings                               dial     connections to peers, again until the start timeout
//! state      links and events behind one lock       race     which of a peer's addresses answers first
//! endpoints  sockets of both carriers               routes   where peers were reached, for all ports
//! connection a connection of either carrier         link     frames in both directions until the link is down
//! closing    why a connection ended                 outbox   what one link has still to send
//! replace    when a connection is replaced          handover how a link goes over to the next
//! proof      what the certificates said
//! ```

mod accept;
mod address_race;
mod auth;
pub(crate) mod close;
pub(crate) mod connection;
mod dial;
mod endpoints;
mod handover;
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
pub use options::{LinkOptions, SocketOptions};
pub(crate) use outbox::outbox_bytes_max;
pub use routes::Routes;
use state::Shared;

/// Sockets that are bound, so that their port number can be told to peers, and do not talk yet. What arrives in the
/// meantime waits with the system.
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
    /// Shares what is found out about ways to peers with the other ports of the sidecar.
    #[must_use]
    pub fn with_routes(self, routes: Routes) -> Self {
        Self { routes, ..self }
    }

    /// Takes connections to these addresses of the host only, where the socket is bound to all of them.
    #[must_use]
    pub fn accept_only_at(self, own_addresses: Vec<IpAddr>) -> Self {
        Self { own_addresses, ..self }
    }

    /// Where peers dial.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Starts to talk, on the tokio runtime of the calling thread. `peers` are the sidecars that may link to this one and
    /// where to dial them; one without addresses may only dial.
    ///
    /// # Errors
    /// [`PortError`] when the identity cannot be used or the socket not be registered with the runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
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

    /// The same with a hello that is given whole: for tests of other releases and of false claims.
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

/// A port over the network. Must be polled and dropped on the thread of the runtime in which it was started.
pub struct NetworkPort {
    shared: Arc<Shared>,
    local_addr: SocketAddr,
}

impl NetworkPort {
    /// Binds what a port for this purpose needs under a setting; port 0 takes any free one. TCP and UDP have the same
    /// number. A control port takes both, so that a peer of another setting is told so instead of waiting in vain.
    ///
    /// # Errors
    /// [`PortError::Bind`] when the address cannot be bound.
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
                // Free for one of the two only.
                Err(error) if tries > 0 && error.is_taken() => {}
                Err(error) => return Err(error),
                Ok((udp, tcp, local_addr)) => {
                    let (routes, own_addresses) = (Routes::default(), Vec::new());
                    return Ok(BoundPort { udp, tcp, local_addr, transport, routes, own_addresses });
                }
            }
        }
    }

    /// Where peers dial.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Takes fresh certificates: links are made with them from now on, and those that are up go over to a connection with
    /// them. A link that cannot ends when the first of its certificates expires, or soon when the peer's is of an authority
    /// that is not accepted any more.
    ///
    /// # Errors
    /// [`PortError`] when it cannot be used or names another sidecar.
    pub fn install_identity(&self, identity: Arc<Identity>) -> Result<(), PortError> {
        let servers = self.shared.endpoints.servers(&identity)?;
        Ok(self.shared.set_identity(identity, servers)?)
    }

    /// Bytes given to [`Port::send`] for a peer that its connection has not taken over.
    #[must_use]
    pub fn queued_bytes(&self, peer: SidecarIndex) -> usize {
        self.shared.queued_bytes(peer)
    }

    /// What is known of the way to a peer whose link is up.
    #[must_use]
    pub fn path(&self, peer: SidecarIndex) -> Option<PathStats> {
        Some(self.shared.connection(peer)?.path())
    }

    /// The ways to all peers whose link is up, by peer.
    #[must_use]
    pub fn paths(&self) -> Vec<(SidecarIndex, PathStats)> {
        let mut peers: Vec<SidecarIndex> = self.shared.peers.keys().copied().collect();
        peers.sort_unstable();
        peers.into_iter().filter_map(|peer| Some((peer, self.path(peer)?))).collect()
    }

    /// How the link to a peer is protected, when it is up.
    #[must_use]
    pub fn security(&self, peer: SidecarIndex) -> Option<LinkSecurity> {
        self.shared.security(peer)
    }

    /// Closes every link with a reason and waits until the peers have heard of it, at most a second. Without it, a port
    /// that is dropped just before its runtime ends leaves its peers to find out by themselves.
    pub async fn shutdown(self, reason: &str) {
        self.shared.close_links(reason);
        let quiet = self.shared.endpoints.wait_idle();
        // A peer that does not answer any more cannot hold this side up.
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

/// The way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// What the connection runs over.
    pub carrier: Carrier,
    /// Where the peer is reached, or where its packets come from.
    pub peer_address: SocketAddr,
    /// Bytes sent, sealed: UDP payload, or what TCP carries.
    pub sent_bytes: u64,
    /// Bytes received, likewise.
    pub received_bytes: u64,
    /// What QUIC has measured; TCP keeps that to itself.
    pub quic: Option<QuicPath>,
}

/// The way to a peer, as a connection over QUIC has measured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuicPath {
    /// The smoothed round-trip time.
    pub round_trip: Duration,
    /// The largest datagram that goes through, in bytes of UDP payload.
    pub datagram_bytes: u16,
    /// The congestion window, in bytes.
    pub window_bytes: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets declared lost.
    pub packets_lost: u64,
    /// Bytes in them, which are sent again.
    pub lost_bytes: u64,
}

/// A port that cannot be bound or started.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The address is taken, or not of this host.
    #[error("{protocol} at {addr} cannot be bound: {source}")]
    Bind {
        /// TCP or UDP.
        protocol: &'static str,
        /// The address.
        addr: SocketAddr,
        /// What the operating system says.
        source: io::Error,
    },
    /// The socket does not work with the runtime.
    #[error("the socket cannot be used: {0}")]
    Socket(io::Error),
    /// The identity has no usable roots.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// TLS does not accept the certificate and key.
    #[error("the identity cannot be used for TLS: {0}")]
    Tls(#[from] rustls::Error),
}

impl PortError {
    /// Whether somebody else has the address.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}

type Sockets = (Option<(UdpSocket, usize)>, Option<TcpListener>, SocketAddr);

/// Binds UDP, TCP, or both at one port number.
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

/// An address as people know it: a socket for both families has IPv4 addresses in the form of IPv6.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// How long a port that is shut down waits for its peers to acknowledge.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// A port number that is free for UDP is nearly always free for TCP.
const BIND_TRIES: u32 = 16;
