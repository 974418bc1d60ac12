//! Tests of executors with real plans against a plain reference, with invalid chunks, changing memory, and bounds.

mod bits;
mod bounds;
mod forms;
mod hostile;
mod jobs;
mod measured;
mod plugins;
mod reduced;
mod steps;
mod world;

use proptest::prelude::*;
use ronde_collectives::plan::WorkKind;
use ronde_wire::{Algorithm, DType, Rank, ReduceOp, SetId, SetTopology, SidecarIndex, Tuning, World};

use jobs::{Expected, Job};
use world::Net;

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// With any placement, mix of operations, order of events and credit, the results equal those of a plain loop.
    #[test]
    fn results_equal_the_reference(
        placement in placements(),
        jobs in prop::collection::vec(any::<[u8; 12]>(), 1..6),
        lanes in 1_u16..=3,
        grant in prop::sample::select(vec![0_u64, 54, 60, 4_300, 1 << 20]),
        choices in prop::collection::vec(any::<u8>(), 32..256),
    ) {
        let topology = topology(&placement);
        let mut net = Net::new(topology.clone(), lanes, grant, choices);
        let jobs: Vec<Job> = jobs.iter().map(|seed| Job::from_seed(seed, &topology, lanes)).collect();
        for job in &jobs {
            net.submit_values(job);
        }
        net.run();
        net.assert_all_done();
        for (seq, job) in (1..).map(ronde_wire::Seq).zip(&jobs) {
            net.assert_results(seq, job);
        }
    }

    /// A worker that writes into its input during the operation changes only its contribution, equally for all ranks.
    #[test]
    fn a_worker_that_overwrites_its_input_changes_only_its_own_values(
        placement in placements(),
        gather: bool,
        window in 1_u16..=4,
        choices in prop::collection::vec(any::<u8>(), 32..256),
    ) {
        let topology = topology(&placement);
        let counts = vec![3_000; if gather { topology.size() } else { 1 }];
        let kind = if gather { WorkKind::AllGather } else { WorkKind::AllReduce };
        let algorithm = if topology.len() == 1 { Algorithm::Local } else { Algorithm::Ring };
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window };
        let job = Job::new(kind, DType::I32, (!gather).then_some(ReduceOp::Sum), vec![counts], tuning);
        let mut net = Net::new(topology.clone(), 1, 1 << 20, choices);
        net.nodes.iter_mut().for_each(|node| node.memory.contributions.scribblers = vec![Rank(0)]);
        let seq = net.submit_values(&job);
        net.run();
        net.assert_all_done();
        let results = net.results(seq, 0, None);
        prop_assert!(results.iter().all(|result| *result == results[0]), "all ranks end bit-equal");
        let Some(Expected::Bytes(expected)) = job.expected(&topology).remove(&(0, None)) else { panic!("whole numbers") };
        let honest = if gather { 4 * 3_000..results[0].len() } else { 0..0 };
        prop_assert_eq!(&results[0][honest.clone()], &expected[honest]);
        for (found, expected) in results[0].chunks(4).zip(expected.chunks(4)) {
            let number = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            let off = number(found).wrapping_sub(number(expected)).unsigned_abs();
            prop_assert!(off <= 0x0101_0101, "one bit of each byte of one contribution, not {off:x}");
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
