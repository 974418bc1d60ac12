//! QUIC with TLS 1.3 and mutual authentication.
//!
//! A port has one endpoint on one UDP socket. Two sidecars have one connection per port, and on it one bidirectional
//! stream: the dialler opens it and says hello, the acceptor checks that hello against the certificate and answers with
//! its own or with a refusal; frames follow in both directions. All tasks run on the tokio runtime in which the port was
//! started, a current-thread one, so sealing and opening happen on the owner's thread.
//!
//! ```text
//! mod      the port, what its owner calls          accept   connections from peers, up to the hello
//! options  settings, their figures                 dial     connections to peers, again until the start timeout
//! state    links and events behind one lock        race     which of a peer's addresses answers first
//! socket   the UDP socket, batches                 routes   where peers were reached, for all ports
//! tls      configurations for quinn and rustls     link     frames in both directions until the link is down
//! closing  why a connection ended                  probe    is the process of a silent peer still there?
//! replace  when a connection is replaced           handover how a link goes over to the next
//! proof    what the certificates said
//! ```

mod accept;
mod closing;
mod dial;
mod handover;
mod link;
mod options;
mod outbox;
mod probe;
mod proof;
mod race;
mod replace;
mod routes;
mod socket;
mod state;
mod tls;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use quinn::{AsyncUdpSocket, Endpoint, Runtime, TokioRuntime};
use ronde_wire::SidecarIndex;
use ronde_wire::control::Hello;

use crate::hello::LocalHello;
use crate::identity::{Identity, IdentityError};
use crate::port::{Outgoing, Port, PortEvent, PortStats, Role, SendError};
pub use options::{Congestion, QuicOptions, SocketOptions};
pub(crate) use outbox::outbox_bytes_max;
pub use proof::{CertificateFacts, LinkSecurity};
pub use routes::Routes;
use socket::BatchLimitedSocket;
use state::Shared;

/// A UDP socket that is bound, so that its port number can be told to peers, and does not talk yet. What arrives in the
/// meantime waits in its receive buffer.
#[derive(Debug)]
pub struct BoundPort {
    socket: UdpSocket,
    local_addr: SocketAddr,
    receive_buffer_bytes: usize,
    send_buffer_bytes: usize,
    routes: Routes,
    own_addresses: Vec<IpAddr>,
}

impl BoundPort {
    /// Shares what is found out about ways to peers with the other ports of the sidecar.
    #[must_use]
    pub fn sharing(self, routes: Routes) -> Self {
        Self { routes, ..self }
    }

    /// Takes connections to these addresses of the host only, where the socket is bound to all of them.
    #[must_use]
    pub fn only_at(self, own_addresses: Vec<IpAddr>) -> Self {
        Self { own_addresses, ..self }
    }

    /// Where peers dial.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// What the operating system granted for receiving and sending, in bytes as it accounts them.
    #[must_use]
    pub fn buffer_bytes(&self) -> (usize, usize) {
        (self.receive_buffer_bytes, self.send_buffer_bytes)
    }

    /// Starts to talk, on the tokio runtime of the calling thread. `peers` are the sidecars that may link to this one and
    /// where to dial them; one without addresses may only dial.
    ///
    /// # Errors
    /// [`QuicError`] when the identity cannot be used or the socket not be registered with the runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn start(
        self,
        identity: Arc<Identity>,
        local: &LocalHello,
        peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
        options: QuicOptions,
    ) -> Result<QuicPort, QuicError> {
        let hello = local.hello(identity.id().sidecar);
        self.start_saying(identity, hello, peers, options)
    }

    /// The same with a hello that is given whole: for tests of other releases and of false claims.
    ///
    /// # Errors
    /// As [`Self::start`].
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_saying(
        self,
        identity: Arc<Identity>,
        hello: Hello,
        peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
        options: QuicOptions,
    ) -> Result<QuicPort, QuicError> {
        let local_addr = self.local_addr;
        let transport = Arc::new(options.transport_config(hello.purpose, self.receive_buffer_bytes));
        let server = tls::server_config(&identity, transport.clone())?;
        let socket = TokioRuntime.wrap_udp_socket(self.socket).map_err(QuicError::Socket)?;
        let socket: Arc<dyn AsyncUdpSocket> = Arc::new(BatchLimitedSocket::new(socket));
        let endpoint = Endpoint::new_with_abstract_socket(
            tls::endpoint_config(),
            Some(server.clone()),
            socket,
            Arc::new(TokioRuntime),
        )
        .map_err(QuicError::Socket)?;
        let accepting = (endpoint, Arc::new(server));
        let shared = Shared::new(identity, hello, peers, options, transport, accepting, self.routes);
        let shared = Arc::new(shared);
        tokio::spawn(accept::accept_all(shared.clone(), self.own_addresses));
        Ok(QuicPort { shared, local_addr })
    }
}

/// A port over QUIC. Must be polled and dropped on the thread of the runtime in which it was started.
pub struct QuicPort {
    shared: Arc<Shared>,
    local_addr: SocketAddr,
}

impl QuicPort {
    /// Binds a UDP socket; port 0 takes any free one.
    ///
    /// # Errors
    /// [`QuicError::Bind`] when the address cannot be bound.
    pub fn bind(addr: SocketAddr, options: &SocketOptions) -> Result<BoundPort, QuicError> {
        socket::bind(addr, options).map_err(|source| QuicError::Bind { addr, source })
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
    /// [`QuicError`] when it cannot be used or names another sidecar.
    pub fn install_identity(&self, identity: Arc<Identity>) -> Result<(), QuicError> {
        let server = tls::server_config(&identity, self.shared.transport.clone())?;
        Ok(self.shared.replace_identity(identity, server)?)
    }

    /// Bytes given to [`Port::send`] for a peer that its connection has not taken over.
    #[must_use]
    pub fn queued_bytes(&self, peer: SidecarIndex) -> usize {
        self.shared.queued_bytes(peer)
    }

    /// What is known of the way to a peer whose link is up.
    #[must_use]
    pub fn path(&self, peer: SidecarIndex) -> Option<PathStats> {
        let connection = self.shared.connection(peer)?;
        let stats = connection.stats();
        let path = stats.path;
        Some(PathStats {
            peer_address: canonical(connection.remote_address()),
            round_trip: path.rtt,
            datagram_bytes: path.current_mtu,
            window_bytes: path.cwnd,
            packets_sent: path.sent_packets,
            packets_lost: path.lost_packets,
            lost_bytes: path.lost_bytes,
            sent_bytes: stats.udp_tx.bytes,
            received_bytes: stats.udp_rx.bytes,
        })
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
        let quiet = self.shared.endpoint.wait_idle();
        // A peer that does not answer any more cannot hold this side up.
        let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, quiet).await;
    }
}

impl Port for QuicPort {
    fn open(&mut self, peer: SidecarIndex, role: Role) {
        let Some(generation) = self.shared.open(peer, role) else { return };
        let task = match role {
            Role::Dial => tokio::spawn(dial::dial(self.shared.clone(), peer, generation)),
            Role::Await => tokio::spawn(accept::give_up_waiting(self.shared.clone(), peer, generation)),
        };
        self.shared.keep_opening_task(peer, generation, task.abort_handle());
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

impl Drop for QuicPort {
    fn drop(&mut self) {
        self.shared.close_endpoint("the port was closed");
    }
}

impl fmt::Debug for QuicPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuicPort").field("local_addr", &self.local_addr).finish_non_exhaustive()
    }
}

/// The way to a peer, as the connection has measured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// Where the peer is reached, or where its packets come from.
    pub peer_address: SocketAddr,
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
    /// UDP payload sent.
    pub sent_bytes: u64,
    /// UDP payload received.
    pub received_bytes: u64,
}

/// A port that cannot be bound or started.
#[derive(Debug, thiserror::Error)]
pub enum QuicError {
    /// The address is taken, or not of this host.
    #[error("{addr} cannot be bound: {source}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// What the operating system says.
        source: io::Error,
    },
    /// The socket does not work with the runtime.
    #[error("the UDP socket cannot be used: {0}")]
    Socket(io::Error),
    /// The identity has no usable roots.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// TLS does not accept the certificate and key.
    #[error("the identity cannot be used for TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// An address as people know it: a socket for both families has IPv4 addresses in the form of IPv6.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// How long a port that is shut down waits for its peers to acknowledge.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
