//! Every algorithm in every small world passes the symbolic checker.

use proptest::prelude::*;
use ronde_collectives::{Span, Target, WorkKind, check};
use ronde_wire::{Algorithm, SetTopology};

use crate::worlds::{Breadth, cases, flat, placed, placements, plans, tunings, work};

#[test]
fn plans_pass_the_checker_with_one_rank_per_member() {
    let checked: usize = (1..=17).map(|members| check_all(&flat(members), Breadth::Full)).sum();
    assert!(checked > 10_000, "only {checked} cases");
}

#[test]
fn plans_pass_the_checker_with_several_ranks_per_member() {
    let topologies = placements();
    assert!(topologies.len() > 500, "only {} topologies", topologies.len());
    let numbered = (0..).zip(&topologies);
    let checked: usize = numbered.map(|(number, topology)| check_all(topology, Breadth::Sample(number))).sum();
    assert!(checked > 20_000, "only {checked} cases");
}

/// Returns how many cases there were.
fn check_all(topology: &SetTopology, breadth: Breadth) -> usize {
    let cases = cases(topology, breadth);
    for (work, tuning) in &cases {
        let plans = plans(topology, work, tuning);
        if let Err(violation) = check(topology, work, tuning, &plans) {
            panic!("{violation}\n{topology:?}\n{work:?}\n{tuning:?}");
        }
    }
    cases.len()
}

/// A message is a scatter over its two ranks, of which the sender keeps nothing.
#[test]
fn a_message_between_any_two_ranks_arrives() {
    let world = placed(&[0, 1, 2, 1, 0], |_| true);
    for from in world.ranks() {
        for to in world.ranks().into_iter().filter(|to| *to != from) {
            let two = world.restricted_to(&[from, to]);
            for elements in [0, 1, 1_009] {
                let counts = two.ranks().iter().map(|rank| if *rank == to { elements } else { 0 }).collect();
                let work = work(WorkKind::Scatter { root: from }, vec![counts]);
                let algorithm = if two.len() == 1 { Algorithm::Local } else { Algorithm::Linear };
                for tuning in tunings(algorithm) {
                    let plans = plans(&two, &work, &tuning);
                    let proof = check(&two, &work, &tuning, &plans).unwrap_or_else(|violation| panic!("{violation}"));
                    let arrived = proof.result(0, Target::One(to));
                    let whole = (Span { start: 0, len: elements }, format!("r{}", from.0));
                    assert_eq!(arrived, if elements == 0 { vec![] } else { vec![whole] });
                    assert_eq!(proof.result(0, Target::One(from)), vec![]);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    /// Larger worlds than can be enumerated.
    #[test]
    fn plans_pass_the_checker_in_large_random_worlds(
        placement in proptest::collection::vec(0..40_u32, 18..60),
        number in any::<u16>(),
        which in any::<proptest::sample::Index>(),
    ) {
        let topology = placed(&placement, |_| true);
        let cases = cases(&topology, Breadth::Sample(usize::from(number)));
        for (work, tuning) in cases.iter().skip(which.index(cases.len())).step_by(17) {
            let plans = plans(&topology, work, tuning);
            check(&topology, work, tuning, &plans).map_err(|violation| TestCaseError::fail(violation.to_string()))?;
        }
    }
}
