//! Bits do not depend on the bucket: a tensor's elements have the same expressions in any bucket, however it is cut.

mod worlds;

use proptest::prelude::*;
use proptest::sample::select;
use ronde_collectives::{Target, Work, WorkKind, check};
use ronde_wire::{Algorithm, SetTopology, Tuning};
use worlds::{flat, placed, plans, work};

fn topologies() -> impl Strategy<Value = SetTopology> {
    let scattered = proptest::collection::vec(0..5_u32, 1..12).prop_map(|placement| placed(&placement, |_| true));
    let subset = (proptest::collection::vec(0..5_u32, 1..12), 0..12_usize).prop_map(|(placement, out)| {
        let size = placement.len();
        placed(&placement, |rank| size == 1 || rank != out % size)
    });
    prop_oneof![(2..9_u32).prop_map(flat), scattered, subset].prop_filter("several members", |t| t.len() > 1)
}

fn cuts(algorithm: Algorithm) -> impl Strategy<Value = Tuning> {
    (select(&[4_u32 << 10, 5_000, 64 << 10, 1 << 20]), 1..4_u16, 1..5_u16)
        .prop_map(move |(chunk_bytes, lanes, window)| Tuning { algorithm, chunk_bytes, lanes, window })
}

fn expressions(
    topology: &SetTopology,
    work: &Work,
    tuning: &Tuning,
    tensor: u32,
) -> Vec<(ronde_collectives::Span, String)> {
    let plans = plans(topology, work, tuning);
    let proof = check(topology, work, tuning, &plans).unwrap_or_else(|violation| panic!("{violation}"));
    proof.result(tensor, Target::EveryRank)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn all_reduce(
        topology in topologies(),
        bucket in proptest::collection::vec(0..300_u64, 1..6),
        which in 0..6_usize,
        cuts in prop_oneof![
            (cuts(Algorithm::Ring), cuts(Algorithm::Ring)),
            (cuts(Algorithm::RecursiveDoubling), cuts(Algorithm::RecursiveDoubling)),
        ],
    ) {
        let which = which % bucket.len();
        let together = work(WorkKind::AllReduce, bucket.iter().map(|count| vec![*count]).collect());
        let alone = work(WorkKind::AllReduce, vec![vec![bucket[which]]]);
        let in_bucket = expressions(&topology, &together, &cuts.0, u32::try_from(which).expect("below 6"));
        prop_assert_eq!(in_bucket, expressions(&topology, &alone, &cuts.1, 0));
    }

    #[test]
    fn all_gather(
        topology in topologies(),
        counts in proptest::collection::vec(proptest::collection::vec(0..80_u64, 12), 1..4),
        which in 0..4_usize,
        cuts in (cuts(Algorithm::Ring), cuts(Algorithm::Ring)),
    ) {
        let which = which % counts.len();
        let bucket: Vec<Vec<u64>> = counts.iter().map(|counts| counts[..topology.size()].to_vec()).collect();
        let alone = work(WorkKind::AllGather, vec![bucket[which].clone()]);
        let together = work(WorkKind::AllGather, bucket);
        let in_bucket = expressions(&topology, &together, &cuts.0, u32::try_from(which).expect("below 4"));
        prop_assert_eq!(in_bucket, expressions(&topology, &alone, &cuts.1, 0));
    }
}

#[test]
fn expressions_are_what_the_algorithms_promise() {
    let tuning = |algorithm| Tuning { algorithm, chunk_bytes: 4 << 10, lanes: 1, window: 1 };
    let four = work(WorkKind::AllReduce, vec![vec![5]]);
    let texts = |topology: &SetTopology, algorithm| {
        let runs = expressions(topology, &four, &tuning(algorithm), 0);
        runs.into_iter().map(|(span, text)| format!("{}+{} {text}", span.start, span.len)).collect::<Vec<_>>()
    };
    let ring =
        ["0+2 [(((r0 r1) r2) r3)]", "2+1 [(((r1 r2) r3) r0)]", "3+1 [(((r2 r3) r0) r1)]", "4+1 [(((r3 r0) r1) r2)]"];
    assert_eq!(texts(&flat(4), Algorithm::Ring), ring);
    assert_eq!(texts(&flat(4), Algorithm::RecursiveDoubling), ["0+5 [((r0 r1) (r2 r3))]"]);
    assert_eq!(texts(&flat(3), Algorithm::RecursiveDoubling), ["0+5 [((r0 r1) r2)]"]);
    assert_eq!(texts(&placed(&[1, 0, 1], |_| true), Algorithm::RecursiveDoubling), ["0+5 [(r1 (r0 r2))]"]);
}
