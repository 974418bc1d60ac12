//! Tests of eager operations, whose contributions travel in the messages of the negotiation.

use bytes::Bytes;
use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{Algorithm, Cause, Collective, Control, Rank, ReduceOp, Request, limits};

use super::cluster::{Cluster, request, sum};
use crate::engine::EngineConfig;

fn cluster(placement: &[u32], eager_bytes: u32) -> Cluster {
    let world = Cluster::new(placement).world;
    Cluster::of(world, |config| EngineConfig { eager_bytes, ..config }).started()
}

#[test]
fn the_order_carries_what_all_ranks_contribute() {
    let mut cluster = cluster(&[1, 0, 1, 2], 4_096);
    let requests = cluster.submit_all(&sum("t", &[2]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    for sidecar in 0..3 {
        let admission = &cluster.admitted[sidecar][0];
        let came: Vec<Bytes> = (0..4).map(|rank| vec![rank; 8].into()).collect();
        assert_eq!(admission.contributions, [came]);
        assert_eq!(admission.local_ranks, [0, 1, 2, 3].map(Rank), "as if all of them were here");
        assert!(
            admission
                .plan
                .sub_schedules
                .iter()
                .flat_map(|sub_schedule| &sub_schedule.rounds)
                .all(|round| round.transfers.is_empty())
        );
        let answered: Vec<Rank> = admission.tensors[0].requests.iter().map(|of| of.rank).collect();
        assert_eq!(answered, cluster.world.ranks_of(super::cluster::index(sidecar)));
    }
}

#[test]
fn contributions_above_the_coordinators_threshold_are_not_eager() {
    for (threshold, elements, is_eager) in [(8, 2, true), (8, 3, false), (0, 1, false), (4_096, 1_025, false)] {
        let mut cluster = cluster(&[0, 1], threshold);
        let requests = cluster.submit_all(&sum("t", &[elements]));
        cluster.run();
        assert!(cluster.all_completed(&requests));
        assert_eq!(cluster.admitted[1][0].is_eager(), is_eager, "{threshold} bytes, {elements} elements");
    }
}

#[test]
fn one_large_contribution_makes_the_operation_not_eager() {
    let mut cluster = cluster(&[0, 1, 2], 64);
    let gather = |rows| request("t", Collective::AllGather, &[rows, 2]);
    for (rows, is_eager) in [([1, 2, 3], true), ([1, 9, 3], false), ([0, 0, 8], true)] {
        let requests: Vec<_> = (0..).zip(rows).map(|(rank, rows)| cluster.submit(rank, gather(rows))).collect();
        cluster.run();
        assert!(cluster.all_completed(&requests));
        let admission = cluster.admitted[2].last().expect("one");
        assert_eq!(admission.is_eager(), is_eager, "{rows:?}");
        let bytes: Vec<usize> = admission.contributions.iter().flatten().map(Bytes::len).collect();
        assert!(!is_eager || bytes == rows.map(|rows| usize::try_from(rows * 8).expect("small")), "{bytes:?}");
    }
}

#[test]
fn the_eager_limit_of_a_rank_is_its_share_of_the_order() {
    let placement: Vec<u32> = (0..32).map(|rank| rank % 2).collect();
    let share = limits::EAGER_ORDER_BYTES_MAX as u64 / 32 / 4;
    let mut cluster = cluster(&placement, 4_096);
    for (elements, is_eager) in [(share, true), (share + 1, false)] {
        cluster.submit_all(&sum("t", &[elements]));
        cluster.run();
        assert_eq!(cluster.admitted[0].last().expect("one").is_eager(), is_eager);
    }
}

#[test]
fn only_the_root_of_a_broadcast_contributes_and_nobody_to_a_barrier() {
    let mut cluster = cluster(&[0, 1, 1], 4_096);
    cluster.submit_all(&request("b", Collective::Broadcast { root: Rank(1) }, &[3]));
    cluster.submit_all(&request("c", Collective::Barrier, &[]));
    cluster.run();
    let came = |at: usize| cluster.admitted[0][at].contributions[0].iter().map(Bytes::len).collect::<Vec<_>>();
    assert_eq!((came(0), came(1)), (vec![0, 12, 0], vec![0, 0, 0]));
    assert_eq!(cluster.completed.len(), 6);
}

#[test]
fn preludes_codecs_and_messages_are_not_eager() {
    let mut cluster = cluster(&[0, 1], 4_096);
    cluster.submit_all(&request("a", Collective::AllReduce { op: ReduceOp::Adasum }, &[2]));
    cluster.submit_all(&Request { codec: ronde_wire::Codec::F16, ..sum("b", &[2]) });
    cluster.run();
    assert_eq!(cluster.admitted[0].iter().filter(|admission| admission.is_eager()).count(), 0);
    assert_eq!(cluster.completed.len(), 4);
}

#[test]
fn eager_operations_overtake_large_ones_and_share_an_order() {
    let mut cluster = cluster(&[0, 1], 4_096);
    cluster.executes = false;
    for large in ["k", "l", "m"] {
        cluster.submit_all(&sum(large, &[5_000]));
        cluster.run();
    }
    for small in ["a", "b", "c"] {
        for rank in 0..2 {
            cluster.submit(rank, sum(small, &[1_000]));
        }
    }
    cluster.run();
    assert_eq!(cluster.buckets(1), [vec!["k"], vec!["l"], vec!["a", "b", "c"]], "two large ones are in flight");
    cluster.execute_all();
    assert_eq!(cluster.buckets(1).len(), 4);
}

#[test]
fn an_order_carries_a_bounded_number_of_contribution_bytes() {
    let mut cluster = cluster(&[0, 1], 4_096);
    for rank in 0..2 {
        for n in 0..20 {
            cluster.submit(rank, sum(&format!("t{n:02}"), &[1_024]));
        }
    }
    cluster.run();
    let carried = |admission: &std::sync::Arc<crate::event::Admission>| {
        admission.contributions.iter().flatten().map(Bytes::len).sum::<usize>()
    };
    let carried: Vec<usize> = cluster.admitted[1].iter().map(carried).collect();
    assert!(carried.iter().all(|bytes| *bytes <= limits::EAGER_ORDER_BYTES_MAX), "{carried:?}");
    assert_eq!(carried.iter().sum::<usize>(), 20 * 2 * 4_096);
}

#[test]
fn a_rank_that_has_joined_contributes_nothing() {
    let mut cluster = cluster(&[0, 1, 1], 4_096);
    cluster.submit(2, request("join", Collective::Join, &[]));
    let requests = [cluster.submit(0, sum("t", &[1])), cluster.submit(1, sum("t", &[1]))];
    cluster.run();
    assert!(cluster.all_completed(&requests));
    let admission = &cluster.admitted[0][0];
    assert_eq!(admission.contributions[0].iter().map(Bytes::len).collect::<Vec<_>>(), [4, 4, 0]);
    assert_eq!(admission.joined, [Rank(2)], "although it is elsewhere");
}

#[test]
fn contributions_of_the_wrong_length_are_protocol_violations() {
    for (came, elements) in [(4_usize, 2), (12, 2), (0, 2), (1, 2_000)] {
        let mut cluster = cluster(&[0, 1], 4_096);
        let intent = Intent::Ready(sum("t", &[elements]));
        let announcement = Announcement { rank: Rank(1), intent, contribution: vec![0; came].into() };
        cluster.control(0, 1, (1, 0), Control::Announce { announcements: vec![announcement] });
        cluster.run();
        let (_, peer, reason) = cluster.disconnects.first().expect("one");
        assert_eq!(peer.0, 1);
        assert!(reason.contains(&format!("sends {came} bytes along with tensor t")), "{reason}");
    }
}

#[test]
fn an_eager_order_without_its_contributions_ends_the_epoch() {
    let spoil: [fn(&mut Vec<Vec<Bytes>>); 4] = [
        |came| came.clear(),
        |came| came[0].truncate(1),
        |came| came[0][1] = Bytes::from_static(b"123"),
        |came| came.push(Vec::new()),
    ];
    for spoil in spoil {
        let mut cluster = cluster(&[0, 1], 4_096);
        let requests = cluster.submit_all(&sum("t", &[1]));
        cluster.drain_all();
        cluster.deliver((1, 0));
        cluster.drain_all();
        cluster.tamper((0, 1), |_, message| {
            if let Control::Order(order) = message {
                assert_eq!(order.tuning.algorithm, Algorithm::Eager);
                spoil(&mut order.contributions);
            }
        });
        cluster.run();
        let failure = cluster.failure(1, requests[1]);
        assert_eq!(failure.cause, Cause::Bug);
        assert!(failure.reason.contains("contributions"), "{}", failure.reason);
    }
}
