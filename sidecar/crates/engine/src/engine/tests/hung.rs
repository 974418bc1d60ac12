//! Which rank counts as hung, in virtual time.

use ronde_wire::{Collective, Rank, Request, SidecarIndex, World};

use super::cluster::{Cluster, request, sum};
use super::liveness::advance_with_workers;
use crate::engine::EngineConfig;

/// Four ranks on three sidecars; a rank that hangs is reported after two seconds.
fn cluster() -> Cluster {
    let world = World::new([0, 1, 1, 2].map(SidecarIndex).into()).expect("a world");
    Cluster::of(world, |config| EngineConfig { replace_stalled_ms: 2_000, ..config }).started()
}

fn submit(cluster: &mut Cluster, ranks: &[u32], what: &Request) {
    for rank in ranks {
        cluster.submit(*rank, what.clone());
    }
}

fn hung(cluster: &Cluster) -> Vec<Rank> {
    cluster.hung.iter().map(|(_, rank, _)| *rank).collect()
}

#[test]
fn the_only_missing_rank_that_waits_for_nothing_is_reported_once() {
    for silent in [3, 2, 0] {
        let mut cluster = cluster();
        for rank in (0..4).filter(|rank| *rank != silent) {
            cluster.submit(rank, sum("grad", &[4]));
            cluster.submit(rank, sum("loss", &[1]));
        }
        cluster.run();
        advance_with_workers(&mut cluster, 1_900, None);
        assert_eq!(cluster.hung, [], "rank {silent}");
        advance_with_workers(&mut cluster, 10_000, None);
        assert_eq!(hung(&cluster), [Rank(silent)]);
        let (reporter, _, text) = &cluster.hung[0];
        assert_eq!(*reporter, 0, "the coordinator reports");
        assert!(text.starts_with(&format!("rank {silent} has not asked for grad for 2.")), "{text}");
        assert!(text.contains("none of its calls is pending"), "{text}");
    }
}

#[test]
fn nobody_is_reported_without_the_policy() {
    let mut cluster = Cluster::new(&[0, 1, 1, 2]).started();
    submit(&mut cluster, &[0, 1, 2], &sum("grad", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 120_000, None);
    assert!(cluster.hung.is_empty() && !cluster.notices.is_empty(), "it is named");
}

#[test]
fn nobody_is_reported_when_several_are_missing() {
    let mut cluster = cluster();
    submit(&mut cluster, &[0, 1], &sum("grad", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 20_000, None);
    assert_eq!(cluster.hung, [], "one of them may wait for the other in a way that is not visible here");
    cluster.submit(2, sum("grad", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 3_000, None);
    assert_eq!(hung(&cluster), [Rank(3)], "the last one that is missing");
}

#[test]
fn a_rank_that_waits_in_another_collective_is_not_reported() {
    let mut cluster = cluster();
    submit(&mut cluster, &[0, 1, 2], &sum("grad", &[4]));
    cluster.submit(3, request("other", Collective::AllGather, &[1]));
    cluster.run();
    advance_with_workers(&mut cluster, 20_000, None);
    assert_eq!(cluster.hung, [], "their programs differ, and nobody hangs");
}

#[test]
fn a_rank_that_has_just_called_is_not_reported() {
    let mut cluster = cluster();
    submit(&mut cluster, &[0, 1, 2], &sum("grad", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    cluster.submit(3, sum("grad", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 20_000, None);
    assert_eq!(cluster.hung, []);
}

#[test]
fn joins_wait_by_design() {
    let mut cluster = cluster();
    submit(&mut cluster, &[0, 1, 2], &request("join", Collective::Join, &[0]));
    cluster.run();
    advance_with_workers(&mut cluster, 20_000, None);
    assert_eq!(cluster.hung, []);
}

#[test]
fn a_rank_is_reported_in_repeated_steps_without_negotiation() {
    let mut cluster = cluster();
    for _ in 0..12 {
        cluster.submit_all(&sum("grad", &[4]));
        cluster.run();
        advance_with_workers(&mut cluster, 100, None);
    }
    submit(&mut cluster, &[0, 1, 2], &sum("grad", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 4_000, None);
    assert_eq!(hung(&cluster), [Rank(3)]);
}
