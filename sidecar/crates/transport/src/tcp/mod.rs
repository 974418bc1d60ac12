//! TLS 1.3 over TCP: like QUIC, one connection for each port and peer.
//!
//! Sending, bytes are encrypted from the buffers that hold them into one buffer of 17 records, which one system call
//! copies to the kernel. Receiving, the kernel fills a buffer of 256 KiB, from which records are decrypted into the
//! frame that is being read.
//!
//! | module | contents |
//! |---|---|
//! | this one | the listener, dialling |
//! | `connection`, `halves` | the socket with its session; its two directions |
//! | `session`, `handshake`, `records` | TLS between two buffers: the handshake by rustls, then records |
//! | `socket_buffer`, `pool` | buffers of a socket, reused buffers of frames |
//! | `aead` | AES-128-GCM |
//! | `congestion` | congestion control |
//! | `connection_count` | waits until all connections are closed |

mod aead;
mod congestion;
mod connection;
mod connection_count;
#[cfg(test)]
mod fuzz;
mod halves;
mod handshake;
#[cfg(test)]
mod interop;
mod pool;
mod rates;
mod records;
mod session;
mod socket_buffer;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use ronde_wire::SidecarIndex;
use rustls::ServerConfig;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Notify;

pub use congestion::{Congestion, ParseCongestionError};
pub(crate) use connection::Connection;
use connection::HandshakeFailed;
use connection_count::ConnectionCounter;
pub(crate) use halves::{ReadError, RecvHalf, SendHalf};
pub use pool::Pool;
pub use rates::{CIPHER_RECORD_BYTES, CipherError, CipherRate, cipher_rates};
use session::TlsSession;

use crate::identity::Identity;
use crate::links::close::{CloseCode, CloseReason};
use crate::links::connection::ConnectError;
use crate::tls;

/// Binds a listener that accepts no connections yet; early ones wait in the backlog.
pub(crate) fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // Closed connections of an earlier process do not block the port.
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        // Dual-stack, regardless of net.ipv6.bindv6only.
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from(socket))
}

/// A port's listener, and the source address of its dials.
pub(crate) struct Endpoint {
    listener: tokio::net::TcpListener,
    local_addr: SocketAddr,
    congestion: Congestion,
    open_connections: ConnectionCounter,
    pool: Pool,
    connections: Mutex<Vec<connection::WeakConnection>>,
    is_stopped: AtomicBool,
    stopped: Notify,
}

impl Endpoint {
    /// Starts the listener on the runtime of the calling thread.
    pub(crate) fn new(listener: TcpListener, congestion: &Congestion) -> io::Result<Self> {
        congestion.apply(&SockRef::from(&listener))?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let local_addr = listener.local_addr()?;
        let (open_connections, stopped) = (ConnectionCounter::new(), Notify::new());
        Ok(Self {
            listener,
            local_addr,
            congestion: congestion.clone(),
            open_connections,
            pool: Pool::default(),
            connections: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            stopped,
        })
    }

    /// Accepts the next connection; `None` once the endpoint is stopped.
    pub(crate) async fn accept(&self) -> Option<TcpStream> {
        loop {
            let stopped = self.stopped.notified();
            if self.is_stopped.load(Ordering::Relaxed) {
                return None;
            }
            tokio::select! {
                () = stopped => {}
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => return Some(stream),
                    Err(error) => {
                        // The process may be out of descriptors for a moment; other errors concern one closed
                        // connection.
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }

    /// Performs the TLS handshake on an accepted connection.
    pub(crate) async fn accept_handshake(
        &self,
        stream: TcpStream,
        config: Arc<ServerConfig>,
    ) -> Result<Connection, CloseReason> {
        let session = TlsSession::server(config).map_err(|error| CloseReason::RefusedLocally(error.to_string()))?;
        match self.establish(stream, session).await {
            Ok(connection) => Ok(connection),
            Err(HandshakeFailed { reason, close_task }) => {
                // The caller limits simultaneous handshakes. A rejected peer counts until its socket is closed.
                if let Some(close_task) = close_task {
                    // This fails if the runtime shuts down, which closes the socket, too.
                    let _ = close_task.await;
                }
                Err(reason)
            }
        }
    }

    /// Dials a peer.
    pub(crate) async fn connect(
        &self,
        identity: &Identity,
        peer: SidecarIndex,
        address: SocketAddr,
    ) -> Result<Connection, ConnectError> {
        let local = |error: String| ConnectError::Local(error);
        let config = tls::client_config(identity, peer).map_err(|error| local(error.to_string()))?;
        let session = TlsSession::client(Arc::new(config)).map_err(|error| local(error.to_string()))?;
        let socket = self.bound_socket(address)?;
        let stream = socket.connect(address).await.map_err(|error| ConnectError::NoAnswer(error.to_string()))?;
        if self.is_self_connection(&stream) {
            return Err(local(format!("{address} is this sidecar's own port")));
        }
        self.establish(stream, session).await.map_err(|failed| ConnectError::Closed(failed.reason))
    }

    /// Creates a socket that is bound to the listener's address, if that is a specific one.
    fn bound_socket(&self, address: SocketAddr) -> Result<TcpSocket, ConnectError> {
        let own = self.local_addr.ip();
        let fits = own.is_unspecified() || own.is_ipv4() == address.is_ipv4();
        if !fits || self.local_addr.is_ipv4() && address.is_ipv6() {
            return Err(ConnectError::Local(format!(
                "{address} and this side's address {own} belong to different address families"
            )));
        }
        let made = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = made.map_err(|error| ConnectError::Local(format!("no socket can be created: {error}")))?;
        self.congestion.apply(&SockRef::from(&socket)).map_err(|error| ConnectError::Local(error.to_string()))?;
        if !own.is_unspecified() {
            socket.bind(SocketAddr::new(own, 0)).map_err(|error| ConnectError::Local(format!("{own}: {error}")))?;
        }
        Ok(socket)
    }

    /// Whether the connection leads to this same port, because the peer's address also exists on this host.
    fn is_self_connection(&self, stream: &TcpStream) -> bool {
        let at = |address: io::Result<SocketAddr>| address.ok().map(|at| (at.ip().to_canonical(), at.port()));
        match (at(stream.local_addr()), at(stream.peer_addr())) {
            (Some((here, _)), Some((there, port))) => here == there && port == self.local_addr.port(),
            _ => false,
        }
    }

    async fn establish(&self, stream: TcpStream, session: TlsSession) -> Result<Connection, HandshakeFailed> {
        set_options(&stream);
        let guard = self.open_connections.register();
        let connection = Connection::establish(stream, session, guard, self.pool.clone()).await?;
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|known| Weak::strong_count(known) > 0);
        connections.push(connection.downgrade());
        drop(connections);
        Ok(connection)
    }

    /// Stops accepting connections.
    pub(crate) fn stop_accepting(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.stopped.notify_waiters();
    }

    /// Closes all connections.
    pub(crate) fn close(&self, reason: &str) {
        self.stop_accepting();
        let connections = std::mem::take(&mut *self.connections.lock().unwrap_or_else(PoisonError::into_inner));
        for connection in connections.iter().filter_map(Connection::upgrade) {
            drop(connection.close(CloseCode::Closed, reason));
        }
    }

    /// Waits until all connections are closed and their peers have received the reason.
    pub(crate) async fn wait_idle(&self) {
        self.open_connections.wait_zero().await;
    }
}

/// The local address of an accepted connection.
pub(crate) fn local_ip(stream: &TcpStream) -> Option<IpAddr> {
    stream.local_addr().ok().map(|address| address.ip().to_canonical())
}

/// Sets socket options. Buffer sizes are left to the kernel, which grows them with the path up to net.ipv4.tcp_wmem and
/// tcp_rmem; a fixed size would be limited to a quarter of that where net.core.rmem_max has its default.
fn set_options(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(2);
    let asked = [
        socket.set_tcp_nodelay(true),
        socket.set_tcp_keepalive(&keepalive),
        socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX)),
    ];
    if let Some(error) = asked.into_iter().find_map(Result::err) {
        tracing::debug!(%error, "the kernel rejected a socket option of a connection");
    }
}

/// Limit for connections that wait to be accepted; net.core.somaxconn may lower it.
const BACKLOG: i32 = 1_024;
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Idle time after which the kernel sends keep-alive probes. A lane is idle during a long compute phase, and firewalls
/// on the path must not drop its connection.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Limit for the time that sent data may stay unacknowledged; equal to QUIC's idle timeout.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);
