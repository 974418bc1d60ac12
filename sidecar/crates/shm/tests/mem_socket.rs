//! End-to-end tests of `mem.sock`, also against peers that violate its protocol.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use ronde_shm::error::ProtocolError;
use ronde_shm::passing::{LINE_BYTES_MAX, Received, recv_with_fd, send_with_fd};
use ronde_shm::ring::{Bell, PeerRing, Pushed, RingEnd, Wait, WorkerRing};
use ronde_shm::{
    MemClient, MemClientConfig, MemHost, OwnedSegment, PciAddress, SegmentId, ServeOutcome, SessionToken, Share,
    ShmError, WorkerSegment, serve_one,
};

const BYTES: usize = 8_192;
const RING_BYTES: u64 = 8_192;
/// Long enough for a busy machine. Tests that wait for a timeout use a short one.
const TIMEOUT: Duration = Duration::from_secs(20);
const HEX: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

fn token() -> SessionToken {
    SessionToken::from_bytes([0xaa; 16])
}

fn pair() -> (UnixStream, UnixStream) {
    let (worker, sidecar) = UnixStream::pair().expect("sockets");
    for stream in [&worker, &sidecar] {
        stream.set_read_timeout(Some(TIMEOUT)).expect("timeout");
    }
    (worker, sidecar)
}

fn config() -> MemClientConfig {
    MemClientConfig { timeout: TIMEOUT, result_bytes_max: 1 << 20 }
}

/// A host with one session.
struct OneSession {
    reserved: Vec<(SegmentId, u64)>,
    attached: Vec<(SegmentId, WorkerSegment)>,
    results: Vec<Arc<OwnedSegment>>,
    room_bytes: u64,
    ring_is_reserved: bool,
    ring: Option<RingEnd>,
    devices: Vec<(SegmentId, (u64, PciAddress), OwnedFd)>,
}

impl OneSession {
    fn new() -> Self {
        let result = OwnedSegment::create("result", BYTES, Share::ReadOnlyForOthers).expect("segment");
        let results = vec![Arc::new(result)];
        let (reserved, attached, devices) = Default::default();
        let room_bytes = 2 * BYTES as u64;
        Self { reserved, attached, results, room_bytes, ring_is_reserved: false, ring: None, devices }
    }

    fn check(given: &SessionToken) -> Result<(), String> {
        if *given == token() { Ok(()) } else { Err("no such session".to_owned()) }
    }
}

impl MemHost for OneSession {
    fn reserve(&mut self, given: &SessionToken, segment: SegmentId, bytes: u64) -> Result<(), String> {
        Self::check(given)?;
        if self.reserved.iter().any(|(id, _)| *id == segment) {
            return Err(format!("input segment {segment} is attached already"));
        }
        let room = self.room_bytes.checked_sub(bytes);
        self.room_bytes = room.ok_or_else(|| format!("{bytes} bytes do not fit {}", self.room_bytes))?;
        self.reserved.push((segment, bytes));
        Ok(())
    }

    fn release(&mut self, _: &SessionToken, segment: SegmentId) {
        let at = self.reserved.iter().position(|(id, _)| *id == segment).expect("it is reserved");
        self.room_bytes += self.reserved.remove(at).1;
    }

    fn attach(&mut self, _: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String> {
        assert!(self.reserved.contains(&(segment, mapped.len())), "it is reserved before it is mapped");
        self.attached.push((segment, mapped));
        Ok(())
    }

    fn result(&mut self, given: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String> {
        Self::check(given)?;
        let index = usize::try_from(segment.0).map_err(|error| error.to_string())?;
        self.results.get(index).cloned().ok_or_else(|| format!("there is no result segment {segment}"))
    }

    fn reserve_ring(&mut self, given: &SessionToken, capacity: u64) -> Result<(), String> {
        Self::check(given)?;
        if capacity != RING_BYTES || self.ring_is_reserved {
            return Err(format!("a ring has {RING_BYTES} bytes here, and a session has one"));
        }
        self.ring_is_reserved = true;
        Ok(())
    }

    fn release_ring(&mut self, _: &SessionToken) {
        assert!(std::mem::take(&mut self.ring_is_reserved), "it is reserved");
    }

    fn ring(&mut self, _: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String> {
        self.ring = Some(ring.into_end(Bell::over(bell).map_err(|error| error.to_string())?));
        Ok(())
    }

    fn device(
        &mut self,
        given: &SessionToken,
        segment: SegmentId,
        memory: (u64, PciAddress),
        descriptor: OwnedFd,
    ) -> Result<(), String> {
        Self::check(given)?;
        self.devices.push((segment, memory, descriptor));
        Ok(())
    }
}

/// Serves on a thread until the worker closes the connection or violates the protocol.
fn serve(sidecar: UnixStream) -> std::thread::JoinHandle<(OneSession, Result<(), ShmError>)> {
    std::thread::spawn(move || {
        let mut host = OneSession::new();
        loop {
            match serve_one(&sidecar, &mut host) {
                Ok(ServeOutcome::Closed | ServeOutcome::Ringing) => return (host, Ok(())),
                Ok(_) => {}
                Err(error) => return (host, Err(error)),
            }
        }
    })
}

#[test]
fn device_memory_is_passed_with_its_gpu_and_only_with_the_sessions_token() {
    let (worker, sidecar) = pair();
    let serving = serve(sidecar);
    let mut client = MemClient::over(worker, config()).expect("a client");
    // To this crate it is a descriptor of anything.
    let memory = OwnedSegment::create("device", BYTES, Share::Writable).expect("segment");
    let gpu: PciAddress = "0000:01:00.0".parse().expect("an address");
    let other = SessionToken::from_bytes([0xbb; 16]);
    let error = client.attach_device(&other, SegmentId(7), (123, gpu), memory.fd()).expect_err("of another session");
    assert!(matches!(&error, ShmError::Refused { reason, .. } if reason == "no such session"), "{error}");
    client.attach_device(&token(), SegmentId(7), (123, gpu), memory.fd()).expect("taken over");
    drop(client);
    let (host, served) = serving.join().expect("no panic");
    served.expect("no violation");
    let passed: Vec<_> = host.devices.iter().map(|(segment, memory, _)| (*segment, *memory)).collect();
    assert_eq!(passed, [(SegmentId(7), (123, gpu))]);
}

#[test]
fn segments_go_both_ways_over_a_socket_with_a_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mem.sock");
    let listener = UnixListener::bind(&path).expect("bound");
    let mut client = MemClient::connect(&path, config()).expect("connected");
    let served = serve(listener.accept().expect("accepted").0);
    assert_eq!(client.peer_credentials().expect("credentials").uid, nix::unistd::geteuid().as_raw());

    let input = OwnedSegment::create("input", BYTES, Share::Writable).expect("segment");
    input.copy_from(100, b"from the worker").expect("inside");
    client.attach(&token(), SegmentId(7), &input).expect("attached");
    let result = client.result(&token(), SegmentId(0)).expect("mapped");
    assert_eq!(result.len(), BYTES as u64);
    drop(client);

    let (host, outcome) = served.join().expect("served");
    assert!(outcome.is_ok(), "dropping the client closes the connection: {outcome:?}");
    host.results[0].copy_from(8, b"from the sidecar").expect("inside");
    let mut read = [0; 16];
    result.copy_to(8, &mut read).expect("inside");
    assert_eq!(&read, b"from the sidecar");
    let mut read = [0; 15];
    assert_eq!(host.attached[0].0, SegmentId(7));
    host.attached[0].1.copy_to(100, &mut read).expect("inside");
    assert_eq!(&read, b"from the worker");
}

#[test]
fn a_ring_is_handed_over_and_its_connection_becomes_the_bell() {
    let client = |worker| MemClient::over(worker, config()).expect("a client");
    let made = |capacity| WorkerRing::create(capacity).expect("memory");
    let refused = |outcome: Result<RingEnd, ShmError>| match outcome {
        Err(ShmError::Refused { request, reason }) => (request, reason),
        other => panic!("expected a refusal, not {other:?}"),
    };
    let (worker, sidecar) = pair();
    let served = serve(sidecar);
    let unknown_token = SessionToken::from_bytes([0xab; 16]);
    let (request, reason) = refused(client(worker).ring(&unknown_token, made(RING_BYTES)));
    assert_eq!((request.as_str(), reason.as_str()), ("a ring of 8192 bytes a direction", "no such session"));
    served.join().expect("served").1.expect("in order");

    let (worker, sidecar) = pair();
    let served = serve(sidecar);
    assert_eq!(
        refused(client(worker).ring(&token(), made(2 * RING_BYTES))).1,
        "a ring has 8192 bytes here, and a session has one"
    );
    served.join().expect("served").1.expect("in order");

    let (worker, sidecar) = pair();
    let served = serve(sidecar);
    let mut worker = client(worker).ring(&token(), made(RING_BYTES)).expect("attached");
    let (host, outcome) = served.join().expect("served");
    outcome.expect("in order");
    let mut sidecar = host.ring.expect("it was handed over");
    let mut message = Vec::new();
    assert!(sidecar.consumer.arm(Wait::Bell).expect("in order"));
    assert_eq!(worker.producer.push(b"there"), Ok(Pushed::Done));
    worker.producer.wake();
    let mut listening = sidecar.bell.listen().expect("a descriptor");
    assert_eq!(listening.read(&mut [0; 16]).expect("rung"), 1);
    assert_eq!(listening.read(&mut [0; 16]).expect_err("once").kind(), ErrorKind::WouldBlock);
    assert!(sidecar.consumer.pop(&mut message).expect("in order"));
    assert_eq!(message, b"there");
    assert_eq!(sidecar.producer.push(b"and back"), Ok(Pushed::Done));
    assert!(worker.consumer.pop(&mut message).expect("in order"));
    assert_eq!(message, b"and back");
    drop(sidecar);
    assert_eq!(worker.bell.listen().expect("a descriptor").read(&mut [0; 16]).expect("the end"), 0);
}

#[test]
fn a_ring_that_is_none_is_refused_with_the_reason() {
    let (worker, sidecar) = pair();
    let served = serve(sidecar);
    let segment = OwnedSegment::create("no ring", BYTES, Share::Writable).expect("segment");
    let line = format!("RING {HEX} {RING_BYTES}\n");
    send_with_fd(&worker, line.as_bytes(), Some(segment.fd())).expect("sent");
    let Received::Line { line, fd: None } = recv_with_fd(&worker).expect("a reply") else { panic!("no reply") };
    assert!(line.starts_with("ERR the ring of the session was announced with"), "{line}");
    drop(worker);
    let host = served.join().expect("served").0;
    assert!(host.ring.is_none() && !host.ring_is_reserved);
}

#[test]
fn a_refusal_names_its_reason_and_the_connection_goes_on() {
    let (worker, sidecar) = pair();
    let served = serve(sidecar);
    let mut client = MemClient::over(worker.try_clone().expect("a copy"), config()).expect("a client");
    let input = OwnedSegment::create("input", BYTES, Share::Writable).expect("segment");
    let large = OwnedSegment::create("large", 3 * BYTES, Share::Writable).expect("segment");
    let unknown_token = SessionToken::from_bytes([0xab; 16]);
    let refusal = |outcome: Result<(), ShmError>| match outcome {
        Err(ShmError::Refused { reason, .. }) => reason,
        other => panic!("expected a refusal, not {other:?}"),
    };
    assert_eq!(refusal(client.attach(&unknown_token, SegmentId(0), &input)), "no such session");
    assert_eq!(refusal(client.result(&unknown_token, SegmentId(0)).map(drop)), "no such session");
    assert_eq!(refusal(client.result(&token(), SegmentId(9)).map(drop)), "there is no result segment 9");
    let reason = refusal(client.attach(&token(), SegmentId(0), &large));
    assert_eq!(reason, "24576 bytes do not fit 16384");
    // Of another size than announced, and no memfd: what was reserved for them is free again.
    let announced = format!("ATTACH {HEX} 0 {}\n", 2 * BYTES);
    for (fd, words) in [(input.fd(), "but has 8192"), (std::io::stdin().as_fd(), "is not a memfd")] {
        send_with_fd(&worker, announced.as_bytes(), Some(fd)).expect("sent");
        let Received::Line { line, fd: None } = recv_with_fd(&worker).expect("a reply") else { panic!("no reply") };
        assert!(line.starts_with("ERR ") && line.contains(words), "{line}");
    }
    client.attach(&token(), SegmentId(0), &input).expect("attached");
    assert_eq!(refusal(client.attach(&token(), SegmentId(0), &input)), "input segment 0 is attached already");
    drop(client);
    let (host, outcome) = served.join().expect("served");
    assert!(outcome.is_ok());
    assert_eq!(host.attached.len(), 1);
}

#[test]
fn a_result_larger_than_the_client_wants_is_not_mapped() {
    let (worker, sidecar) = pair();
    let served = serve(sidecar);
    let small = MemClientConfig { result_bytes_max: 4_096, ..config() };
    let mut client = MemClient::over(worker, small).expect("a client");
    let error = client.result(&token(), SegmentId(0)).expect_err("too large");
    assert!(matches!(error, ShmError::OverLimit { bytes: 8_192, limit_bytes: 4_096, .. }), "{error}");
    drop(client);
    assert!(served.join().expect("served").1.is_ok());
}

/// Runs `attack` on the socket. Returns how the sidecar's side ended and what the worker received.
fn attacked(attack: impl FnOnce(&UnixStream)) -> (Result<ServeOutcome, ShmError>, String) {
    let (mut worker, sidecar) = pair();
    attack(&worker);
    let outcome = serve_one(&sidecar, &mut OneSession::new());
    drop(sidecar);
    let mut reply = String::new();
    // Unread bytes turn the close into a reset; what the sidecar sent before is still readable.
    let _ = worker.read_to_string(&mut reply);
    (outcome, reply)
}

fn sends(text: &str) -> impl FnOnce(&UnixStream) {
    let text = text.to_owned();
    move |mut stream| stream.write_all(text.as_bytes()).expect("sent")
}

/// Sends `line` with these descriptors in one control message.
fn sends_fds(stream: &UnixStream, line: &str, fds: &[RawFd]) {
    let rights = [ControlMessage::ScmRights(fds)];
    sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(line.as_bytes())], &rights, MsgFlags::empty(), None)
        .expect("sent");
}

#[test]
fn lines_outside_the_protocol_end_the_connection_with_a_reason() {
    let long = "A".repeat(LINE_BYTES_MAX);
    let two = format!("RESULT {HEX} 0\nRESULT {HEX} 0\n");
    let cases = [
        ("\n".to_owned(), ProtocolError::WordCount),
        ("HELLO\n".to_owned(), ProtocolError::UnknownWord),
        (format!("{long}\n"), ProtocolError::LineTooLong { limit: LINE_BYTES_MAX }),
        (long, ProtocolError::LineTooLong { limit: LINE_BYTES_MAX }),
        (two, ProtocolError::TrailingBytes),
        (format!("RESULT {HEX} 0\0\n"), ProtocolError::NotText),
        (format!("RESULT {HEX} 0\r\n"), ProtocolError::NotText),
        (format!("RESULT {HEX} é\n"), ProtocolError::NotText),
        (format!("ATTACH {HEX} 0 8192\n"), ProtocolError::MissingDescriptor),
    ];
    for (text, expected) in cases {
        let (outcome, reply) = attacked(sends(&text));
        assert!(matches!(outcome, Err(ShmError::Protocol(error)) if error == expected), "{text:?}: {outcome:?}");
        assert!(reply.starts_with("ERR ") && reply.ends_with('\n'), "{text:?}: {reply:?}");
        assert!(!reply.contains(HEX), "no token in a message: {reply:?}");
    }
}

#[test]
fn an_endless_line_is_refused() {
    let (outcome, _) = attacked(|mut stream| {
        stream.write_all(b"RESULT").expect("sent");
        stream.shutdown(Shutdown::Write).expect("half closed");
    });
    assert!(matches!(outcome, Err(ShmError::PeerClosed { .. })), "{outcome:?}");

    let (mut worker, sidecar) = pair();
    sidecar.set_read_timeout(Some(Duration::from_millis(1))).expect("timeout");
    assert!(matches!(serve_one(&sidecar, &mut OneSession::new()), Ok(ServeOutcome::Idle)));
    worker.write_all(b"RESULT").expect("sent");
    let outcome = serve_one(&sidecar, &mut OneSession::new());
    assert!(matches!(outcome, Err(ShmError::TimedOut { .. })), "{outcome:?}");
}

#[test]
fn the_reads_of_a_line_are_bounded() {
    let (worker, sidecar) = pair();
    let file = tempfile::tempfile().expect("a file");
    // Descriptors keep the fragments apart: the kernel does not merge across them.
    for _ in 0..9 {
        sends_fds(&worker, "A", &[file.as_raw_fd()]);
    }
    let error = recv_with_fd(&sidecar).expect_err("too many pieces");
    assert!(matches!(error, ShmError::Protocol(ProtocolError::LineFragmented { .. })), "{error}");
}

#[test]
fn descriptors_that_do_not_belong_are_refused_and_closed() {
    // A pipe's read end reaches its end only when all copies of the write end are closed.
    let cases: [(usize, &str, ProtocolError); 5] = [
        (1, "RESULT aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0\n", ProtocolError::UnexpectedDescriptor),
        (2, "ATTACH aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0 8192\n", ProtocolError::TooManyDescriptors),
        (3, "ATTACH aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0 8192\n", ProtocolError::TooManyDescriptors),
        (200, "ATTACH aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0 8192\n", ProtocolError::ControlTruncated),
        (1, "junk\n", ProtocolError::UnknownWord),
    ];
    for (count, line, expected) in cases {
        let (read_end, write_end) = UnixStream::pair().expect("sockets");
        let (outcome, _) = attacked(|stream| {
            sends_fds(stream, line, &vec![write_end.as_raw_fd(); count]);
            drop(write_end);
        });
        assert!(matches!(outcome, Err(ShmError::Protocol(error)) if error == expected), "{line:?}: {outcome:?}");
        assert_ended(read_end);
    }
    let (read_end, write_end) = UnixStream::pair().expect("sockets");
    let (outcome, reply) = attacked(|stream| {
        send_with_fd(stream, format!("ATTACH {HEX} 0 8192\n").as_bytes(), Some(write_end.as_fd())).expect("sent");
        drop(write_end);
    });
    assert!(matches!(outcome, Ok(ServeOutcome::Refused { .. })), "{outcome:?}");
    assert!(reply.contains("is not a memfd"), "{reply:?}");
    assert_ended(read_end);
}

fn assert_ended(mut read_end: UnixStream) {
    read_end.set_read_timeout(Some(TIMEOUT)).expect("timeout");
    let mut rest = Vec::new();
    assert_eq!(read_end.read_to_end(&mut rest).expect("all copies of the other end are closed"), 0);
}

#[test]
fn a_received_descriptor_is_closed_on_exec() {
    let (worker, sidecar) = pair();
    let file = tempfile::tempfile().expect("a file");
    send_with_fd(&worker, b"x\n", Some(file.as_fd())).expect("sent");
    let Received::Line { line, fd: Some(fd) } = recv_with_fd(&sidecar).expect("received") else {
        panic!("a line with a descriptor was sent")
    };
    assert_eq!(line, "x");
    let flags = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_GETFD).expect("flags");
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
}

#[test]
fn an_oversized_line_is_not_sent() {
    let (worker, sidecar) = pair();
    let fits = [vec![b'x'; LINE_BYTES_MAX - 1], vec![b'\n']].concat();
    let too_long = [fits.clone(), vec![b'\n']].concat();
    let error = send_with_fd(&worker, &too_long, None).expect_err("too long");
    assert!(matches!(error, ShmError::Protocol(ProtocolError::LineTooLong { .. })), "{error}");
    send_with_fd(&worker, &fits, None).expect("sent");
    let received = recv_with_fd(&sidecar).expect("received");
    assert!(matches!(received, Received::Line { line, fd: None } if line.len() == LINE_BYTES_MAX - 1));
}

#[test]
fn a_full_socket_times_out() {
    let (worker, _sidecar) = pair();
    worker.set_write_timeout(Some(Duration::from_millis(1))).expect("timeout");
    let error = std::iter::repeat_with(|| send_with_fd(&worker, b"x\n", None)).find_map(Result::err);
    assert!(matches!(error, Some(ShmError::TimedOut { .. })), "{error:?}");
}

#[test]
fn dropping_a_client_ends_its_connection_for_every_copy() {
    let (worker, sidecar) = pair();
    let _copy_in_another_process = worker.try_clone().expect("a copy");
    drop(MemClient::over(worker, config()).expect("a client"));
    assert!(matches!(recv_with_fd(&sidecar), Ok(Received::Closed)));
}

/// A client whose sidecar sends `reply` with these descriptors to one request.
fn answered(reply: &'static str, fd: Option<BorrowedFd<'_>>) -> (MemClient, UnixStream) {
    let (worker, sidecar) = pair();
    send_with_fd(&sidecar, reply.as_bytes(), fd).expect("sent");
    (MemClient::over(worker, config()).expect("a client"), sidecar)
}

#[test]
fn replies_outside_the_protocol_break_the_client() {
    let file = OwnedFd::from(tempfile::tempfile().expect("a file"));
    let input = OwnedSegment::create("input", BYTES, Share::Writable).expect("segment");
    let attach = |client: &mut MemClient| client.attach(&token(), SegmentId(0), &input);
    let result = |client: &mut MemClient| client.result(&token(), SegmentId(0)).map(drop);
    type Ask<'a> = &'a dyn Fn(&mut MemClient) -> Result<(), ShmError>;
    let cases: [(&str, Option<BorrowedFd<'_>>, Ask<'_>, ProtocolError); 8] = [
        ("OK 5\n", None, &attach, ProtocolError::UnexpectedReply),
        ("OK\n", Some(file.as_fd()), &attach, ProtocolError::UnexpectedDescriptor),
        ("ERR no\n", Some(file.as_fd()), &attach, ProtocolError::UnexpectedDescriptor),
        ("OK\n", None, &result, ProtocolError::UnexpectedReply),
        ("OK 8192\n", None, &result, ProtocolError::MissingDescriptor),
        ("ERR no\n", Some(file.as_fd()), &result, ProtocolError::UnexpectedDescriptor),
        ("OK -1\n", Some(file.as_fd()), &result, ProtocolError::Number { what: "number of bytes" }),
        ("NO\n", None, &result, ProtocolError::UnknownWord),
    ];
    for (reply, fd, ask, expected) in cases {
        let (mut client, _sidecar) = answered(reply, fd);
        let error = ask(&mut client).expect_err("outside the protocol");
        assert!(matches!(error, ShmError::Protocol(error) if error == expected), "{reply:?}: {error}");
        assert!(matches!(ask(&mut client), Err(ShmError::ConnectionBroken)), "{reply:?}");
    }
}

#[test]
fn a_dead_or_silent_sidecar_breaks_the_client() {
    let (worker, sidecar) = pair();
    let mut client = MemClient::over(worker, config()).expect("a client");
    drop(sidecar);
    assert!(matches!(client.result(&token(), SegmentId(0)), Err(ShmError::PeerClosed { .. })));
    assert!(matches!(client.result(&token(), SegmentId(0)), Err(ShmError::ConnectionBroken)));

    let (worker, _sidecar) = pair();
    let hasty = MemClientConfig { timeout: Duration::from_millis(1), ..config() };
    let mut client = MemClient::over(worker, hasty).expect("a client");
    assert!(matches!(client.result(&token(), SegmentId(0)), Err(ShmError::TimedOut { .. })));
    assert!(matches!(client.result(&token(), SegmentId(0)), Err(ShmError::ConnectionBroken)));

    let (worker, _sidecar) = pair();
    let never = MemClientConfig { timeout: Duration::ZERO, ..config() };
    assert!(matches!(MemClient::over(worker, never), Err(ShmError::System { .. })));
}

#[test]
fn a_socket_that_is_not_there_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mem.sock");
    let error = MemClient::connect(&path, config()).expect_err("nobody listens");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
}
