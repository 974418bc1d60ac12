//! Pairs of operations on the same FIFO lanes complete whatever happens first.

mod worlds;

use ronde_collectives::check::{Delivery, Schedule, explore};
use ronde_collectives::{Plan, Violation, WorkKind, check_interleaved};
use ronde_wire::{Algorithm, Rank, Tuning};
use worlds::{ELEMENT_BYTES, flat, plans, work};

/// Chunks of 16 elements.
const CHUNK_BYTES: u32 = 16 * ELEMENT_BYTES;

/// One of each kind, cut into several strands: the algorithm's name, and all members' plans.
fn operations(members: u32, lanes: u16, window: u16, even: bool) -> Vec<(&'static str, Vec<Plan>)> {
    let topology = flat(members);
    let blocks = |rank: u64| if even { 60 } else { rank % 3 * (50 + 40 * rank) };
    let blocks = (0..u64::from(members)).map(blocks).collect();
    let kinds = [
        ("ring all-reduce", Algorithm::Ring, WorkKind::AllReduce, vec![vec![311]]),
        ("recursive doubling", Algorithm::RecursiveDoubling, WorkKind::AllReduce, vec![vec![311]]),
        ("broadcast from 0", Algorithm::BinomialTree, WorkKind::Broadcast { root: Rank(0) }, vec![vec![67]]),
        ("broadcast from 1", Algorithm::BinomialTree, WorkKind::Broadcast { root: Rank(1) }, vec![vec![67]]),
        ("all-gather", Algorithm::Ring, WorkKind::AllGather, vec![blocks]),
        ("barrier", Algorithm::Dissemination, WorkKind::Barrier, Vec::new()),
    ];
    let planned = kinds.into_iter().map(|(name, algorithm, kind, tensors)| {
        let tuning = Tuning { algorithm, chunk_bytes: CHUNK_BYTES, lanes, window };
        (name, plans(&topology, &work(kind, tensors), &tuning))
    });
    planned.collect()
}

#[test]
fn every_pair_completes() {
    for (members, lanes, window) in
        [(2, 1, 1), (2, 2, 3), (3, 1, 2), (3, 1, 4), (4, 1, 4), (5, 1, 3), (6, 2, 2), (7, 1, 2)]
    {
        let operations = operations(members, lanes, window, false);
        for (first, a) in &operations {
            for (second, b) in &operations {
                if let Err(violation) = check_interleaved(a, b) {
                    panic!("{first} then {second}, {members} members, window {window}: {violation}");
                }
            }
        }
    }
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

/// A receiver that takes chunks only of the strands in its window has bounded room, and nothing gets stuck.
#[test]
fn room_for_the_strands_in_the_window_suffices() {
    for (members, window, even) in
        [(2, 4, false), (3, 1, false), (3, 3, true), (4, 2, false), (5, 4, false), (6, 2, false), (7, 1, true)]
    {
        let operations = operations(members, 1, window, even);
        // A ring's member may be ahead by once around; the second operation has a window of its own.
        let bound = 2 * usize::from(window) * (members as usize - 1);
        for (first, a) in &operations {
            for (second, b) in &operations {
                match explore(&[a, b], Delivery::WhenBegun, &Schedule::many(a.len(), 8)) {
                    Ok(seen) => assert!(seen.early_chunks_most <= bound, "{first} then {second}: {seen:?}"),
                    Err(violation) => panic!("{first} then {second}, {members} members, window {window}: {violation}"),
                }
            }
        }
    }
}

/// What docs/ALGORITHMS.md says about lanes without room at the receiver.
#[test]
fn pairs_without_recursive_doubling_complete_even_without_room() {
    for members in 2..=7 {
        for window in [1, 2, 4] {
            let operations = operations(members, 1, window, true);
            let plain = operations.iter().filter(|(name, _)| *name != "recursive doubling");
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
fn recursive_doubling_needs_room_when_strands_overlap() {
    let operations = operations(4, 1, 2, true);
    let (_, doubling) = &operations[1];
    let result = explore(&[doubling], Delivery::WhenPosted, &Schedule::many(doubling.len(), 50));
    assert!(matches!(result, Err(Violation::Stuck { operation: 0, .. })), "{result:?}");
}
