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
use tokio::time::{Instant, sleep, timeout};

use crate::links::canonical;

/// Returns when the peer's host says, several times in a row, that nobody listens at the peer's address.
pub(crate) async fn wait_unreachable(connection: &Connection) {
    let (mut received, mut since) = (datagrams_received(connection), Instant::now());
    loop {
        sleep(POLL_INTERVAL).await;
        let now = datagrams_received(connection);
        if now != received {
            (received, since) = (now, Instant::now());
        } else if since.elapsed() >= SILENCE_BEFORE_PROBE {
            if is_gone(canonical(connection.remote_address())).await && datagrams_received(connection) == received {
                return;
            }
            since = Instant::now();
        }
    }
}

/// Whether every one of some datagrams is answered with "port unreachable".
async fn is_gone(peer: SocketAddr) -> bool {
    for probe in 0..PROBES {
        if probe > 0 {
            sleep(PROBE_INTERVAL).await;
        }
        match is_refused(peer).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                tracing::debug!(%peer, %error, "the peer's process cannot be probed");
                return false;
            }
        }
    }
    true
}

/// Sends one datagram that is too short to be a QUIC packet (RFC 9000 section 17), which the peer drops unseen.
async fn is_refused(peer: SocketAddr) -> io::Result<bool> {
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(peer).await?;
    socket.send(&[0]).await?;
    match timeout(ANSWER_TIMEOUT, socket.recv(&mut [0; 1])).await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Ok(Err(error)) => Err(error),
        Ok(Ok(_)) | Err(_) => Ok(false),
    }
}

fn datagrams_received(connection: &Connection) -> u64 {
    connection.stats().udp_rx.datagrams
}

/// How often to look whether something was heard.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Silence after which the peer is asked about: more than two heartbeats.
const SILENCE_BEFORE_PROBE: Duration = Duration::from_millis(250);
/// How long an answer of the peer's host may take.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
/// How many refusals in a row are believed, and the pause between two: within 300 ms when the host answers at once.
const PROBES: usize = 3;
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_closed_socket_counts_as_gone() {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = socket.local_addr().expect("bound");
        // Nobody reads it, as in a process that is stopped.
        assert!(!is_gone(address).await);
        drop(socket);
        assert!(is_gone(address).await);
    }
}
