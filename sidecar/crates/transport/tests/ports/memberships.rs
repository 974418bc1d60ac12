//! Links belong to a membership: those of another one are closed or refused.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use ronde_transport::{DownReason, NetworkPort, Port, Role};
use ronde_wire::SidecarIndex;
use ronde_wire::control::Transport;

use crate::harness::{
    self, CONTROL, START_TIMEOUT, bind, control, down, frame, heartbeat, identity, local, options, up,
};

harness::over_both!(
    both_sides_link_again_in_the_next_membership,
    a_side_that_has_not_entered_refuses_the_other,
    a_sidecar_that_left_the_membership_is_refused,
    a_link_that_is_being_opened_is_given_up,
);

const ONE: SidecarIndex = SidecarIndex(1);
const TWO: SidecarIndex = SidecarIndex(2);

/// Two ports of membership 1, and where both are dialled.
fn ports(over: Transport) -> (NetworkPort, NetworkPort, HashMap<SidecarIndex, Vec<SocketAddr>>) {
    let bound = [bind(over), bind(over)];
    let peers: HashMap<_, _> = [ONE, TWO].into_iter().zip(bound.iter().map(|port| vec![port.local_addr()])).collect();
    let mut started = bound.into_iter().zip([1, 2]).map(|(bound, index)| {
        let identity = identity(SidecarIndex(index));
        bound.start(identity, &local(index, CONTROL), peers.clone(), options(START_TIMEOUT)).expect("a good identity")
    });
    let (one, two) = (started.next().expect("two"), started.next().expect("two"));
    drop(started);
    (one, two, peers)
}

async fn link(one: &mut NetworkPort, two: &mut NetworkPort) {
    one.open(TWO, Role::Dial);
    two.open(ONE, Role::Await);
    up(one, 2).await;
    up(two, 1).await;
}

async fn both_sides_link_again_in_the_next_membership(over: Transport) {
    let (mut one, mut two, peers) = ports(over);
    link(&mut one, &mut two).await;
    one.send(TWO, control(1)).expect("a link");
    one.enter(2, peers.clone());
    assert!(one.send(TWO, control(2)).is_err(), "its link is closed");
    // What was sent before arrives.
    assert_eq!(frame(&mut two, 1).await, heartbeat(1));
    let reason = down(&mut two, 1).await;
    assert!(matches!(&reason, DownReason::ClosedByPeer(text) if text.contains("membership 2")), "{reason:?}");
    two.enter(2, peers);
    link(&mut one, &mut two).await;
    one.send(TWO, control(3)).expect("a link");
    assert_eq!(frame(&mut two, 1).await, heartbeat(3));
}

async fn a_side_that_has_not_entered_refuses_the_other(over: Transport) {
    let (mut one, mut two, peers) = ports(over);
    one.enter(2, peers.clone());
    one.open(TWO, Role::Dial);
    let reason = down(&mut one, 2).await;
    let text = "sidecar 1 takes part in membership 2 of the job, but sidecar 2 in membership 1";
    assert!(matches!(&reason, DownReason::Refused(why) if why.contains(text)), "{reason:?}");
    // The later one accepts nobody of the earlier one either.
    two.open(ONE, Role::Dial);
    let reason = down(&mut two, 1).await;
    assert!(matches!(&reason, DownReason::Refused(why) if why.contains("in membership 1")), "{reason:?}");
    two.enter(2, peers);
    link(&mut one, &mut two).await;
}

async fn a_sidecar_that_left_the_membership_is_refused(over: Transport) {
    let (mut one, mut two, mut peers) = ports(over);
    link(&mut one, &mut two).await;
    peers.remove(&TWO);
    one.enter(2, peers);
    down(&mut two, 1).await;
    two.open(ONE, Role::Dial);
    let reason = down(&mut two, 1).await;
    assert!(matches!(&reason, DownReason::Refused(why) if why.contains("is not a peer of sidecar 1")), "{reason:?}");
}

async fn a_link_that_is_being_opened_is_given_up(over: Transport) {
    let (mut one, mut two, peers) = ports(over);
    // Nobody answers at this address.
    let nowhere = HashMap::from([(TWO, vec![SocketAddr::from(([127, 0, 0, 1], 1))])]);
    one.enter(2, nowhere);
    one.open(TWO, Role::Dial);
    tokio::time::sleep(Duration::from_millis(50)).await;
    one.enter(3, peers.clone());
    two.enter(3, peers);
    link(&mut one, &mut two).await;
}
