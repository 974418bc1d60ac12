//! The addresses of hosts: which hosts are local, and at which address each host's sidecar is reached.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, socket};
use ronde_bootstrap::interfaces::InterfaceAddress;
use tokio::net::lookup_host;
use tokio::time::timeout;

use super::hosts::{Host, LOCAL};

/// The address of sidecars when all hosts are local.
pub(super) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Whether the launcher runs on a host.
pub(super) fn is_local(host: &Host) -> bool {
    match host.address() {
        Some(address) => address.is_loopback() || is_own(address),
        None => host.name == LOCAL || is_hostname(&host.name),
    }
}

/// Whether the launcher runs on the host with this name.
pub(super) fn is_local_name(name: &str) -> bool {
    is_local(&Host { name: name.to_owned(), slots: std::num::NonZeroU32::MIN })
}

/// The loopback as an address of an interface.
pub(super) fn loopback() -> InterfaceAddress {
    InterfaceAddress { interface: "lo".to_owned(), address: LOOPBACK, prefix_length: 8 }
}

/// Moves `preferred` addresses to the front: those to which the host's name resolves, as the user gave it.
pub(super) fn put_first(addresses: &mut [InterfaceAddress], preferred: &[IpAddr]) {
    addresses.sort_by_key(|own| !preferred.contains(&own.address));
}

/// Resolves a host's name for a bounded time; returns no address when that fails, as for an alias of the remote shell.
pub(super) async fn resolve(host: Host) -> Vec<IpAddr> {
    if let Some(address) = host.address() {
        return vec![address];
    }
    let Ok(Ok(found)) = timeout(RESOLVE_WAIT, lookup_host((host.name.as_str(), 0))).await else { return Vec::new() };
    found.map(|address| address.ip().to_canonical()).collect()
}

/// The source address of packets from this host to `peer`. Nothing is sent, and nobody but the peer could send to the socket.
pub(super) fn towards(peer: IpAddr) -> Option<IpAddr> {
    let socket = UdpSocket::from(socket_for(peer, SockType::Datagram)?);
    socket.connect(SocketAddr::new(peer, DISCARD_PORT)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Whether an address is local: only then binding it succeeds. Nobody can connect to a socket that does not listen.
fn is_own(address: IpAddr) -> bool {
    let bound = |socket: OwnedFd| bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(address, 0)));
    socket_for(address, SockType::Stream).is_some_and(|socket| bound(socket).is_ok())
}

/// A socket of the address's family, not bound.
fn socket_for(address: IpAddr, kind: SockType) -> Option<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    socket(family, kind, SockFlag::SOCK_CLOEXEC, None).ok()
}

fn is_hostname(name: &str) -> bool {
    let own = nix::unistd::gethostname().map(|own| own.to_string_lossy().into_owned()).unwrap_or_default();
    let short = own.split('.').next().unwrap_or_default();
    !own.is_empty() && (name == own || name == short)
}

const DISCARD_PORT: u16 = 9;
/// The longest wait for an answer about a name.
const RESOLVE_WAIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn addresses_that_a_name_stands_for_come_first() {
        let at = |text: &str| InterfaceAddress { interface: "e".into(), address: address(text), prefix_length: 24 };
        let mut own = [at("10.0.0.2"), at("10.1.0.2"), at("10.2.0.2")];
        put_first(&mut own, &[address("203.0.113.1"), address("10.1.0.2")]);
        assert_eq!(own, [at("10.1.0.2"), at("10.0.0.2"), at("10.2.0.2")]);
    }

    #[test]
    fn this_host_is_recognized_by_its_names() {
        let is_local = |name: &str| is_local(&Host { name: name.into(), slots: std::num::NonZeroU32::MIN });
        for name in ["localhost", "127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"] {
            assert!(is_local(name), "{name}");
        }
        for name in ["192.0.2.123", "nowhere.invalid"] {
            assert!(!is_local(name), "{name}");
        }
    }

    #[test]
    fn the_route_to_this_host_is_the_loopback() {
        assert_eq!(towards(LOOPBACK), Some(LOOPBACK));
    }
}
