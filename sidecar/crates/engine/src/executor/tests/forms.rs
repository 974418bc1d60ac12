//! Tests of chunks of every form that differ from the plan, and of chunks around a prelude.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use ronde_collectives::plan as make_plan;
use ronde_collectives::plan::{Form, Transfer, Work, WorkKind};
use ronde_wire::frame::{Chunk, ChunkHeader};
use ronde_wire::{Algorithm, Codec, DType, Epoch, Lane, Member, Rank, ReduceOp, Seq, SidecarIndex, Tuning};

use super::topology;
use super::world::PlainMemory;
use crate::event::{Admission, Arithmetic};
use crate::executor::{Executor, ExecutorAction, ExecutorConfig, ROUND_TAKEN, Violation};

const PEER: SidecarIndex = SidecarIndex(1);
const ELEMENTS: u64 = 20_000;
const SEQ: Seq = Seq(1);

/// One operation of three ranks; this member serves the middle one, the peer serves the others.
struct Fixture {
    executor: Executor,
    memory: PlainMemory,
    admission: Arc<Admission>,
}

impl Fixture {
    fn new(kind: WorkKind, op: ReduceOp, codec: Codec) -> Self {
        let topology = topology(&[1, 0, 1]);
        let work = Work { kind, element_bytes: 4, tensors: vec![vec![ELEMENTS]] };
        let tuning = Tuning { algorithm: Algorithm::Direct, chunk_bytes: 4_096, lanes: 1, window: 1 };
        let plan = make_plan(Member(0), &topology, &work, &tuning).expect("a plan");
        let arithmetic = Arithmetic {
            dtype: DType::F32,
            op: Some(op),
            ranks: 3,
            prescale: 1.0,
            postscale: 1.0,
            codec,
            at_once: false,
        };
        let (epoch, local_ranks, served) = (Epoch(1), vec![Rank(1)], vec![Rank(1)]);
        let (tensors, joined, contributions) = (Vec::new(), Vec::new(), Vec::new());
        let admission = Admission {
            epoch,
            seq: SEQ,
            topology: Arc::new(topology),
            plan: Arc::new(plan),
            arithmetic,
            plugin: None,
            tensors,
            set_served: served.as_slice().into(),
            served,
            local_ranks,
            joined,
            contributions,
            scheduled: false,
        };
        let mut memory = PlainMemory::default();
        let bytes = vec![0; 4 * usize::try_from(ELEMENTS).expect("small")];
        memory.contributions.inputs.insert((SEQ, 0, Rank(1)), bytes.clone());
        memory.outputs.insert((SEQ, 0, None), bytes);
        let config = ExecutorConfig { me: SidecarIndex(0), lane: Lane(0), early_grant_bytes: 1 << 20 };
        let mut executor = Executor::new(config);
        executor.handle_epoch(epoch);
        executor.handle_link_up(PEER, 1 << 20);
        let admission = Arc::new(admission);
        executor.handle_admission(Arc::clone(&admission));
        Self { executor, memory, admission }
    }

    fn chunk(&self, sub_schedule: u32, round: u32) -> Chunk {
        let transfers = &self.admission.plan.sub_schedules[sub_schedule as usize].rounds[round as usize].transfers;
        let received = transfers.iter().find_map(|transfer| match *transfer {
            Transfer::Receive { span, form, .. } => Some((span, form)),
            Transfer::Send { .. } => None,
        });
        let (span, form) = received.expect("a round in which something comes");
        let element_bytes = match form {
            Form::Values => 4,
            Form::Encoded => 2,
            Form::EachRank => 2 * 4,
            Form::Measures => 8,
        };
        let header = ChunkHeader { lane: Lane(0), sub_schedule, round, start: span.start, len: span.len };
        let data = Bytes::from(vec![0; usize::try_from(span.len * element_bytes).expect("small")]);
        Chunk { epoch: Epoch(1), seq: SEQ, early: true, header, data }
    }

    /// The rounds of a sub-schedule in which this member receives.
    fn rounds(&self, sub_schedule: u32) -> Vec<u32> {
        let receives = |transfer: &Transfer| matches!(transfer, Transfer::Receive { .. });
        let rounds = (0..).zip(&self.admission.plan.sub_schedules[sub_schedule as usize].rounds);
        rounds.filter(|(_, round)| round.transfers.iter().any(receives)).map(|(number, _)| number).collect()
    }

    fn sub_schedules(&self) -> u32 {
        u32::try_from(self.admission.plan.sub_schedules.len()).expect("few sub-schedules")
    }

    fn last_round(&self, sub_schedule: u32) -> u32 {
        *self.rounds(sub_schedule).last().expect("something comes")
    }

    fn receive(&mut self, chunk: Chunk) -> Result<(), Violation> {
        self.executor.handle_chunk(PEER, chunk)
    }

    /// Performs everything that can be done now, with a port that sends every chunk at once. Returns the sub-schedules
    /// of the sent chunks, and whether the operation is done.
    fn run_to_end(&mut self) -> (Vec<u32>, bool) {
        let (mut sub_schedules, mut done) = (Vec::new(), false);
        while let Some(action) = self.executor.poll_action(&mut self.memory) {
            match action {
                ExecutorAction::Send { chunk, .. } => {
                    sub_schedules.push(chunk.header.sub_schedule);
                    self.executor.handle_sent(PEER, 1);
                }
                ExecutorAction::Done { .. } => done = true,
                ExecutorAction::Worked { .. } | ExecutorAction::Open { .. } | ExecutorAction::Admitted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        (sub_schedules, done)
    }
}

fn coded() -> Fixture {
    Fixture::new(WorkKind::AllReduceCoded { encoded_bytes: 2 }, ReduceOp::Sum, Codec::Bf16)
}

fn median() -> Fixture {
    Fixture::new(WorkKind::AllReduceNAry, ReduceOp::Median, Codec::None)
}

fn clipped_mean() -> Fixture {
    Fixture::new(WorkKind::AllReduceTwoPass { measures: 1 }, ReduceOp::ClippedMean, Codec::None)
}

fn adaptive_sum() -> Fixture {
    Fixture::new(WorkKind::AllReduceAdaptive, ReduceOp::Adasum, Codec::None)
}

/// Chunks of the right length for another form, or for another number of ranks, are rejected.
#[test]
fn chunks_must_have_the_length_of_their_form() {
    for (mut fixture, last) in
        [(coded(), false), (median(), false), (median(), true), (clipped_mean(), true), (adaptive_sum(), true)]
    {
        let round = if last { fixture.last_round(0) } else { 0 };
        let good = fixture.chunk(0, round);
        let (bytes, span) = (good.data.len(), usize::try_from(good.header.len).expect("small"));
        let other_forms = [2, 4, 8].map(|each| each * span);
        let wrong = other_forms.into_iter().chain([0, bytes - 1, bytes + 1, bytes / 2, 2 * bytes, 1 << 20]);
        for wrong in wrong.filter(|wrong| *wrong != bytes) {
            let chunk = Chunk { data: Bytes::from(vec![0; wrong]), ..good.clone() };
            let refused = fixture.receive(chunk);
            assert!(matches!(refused, Err(Violation::Span { .. })), "{wrong} bytes for {bytes}: {refused:?}");
        }
        let mut longer = good.clone();
        (longer.header.len, longer.data) = (good.header.len + 1, Bytes::from(vec![0; bytes / span * (span + 1)]));
        assert!(
            matches!(fixture.receive(longer), Err(Violation::Span { .. })),
            "as long as it says, and not as planned"
        );
        assert_eq!(fixture.receive(good), Ok(()));
    }
}

/// Only the prelude is sent before it ends; chunks of later sub-schedules wait.
#[test]
fn no_sub_schedule_begins_before_the_prelude_ends() {
    for mut fixture in [clipped_mean(), adaptive_sum()] {
        assert_eq!(fixture.receive(fixture.chunk(1, 0)), Ok(()), "the peer may have concluded");
        let mut begun = fixture.run_to_end().0;
        for round in fixture.rounds(0) {
            assert!(!begun.is_empty() && begun.iter().all(|sub_schedule| *sub_schedule == 0), "{begun:?}");
            assert_eq!(fixture.receive(fixture.chunk(0, round)), Ok(()));
            begun = fixture.run_to_end().0;
        }
        // The first stage and, as the peer's chunk is here, the second.
        assert_eq!(begun, [1, 1]);
    }
}

#[test]
fn a_peer_cannot_run_far_ahead_of_a_prelude() {
    for mut fixture in [clipped_mean(), adaptive_sum()] {
        fixture.run_to_end();
        let ahead = [1, 2, 3, 4].map(|sub_schedule| fixture.receive(fixture.chunk(sub_schedule, 0)));
        assert_eq!(ahead[..3], [Ok(()), Ok(()), Ok(())]);
        assert_eq!(ahead[3], Err(Violation::Ahead { seq: SEQ, sub_schedules_max: 3 }));
        assert!(fixture.run_to_end().0.is_empty());
    }
}

/// Measures of a peer are untrusted: with any values the operation ends without a panic.
#[test]
fn measures_may_have_any_value() {
    for measure in [f64::NAN, f64::INFINITY, -1.0, f64::MAX, -0.0, f64::from_bits(1), f64::NEG_INFINITY] {
        for mut fixture in [clipped_mean(), adaptive_sum()] {
            let mut done = fixture.run_to_end().1;
            for sub_schedule in 0..fixture.sub_schedules() {
                for round in fixture.rounds(sub_schedule) {
                    assert!(!done);
                    let mut chunk = fixture.chunk(sub_schedule, round);
                    if sub_schedule == 0 && round == fixture.last_round(0) {
                        chunk.data = measure.to_le_bytes().repeat(chunk.data.len() / 8).into();
                    }
                    assert_eq!(fixture.receive(chunk), Ok(()));
                    done = fixture.run_to_end().1;
                }
            }
            assert!(done, "{measure}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// A peer sends any chunks in any order, valid ones among them, until a violation is detected: nothing panics, and
    /// no more than the bounds is held.
    #[test]
    fn a_peer_may_send_anything(
        plan in 0_usize..4,
        chunks in prop::collection::vec((0_u32..6, 0_u32..6, 0_usize..12, any::<bool>()), 1..60),
    ) {
        let mut fixture = [coded, median, clipped_mean, adaptive_sum][plan]();
        // A prelude's part of two ranks and its measures; two chunks of three sub-schedules.
        let most = 2 * 4 * ELEMENTS / 2 + 8 * 6 + 3 * 2 * 4_096;
        for (sub_schedule, round, change, run_to_end) in chunks {
            let right = fixture.rounds(sub_schedule.min(fixture.sub_schedules() - 1));
            let right = right.contains(&round).then(|| fixture.chunk(sub_schedule.min(fixture.sub_schedules() - 1), round));
            let header = ChunkHeader { lane: Lane(0), sub_schedule, round, start: 0, len: 1 };
            let (epoch, data) = (Epoch(1), Bytes::from_static(&[0; 4]));
            let mut chunk = right.unwrap_or(Chunk { epoch, seq: SEQ, early: false, header, data });
            match change {
                0 => chunk.header.round = ROUND_TAKEN,
                1 => (chunk.header.round, chunk.header.len, chunk.data) = (ROUND_TAKEN, 0, Bytes::new()),
                2 => chunk.header.sub_schedule = u32::MAX,
                3 => chunk.header.start = u64::MAX,
                4 => chunk.header.len = u64::MAX,
                5 => chunk.data = Bytes::new(),
                _ => {}
            }
            let found_out = fixture.receive(chunk).is_err();
            prop_assert!(fixture.executor.private_bytes().parked <= most);
            if run_to_end {
                fixture.run_to_end();
            }
            if found_out {
                return Ok(());
            }
        }
    }
}
