//! How network links close, in addition to the tests for every transport.

use std::collections::HashMap;

use bytes::Bytes;
use ronde_transport::{DownReason, NetworkPort, Outgoing, Port, PortEvent, Role};
use ronde_wire::control::Transport;
use ronde_wire::limits::CHUNK_BYTES_MAX;
use ronde_wire::{Frame, Seq, SidecarIndex};

use crate::harness::raw::{self, RawCa};
use crate::harness::{
    self, CONTROL, LANE, START_TIMEOUT, chunk, down, event, frame, identity, local, options, until, up,
};

harness::over_both!(
    a_shutdown_arrives_after_everything_that_was_sent,
    path_and_security_are_reported_for_an_open_link,
    a_slow_owner_exerts_backpressure_and_loses_nothing,
);

async fn pair(over: Transport) -> (NetworkPort, NetworkPort) {
    let (one, two) = (harness::bind_for(over, LANE), harness::bind_for(over, LANE));
    let addresses = [vec![one.local_addr()], vec![two.local_addr()]];
    let peers: HashMap<_, _> = (0..).map(SidecarIndex).zip(addresses).collect();
    let start = |bound: ronde_transport::BoundPort, me: u32| {
        bound
            .start(identity(SidecarIndex(me)), &local(me, LANE), peers.clone(), options(START_TIMEOUT))
            .expect("starts")
    };
    let (mut one, mut two) = (start(one, 0), start(two, 1));
    one.open(SidecarIndex(1), Role::Dial);
    up(&mut one, 1).await;
    up(&mut two, 0).await;
    (one, two)
}

async fn a_shutdown_arrives_after_everything_that_was_sent(over: Transport) {
    let (mut one, mut two) = pair(over).await;
    let data = Bytes::from(vec![5; CHUNK_BYTES_MAX]);
    for seq in 0..8 {
        one.send(SidecarIndex(1), Outgoing::Chunk(chunk(seq, data.clone()))).expect("below the bound");
    }
    let receive = async {
        for seq in 0..8 {
            assert_eq!(frame(&mut two, 0).await.header.seq, Seq(seq));
        }
        down(&mut two, 0).await
    };
    let (reason, ()) = tokio::join!(receive, one.shutdown("the job is done"));
    assert_eq!(reason, DownReason::ClosedByPeer("the job is done".to_owned()));
}

async fn path_and_security_are_reported_for_an_open_link(over: Transport) {
    let (one, _two) = pair(over).await;
    let path = one.path(SidecarIndex(1)).expect("it is up");
    assert!(path.sent_bytes > 0 && path.received_bytes > 0, "{path:?}");
    let datagrams = path.quic.map(|quic| quic.datagram_bytes >= 1_200 && quic.packets_sent > 0);
    assert_eq!(datagrams, (over == Transport::Quic).then_some(true));
    assert_eq!(path.carrier, over.carrier(LANE));
    assert_eq!(one.security(SidecarIndex(1)).expect("it is up").carrier, over.carrier(LANE));
    assert_eq!(one.path(SidecarIndex(2)), None);
}

async fn a_slow_owner_exerts_backpressure_and_loses_nothing(over: Transport) {
    const CHUNKS: u64 = 120;
    let (mut one, mut two) = pair(over).await;
    let data = Bytes::from(vec![9; CHUNK_BYTES_MAX]);
    for seq in 0..CHUNKS {
        one.send(SidecarIndex(1), Outgoing::Chunk(chunk(seq, data.clone()))).expect("below the bound");
    }
    // The receiver's inbox fills, then its flow control window; the rest stays with the sender.
    until(|| two.stats().opened_bytes > 64 << 20).await;
    for seq in 0..CHUNKS {
        assert_eq!(frame(&mut two, 0).await.header.seq, Seq(seq));
    }
}

#[tokio::test]
async fn a_peer_that_connects_again_replaces_its_link() {
    let ca = RawCa::new();
    let peers = HashMap::from([(SidecarIndex(1), Vec::new())]);
    let started =
        harness::bind(Transport::Quic).start(ca.identity(0), &local(0, CONTROL), peers, options(START_TIMEOUT));
    let mut port = started.expect("starts");
    let hello = local(1, CONTROL).hello(SidecarIndex(1));
    let (first, _send, _recv) = raw::greet(port.local_addr(), ca.good(1), &hello).await;
    up(&mut port, 1).await;
    let (_second, mut send, _recv) = raw::greet(port.local_addr(), ca.good(1), &hello).await;
    assert_eq!(down(&mut port, 1).await, DownReason::Lost("the peer connected again".to_owned()));
    up(&mut port, 1).await;
    assert_eq!(raw::reason(&first.closed().await), "the same peer connected again");
    let good = Frame::admitted(ronde_wire::Epoch(1), Seq(4));
    send.write_all(&good.header.encode()).await.expect("an open stream");
    assert!(matches!(event(&mut port).await, PortEvent::Frame { frame, .. } if frame == good));
}
