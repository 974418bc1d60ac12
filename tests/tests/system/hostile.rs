//! Local peers that break the protocol: each is refused with its reason, and the job of the others continues.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_rpc::{paths, v1};
use ronde_shm::{OwnedSegment, SegmentId, Share};
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, sum};
use ronde_tests::raw::{RawSession, SessionOptions, WELL_BEHAVED, claim, session_token};
use ronde_tests::script::{Fill, digest, scatter};
use ronde_wire::{Cause, Collective, Rank, limits};

use crate::WORKER;

#[test]
fn garbage_on_the_sockets_disturbs_nobody() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let directory = cluster.sidecars[0].socket_dir()?.to_owned();
    let (mut held, mut elements) = (Vec::new(), 1_u64 << 18);
    for (socket, connections) in [(paths::rpc_socket(&directory), 600), (paths::mem_socket(&directory), 1_600)] {
        held.clear();
        for number in 0..connections {
            let mut stream = UnixStream::connect(&socket)?;
            // The sidecar may close at any time; that is how it refuses here.
            let _ = stream.write_all(&garbage(number));
            // Half of them stay, unfinished: more than either socket has places.
            held.extend((number % 2 == 0).then_some(stream));
        }
        // Each one is of another size, and needs another segment of shared memory.
        elements *= 4;
        cluster.check_sum(&format!("beside garbage on {}", socket.display()), elements)?;
    }
    drop(held);
    cluster.check_sum("afterwards", 10_000)
}

/// Random bytes, bytes that begin like the protocol, impossible lengths, and requests that never end.
fn garbage(number: u64) -> Vec<u8> {
    let random = (0..scatter(number) % 4_096).map(|index| scatter(number << 20 | index).to_le_bytes()[0]).collect();
    match number % 5 {
        0 => random,
        1 => [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), random].concat(),
        // The preface of HTTP/2 and a frame of 2^24 - 1 bytes of which nothing follows.
        2 => [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), vec![0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 1]].concat(),
        // Without the end of its line.
        3 => b"ATTACH 00000000000000000000000000000000 0 18446744073709551615".to_vec(),
        _ => vec![b'a'; 100_000],
    }
}

#[test]
fn claims_are_refused_each_with_its_reason() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let directory = cluster.sidecars[0].socket_dir()?.to_owned();
    let good = claim(&directory, "test", 1)?;
    let with = |change: fn(&mut v1::Claim)| {
        let mut claim = good.clone();
        change(&mut claim);
        client_message::Message::Claim(claim)
    };
    let cases = [
        ("first message of a session is a Claim", client_message::Message::Heartbeat(v1::Heartbeat {})),
        ("claimed by a live session", with(|_| {})),
        ("token does not belong to worker 1", with(|claim| claim.token = vec![7; 32].into())),
        ("token", with(|claim| claim.token = vec![7; 31].into())),
        ("token does not belong to worker 0", with(|claim| claim.worker = 0)),
        ("worker 2 is not placed on this sidecar", with(|claim| claim.worker = 2)),
        ("worker", with(|claim| claim.worker = u32::MAX)),
        ("job", with(|claim| claim.job = "another".to_owned())),
        ("job", with(|claim| claim.job = "../../no name".to_owned())),
        ("version", with(|claim| (claim.protocol_min, claim.protocol_max) = (1_000, 2_000))),
    ];
    for (words, first) in cases {
        let reason = RawSession::open(&directory, Some(first), WELL_BEHAVED).await_end()?;
        println!("{reason}");
        ensure!(reason.contains(words), "{reason:?} lacks {words:?}");
        cluster.check_sum(words, 1_000)?;
    }
    Ok(())
}

/// Ranks 0, 1 and 3 are ordinary workers; the test controls rank 2.
pub(crate) fn with_raw_rank(options: SessionOptions) -> Result<(Cluster, RawSession, v1::Claimed)> {
    let mut cluster = Plan::of(&[0, 0, 1, 1]).sidecars(WORKER)?;
    for rank in [0, 1, 3] {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    let (mut session, claimed) = RawSession::claim(cluster.sidecars[1].socket_dir()?, "test", 2, options)?;
    session.await_epoch()?;
    cluster.workers.iter_mut().try_for_each(ronde_tests::cluster::Worker::await_connected)?;
    Ok((cluster, session, claimed))
}

pub(crate) fn submission(request: u64, name: &str, elements: u64, input: v1::place::Place) -> v1::Submit {
    let op = v1::ReduceOp::Sum.into();
    v1::Submit {
        request,
        name: format!("allreduce.{name}"),
        process_set: 0,
        collective: Some(v1::Collective {
            kind: Some(v1::collective::Kind::AllReduce(v1::collective::AllReduce { op })),
        }),
        dtype: v1::DType::DtypeF32.into(),
        shape: vec![elements],
        prescale: 1.0,
        postscale: 1.0,
        input: Some(v1::Place { place: Some(input) }),
        codec: String::new(),
        group: None,
        call_site: None,
        output: None,
        plugin: None,
    }
}

pub(crate) fn arena(segment: u32, offset: u64, bytes: u64) -> v1::place::Place {
    v1::place::Place::Arena(v1::place::Arena { segment, offset, bytes })
}

pub(crate) fn inline(fill: Fill, rank: u32, elements: u64) -> v1::place::Place {
    let bytes = usize::try_from(elements * 4).expect("a test's tensor fits into memory");
    v1::place::Place::Inline(fill.bytes(rank, bytes).into())
}

/// Checks that all ranks, rank 2 among them, get the right sum.
pub(crate) fn check_sum_of_all(
    cluster: &mut Cluster,
    session: &mut RawSession,
    request: u64,
    name: &str,
) -> Result<()> {
    let (elements, fill) = (1_000, Fill::Whole { seed: request });
    session.send(client_message::Message::Submit(submission(request, name, elements, inline(fill, 2, elements))))?;
    let mut pending = Vec::new();
    for worker in &mut cluster.workers {
        pending.push(worker.submit(sum(name, elements, fill))?);
    }
    let expected = fill.digest_of_sum(&[0, 1, 2, 3], usize::try_from(elements * 4)?);
    for (worker, id) in cluster.workers.iter_mut().zip(pending) {
        ensure!(worker.digest(id, PATIENCE)? == expected, "rank {}: {name} is wrong", worker.rank);
    }
    let part = |message: &server_message::Message| match message {
        server_message::Message::ResultPart(part) if part.request == request => Some(part.data.clone()),
        _ => None,
    };
    ensure!(digest(&session.await_message("its result", part)?) == expected, "rank 2: {name} is wrong");
    session.await_message("its completion", |message| match message {
        server_message::Message::Completed(completed) if completed.request == request => Some(()),
        _ => None,
    })
}

#[test]
fn submissions_are_refused_each_with_its_reason() -> Result<()> {
    let (mut cluster, mut session, claimed) = with_raw_rank(WELL_BEHAVED)?;
    let segment = OwnedSegment::create("hostile", 1 << 20, Share::Writable)?;
    let mut memory = session.memory()?;
    memory.attach(&session_token(&claimed)?, SegmentId(3), &segment)?;
    let device = v1::place::Device { kind: "cuda".to_owned(), ..v1::place::Device::default() };
    let too_long = inline(Fill::Whole { seed: 1 }, 2, limits::INLINE_BYTES_MAX as u64 / 4 + 1);
    let of = |input| submission(0, "refused", 100, input);
    let with = |change: fn(&mut v1::Submit)| {
        let mut submit = submission(0, "refused", 100, inline(Fill::Whole { seed: 1 }, 2, 100));
        change(&mut submit);
        submit
    };
    let cases = [
        ("segment 9 is not attached", of(arena(9, 0, 400))),
        ("outside of segment 3 of 1048576 bytes", of(arena(3, (1 << 20) - 399, 400))),
        ("outside of segment 3", of(arena(3, 1 << 40, 400))),
        ("beyond", of(arena(3, u64::MAX, 400))),
        ("bytes", of(arena(3, 0, 401))),
        ("cuda", of(v1::place::Place::Device(device))),
        ("1048576", submission(0, "refused", limits::INLINE_BYTES_MAX as u64 / 4 + 1, too_long)),
        ("codec", with(|submit| submit.codec = "gzip".to_owned())),
        ("type", with(|submit| submit.dtype = 99)),
        ("prescale", with(|submit| submit.prescale = 0.0)),
        ("prescale", with(|submit| submit.prescale = f64::NAN)),
        ("dimensions", with(|submit| submit.shape = vec![1; 33])),
        ("elements", with(|submit| submit.shape = vec![u64::MAX, u64::MAX])),
        ("collective", with(|submit| submit.collective = None)),
        ("set", with(|submit| submit.process_set = 77)),
    ];
    for (request, (words, submit)) in (1..).zip(cases) {
        let pending = cluster.workers[0].submit(sum("refused", 100, Fill::Whole { seed: 1 }))?;
        session.send(client_message::Message::Submit(v1::Submit { request, ..submit }))?;
        let refused = session.await_failed(request)?;
        println!("{}", refused.reason);
        ensure!(refused.reason.contains(words), "{:?} lacks {words:?}", refused.reason);
        ensure!(refused.cause() == v1::Cause::Refused, "{refused:?}");
        if words != "set" {
            // Ranks that wait for the same tensor receive the failure, too.
            let (_, failed) = cluster.workers[0].failure(pending, PATIENCE)?;
            ensure!(failed.cause == Some(Cause::Refused) && failed.rank == Some(2), "{failed:?}");
        }
    }
    // A number that is in use is refused, and the request that has it stays valid.
    session.send(client_message::Message::Submit(submission(
        500,
        "twice",
        100,
        inline(Fill::Whole { seed: 2 }, 2, 100),
    )))?;
    session.send(client_message::Message::Submit(submission(
        500,
        "other",
        100,
        inline(Fill::Whole { seed: 2 }, 2, 100),
    )))?;
    let refused = session.await_failed(500)?;
    ensure!(refused.reason.contains("is in use"), "{}", refused.reason);
    check_sum_of_all(&mut cluster, &mut session, 1_000, "afterwards")
}

#[test]
fn impossible_requests_of_every_kind_are_rejected() -> Result<()> {
    let (mut cluster, mut session, _) = with_raw_rank(WELL_BEHAVED)?;
    let whole = || inline(Fill::Whole { seed: 1 }, 2, 100);
    let of = |collective: Collective| v1::Submit {
        collective: Some(collective.into()),
        ..submission(0, "refused", 100, whole())
    };
    let splits = |splits: &[u64]| of(Collective::AllToAll { splits: splits.to_vec() });
    let cases = [
        ("splits", splits(&[])),
        ("splits", splits(&[50, 49, 0, 0])),
        ("splits", splits(&[u64::MAX, 101, 0, 0])),
        ("splits", splits(&[50, 50])),
        ("takes no input", of(Collective::Scatter { root: Rank(0) })),
        ("takes no input", of(Collective::Recv { from: Rank(0), tag: 0 })),
        ("takes no input", of(Collective::Join)),
        ("root", of(Collective::Broadcast { root: Rank(4) })),
        ("to is 4096", of(Collective::Send { to: Rank(4_096), tag: 0 })),
        ("message", of(Collective::Send { to: Rank(0), tag: 0 })),
        (
            "group size",
            v1::Submit { group: Some(v1::Group { name: "g".to_owned(), size: 0 }), ..of(Collective::AllGather) },
        ),
    ];
    for (request, (words, submit)) in (1..).zip(cases) {
        session.send(client_message::Message::Submit(v1::Submit { request, ..submit }))?;
        let refused = session.await_failed(request)?;
        println!("{}", refused.reason);
        ensure!(refused.reason.contains(words), "{:?} lacks {words:?}", refused.reason);
        ensure!(refused.cause() == v1::Cause::Refused, "{refused:?}");
    }
    // An abstention fails the waiting ranks; one for an invalid name is ignored.
    let abstain = |name: &str, process_set| {
        client_message::Message::Abstain(v1::Abstain {
            name: name.to_owned(),
            process_set,
            reason: "no room".to_owned(),
            group: None,
        })
    };
    session.send(abstain("", 0))?;
    session.send(abstain("allreduce.elsewhere", 77))?;
    let pending = cluster.workers[0].submit(sum("abstained", 100, Fill::Whole { seed: 1 }))?;
    session.send(abstain("allreduce.abstained", 0))?;
    let (_, failed) = cluster.workers[0].failure(pending, PATIENCE)?;
    ensure!(failed.cause == Some(Cause::Refused) && failed.rank == Some(2), "{failed:?}");
    ensure!(failed.text.contains("no room"), "{}", failed.text);
    check_sum_of_all(&mut cluster, &mut session, 1_000, "afterwards")
}

#[test]
fn an_invalid_tensor_name_is_rejected() -> Result<()> {
    let (mut cluster, mut session, _) = with_raw_rank(WELL_BEHAVED)?;
    let fill = Fill::Whole { seed: 1 };
    for (request, name) in (1..).zip([String::new(), "n".repeat(limits::NAME_BYTES_MAX + 1)]) {
        let submit = submission(request, "", 1, inline(fill, 2, 1));
        session.send(client_message::Message::Submit(v1::Submit { name, ..submit }))?;
        let refused = session.await_failed(request)?;
        println!("{}", refused.reason);
        ensure!(refused.reason.contains("name"), "{}", refused.reason);
    }
    check_sum_of_all(&mut cluster, &mut session, 10, "afterwards")
}

#[test]
fn requests_over_the_limit_are_refused_at_once() -> Result<()> {
    let (mut cluster, mut session, _) = with_raw_rank(WELL_BEHAVED)?;
    let limit = limits::PENDING_PER_SESSION_MAX as u64;
    let fill = Fill::Whole { seed: 1 };
    for request in 1..=REQUESTS {
        session.send(client_message::Message::Submit(submission(
            request,
            &format!("flood {request}"),
            1,
            inline(fill, 2, 1),
        )))?;
        // Answers are read as they arrive, so that this session is not closed for not reading.
        if request > limit && (request % 1_000 == 0 || request == REQUESTS) {
            let refused = session.await_failed(request)?;
            ensure!(refused.reason.contains("PENDING_PER_SESSION_MAX"), "{}", refused.reason);
        }
    }
    // The others are unaffected: with some of its requests withdrawn, the job continues.
    for request in 1..=100 {
        session.send(client_message::Message::Withdraw(v1::Withdraw { request, reason: "enough".to_owned() }))?;
        session.await_failed(request)?;
    }
    check_sum_of_all(&mut cluster, &mut session, REQUESTS + 1, "afterwards")
}

const REQUESTS: u64 = 100_000;

#[test]
fn a_worker_that_does_not_read_is_given_up_and_named() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).sidecars(WORKER)?;
    for rank in [0, 1] {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    let directory = cluster.sidecars[1].socket_dir()?.to_owned();
    let first = client_message::Message::Claim(claim(&directory, "test", 2)?);
    let session = RawSession::open(&directory, Some(first), SessionOptions { heartbeats: true, reads: false });
    cluster.workers.iter_mut().try_for_each(ronde_tests::cluster::Worker::await_connected)?;
    let pending = cluster.workers[0].submit(sum("pending", 100, Fill::Whole { seed: 1 }))?;
    // Answers pile up until there is no room for another. The thread may block on a stream that is not read.
    std::thread::spawn(move || while session.send(client_message::Message::Heartbeat(v1::Heartbeat {})).is_ok() {});
    let (_, failed) = cluster.workers[0].failure(pending, PATIENCE)?;
    ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(2), "{failed:?}");
    ensure!(failed.text.contains("does not read"), "{}", failed.text);
    Ok(())
}

#[test]
fn a_flood_of_refusals_ends_the_job_by_the_name_of_its_rank() -> Result<()> {
    for same_name in [true, false] {
        let (mut cluster, session, _) = with_raw_rank(WELL_BEHAVED)?;
        let pending = cluster.workers[0].submit(sum("pending", 100, Fill::Whole { seed: 1 }))?;
        let began = Instant::now();
        for request in 1..=REQUESTS {
            let name = if same_name { "refused".to_owned() } else { format!("refused {request}") };
            if session.send(client_message::Message::Submit(submission(request, &name, 1, arena(9, 0, 4)))).is_err() {
                break;
            }
        }
        let (at, failed) = cluster.workers[0].failure(pending, PATIENCE)?;
        println!("after {:?}: {}", at - began, failed.text);
        ensure!(failed.rank == Some(2) && failed.text.contains("refused"), "{failed:?}");
    }
    Ok(())
}

#[test]
fn shared_memory_needs_a_token_and_has_a_limit() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).arena_bytes_max(4 << 20).sidecars(WORKER)?;
    let worker = cluster.new_worker(0)?;
    cluster.workers.push(worker);
    let (session, claimed) = RawSession::claim(cluster.sidecars[1].socket_dir()?, "test", 1, WELL_BEHAVED)?;
    let token = session_token(&claimed)?;
    let segment = |bytes| OwnedSegment::create("hostile", bytes, Share::Writable);
    let (mut refused, mut memory) = (Vec::new(), session.memory()?);
    let unknown = ronde_shm::SessionToken::from_bytes([9; 16]);
    refused.push(("no live session has this token", memory.attach(&unknown, SegmentId(1), &segment(4_096)?)));
    refused.push(("over the limit of 4194304", memory.attach(&token, SegmentId(1), &segment(8 << 20)?)));
    let before = cluster.sidecars[1].process.resident()?;
    let (first, second) = (segment(3 << 20)?, segment(1 << 20)?);
    memory.attach(&token, SegmentId(1), &first)?;
    refused.push(("attached already", memory.attach(&token, SegmentId(1), &segment(4_096)?)));
    refused.push(("over the limit of 4194304", memory.attach(&token, SegmentId(2), &segment(2 << 20)?)));
    memory.attach(&token, SegmentId(2), &second)?;
    // The last byte is in use.
    refused.push(("over the limit of 4194304", memory.attach(&token, SegmentId(3), &segment(4_096)?)));
    refused.push(("no result segment 5", memory.result(&token, SegmentId(5)).map(drop)));
    for (words, outcome) in refused {
        let reason = outcome.err().with_context(|| format!("what should fail with {words:?} was granted"))?.to_string();
        println!("{reason}");
        ensure!(reason.contains(words), "{reason:?} lacks {words:?}");
    }
    let mapped = cluster.sidecars[1].process.resident()?.shared - before.shared;
    ensure!(mapped <= (4 << 20) + (64 << 10), "{mapped} bytes are mapped");
    Ok(())
}

/// Waits for a result in shared memory, releases it and gives its digest.
pub(crate) fn result(
    session: &mut RawSession,
    memory: &mut ronde_shm::MemClient,
    token: &ronde_shm::SessionToken,
    request: u64,
) -> Result<u64> {
    let place = session.await_message(&format!("the result of request {request}"), |message| match message {
        server_message::Message::Completed(completed) if completed.request == request => completed.result.clone(),
        _ => None,
    })?;
    let Some(v1::place::Place::Arena(at)) = place.place else { anyhow::bail!("the result has no location") };
    let mut bytes = vec![0; usize::try_from(at.bytes)?];
    memory.result(token, SegmentId(at.segment))?.copy_to(at.offset, &mut bytes)?;
    session.send(client_message::Message::Release(v1::Release { request }))?;
    Ok(digest(&bytes))
}

#[test]
fn a_stream_without_a_claim_is_closed() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let silent = SessionOptions { heartbeats: false, reads: true };
    let mut session = RawSession::open(cluster.sidecars[0].socket_dir()?, None, silent);
    let reason = session.await_end()?;
    ensure!(reason.contains("no claim arrived"), "{reason}");
    cluster.check_sum("afterwards", 1_000)
}
