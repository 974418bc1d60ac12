//! Every algorithm in every small world passes the symbolic checker.

mod worlds;

use ronde_collectives::check;
use ronde_wire::SetTopology;
use worlds::{Breadth, cases, flat, placements, plans};

#[test]
fn worlds_of_one_rank_each() {
    let checked: usize = (1..=17).map(|members| check_all(&flat(members), Breadth::Full)).sum();
    assert!(checked > 10_000, "only {checked} cases");
}

#[test]
fn placements_of_several_ranks() {
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
