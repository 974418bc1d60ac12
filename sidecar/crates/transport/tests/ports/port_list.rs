//! One list of tests for every transport.

use std::time::Duration;

use bytes::Bytes;
use ronde_transport::{DownReason, Outgoing, PortEvent, Role, SendError};
use ronde_wire::control::{Hello, Transport};
use ronde_wire::frame::{Chunk, HEADER_BYTES};
use ronde_wire::limits::CHUNK_BYTES_MAX;
use ronde_wire::{Epoch, Frame, FrameHeader, FrameKind, Incarnation, Lane, Seq, SidecarIndex};
use tokio::time::sleep;

use crate::harness::{
    ABSENT, CONTROL, LANE, Maker, START_TIMEOUT, any_event, chunk, control, down, event, frame, frame_or_down,
    heartbeat, hello, pair, up,
};

macro_rules! for_every_transport {
    ($($test:ident),+ $(,)?) => {
        mod memory { $(#[tokio::test] async fn $test() { super::$test(crate::harness::memory).await; })+ }
        mod quic { $(#[tokio::test] async fn $test() { super::$test(crate::harness::quic).await; })+ }
        mod tls { $(#[tokio::test] async fn $test() { super::$test(crate::harness::tls).await; })+ }
    };
}

for_every_transport!(
    hellos_are_exchanged,
    an_acceptor_that_was_not_asked_gets_the_link_too,
    both_may_dial,
    of_two_dials_neither_loses_a_message,
    messages_given_before_the_link_is_up_arrive_first,
    frames_keep_their_order_both_ways,
    chunks_of_the_greatest_length_arrive_whole,
    many_peers_talk_to_one,
    close_sends_its_reason_after_queued_messages,
    a_closed_link_can_be_opened_again,
    peers_notice_a_dropped_port,
    a_peer_that_never_comes_is_down,
    a_full_queue_is_an_error,
    without_a_link_nothing_is_sent,
    an_oversized_frame_ends_the_link,
    a_chunk_of_another_lane_ends_the_link,
    a_chunk_on_a_control_link_ends_it,
    a_second_hello_ends_the_link,
    another_wire_version_is_refused,
    another_planner_version_is_refused,
    another_purpose_is_refused,
    another_job_is_refused,
    a_hello_with_another_index_is_refused,
    another_incarnation_of_a_peer_is_refused,
    a_replacement_of_nothing_is_refused,
    chunks_that_have_left_are_reported,
    both_sides_count,
);

async fn hellos_are_exchanged(make: Maker) {
    let hellos = [hello(0, LANE), hello(1, LANE)];
    let mut ports = make(&hellos, START_TIMEOUT).ports;
    ports[1].open(SidecarIndex(0), Role::Await);
    ports[0].open(SidecarIndex(1), Role::Dial);
    ports[0].open(SidecarIndex(1), Role::Dial);
    // The port sets its own transport in the hello.
    for (at, from) in [(0, 1), (1, 0)] {
        let received = up(&mut *ports[at], from).await;
        assert_eq!(Hello { transport: Transport::Auto, ..received }, hellos[1 - at].1);
    }
}

async fn an_acceptor_that_was_not_asked_gets_the_link_too(make: Maker) {
    let mut ports = make(&[hello(0, CONTROL), hello(1, CONTROL)], START_TIMEOUT).ports;
    ports[0].open(SidecarIndex(1), Role::Dial);
    up(&mut *ports[1], 0).await;
    ports[1].open(SidecarIndex(0), Role::Await);
    ports[1].send(SidecarIndex(0), control(7)).expect("there is a link");
    up(&mut *ports[0], 1).await;
    assert_eq!(frame(&mut *ports[0], 1).await, heartbeat(7));
}

async fn both_may_dial(make: Maker) {
    let mut ports = make(&[hello(0, CONTROL), hello(1, CONTROL)], START_TIMEOUT).ports;
    ports[0].open(SidecarIndex(1), Role::Dial);
    ports[1].open(SidecarIndex(0), Role::Dial);
    up(&mut *ports[0], 1).await;
    up(&mut *ports[1], 0).await;
    ports[0].send(SidecarIndex(1), control(1)).expect("there is a link");
    ports[1].send(SidecarIndex(0), control(2)).expect("there is a link");
    assert_eq!(frame(&mut *ports[0], 1).await, heartbeat(2));
    assert_eq!(frame(&mut *ports[1], 0).await, heartbeat(1));
}

/// Whichever dial is kept, and however far the other one is: one link comes up, with what was queued for it.
async fn of_two_dials_neither_loses_a_message(make: Maker) {
    for delay in (0..40).map(|step| Duration::from_micros(100 * step)) {
        let mut ports = make(&[hello(0, LANE), hello(1, LANE)], START_TIMEOUT).ports;
        // The link of the lower index takes precedence, so the other one dials first.
        for (at, peer) in [(1, 0), (0, 1)] {
            ports[at].open(SidecarIndex(peer), Role::Dial);
            ports[at].send(SidecarIndex(peer), Outgoing::Chunk(chunk(7, Bytes::new()))).expect("a link was asked for");
            sleep(delay).await;
        }
        for (at, peer) in [(1, 0), (0, 1)] {
            up(&mut *ports[at], peer).await;
            let received = frame_or_down(&mut *ports[at]).await.expect("the link stays up");
            assert_eq!(Chunk::from_frame(received).expect("a chunk"), chunk(7, Bytes::new()), "after {delay:?}");
        }
    }
}

async fn messages_given_before_the_link_is_up_arrive_first(make: Maker) {
    let mut ports = make(&[hello(0, CONTROL), hello(1, CONTROL)], START_TIMEOUT).ports;
    ports[1].open(SidecarIndex(0), Role::Await);
    ports[1].send(SidecarIndex(0), control(1)).expect("a link was asked for");
    ports[0].open(SidecarIndex(1), Role::Dial);
    ports[0].send(SidecarIndex(1), control(1)).expect("a link was asked for");
    for at in [0, 1] {
        up(&mut *ports[at], 1 - u32::try_from(at).expect("0 or 1")).await;
    }
    ports[0].send(SidecarIndex(1), control(2)).expect("there is a link");
    assert_eq!(frame(&mut *ports[0], 1).await, heartbeat(1));
    assert_eq!(frame(&mut *ports[1], 0).await, heartbeat(1));
    assert_eq!(frame(&mut *ports[1], 0).await, heartbeat(2));
}

/// A byte that depends on every byte of a number.
fn pattern(number: u64) -> u8 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0]
}

async fn frames_keep_their_order_both_ways(make: Maker) {
    const FRAMES: u64 = 2_000;
    let (mut one, mut two) = pair(make, LANE).await;
    let message = |number: u64| {
        let length = usize::try_from(number * 37 % 5_000).expect("small");
        Outgoing::Chunk(chunk(number, Bytes::from(vec![pattern(number); length])))
    };
    for number in 0..FRAMES {
        one.send(SidecarIndex(1), message(number)).expect("far below the bound");
        two.send(SidecarIndex(0), message(number)).expect("far below the bound");
    }
    for (port, from) in [(&mut one, 1), (&mut two, 0)] {
        for number in 0..FRAMES {
            let received = Chunk::from_frame(frame(&mut **port, from).await).expect("a chunk");
            let Outgoing::Chunk(sent) = message(number) else { unreachable!("made above") };
            assert_eq!(received, sent);
        }
    }
}

async fn chunks_of_the_greatest_length_arrive_whole(make: Maker) {
    let (mut one, mut two) = pair(make, LANE).await;
    let data: Bytes = (0..CHUNK_BYTES_MAX as u64).map(pattern).collect();
    for seq in 0..16 {
        one.send(SidecarIndex(1), Outgoing::Chunk(chunk(seq, data.clone()))).expect("below the bound");
    }
    for seq in 0..16 {
        let received = Chunk::from_frame(frame(&mut *two, 0).await).expect("a chunk");
        assert_eq!(received, chunk(seq, data.clone()));
    }
}

async fn many_peers_talk_to_one(make: Maker) {
    const PEERS: u32 = 8;
    let hellos: Vec<_> = (0..=PEERS).map(|sidecar| hello(sidecar, CONTROL)).collect();
    let mut ports = make(&hellos, START_TIMEOUT).ports;
    for sidecar in 1..=PEERS {
        let port = &mut ports[sidecar as usize];
        port.open(SidecarIndex(0), Role::Dial);
        for number in 0..10 {
            port.send(SidecarIndex(0), control(u64::from(sidecar) * 100 + number)).expect("a link was asked for");
        }
    }
    let mut next = vec![0; PEERS as usize + 1];
    while next[1..].iter().any(|number| *number < 10) {
        match event(&mut *ports[0]).await {
            PortEvent::Up { .. } => {}
            PortEvent::Frame { from, frame } => {
                let number = &mut next[from.index()];
                assert_eq!(frame, heartbeat(u64::from(from.0) * 100 + *number));
                *number += 1;
            }
            other => panic!("{other:?} instead of a frame"),
        }
    }
}

async fn close_sends_its_reason_after_queued_messages(make: Maker) {
    let (mut one, mut two) = pair(make, CONTROL).await;
    for number in 0..100 {
        one.send(SidecarIndex(1), control(number)).expect("below the bound");
    }
    one.close(SidecarIndex(1), "the job is done");
    assert_eq!(one.send(SidecarIndex(1), control(0)), Err(SendError::NoLink(SidecarIndex(1))));
    for number in 0..100 {
        assert_eq!(frame(&mut *two, 0).await, heartbeat(number));
    }
    assert_eq!(down(&mut *two, 0).await, DownReason::ClosedByPeer("the job is done".to_owned()));
    assert_eq!(two.send(SidecarIndex(0), control(0)), Err(SendError::NoLink(SidecarIndex(0))));
}

async fn a_closed_link_can_be_opened_again(make: Maker) {
    let (mut one, mut two) = pair(make, CONTROL).await;
    two.close(SidecarIndex(0), "once more");
    assert_eq!(down(&mut *one, 1).await, DownReason::ClosedByPeer("once more".to_owned()));
    one.open(SidecarIndex(1), Role::Dial);
    up(&mut *one, 1).await;
    up(&mut *two, 0).await;
    two.send(SidecarIndex(0), control(5)).expect("there is a link");
    assert_eq!(frame(&mut *one, 1).await, heartbeat(5));
}

async fn peers_notice_a_dropped_port(make: Maker) {
    let (mut one, two) = pair(make, CONTROL).await;
    drop(two);
    assert_eq!(down(&mut *one, 1).await, DownReason::ClosedByPeer("the port was closed".to_owned()));
}

async fn a_peer_that_never_comes_is_down(make: Maker) {
    let mut world = make(&[hello(0, CONTROL), hello(1, CONTROL)], Duration::from_millis(300));
    let port = &mut *world.ports[0];
    port.open(ABSENT, Role::Dial);
    assert!(matches!(down(port, ABSENT.0).await, DownReason::Unanswered(_)));
    port.open(SidecarIndex(1), Role::Await);
    assert!(matches!(down(port, 1).await, DownReason::Lost(_)));
}

async fn a_full_queue_is_an_error(make: Maker) {
    let mut ports = make(&[hello(0, LANE), hello(1, LANE)], START_TIMEOUT).ports;
    // The peer never dials, so nothing leaves the queue.
    ports[0].open(SidecarIndex(1), Role::Await);
    let data = Bytes::from(vec![0; CHUNK_BYTES_MAX]);
    let full = (0..1_000).find_map(|seq| {
        ports[0].send(SidecarIndex(1), Outgoing::Chunk(chunk(seq, data.clone()))).err().map(|error| (seq, error))
    });
    let Some((sent, SendError::Full { peer, queued_bytes, limit_bytes })) = full else { panic!("{full:?}") };
    assert_eq!(peer, SidecarIndex(1));
    assert!(sent >= 128, "two windows of the largest chunks fit, not only {sent}");
    assert!(queued_bytes <= limit_bytes && queued_bytes + CHUNK_BYTES_MAX + HEADER_BYTES * 2 > limit_bytes);
}

async fn without_a_link_nothing_is_sent(make: Maker) {
    let mut ports = make(&[hello(0, CONTROL), hello(1, CONTROL)], START_TIMEOUT).ports;
    assert_eq!(ports[0].send(SidecarIndex(1), control(0)), Err(SendError::NoLink(SidecarIndex(1))));
    ports[0].open(SidecarIndex(1), Role::Await);
    ports[0].close(SidecarIndex(1), "not wanted");
    assert_eq!(ports[0].send(SidecarIndex(1), control(0)), Err(SendError::NoLink(SidecarIndex(1))));
}

/// Sends a message that the peer must reject, after a valid frame.
async fn violate(make: Maker, purpose: ronde_wire::control::Purpose, bad: Outgoing) -> String {
    let (mut one, mut two) = pair(make, purpose).await;
    let good = Frame::admitted(Epoch(1), Seq(9));
    one.send(SidecarIndex(1), Outgoing::Frame(good.clone())).expect("below the bound");
    one.send(SidecarIndex(1), bad).expect("below the bound");
    assert_eq!(frame(&mut *two, 0).await, good);
    let Err(DownReason::Protocol(seen)) = frame_or_down(&mut *two).await else { panic!("the frame was let in") };
    assert_eq!(down(&mut *one, 1).await, DownReason::ClosedByPeer(format!("protocol violation: {seen}")));
    seen
}

async fn an_oversized_frame_ends_the_link(make: Maker) {
    let large = Outgoing::Chunk(chunk(1, Bytes::from(vec![0; CHUNK_BYTES_MAX + 1])));
    assert!(violate(make, LANE, large).await.contains("may have"));
}

async fn a_chunk_of_another_lane_ends_the_link(make: Maker) {
    let mut other = chunk(1, Bytes::from_static(b"data"));
    other.header.lane = Lane(4);
    assert_eq!(violate(make, LANE, Outgoing::Chunk(other)).await, "a chunk of lane 4 arrived on lane 3");
}

async fn a_chunk_on_a_control_link_ends_it(make: Maker) {
    let chunk = Outgoing::Chunk(chunk(1, Bytes::from_static(b"data")));
    assert!(violate(make, CONTROL, chunk).await.contains("does not belong"));
}

async fn a_second_hello_ends_the_link(make: Maker) {
    let payload = ronde_wire::control::encode(&hello(0, CONTROL).1);
    let length = u32::try_from(payload.len()).expect("small");
    let header = FrameHeader { kind: FrameKind::Hello, flags: 0, length, epoch: Epoch(0), seq: Seq(0) };
    assert!(violate(make, CONTROL, Outgoing::Frame(Frame { header, payload })).await.contains("does not belong"));
}

/// Has sidecar 0 dial sidecar 1 with these hellos, and returns why each side rejects the other.
async fn refused(make: Maker, hellos: [(SidecarIndex, ronde_wire::control::Hello); 2]) -> String {
    let mut ports = make(&hellos, START_TIMEOUT).ports;
    ports[1].open(SidecarIndex(0), Role::Await);
    ports[0].open(SidecarIndex(1), Role::Dial);
    let DownReason::Refused(there) = down(&mut *ports[1], 0).await else { panic!("not refused there") };
    let DownReason::Refused(here) = down(&mut *ports[0], 1).await else { panic!("not refused here") };
    assert!(here.ends_with(&there), "{here:?} does not carry {there:?}");
    assert_eq!((ports[0].stats().refusals, ports[1].stats().refusals), (1, 1));
    assert_eq!((ports[0].stats().links_opened, ports[1].stats().links_opened), (0, 0));
    there
}

async fn another_wire_version_is_refused(make: Maker) {
    let mut newer = hello(0, CONTROL);
    newer.1.wire_versions = (8, 9);
    assert!(refused(make, [newer, hello(1, CONTROL)]).await.contains("no common wire version: peer 8 to 9"));
}

async fn another_planner_version_is_refused(make: Maker) {
    let mut newer = hello(0, CONTROL);
    newer.1.planner_version = 99;
    assert!(refused(make, [newer, hello(1, CONTROL)]).await.contains("planner version 99"));
}

async fn another_purpose_is_refused(make: Maker) {
    let text = refused(make, [hello(0, CONTROL), hello(1, LANE)]).await;
    assert!(text.contains("is for Control, but this port serves Data"), "{text}");
}

async fn another_job_is_refused(make: Maker) {
    let mut other = hello(0, CONTROL);
    other.1.job = ronde_wire::JobName::new("day-run").expect("a good name");
    assert_eq!(refused(make, [other, hello(1, CONTROL)]).await, "job day-run is not job night-run");
}

async fn a_hello_with_another_index_is_refused(make: Maker) {
    let mut liar = hello(0, CONTROL);
    liar.1.sidecar = SidecarIndex(5);
    let text = refused(make, [liar, hello(1, CONTROL)]).await;
    assert_eq!(text, "the certificate is sidecar 0's, but the hello claims sidecar 5");
}

async fn a_replacement_of_nothing_is_refused(make: Maker) {
    let mut replacement = hello(0, CONTROL);
    replacement.1.replaces = true;
    let text = refused(make, [replacement, hello(1, CONTROL)]).await;
    assert_eq!(text, "there is no link whose connection could be replaced");
}

async fn another_incarnation_of_a_peer_is_refused(make: Maker) {
    let mut world = make(&[hello(0, CONTROL), hello(1, CONTROL)], START_TIMEOUT);
    let mut acceptor = world.ports.remove(1);
    let mut first = world.ports.remove(0);
    first.open(SidecarIndex(1), Role::Dial);
    up(&mut *acceptor, 0).await;
    drop(first);
    down(&mut *acceptor, 0).await;
    let mut reborn = hello(0, CONTROL);
    reborn.1.incarnation = Incarnation(77);
    let mut second = (world.again)(reborn.0, reborn.1);
    second.open(SidecarIndex(1), Role::Dial);
    let DownReason::Refused(text) = down(&mut *second, 1).await else { panic!("not refused") };
    assert!(text.contains("was incarnation 1000 before and is incarnation 77 now"), "{text}");
    assert_eq!(acceptor.stats().refusals, 1);
}

async fn chunks_that_have_left_are_reported(make: Maker) {
    let (mut one, mut two) = pair(make, LANE).await;
    one.send(SidecarIndex(1), Outgoing::Frame(Frame::admitted(Epoch(1), Seq(1)))).expect("below the bound");
    for seq in 0..50 {
        one.send(SidecarIndex(1), Outgoing::Chunk(chunk(seq, Bytes::from(vec![0; 20_000])))).expect("below the bound");
    }
    let mut sent = 0;
    while sent < 50 {
        match any_event(&mut *one).await {
            PortEvent::Sent { peer: SidecarIndex(1), chunks } => sent += chunks,
            other => panic!("{other:?} instead of sent"),
        }
    }
    assert_eq!(sent, 50);
    for _ in 0..51 {
        frame(&mut *two, 0).await;
    }
}

async fn both_sides_count(make: Maker) {
    let (mut one, mut two) = pair(make, LANE).await;
    let sent = [chunk(1, Bytes::from(vec![1; 10_000])), chunk(2, Bytes::new())];
    let mut bytes = 0;
    for chunk in sent {
        bytes += (chunk.encode_head().len() + chunk.data.len()) as u64;
        one.send(SidecarIndex(1), Outgoing::Chunk(chunk)).expect("below the bound");
        frame(&mut *two, 0).await;
    }
    let (one, two) = (one.stats(), two.stats());
    assert_eq!((one.frames_sent, one.sealed_bytes, one.frames_received, one.opened_bytes), (2, bytes, 0, 0));
    assert_eq!((two.frames_sent, two.sealed_bytes, two.frames_received, two.opened_bytes), (0, 0, 2, bytes));
    assert_eq!((one.links_opened, two.links_opened, one.refusals, two.refusals), (1, 1, 0, 0));
}
