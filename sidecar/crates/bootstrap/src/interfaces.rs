//! The addresses of a host's interfaces, which of them a job uses, and in which order those of a peer are tried.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use nix::net::if_::InterfaceFlags;
use ronde_wire::limits::ADDRESSES_MAX;
use serde::{Deserialize, Serialize};

use crate::messages::Peer;

/// An address, the interface that has it, and the length of its network's prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterfaceAddress {
    /// The interface.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
    /// How many of its bits name the network.
    pub prefix_length: u8,
}

impl InterfaceAddress {
    /// Whether an address is in the same network.
    fn has_neighbour(&self, other: IpAddr) -> bool {
        IpNet::new(self.address, self.prefix_length).is_ok_and(|network| network.contains(&other))
    }

    /// Whether the interface joins virtual machines or containers of one host, by the names that their makers give. Such
    /// an interface may still lead to others, so this decides about the order only.
    fn is_bridge(&self) -> bool {
        BRIDGES.iter().any(|prefix| self.interface.starts_with(prefix))
    }
}

impl fmt::Display for InterfaceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.address, self.interface)
    }
}

/// The addresses of this host's interfaces that are up: those of other hosts' concern first, then bridges, the loopback
/// last. Addresses that mean nothing without their interface (link-local ones) are left out.
pub fn of_this_host() -> Vec<InterfaceAddress> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let mut found: Vec<InterfaceAddress> = interfaces
        .filter(|interface| interface.flags.contains(InterfaceFlags::IFF_UP))
        .filter_map(|interface| {
            let address = ip_of(interface.address.as_ref()?)?;
            let prefix_length = interface.netmask.as_ref().and_then(ip_of).map_or(0, prefix_length);
            Some(InterfaceAddress { interface: interface.interface_name, address, prefix_length })
        })
        .filter(|found| match found.address {
            IpAddr::V4(v4) => !v4.is_link_local(),
            IpAddr::V6(v6) => !v6.is_unicast_link_local(),
        })
        .collect();
    found.sort_by_key(|found| (found.address.is_loopback(), found.is_bridge(), found.address.is_ipv6()));
    found
}

/// A name of an interface, `*` at its end for any rest, or a network; one address is a network as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// An interface by its name, or by the beginning of it.
    Interface {
        /// The name, without the star.
        name: String,
        /// Whether there was a star.
        any_rest: bool,
    },
    /// All addresses of a network.
    Network(IpNet),
}

impl Selector {
    fn matches(&self, candidate: &InterfaceAddress) -> bool {
        match self {
            Self::Interface { name, any_rest: false } => candidate.interface == *name,
            Self::Interface { name, any_rest: true } => candidate.interface.starts_with(name.as_str()),
            Self::Network(network) => network.contains(&candidate.address),
        }
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.contains('/') || text.parse::<IpAddr>().is_ok() {
            let wrong = || format!("{text:?} is no network, for example 10.1.0.0/16 or fd00:1::/64");
            return network(text).map(Self::Network).ok_or_else(wrong);
        }
        let name = text.strip_suffix('*').unwrap_or(text);
        // Linux allows any other byte in the name of an interface; IFNAMSIZ has room for 15.
        let is_name = !text.is_empty() && name.len() <= 15 && !name.contains(|c: char| c.is_whitespace() || c == '*');
        if !is_name {
            return Err(format!("{text:?} is no interface (eth0, ib*) and no network (10.1.0.0/16, fd00:1::/64)"));
        }
        Ok(Self::Interface { name: name.to_owned(), any_rest: name.len() < text.len() })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface { name, any_rest } => write!(f, "{name}{}", if *any_rest { "*" } else { "" }),
            Self::Network(network) => network.fmt(f),
        }
    }
}

/// Reads a network; a single address is one, too. An IPv4 address may be written as an IPv6 one.
fn network(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
    let address = address.parse::<IpAddr>().ok()?.to_canonical();
    match length {
        Some(length) => IpNet::new(address, length.parse().ok()?).ok(),
        None => Some(address.into()),
    }
}

/// The addresses of a host that a job may use: those that the first selector means which means any. Without selectors all
/// but the loopback, and that too when there is nothing else.
pub fn select(found: &[InterfaceAddress], selectors: &[Selector]) -> Vec<InterfaceAddress> {
    let of = |matches: &dyn Fn(&InterfaceAddress) -> bool| -> Vec<InterfaceAddress> {
        found.iter().filter(|candidate| matches(candidate)).take(ADDRESSES_MAX).cloned().collect()
    };
    if selectors.is_empty() {
        let outside = of(&|candidate| !candidate.address.is_loopback());
        return if outside.is_empty() { of(&|_| true) } else { outside };
    }
    let mut chosen = selectors.iter().map(|selector| of(&|candidate| selector.matches(candidate)));
    chosen.find(|chosen| !chosen.is_empty()).unwrap_or_default()
}

/// Where to dial a port of a peer, best first: addresses that are this host's own cannot lead to another one and come
/// last, then bridges; of the others those in a network of this host, and IPv4. What is alike stays in its order.
pub fn routes_to(peer: &Peer, port: u16, own: &[InterfaceAddress]) -> Vec<SocketAddr> {
    if peer.addresses.is_empty() {
        return vec![SocketAddr::new(peer.control.ip(), port)];
    }
    let mut candidates: Vec<&InterfaceAddress> = peer.addresses.iter().take(ADDRESSES_MAX).collect();
    candidates.sort_by_key(|candidate| {
        let is_own = own.iter().any(|own| own.address == candidate.address);
        let is_near = own.iter().any(|own| own.has_neighbour(candidate.address));
        (is_own, candidate.is_bridge(), !is_near, candidate.address.is_ipv6())
    });
    candidates.iter().map(|candidate| SocketAddr::new(candidate.address, port)).collect()
}

fn ip_of(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

fn prefix_length(mask: IpAddr) -> u8 {
    let ones = match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    };
    u8::try_from(ones).unwrap_or(u8::MAX)
}

/// How the names of interfaces begin that container and virtual machine software makes.
const BRIDGES: [&str; 8] = ["docker", "br-", "virbr", "veth", "cni", "podman", "lxcbr", "lxdbr"];

#[cfg(test)]
mod tests {
    use super::*;

    fn at(interface: &str, address: &str) -> InterfaceAddress {
        let network = network(address).expect("a network");
        let (address, prefix_length) = (network.addr(), network.prefix_len());
        InterfaceAddress { interface: interface.to_owned(), address, prefix_length }
    }

    fn selectors(list: &str) -> Vec<Selector> {
        list.split(',').map(|item| item.parse().expect(item)).collect()
    }

    fn names(chosen: &[InterfaceAddress]) -> Vec<String> {
        chosen.iter().map(ToString::to_string).collect()
    }

    fn host() -> Vec<InterfaceAddress> {
        vec![
            at("ens5", "10.0.1.2/24"),
            at("ib0", "fd00:1::2/64"),
            at("docker0", "172.17.0.1/16"),
            at("lo", "127.0.0.1/8"),
        ]
    }

    #[test]
    fn the_first_selector_that_matches_wins() {
        assert_eq!(names(&select(&host(), &[])), ["10.0.1.2 ens5", "fd00:1::2 ib0", "172.17.0.1 docker0"]);
        for (list, chosen) in [
            ("eth0,ens5", "10.0.1.2 ens5"),
            ("ens5,ib0", "10.0.1.2 ens5"),
            ("ens*", "10.0.1.2 ens5"),
            ("10.0.0.0/16", "10.0.1.2 ens5"),
            ("10.0.1.2", "10.0.1.2 ens5"),
            ("::ffff:10.0.1.2", "10.0.1.2 ens5"),
            ("fd00::/16", "fd00:1::2 ib0"),
            ("lo", "127.0.0.1 lo"),
        ] {
            assert_eq!(names(&select(&host(), &selectors(list))), [chosen], "{list}");
        }
        for list in ["eth0", "ens", "10.0.2.0/24", "fd00:2::/64"] {
            assert_eq!(names(&select(&host(), &selectors(list))), Vec::<String>::new(), "{list}");
        }
        assert_eq!(names(&select(&host(), &selectors("0.0.0.0/0"))).len(), 3, "IPv4 alone");
        let alone = [at("lo", "127.0.0.1/8")];
        assert_eq!(select(&alone, &[]), alone, "the loopback, when there is nothing else");
    }

    #[test]
    fn text_that_is_neither_interface_nor_network_is_rejected() {
        for text in ["", "*x", "a b", "averyveryverylongname", "10.0.0.0/33", "fd00::/129", "10.0.0/8", "10.0.0.0/x"] {
            assert!(text.parse::<Selector>().is_err(), "{text:?}");
        }
        for text in ["eth0", "ib*", "10.0.0.0/8", "fd00::1/128"] {
            assert_eq!(text.parse::<Selector>().map(|selector| selector.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn near_physical_addresses_are_dialled_first_and_own_ones_last() {
        let peer = Peer {
            sidecar: 1,
            host: "beta".to_owned(),
            control: "172.17.0.1:7".parse().expect("an address"),
            lanes: Vec::new(),
            addresses: vec![
                at("docker0", "172.17.0.1/16"),
                at("virbr0", "192.168.122.1/24"),
                at("eth1", "fd00:1::3/64"),
                at("eth2", "192.168.7.3/24"),
                at("eth0", "10.0.1.3/24"),
            ],
        };
        let ways: Vec<String> = routes_to(&peer, 9, &host()).iter().map(ToString::to_string).collect();
        let expected =
            ["10.0.1.3:9", "[fd00:1::3]:9", "192.168.7.3:9", "192.168.122.1:9", "172.17.0.1:9"].map(str::to_owned);
        assert_eq!(ways, expected);
        let alone = Peer { addresses: Vec::new(), ..peer };
        assert_eq!(routes_to(&alone, 9, &host()), ["172.17.0.1:9".parse().expect("an address")]);
    }

    #[test]
    fn this_host_has_a_loopback() {
        let found = of_this_host();
        let loopback = found.iter().find(|found| found.address.is_loopback()).expect("it is always there");
        assert_eq!((loopback.interface.as_str(), loopback.prefix_length), ("lo", 8));
        assert!(found.iter().all(|found| found.address.is_ipv4() || found.prefix_length > 0), "{found:?}");
    }
}
