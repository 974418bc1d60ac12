//! Direct plans on numbers: all members' plans are performed here, step by step and with the kernels, and give what the
//! operations mean, the same bits to everybody and for every tuning.

#![allow(clippy::cast_possible_truncation, reason = "numbers are small, and f64 is rounded to f32 on purpose")]

use std::collections::HashMap;

use ronde_collectives::cost::FLIGHT_BYTES_MAX;
use ronde_collectives::kernels::{self, decode, encode};
use ronde_collectives::planner::predicted;
use ronde_collectives::{
    CostModel, Form, Register, Span, Step, SubSchedule, Transfer, Work, WorkKind, check, plan, select,
};
use ronde_wire::{Algorithm, Codec, DType, Member, ReduceOp, SetTopology, Tuning, limits};

use crate::performed::{Outcome, Task, perform};
use crate::worlds::{flat, placed, plans};

#[test]
fn coded_sums_are_rounded_once_in_each_direction() {
    for topology in topologies() {
        for (codec, op) in [(Codec::F16, ReduceOp::Sum), (Codec::Bf16, ReduceOp::Average)] {
            let task = task(&topology, WorkKind::AllReduceCoded { encoded_bytes: 2 }, op, codec, &[9_001, 0, 3, 40]);
            let outcome = same_for_all_tunings(&task);
            for (tensor, result) in outcome.results.iter().enumerate() {
                assert_eq!(result, &coded_reference(&task, tensor), "{codec} {op} {topology:?}");
            }
        }
    }
}

#[test]
fn medians_are_those_of_all_ranks() {
    for topology in topologies() {
        let task = task(&topology, WorkKind::AllReduceNAry, ReduceOp::Median, Codec::None, &[5_003, 1, 17]);
        let outcome = same_for_all_tunings(&task);
        for (tensor, result) in outcome.results.iter().enumerate() {
            assert_eq!(result, &weighted_reference(&task, tensor, &[]), "{topology:?}");
        }
    }
}

#[test]
fn clipped_means_and_adasums_are_weighted_by_the_whole_tensor() {
    for topology in topologies() {
        for count in [1, 18, 20_011] {
            measured(&topology, WorkKind::AllReduceTwoPass { measures: 1 }, ReduceOp::ClippedMean, count);
            measured(&topology, WorkKind::AllReduceAdaptive, ReduceOp::Adasum, count);
        }
    }
}

#[test]
fn a_prelude_of_many_rounds_measures_everything() {
    let rounds = measured(&flat(3), WorkKind::AllReduceAdaptive, ReduceOp::Adasum, 1_100_003);
    assert!(rounds > 2, "only {rounds} rounds");
    measured(&flat(3), WorkKind::AllReduceTwoPass { measures: 1 }, ReduceOp::ClippedMean, 1_100_003);
}

/// The checker's list of works is too small for these.
#[test]
fn a_prelude_of_many_rounds_is_proved() {
    let dealt = placed(&[0, 1, 0, 2, 1, 0, 2, 2], |_| true);
    for topology in [flat(2), flat(3), flat(5), dealt] {
        for kind in [WorkKind::AllReduceTwoPass { measures: 3 }, WorkKind::AllReduceAdaptive] {
            let work = Work { kind, element_bytes: 256, tensors: vec![vec![40_001]] };
            let tuning = Tuning { algorithm: Algorithm::Direct, chunk_bytes: 1 << 20, lanes: 2, window: 2 };
            let plans = plans(&topology, &work, &tuning);
            let rounds = plans[0].sub_schedules[0].rounds.len();
            assert!(rounds > 3, "only {rounds} rounds");
            if let Err(violation) = check(&topology, &work, &tuning, &plans) {
                panic!("{violation}\n{topology:?}\n{work:?}");
            }
        }
    }
}

/// However many members there are, their registers of the sub-schedules in flight, and those of a prelude, are bounded.
#[test]
fn private_memory_is_bounded() {
    let kinds = [
        (WorkKind::AllReduceCoded { encoded_bytes: 2 }, limits::SIDECARS_MAX),
        (WorkKind::AllReduceNAry, limits::NARY_RANKS_MAX),
        (WorkKind::AllReduceTwoPass { measures: 1 }, limits::NARY_RANKS_MAX),
        (WorkKind::AllReduceAdaptive, limits::NARY_RANKS_MAX),
    ];
    for (kind, most) in kinds {
        for members in [2, 3, 17, 64, most] {
            let topology = flat(u32::try_from(members).expect("a small world"));
            let work = Work { kind: kind.clone(), element_bytes: 4, tensors: vec![vec![3_000_000]] };
            let tuning = select(&topology, &work, 4, &CostModel::default()).tuning;
            assert_eq!(tuning.algorithm, Algorithm::Direct);
            let plan = plan(Member(0), &topology, &work, &tuning).expect("what was selected can be planned");
            let in_flight = plan.window * usize::from(tuning.lanes);
            for (index, sub_schedule) in plan.sub_schedules.iter().enumerate() {
                let lanes_and_window = if plan.prelude && index == 0 { 1 } else { in_flight as u64 };
                assert!(
                    held_bytes(sub_schedule) * lanes_and_window <= FLIGHT_BYTES_MAX,
                    "{kind:?} {members} {tuning:?}"
                );
            }
        }
    }
}

/// What a sub-schedule's registers hold at most, where every register keeps the longest that is ever in it. Measures are left
/// out: their bound is that of the set.
fn held_bytes(sub_schedule: &SubSchedule) -> u64 {
    let mut longest = HashMap::new();
    let mut hold = |register: Register, span: Span| {
        let len: &mut u64 = longest.entry(register).or_default();
        *len = span.len.max(*len);
    };
    for round in &sub_schedule.rounds {
        for step in &round.steps {
            match *step {
                Step::Contribute { into, span }
                | Step::ContributeEach { into, span }
                | Step::ReduceN { into, span, .. } => {
                    hold(into, span);
                }
                _ => {}
            }
        }
        for transfer in &round.transfers {
            match *transfer {
                Transfer::Receive { into, span, form, .. } if form != Form::Measures => hold(into, span),
                _ => {}
            }
        }
    }
    longest.into_values().map(|len| 4 * len).sum()
}

/// Returns the rounds of the longest sub-schedule.
fn measured(topology: &SetTopology, kind: WorkKind, op: ReduceOp, count: u64) -> u32 {
    let task = task(topology, kind, op, Codec::None, &[count]);
    let outcome = same_for_all_tunings(&task);
    let inputs: Vec<&[u8]> = task.inputs.iter().map(|tensors| &tensors[0][..]).collect();
    let ranks = inputs.len();
    let measures = if op == ReduceOp::ClippedMean {
        let sum_of = |input: &&[u8]| {
            let mut sum = 0.0;
            kernels::add_sum_of_squares(DType::F32, input, &mut sum).expect("whole elements");
            sum
        };
        inputs.iter().map(sum_of).collect()
    } else {
        let mut gram = vec![0.0; ranks * (ranks + 1) / 2];
        kernels::add_products(DType::F32, &inputs, &mut gram).expect("equal lengths");
        gram
    };
    let weights = kernels::weights(op, ranks, &measures).expect("as many as needed");
    for (found, expected) in outcome.weights.iter().zip(&weights) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{op} {topology:?}: {found} {expected}");
    }
    assert_eq!(outcome.results[0], weighted_reference(&task, 0, &outcome.weights), "{op} {topology:?}");
    outcome.rounds
}

/// All of them give the same bits, which are returned; bytes and rounds are those of the closed form.
fn same_for_all_tunings(task: &Task<'_>) -> Outcome {
    let tunings = [(4_096, 1, 1), (16_384, 3, 4), (1 << 20, 2, 2)];
    let mut outcomes = tunings.into_iter().map(|(chunk_bytes, lanes, window)| {
        let tuning = Tuning { algorithm: Algorithm::Direct, chunk_bytes, lanes, window };
        let outcome = perform(task, &tuning);
        let form = predicted(task.topology, &task.work, &tuning).expect("the inputs fit");
        assert_eq!(outcome.sent_bytes, form.sent_bytes, "{:?} {tuning:?}", task.work);
        assert_eq!(outcome.reduced_bytes, form.reduced_bytes, "{:?} {tuning:?}", task.work);
        assert_eq!(outcome.rounds, form.rounds, "{:?} {tuning:?}", task.work);
        outcome
    });
    let first = outcomes.next().expect("several tunings");
    for other in outcomes {
        assert!(other.results == first.results && other.weights == first.weights, "{:?}", task.work);
    }
    first
}

fn topologies() -> Vec<SetTopology> {
    let mut topologies: Vec<SetTopology> = [2, 3, 5, 8, 17].into_iter().map(flat).collect();
    for placement in [&[0, 0, 1][..], &[1, 0, 2, 0, 1, 0, 3], &[4, 2, 0, 4, 2, 4, 4, 1, 3, 0, 0]] {
        topologies.push(placed(placement, |_| true));
    }
    topologies.push(placed(&[0, 1, 2, 0, 1, 2, 3], |rank| rank % 2 == 1));
    topologies
}

fn task<'a>(topology: &'a SetTopology, kind: WorkKind, op: ReduceOp, codec: Codec, counts: &[u64]) -> Task<'a> {
    let tensors = counts.iter().map(|count| vec![*count]).collect();
    let work = Work { kind, element_bytes: 4, tensors };
    let inputs = (0..topology.size() as u32)
        .map(|rank| (0..).zip(counts).map(|(tensor, count)| values(rank, tensor, *count)).collect())
        .collect();
    Task { topology, work, op, codec, postscale: 0.5, inputs }
}

/// Pseudo-random numbers, those of some ranks ten times as large as those of others.
fn values(rank: u32, tensor: u32, count: u64) -> Vec<u8> {
    let mut state = rank * 31 + tensor + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let number = f64::from(state >> 8) / f64::from(1 << 23) - 1.0;
        (number * if rank % 3 == 1 { 10.0 } else { 1.0 }) as f32
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

fn weighted_reference(task: &Task<'_>, tensor: usize, weights: &[f64]) -> Vec<u8> {
    let operands: Vec<&[u8]> = task.inputs.iter().map(|tensors| &tensors[tensor][..]).collect();
    let mut result = vec![0; operands[0].len()];
    kernels::reduce_n(DType::F32, task.op, &operands, weights, &mut result).expect("equal lengths");
    kernels::finish(DType::F32, task.op, 1, task.postscale, &mut result).expect("whole elements");
    result
}

/// The members' sums of their ranks' values, each encoded once, added in member order, encoded once more.
fn coded_reference(task: &Task<'_>, tensor: usize) -> Vec<u8> {
    let sum = |numbers: Vec<Vec<f32>>| {
        let add = |sum: Vec<f32>, other: Vec<f32>| sum.iter().zip(&other).map(|(a, b)| a + b).collect();
        numbers.into_iter().reduce(add).expect("a member has ranks")
    };
    let order = task.topology.ranks();
    let of_rank = |rank| {
        let position = order.iter().position(|other| *other == rank).expect("a rank of the set");
        floats(&task.inputs[position][tensor])
    };
    let contribution = |member: &ronde_wire::SetMember| {
        let local = sum(member.ranks.iter().map(|rank| of_rank(*rank)).collect());
        coded(task.codec, &local)
    };
    let mut result = sum(task.topology.members.iter().map(contribution).collect());
    let factor = if task.op == ReduceOp::Average { task.postscale / order.len() as f64 } else { task.postscale };
    result.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
    coded(task.codec, &result).iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn coded(codec: Codec, values: &[f32]) -> Vec<f32> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (mut encoded, mut decoded) = (vec![0; bytes.len() / 2], vec![0; bytes.len()]);
    encode(codec, DType::F32, &bytes, &mut encoded).expect("lengths fit");
    decode(codec, DType::F32, &encoded, &mut decoded).expect("lengths fit");
    floats(&decoded)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|value| f32::from_le_bytes(value.try_into().expect("four bytes"))).collect()
}
