//! One lane's streams, with a port that only records, and rings as workers make them.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use proptest::prelude::*;
use ronde_shm::ring::{Bell, PeerRing, RingEnd, WorkerRing, framed};
use ronde_shm::{StreamRequest, WorkerToken};
use ronde_transport::{Outgoing, Port, PortEvent, PortStats, Role as Dialling, SendError};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::stream::{DataHeader, Handle, ListenSecret, SidecarMessage, StreamFrame, WorkerMessage};
use ronde_wire::{Lane, SidecarIndex, WorkerNumber, limits};
use tokio::sync::mpsc;

use super::{NewStream, StreamConfig, StreamEvent, StreamGate, Streams};

const ME: SidecarIndex = SidecarIndex(0);
const PEER: SidecarIndex = SidecarIndex(1);
const UNKNOWN_PEER: SidecarIndex = SidecarIndex(2);
const SECRET: [u8; 16] = [5; 16];

/// A port that records.
#[derive(Default)]
struct Wire {
    sent: Vec<(SidecarIndex, u64, StreamFrame)>,
    bytes: usize,
    opened: BTreeSet<SidecarIndex>,
    /// Whether it sends nothing more.
    is_full: bool,
}

impl Port for Wire {
    fn open(&mut self, peer: SidecarIndex, _: Dialling) {
        self.opened.insert(peer);
    }

    fn send(&mut self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError> {
        if self.is_full {
            return Err(SendError::Full { peer: to, queued_bytes: 9, limit_bytes: 8 });
        }
        let Outgoing::Frame(frame) = message else { panic!("a stream sends frames") };
        self.bytes += HEADER_BYTES + frame.payload.len();
        let (stream, frame) = StreamFrame::decode(&frame.payload).expect("a frame about a stream");
        self.sent.push((to, stream, frame));
        Ok(())
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<PortEvent> {
        Poll::Pending
    }

    fn close(&mut self, _: SidecarIndex, _: &str) {}

    fn stats(&self) -> PortStats {
        PortStats::default()
    }
}

struct Fixture {
    streams: Streams,
    wire: Wire,
    gate: StreamGate,
    next: u64,
}

impl Fixture {
    fn new() -> Self {
        let (_, new) = mpsc::channel(1);
        let config = StreamConfig {
            me: ME,
            lane: Lane(0),
            job: 7,
            sidecars: BTreeSet::from([ME, PEER, UNKNOWN_PEER]),
            peer_timeout: TIMEOUT,
            new,
            secret: || Ok(SECRET),
        };
        let gate = StreamGate::new(Vec::new(), 1);
        gate.add_worker(WorkerNumber(0), WorkerToken::from_bytes([1; 32]));
        Self { streams: Streams::new(config), wire: Wire::default(), gate, next: 1 }
    }

    /// Attaches a ring; the worker's end and the stream's number.
    fn attach(&mut self, capacity: u64) -> (RingEnd, u64) {
        let ring = WorkerRing::create(capacity).expect("memory");
        let peer = PeerRing::map(ring.fd().try_clone_to_owned().expect("a descriptor"), capacity).expect("a ring");
        let (here, there) = UnixStream::pair().expect("sockets");
        let request = StreamRequest { worker: 0, token: WorkerToken::from_bytes([1; 32]), capacity, lane: 0 };
        let permit = self.gate.admit(&request).expect("it is admitted");
        let new = NewStream { ring: peer, bell: there, permit };
        self.streams.handle_event(StreamEvent::New(Box::new(new)), &mut self.wire);
        self.next += 1;
        (ring.into_end(Bell::over(here).expect("a bell")), self.next - 1)
    }

    fn push(&mut self, ring: &mut RingEnd, number: u64, message: &[u8]) {
        ring.producer.push(message).expect("it is a message");
        self.streams.handle_event(StreamEvent::Bell(number, false), &mut self.wire);
        self.work();
    }

    fn work(&mut self) {
        let mut turns = 0;
        while self.streams.work(&mut self.wire) {
            turns += 1;
            assert!(turns < 10_000, "it does not come to rest");
        }
    }

    fn receive(&mut self, stream: u64, frame: &StreamFrame) -> Result<(), String> {
        self.receive_from(PEER, stream, frame)
    }

    fn receive_from(&mut self, from: SidecarIndex, stream: u64, frame: &StreamFrame) -> Result<(), String> {
        let done = self.streams.handle_frame(&mut self.wire, from, &frame.encode(stream));
        self.work();
        done
    }

    /// A stream that sends to the peer's stream 9 with this credit.
    fn sender(&mut self, credit: u64) -> (RingEnd, u64) {
        let (mut ring, number) = self.attach(limits::STREAM_RING_BYTES_MAX);
        let handle = Handle { sidecar: PEER, lane: Lane(0), listener: 3, secret: ListenSecret(SECRET), job: 7 };
        self.push(&mut ring, number, &WorkerMessage::Connect(handle).encode());
        let open = StreamFrame::Open { listener: 3, secret: ListenSecret(SECRET) };
        assert_eq!(self.take_sent(), [(PEER, number, open)]);
        self.receive(number, &StreamFrame::Accept { number: 9, credit }).expect("it is accepted");
        assert!(matches!(message(&mut ring), Some(SidecarMessage::Connected { peer: PEER, .. })));
        (ring, number)
    }

    /// A stream that receives from the peer's stream 9.
    fn receiver(&mut self) -> (RingEnd, u64) {
        let (mut listener, number) = self.attach(limits::STREAM_RING_BYTES_MIN);
        self.push(&mut listener, number, &WorkerMessage::Listen.encode());
        let Some(SidecarMessage::Listening(handle)) = message(&mut listener) else { panic!("it listens") };
        let (mut ring, end) = self.attach(limits::STREAM_RING_BYTES_MIN);
        let accept = WorkerMessage::Accept { listener: handle.listener, secret: handle.secret };
        self.push(&mut ring, end, &accept.encode());
        let open = StreamFrame::Open { listener: handle.listener, secret: handle.secret };
        self.receive(9, &open).expect("it is open");
        let credit = limits::STREAM_RING_BYTES_MIN - limits::STREAM_RING_RESERVE_BYTES;
        assert_eq!(self.take_sent(), [(PEER, 9, StreamFrame::Accept { number: end, credit })]);
        assert!(matches!(message(&mut ring), Some(SidecarMessage::Connected { .. })));
        // Only the ring of the receiver is looked at; the listener stays as long as its ring.
        std::mem::forget(listener);
        (ring, end)
    }

    fn take_sent(&mut self) -> Vec<(SidecarIndex, u64, StreamFrame)> {
        std::mem::take(&mut self.wire.sent)
    }
}

fn message(ring: &mut RingEnd) -> Option<SidecarMessage> {
    let mut bytes = Vec::new();
    ring.consumer.pop(&mut bytes).expect("a whole ring").then(|| SidecarMessage::decode(&bytes).expect("a message"))
}

fn data(bytes: usize) -> Vec<u8> {
    let header = DataHeader { offset: 0, total: u32::try_from(bytes).expect("short") }.encode();
    [&header[..], &vec![3; bytes]].concat()
}

#[tokio::test]
async fn no_more_than_the_receivers_credit_leaves_a_ring() {
    let mut fixture = Fixture::new();
    let part = data(4_000);
    let cost = framed(part.len() as u64);
    let (mut ring, number) = fixture.sender(2 * cost + 10);
    for _ in 0..3 {
        fixture.push(&mut ring, number, &part);
    }
    let frame = StreamFrame::Data(Bytes::from(part.clone()));
    assert_eq!(fixture.take_sent(), [(PEER, 9, frame.clone()), (PEER, 9, frame.clone())]);
    fixture.receive(number, &StreamFrame::Credit(cost)).expect("as much as was used");
    assert_eq!(fixture.take_sent(), [(PEER, 9, frame)]);
    // The end needs no credit.
    fixture.push(&mut ring, number, &WorkerMessage::Finish.encode());
    assert_eq!(fixture.take_sent(), [(PEER, 9, StreamFrame::Finish)]);
    assert_eq!(fixture.streams.stats().open, 0);
    assert_eq!(fixture.streams.stats().sent_bytes, 3 * 4_000);
}

#[tokio::test]
async fn a_lane_queues_a_bounded_number_of_bytes_for_a_peer() {
    let mut fixture = Fixture::new();
    let part = data(400_000);
    let mut senders: Vec<_> = (0..5).map(|_| fixture.sender(1 << 20)).collect();
    for (ring, number) in &mut senders {
        for _ in 0..2 {
            fixture.push(ring, *number, &part);
        }
    }
    let queued = fixture.wire.bytes;
    let most = limits::STREAM_WINDOW_BYTES + part.len() + 1_000;
    assert!((limits::STREAM_WINDOW_BYTES..most).contains(&queued), "{queued} bytes are queued");
    assert!(fixture.take_sent().len() < 10);
    while fixture.streams.stats().sent_bytes < 10 * 400_000 {
        let written = std::mem::take(&mut fixture.wire.bytes);
        assert!(written > 0, "nothing more is sent");
        fixture.streams.handle_sent(PEER, written);
        fixture.work();
    }
}

#[tokio::test]
async fn what_a_peer_sends_is_checked() {
    let mut fixture = Fixture::new();
    let (_ring, sending) = fixture.sender(100_000);
    let (mut received, receiving) = fixture.receiver();
    fixture.receive_from(UNKNOWN_PEER, sending, &StreamFrame::Finish).expect_err("it is another's stream");
    fixture.receive(sending, &StreamFrame::Data(data(1).into())).expect_err("it sends");
    fixture.receive(receiving, &StreamFrame::Credit(1)).expect_err("it receives");
    fixture.receive(sending, &StreamFrame::Credit(1)).expect_err("nothing was used");
    let again = StreamFrame::Accept { number: 1, credit: 1 };
    fixture.receive(sending, &again).expect_err("it is accepted already");
    fixture.receive(77, &StreamFrame::Finish).expect("it may have been over");
    // As much as was granted, and no more.
    let part = data(30_000);
    fixture.receive(receiving, &StreamFrame::Data(part.clone().into())).expect("it was granted");
    assert_eq!(message(&mut received), Some(SidecarMessage::Data));
    fixture.receive(receiving, &StreamFrame::Data(part.clone().into())).expect("it was granted");
    let over = fixture.receive(receiving, &StreamFrame::Data(part.into())).expect_err("it was not granted");
    assert!(over.contains("were granted"), "{over}");
}

#[tokio::test]
async fn a_worker_that_is_gone_and_a_link_that_is_down_end_streams() {
    let mut fixture = Fixture::new();
    let (mut ring, number) = fixture.sender(100_000);
    fixture.push(&mut ring, number, &data(10));
    fixture.take_sent();
    drop(ring);
    fixture.streams.handle_event(StreamEvent::Bell(number, true), &mut fixture.wire);
    fixture.work();
    assert!(matches!(&fixture.take_sent()[..], [(PEER, 9, StreamFrame::Close(_))]));
    assert_eq!(fixture.streams.stats().open, 0);
    // One that cannot send the rest, because the receiver does not read, ends after the timeout.
    let (mut ring, number) = fixture.sender(1_000);
    fixture.push(&mut ring, number, &data(900));
    fixture.push(&mut ring, number, &data(900));
    fixture.take_sent();
    drop(ring);
    fixture.streams.handle_event(StreamEvent::Bell(number, true), &mut fixture.wire);
    fixture.work();
    assert_eq!(fixture.take_sent(), []);
    fixture.streams.tick(Instant::now() + TIMEOUT, &mut fixture.wire);
    fixture.work();
    assert!(fixture.take_sent().iter().any(|sent| matches!(sent, (PEER, 9, StreamFrame::Close(_)))));
    // One that was never connected.
    let (ring, number) = fixture.attach(limits::STREAM_RING_BYTES_MIN);
    drop(ring);
    fixture.streams.handle_event(StreamEvent::Bell(number, true), &mut fixture.wire);
    fixture.work();
    fixture.take_sent();
    fixture.receive(number, &StreamFrame::Accept { number: 8, credit: 1 }).expect("it may be over");
    assert!(matches!(&fixture.take_sent()[..], [(PEER, 8, StreamFrame::Close(_))]));
    // A link.
    let (mut ring, _) = fixture.sender(1_000);
    let reason = ronde_transport::DownReason::Lost("a cut".to_owned());
    fixture.streams.handle_down(PEER, &reason, &mut fixture.wire);
    let Some(SidecarMessage::Failed(text)) = message(&mut ring) else { panic!("the worker is notified") };
    assert!(text.contains("a cut"), "{text}");
}

#[tokio::test]
async fn a_frame_that_is_not_sent_ends_the_streams_and_the_link() {
    let mut fixture = Fixture::new();
    let (mut ring, number) = fixture.sender(100_000);
    assert_eq!(fixture.streams.take_broken(&mut fixture.wire), None);
    fixture.wire.is_full = true;
    fixture.push(&mut ring, number, &data(10));
    let (peer, reason) = fixture.streams.take_broken(&mut fixture.wire).expect("the peer would wait for the data");
    assert!(peer == PEER && reason.contains("holds 9 bytes"), "{reason}");
    let down = ronde_transport::DownReason::Lost(reason);
    fixture.streams.handle_down(PEER, &down, &mut fixture.wire);
    let Some(SidecarMessage::Failed(text)) = message(&mut ring) else { panic!("the worker is notified") };
    assert!(text.contains("holds 9 bytes"), "{text}");
    assert_eq!(fixture.streams.take_broken(&mut fixture.wire), None, "the end of the streams is no other failure");
}

#[tokio::test]
async fn a_credit_of_nothing_is_refused() {
    let mut fixture = Fixture::new();
    let (_ring, sending) = fixture.sender(100_000);
    fixture.receive(sending, &StreamFrame::Credit(0)).expect_err("it grants nothing");
    let (mut ring, receiving) = fixture.receiver();
    fixture.push(&mut ring, receiving, &WorkerMessage::Credit(0).encode());
    assert!(matches!(&fixture.take_sent()[..], [(PEER, 9, StreamFrame::Close(reason))] if reason.contains("0 bytes")));
}

#[tokio::test]
async fn connections_that_were_given_up_leave_the_listener() {
    let mut fixture = Fixture::new();
    // As the one that gives up.
    let (mut ring, number) = fixture.attach(limits::STREAM_RING_BYTES_MAX);
    let handle = Handle { sidecar: PEER, lane: Lane(0), listener: 3, secret: ListenSecret(SECRET), job: 7 };
    fixture.push(&mut ring, number, &WorkerMessage::Connect(handle).encode());
    fixture.take_sent();
    drop(ring);
    fixture.streams.handle_event(StreamEvent::Bell(number, true), &mut fixture.wire);
    fixture.work();
    assert_eq!(fixture.take_sent(), [(PEER, number, StreamFrame::Abandon { listener: 3 })]);
    // As the listener: as many as may wait come and go, more than once.
    let (mut listener, number) = fixture.attach(limits::STREAM_RING_BYTES_MIN);
    fixture.push(&mut listener, number, &WorkerMessage::Listen.encode());
    let Some(SidecarMessage::Listening(handle)) = message(&mut listener) else { panic!("it listens") };
    let (listener, secret) = (handle.listener, handle.secret);
    for stream in 0..3 * limits::STREAMS_WAITING_MAX as u64 {
        fixture.receive(stream, &StreamFrame::Open { listener, secret }).expect("it waits");
        assert_eq!(fixture.take_sent(), [], "{stream} is not refused");
        fixture.receive(stream, &StreamFrame::Abandon { listener }).expect("it is given up");
    }
    fixture.receive(1, &StreamFrame::Abandon { listener: 77 }).expect("the listener may be gone");
}

#[tokio::test]
async fn a_peer_that_is_silent_loses_its_streams_and_a_pause_of_this_process_is_no_silence() {
    let mut fixture = Fixture::new();
    let (mut ring, _) = fixture.sender(1_000);
    let begin = Instant::now();
    // The first tick after a pause counts nothing.
    fixture.streams.tick(begin + 10 * TIMEOUT, &mut fixture.wire);
    assert_eq!(message(&mut ring), None);
    assert_eq!(fixture.take_sent(), [(PEER, 0, StreamFrame::Alive)]);
    for step in 1..=5 {
        fixture.streams.tick(begin + 10 * TIMEOUT + step * TIMEOUT / 4, &mut fixture.wire);
    }
    let Some(SidecarMessage::Failed(text)) = message(&mut ring) else { panic!("the worker is notified") };
    assert!(text.contains("is silent"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_payloads_and_messages_end_at_most_their_stream(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 1..20),
        kinds in prop::collection::vec((0_u8..10, 0_u64..6, 0_u64..4), 1..20),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut fixture = Fixture::new();
            let (mut sender, number) = fixture.sender(100_000);
            // Arbitrary bytes, and headers that are nearly right, from a stranger.
            for payload in &payloads {
                let _ = fixture.streams.handle_frame(&mut fixture.wire, UNKNOWN_PEER, &payload.clone().into());
            }
            for (kind, stream, value) in kinds {
                let payload = [&u64::from(kind).to_le_bytes()[..], &stream.to_le_bytes(), &value.to_le_bytes()].concat();
                let _ = fixture.streams.handle_frame(&mut fixture.wire, UNKNOWN_PEER, &payload.into());
            }
            // And from a worker of another ring.
            for payload in payloads {
                let (mut ring, other) = fixture.attach(limits::STREAM_RING_BYTES_MIN);
                fixture.push(&mut ring, other, &payload);
            }
            fixture.take_sent();
            fixture.push(&mut sender, number, &data(10));
            assert_eq!(fixture.take_sent(), [(PEER, 9, StreamFrame::Data(data(10).into()))]);
        });
    }
}

const TIMEOUT: Duration = Duration::from_secs(2);
