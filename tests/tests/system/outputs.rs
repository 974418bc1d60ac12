//! Results in the worker's own memory: written there and nowhere else, refused with a reason where that is impossible.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_shm::{OwnedSegment, SegmentId, Share};
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, sum};
use ronde_tests::raw::{RawSession, WELL_BEHAVED, session_token};
use ronde_tests::script::{Fill, digest};
use ronde_wire::{Cause, Collective};

use crate::WORKER;

/// Ranks 0, 1 and 3 are ordinary workers; the test controls rank 2, which has its own segment.
struct World {
    cluster: Cluster,
    session: RawSession,
    segment: Arc<OwnedSegment>,
    token: ronde_shm::SessionToken,
}

impl World {
    fn start() -> Result<Self> {
        let mut cluster = Plan::of(&[0, 0, 1, 1]).sidecars(WORKER)?;
        for rank in [0, 1, 3] {
            let worker = cluster.new_worker(rank)?;
            cluster.workers.push(worker);
        }
        let (mut session, claimed) = RawSession::claim(cluster.sidecars[1].socket_dir()?, "test", 2, WELL_BEHAVED)?;
        session.await_epoch()?;
        cluster.workers.iter_mut().try_for_each(ronde_tests::cluster::Worker::await_connected)?;
        let token = session_token(&claimed)?;
        let segment = Arc::new(OwnedSegment::create("outputs", SEGMENT_BYTES, Share::Writable)?);
        session.memory()?.attach(&token, SegmentId(MINE), &segment)?;
        Ok(Self { cluster, session, segment, token })
    }

    /// Sums on all ranks; rank 2's contribution is at the start of its segment.
    fn sum_into(&mut self, request: u64, elements: u64, output: Option<v1::Place>) -> Result<(v1::Completed, u64)> {
        let (name, fill) = (format!("sum {request}"), Fill::Whole { seed: request });
        let bytes = elements * 4;
        self.segment.copy_from(0, &fill.bytes(2, usize::try_from(bytes)?))?;
        let submit = submission(request, &name, elements, arena(MINE, 0, bytes));
        self.session.send(client_message::Message::Submit(v1::Submit { output, ..submit }))?;
        let mut pending = Vec::new();
        for worker in &mut self.cluster.workers {
            pending.push(worker.submit(sum(&name, elements, fill))?);
        }
        let expected = fill.digest_of_sum(&[0, 1, 2, 3], usize::try_from(bytes)?);
        for (worker, id) in self.cluster.workers.iter_mut().zip(pending) {
            ensure!(worker.digest(id, PATIENCE)? == expected, "rank {}: {name} is wrong", worker.rank);
        }
        Ok((self.completed(request)?, expected))
    }

    fn completed(&mut self, request: u64) -> Result<v1::Completed> {
        self.session.await_message(&format!("the completion of request {request}"), |message| match message {
            server_message::Message::Completed(completed) if completed.request == request => Some(completed.clone()),
            _ => None,
        })
    }

    fn bytes_at(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let mut copy = vec![0; usize::try_from(bytes)?];
        self.segment.copy_to(offset, &mut copy)?;
        Ok(copy)
    }
}

fn submission(request: u64, name: &str, elements: u64, input: v1::Place) -> v1::Submit {
    v1::Submit {
        request,
        name: format!("allreduce.{name}"),
        collective: Some(Collective::AllReduce { op: ronde_wire::ReduceOp::Sum }.into()),
        dtype: v1::DType::DtypeF32.into(),
        shape: vec![elements],
        prescale: 1.0,
        postscale: 1.0,
        input: Some(input),
        ..v1::Submit::default()
    }
}

fn arena(segment: u32, offset: u64, bytes: u64) -> v1::Place {
    v1::Place { place: Some(v1::place::Place::Arena(v1::place::Arena { segment, offset, bytes })) }
}

#[test]
fn a_result_is_written_where_it_is_wanted_and_nowhere_else() -> Result<()> {
    let mut world = World::start()?;
    // Small enough to travel with its announcement, in one block, in many.
    for (request, elements) in (1..).zip([10_u64, 5_000, 1 << 20]) {
        let (bytes, offset) = (elements * 4, 8 << 20);
        world.segment.copy_from(offset - 64, &vec![7; usize::try_from(bytes + 128)?])?;
        let (completed, expected) = world.sum_into(request, elements, Some(arena(MINE, offset, bytes)))?;
        ensure!(completed.in_output && completed.result.is_none(), "{completed:?}");
        ensure!(digest(&world.bytes_at(offset, bytes)?) == expected, "{elements} elements are wrong");
        for around in [offset - 64, offset + bytes] {
            ensure!(world.bytes_at(around, 64)? == [7; 64], "bytes at {around} were written");
        }
    }
    let (completed, expected) = world.sum_into(10, 1_000, None)?;
    let Some(v1::place::Place::Arena(at)) = completed.result.and_then(|place| place.place) else {
        anyhow::bail!("a result without an output is in a segment of the sidecar")
    };
    let mut bytes = vec![0; 4_000];
    let results = world.session.memory()?.result(&world.token, SegmentId(at.segment))?;
    results.copy_to(at.offset, &mut bytes)?;
    ensure!(!completed.in_output && digest(&bytes) == expected, "it is wrong");
    // Until it is released, it stays where it was; a result in the worker's output takes nothing of the sidecar.
    world.session.send(client_message::Message::Release(v1::Release { request: 1 }))?;
    world.sum_into(11, 1_000, Some(arena(MINE, 1 << 20, 4_000)))?;
    results.copy_to(at.offset, &mut bytes)?;
    ensure!(digest(&bytes) == expected, "it was overwritten");
    Ok(())
}

#[test]
fn outputs_are_refused_each_with_its_reason() -> Result<()> {
    let mut world = World::start()?;
    let whole = |output| v1::Submit { output: Some(output), ..submission(0, "refused", 100, arena(MINE, 0, 400)) };
    let inline = v1::Place { place: Some(v1::place::Place::Inline(vec![0; 400].into())) };
    let device = v1::place::Device { kind: "cuda".to_owned(), ..v1::place::Device::default() };
    let cases = [
        ("segment 9 is not attached", whole(arena(9, 0, 400))),
        // The other ranks' segments have their own numbers.
        ("segment 0 is not attached", whole(arena(0, 0, 400))),
        ("outside of segment 3 of 16777216 bytes", whole(arena(MINE, (16 << 20) - 399, 400))),
        ("outside of segment 3", whole(arena(MINE, 1 << 40, 400))),
        ("beyond what can be addressed", whole(arena(MINE, u64::MAX, 400))),
        ("some of the input's", whole(arena(MINE, 399, 400))),
        ("some of the input's", whole(arena(MINE, 0, 400))),
        ("no bytes", whole(arena(MINE, 800, 0))),
        ("400", whole(arena(MINE, 800, 404))),
        ("400", whole(arena(MINE, 800, 396))),
        ("is in no segment", whole(inline.clone())),
        ("cuda", whole(v1::Place { place: Some(v1::place::Place::Device(device)) })),
        ("inline request", v1::Submit { input: Some(inline), ..whole(arena(MINE, 800, 400)) }),
    ];
    for (request, (words, submit)) in (1..).zip(cases) {
        let pending = world.cluster.workers[0].submit(sum("refused", 100, Fill::Whole { seed: 1 }))?;
        world.session.send(client_message::Message::Submit(v1::Submit { request, ..submit }))?;
        let refused = world.session.await_failed(request)?;
        println!("{}", refused.reason);
        ensure!(refused.reason.contains(words), "{:?} lacks {words:?}", refused.reason);
        ensure!(refused.cause() == v1::Cause::Refused, "{refused:?}");
        let (_, failed) = world.cluster.workers[0].failure(pending, PATIENCE)?;
        ensure!(failed.cause == Some(Cause::Refused) && failed.rank == Some(2), "{failed:?}");
    }
    let without_result = v1::Submit {
        collective: Some(Collective::Send { to: ronde_wire::Rank(0), tag: 0 }.into()),
        ..whole(arena(MINE, 800, 400))
    };
    world.session.send(client_message::Message::Submit(v1::Submit { request: 500, ..without_result }))?;
    let refused = world.session.await_failed(500)?;
    ensure!(refused.reason.contains("gives this rank no result"), "{}", refused.reason);
    world.sum_into(1_000, 1_000, Some(arena(MINE, 4_096, 4_000))).map(drop)
}

#[test]
fn a_worker_that_dies_while_its_result_is_written_harms_nobody_else() -> Result<()> {
    let mut world = World::start()?;
    let (elements, fill) = (1_u64 << 20, Fill::Whole { seed: 5 });
    let bytes = elements * 4;
    world.segment.copy_from(0, &fill.bytes(2, usize::try_from(bytes)?))?;
    let mut pending = Vec::new();
    for worker in &mut world.cluster.workers {
        pending.push(worker.submit(sum("last", elements, fill))?);
    }
    let submit = submission(1, "last", elements, arena(MINE, 0, bytes));
    world
        .session
        .send(client_message::Message::Submit(v1::Submit { output: Some(arena(MINE, bytes, bytes)), ..submit }))?;
    let World { mut cluster, session, segment, .. } = world;
    // The stream, the session's mapping and the memory go.
    drop((session, segment));
    let expected = fill.digest_of_sum(&[0, 1, 2, 3], usize::try_from(bytes)?);
    for (worker, id) in cluster.workers.iter_mut().zip(pending) {
        // One of two happened first: the result, which is right, or the end of rank 2, which is named.
        match worker.digest(id, PATIENCE) {
            Ok(found) => ensure!(found == expected, "rank {} has a wrong sum", worker.rank),
            Err(failed) => ensure!(format!("{failed:#}").contains("rank 2"), "{failed:#}"),
        }
    }
    for sidecar in &cluster.sidecars {
        sidecar.page("/status")?;
    }
    let directory = cluster.sidecars[1].socket_dir()?;
    RawSession::claim_when_free(directory, "test", 2, WELL_BEHAVED).map(drop).context("its rank is free again")
}

/// The raw session's segment.
const MINE: u32 = 3;
const SEGMENT_BYTES: usize = 16 << 20;
