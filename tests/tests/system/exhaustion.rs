//! Workers that try to use up their sidecar's memory, descriptors and threads: each meets a limit of its own, and the
//! others go on.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{paths, v1};
use ronde_shm::{OwnedSegment, SegmentId, Share};
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, Resident, sum};
use ronde_tests::left_out::without_root;
use ronde_tests::probe::Probe;
use ronde_tests::raw::{RawSession, SessionOptions, WELL_BEHAVED, claim, session_token};
use ronde_tests::script::Fill;
use ronde_wire::{Collective, Pair, Rank, limits};

use crate::WORKER;
use crate::hostile::{arena, check_sum_of_all, inline, result, submission, with_raw_rank};

/// The elements of the largest tensor that travels inside a message.
const LARGEST: u64 = limits::INLINE_BYTES_MAX as u64 / 4;
/// Requests of a mebibyte each: together more than four times what a session may have.
const FLOOD: u64 = 300;

/// A send to rank 0 that no receive matches.
fn unmatched(request: u64, elements: u64) -> v1::Submit {
    let input = inline(Fill::Ones, 2, elements);
    let collective = Some(Collective::Send { to: Rank(0), tag: 7 }.into());
    let name = Pair { from: Rank(2), to: Rank(0) }.message_name(7, request).to_string();
    v1::Submit { collective, name, ..submission(request, "", elements, input) }
}

/// The memory of rank 2's sidecar has grown by less than a session may have there, and what the sidecar needs anyway.
fn check_growth(cluster: &Cluster, before: Resident) -> Result<()> {
    let now = cluster.sidecars[1].process.resident()?;
    let grown = now.sum().saturating_sub(before.sum());
    println!("the sidecar's resident memory has grown by {} MiB", grown >> 20);
    ensure!(grown < limits::MESSAGE_BYTES_PER_SESSION_MAX + SLACK_BYTES, "{before:?} became {now:?}");
    Ok(())
}

/// Buffers of connections, the heap's fragmentation, and pages of the program itself.
const SLACK_BYTES: u64 = 64 << 20;

#[test]
fn inputs_inside_messages_count_against_their_session() -> Result<()> {
    let (mut cluster, mut session, _) = with_raw_rank(WELL_BEHAVED)?;
    let before = cluster.sidecars[1].process.resident()?;
    for request in 1..=FLOOD {
        session.send(Message::Submit(unmatched(request, LARGEST)))?;
    }
    let refused = session.await_failed(FLOOD)?;
    ensure!(refused.cause() == v1::Cause::Refused, "{refused:?}");
    for words in ["MESSAGE_BYTES_PER_SESSION_MAX = 67108864", "shared memory"] {
        ensure!(refused.reason.contains(words), "{:?} lacks {words:?}", refused.reason);
    }
    check_growth(&cluster, before)?;
    // A request that is over gives its bytes back.
    for request in 1..=10 {
        session.send(Message::Withdraw(v1::Withdraw { request, reason: "enough".to_owned() }))?;
        session.await_failed(request)?;
    }
    check_sum_of_all(&mut cluster, &mut session, FLOOD + 1, "afterwards")
}

/// The byte of the input is counted; the rest of its message must not stay in memory.
#[test]
fn a_pending_input_keeps_no_more_than_its_own_bytes() -> Result<()> {
    let (mut cluster, mut session, _) = with_raw_rank(WELL_BEHAVED)?;
    let before = cluster.sidecars[1].process.resident()?;
    for request in 1..=FLOOD {
        let long = "x".repeat(limits::INLINE_BYTES_MAX);
        session.send(Message::Submit(v1::Submit { call_site: Some(long), ..unmatched(request, 1) }))?;
    }
    check_sum_of_all(&mut cluster, &mut session, FLOOD + 1, "afterwards")?;
    check_growth(&cluster, before)
}

#[test]
fn results_that_are_not_read_count_against_their_session() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 1]).sidecars(WORKER)?;
    for rank in [0, 1, 3] {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    let directory = cluster.sidecars[1].socket_dir()?.to_owned();
    let first = Message::Claim(claim(&directory, "test", 2)?);
    let session = RawSession::open(&directory, Some(first), SessionOptions { heartbeats: true, reads: false });
    cluster.workers.iter_mut().try_for_each(ronde_tests::cluster::Worker::await_connected)?;
    let before = cluster.sidecars[1].process.resident()?;
    let mut refused = None;
    for request in 1..=FLOOD {
        let (name, fill) = (format!("unread {request}"), Fill::Ones);
        session.send(Message::Submit(submission(request, &name, LARGEST, inline(fill, 2, LARGEST))))?;
        let mut pending = Vec::new();
        for worker in &mut cluster.workers {
            pending.push(worker.submit(sum(&name, LARGEST, fill))?);
        }
        for (worker, id) in cluster.workers.iter_mut().zip(pending) {
            if let Err(failed) = worker.outcome(id, PATIENCE)?.result {
                refused = Some(failed);
            }
        }
        if refused.is_some() {
            println!("request {request} is refused");
            break;
        }
    }
    let refused = refused.context("results pile up without a limit")?;
    ensure!(refused.rank == Some(2) && refused.text.contains("MESSAGE_BYTES_PER_SESSION_MAX"), "{refused:?}");
    check_growth(&cluster, before)?;
    // The other ranks' operations with rank 2 fail by its name; their own sidecars and links go on.
    ensure!(cluster.sidecars.iter().all(|sidecar| sidecar.page("/healthz").is_ok_and(|page| page.0.contains(" 200 "))));
    Ok(())
}

/// Its pages were never written, so nobody has paid for them yet.
#[test]
fn a_sidecar_allocates_no_pages_for_a_segment_that_it_attaches() -> Result<()> {
    let (mut cluster, mut session, claimed) = with_raw_rank(WELL_BEHAVED)?;
    let token = session_token(&claimed)?;
    let before = cluster.sidecars[1].process.resident()?;
    let segment = OwnedSegment::create("sparse", SPARSE_BYTES, Share::Writable)?;
    let mut memory = session.memory()?;
    memory.attach(&token, SegmentId(0), &segment)?;
    let after = cluster.sidecars[1].process.resident()?;
    let grown = after.shared.saturating_sub(before.shared);
    // The first pages exist: creating a segment populates them.
    let exist = ronde_shm::segment::POPULATED_BYTES_MAX as u64;
    ensure!(grown <= exist + (1 << 20), "{grown} bytes of pages instead of {exist}");
    // Pages appear when they are used, and hold zeros until then.
    let (bytes, last) = (4_000, SPARSE_BYTES as u64 - 8_192);
    session.send(Message::Submit(submission(1, "sparse", bytes / 4, arena(0, last, bytes))))?;
    let mut pending = Vec::new();
    for worker in &mut cluster.workers {
        pending.push(worker.submit(sum("sparse", bytes / 4, Fill::Whole { seed: 1 }))?);
    }
    let own = result(&mut session, &mut memory, &token, 1)?;
    let expected = Fill::Whole { seed: 1 }.digest_of_sum(&[0, 1, 3], usize::try_from(bytes)?);
    ensure!(own == expected, "a hole is not read as zeros");
    for (worker, id) in cluster.workers.iter_mut().zip(pending) {
        ensure!(worker.digest(id, PATIENCE)? == expected, "rank {}", worker.rank);
    }
    Ok(())
}

const SPARSE_BYTES: usize = 512 << 20;

/// One of them uses the whole limit; the others are refused before their segments are mapped.
#[test]
fn concurrent_attachments_stay_within_the_limit_of_their_session() -> Result<()> {
    const LIMIT: usize = 32 << 20;
    const CLIENTS: u32 = 24;
    let cluster = Plan::of(&[0]).arena_bytes_max(LIMIT as u64).sidecars(WORKER)?;
    let directory = cluster.sidecars[0].socket_dir()?;
    let (_session, claimed) = RawSession::claim(directory, "test", 0, WELL_BEHAVED)?;
    let (token, socket) = (session_token(&claimed)?, paths::mem_socket(directory));
    let config = ronde_shm::MemClientConfig { timeout: PATIENCE, result_bytes_max: 0 };
    let before = cluster.sidecars[0].process.resident()?;
    let segments = (0..CLIENTS).map(|_| OwnedSegment::create("hostile", LIMIT, Share::Writable));
    let segments = segments.collect::<Result<Vec<_>, _>>()?;
    let together = Barrier::new(CLIENTS as usize);
    let attach = |number: u32, segment: &OwnedSegment| -> Result<(), String> {
        let memory = ronde_shm::MemClient::connect(&socket, config);
        together.wait();
        // Two of them name the same segment.
        let attached = memory.and_then(|mut memory| memory.attach(&token, SegmentId(number.max(1)), segment));
        attached.map_err(|error| error.to_string())
    };
    let outcomes: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let attach = &attach;
        let threads: Vec<_> =
            (0..).zip(&segments).map(|(number, segment)| scope.spawn(move || attach(number, segment))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    let after = cluster.sidecars[0].process.resident()?;
    let peak = after.peak.saturating_sub(before.sum());
    println!("the peak of resident memory is {} MiB above what it was", peak >> 20);
    ensure!(peak < 3 * LIMIT as u64, "{before:?} became {after:?}");
    let refused: Vec<&String> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    ensure!(refused.len() == CLIENTS as usize - 1, "{outcomes:?}");
    for reason in refused {
        let is_known = ["over the limit of 33554432", "attached already", "connections to mem.sock"];
        ensure!(is_known.iter().any(|words| reason.contains(words)), "{reason}");
    }
    Ok(())
}

/// Waits until the sidecar has closed a connection; what it sends before is dropped.
fn await_closed(stream: &mut UnixStream, by: Instant) -> Result<()> {
    let mut received = [0; 4_096];
    loop {
        let left = by.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut received) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error).context("a connection without a claim stays open"),
        }
    }
}

/// More than any share: silent ones, and ones that have sent a part of their first message.
fn unclaimed(socket: &Path, begin: &[u8]) -> Result<Vec<UnixStream>> {
    let connect = |number: usize| -> Result<UnixStream> {
        let mut stream = UnixStream::connect(socket)?;
        if number % 2 == 1 {
            // The sidecar may have closed it in favour of a newer one.
            drop(stream.write_all(begin));
        }
        Ok(stream)
    };
    (0..UNCLAIMED).map(connect).collect()
}

const UNCLAIMED: usize = 400;

#[test]
fn connections_without_a_claim_are_bounded_and_closed_in_time() -> Result<()> {
    if without_root(
        "connections_without_a_claim_are_bounded_and_closed_in_time",
        "only root reads the descriptors of a sidecar",
    ) {
        return Ok(());
    }
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let directory = cluster.sidecars[0].socket_dir()?.to_owned();
    let before = cluster.sidecars[0].process.descriptors()?;
    let sockets = [
        (paths::rpc_socket(&directory), &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..]),
        (paths::mem_socket(&directory), b"ATTACH 0000"),
    ];
    for (socket, begin) in sockets {
        let (began, probe) = (Instant::now(), Probe::start());
        let mut held = unclaimed(&socket, begin)?;
        cluster.check_sum(&format!("beside unclaimed connections to {}", socket.display()), 10_000)?;
        // Those over the share are closed by their own threads or tasks, a moment later.
        let counted = Instant::now();
        loop {
            let grown = cluster.sidecars[0].process.descriptors()?.saturating_sub(before);
            if grown < UNCLAIMED / 2 {
                break;
            }
            let within = Duration::from_secs(5) + probe.worst();
            ensure!(counted.elapsed() < within, "{grown} descriptors are held by connections without a claim");
            std::thread::sleep(Duration::from_millis(20));
        }
        for stream in &mut held {
            await_closed(stream, began + PATIENCE)?;
        }
        println!("all are closed after {:?}", began.elapsed());
        ensure!(began.elapsed() < CLOSED_WITHIN + probe.worst(), "only after {:?}", began.elapsed());
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Each connection is closed by its own thread or task, a moment later.
        let left = cluster.sidecars[0].process.descriptors()?.saturating_sub(before);
        if left < 16 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{left} descriptors are left");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The deadline of a first message is 10 s; the rest is for a busy machine.
const CLOSED_WITHIN: Duration = Duration::from_secs(25);

#[test]
fn a_worker_connects_beside_unclaimed_connections_on_both_sockets() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).sidecars(WORKER)?;
    let directory = cluster.sidecars[1].socket_dir()?.to_owned();
    let _rpc = unclaimed(&paths::rpc_socket(&directory), b"PRI * HTTP/2.0")?;
    let _mem = unclaimed(&paths::mem_socket(&directory), b"ATTACH 0000")?;
    for rank in [0, 1] {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    cluster.workers.iter_mut().try_for_each(ronde_tests::cluster::Worker::await_connected)?;
    // Large enough to need a segment of shared memory.
    cluster.check_sum("beside them", 1 << 20)
}

/// A session's connections to mem.sock are its own: others' places do not depend on them.
#[test]
fn a_session_has_a_few_connections_to_shared_memory() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1, 1]).sidecars(WORKER)?;
    let (session, claimed) = RawSession::claim(cluster.sidecars[1].socket_dir()?, "test", 2, WELL_BEHAVED)?;
    let token = session_token(&claimed)?;
    let segment = OwnedSegment::create("hostile", 4_096, Share::Writable)?;
    let mut held = Vec::new();
    let mut refused = 0;
    for number in 0..FLOOD {
        let mut memory = session.memory()?;
        match memory.attach(&token, SegmentId(u32::try_from(number)?), &segment) {
            Ok(()) => held.push(memory),
            Err(error) => {
                ensure!(error.to_string().contains("connections to mem.sock"), "{error}");
                refused += 1;
                held.push(memory);
            }
        }
    }
    ensure!(refused > FLOOD / 2, "only {refused} are refused");
    for rank in [0, 1] {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    cluster.workers.iter_mut().try_for_each(ronde_tests::cluster::Worker::await_connected)?;
    // The first connections go on.
    let more = held.first_mut().context("the first is granted")?;
    Ok(more.attach(&token, SegmentId(100_000), &segment)?)
}

/// Without descriptors the sidecar accepts nobody, and neither ends nor spins; it goes on when there are some again.
#[test]
fn a_sidecar_without_descriptors_pauses_and_goes_on() -> Result<()> {
    if without_root("a_sidecar_without_descriptors_pauses_and_goes_on", "only root reads the descriptors of a sidecar")
    {
        return Ok(());
    }
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let directory = cluster.sidecars[1].socket_dir()?.to_owned();
    // Afterwards the workers have their shared memory.
    cluster.check_sum("with descriptors", 1_000)?;
    let sidecar = &cluster.sidecars[1].process;
    let now = sidecar.descriptors()?;
    // As many as are open, and those that a burst of connections takes at once.
    sidecar.limit_descriptors(now + 2)?;
    let sockets = [paths::rpc_socket(&directory), paths::mem_socket(&directory)];
    let waiting: Vec<UnixStream> = sockets
        .iter()
        .flat_map(|socket| std::iter::repeat_n(socket, 60))
        .map(UnixStream::connect)
        .collect::<Result<_, _>>()?;
    let mut spins = Vec::new();
    // Other work of the sidecar may take more of one measurement, but not of each.
    for _ in 0..3 {
        let (began, before) = (Instant::now(), cluster.sidecars[1].process.processor_time()?);
        cluster.check_sum("without descriptors", 1_000)?;
        std::thread::sleep(Duration::from_secs(2));
        let used = cluster.sidecars[1].process.processor_time()?.saturating_sub(before);
        let passed = began.elapsed();
        if used < passed / 10 {
            break;
        }
        spins.push((used, passed));
    }
    ensure!(spins.len() < 3, "it used of the time that passed {spins:?}: it spins");
    cluster.sidecars[1].process.limit_descriptors(1_024)?;
    drop(waiting);
    let deadline = Instant::now() + PATIENCE;
    let answered = loop {
        let first = Message::Heartbeat(v1::Heartbeat {});
        let reason = RawSession::open(&directory, Some(first), WELL_BEHAVED).await_end()?;
        if reason.contains("first message of a session is a Claim") || Instant::now() > deadline {
            break reason;
        }
    };
    ensure!(answered.contains("first message of a session is a Claim"), "{answered}");
    cluster.check_sum("afterwards", 1_000)
}
