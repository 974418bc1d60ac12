//! Small worlds, works and tunings, enumerated.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::HashSet;

use ronde_collectives::{Plan, Work, WorkKind, plan};
use ronde_wire::{Algorithm, Member, ProcessSet, Rank, SetId, SetTopology, SidecarIndex, Tuning, World};

/// One rank on each of `members` sidecars.
pub(crate) fn flat(members: u32) -> SetTopology {
    placed(&(0..members).collect::<Vec<u32>>(), |_| true)
}

/// The ranks that `chosen` picks by position, on the sidecars that `placement` names.
pub(crate) fn placed(placement: &[u32], chosen: impl Fn(usize) -> bool) -> SetTopology {
    let sidecars: Vec<SidecarIndex> = placement.iter().copied().map(SidecarIndex).collect();
    let all: Vec<Rank> = (0..).map(Rank).take(placement.len()).collect();
    let some = all.iter().copied().filter(|rank| chosen(rank.index())).collect();
    let sets = vec![ProcessSet { id: SetId::WORLD, ranks: all }, ProcessSet { id: SetId(1), ranks: some }];
    let world = World::with_sets(sidecars, sets).expect("a small world with a set that is not empty");
    world.topology(SetId(1)).expect("the set was just made")
}

/// Placements of 0 to 4 local ranks on up to 6 sidecars: all of them up to 3 sidecars; beyond, 25 for each number of
/// sidecars, in which any two of the first five sidecars meet in every pair of local sizes. Each with ranks sidecar by
/// sidecar and dealt in turn, and with four process sets. Equal topologies come once.
pub(crate) fn placements() -> Vec<SetTopology> {
    let mut seen = HashSet::new();
    let mut topologies = Vec::new();
    for local_sizes in local_sizes() {
        for placement in [block_placement(&local_sizes), dealt_placement(&local_sizes)] {
            let size = placement.len();
            let sets: [&dyn Fn(usize) -> bool; 4] =
                [&|_| true, &|rank| rank % 2 == 0, &|rank| rank != 0 || size == 1, &|rank| rank >= size / 2];
            for chosen in sets {
                let topology = placed(&placement, chosen);
                if seen.insert(topology.members.clone()) {
                    topologies.push(topology);
                }
            }
        }
    }
    topologies
}

fn local_sizes() -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    for sidecars in 1..=3 {
        for code in 1..5_usize.pow(sidecars) {
            all.push((0..sidecars).map(|digit| code / 5_usize.pow(digit) % 5).collect());
        }
    }
    for sidecars in 4..=6 {
        for base in 0..5 {
            for step in 0..5 {
                all.push((0..sidecars).map(|sidecar| (base + sidecar * step) % 5).collect());
            }
        }
    }
    all.retain(|sizes: &Vec<usize>| sizes.iter().any(|size| *size > 0));
    all
}

fn block_placement(local_sizes: &[usize]) -> Vec<u32> {
    (0..).zip(local_sizes).flat_map(|(sidecar, &size)| std::iter::repeat_n(sidecar, size)).collect()
}

fn dealt_placement(local_sizes: &[usize]) -> Vec<u32> {
    let turn = |turn| (0..).zip(local_sizes).filter(move |(_, size)| **size > turn).map(|(sidecar, _)| sidecar);
    (0..4).flat_map(turn).collect()
}

/// Every kind of work and algorithm for a topology: counts 0, 1, n-1, n, n+1 and a prime, alone and in a bucket; every
/// root.
pub(crate) fn works(topology: &SetTopology) -> Vec<(Algorithm, Work)> {
    let n = topology.len() as u64;
    let mut works = Vec::new();
    let alone = topology.len() == 1;
    let or_local = |algorithm| if alone { Algorithm::Local } else { algorithm };
    let mut counts = vec![0, 1, n - 1, n, n + 1, 1_009];
    counts.dedup();
    for &count in &counts {
        for tensors in [vec![vec![count]], vec![vec![5], vec![count], vec![0], vec![n + 1], vec![count / 2]]] {
            for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling] {
                works.push((or_local(algorithm), work(WorkKind::AllReduce, tensors.clone())));
            }
        }
        works.push((or_local(Algorithm::Ring), work(WorkKind::AllGather, vec![uneven(topology, count)])));
    }
    let gathered = counts.iter().map(|count| uneven(topology, *count)).collect();
    works.push((or_local(Algorithm::Ring), work(WorkKind::AllGather, gathered)));
    for (index, root) in topology.ranks().into_iter().enumerate() {
        let tensors = vec![vec![counts[index % counts.len()]], vec![7]];
        works.push((or_local(Algorithm::BinomialTree), work(WorkKind::Broadcast { root }, tensors)));
    }
    works.push((or_local(Algorithm::Dissemination), work(WorkKind::Barrier, Vec::new())));
    works
}

/// Counts around `count` for each rank, every third of them 0.
fn uneven(topology: &SetTopology, count: u64) -> Vec<u64> {
    (0..topology.size() as u64).map(|rank| if rank % 3 == 1 { 0 } else { count + rank * 5 % 7 }).collect()
}

pub(crate) fn work(kind: WorkKind, tensors: Vec<Vec<u64>>) -> Work {
    Work { kind, element_bytes: ELEMENT_BYTES, tensors }
}

/// Large elements make many chunks of few elements.
pub(crate) const ELEMENT_BYTES: u32 = 256;

/// Chunks of 4,096 elements, of 128 and of 16; one to three lanes; windows of one to four strands.
pub(crate) fn tunings(algorithm: Algorithm) -> [Tuning; 3] {
    [(1 << 20, 1, 1), (32 << 10, 2, 4), (4 << 10, 3, 2)].map(|(chunk_bytes, lanes, window)| Tuning {
        algorithm,
        chunk_bytes,
        lanes,
        window,
    })
}

/// All members' plans.
pub(crate) fn plans(topology: &SetTopology, work: &Work, tuning: &Tuning) -> Vec<Plan> {
    let members = (0..).map(Member).take(topology.len());
    members
        .map(|me| plan(me, topology, work, tuning).unwrap_or_else(|error| panic!("{error}: {work:?} {tuning:?}")))
        .collect()
}
