//! Bits do not depend on the bucket: a tensor's elements have the same expressions in any bucket, however it is cut.

use proptest::prelude::*;
use proptest::sample::select;
use ronde_collectives::plan::{Plan, Step};
use ronde_collectives::{Span, Target, Work, WorkKind, check};
use ronde_wire::{Algorithm, Rank, SetTopology, Tuning};

use crate::worlds::{flat, placed, plans, work};

fn topologies() -> impl Strategy<Value = SetTopology> {
    let scattered = proptest::collection::vec(0..5_u32, 1..12).prop_map(|placement| placed(&placement, |_| true));
    let subset = (proptest::collection::vec(0..5_u32, 1..12), 0..12_usize).prop_map(|(placement, out)| {
        let size = placement.len();
        placed(&placement, |rank| size == 1 || rank != out % size)
    });
    prop_oneof![(2..9_u32).prop_map(flat), scattered, subset].prop_filter("several members", |t| t.len() > 1)
}

/// How a bucket is cut, but for the algorithm.
#[derive(Clone, Copy, Debug)]
struct Cut {
    chunk_bytes: u32,
    lanes: u16,
    window: u16,
}

impl Cut {
    fn with(self, algorithm: Algorithm) -> Tuning {
        let Self { chunk_bytes, lanes, window } = self;
        Tuning { algorithm, chunk_bytes, lanes, window }
    }
}

fn cuts() -> impl Strategy<Value = Cut> {
    (select(&[4_u32 << 10, 5_000, 64 << 10, 1 << 20]), 1..4_u16, 1..5_u16)
        .prop_map(|(chunk_bytes, lanes, window)| Cut { chunk_bytes, lanes, window })
}

/// How the elements of one result are computed, after all plans passed the checker.
fn expressions(
    topology: &SetTopology,
    work: &Work,
    tuning: &Tuning,
    (tensor, target): (usize, Target),
) -> Vec<(Span, String)> {
    let plans = plans(topology, work, tuning);
    let proof = check(topology, work, tuning, &plans).unwrap_or_else(|violation| panic!("{violation}"));
    proof.result(u32::try_from(tensor).expect("few tensors"), target)
}

/// For each member the runs of a tensor's elements that it encodes, each of which lies in that tensor alone.
fn encoded(topology: &SetTopology, work: &Work, tuning: &Tuning, tensor: usize) -> Vec<Vec<(u64, u64)>> {
    let of_plan = |plan: &Plan| {
        let steps =
            plan.sub_schedules.iter().flat_map(|sub_schedule| &sub_schedule.rounds).flat_map(|round| &round.steps);
        let spans = steps.filter_map(|step| match step {
            Step::Encode { span, .. } => Some(*span),
            _ => None,
        });
        let runs = spans.filter_map(|span| {
            let slices: Vec<_> = plan.layout.within(span).collect();
            let [slice] = slices[..] else { panic!("{span:?} lies in {} tensors", slices.len()) };
            (slice.tensor as usize == tensor).then_some((slice.input_start, slice.span.len))
        });
        runs.collect()
    };
    plans(topology, work, tuning).iter().map(of_plan).collect()
}

/// What is reduced element by element in a bucket of any tensors.
fn reductions() -> impl Strategy<Value = (Algorithm, WorkKind)> {
    select(&[
        (Algorithm::Ring, WorkKind::AllReduce),
        (Algorithm::RecursiveDoubling, WorkKind::AllReduce),
        (Algorithm::HalvingDoubling, WorkKind::AllReduce),
        (Algorithm::Direct, WorkKind::AllReduceCoded { encoded_bytes: 128 }),
        (Algorithm::Direct, WorkKind::AllReduceByBlocks { block_elements: 7, encoded_bytes: 128 }),
        (Algorithm::Direct, WorkKind::AllReduceNAry),
        (Algorithm::BinomialTree, WorkKind::Reduce { root: Rank(1) }),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn reductions_do_not_depend_on_the_bucket(
        topology in topologies(),
        bucket in proptest::collection::vec(0..300_u64, 1..6),
        which in 0..6_usize,
        (algorithm, kind) in reductions(),
        (a, b) in (cuts(), cuts()),
    ) {
        let which = which % bucket.len();
        let kind = match kind {
            WorkKind::Reduce { .. } => WorkKind::Reduce { root: topology.ranks()[0] },
            other => other,
        };
        let target = kind.root().map_or(Target::EveryRank, Target::One);
        let together = work(kind.clone(), bucket.iter().map(|count| vec![*count]).collect());
        let alone = work(kind, vec![vec![bucket[which]]]);
        let in_bucket = expressions(&topology, &together, &a.with(algorithm), (which, target));
        prop_assert_eq!(in_bucket, expressions(&topology, &alone, &b.with(algorithm), (0, target)));
    }

    /// A codec that looks at many elements sees the same ones in any bucket.
    #[test]
    fn codec_blocks_do_not_depend_on_the_bucket(
        topology in topologies(),
        bucket in proptest::collection::vec(0..300_u64, 1..6),
        which in 0..6_usize,
        block_elements in 1..40_u32,
        (a, b) in (cuts(), cuts()),
    ) {
        let which = which % bucket.len();
        let kind = WorkKind::AllReduceByBlocks { block_elements, encoded_bytes: 128 };
        let together = work(kind.clone(), bucket.iter().map(|count| vec![*count]).collect());
        let alone = work(kind, vec![vec![bucket[which]]]);
        let in_bucket = encoded(&topology, &together, &a.with(Algorithm::Direct), which);
        prop_assert!(in_bucket.iter().flatten().all(|(_, len)| *len <= u64::from(block_elements)));
        prop_assert_eq!(in_bucket, encoded(&topology, &alone, &b.with(Algorithm::Direct), 0));
    }

    #[test]
    fn reduce_scatters_do_not_depend_on_the_bucket(
        topology in topologies(),
        counts in proptest::collection::vec(proptest::collection::vec(0..80_u64, 12), 1..4),
        which in 0..4_usize,
        (a, b) in (cuts(), cuts()),
    ) {
        let which = which % counts.len();
        let bucket: Vec<Vec<u64>> = counts.iter().map(|counts| counts[..topology.size()].to_vec()).collect();
        let alone = work(WorkKind::ReduceScatter, vec![bucket[which].clone()]);
        let together = work(WorkKind::ReduceScatter, bucket);
        for rank in topology.ranks() {
            let of_rank = |tensor| (tensor, Target::One(rank));
            let in_bucket = expressions(&topology, &together, &a.with(Algorithm::Ring), of_rank(which));
            prop_assert_eq!(in_bucket, expressions(&topology, &alone, &b.with(Algorithm::Ring), of_rank(0)));
        }
    }

    /// What a prelude measures is summed in one order however the rest is cut.
    #[test]
    fn preludes_do_not_depend_on_the_tuning(topology in topologies(), count in 0..1_500_u64, adaptive in any::<bool>(), (a, b) in (cuts(), cuts())) {
        let kind = if adaptive { WorkKind::AllReduceAdaptive } else { WorkKind::AllReduceTwoPass { measures: 1 } };
        // Elements that are large enough for several rounds of measuring.
        let work = Work { element_bytes: 4 << 10, ..work(kind, vec![vec![count]]) };
        let [a, b] = [a, b].map(|cut| {
            let tuning = cut.with(Algorithm::Direct);
            let plans = plans(&topology, &work, &tuning);
            let proof = check(&topology, &work, &tuning, &plans).unwrap_or_else(|violation| panic!("{violation}"));
            (proof.measured.clone(), proof.result(0, Target::EveryRank))
        });
        prop_assert_eq!(a, b);
    }

    #[test]
    fn all_gathers_do_not_depend_on_the_bucket(
        topology in topologies(),
        counts in proptest::collection::vec(proptest::collection::vec(0..80_u64, 12), 1..4),
        which in 0..4_usize,
        (a, b) in (cuts(), cuts()),
    ) {
        let which = which % counts.len();
        let bucket: Vec<Vec<u64>> = counts.iter().map(|counts| counts[..topology.size()].to_vec()).collect();
        let alone = work(WorkKind::AllGather, vec![bucket[which].clone()]);
        let together = work(WorkKind::AllGather, bucket);
        let in_bucket = expressions(&topology, &together, &a.with(Algorithm::Ring), (which, Target::EveryRank));
        prop_assert_eq!(in_bucket, expressions(&topology, &alone, &b.with(Algorithm::Ring), (0, Target::EveryRank)));
    }
}

#[test]
fn expressions_are_those_that_the_algorithms_document() {
    let cut = Cut { chunk_bytes: 4 << 10, lanes: 1, window: 1 };
    let texts = |topology: &SetTopology, algorithm, kind: WorkKind, counts: Vec<u64>, target| {
        let work = work(kind, vec![counts]);
        let runs = expressions(topology, &work, &cut.with(algorithm), (0, target));
        runs.into_iter().map(|(span, text)| format!("{}+{} {text}", span.start, span.len)).collect::<Vec<_>>()
    };
    let all_reduce =
        |topology: &SetTopology, algorithm| texts(topology, algorithm, WorkKind::AllReduce, vec![5], Target::EveryRank);
    let ring =
        ["0+2 [(((r0 r1) r2) r3)]", "2+1 [(((r1 r2) r3) r0)]", "3+1 [(((r2 r3) r0) r1)]", "4+1 [(((r3 r0) r1) r2)]"];
    assert_eq!(all_reduce(&flat(4), Algorithm::Ring), ring);
    for algorithm in [Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling] {
        assert_eq!(all_reduce(&flat(4), algorithm), ["0+5 [((r0 r1) (r2 r3))]"]);
        assert_eq!(all_reduce(&flat(3), algorithm), ["0+5 [((r0 r1) r2)]"]);
        assert_eq!(all_reduce(&placed(&[1, 0, 1], |_| true), algorithm), ["0+5 [(r1 (r0 r2))]"]);
    }
    let direct = |kind| texts(&flat(3), Algorithm::Direct, kind, vec![5], Target::EveryRank);
    let coded = direct(WorkKind::AllReduceCoded { encoded_bytes: 128 });
    assert_eq!(coded, ["0+5 <[((<r0> <r1>) <r2>)]>"]);
    assert_eq!(direct(WorkKind::AllReduceNAry), ["0+5 [{r0 r1 r2}]"]);
    let root = Rank(1);
    let reduced = texts(&flat(4), Algorithm::BinomialTree, WorkKind::Reduce { root }, vec![5], Target::One(root));
    assert_eq!(reduced, ["0+5 [((r1 r2) (r3 r0))]"]);
    let share = texts(&flat(3), Algorithm::Ring, WorkKind::ReduceScatter, vec![2, 2, 1], Target::One(Rank(1)));
    assert_eq!(share, ["0+2 [((r2 r0) r1)]"]);
}
