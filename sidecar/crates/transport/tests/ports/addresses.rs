//! Peers with several addresses, some of which are unreachable or belong to another sidecar.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use ronde_transport::{BoundPort, DownReason, NetworkPort, Port, Role, Routes, SocketOptions};
use ronde_wire::SidecarIndex;
use ronde_wire::control::{Carrier, Transport};

use crate::harness::{
    self, CONTROL, START_TIMEOUT, bind, control, down, frame, heartbeat, identity, local, options, up,
};

harness::over_both!(
    the_peer_is_found_among_silent_and_foreign_addresses,
    two_good_addresses_make_one_link,
    the_last_working_address_is_tried_first,
    every_failed_address_is_named_with_its_error,
    connections_to_other_local_addresses_are_ignored,
);

const ONE: SidecarIndex = SidecarIndex(1);

/// Binds to the wildcard address of both address families.
fn bind_everywhere(over: Transport) -> BoundPort {
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    NetworkPort::bind(any, over, CONTROL, &SocketOptions::default()).expect("a free port")
}

fn start(bound: BoundPort, sidecar: u32, peers: &[(u32, Vec<SocketAddr>)], start_timeout: Duration) -> NetworkPort {
    let peers: HashMap<_, _> = peers.iter().map(|(peer, addresses)| (SidecarIndex(*peer), addresses.clone())).collect();
    let started = bound.start(identity(SidecarIndex(sidecar)), &local(sidecar, CONTROL), peers, options(start_timeout));
    started.expect("a good identity")
}

/// A listener that accepts connections and never answers.
fn silent(over: Transport) -> (Box<dyn Send>, SocketAddr) {
    let at = (Ipv4Addr::LOCALHOST, 0);
    match over.carrier(CONTROL) {
        Carrier::Quic => {
            let socket = UdpSocket::bind(at).expect("a free port");
            let address = socket.local_addr().expect("bound");
            (Box::new(socket), address)
        }
        Carrier::Tls => {
            let listener = TcpListener::bind(at).expect("a free port");
            let address = listener.local_addr().expect("bound");
            (Box::new(listener), address)
        }
    }
}

/// The same port at 127.0.0.`last`.
fn at(last: u8, bound: &BoundPort) -> SocketAddr {
    (Ipv4Addr::new(127, 0, 0, last), bound.local_addr().port()).into()
}

async fn the_peer_is_found_among_silent_and_foreign_addresses(over: Transport) {
    // A busy machine may find the peer before the foreign address has answered.
    for _ in 0..5 {
        match refusals_until_the_peer_is_found(over).await {
            0 => {}
            // Sidecar 2 is not sidecar 1, and a port does not talk to itself.
            refusals => return assert_eq!(refusals, 1),
        }
    }
    panic!("the foreign address never refuses");
}

async fn refusals_until_the_peer_is_found(over: Transport) -> u64 {
    let (_silent, silent) = silent(over);
    let (zero, one, two) = (bind_everywhere(over), bind_everywhere(over), bind(over));
    let real = at(1, &one);
    let own = at(1, &zero);
    let addresses = vec![silent, two.local_addr(), own, real];
    let routes = Routes::default();
    let _other = start(two, 2, &[(0, vec![])], START_TIMEOUT);
    let mut peer = start(one, 1, &[(0, vec![])], START_TIMEOUT);
    let mut port = start(zero.with_routes(routes.clone()), 0, &[(1, addresses)], START_TIMEOUT);
    port.open(ONE, Role::Dial);
    up(&mut port, 1).await;
    up(&mut peer, 0).await;
    assert_eq!(routes.to(ONE), Some(real.ip()), "the next port begins there");
    assert_eq!(port.path(ONE).map(|path| path.peer_address), Some(real));
    port.stats().refusals
}

async fn two_good_addresses_make_one_link(over: Transport) {
    let (zero, one) = (bind(over), bind_everywhere(over));
    let addresses = vec![at(1, &one), at(2, &one), at(3, &one)];
    let mut peer = start(one, 1, &[(0, vec![])], START_TIMEOUT);
    let mut port = start(zero, 0, &[(1, addresses)], START_TIMEOUT);
    port.open(ONE, Role::Dial);
    up(&mut port, 1).await;
    up(&mut peer, 0).await;
    for number in 0..100 {
        port.send(ONE, control(number)).expect("the link is up");
        assert_eq!(frame(&mut peer, 0).await, heartbeat(number));
    }
    assert_eq!((port.stats().links_opened, peer.stats().links_opened), (1, 1));
}

async fn the_last_working_address_is_tried_first(over: Transport) {
    let (zero, one) = (bind(over), bind_everywhere(over));
    let (first, second) = (at(2, &one), at(3, &one));
    let _peer = start(one, 1, &[(0, vec![])], START_TIMEOUT);
    let routes = Routes::default();
    let mut port = start(zero.with_routes(routes.clone()), 0, &[(1, vec![second])], START_TIMEOUT);
    port.open(ONE, Role::Dial);
    up(&mut port, 1).await;
    let mut next = start(bind(over).with_routes(routes), 0, &[(1, vec![first, second])], START_TIMEOUT);
    next.open(ONE, Role::Dial);
    up(&mut next, 1).await;
    assert_eq!(next.path(ONE).map(|path| path.peer_address), Some(second));
}

async fn every_failed_address_is_named_with_its_error(over: Transport) {
    let (zero, two) = (bind(over), bind(over));
    let addresses = vec![two.local_addr(), "[::1]:9".parse().expect("an address")];
    let _other = start(two, 2, &[(0, vec![])], START_TIMEOUT);
    let mut port = start(zero, 0, &[(1, addresses)], START_TIMEOUT);
    port.open(ONE, Role::Dial);
    // This fails immediately: the other sidecar cannot become sidecar 1, and this socket has no IPv6.
    let DownReason::Refused(text) = down(&mut port, 1).await else { panic!("refused") };
    assert!(text.contains("sidecar/2's, expected"), "{text}");
    let (_silent, address) = silent(over);
    // A busy machine may finish no attempt within the shorter times.
    for seconds in [1, 4, 16] {
        let mut port = start(bind(over), 0, &[(1, vec![address])], Duration::from_secs(seconds));
        port.open(ONE, Role::Dial);
        let DownReason::Unanswered(text) = down(&mut port, 1).await else { panic!("unanswered") };
        let silence = format!("sidecar 1 did not answer within {seconds} s: ");
        match text.strip_prefix(&silence) {
            Some("no attempt was finished") => {}
            last => return assert_eq!(last, Some(format!("{address}: no answer").as_str()), "{text}"),
        }
    }
    panic!("no attempt is ever finished");
}

async fn connections_to_other_local_addresses_are_ignored(over: Transport) {
    let one = bind_everywhere(over);
    let (used, other) = (at(2, &one), at(3, &one));
    let peer = start(one.accept_only_at(vec![used.ip()]), 1, &[(0, vec![])], START_TIMEOUT);
    let mut port = start(bind(over), 0, &[(1, vec![other])], Duration::from_secs(1));
    port.open(ONE, Role::Dial);
    assert!(matches!(down(&mut port, 1).await, DownReason::Unanswered(_)));
    assert_eq!(peer.stats().links_opened, 0);
    let mut port = start(bind(over), 0, &[(1, vec![other, used])], START_TIMEOUT);
    port.open(ONE, Role::Dial);
    up(&mut port, 1).await;
    assert_eq!(port.path(ONE).map(|path| path.peer_address), Some(used));
}
