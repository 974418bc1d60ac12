//! How long others wait for a rank, as the coordinator and each sidecar count it.

use super::cluster::{Cluster, sum};

#[test]
fn a_second_in_which_many_tensors_wait_for_a_rank_is_one_second() {
    let mut cluster = Cluster::new(&[0, 0, 1]).started();
    let tensors: Vec<String> = (0..10).map(|number| format!("gradient.{number}")).collect();
    let submit = |cluster: &mut Cluster, rank: u32| {
        for tensor in &tensors {
            cluster.submit(rank, sum(tensor, &[4]));
        }
        cluster.run();
    };
    for step in 1..=4_u64 {
        submit(&mut cluster, 0);
        submit(&mut cluster, 2);
        cluster.advance(1_000);
        submit(&mut cluster, 1);
        let stats = cluster.engines[0].stats();
        let (negotiated, scheduled) =
            (cluster.engines[0].status(cluster.now).waited_for_us[1], stats.waited_here_us.get(&1).copied());
        assert_eq!(negotiated + scheduled.unwrap_or_default(), step * 1_000_000, "{negotiated} {scheduled:?}");
    }
    assert!(cluster.engines[0].stats().schedules_issued > 0, "steps of both kinds were counted");
    assert!(cluster.engines[0].stats().waited_here_us.contains_key(&1));
}
