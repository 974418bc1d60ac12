//! Sessions over a ring in shared memory: they carry all messages, and a worker that breaks its ring ends its own
//! session only.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail, ensure};
use ronde::{Operation, ReduceOp, Transfer};
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_shm::ring::WorkerRing;
use ronde_tests::cluster::{Cluster, Failed, PATIENCE, Plan, Worker, sum};
use ronde_tests::crew::{Crew, DATA_PATHS, DataPath, numbers};
use ronde_tests::raw::{RawRing, RawSession, WELL_BEHAVED, session_token};
use ronde_tests::script::{Fill, digest, scatter};
use ronde_wire::{Cause, limits};

use crate::WORKER;

/// Ranks 0 and 2 are ordinary workers; the test controls rank 1, which has a ring. It shares its sidecar with rank 2.
struct Stage {
    cluster: Cluster,
    session: RawSession,
    claimed: v1::Claimed,
    ring: RawRing,
}

impl Stage {
    fn start() -> Result<Self> {
        let mut cluster = Plan::of(&[0, 1, 1]).sidecars(WORKER)?;
        for rank in [0, 2] {
            let worker = cluster.new_worker(rank)?;
            cluster.workers.push(worker);
        }
        let (mut session, claimed) = RawSession::claim(cluster.sidecars[1].socket_dir()?, "test", 1, WELL_BEHAVED)?;
        let ring = session.take_ring(&claimed)?;
        cluster.workers.iter_mut().try_for_each(Worker::await_connected)?;
        Ok(Self { cluster, session, claimed, ring })
    }

    /// Checks that all ranks, rank 1 among them, get the right sum.
    fn check_sum(&mut self, request: u64) -> Result<()> {
        let (elements, fill, name) = (1_000, Fill::Whole { seed: request }, format!("sum {request}"));
        self.ring.send(submission(request, &name, elements, fill))?;
        let mut pending = Vec::new();
        for worker in &mut self.cluster.workers {
            pending.push(worker.submit(sum(&name, elements, fill))?);
        }
        let expected = fill.digest_of_sum(&[0, 1, 2], usize::try_from(elements * 4)?);
        for (worker, id) in self.cluster.workers.iter_mut().zip(pending) {
            ensure!(worker.digest(id, PATIENCE)? == expected, "rank {}: {name} is wrong", worker.rank);
        }
        let part = |message: &server_message::Message| match message {
            server_message::Message::ResultPart(part) if part.request == request => Some(part.data.clone()),
            _ => None,
        };
        ensure!(digest(&self.ring.await_message("its result", part)?) == expected, "rank 1: {name} is wrong");
        self.ring.await_message("its completion", |message| match message {
            server_message::Message::Completed(completed) if completed.request == request => Some(()),
            _ => None,
        })
    }

    /// Submits on ranks 0 and 2; returns why that fails.
    fn failures(&mut self, provoke: impl FnOnce(&mut Self) -> Result<()>) -> Result<Vec<Failed>> {
        let mut pending = Vec::new();
        for worker in &mut self.cluster.workers {
            pending.push(worker.submit(sum("pending", 100, Fill::Ones))?);
        }
        provoke(self)?;
        let workers = self.cluster.workers.iter_mut().zip(pending);
        workers.map(|(worker, id)| Ok(worker.failure(id, PATIENCE)?.1)).collect()
    }

    /// Checks that the sidecar still serves: the rank can be claimed again.
    fn check_alive(&self) -> Result<()> {
        RawSession::claim(self.cluster.sidecars[1].socket_dir()?, "test", 1, WELL_BEHAVED).map(drop)
    }
}

fn submission(request: u64, name: &str, elements: u64, fill: Fill) -> client_message::Message {
    let bytes = usize::try_from(elements * 4).expect("a test's tensor fits into memory");
    let op = v1::ReduceOp::Sum.into();
    client_message::Message::Submit(v1::Submit {
        request,
        name: format!("allreduce.{name}"),
        collective: Some(v1::Collective {
            kind: Some(v1::collective::Kind::AllReduce(v1::collective::AllReduce { op })),
        }),
        dtype: v1::DType::DtypeF32.into(),
        shape: vec![elements],
        prescale: 1.0,
        postscale: 1.0,
        input: Some(v1::Place { place: Some(v1::place::Place::Inline(fill.bytes(1, bytes).into())) }),
        ..v1::Submit::default()
    })
}

#[test]
fn a_ring_carries_every_message_and_malformed_ones_disturb_nobody() -> Result<()> {
    let mut stage = Stage::start()?;
    stage.check_sum(1)?;
    // The worker writes whether it sleeps and whether it waits for room, truly or not, and rings as often as it likes.
    for (round, offset) in (2..).zip([512 + 256, 512 + 384, 1_024 + 256, 1_024 + 384]) {
        for word in [1_u32, 2, 3, u32::MAX] {
            stage.ring.memory.write_all_at(&word.to_le_bytes(), offset)?;
            (0..1_000).for_each(|_| stage.ring.end.bell.ring());
        }
        stage.check_sum(round)?;
    }
    let (_, page) = stage.cluster.sidecars[1].page("/status")?;
    ensure!(page.contains(r#""sessions":{"live":2,"over_ring":2}"#), "{page}");
    Ok(())
}

#[test]
fn a_broken_ring_ends_its_session_by_name() -> Result<()> {
    let limit = limits::RING_BYTES as u64;
    let length = u32::try_from(limit)?.to_le_bytes();
    // Of the direction to the sidecar: the producer's position; a length after a position that is published; an invalid
    // message. Of the other: the consumer's position, which the sidecar reads when its own side is full.
    let breaks: [(&str, Writes<'_>); 4] = [
        ("its position", &[(512, &[4, 0, 0, 0, 0, 0, 0, 0])]),
        ("its position", &[(512, &[0xFF; 8])]),
        ("a message of 262144 bytes", &[(4_096, &length), (512, &limit.to_le_bytes())]),
        ("an invalid message", &[(4_096, &[4, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]), (512, &[8, 0, 0, 0, 0, 0, 0, 0])]),
    ];
    for (words, writes) in breaks {
        let mut stage = Stage::start()?;
        let failures = stage.failures(|stage| {
            for (offset, bytes) in writes {
                stage.ring.memory.write_all_at(bytes, *offset)?;
            }
            stage.ring.end.bell.ring();
            Ok(())
        })?;
        for failed in failures {
            println!("{}", failed.text);
            ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(1), "{failed:?}");
            ensure!(failed.text.contains(words) && failed.text.contains("ring"), "{words:?}: {}", failed.text);
        }
        stage.check_alive()?;
    }
    Ok(())
}

/// Bytes for positions in a ring's memory.
type Writes<'a> = &'a [(u64, &'a [u8])];

#[test]
fn garbage_in_a_ring_ends_only_its_session() -> Result<()> {
    for seed in 0..3 {
        let mut stage = Stage::start()?;
        let garbage: Vec<u8> = (0..1_u64 << 16).flat_map(|word| scatter(seed << 32 | word).to_le_bytes()).collect();
        let failures = stage.failures(|stage| {
            stage.ring.memory.write_all_at(&garbage, 0)?;
            stage.ring.end.bell.ring();
            Ok(())
        })?;
        for failed in failures {
            ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(1), "{failed:?}");
        }
        stage.check_alive()?;
    }
    Ok(())
}

#[test]
fn a_worker_that_does_not_read_its_ring_is_given_up_and_named() -> Result<()> {
    let mut stage = Stage::start()?;
    let failures = stage.failures(|stage| {
        stage.ring.send(submission(1, "own", 1, Fill::Ones))?;
        // Each is answered with a refusal, and none is read. The stream has no bound that would end this by itself.
        for _ in 0..REFUSED {
            if stage.session.send(submission(1, "own", 1, Fill::Ones)).is_err() {
                break;
            }
        }
        Ok(())
    })?;
    for failed in failures {
        ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(1), "{failed:?}");
        ensure!(failed.text.contains("does not read"), "{}", failed.text);
    }
    stage.check_alive()
}

/// More messages than are queued for a worker, in its ring and after it.
const REFUSED: u64 = 200_000;

#[test]
fn more_than_fits_into_a_ring_waits_until_it_is_read() -> Result<()> {
    let mut stage = Stage::start()?;
    stage.ring.send(submission(1, "own", 1, Fill::Ones))?;
    for _ in 0..20_000 {
        stage.session.send(submission(1, "own", 1, Fill::Ones))?;
    }
    for _ in 0..20_000 {
        stage.ring.await_message("a refusal", |message| {
            matches!(message, server_message::Message::Failed(_)).then_some(())
        })?;
    }
    stage.check_sum(2)
}

#[test]
fn messages_written_before_the_end_of_the_stream_count_and_half_a_message_does_not() -> Result<()> {
    for (announces_end, cause) in [(true, Cause::ShutDown), (false, Cause::RankLost)] {
        let mut stage = Stage::start()?;
        let pending = stage.cluster.workers[0].submit(sum("pending", 100, Fill::Ones))?;
        if announces_end {
            // Nothing wakes the sidecar: only the end of the stream makes it read the ring.
            stage.ring.write(client_message::Message::Goodbye(v1::Goodbye { reason: "written last".to_owned() }))?;
        }
        // The beginning of a message that is not published, as left by a process that is killed while it writes.
        stage.ring.memory.write_all_at(&[200, 0, 0, 0, 1, 2, 3], 4_096 + 512)?;
        drop(stage.session);
        let (_, failed) = stage.cluster.workers[0].failure(pending, PATIENCE)?;
        println!("{}", failed.text);
        ensure!(failed.cause == Some(cause) && failed.rank == Some(1), "{failed:?}");
        ensure!(
            failed.text.contains("written last") == announces_end && !failed.text.contains("ring"),
            "{}",
            failed.text
        );
    }
    Ok(())
}

#[test]
fn a_session_has_one_ring_and_takes_it_once() -> Result<()> {
    let stage = Stage::start()?;
    let token = session_token(&stage.claimed)?;
    let attach = |capacity| -> Result<String> {
        match stage.session.memory()?.ring(&token, WorkerRing::create(capacity)?) {
            Ok(_) => bail!("a second ring was taken"),
            Err(error) => Ok(error.to_string()),
        }
    };
    ensure!(attach(stage.claimed.ring_bytes)?.contains("has a ring already"), "another one");
    ensure!(attach(4_096)?.contains("262144 bytes in each direction"), "a smaller one");
    let mut stage = stage;
    let failures = stage.failures(|stage| stage.session.send(client_message::Message::RingReady(v1::RingReady {})))?;
    for failed in failures {
        ensure!(
            failed.rank == Some(1) && failed.text.contains("without a ring attached, or sent it twice"),
            "{failed:?}"
        );
    }
    Ok(())
}

#[test]
fn threads_of_one_worker_share_its_session() -> Result<()> {
    for path in DATA_PATHS {
        let crew = Crew::start(Plan::of(&[0, 0, 1]), path)?;
        let wrong = AtomicU32::new(0);
        crew.all(|client| {
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let wrong = &wrong;
                    scope.spawn(move || {
                        for round in 0..OPERATIONS {
                            let name = format!("{thread}.{round}");
                            let mine = numbers(&[1], |_| thread + round).expect("a tensor");
                            let expected = numbers(&[1], |_| 3 * (thread + round)).expect("a tensor");
                            let operation = Operation::allreduce(name.as_str(), &mine, ReduceOp::Sum);
                            let mut handle = client.submit_from(&operation).expect("submitted");
                            // Some poll continuously, some wait for a moment, some as long as it takes.
                            while thread % 3 == 0 && !handle.poll() {
                                std::thread::yield_now();
                            }
                            if thread % 3 == 1 {
                                let moment = std::time::Duration::from_micros(50);
                                handle.wait_timeout(moment).expect("alive");
                            }
                            let sum = handle.wait().expect("a result").tensor.expect("a tensor");
                            wrong.fetch_add(u32::from(sum != expected), Ordering::Relaxed);
                        }
                    });
                }
            });
            Ok(())
        })?;
        ensure!(wrong.load(Ordering::Relaxed) == 0, "{path:?}: {wrong:?} sums are wrong");
    }
    Ok(())
}

const THREADS: i64 = 6;
const OPERATIONS: i64 = 150;

#[test]
fn one_job_has_workers_of_both_kinds() -> Result<()> {
    let crew = Crew::start(Plan::of(&[0, 1]), DataPath::from(Transfer::Arena))?;
    ensure!(crew.clients.iter().all(|client| client.submission_path() == "ring"), "the sidecar takes rings");
    drop(crew);
    let crew = Crew::start(Plan::of(&[0, 1]), DataPath(Transfer::Arena, ronde::Ring::Off))?;
    ensure!(crew.clients.iter().all(|client| client.submission_path() == "grpc"), "switched off");
    Ok(())
}
