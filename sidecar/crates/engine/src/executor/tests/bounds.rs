//! Tests of bounds: private memory depends on the windows, not on the tensors, and no byte is copied without need.

use proptest::prelude::*;
use ronde_collectives::plan::{Counts, WorkKind};
use ronde_wire::{Algorithm, Codec, DType, Rank, ReduceOp, Tuning};

use super::jobs::{Job, KINDS, kind_of, op_of};
use super::topology;
use super::world::Net;
use crate::executor::ExecutorStats;

const CHUNK_BYTES: u64 = 4_096;

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// This includes a member that is slower than all others, and plans with replies in some sub-schedules only.
    #[test]
    fn private_memory_is_bounded(
        members in 2_u32..=5,
        kind in 0..KINDS,
        window in 1_u16..=4,
        slow in prop::option::of(0_usize..5),
        uneven in prop::collection::vec(0_u64..4, 25),
        choices in prop::collection::vec(any::<u8>(), 32..256),
    ) {
        let topology = topology(&(0..members).collect::<Vec<_>>());
        let (kind, algorithm) = kind_of(kind, Rank(1));
        let members = u64::from(members);
        let counts: Vec<u64> = match kind.counts() {
            Counts::One => vec![12_000 * members],
            Counts::EachRank => (0..topology.len()).map(|rank| 6_000 * uneven[rank]).collect(),
            Counts::EachPair => (0..topology.len().pow(2)).map(|pair| 3_000 * uneven[pair]).collect(),
        };
        let tensors = if kind == WorkKind::Barrier { Vec::new() } else { vec![counts] };
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window };
        let mut job = Job::new(kind, DType::F32, None, tensors, tuning);
        job.op = op_of(&job.kind, 0);
        let mut net = Net::new(topology, 1, 10_000, choices);
        net.slow = slow;
        let seq = net.submit_values(&job);
        net.run();
        net.assert_all_done();
        net.assert_results(seq, &job);
        let window = u64::from(window);
        let registers = match algorithm {
            Algorithm::Direct => 2 * members,
            Algorithm::Linear => members,
            _ => 3,
        };
        let prelude_bytes = if job.kind == WorkKind::AllReduceAdaptive { 2 * members * 12_000 * 4 } else { 0 };
        let [in_registers, parked, early] = net.peak;
        prop_assert!(in_registers <= prelude_bytes.max(window * registers * CHUNK_BYTES), "{:?} of {job:?}", net.peak);
        // Three windows from every peer, in as many rounds as it sends in.
        let rounds = if algorithm == Algorithm::Direct { 1 } else { 2 * members };
        let parked_max = 3 * window * (members - 1) * rounds * CHUNK_BYTES;
        prop_assert!(parked <= (prelude_bytes + parked_max), "{:?} of {job:?}", net.peak);
        prop_assert!(early <= 10_000 * (members - 1), "{:?} of {job:?}", net.peak);
    }
}

/// 17 members, one of them with three ranks, in two windows. A sub-schedule in flight has two registers for each member. Of
/// each peer there are parked at most its contribution to a sub-schedule that has begun here or there, and a result.
#[test]
fn direct_plans_of_many_members_stay_within_their_registers() {
    let placement: Vec<u32> = (0..17).chain([3, 3]).collect();
    let topology = topology(&placement);
    for kind in 3..=6 {
        for slow in [None, Some(3)] {
            let (kind, algorithm) = kind_of(kind, Rank(0));
            let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 2 };
            let mut job = Job::new(kind, DType::F32, None, vec![vec![17 * 3_500]], tuning);
            job.op = op_of(&job.kind, 0);
            let mut net = Net::new(topology.clone(), 1, 1 << 20, vec![19, 3, 240, 77, 5, 130]);
            net.slow = slow;
            let seq = net.submit_values(&job);
            net.run();
            net.assert_all_done();
            net.assert_results(seq, &job);
            // A prelude runs alone, and its chunks here are whole pieces of three ranks.
            let piece_bytes = 3 * 3_500 * 4;
            let prelude = if job.kind == WorkKind::AllReduceAdaptive { 2 * 17 * piece_bytes } else { 0 };
            let [registers, parked, _] = net.peak;
            assert!(registers <= prelude.max(2 * 2 * 17 * CHUNK_BYTES), "{:?} of {job:?}", net.peak);
            let parked_prelude = if prelude == 0 { 0 } else { 16 * piece_bytes };
            assert!(parked <= parked_prelude + 3 * 2 * 16 * CHUNK_BYTES, "{:?} of {job:?}", net.peak);
        }
    }
}

/// In steady state nothing is copied, although what was sent is still held by the transport; every byte of the input is
/// read once, and every byte of the result written once.
#[test]
fn nothing_is_copied_in_steady_state() {
    let topology = topology(&[0, 1, 2]);
    for kind in 0..=6 {
        let (kind, algorithm) = kind_of(kind, Rank(0));
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 2 };
        let mut job = Job::new(kind, DType::F32, None, vec![vec![50_000]], tuning);
        job.op = op_of(&job.kind, 1);
        let mut net = Net::new(topology.clone(), 1, 1 << 20, vec![7, 3, 9, 200]);
        net.submit_values(&job);
        net.run();
        net.assert_all_done();
        for node in &net.nodes {
            let stats = node.lanes[0].stats();
            assert_eq!(stats.copies, 0, "{stats:?} of {job:?}");
            assert_eq!(stats.published_bytes, 200_000);
            assert_eq!(stats.contributed_bytes, 200_000, "{stats:?} of {job:?}");
        }
        let stats: Vec<_> = net.nodes.iter().map(|node| node.lanes[0].stats()).collect();
        match job.op {
            Some(ReduceOp::Adasum) => assert_eq!(stats.iter().map(|s| s.measured_bytes).sum::<u64>(), 3 * 200_000),
            Some(ReduceOp::ClippedMean) => assert!(stats.iter().all(|s| s.measured_bytes == 200_000)),
            _ => assert!(stats.iter().all(|s| s.measured_bytes == 0)),
        }
        let coded = |bytes: u64| if job.codec == Codec::None { 0 } else { bytes };
        // Encoded are the contribution and the own piece; decoded all contributions to the own piece, and the result.
        let encoded: u64 = stats.iter().map(|s| s.encoded_bytes).sum();
        let decoded: u64 = stats.iter().map(|s| s.decoded_bytes).sum();
        assert_eq!((encoded, decoded), (coded(4 * 200_000), coded(6 * 200_000)));
    }
}

/// Member 1 has heard of member 0 in sub-schedules 0 and 1 and has ended them, waits for its word of sub-schedule 2,
/// and needs none of sub-schedules 3 and 4; member 0 waits for member 2 in sub-schedule 0. So something of five
/// sub-schedules is parked there in two windows.
#[test]
fn sub_schedules_with_and_without_replies_may_be_mixed() {
    let topology = topology(&[0, 1, 2]);
    let (kind, algorithm) = kind_of(12, Rank(0));
    let chunk = 1_024;
    let counts = [[0, 2, 0], [5 * chunk, 0, 0], [5 * chunk, 0, 0]].concat();
    let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 2 };
    let job = Job::new(kind, DType::F32, None, vec![counts], tuning);
    let mut net = Net::new(topology, 1, 1 << 20, vec![5, 9, 201, 44]);
    net.slow = Some(2);
    let seq = net.submit_values(&job);
    net.run();
    net.assert_all_done();
    net.assert_results(seq, &job);
    assert!(net.peak[1] >= 5 * CHUNK_BYTES, "it came to that: {:?}", net.peak);
}

/// Three members with two ranks each, in thirds of a rank's tensor: what the table in the executor's header says.
#[test]
fn byte_counters_match_the_table_of_costs() {
    // Kind, then read, reduced, sent, written.
    for (kind, expected) in [
        (0, [18, 6, 12, 9]),
        (1, [18, 9, 12, 9]),
        (2, [18, 6, 12, 9]),
        (3, [18, 6, 6, 9]),
        (4, [18, 18, 18, 9]),
        (5, [18, 18, 18, 9]),
        (6, [18, 18, 30, 9]),
        (7, [18, 6, 6, 3]),
        (8, [18, 6, 6, 3]),
        (9, [3, 0, 6, 9]),
        (10, [18, 0, 36, 54]),
        (11, [18, 0, 12, 18]),
        (12, [18, 0, 12, 18]),
        (14, [3, 0, 2, 3]),
    ] {
        let third_bytes = 4 * 4_002;
        let (kind, algorithm) = kind_of(kind, Rank(2));
        let counts = match kind {
            WorkKind::AllGather | WorkKind::Gather { .. } => vec![3 * 4_002; 6],
            WorkKind::ReduceScatter | WorkKind::Scatter { .. } => vec![4_002 / 2; 6],
            WorkKind::AllToAll => vec![4_002 / 2; 36],
            _ => vec![3 * 4_002],
        };
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 3 };
        let mut job = Job::new(kind, DType::F32, None, vec![counts], tuning);
        job.op = op_of(&job.kind, 1);
        let mut net = Net::new(topology(&[0, 0, 1, 1, 2, 2]), 1, 1 << 20, vec![17, 4, 211]);
        net.submit_values(&job);
        net.run();
        net.assert_all_done();
        let sum =
            |read: fn(&ExecutorStats) -> u64| net.nodes.iter().map(|node| read(node.lanes[0].stats())).sum::<u64>();
        // The measures take less than a third.
        let found =
            [sum(|s| s.contributed_bytes), sum(|s| s.reduced_bytes), sum(|s| s.sent_bytes), sum(|s| s.published_bytes)];
        assert_eq!(found.map(|bytes| bytes / third_bytes), expected, "{job:?}");
        assert_eq!(sum(|s| s.copied_bytes), 0, "{job:?}");
    }
}
