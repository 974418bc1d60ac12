//! A TCP port at which nothing listens, for tests.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

/// Binds a port of the loopback. Connections to it are refused while the socket exists: the kernel may give a port that was
/// only closed to the next process that binds one.
pub(crate) fn closed_port() -> (TcpSocket, SocketAddr) {
    let bound = TcpSocket::new_v4().expect("a socket");
    bound.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
    let address = bound.local_addr().expect("it is bound");
    (bound, address)
}
