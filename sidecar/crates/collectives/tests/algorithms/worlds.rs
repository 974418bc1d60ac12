//! Small worlds, works and tunings, enumerated.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::HashSet;

use ronde_collectives::algorithms::performing;
use ronde_collectives::{Counts, Plan, Work, WorkKind, plan};
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

/// How much of the product of counts, splits and tunings is taken.
#[derive(Clone, Copy)]
pub(crate) enum Breadth {
    /// All of it.
    Full,
    /// One tuning for each algorithm, kind and root, and one count with one way to split it, all of which change with this
    /// number and from case to case.
    Sample(usize),
}

/// Every kind of work with every algorithm, every root, counts 0, 1, n-1, n, n+1 and a prime, alone and in a bucket, split
/// unevenly in several ways: as much of it as `breadth` says.
pub(crate) fn cases(topology: &SetTopology, breadth: Breadth) -> Vec<(Work, Tuning)> {
    let n = topology.len() as u64;
    let mut counts = vec![0, 1, n - 1, n, n + 1, 1_009];
    counts.dedup();
    let mut cases = Vec::new();
    for (index, (algorithm, kind)) in kinds(topology).into_iter().enumerate() {
        // The product of roots and everything else is taken for one root in three.
        let breadth = match breadth {
            Breadth::Full if kind.root().is_some_and(|root| root.0 % 3 != 1) => Breadth::Sample(index),
            other => other,
        };
        let tunings = tunings(algorithm);
        match breadth {
            Breadth::Full => {
                let works = counts.iter().flat_map(|count| (0..SPLITS).map(|split| (*count, split)));
                for work in works.flat_map(|(count, split)| works_of(topology, &kind, count, split)) {
                    cases.extend(tunings.map(|tuning| (work.clone(), tuning)));
                }
            }
            Breadth::Sample(number) => {
                let turn = number + index;
                let (count, split) = (counts[turn % counts.len()], turn / counts.len() % SPLITS);
                let works = works_of(topology, &kind, count, split);
                cases.extend(works.into_iter().map(|work| (work, tunings[(turn + number / 7) % tunings.len()])));
            }
        }
    }
    cases
}

/// Every kind, for every root, with every algorithm of the table that performs it.
fn kinds(topology: &SetTopology) -> Vec<(Algorithm, WorkKind)> {
    let with_algorithms = |kind: WorkKind| {
        performing(&kind, topology.len()).map(|algorithm| (algorithm, kind.clone())).collect::<Vec<_>>()
    };
    kinds_for(&topology.ranks()).into_iter().flat_map(with_algorithms).collect()
}

/// Every kind of work, those with a root once for each of `roots`.
pub(crate) fn kinds_for(roots: &[Rank]) -> Vec<WorkKind> {
    let mut kinds = vec![
        WorkKind::AllReduce,
        WorkKind::AllReduceCoded { encoded_bytes: ELEMENT_BYTES / 2 },
        WorkKind::AllReduceByBlocks { block_elements: 3, encoded_bytes: 99 },
        WorkKind::AllReduceNAry,
        WorkKind::AllReduceTwoPass { measures: 2 },
        WorkKind::AllReduceAdaptive,
        WorkKind::ReduceScatter,
        WorkKind::AllGather,
        WorkKind::AllToAll,
        WorkKind::Barrier,
    ];
    for &root in roots {
        kinds.extend([
            WorkKind::Broadcast { root },
            WorkKind::Reduce { root },
            WorkKind::Gather { root },
            WorkKind::Scatter { root },
        ]);
    }
    kinds
}

/// A count as tensors: alone, and with other tensors in a bucket where the kind allows it.
fn works_of(topology: &SetTopology, kind: &WorkKind, count: u64, split: usize) -> Vec<Work> {
    let n = topology.len() as u64;
    let mut works: Vec<Work> = match kind.counts() {
        _ if *kind == WorkKind::Barrier => return vec![work(WorkKind::Barrier, Vec::new())],
        Counts::One if split > 0 => Vec::new(),
        Counts::One => {
            let together = vec![vec![5], vec![count], vec![0], vec![n + 1], vec![count / 2]];
            [vec![vec![count]], together].into_iter().map(|tensors| work(kind.clone(), tensors)).collect()
        }
        Counts::EachRank => {
            let tensor = splits(topology.size(), count, split);
            let together = vec![splits(topology.size(), 3, split + 1), tensor.clone()];
            [vec![tensor], together].into_iter().map(|tensors| work(kind.clone(), tensors)).collect()
        }
        Counts::EachPair => {
            let rows = (0..topology.size()).flat_map(|row| splits(topology.size(), count / 4 + 1, split + row));
            vec![work(kind.clone(), vec![rows.collect()])]
        }
    };
    if kind.measures() {
        // One tensor in a bucket, of larger elements for several rounds of measuring.
        works.truncate(1);
        works.iter_mut().for_each(|work| work.element_bytes = 4 << 10);
    }
    works
}

/// Ways to split a count over ranks.
const SPLITS: usize = 3;

/// The count for each rank: around it with every third 0, everything at one rank, or the rows of an even division.
fn splits(size: usize, count: u64, way: usize) -> Vec<u64> {
    let even = |rank: u64| count / size as u64 + u64::from(rank < count % size as u64);
    let of = |rank: u64| match way % SPLITS {
        0 if rank % 3 == 1 => 0,
        0 => count + rank * 5 % 7,
        1 if rank == way as u64 % size as u64 => count,
        1 => 0,
        _ => even(rank),
    };
    (0..size as u64).map(of).collect()
}

pub(crate) fn work(kind: WorkKind, tensors: Vec<Vec<u64>>) -> Work {
    Work { kind, element_bytes: ELEMENT_BYTES, tensors }
}

/// Large elements make many chunks of few elements.
pub(crate) const ELEMENT_BYTES: u32 = 256;

/// Chunks of 4,096 elements, of 128 and of 16; one to three lanes; windows of one to four sub-schedules.
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
