//! Tests of the negotiation by name: any order, mismatches, refusals, withdrawals.

use ronde_wire::{Cause, Collective, DType, Rank, ReduceOp, Request, SetId};

use super::cluster::{Cluster, name, request, sum};
use crate::event::Event;

const FOUR_ON_TWO: [u32; 4] = [0, 0, 1, 1];

#[test]
fn names_may_come_in_any_order_on_each_rank() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let names = ["a", "b", "c", "d"];
    let mut requests = Vec::new();
    for rank in 0..4_u32 {
        for n in 0..4 {
            let tensor = names[(n + rank as usize) % 4];
            requests.push((rank, cluster.submit(rank, sum(tensor, &[8]))));
            cluster.run();
        }
    }
    assert!(requests.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    let (seqs, names) = (cluster.admitted[0].iter().map(|a| a.seq), cluster.buckets(0));
    assert!(seqs.eq(cluster.admitted[1].iter().map(|a| a.seq)) && names == cluster.buckets(1));
}

#[test]
fn a_mismatch_fails_with_one_text_on_all_ranks_and_the_job_goes_on() {
    let variants: [(&str, Request); 4] = [
        ("Mismatched data types", Request { dtype: DType::I32, ..sum("t", &[4]) }),
        ("Mismatched operations", request("t", Collective::AllGather, &[4])),
        ("Mismatched ALLREDUCE tensor shapes", sum("t", &[5])),
        ("Mismatched reduction operation", request("t", Collective::AllReduce { op: ReduceOp::Max }, &[4])),
    ];
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    for (words, odd) in variants {
        let requests: Vec<_> =
            (0..4).map(|rank| cluster.submit(rank, if rank == 2 { odd.clone() } else { sum("t", &[4]) })).collect();
        cluster.run();
        let failure = cluster.common_failure(&requests);
        assert!(failure.reason.contains(words) && failure.reason.contains("rank 2: "), "{}", failure.reason);
        assert_eq!((failure.cause, failure.rank), (Cause::Mismatch, Some(Rank(2))));
        let again = cluster.submit_all(&sum("t", &[4]));
        cluster.run();
        assert!(cluster.all_completed(&again), "the next operation by that name works");
    }
    assert_eq!(cluster.engines[0].stats().mismatches, 4);
    assert!(cluster.ended.is_empty());
}

#[test]
fn refusals_of_requests_unknown_to_other_ranks_stay_local() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_TWO, &[&[1, 2]]).started();
    let unknown = cluster.submit(0, Request { set: SetId(9), ..sum("t", &[1]) });
    let foreign = cluster.submit(3, Request { set: SetId(1), ..sum("t", &[1]) });
    let valid = cluster.submit(2, sum("twice", &[1]));
    let duplicate = cluster.submit(2, sum("twice", &[1]));
    cluster.run();
    let words = |rank, request| cluster.failure(rank, request).reason.clone();
    assert!(words(0, unknown).contains("Process set provided does not exist, or has not been registered."));
    assert!(words(3, foreign).contains("Rank 3 is not a member of the provided process set."));
    let same_name = "Requested to allreduce, allgather, or broadcast a tensor with the same name";
    assert!(words(2, duplicate).contains(same_name));
    assert!(cluster.is_pending(valid), "the first request by a name stays valid");
    for rank in [0, 1, 3] {
        cluster.submit(rank, sum("twice", &[1]));
    }
    cluster.run();
    assert!(cluster.outcome(2, valid).is_ok());
}

#[test]
fn a_refusal_by_the_service_fails_the_request_on_all_ranks() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let early = cluster.submit(0, sum("t", &[4]));
    let reason = "the slot is outside of the segment".to_owned();
    cluster.event(
        1,
        Event::Refused { rank: Rank(3), set: SetId::WORLD, name: name("t"), group: None, members: Vec::new(), reason },
    );
    cluster.run();
    assert!(cluster.failure(0, early).reason.contains("rank 3 for tensor t of process set 0 was refused: the slot"));
    // A refusal while a request with the same name is pending belongs to a second one.
    let pending = cluster.submit(3, sum("u", &[4]));
    let again = "a tensor with the same name".to_owned();
    cluster.event(
        1,
        Event::Refused {
            rank: Rank(3),
            set: SetId::WORLD,
            name: name("u"),
            group: None,
            members: Vec::new(),
            reason: again,
        },
    );
    for rank in 0..3 {
        cluster.submit(rank, sum("u", &[4]));
    }
    cluster.run();
    assert!(cluster.outcome(3, pending).is_ok());
}

#[test]
fn a_rank_may_run_ahead_through_failed_rounds_of_a_name() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let bad = request("t", Collective::AllReduce { op: ReduceOp::Adasum }, &[4]);
    let bad = Request { dtype: DType::I32, ..bad };
    // Rank 0 fails three times before any other rank submits, then submits a valid request.
    let refused: Vec<_> = (0..3).map(|_| cluster.submit(0, bad.clone())).collect();
    let valid = cluster.submit(0, sum("t", &[4]));
    cluster.run();
    for request in refused {
        assert!(cluster.failure(0, request).reason.contains("reduction adasum takes floating-point types, not int32"));
    }
    // The others fail three times as well, at once, then match rank 0 in the fourth round.
    for round in 0..4 {
        let requests: Vec<_> = (1..4).map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).collect();
        cluster.run();
        for (rank, request) in requests {
            assert_eq!(cluster.outcome(rank, request).is_ok(), round == 3, "round {round}");
        }
    }
    assert!(cluster.outcome(0, valid).is_ok());
}

#[test]
fn a_withdrawn_request_fails_on_all_ranks() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let early: Vec<_> = [0, 3].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
    cluster.run();
    let (_, mine) = early[1];
    cluster.withdraw(3, mine);
    cluster.withdraw(3, mine);
    cluster.run();
    let late: Vec<_> = [1, 2].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
    cluster.run();
    for (rank, request) in early.into_iter().chain(late) {
        let failure = cluster.failure(rank, request);
        assert!(
            failure.reason.contains("rank 3 for tensor t of process set 0 was withdrawn: the deadline"),
            "{failure}"
        );
    }
    let again = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&again));
}

#[test]
fn a_withdrawal_after_the_order_changes_nothing() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let requests = cluster.submit_all(&sum("t", &[4]));
    // Everything is announced and ordered, but the order has not reached sidecar 1 when rank 3 gives up.
    cluster.drain_all();
    cluster.deliver((1, 0));
    cluster.drain_all();
    cluster.withdraw(3, requests[3]);
    cluster.run();
    assert!(cluster.all_completed(&requests));
    let again = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&again), "the late withdrawal does not poison the next round");
}

#[test]
fn gathers_report_the_common_shape() {
    let mut cluster = Cluster::new(&[1, 0, 1]).started();
    let requests: Vec<_> =
        (0..3).map(|rank| cluster.submit(rank, request("g", Collective::AllGather, &[u64::from(rank), 5]))).collect();
    let scalars = cluster.submit_all(&request("s", Collective::AllGather, &[]));
    let barrier = cluster.submit_all(&request("b", Collective::Barrier, &[]));
    cluster.run();
    for (rank, request) in (0..).zip(&requests) {
        let shape = cluster.outcome(rank, *request).as_ref().expect("a result").shape.to_string();
        assert_eq!(shape, "[3, 5]");
    }
    assert!(cluster.common_failure(&scalars).reason.contains("tried to ALLGATHER a rank-zero tensor"));
    assert!(cluster.all_completed(&barrier));
}
