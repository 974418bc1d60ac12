//! Pairs of operations on the same FIFO lanes complete whatever happens first.

use std::collections::BTreeMap;

use ronde_collectives::algorithms::{Entry, TABLE};
use ronde_collectives::check::{Delivery, Schedule, explore};
use ronde_collectives::{Plan, Transfer, Violation, WorkKind, check_interleaved};
use ronde_wire::{Algorithm, Rank, Tuning};

use crate::worlds::{ELEMENT_BYTES, flat, plans, work};

/// Chunks of 16 elements.
const CHUNK_BYTES: u32 = 16 * ELEMENT_BYTES;

/// One of each kind and algorithm, cut into several sub-schedules: the algorithm's name, and all members' plans.
fn operations(members: u32, lanes: u16, window: u16, even: bool) -> Vec<(&'static str, Vec<Plan>)> {
    let topology = flat(members);
    let blocks = |rank: u64| if even { 60 } else { rank % 3 * (50 + 40 * rank) };
    let blocks: Vec<u64> = (0..u64::from(members)).map(blocks).collect();
    let pairs = || (0..members as usize).flat_map(|row| blocks.iter().cycle().skip(row).take(members as usize));
    let pairs: Vec<u64> = pairs().map(|count| count / 3).collect();
    let (one, each) = (|count: u64| vec![vec![count]], || vec![blocks.clone()]);
    let root = Rank(1);
    let kinds = [
        ("ring all-reduce", Algorithm::Ring, WorkKind::AllReduce, one(311)),
        ("recursive doubling", Algorithm::RecursiveDoubling, WorkKind::AllReduce, one(311)),
        ("halving and doubling", Algorithm::HalvingDoubling, WorkKind::AllReduce, one(311)),
        ("coded", Algorithm::Direct, WorkKind::AllReduceCoded { encoded_bytes: ELEMENT_BYTES / 2 }, one(211)),
        ("n-ary", Algorithm::Direct, WorkKind::AllReduceNAry, one(211)),
        ("two-pass", Algorithm::Direct, WorkKind::AllReduceTwoPass { measures: 1 }, one(211)),
        ("adaptive", Algorithm::Direct, WorkKind::AllReduceAdaptive, one(211)),
        ("reduce-scatter", Algorithm::Ring, WorkKind::ReduceScatter, each()),
        ("reduce", Algorithm::BinomialTree, WorkKind::Reduce { root }, one(67)),
        ("broadcast from 0", Algorithm::BinomialTree, WorkKind::Broadcast { root: Rank(0) }, one(67)),
        ("broadcast from 1", Algorithm::BinomialTree, WorkKind::Broadcast { root }, one(67)),
        ("all-gather", Algorithm::Ring, WorkKind::AllGather, each()),
        ("gather", Algorithm::Linear, WorkKind::Gather { root }, each()),
        ("scatter", Algorithm::Linear, WorkKind::Scatter { root }, each()),
        ("all-to-all", Algorithm::Pairwise, WorkKind::AllToAll, vec![pairs]),
        ("barrier", Algorithm::Dissemination, WorkKind::Barrier, Vec::new()),
    ];
    let is_included = |entry: &Entry| {
        let mut included = kinds.iter();
        included.any(|(_, algorithm, kind, _)| *algorithm == entry.algorithm && entry.performs(kind, topology.len()))
    };
    assert!(
        TABLE.iter().filter(|entry| entry.algorithm != Algorithm::Local).all(is_included),
        "an algorithm is missing"
    );
    let planned = kinds.into_iter().map(|(name, algorithm, kind, tensors)| {
        let tuning = Tuning { algorithm, chunk_bytes: CHUNK_BYTES, lanes, window };
        (name, plans(&topology, &work(kind, tensors), &tuning))
    });
    planned.collect()
}

#[test]
fn every_pair_completes_without_any_buffer_when_there_are_no_lanes() {
    for (members, window) in [(2, 2), (3, 1), (4, 4), (5, 2), (6, 3)] {
        let operations = operations(members, 1, window, false);
        for (first, a) in &operations {
            for (second, b) in &operations {
                let schedules = Schedule::many(a.len(), 4);
                if let Err(violation) = explore(&[a, b], Delivery::Rendezvous, &schedules) {
                    panic!("{first} then {second}, {members} members, window {window}: {violation}");
                }
            }
        }
    }
}

/// Senders that are held back leave a bounded number of chunks at a receiver, and nothing gets stuck: of each operation,
/// those of three windows of sub-schedules on each lane.
#[test]
fn every_pair_completes_with_bounded_receive_buffers() {
    for (members, lanes, window, even) in [
        (2, 1, 1, false),
        (2, 2, 4, false),
        (3, 1, 1, false),
        (3, 1, 3, true),
        (4, 1, 2, false),
        (5, 1, 4, false),
        (6, 2, 2, false),
        (7, 1, 1, true),
    ] {
        let operations = operations(members, lanes, window, even);
        for (first, a) in &operations {
            for (second, b) in &operations {
                let sub_schedules = 3 * usize::from(lanes * window);
                let bound = sub_schedules * (chunks_of_a_sub_schedule(a) + chunks_of_a_sub_schedule(b));
                match check_interleaved(a, b) {
                    Ok(seen) => assert!(seen.early_chunks_max <= bound, "{first} then {second}: {seen:?}"),
                    Err(violation) => panic!("{first} then {second}, {members} members, window {window}: {violation}"),
                }
            }
        }
    }
}

/// The most chunks that one member sends to another one in one sub-schedule.
fn chunks_of_a_sub_schedule(plans: &[Plan]) -> usize {
    let mut most = 0;
    for sub_schedule in plans.iter().flat_map(|plan| &plan.sub_schedules) {
        let mut chunks = BTreeMap::new();
        for transfer in sub_schedule.rounds.iter().flat_map(|round| &round.transfers) {
            if let Transfer::Send { to, .. } = transfer {
                *chunks.entry(*to).or_insert(0) += 1;
            }
        }
        most = most.max(chunks.into_values().max().unwrap_or(0));
    }
    most
}

/// What docs/ALGORITHMS.md says about lanes without room at the receiver.
#[test]
fn rings_and_broadcasts_complete_without_receive_buffers() {
    const UNBUFFERED: [&str; 7] = [
        "ring all-reduce",
        "reduce-scatter",
        "all-gather",
        "broadcast from 0",
        "broadcast from 1",
        "scatter",
        "barrier",
    ];
    for members in 2..=7 {
        for window in [1, 2, 4] {
            let operations = operations(members, 1, window, true);
            let plain = operations.iter().filter(|(name, _)| UNBUFFERED.contains(name));
            for (first, a) in plain.clone() {
                for (second, b) in plain.clone() {
                    let schedules = Schedule::many(a.len(), 10);
                    if let Err(violation) = explore(&[a, b], Delivery::WhenPosted, &schedules) {
                        panic!("{first} then {second}, {members} members, window {window}: {violation}");
                    }
                }
            }
        }
    }
}

/// So the room is needed, and the exploration finds out.
#[test]
fn recursive_doubling_needs_receive_buffers_when_sub_schedules_overlap() {
    let operations = operations(4, 1, 2, true);
    let (_, doubling) = &operations[1];
    let result = explore(&[doubling], Delivery::WhenPosted, &Schedule::many(doubling.len(), 50));
    assert!(matches!(result, Err(Violation::Stuck { operation: 0, .. })), "{result:?}");
}
