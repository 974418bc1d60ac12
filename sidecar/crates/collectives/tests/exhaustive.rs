//! Every algorithm in every small world passes the symbolic checker.

mod worlds;

use ronde_collectives::check;
use ronde_wire::SetTopology;
use worlds::{flat, placements, plans, tunings, works};

#[test]
fn worlds_of_one_rank_each() {
    (1..=17).for_each(|members| check_all(&flat(members)));
}

#[test]
fn placements_of_several_ranks() {
    let topologies = placements();
    assert!(topologies.len() > 500, "only {} topologies", topologies.len());
    topologies.iter().for_each(check_all);
}

fn check_all(topology: &SetTopology) {
    for (algorithm, work) in works(topology) {
        for tuning in tunings(algorithm) {
            let plans = plans(topology, &work, &tuning);
            if let Err(violation) = check(topology, &work, &tuning, &plans) {
                panic!("{violation}\n{topology:?}\n{work:?}\n{tuning:?}");
            }
        }
    }
}
