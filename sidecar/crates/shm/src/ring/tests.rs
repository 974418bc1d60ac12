use std::collections::VecDeque;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::consumer::ON_FUTEX;
use super::memory::{Channel, Direction};
use super::*;
use crate::ShmError;

pub(super) const CAPACITY: u64 = RING_BYTES_MIN;
/// Only a lost wake-up takes this long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Both ends of a ring, and its two directions as a hostile peer can write them.
pub(super) struct Pair {
    pub(super) worker: RingEnd,
    pub(super) sidecar: RingEnd,
    pub(super) to_sidecar: Channel,
    pub(super) to_worker: Channel,
}

pub(super) fn pair() -> Pair {
    let ring = WorkerRing::create(CAPACITY).expect("memory");
    let peer = PeerRing::map(ring.fd().try_clone_to_owned().expect("a descriptor"), CAPACITY).expect("a ring");
    let (here, there) = UnixStream::pair().expect("sockets");
    let sidecar = peer.into_end(Bell::over(there).expect("a bell"));
    let mapping = {
        let fd = ring.fd().try_clone_to_owned().expect("a descriptor");
        let sealed = crate::mapping::SealedFd::verify(fd, crate::segment::SEALS_OF_PEER, "ring").expect("sealed");
        std::sync::Arc::new(crate::mapping::Mapping::new(&sealed, "ring", 0).expect("memory"))
    };
    let to_sidecar = Channel::new(&mapping, Direction::ToSidecar, CAPACITY);
    let to_worker = Channel::new(&mapping, Direction::ToWorker, CAPACITY);
    Pair { worker: ring.into_end(Bell::over(here).expect("a bell")), sidecar, to_sidecar, to_worker }
}

/// Waits for the bell, as an event loop does.
fn wait_for_bell(bell: &Bell) {
    let mut stream = bell.listen().expect("a descriptor");
    stream.set_nonblocking(false).expect("it may block here");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    let rung = stream.read(&mut [0; 1_024]).expect("nobody rang");
    assert!(rung > 0, "the other side is gone");
}

/// A message of an odd size that contains its number.
fn numbered(number: u64) -> Vec<u8> {
    let length = 8 + (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52) as usize % 600;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(length, number.to_le_bytes()[0]);
    bytes
}

#[test]
fn two_threads_pass_everything_in_order_through_a_small_ring() {
    const MESSAGES: u64 = 60_000;
    let Pair { worker, sidecar, .. } = pair();
    let (mut producer, bell) = (worker.producer, worker.bell);
    let writer = std::thread::spawn(move || {
        for number in 0..MESSAGES {
            let message = numbered(number);
            while producer.push(&message).expect("in order") == Pushed::Full {
                if !producer.want_room(message.len() as u64).expect("in order") {
                    wait_for_bell(&bell);
                }
            }
            producer.wake();
        }
        bell
    });
    let (mut consumer, mut message, mut next, mut slept) = (sidecar.consumer, Vec::new(), 0, 0_u32);
    let mut last = Instant::now();
    while next < MESSAGES {
        if consumer.pop(&mut message).expect("in order") {
            assert_eq!(message, numbered(next), "message {next}");
            (next, last) = (next + 1, Instant::now());
            continue;
        }
        assert!(last.elapsed() < TIMEOUT, "a wake-up was lost at message {next}");
        // Alternates between both ways to wait.
        slept += 1;
        if slept.is_multiple_of(2) {
            if consumer.arm(Wait::Bell).expect("in order") {
                wait_for_bell(&sidecar.bell);
            }
        } else if consumer.arm(Wait::Futex).expect("in order") {
            let asleep = Instant::now();
            consumer.sleep(TIMEOUT);
            assert!(asleep.elapsed() < TIMEOUT / 2, "a wake-up was lost at message {next}");
        }
    }
    assert!(!consumer.pop(&mut message).expect("in order"), "nothing is left");
    writer.join().expect("the writer");
}

#[test]
fn ping_and_pong_lose_no_wake_up_in_either_way_of_sleeping() {
    const ROUNDS: u64 = 20_000;
    let Pair { worker, sidecar, .. } = pair();
    let answer = std::thread::spawn(move || {
        let (mut consumer, mut producer, mut message) = (sidecar.consumer, sidecar.producer, Vec::new());
        for _ in 0..ROUNDS {
            while !consumer.pop(&mut message).expect("in order") {
                if consumer.arm(Wait::Bell).expect("in order") {
                    wait_for_bell(&sidecar.bell);
                }
            }
            assert_eq!(producer.push(&message), Ok(Pushed::Done));
            producer.wake();
        }
        sidecar.bell
    });
    let (mut consumer, mut producer, mut message) = (worker.consumer, worker.producer, Vec::new());
    for round in 0..ROUNDS {
        assert_eq!(producer.push(&round.to_le_bytes()), Ok(Pushed::Done));
        producer.wake();
        while !consumer.pop(&mut message).expect("in order") {
            if consumer.arm(Wait::Futex).expect("in order") {
                let asleep = Instant::now();
                consumer.sleep(TIMEOUT);
                assert!(asleep.elapsed() < TIMEOUT / 2, "a wake-up was lost in round {round}");
            }
        }
        assert_eq!(message, round.to_le_bytes());
    }
    answer.join().expect("the other side");
}

#[test]
fn a_kick_wakes_a_sleeper_and_leaves_a_bell_armed() {
    let Pair { worker, mut sidecar, .. } = pair();
    let (mut consumer, kick) = (worker.consumer, worker_kick(&sidecar));
    let own = consumer.kick();
    assert!(consumer.arm(Wait::Futex).expect("in order"));
    let sleeper = std::thread::spawn(move || {
        let asleep = Instant::now();
        consumer.sleep(TIMEOUT);
        assert!(asleep.elapsed() < TIMEOUT / 2, "nobody woke it");
        consumer
    });
    own.now();
    let mut consumer = sleeper.join().expect("awake");
    assert!(consumer.arm(Wait::Bell).expect("in order"));
    own.now();
    drop(kick);
    assert_eq!(sidecar.producer.push(b"here"), Ok(Pushed::Done));
    sidecar.producer.wake();
    wait_for_bell(&worker.bell);
}

/// A kick of the other side, which concerns another direction and wakes nobody here.
fn worker_kick(sidecar: &RingEnd) -> Kick {
    let kick = sidecar.consumer.kick();
    kick.now();
    kick
}

#[test]
fn one_sleep_costs_one_wake_up_however_many_messages_follow() {
    let Pair { mut worker, mut sidecar, .. } = pair();
    assert!(sidecar.consumer.arm(Wait::Bell).expect("in order"));
    for _ in 0..10 {
        assert_eq!(worker.producer.push(b"message"), Ok(Pushed::Done));
        worker.producer.wake();
    }
    let rung = sidecar.bell.listen().expect("a descriptor").read(&mut [0; 16]).expect("a wake-up");
    assert_eq!(rung, 1);
}

#[test]
fn a_full_ring_takes_nothing_until_there_is_room() {
    let Pair { mut worker, mut sidecar, .. } = pair();
    let message = [7; 1_000];
    let mut pushed = 0;
    while worker.producer.push(&message).expect("in order") == Pushed::Done {
        pushed += 1;
    }
    assert_eq!(pushed, 4, "4 times 1008 bytes fit into 4096");
    assert_eq!(worker.producer.want_room(1_000), Ok(false));
    let mut read = Vec::new();
    assert!(sidecar.consumer.pop(&mut read).expect("in order"));
    wait_for_bell(&worker.bell);
    assert_eq!(worker.producer.push(&message), Ok(Pushed::Done), "room for one");
    assert_eq!(worker.producer.push(&message), Ok(Pushed::Full));
    for _ in 0..pushed {
        assert!(sidecar.consumer.pop(&mut read).expect("in order"));
        assert_eq!(read, message);
    }
    let limit = worker.producer.message_bytes_max();
    let bytes = limit + 1;
    let too_long = vec![0; usize::try_from(bytes).expect("small")];
    assert_eq!(worker.producer.push(&too_long), Err(RingError::TooLong { bytes, limit }));
    assert_eq!(worker.producer.push(&too_long[1..]), Ok(Pushed::Done), "the limit itself fits");
}

#[test]
fn positions_and_lengths_of_a_hostile_peer_end_the_ring() {
    let position = |position, least, most| RingError::Position { position, least, most };
    for (produced, expected) in [
        (4, position(4, 0, CAPACITY)),
        (CAPACITY + 8, position(CAPACITY + 8, 0, CAPACITY)),
        (u64::MAX, position(u64::MAX, 0, CAPACITY)),
        (u64::MAX - 7, position(u64::MAX - 7, 0, CAPACITY)),
    ] {
        let Pair { mut sidecar, to_sidecar, .. } = pair();
        to_sidecar.produced().store(produced, Ordering::SeqCst);
        assert_eq!(sidecar.consumer.pop(&mut Vec::new()), Err(expected));
        assert_eq!(sidecar.consumer.arm(Wait::Bell), Err(expected));
    }
    // The producer's position decreases.
    let Pair { mut worker, mut sidecar, to_sidecar, .. } = pair();
    assert_eq!(worker.producer.push(b"message"), Ok(Pushed::Done));
    assert!(sidecar.consumer.pop(&mut Vec::new()).expect("in order"));
    to_sidecar.produced().store(0, Ordering::SeqCst);
    assert_eq!(sidecar.consumer.pop(&mut Vec::new()), Err(position(0, 16, 16 + CAPACITY)));
    // The consumer's position is ahead of the producer's, or decreases.
    let Pair { mut worker, to_sidecar, .. } = pair();
    while worker.producer.push(&[0; 100]).expect("in order") == Pushed::Done {}
    to_sidecar.consumed().store(CAPACITY + 8, Ordering::SeqCst);
    let Err(RingError::Position { position: CAPACITY_AND_8, .. }) = worker.producer.push(&[0; 100]) else {
        panic!("accepted")
    };
    // Lengths beyond the published bytes, and beyond the limit.
    for (length, produced) in [(13_u32, 16), (u32::MAX, 16), (2_049, CAPACITY)] {
        let Pair { mut sidecar, to_sidecar, .. } = pair();
        to_sidecar.write(0, &length.to_le_bytes());
        to_sidecar.produced().store(produced, Ordering::SeqCst);
        let limit = 2_048.min(produced - 4);
        let expected = Err(RingError::Length { bytes: length.into(), limit });
        assert_eq!(sidecar.consumer.pop(&mut Vec::new()), expected);
    }
}

const CAPACITY_AND_8: u64 = CAPACITY + 8;

#[test]
fn hostile_wait_words_cost_at_most_one_wake_up_per_message() {
    let Pair { mut worker, sidecar, to_sidecar, .. } = pair();
    for word in [ON_FUTEX, 2, 3, u32::MAX] {
        to_sidecar.sleeps().store(word, Ordering::SeqCst);
        assert_eq!(worker.producer.push(b""), Ok(Pushed::Done));
        worker.producer.wake();
        assert_eq!(to_sidecar.sleeps().load(Ordering::SeqCst), 0);
    }
    // Ringing never blocks, even if nobody reads the bell.
    for _ in 0..100_000 {
        worker.bell.ring();
    }
    // Read these: closing a socket with unread bytes would reset the connection.
    let mut received = Vec::new();
    let unread = sidecar.bell.listen().expect("a descriptor").read_to_end(&mut received).expect_err("it is open");
    assert_eq!(unread.kind(), std::io::ErrorKind::WouldBlock);
    assert!(received.len() > 3, "the rings have come");
    drop(sidecar);
    worker.bell.ring();
    let mut rest = Vec::new();
    worker.bell.listen().expect("a descriptor").read_to_end(&mut rest).expect("the end");
    assert!(rest.is_empty(), "the other side never rang");
}

#[test]
fn a_memfd_that_is_no_ring_is_refused() {
    let ring = WorkerRing::create(CAPACITY).expect("memory");
    let fd = |ring: &WorkerRing| ring.fd().try_clone_to_owned().expect("a descriptor");
    for capacity in [0, 1, CAPACITY - 1, CAPACITY + 1, 3 * CAPACITY, 2 * RING_BYTES_MAX, u64::MAX] {
        assert!(matches!(PeerRing::map(fd(&ring), capacity), Err(ShmError::RingCapacity { .. })), "{capacity}");
        assert!(matches!(WorkerRing::create(capacity), Err(ShmError::RingCapacity { .. })), "{capacity}");
    }
    assert!(matches!(PeerRing::map(fd(&ring), 4 * RING_BYTES_MIN), Err(ShmError::WrongSize { .. })));
    let file = tempfile::tempfile().expect("a file").into();
    assert!(matches!(PeerRing::map(file, CAPACITY), Err(ShmError::NotMemfd { .. })));
    let bytes = memory::ring_bytes(CAPACITY).expect("a capacity").get();
    let blank = crate::OwnedSegment::create("blank", bytes, crate::Share::Writable).expect("memory");
    let blank_fd = blank.fd().try_clone_to_owned().expect("a descriptor");
    assert!(matches!(PeerRing::map(blank_fd, CAPACITY), Err(ShmError::RingLayout { version: 0, .. })));
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Pop,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![(0..2_100_usize).prop_map(Step::Push), (0..40_usize).prop_map(Step::Push), Just(Step::Pop)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_ring_is_a_queue(steps in proptest::collection::vec(step(), 1..400)) {
        let Pair { mut worker, mut sidecar, .. } = pair();
        let (mut model, mut number, mut message) = (VecDeque::<Vec<u8>>::new(), 0_u8, Vec::new());
        for step in steps {
            match step {
                Step::Push(length) => {
                    number = number.wrapping_add(1);
                    let bytes = vec![number; length];
                    let used: u64 = model.iter().map(|m| memory::framed(m.len() as u64)).sum();
                    let expected = if length > 2_048 {
                        Err(RingError::TooLong { bytes: length as u64, limit: 2_048 })
                    } else if used + memory::framed(length as u64) > CAPACITY {
                        Ok(Pushed::Full)
                    } else {
                        model.push_back(bytes.clone());
                        Ok(Pushed::Done)
                    };
                    prop_assert_eq!(worker.producer.push(&bytes), expected);
                }
                Step::Pop => {
                    let expected = model.pop_front();
                    prop_assert_eq!(sidecar.consumer.pop(&mut message), Ok(expected.is_some()));
                    if let Some(expected) = expected {
                        prop_assert_eq!(&message, &expected);
                    }
                }
            }
        }
    }
}
