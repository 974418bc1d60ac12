//! Is the process of a silent peer still there?
//!
//! When a process ends, its sockets go with it, and from then on its host answers datagrams to them with "port
//! unreachable". quinn's socket is not connected and never hears that answer, so a datagram from a connected socket asks.
//! A process that is stopped or busy keeps its socket, and is not declared gone by this.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use quinn::Connection;
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

/// Returns when the peer's host says, several times in a row, that nobody listens at the peer's address.
pub(super) async fn until_unreachable(connection: &Connection) {
    let mut heard = datagrams_received(connection);
    loop {
        sleep(QUIET).await;
        let now = datagrams_received(connection);
        if now == heard && is_gone(connection.remote_address()).await && datagrams_received(connection) == heard {
            return;
        }
        heard = now;
    }
}

async fn is_gone(peer: SocketAddr) -> bool {
    for _ in 0..REFUSALS {
        match is_refused(peer).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                tracing::debug!(%peer, %error, "the peer's process cannot be probed");
                return false;
            }
        }
        sleep(BETWEEN).await;
    }
    true
}

/// Sends one datagram that is no QUIC packet (its fixed bit is 0, RFC 9000 section 17), which the peer drops unseen.
async fn is_refused(peer: SocketAddr) -> io::Result<bool> {
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(peer).await?;
    socket.send(&[0]).await?;
    match timeout(ANSWER, socket.recv(&mut [0; 1])).await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Ok(Err(error)) => Err(error),
        Ok(Ok(_)) | Err(_) => Ok(false),
    }
}

fn datagrams_received(connection: &Connection) -> u64 {
    connection.stats().udp_rx.datagrams
}

/// Silence after which the peer is asked about: more than two heartbeats.
const QUIET: Duration = Duration::from_millis(250);
/// How long an answer of the peer's host may take.
const ANSWER: Duration = Duration::from_millis(100);
/// How many refusals in a row are believed, and the pause between them: within 300 ms when the host answers at once.
const REFUSALS: usize = 3;
const BETWEEN: Duration = Duration::from_millis(90);
