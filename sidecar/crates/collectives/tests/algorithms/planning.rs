//! Inputs that no plan exists for, and the selection of tunings.

use proptest::prelude::*;
use ronde_collectives::algorithms::TABLE;
use ronde_collectives::cost::FLIGHT_BYTES_MAX;
use ronde_collectives::plan::REGISTERS_MAX;
use ronde_collectives::planner::predicted;
use ronde_collectives::{CostModel, Counts, PlanError, Transfer, Work, WorkKind, algorithm_of, check, plan, select};
use ronde_wire::{Algorithm, Member, Rank, SetId, SetTopology, Tuning, limits};

use crate::worlds::{flat, placed, plans};

const TUNING: Tuning = Tuning { algorithm: Algorithm::Ring, chunk_bytes: 65_536, lanes: 1, window: 2 };

const BY_BLOCKS: WorkKind = WorkKind::AllReduceByBlocks { block_elements: 2, encoded_bytes: 100 };

fn all_reduce(tensors: Vec<Vec<u64>>) -> Work {
    Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors }
}

fn refused(topology: &SetTopology, work: &Work, tuning: &Tuning) -> PlanError {
    plan(Member(0), topology, work, tuning).expect_err("no plan exists")
}

#[test]
fn an_algorithm_rejects_work_it_does_not_perform() {
    use Algorithm as A;
    let one_count = vec![vec![4]];
    let kinds = [
        (WorkKind::AllReduce, one_count.clone(), vec![A::Ring, A::RecursiveDoubling, A::HalvingDoubling]),
        (WorkKind::AllReduceCoded { encoded_bytes: 2 }, one_count.clone(), vec![A::Direct]),
        (BY_BLOCKS, one_count.clone(), vec![A::Direct]),
        (WorkKind::AllReduceNAry, one_count.clone(), vec![A::Direct]),
        (WorkKind::AllReduceTwoPass { measures: 1 }, one_count.clone(), vec![A::Direct]),
        (WorkKind::AllReduceAdaptive, one_count.clone(), vec![A::Direct]),
        (WorkKind::Broadcast { root: Rank(1) }, one_count.clone(), vec![A::BinomialTree]),
        (WorkKind::Reduce { root: Rank(1) }, one_count, vec![A::BinomialTree]),
        (WorkKind::AllGather, vec![vec![4, 5, 6]], vec![A::Ring]),
        (WorkKind::ReduceScatter, vec![vec![4, 5, 6]], vec![A::Ring]),
        (WorkKind::Gather { root: Rank(1) }, vec![vec![4, 5, 6]], vec![A::Linear]),
        (WorkKind::Scatter { root: Rank(1) }, vec![vec![4, 5, 6]], vec![A::Linear]),
        (WorkKind::AllToAll, vec![vec![1, 2, 3, 4, 5, 6, 7, 8, 9]], vec![A::Pairwise]),
        (WorkKind::Barrier, Vec::new(), vec![A::Dissemination]),
    ];
    for (kind, tensors, performing) in kinds {
        let work = Work { kind, element_bytes: 4, tensors };
        for algorithm in TABLE.iter().map(|entry| entry.algorithm) {
            let tuning = Tuning { algorithm, ..TUNING };
            let several = plan(Member(0), &flat(3), &work, &tuning);
            assert_eq!(several.is_ok(), performing.contains(&algorithm), "{algorithm} {work:?}");
            let alone = plan(Member(0), &placed(&[7, 7, 7], |_| true), &work, &tuning);
            assert_eq!(alone.is_ok(), algorithm == A::Local, "{algorithm} {work:?}");
        }
    }
    let error = refused(&flat(2), &all_reduce(vec![]), &Tuning { algorithm: A::Dissemination, ..TUNING });
    assert_eq!(error.to_string(), "dissemination does not perform all-reduce over 2 members; order another algorithm");
}

#[test]
fn contradictory_inputs_are_rejected() {
    let work = all_reduce(vec![vec![4]]);
    let me = Member(3);
    assert_eq!(plan(me, &flat(3), &work, &TUNING), Err(PlanError::Member { me, members: 3 }));
    let broadcast = Work { kind: WorkKind::Broadcast { root: Rank(1) }, ..work.clone() };
    let without_root = placed(&[0, 1, 2], |rank| rank != 1);
    assert_eq!(refused(&without_root, &broadcast, &TUNING), PlanError::Root { root: Rank(1), set: SetId(1) });
    let gather = Work { kind: WorkKind::AllGather, ..work };
    let counts = PlanError::Counts { tensor: 0, kind: "all-gather", given: 1, needed: 3 };
    assert_eq!(refused(&flat(3), &gather, &TUNING), counts);
    let counts = PlanError::Counts { tensor: 1, kind: "all-reduce", given: 2, needed: 1 };
    assert_eq!(refused(&flat(3), &all_reduce(vec![vec![1], vec![1, 2]]), &TUNING), counts);
}

#[test]
fn inputs_over_a_limit_are_rejected() {
    let limit = |work: &Work, tuning: &Tuning| match refused(&flat(3), work, tuning) {
        PlanError::Limit { what, .. } => what,
        other => panic!("{other}"),
    };
    let work = all_reduce(vec![vec![4]]);
    assert_eq!(limit(&work, &Tuning { chunk_bytes: 4_095, ..TUNING }), "chunk_bytes");
    assert_eq!(limit(&work, &Tuning { chunk_bytes: (1 << 20) + 1, ..TUNING }), "chunk_bytes");
    assert_eq!(limit(&work, &Tuning { lanes: 0, ..TUNING }), "lanes");
    assert_eq!(limit(&work, &Tuning { lanes: 17, ..TUNING }), "lanes");
    assert_eq!(limit(&work, &Tuning { window: 0, ..TUNING }), "window");
    assert_eq!(limit(&work, &Tuning { window: 65, ..TUNING }), "window");
    assert_eq!(limit(&Work { element_bytes: 0, ..work.clone() }, &TUNING), "element_bytes");
    assert_eq!(limit(&Work { kind: WorkKind::Barrier, ..work }, &TUNING), "the number of tensors");
    assert_eq!(limit(&all_reduce(vec![vec![1]; limits::BUCKET_TENSORS_MAX + 1]), &TUNING), "the number of tensors");
    let several = vec![vec![1], vec![2]];
    for (kind, tensors, what) in [
        (WorkKind::AllReduceCoded { encoded_bytes: 0 }, several.clone(), "encoded_bytes"),
        (WorkKind::AllReduceCoded { encoded_bytes: 5 }, several.clone(), "encoded_bytes"),
        (WorkKind::AllReduceByBlocks { block_elements: 0, encoded_bytes: 1 }, several.clone(), "the bytes of a block"),
        (
            WorkKind::AllReduceByBlocks { block_elements: 1 << 18, encoded_bytes: 1 },
            several.clone(),
            "the bytes of a block",
        ),
        (WorkKind::AllReduceByBlocks { block_elements: 1, encoded_bytes: 0 }, several.clone(), "encoded_bytes"),
        (WorkKind::AllReduceByBlocks { block_elements: 1, encoded_bytes: 1 << 20 }, several.clone(), "encoded_bytes"),
        (
            WorkKind::AllReduceByBlocks { block_elements: 1, encoded_bytes: 1 },
            vec![vec![1 << 23]],
            "the number of blocks",
        ),
        (WorkKind::AllReduceTwoPass { measures: 0 }, vec![vec![1]], "measures"),
        (WorkKind::AllReduceTwoPass { measures: 65 }, vec![vec![1]], "measures"),
        (WorkKind::AllReduceTwoPass { measures: 1 }, several.clone(), "the number of tensors"),
        (WorkKind::AllReduceAdaptive, several, "the number of tensors"),
    ] {
        assert_eq!(limit(&Work { kind, element_bytes: 4, tensors }, &TUNING), what);
    }
    let many = placed(&(0..=256).map(|rank| rank % 128).collect::<Vec<_>>(), |_| true);
    for kind in [
        WorkKind::AllReduceNAry,
        WorkKind::AllReduceTwoPass { measures: 1 },
        WorkKind::AllReduceAdaptive,
        WorkKind::AllToAll,
    ] {
        let refused = refused(&many, &Work { kind, element_bytes: 4, tensors: Vec::new() }, &TUNING);
        assert!(matches!(refused, PlanError::Limit { what: "the number of ranks", max: 256, .. }), "{refused}");
    }
    for huge in [vec![vec![u64::MAX]], vec![vec![u64::MAX], vec![u64::MAX]]] {
        assert_eq!(limit(&all_reduce(huge), &TUNING), "the number of chunks");
    }
}

#[test]
fn small_tensors_use_recursive_doubling_and_large_ones_the_ring() {
    let model = CostModel::default();
    let of = |members: u32, bytes: u64| algorithm_of(&flat(members), &WorkKind::AllReduce, 4, bytes / 4, &model);
    assert_eq!(of(4, 4 << 10), Algorithm::RecursiveDoubling);
    assert_eq!(of(4, 64 << 20), Algorithm::Ring);
    assert_eq!(of(16, 64 << 20), Algorithm::Ring);
    assert_eq!(of(1, 64 << 20), Algorithm::Local);
    let order = [Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling, Algorithm::Ring];
    let position = |algorithm| order.iter().position(|other| *other == algorithm).expect("a candidate");
    for members in 2..=17 {
        let places: Vec<usize> = (0..30).map(|exponent| position(of(members, 1 << exponent))).collect();
        assert!(places.is_sorted(), "a threshold between each two of {order:?} with {members} members: {places:?}");
        assert_eq!((places[0], places[29]), (0, 2), "{members} members");
        let halves = members >= 4 && members.is_power_of_two();
        assert!(!halves || places.contains(&1), "halving pays with {members} members: {places:?}");
    }
}

#[test]
fn a_reason_names_the_candidates() {
    let work = all_reduce(vec![vec![4 << 20], vec![2 << 20]]);
    let choice = select(&flat(4), &work, 2, &CostModel::default());
    assert_eq!(choice.tuning.algorithm, Algorithm::Ring);
    for part in ["all-reduce of 24 MiB over 4 members", "recursive-doubling", "ring", "chosen ring", "2 lanes"] {
        assert!(choice.reason.contains(part), "{part} is missing: {}", choice.reason);
    }
    let local = select(&flat(1), &work, 2, &CostModel::default());
    assert_eq!(local.reason, "all-reduce of 24 MiB over 1 members: local, nothing is sent");
}

/// The largest set: a sub-schedule that holds something of everybody still names registers that exist.
#[test]
fn registers_suffice_for_the_largest_set() {
    assert_eq!(limits::SIDECARS_MAX, 1_024);
    let topology = flat(1_024);
    for (kind, tensors) in [
        (WorkKind::AllReduceCoded { encoded_bytes: 2 }, vec![vec![5_000]]),
        (WorkKind::Gather { root: Rank(1_023) }, vec![vec![3; 1_024]]),
        (WorkKind::Scatter { root: Rank(1_023) }, vec![vec![3; 1_024]]),
    ] {
        let work = Work { kind, element_bytes: 4, tensors };
        let tuning = select(&topology, &work, 1, &CostModel::default()).tuning;
        let plan = plan(Member(1_023), &topology, &work, &tuning).expect("the limits allow it");
        let transfers =
            plan.sub_schedules.iter().flat_map(|sub_schedule| &sub_schedule.rounds).flat_map(|round| &round.transfers);
        let register = |transfer: &Transfer| match *transfer {
            Transfer::Send { from, .. } => from.0,
            Transfer::Receive { into, .. } => into.0,
        };
        let highest = transfers.map(register).max().expect("something travels");
        assert!(highest < REGISTERS_MAX, "{}: register {highest}", work.kind.name());
    }
}

fn every_kind(root: Rank) -> [WorkKind; 14] {
    [
        WorkKind::AllReduce,
        WorkKind::AllReduceCoded { encoded_bytes: 2 },
        WorkKind::AllReduceByBlocks { block_elements: 3_072, encoded_bytes: 12_300 },
        WorkKind::AllReduceNAry,
        WorkKind::AllReduceTwoPass { measures: 1 },
        WorkKind::AllReduceAdaptive,
        WorkKind::ReduceScatter,
        WorkKind::Reduce { root },
        WorkKind::Broadcast { root },
        WorkKind::AllGather,
        WorkKind::Gather { root },
        WorkKind::Scatter { root },
        WorkKind::AllToAll,
        WorkKind::Barrier,
    ]
}

/// A sub-schedule of a gather at the root, or of a direct all-reduce, holds a chunk for each member.
#[test]
fn memory_is_bounded_in_large_sets() {
    let ranks: Vec<u32> = (0..256).collect();
    for members in [2, 16, 64, 256] {
        let topology = placed(&ranks[..members], |_| true);
        for kind in every_kind(Rank(0)) {
            let tensor = match kind.counts() {
                Counts::One => vec![100 << 20],
                Counts::EachRank => vec![1 << 20; members],
                Counts::EachPair => vec![1 << 14; members * members],
            };
            let tensors = if kind == WorkKind::Barrier { Vec::new() } else { vec![tensor] };
            let work = Work { kind, element_bytes: 4, tensors };
            let tuning = select(&topology, &work, 4, &CostModel::default()).tuning;
            let held = u64::from(predicted(&topology, &work, &tuning).expect("it was selected").held_chunks);
            let Tuning { chunk_bytes, lanes, window, .. } = tuning;
            let bytes = u64::from(chunk_bytes) * u64::from(lanes) * u64::from(window) * held;
            assert!(bytes <= FLIGHT_BYTES_MAX, "{} over {members}: {bytes}", work.kind.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// What is selected can be planned, does not depend on the bucket in what matters, and passes the checker.
    #[test]
    fn selections_are_sound(
        members in 1..8_u32,
        kind in 0..14_usize,
        counts in proptest::collection::vec(0..400_000_u64, 1..5),
        lanes in 0..20_u16,
    ) {
        let topology = flat(members);
        let kind = every_kind(Rank(members - 1))[kind].clone();
        let long = || counts.iter().cycle().copied();
        let tensors = match kind.counts() {
            _ if kind == WorkKind::Barrier => Vec::new(),
            Counts::EachRank => vec![long().take(topology.size()).collect()],
            Counts::EachPair => vec![long().take(topology.size().pow(2)).collect()],
            Counts::One if kind.measures() => vec![vec![counts[0]]],
            Counts::One => counts.iter().map(|count| vec![*count]).collect(),
        };
        let model = CostModel::default();
        let work = Work { kind, element_bytes: 4, tensors };
        let choice = select(&topology, &work, lanes, &model);
        prop_assert!(choice.tuning.lanes <= lanes.max(1));
        prop_assert!(!choice.reason.contains('\n') && choice.reason.len() < 300, "{}", choice.reason);
        prop_assert!(choice.predicted_us.is_finite());
        if let Some(largest) = work.tensors.iter().map(|counts| counts.iter().sum()).max() {
            let alone = algorithm_of(&topology, &work.kind, 4, largest, &model);
            prop_assert_eq!(choice.tuning.algorithm, alone);
        }
        let plans = plans(&topology, &work, &choice.tuning);
        check(&topology, &work, &choice.tuning, &plans).map_err(|violation| TestCaseError::fail(violation.to_string()))?;
    }
}
