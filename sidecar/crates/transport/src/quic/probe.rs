//! Checks whether the process of a silent peer still exists.
//!
//! When a process exits, its sockets are closed, and its host answers datagrams to them with ICMP "port unreachable".
//! quinn's unconnected socket does not receive that answer, so this module sends a datagram from a connected socket. A
//! stopped or busy process keeps its socket open and passes the check.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use quinn::Connection;
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep, timeout};

use crate::links::canonical;

/// Returns when the peer's host reports several times in a row that the peer's port is unreachable.
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

/// Whether each of several probes is answered with "port unreachable".
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

/// Sends one datagram that is too short for a QUIC packet (RFC 9000 section 17), which a live peer drops.
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

/// How often to check whether packets have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Silence before the first probe: more than two heartbeats.
const SILENCE_BEFORE_PROBE: Duration = Duration::from_millis(250);
/// Limit for the wait for an answer to a probe.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
/// The number of consecutive refusals required, and the pause between probes: within 300 ms if the host answers at
/// once.
const PROBES: usize = 3;
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_closed_socket_counts_as_gone() {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = socket.local_addr().expect("bound");
        // A socket that is not read, as in a stopped process.
        assert!(!is_gone(address).await);
        drop(socket);
        assert!(is_gone(address).await);
    }
}
