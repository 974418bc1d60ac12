//! A worker that writes over a tensor while it travels: all ranks get the same result, and nothing else changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1;
use ronde_rpc::v1::client_message::Message;
use ronde_rpc::v1::server_message;
use ronde_shm::{MemClient, OwnedSegment, SegmentId, SessionToken, Share};
use ronde_tests::cluster::{Cluster, PATIENCE, sum};
use ronde_tests::raw::{RawSession, WELL_BEHAVED, session_token};
use ronde_tests::script::{Fill, Wanted, digest, scatter};
use ronde_wire::{Collective, DType, Pair, Rank, ReduceOp};

use crate::hostile::{arena, submission, with_raw_rank};

/// The rank whose tensor is scribbled over. The others are ordinary workers.
const ME: Rank = Rank(2);
const ELEMENTS: u64 = 1 << 18;
const BYTES: u64 = 4 * ELEMENTS;
/// Attempts to change values in time; the first one nearly always does.
const ROUNDS: u64 = 5;

/// An operation whose contribution of rank 2 is scribbled over.
struct Case {
    name: String,
    collective: Collective,
    dtype: DType,
    /// Whether all results are the same: then they are compared.
    shared: bool,
}

/// Every reduction, and every other collective in which a rank contributes a tensor.
fn cases() -> Vec<Case> {
    let case = |collective: Collective, dtype, shared| {
        let op = collective.reduce_op().map_or("", ReduceOp::name);
        Case { name: format!("{} {op}", collective.name()), collective, dtype, shared }
    };
    let floats = [
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::Adasum,
        ReduceOp::Median,
        ReduceOp::ClippedMean,
    ];
    let bits = [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor];
    let all = floats.map(|op| (op, DType::F32)).into_iter().chain(bits.map(|op| (op, DType::I32)));
    let mut cases: Vec<Case> = all.map(|(op, dtype)| case(Collective::AllReduce { op }, dtype, true)).collect();
    let splits = vec![ELEMENTS / 4; 4];
    cases.extend([
        case(Collective::AllGather, DType::F32, true),
        case(Collective::Broadcast { root: ME }, DType::F32, true),
        case(Collective::ReduceScatter { op: ReduceOp::Sum }, DType::F32, false),
        case(Collective::Reduce { op: ReduceOp::Sum, root: Rank(0) }, DType::F32, false),
        case(Collective::Gather { root: Rank(0) }, DType::F32, false),
        case(Collective::AllToAll { splits }, DType::F32, false),
        case(Collective::Scatter { root: ME }, DType::F32, false),
        case(Collective::Send { to: Rank(0), tag: 3 }, DType::F32, false),
    ]);
    cases
}

/// The test's end of rank 2: a segment with two tensors, of which the first is scribbled over.
struct Scribbled {
    cluster: Cluster,
    session: RawSession,
    memory: MemClient,
    token: SessionToken,
    segment: Arc<OwnedSegment>,
    requests: u64,
    /// Messages to rank 0 so far, which are numbered.
    messages: u64,
}

impl Scribbled {
    fn start() -> Result<Self> {
        let (cluster, session, claimed) = with_raw_rank(WELL_BEHAVED)?;
        let (mut memory, token) = (session.memory()?, session_token(&claimed)?);
        let segment = Arc::new(OwnedSegment::create("scribbled", usize::try_from(2 * BYTES)?, Share::Writable)?);
        memory.attach(&token, SegmentId(0), &segment)?;
        Ok(Self { cluster, session, memory, token, segment, requests: 0, messages: 0 })
    }

    /// Performs the case beside a sum of tensors that nobody disturbs. Returns the results' digests by rank; `None` for
    /// a rank without one.
    fn perform(&mut self, case: &Case, round: u64, scribbles: bool) -> Result<[Option<u64>; 4]> {
        let (rough, whole) = (Fill::Rough { seed: round }, Fill::Whole { seed: round });
        let bytes = usize::try_from(BYTES)?;
        self.segment.copy_from(0, &rough.bytes(ME.0, bytes))?;
        self.segment.copy_from(BYTES, &whole.bytes(ME.0, bytes))?;
        let scribbler = scribbles.then(|| Scribbler::start(&self.segment, BYTES));
        let mut pending = Vec::new();
        for worker in &mut self.cluster.workers {
            let rank = Rank(worker.rank);
            let disturbed = match case.part_of(rank) {
                Some(part) => {
                    let has_result = part.collective.has_result(rank);
                    Some((worker.submit(Wanted { fill: rough, ..part })?, has_result))
                }
                None => None,
            };
            pending.push((rank, disturbed, worker.submit(sum("untouched", ELEMENTS, whole))?));
        }
        let (disturbed, untouched) = (self.requests + 1, self.requests + 2);
        self.requests += 2;
        let own = self.own_part(case, disturbed);
        self.session.send(Message::Submit(own))?;
        self.session.send(Message::Submit(submission(untouched, "untouched", ELEMENTS, arena(0, BYTES, BYTES))))?;
        let mut results = [None; 4];
        results[ME.0 as usize] = self.result(disturbed)?;
        let expected = whole.digest_of_sum(&[0, 1, 2, 3], bytes);
        ensure!(self.result(untouched)? == Some(expected), "{}: rank 2: the tensor beside it is wrong", case.name);
        for (worker, (rank, disturbed, untouched)) in self.cluster.workers.iter_mut().zip(pending) {
            let beside = worker.digest(untouched, PATIENCE)?;
            ensure!(beside == expected, "{}: {rank}: the tensor beside it is wrong", case.name);
            if let Some((id, has_result)) = disturbed {
                let result = worker.digest(id, PATIENCE)?;
                results[rank.0 as usize] = has_result.then_some(result);
            }
        }
        if let Some(scribbler) = scribbler {
            scribbler.stop();
        }
        Ok(results)
    }

    fn own_part(&mut self, case: &Case, request: u64) -> v1::Submit {
        let kind = case.collective.name().to_ascii_lowercase();
        let name = match case.collective {
            Collective::Send { to, tag } => {
                self.messages += 1;
                Pair { from: ME, to }.message_name(tag, self.messages - 1).to_string()
            }
            _ => format!("{kind}.{}", case.name),
        };
        v1::Submit {
            name,
            collective: Some(case.collective.clone().into()),
            dtype: v1::DType::from(case.dtype).into(),
            ..submission(request, "", ELEMENTS, arena(0, 0, BYTES))
        }
    }

    /// Waits for a request of rank 2, releases its result and gives its digest; `None` if it has none.
    fn result(&mut self, request: u64) -> Result<Option<u64>> {
        let place =
            self.session.await_message(&format!("the result of request {request}"), |message| match message {
                server_message::Message::Completed(completed) if completed.request == request => {
                    Some(completed.result.clone())
                }
                _ => None,
            })?;
        let Some(v1::place::Place::Arena(at)) = place.and_then(|place| place.place) else { return Ok(None) };
        let mut bytes = vec![0; usize::try_from(at.bytes)?];
        self.memory.result(&self.token, SegmentId(at.segment))?.copy_to(at.offset, &mut bytes)?;
        self.session.send(Message::Release(v1::Release { request }))?;
        Ok(Some(digest(&bytes)))
    }
}

impl Case {
    /// What another rank submits; `None` if it takes no part.
    fn part_of(&self, rank: Rank) -> Option<Wanted> {
        let collective = match self.collective {
            Collective::Send { to, tag } if to == rank => Collective::Recv { from: ME, tag },
            Collective::Send { .. } => return None,
            ref collective => collective.clone(),
        };
        let name = (!matches!(collective, Collective::Recv { .. })).then(|| self.name.clone());
        Some(Wanted { name, collective, dtype: self.dtype, shape: vec![ELEMENTS], fill: Fill::Ones })
    }
}

#[test]
fn scribbling_over_a_travelling_tensor_changes_nothing_but_its_values() -> Result<()> {
    let mut scribbled = Scribbled::start()?;
    for case in cases() {
        let quiet = scribbled.perform(&case, 0, false)?;
        let mut changed = false;
        for _ in 0..ROUNDS {
            let results = scribbled.perform(&case, 0, true)?;
            let mut present = results.iter().flatten();
            let first = present.next().with_context(|| format!("{}: nobody has a result", case.name))?;
            ensure!(!case.shared || present.all(|other| other == first), "{}: ranks differ: {results:?}", case.name);
            changed = results != quiet;
            if changed {
                break;
            }
        }
        ensure!(changed, "{}: nothing was scribbled over in time; the test shows nothing", case.name);
    }
    Ok(())
}

/// A thread that writes over a slot until it is stopped.
struct Scribbler {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Scribbler {
    fn start(segment: &Arc<OwnedSegment>, bytes: u64) -> Self {
        let (segment, stop) = (Arc::clone(segment), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut turn = 0;
            while !stopped.load(Ordering::Relaxed) {
                turn += 1;
                let page: Vec<u8> = (0..512).flat_map(|word| scatter(turn << 16 | word).to_le_bytes()).collect();
                let offset = scatter(turn) % (bytes / 4_096) * 4_096;
                segment.copy_from(offset, &page).expect("a page of the slot");
            }
        });
        Self { stop, thread }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("scribbling does not panic");
    }
}
