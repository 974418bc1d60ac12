//! Tests of the fork guard with real forks. They run in a plain `main`, so that the process has a single thread and
//! children may call anything.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use ronde_shm::fork::{REGISTERED_FDS_MAX, register_fd};
use ronde_shm::ring::{Bell, PeerRing, Pushed, RING_BYTES_MIN, RingError, Wait, WorkerRing};
use ronde_shm::{
    ForkGuard, ForkSafe, MemClient, MemClientConfig, OwnedSegment, SegmentId, SessionToken, Share, ShmError,
    UsedAfterFork,
};

fn main() {
    let tests: [(&str, fn()); 10] = [
        ("a guard knows its children and grandchildren", a_guard_knows_its_children),
        ("a registered descriptor is closed in the child only", a_registered_descriptor_is_closed_in_the_child_only),
        ("a drop in the child leaves a reused number alone", a_drop_in_the_child_leaves_a_reused_number_alone),
        ("a client is dead in the child and alive in the parent", a_client_is_dead_in_the_child),
        ("a child opens a client of its own", a_child_opens_its_own_client),
        ("a child does not keep a dead parent's session alive", a_child_does_not_keep_a_session_alive),
        ("a child reads its parent's segment and cannot write it", a_child_cannot_write_its_parents_segment),
        ("what a child writes by an address is its own", writes_of_a_child_are_private),
        ("a ring is dead in the child and alive in the parent", a_ring_is_dead_in_the_child),
        ("the table of descriptors is bounded", the_table_of_descriptors_is_bounded),
    ];
    for (name, test) in tests {
        test();
        println!("fork: {name} ... ok");
    }
}

fn a_guard_knows_its_children() {
    let guard = ForkGuard::new();
    succeeds(|| {
        assert!(guard.is_child());
        assert_eq!(guard.check(), Err(UsedAfterFork));
        assert!(guard.check().expect_err("in a child").to_string().contains("used after fork"));
        let own = ForkGuard::new();
        assert_eq!(own.check(), Ok(()));
        succeeds(|| assert!(guard.is_child() && own.is_child()));
        assert_eq!(own.check(), Ok(()), "a grandchild changes nothing here");
    });
    assert_eq!(guard.check(), Ok(()));
}

fn writes_of_a_child_are_private() {
    let segment = OwnedSegment::create("viewed", 4 << 20, Share::Writable).expect("memory");
    let dropped = OwnedSegment::create("dropped", 4_096, Share::Writable).expect("memory");
    drop(dropped);
    segment.copy_from(5_000, &[1; 3]).expect("inside");
    let address = segment.address(5_000, 3).expect("inside");
    let peek = |index: usize| {
        // SAFETY: the segment lives, and these three bytes lie in it; this process has one thread.
        unsafe { std::ptr::with_exposed_provenance::<u8>(address + index).read_volatile() }
    };
    let poke = |index: usize, value: u8| {
        // SAFETY: as above.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address + index).write_volatile(value) }
    };
    poke(1, 2);
    succeeds(|| {
        assert_eq!([peek(0), peek(1), peek(2)], [1, 2, 1], "it has what its parent had");
        poke(0, 9);
        assert_eq!(peek(0), 9);
        // The child's writes persist in a grandchild and after the segment's owner is dropped.
        succeeds(|| {
            assert_eq!([peek(0), peek(1)], [9, 2]);
            poke(1, 8);
        });
        assert_eq!([peek(0), peek(1)], [9, 2]);
        let own = OwnedSegment::create("own", 4_096, Share::Writable).expect("a child has segments of its own");
        own.copy_from(0, &[5]).expect("inside");
    });
    assert_eq!([peek(0), peek(1), peek(2)], [1, 2, 1]);
    let shared = OwnedSegment::create("shared", 4_096, Share::ReadOnlyForOthers).expect("memory");
    assert!(shared.address(0, 1).is_err(), "nobody writes there by an address");
}

fn a_registered_descriptor_is_closed_in_the_child_only() {
    let (registered, free, ended) = (a_file(), a_file(), a_file());
    let registration = register_fd(registered.as_fd()).expect("room");
    drop(register_fd(ended.as_fd()).expect("room"));
    let number = registered.as_raw_fd();
    succeeds(|| {
        assert!(!is_open(number));
        let reused = a_file();
        assert_eq!(reused.as_raw_fd(), number, "the lowest free number is the one just closed");
        succeeds(|| assert!(is_open(number), "a child inherits no registrations"));
        assert!(is_open(free.as_raw_fd()) && is_open(ended.as_raw_fd()));
    });
    assert!(is_open(number));
    drop(registration);
    succeeds(|| assert!(is_open(number), "a registration that ended closes nothing"));
}

fn a_drop_in_the_child_leaves_a_reused_number_alone() {
    let guarded = ForkSafe::with_fd(a_file()).expect("room");
    let number = guarded.get().expect("in the parent").as_raw_fd();
    let mut guarded = Some(guarded);
    succeeds(|| {
        let reused = a_file();
        assert_eq!(reused.as_raw_fd(), number, "the lowest free number is the one just closed");
        let mut guarded = guarded.take().expect("taken once");
        assert_eq!(guarded.get().err(), Some(UsedAfterFork));
        assert_eq!(guarded.get_mut().err(), Some(UsedAfterFork));
        assert!(guarded.is_child());
        // The child's registration may use the same table entry; dropping the inherited one must not free it.
        let own = register_fd(reused.as_fd()).expect("room");
        drop(guarded);
        assert!(is_open(number));
        succeeds(|| assert!(!is_open(number), "the child's own registration survived the drop"));
        drop(own);
    });
    let guarded = guarded.take().expect("the child took a copy");
    let file = guarded.into_inner().expect("in the parent");
    succeeds(|| assert!(is_open(file.as_raw_fd()), "no longer registered"));
}

fn a_client_is_dead_in_the_child() {
    let (worker, mut sidecar) = UnixStream::pair().expect("sockets");
    let token = SessionToken::from_bytes([1; 16]);
    let segment = OwnedSegment::create("input", 1, Share::Writable).expect("segment");
    let mut client = Some(MemClient::over(worker, config()).expect("a client"));
    succeeds(|| {
        let mut client = client.take().expect("taken once");
        let error = client.result(&token, SegmentId(0)).expect_err("in a child");
        assert!(matches!(error, ShmError::UsedAfterFork(_)), "{error}");
        let error = client.attach(&token, SegmentId(0), &segment).expect_err("in a child");
        assert!(error.to_string().contains("used after fork"), "{error}");
        assert!(client.peer_credentials().is_err());
        drop(client);
    });
    assert_eq!(arrived(&mut sidecar), Arrived::Nothing, "calls and drops in a child send and end nothing");
    sidecar.write_all(b"OK\n").expect("sent");
    client.as_mut().expect("the child took a copy").attach(&token, SegmentId(0), &segment).expect("the parent goes on");
}

fn a_child_opens_its_own_client() {
    let (inherited, _peer) = UnixStream::pair().expect("sockets");
    let _inherited = MemClient::over(inherited, config()).expect("a client");
    succeeds(|| {
        let (worker, mut sidecar) = UnixStream::pair().expect("sockets");
        sidecar.write_all(b"OK\n").expect("sent");
        let mut own = MemClient::over(worker, config()).expect("a client");
        let segment = OwnedSegment::create("input", 1, Share::Writable).expect("segment");
        own.attach(&SessionToken::from_bytes([2; 16]), SegmentId(0), &segment).expect("attached");
    });
}

/// A rank forks a data loader and dies. The peer of a registered socket notices at once while the loader lives on. With
/// an unregistered socket the peer notices nothing, which proves that the first half can fail.
fn a_child_does_not_keep_a_session_alive() {
    for (guarded, expected) in [(true, Arrived::End), (false, Arrived::Nothing)] {
        let (worker, mut sidecar) = UnixStream::pair().expect("sockets");
        let (mut test_end, mut loader_end) = UnixStream::pair().expect("sockets");
        let rank = spawn(|| {
            let _client =
                guarded.then(|| MemClient::over(worker.try_clone().expect("a copy"), config()).expect("a client"));
            let _worker = if guarded { None } else { Some(worker.try_clone().expect("a copy")) };
            // The rank inherits the test's ends, which would keep the streams open; both are forgotten below.
            close_copy(&worker);
            close_copy(&test_end);
            let loader = spawn(|| {
                loader_end.write_all(b"up").expect("sent");
                let mut reply = [0; 4];
                loader_end.read_exact(&mut reply).expect("told");
                assert_eq!(&reply, b"stop");
                loader_end.write_all(b"down").expect("sent");
            });
            // The loader ends when killed, or with this process if the test fails.
            waitpid(loader, None).expect("our own child");
        });
        drop((worker, loader_end));
        expect(&mut test_end, b"up");
        assert_eq!(arrived(&mut sidecar), Arrived::Nothing, "the rank lives");
        kill(rank, Signal::SIGKILL).expect("our own child");
        assert!(matches!(waitpid(rank, None), Ok(WaitStatus::Signaled(..))));
        assert_eq!(arrived(&mut sidecar), expected);
        test_end.write_all(b"stop").expect("sent");
        expect(&mut test_end, b"down");
    }
}

fn a_child_cannot_write_its_parents_segment() {
    let segment = OwnedSegment::create("input", 1, Share::Writable).expect("segment");
    segment.copy_from(0, b"parent").expect("inside");
    succeeds(|| {
        let error = segment.copy_from(0, b"child!").expect_err("in a child");
        assert!(matches!(error, ShmError::UsedAfterFork(_)), "{error}");
        let mut read = [0; 6];
        segment.copy_to(0, &mut read).expect("reading harms nobody");
        assert_eq!(&read, b"parent");
    });
    let mut read = [0; 6];
    segment.copy_to(0, &mut read).expect("inside");
    assert_eq!(&read, b"parent");
}

fn a_ring_is_dead_in_the_child() {
    let ring = WorkerRing::create(RING_BYTES_MIN).expect("memory");
    let peer = PeerRing::map(ring.fd().try_clone_to_owned().expect("a descriptor"), RING_BYTES_MIN).expect("a ring");
    let (here, there) = UnixStream::pair().expect("sockets");
    let mut sidecar = peer.into_end(Bell::over(there).expect("room"));
    let mut worker = Some(ring.into_end(Bell::over(here).expect("room")));
    assert!(sidecar.consumer.arm(Wait::Bell).expect("in order"));
    let mut listening = sidecar.bell.listen().expect("a descriptor");
    succeeds(|| {
        let mut worker = worker.take().expect("taken once");
        let reused = a_file();
        assert_eq!(worker.producer.push(b"child"), Err(RingError::UsedAfterFork(UsedAfterFork)));
        worker.producer.wake();
        worker.bell.ring();
        assert!(worker.bell.listen().is_err());
        let number = reused.as_raw_fd();
        drop(worker);
        assert!(is_open(number), "what the bell's number names in the child stays open");
    });
    let mut message = Vec::new();
    assert!(!sidecar.consumer.pop(&mut message).expect("in order"));
    assert_eq!(listening.read(&mut [0; 16]).expect_err("nobody rang").kind(), ErrorKind::WouldBlock);
    let worker = worker.as_mut().expect("the child took a copy");
    assert_eq!(worker.producer.push(b"parent"), Ok(Pushed::Done));
    worker.producer.wake();
    assert_eq!(listening.read(&mut [0; 16]).expect("rung"), 1);
    assert!(sidecar.consumer.pop(&mut message).expect("in order"));
    assert_eq!(message, b"parent");
}

fn the_table_of_descriptors_is_bounded() {
    let file = a_file();
    let mut registrations: Vec<_> =
        std::iter::from_fn(|| register_fd(file.as_fd()).ok()).take(REGISTERED_FDS_MAX + 1).collect();
    assert_eq!(registrations.len(), REGISTERED_FDS_MAX, "all earlier tests gave their places back");
    let error = register_fd(file.as_fd()).expect_err("full");
    assert!(matches!(error, ShmError::ForkTableFull { limit: REGISTERED_FDS_MAX }), "{error}");
    registrations.pop();
    assert!(register_fd(file.as_fd()).is_ok());
}

fn config() -> MemClientConfig {
    MemClientConfig { timeout: Duration::from_secs(20), result_bytes_max: 1 << 20 }
}

fn a_file() -> OwnedFd {
    tempfile::tempfile().expect("a file").into()
}

fn is_open(number: i32) -> bool {
    // SAFETY: the number is only asked about, and the borrow ends with the call; a closed number gives EBADF.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
    fcntl(fd, FcntlArg::F_GETFD) != Err(Errno::EBADF)
}

/// Closes this process's copy of a stream that is forgotten afterwards.
fn close_copy(stream: &UnixStream) {
    nix::unistd::close(stream.as_raw_fd()).expect("open");
}

/// Forks a child that runs `body` and exits with 0, or 1 if it panics. It runs no destructors of the parent's values.
fn spawn(body: impl FnOnce()) -> Pid {
    // SAFETY: this process has one thread, so its child may use all of the library.
    match unsafe { fork() }.expect("a child") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let status = i32::from(catch_unwind(AssertUnwindSafe(body)).is_err());
            // SAFETY: ends the process without running anything of the parent's.
            unsafe { libc::_exit(status) }
        }
    }
}

/// Runs `body` in a child and fails if it fails there.
fn succeeds(body: impl FnOnce()) {
    let child = spawn(body);
    assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
}

fn expect(stream: &mut UnixStream, text: &[u8]) {
    let mut read = vec![0; text.len()];
    stream.read_exact(&mut read).expect("the other process speaks");
    assert_eq!(read, text);
}

#[derive(Debug, PartialEq, Eq)]
enum Arrived {
    Nothing,
    End,
}

/// Reads what has arrived, without waiting.
fn arrived(stream: &mut UnixStream) -> Arrived {
    stream.set_nonblocking(true).expect("nonblocking");
    let read = stream.read(&mut [0; 16]);
    stream.set_nonblocking(false).expect("blocking");
    match read {
        Ok(0) => Arrived::End,
        Err(error) if error.kind() == ErrorKind::WouldBlock => Arrived::Nothing,
        other => panic!("unexpected: {other:?}"),
    }
}
