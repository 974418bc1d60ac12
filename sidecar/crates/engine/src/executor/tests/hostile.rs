//! Tests of peers that break the protocol, of overlapping epochs, and of failing links.

use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::plan as make_plan;
use ronde_collectives::plan::{Transfer, Work, WorkKind};
use ronde_wire::frame::{Chunk, ChunkHeader};
use ronde_wire::{Algorithm, Codec, DType, Epoch, Lane, Rank, ReduceOp, Seq, SidecarIndex, Tuning};

use super::topology;
use super::world::PlainMemory;
use crate::event::{Admission, Arithmetic};
use crate::executor::{Executor, ExecutorAction, ExecutorConfig, ROUND_TAKEN, Violation};

const PEER: SidecarIndex = SidecarIndex(1);
const ELEMENTS: u64 = 10_000;
const GRANT_BYTES: u64 = 9_000;

struct Fixture {
    executor: Executor,
    memory: PlainMemory,
}

impl Fixture {
    fn new() -> Self {
        let config = ExecutorConfig { me: SidecarIndex(0), lane: Lane(0), early_grant_bytes: GRANT_BYTES };
        let mut executor = Executor::new(config);
        executor.handle_epoch(Epoch(1));
        Self { executor, memory: PlainMemory::default() }
    }

    fn admit(&mut self, epoch: Epoch, seq: Seq) -> Arc<Admission> {
        let admission = admission(epoch, seq);
        let bytes = vec![0; 4 * usize::try_from(ELEMENTS).expect("small")];
        self.memory.contributions.inputs.insert((seq, 0, Rank(0)), bytes.clone());
        self.memory.outputs.insert((seq, 0, None), bytes);
        self.executor.handle_admission(Arc::clone(&admission));
        admission
    }

    fn actions(&mut self) -> Vec<ExecutorAction> {
        let mut actions = Vec::new();
        while let Some(action) = self.executor.poll_action(&mut self.memory) {
            if !matches!(action, ExecutorAction::Worked { .. }) {
                actions.push(action);
            }
        }
        actions
    }
}

/// An all-reduce with one peer, on a ring, a window of one.
fn admission(epoch: Epoch, seq: Seq) -> Arc<Admission> {
    let topology = topology(&[0, 1]);
    let work = Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors: vec![vec![ELEMENTS]] };
    let tuning = Tuning { algorithm: Algorithm::Ring, chunk_bytes: 4_096, lanes: 1, window: 1 };
    let plan = make_plan(ronde_wire::Member(0), &topology, &work, &tuning).expect("a plan");
    let op = Some(ReduceOp::Sum);
    let arithmetic = Arithmetic {
        dtype: DType::F32,
        op,
        ranks: 2,
        prescale: 1.0,
        postscale: 1.0,
        codec: Codec::None,
        at_once: false,
    };
    Arc::new(Admission {
        epoch,
        seq,
        topology: Arc::new(topology),
        plan: Arc::new(plan),
        arithmetic,
        plugin: None,
        tensors: Vec::new(),
        local_ranks: vec![Rank(0)],
        served: vec![Rank(0)],
        set_served: [Rank(0)].into(),
        joined: Vec::new(),
        contributions: Vec::new(),
        scheduled: false,
    })
}

/// The chunk that the plan of an admission expects from the peer.
fn chunk(admission: &Admission, sub_schedule: u32, round: u32) -> Chunk {
    let transfers = &admission.plan.sub_schedules[sub_schedule as usize].rounds[round as usize].transfers;
    let span = transfers.iter().find_map(|transfer| match transfer {
        Transfer::Receive { span, .. } => Some(*span),
        Transfer::Send { .. } => None,
    });
    let span = span.expect("a round in which something comes");
    let header = ChunkHeader { lane: Lane(0), sub_schedule, round, start: span.start, len: span.len };
    let data = Bytes::from(vec![0; usize::try_from(span.len * 4).expect("small")]);
    Chunk { epoch: admission.epoch, seq: admission.seq, early: true, header, data }
}

#[test]
fn invalid_chunks_are_violations() {
    let mut fixture = Fixture::new();
    let admission = fixture.admit(Epoch(1), Seq(3));
    let good = chunk(&admission, 0, 0);
    let mut refused = |change: &dyn Fn(&mut Chunk)| {
        let mut bad = good.clone();
        change(&mut bad);
        fixture.executor.handle_chunk(PEER, bad).expect_err("a violation")
    };
    let unexpected = |violation| matches!(violation, Violation::Unexpected { .. });
    let span = |violation| matches!(violation, Violation::Span { .. });
    assert!(matches!(refused(&|c| c.header.lane = Lane(1)), Violation::Lane { .. }));
    assert!(unexpected(refused(&|c| c.header.sub_schedule = 900)));
    assert!(unexpected(refused(&|c| c.header.round = 900)));
    assert!(unexpected(refused(&|c| {
        (c.header.round, c.header.start, c.header.len, c.data) = (ROUND_TAKEN, 0, 0, Bytes::new());
    })));
    assert!(span(refused(&|c| c.header.start += 1)));
    assert!(span(refused(&|c| c.header.len -= 1)));
    assert!(span(refused(&|c| c.data = c.data.slice(1..))));
    assert!(matches!(refused(&|c| c.seq = Seq(2)), Violation::Over { .. }));
    assert!(matches!(refused(&|c| (c.seq, c.early) = (Seq(9), false)), Violation::Unadmitted { .. }));
    let unknown_peer = fixture.executor.handle_chunk(SidecarIndex(7), good.clone());
    assert!(matches!(unknown_peer, Err(Violation::Unexpected { .. })));

    assert_eq!(fixture.executor.handle_chunk(PEER, good.clone()), Ok(()));
    let again = fixture.executor.handle_chunk(PEER, good);
    assert!(matches!(again, Err(Violation::Duplicate { .. })));
}

#[test]
fn a_peer_cannot_run_far_ahead() {
    let mut fixture = Fixture::new();
    let admission = fixture.admit(Epoch(1), Seq(1));
    let ahead =
        [0, 1, 2, 3].map(|sub_schedule| fixture.executor.handle_chunk(PEER, chunk(&admission, sub_schedule, 0)));
    assert_eq!(ahead[..3], [Ok(()), Ok(()), Ok(())]);
    assert_eq!(ahead[3], Err(Violation::Ahead { seq: Seq(1), sub_schedules_max: 3 }));
}

#[test]
fn early_chunks_are_bounded_by_the_grant() {
    let mut fixture = Fixture::new();
    let early = |sub_schedule| chunk(&admission(Epoch(1), Seq(4)), sub_schedule, 0);
    assert_eq!(fixture.executor.handle_chunk(PEER, early(0)), Ok(()));
    assert_eq!(fixture.executor.handle_chunk(PEER, early(1)), Ok(()));
    let beyond = fixture.executor.handle_chunk(PEER, early(2));
    assert!(matches!(beyond, Err(Violation::Credit { granted_bytes: GRANT_BYTES, .. })), "{beyond:?}");
    assert!(fixture.executor.private_bytes().early <= GRANT_BYTES);
}

#[test]
fn held_chunks_are_checked_at_admission() {
    let mut fixture = Fixture::new();
    let mut bad = chunk(&admission(Epoch(1), Seq(2)), 0, 0);
    bad.header.start += 1;
    assert_eq!(fixture.executor.handle_chunk(PEER, bad), Ok(()), "nothing is known yet");
    fixture.admit(Epoch(1), Seq(2));
    let actions = fixture.actions();
    let disconnects = actions
        .iter()
        .any(|action| matches!(action, ExecutorAction::Disconnect { peer: PEER, violation: Violation::Span { .. } }));
    assert!(disconnects, "{actions:?}");
}

#[test]
fn chunks_for_an_operation_without_this_sidecar_are_a_violation_at_the_next_admission() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.executor.handle_chunk(PEER, chunk(&admission(Epoch(1), Seq(1)), 0, 0)), Ok(()));
    fixture.admit(Epoch(1), Seq(2));
    let actions = fixture.actions();
    let over =
        |a: &ExecutorAction| matches!(a, ExecutorAction::Disconnect { violation: Violation::Over { seq: Seq(1) }, .. });
    assert!(actions.iter().any(over), "{actions:?}");
}

#[test]
fn old_epochs_are_dropped_and_new_ones_are_held() {
    let mut fixture = Fixture::new();
    fixture.executor.handle_link_up(PEER, GRANT_BYTES);
    let old = chunk(&admission(Epoch(1), Seq(1)), 0, 0);
    let new = chunk(&admission(Epoch(2), Seq(1)), 0, 0);
    assert_eq!(fixture.executor.handle_chunk(PEER, new), Ok(()));
    fixture.executor.handle_epoch_end(Epoch(1));
    assert_eq!(fixture.executor.handle_chunk(PEER, old.clone()), Ok(()));
    fixture.executor.handle_epoch(Epoch(2));
    assert_eq!(fixture.executor.handle_chunk(PEER, old), Ok(()));
    assert_eq!(fixture.executor.stats().chunks_dropped, 2);
    fixture.admit(Epoch(2), Seq(1));
    assert_eq!(fixture.executor.private_bytes().early, 0);
    assert!(fixture.executor.private_bytes().parked > 0, "the one of the new epoch waits for its round");
    let actions = fixture.actions();
    let is_admitted =
        |a: &ExecutorAction| matches!(a, ExecutorAction::Admitted { to: PEER, epoch: Epoch(2), seq: Seq(1) });
    assert_eq!(actions.iter().filter(|action| is_admitted(action)).count(), 1, "{actions:?}");
}

#[test]
fn nothing_is_sent_before_the_link_and_its_credit_are_known() {
    let mut fixture = Fixture::new();
    fixture.admit(Epoch(1), Seq(1));
    let opens = fixture.actions();
    assert!(matches!(opens[..], [ExecutorAction::Open { peer: PEER }]), "{opens:?}");
    fixture.executor.handle_link_up(PEER, 100);
    assert!(fixture.actions().is_empty(), "a chunk is larger than the credit");
    fixture.executor.handle_admitted(PEER, Epoch(1), Seq(1));
    let sends = fixture.actions();
    assert!(matches!(&sends[..], [ExecutorAction::Send { chunk, .. }] if !chunk.early), "{sends:?}");
    fixture.executor.handle_link_down(PEER);
    fixture.admit(Epoch(1), Seq(2));
    let again = fixture.actions();
    assert!(matches!(again[..], [ExecutorAction::Open { peer: PEER }]), "{again:?}");
}

/// The lane may learn of the new link before it learns of the end of the epoch. (Seed 9452 of the simulation.)
#[test]
fn admissions_of_a_peer_do_not_carry_over_to_its_next_process() {
    let mut fixture = Fixture::new();
    fixture.executor.handle_link_up(PEER, GRANT_BYTES);
    fixture.executor.handle_admitted(PEER, Epoch(1), Seq(1));
    fixture.executor.handle_link_down(PEER);
    fixture.executor.handle_link_up(PEER, GRANT_BYTES);
    fixture.admit(Epoch(1), Seq(1));
    let actions = fixture.actions();
    assert!(actions.iter().any(|a| matches!(a, ExecutorAction::Send { chunk, .. } if chunk.early)), "{actions:?}");
    assert!(!actions.iter().any(|a| matches!(a, ExecutorAction::Send { chunk, .. } if !chunk.early)), "{actions:?}");
}

/// Lanes and the control plane overtake each other: messages of a peer may belong to an epoch that has yet to begin
/// here.
#[test]
fn a_peer_may_admit_in_an_epoch_that_has_yet_to_begin_here() {
    let mut fixture = Fixture::new();
    fixture.executor.handle_link_up(PEER, 0);
    fixture.executor.handle_admitted(PEER, Epoch(2), Seq(1));
    fixture.executor.handle_epoch(Epoch(2));
    fixture.admit(Epoch(2), Seq(1));
    let actions = fixture.actions();
    assert!(actions.iter().any(|a| matches!(a, ExecutorAction::Send { chunk, .. } if !chunk.early)), "{actions:?}");
}

/// With a credit that covers no chunk the peer waits for `Admitted`, which needs a link.
#[test]
fn a_peer_beyond_credit_is_notified_once_its_link_is_up() {
    let config = ExecutorConfig { me: SidecarIndex(0), lane: Lane(0), early_grant_bytes: 0 };
    let mut fixture = Fixture { executor: Executor::new(config), memory: PlainMemory::default() };
    fixture.executor.handle_epoch(Epoch(1));
    fixture.admit(Epoch(1), Seq(1));
    let is_admitted = |a: &ExecutorAction| matches!(a, ExecutorAction::Admitted { to: PEER, seq: Seq(1), .. });
    assert!(!fixture.actions().iter().any(is_admitted));
    fixture.executor.handle_link_up(PEER, 0);
    let actions = fixture.actions();
    assert_eq!(actions.iter().filter(|action| is_admitted(action)).count(), 1, "{actions:?}");
}

/// Results may be released and inputs reused when an operation is done, so none of its chunks may be in a queue.
#[test]
fn done_waits_until_everything_has_left_the_queue() {
    let mut fixture = Fixture::new();
    fixture.executor.handle_link_up(PEER, 1 << 20);
    let admission = Arc::new(Admission { plan: Arc::new(broadcast()), ..(*admission(Epoch(1), Seq(1))).clone() });
    fixture.memory.contributions.inputs.insert((Seq(1), 0, Rank(0)), vec![7; 40]);
    fixture.memory.outputs.insert((Seq(1), 0, None), vec![0; 40]);
    fixture.executor.handle_admission(admission);
    let actions = fixture.actions();
    let done = |a: &ExecutorAction| matches!(a, ExecutorAction::Done { seq: Seq(1), .. });
    assert!(actions.iter().any(|a| matches!(a, ExecutorAction::Send { .. })) && !actions.iter().any(done));
    fixture.executor.handle_sent(PEER, 1);
    assert!(fixture.actions().iter().any(done));
    assert_eq!(fixture.memory.outputs[&(Seq(1), 0, None)], [7; 40]);
}

fn broadcast() -> ronde_collectives::plan::Plan {
    let work = Work { kind: WorkKind::Broadcast { root: Rank(0) }, element_bytes: 4, tensors: vec![vec![10]] };
    let tuning = Tuning { algorithm: Algorithm::BinomialTree, chunk_bytes: 4_096, lanes: 1, window: 1 };
    make_plan(ronde_wire::Member(0), &topology(&[0, 1]), &work, &tuning).expect("a plan")
}

#[test]
fn lost_memory_fails_the_operation_and_drops_its_chunks() {
    let mut fixture = Fixture::new();
    let admission = fixture.admit(Epoch(1), Seq(1));
    fixture.memory.contributions.inputs.clear();
    let actions = fixture.actions();
    let failed = |a: &ExecutorAction| matches!(a, ExecutorAction::Failed { seq: Seq(1), .. });
    assert!(actions.iter().any(failed), "{actions:?}");
    assert_eq!(fixture.executor.handle_chunk(PEER, chunk(&admission, 0, 0)), Ok(()));
    assert_eq!(fixture.executor.stats().chunks_dropped, 1);
}
