//! Real plans on real executors, against a plain reference; hostile chunks; hostile memory; bounds.

mod hostile;
mod world;

use proptest::prelude::*;
use ronde_collectives::plan::WorkKind;
use ronde_wire::{Algorithm, DType, Rank, ReduceOp, SetId, SetTopology, SidecarIndex, Tuning, World};

use world::{Job, Net};

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Any placement, any mix of operations, any order of events, any credit: the results are those of a loop.
    #[test]
    fn results_equal_the_reference(
        placement in placements(),
        jobs in prop::collection::vec(any::<[u8; 8]>(), 1..6),
        lanes in 1_u16..=3,
        grant in prop::sample::select(vec![0_u64, 54, 60, 4_300, 1 << 20]),
        choices in prop::collection::vec(any::<u8>(), 32..256),
    ) {
        let topology = topology(&placement);
        let mut net = Net::new(topology.clone(), lanes, grant, choices);
        let jobs: Vec<Job> = jobs.iter().map(|seed| job(seed, &topology, lanes)).collect();
        for job in &jobs {
            let ranks = topology.size() as i64;
            net.submit(job, |tensor, rank, element| encode(job.dtype, value(job, ranks, tensor, rank, element)));
        }
        net.run();
        net.assert_all_done();
        for (seq, job) in (1..).map(ronde_wire::Seq).zip(&jobs) {
            for (tensor, expected) in (0..).zip(reference(job, &topology)) {
                for node in &net.nodes {
                    prop_assert_eq!(&node.memory.outputs[&(seq, tensor)], &expected, "{} of {:?}", seq, job);
                }
            }
        }
    }

    /// A process that writes into its tensor while it travels changes what it contributes, the same for everybody, and
    /// nothing else.
    #[test]
    fn a_scribbler_changes_only_its_own_values(
        placement in placements(),
        seed in any::<[u8; 8]>(),
        gather: bool,
        choices in prop::collection::vec(any::<u8>(), 32..256),
    ) {
        let topology = topology(&placement);
        let mut job = job(&seed, &topology, 1);
        let counts = vec![3_000; if gather { topology.size() } else { 1 }];
        job.kind = if gather { WorkKind::AllGather } else { WorkKind::AllReduce };
        (job.dtype, job.op, job.tensors) = (DType::I32, (!gather).then_some(ReduceOp::Sum), vec![counts]);
        job.tuning.algorithm = if topology.len() == 1 { Algorithm::Local } else { Algorithm::Ring };
        let mut net = Net::new(topology.clone(), 1, 1 << 20, choices);
        net.nodes.iter_mut().for_each(|node| node.memory.scribblers = vec![Rank(0)]);
        let seq = net.submit(&job, |tensor, rank, element| encode(DType::I32, value(&job, 1, tensor, rank, element)));
        net.run();
        net.assert_all_done();
        let results: Vec<&Vec<u8>> = net.nodes.iter().map(|node| &node.memory.outputs[&(seq, 0)]).collect();
        prop_assert!(results.iter().all(|result| *result == results[0]), "all ranks end bit-equal");
        let expected = &reference(&job, &topology)[0];
        let honest = if gather { 4 * 3_000..results[0].len() } else { 0..0 };
        prop_assert_eq!(&results[0][honest.clone()], &expected[honest]);
        for (found, expected) in results[0].chunks(4).zip(expected.chunks(4)) {
            let number = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            let off = number(found).wrapping_sub(number(expected)).unsigned_abs();
            prop_assert!(off <= 0x0101_0101, "one bit of each byte of one contribution, not {off:x}");
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Private bytes follow the windows, not the tensor, also at a member that is slower than all others.
    #[test]
    fn private_memory_is_bounded(
        members in 2_u32..=5,
        kind in 0_usize..4,
        window in 1_u16..=4,
        slow in prop::option::of(0_usize..5),
        choices in prop::collection::vec(any::<u8>(), 32..256),
    ) {
        let placement: Vec<u32> = (0..members).collect();
        let topology = topology(&placement);
        let (kind, algorithm, op) = match kind {
            0 => (WorkKind::AllReduce, Algorithm::Ring, Some(ReduceOp::Sum)),
            1 => (WorkKind::AllReduce, Algorithm::RecursiveDoubling, Some(ReduceOp::Sum)),
            2 => (WorkKind::Broadcast { root: Rank(1) }, Algorithm::BinomialTree, None),
            _ => (WorkKind::AllGather, Algorithm::Ring, None),
        };
        let counts = if kind == WorkKind::AllGather { vec![20_000; placement.len()] } else { vec![60_000] };
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window };
        let job = Job { kind, dtype: DType::F32, op, tensors: vec![counts], tuning };
        let mut net = Net::new(topology, 1, 10_000, choices);
        net.slow = slow;
        net.submit(&job, |tensor, rank, element| encode(DType::F32, value(&job, 1, tensor, rank, element)));
        net.run();
        net.assert_all_done();
        let (window, chunk) = (u64::from(window), 4_096);
        let senders_rounds = 2 * u64::from(members) * 3;
        prop_assert!(net.peak[0] <= window * 4 * chunk, "registers: {:?}", net.peak);
        prop_assert!(net.peak[1] <= 2 * window * senders_rounds * chunk, "parked: {:?}", net.peak);
        prop_assert!(net.peak[2] <= 10_000 * u64::from(members - 1), "early: {:?}", net.peak);
    }
}

/// In steady state nothing is copied, although what was sent is still held by the transport.
#[test]
fn a_ring_copies_nothing() {
    let topology = topology(&[0, 1, 2]);
    let tuning = Tuning { algorithm: Algorithm::Ring, chunk_bytes: 4_096, lanes: 1, window: 2 };
    let counts = vec![vec![50_000]];
    let job =
        Job { kind: WorkKind::AllReduce, dtype: DType::F32, op: Some(ReduceOp::Average), tensors: counts, tuning };
    for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling] {
        let job = Job { tuning: Tuning { algorithm, ..tuning }, ..job.clone() };
        let mut net = Net::new(topology.clone(), 1, 1 << 20, vec![7, 3, 9, 200]);
        net.submit(&job, |tensor, rank, element| encode(DType::F32, value(&job, 3, tensor, rank, element)));
        net.run();
        net.assert_all_done();
        for node in &net.nodes {
            let stats = node.lanes[0].stats();
            assert_eq!(stats.copies, 0, "{algorithm}: {stats:?}");
            assert_eq!(stats.published_bytes, 200_000);
            assert_eq!(stats.contributed_bytes, 200_000, "every byte of the input is read once");
        }
    }
}

fn placements() -> impl Strategy<Value = Vec<u32>> {
    (1_u32..=5).prop_flat_map(|sidecars| {
        prop::collection::vec(0..sidecars, 1..=8).prop_map(|mut placement| {
            placement.push(0);
            placement
        })
    })
}

fn topology(placement: &[u32]) -> SetTopology {
    let world = World::new(placement.iter().copied().map(SidecarIndex).collect()).expect("a small world");
    world.topology(SetId::WORLD).expect("the set of all ranks")
}

/// An operation out of eight bytes.
fn job(seed: &[u8; 8], topology: &SetTopology, lanes: u16) -> Job {
    let pick = |index: usize, count: usize| usize::from(seed[index]) % count;
    let alone = topology.len() == 1;
    let ranks = topology.ranks();
    let root = ranks[pick(1, ranks.len())];
    let sizes = [0, 1, 2, 7, 1_025, 5_000];
    let count = |salt: usize| sizes[(usize::from(seed[2]) + salt * usize::from(seed[3])) % sizes.len()];
    let (kind, algorithm) = match pick(0, 5) {
        0 => (WorkKind::AllReduce, Algorithm::Ring),
        1 => (WorkKind::AllReduce, Algorithm::RecursiveDoubling),
        2 => (WorkKind::Broadcast { root }, Algorithm::BinomialTree),
        3 => (WorkKind::AllGather, Algorithm::Ring),
        _ => (WorkKind::Barrier, Algorithm::Dissemination),
    };
    let algorithm = if alone { Algorithm::Local } else { algorithm };
    let tensors = match kind {
        WorkKind::Barrier => Vec::new(),
        WorkKind::AllGather => (0..=pick(4, 3)).map(|t| (0..ranks.len()).map(|r| count(t + r)).collect()).collect(),
        _ => (0..=pick(4, 3)).map(|t| vec![count(t)]).collect(),
    };
    let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    let op = (kind == WorkKind::AllReduce).then_some(ops[pick(5, ops.len())]);
    let mut dtype = DType::ALL[pick(6, DType::ALL.len())];
    if dtype == DType::Bool && op == Some(ReduceOp::Average) {
        dtype = DType::F16;
    }
    let window = 1 + u16::from(seed[7]) % 4;
    Job { kind, dtype, op, tensors, tuning: Tuning { algorithm, chunk_bytes: 4_096, lanes, window } }
}

/// Small whole numbers whose sums, products and averages are exact in every type.
fn value(job: &Job, ranks: i64, tensor: u32, rank: Rank, element: u64) -> i64 {
    let mixed = (element.wrapping_mul(31) ^ u64::from(tensor * 7 + rank.0 * 13)) as i64;
    match job.op {
        _ if job.dtype == DType::Bool => mixed & 1,
        Some(ReduceOp::Product) if job.dtype.size_bytes() == 1 => 1 + i64::from(mixed % 5 == 0 && rank.0 < 6),
        Some(ReduceOp::Product) => 1 + (mixed & 1),
        Some(ReduceOp::Average) => (mixed & 1) * ranks,
        _ => mixed % 8,
    }
}

/// What every rank must get, tensor by tensor.
fn reference(job: &Job, topology: &SetTopology) -> Vec<Vec<u8>> {
    let ranks = topology.ranks();
    let size = ranks.len() as i64;
    let at = |tensor, rank, element| value(job, size, tensor, rank, element);
    let reduce = |tensor, element| {
        let values = ranks.iter().map(|rank| at(tensor, *rank, element));
        let boolean = job.dtype == DType::Bool;
        match job.op.expect("a reduction") {
            ReduceOp::Sum if boolean => values.max().unwrap_or(0),
            ReduceOp::Product if boolean => values.min().unwrap_or(0),
            ReduceOp::Average => values.sum::<i64>() / size,
            ReduceOp::Min => values.min().unwrap_or(0),
            ReduceOp::Max => values.max().unwrap_or(0),
            ReduceOp::Product => values.product(),
            _ => values.sum(),
        }
    };
    let tensor = |(tensor, counts): (u32, &Vec<u64>)| match job.kind {
        WorkKind::AllReduce => (0..counts[0]).flat_map(|e| encode(job.dtype, reduce(tensor, e))).collect(),
        WorkKind::Broadcast { root } => (0..counts[0]).flat_map(|e| encode(job.dtype, at(tensor, root, e))).collect(),
        _ => {
            let block = |(rank, count): (&Rank, &u64)| -> Vec<u8> {
                (0..*count).flat_map(|e| encode(job.dtype, at(tensor, *rank, e))).collect()
            };
            ranks.iter().zip(counts).flat_map(block).collect()
        }
    };
    (0..).zip(&job.tensors).map(tensor).collect()
}

/// A whole number below 2^11 in any type; written out by hand, so that it shares nothing with the kernels.
fn encode(dtype: DType, value: i64) -> Vec<u8> {
    let integer = value.to_le_bytes();
    match dtype {
        DType::F64 => (value as f64).to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::Bf16 => (value as f32).to_le_bytes()[2..].to_vec(),
        DType::F16 if value == 0 => vec![0, 0],
        DType::F16 => {
            let exponent = value.ilog2();
            let fraction = (value << 10 >> exponent) & 0x3ff;
            (((i64::from(exponent) + 15) << 10) | fraction).to_le_bytes()[..2].to_vec()
        }
        _ => integer[..dtype.size_bytes()].to_vec(),
    }
}
