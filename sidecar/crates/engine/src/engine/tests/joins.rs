//! Tests of joins: ranks without more tensors take part with zeros until all have joined.

use ronde_wire::{
    Cause, Codec, Collective, Control, DType, Detail, Group, Pair, Rank, ReduceOp, Request, RequestId, SetId,
};

use super::cluster::{Cluster, name, request, sum};
use crate::event::Event;

const FOUR_ON_THREE: [u32; 4] = [0, 0, 1, 2];

fn join() -> Request {
    Request { dtype: DType::U8, ..request("join", Collective::Join, &[0]) }
}

fn reduce(tensor: &str, op: ReduceOp) -> Request {
    request(tensor, Collective::AllReduce { op }, &[4])
}

/// The rank that joined last, as reported to a rank.
fn last_joined(cluster: &Cluster, rank: u32, request: RequestId) -> u32 {
    match cluster.outcome(rank, request) {
        Ok(done) => match &done.detail {
            Detail::LastJoined(last) => last.0,
            detail => panic!("{detail:?}"),
        },
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn joined_ranks_take_part_with_zeros_until_all_have_joined() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let mut joins = vec![(3, cluster.submit(3, join()))];
    cluster.run();
    let allowed = [
        reduce("t", ReduceOp::Sum),
        reduce("t", ReduceOp::Average),
        reduce("t", ReduceOp::Adasum),
        Request { codec: Codec::Bf16, ..reduce("t", ReduceOp::Average) },
        request("b", Collective::Barrier, &[0]),
    ];
    for (joined, rank) in [(vec![3], 1), (vec![1, 3], 0), (vec![0, 1, 3], 2)] {
        for what in &allowed {
            let active = (0..4).filter(|rank| !joined.contains(rank));
            let requests: Vec<_> = active.map(|rank| (rank, cluster.submit(rank, what.clone()))).collect();
            cluster.run();
            assert!(requests.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()), "{what:?}");
            let newest = |sidecar: usize| cluster.admitted[sidecar].last().expect("an operation");
            assert_eq!(newest(2).joined, [Rank(3)]);
            assert!(newest(2).tensors[0].requests.is_empty());
            let local: Vec<Rank> = joined.iter().filter(|rank| **rank < 2).map(|rank| Rank(*rank)).collect();
            assert_eq!(newest(0).joined, local);
            assert_eq!(newest(0).tensors[0].requests.len(), 2 - local.len());
            assert_eq!(newest(1).arithmetic.ranks, 4, "an average divides by all ranks");
        }
        joins.push((rank, cluster.submit(rank, join())));
        cluster.run();
    }
    for (rank, request) in joins {
        assert_eq!(last_joined(&cluster, rank, request), 2);
    }
    let all = cluster.submit_all(&reduce("t", ReduceOp::Max));
    cluster.run();
    assert!(cluster.all_completed(&all) && cluster.ended.is_empty());
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0);
}

#[test]
fn collectives_that_zeros_would_change_are_rejected_after_a_join() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    cluster.submit(1, join());
    cluster.run();
    let splits = vec![1; 4];
    let root = Rank(0);
    let odd = [
        (reduce("t", ReduceOp::Min), "Allreduce with reduction min is not supported with Join: rank 1 joined"),
        (reduce("t", ReduceOp::Max), "Allreduce with reduction max is not supported with Join"),
        (reduce("t", ReduceOp::Product), "Allreduce with reduction product is not supported with Join"),
        (reduce("t", ReduceOp::Median), "Allreduce with reduction median is not supported with Join"),
        (
            Request { dtype: DType::I32, ..reduce("t", ReduceOp::BitOr) },
            "Allreduce with reduction bit-or is not supported with Join",
        ),
        (reduce("t", ReduceOp::ClippedMean), "Allreduce with reduction clipped-mean is not supported with Join"),
        (request("t", Collective::AllGather, &[4]), "Allgather is not supported with Join"),
        (request("t", Collective::AllToAll { splits }, &[4]), "Alltoall is not supported with Join"),
        (request("t", Collective::Broadcast { root }, &[4]), "Broadcast is not supported with Join"),
        (request("t", Collective::ReduceScatter { op: ReduceOp::Sum }, &[4]), "Reducescatter is not supported with"),
        (request("t", Collective::Reduce { op: ReduceOp::Sum, root }, &[4]), "Reduce is not supported with Join"),
        (request("t", Collective::Gather { root }, &[4]), "Gather is not supported with Join"),
        (request("t", Collective::Scatter { root }, &[4]), "Scatter is not supported with Join"),
        (request("t", Collective::AddSet { ranks: vec![root] }, &[0]), "Add_process_set is not supported with Join"),
        (request("t", Collective::RemoveSet { set: SetId(1) }, &[0]), "Remove_process_set is not supported with Join"),
    ];
    for (what, words) in odd {
        let requests: Vec<_> = [0, 2, 3].map(|rank| (rank, cluster.submit(rank, what.clone()))).into();
        cluster.run();
        for (rank, request) in requests {
            let failure = cluster.failure(rank, request);
            assert!(failure.reason.contains(words) && failure.cause == Cause::Mismatch, "{failure} lacks {words}");
        }
        let again: Vec<_> = [0, 2, 3].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
        cluster.run();
        assert!(again.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()), "{words}");
    }
    for rank in [0, 2, 3] {
        cluster.submit(rank, join());
    }
    cluster.run();
    let all = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&all), "the joined rank was excused from every rejection");
}

#[test]
fn a_join_completes_what_waited_for_it() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let waiting: Vec<_> = [0, 1, 2].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
    let gathered: Vec<_> =
        [0, 1, 2].map(|rank| (rank, cluster.submit(rank, request("g", Collective::AllGather, &[4])))).into();
    let message = Pair { from: Rank(2), to: Rank(3) }.message_name(0, 0);
    let send = request(message.as_str(), Collective::Send { to: Rank(3), tag: 0 }, &[1]);
    let sent = cluster.submit(2, send);
    let between = Pair { from: Rank(0), to: Rank(2) }.message_name(0, 0);
    let send = request(between.as_str(), Collective::Send { to: Rank(2), tag: 0 }, &[1]);
    let unconcerned = cluster.submit(0, send);
    cluster.run();
    // Rank 3 takes part in operations that it submitted before its join.
    cluster.submit(3, reduce("early", ReduceOp::Max));
    cluster.submit(3, join());
    cluster.run();
    assert!(waiting.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    for (rank, request) in gathered {
        assert!(cluster.failure(rank, request).reason.contains("Allgather is not supported with Join"));
    }
    assert!(cluster.failure(2, sent).reason.contains("Send is not supported with Join: rank 3 joined"));
    assert!(cluster.is_pending(unconcerned));
    let early: Vec<_> = [0, 1, 2].map(|rank| (rank, cluster.submit(rank, reduce("early", ReduceOp::Max)))).into();
    cluster.run();
    assert!(early.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
}

#[test]
fn a_joined_rank_submits_nothing_more_to_the_world_set() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[1, 2]]).started();
    let joined = cluster.submit(1, join());
    cluster.run();
    for what in [sum("t", &[1]), join(), request("other", Collective::Join, &[0])] {
        let refused = cluster.submit(1, what);
        cluster.run();
        assert!(cluster.failure(1, refused).reason.contains("rank 1 has joined; wait for the join first"));
    }
    cluster.event(
        0,
        Event::Refused {
            rank: Rank(1),
            set: SetId::WORLD,
            name: name("t"),
            group: None,
            members: Vec::new(),
            reason: "odd".to_owned(),
        },
    );
    let in_set = Request { set: SetId(1), ..reduce("t", ReduceOp::Max) };
    let pair = [(1, cluster.submit(1, in_set.clone())), (2, cluster.submit(2, in_set))];
    cluster.run();
    assert!(pair.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()), "other sets go on");
    assert!(cluster.is_pending(joined));
    for rank in [0, 2, 3] {
        cluster.submit(rank, join());
    }
    cluster.run();
    assert_eq!(last_joined(&cluster, 1, joined), 3);
}

#[test]
fn poisoned_names_are_reset_when_all_ranks_have_joined() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    // Rank 0 fails alone, the others never submit; rank 3 is excused from the second failure.
    let odd = request("t", Collective::Broadcast { root: Rank(9) }, &[4]);
    cluster.submit(0, odd.clone());
    cluster.run();
    cluster.submit(3, join());
    cluster.run();
    cluster.submit(0, odd);
    cluster.run();
    for rank in [0, 1, 2] {
        cluster.submit(rank, join());
    }
    cluster.run();
    let all = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&all));
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0);
}

#[test]
fn a_failed_join_does_not_count() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    cluster.executes = false;
    // Two buckets are in flight, so what is ready without rank 3 stays in the queue.
    for tensor in ["a", "b"] {
        cluster.submit_all(&request(tensor, Collective::Barrier, &[0]));
    }
    cluster.run();
    let joined = cluster.submit(3, join());
    let stranded: Vec<_> = [0, 1, 2].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
    cluster.run();
    let reason = "no".to_owned();
    cluster.event(
        0,
        Event::Refused {
            rank: Rank(0),
            set: SetId::WORLD,
            name: name("join"),
            group: None,
            members: Vec::new(),
            reason,
        },
    );
    cluster.run();
    assert!(cluster.failure(3, joined).reason.contains("was refused"));
    for (rank, request) in stranded {
        let failure = cluster.failure(rank, request);
        assert!(failure.reason.contains("to be performed without rank 3, whose join has failed"), "{failure}");
    }
    cluster.execute_all();
    cluster.executes = true;
    // The rejection of the name was sent to the others, so they have to use it once more.
    let failed: Vec<_> = [1, 2].map(|rank| (rank, cluster.submit(rank, join()))).into();
    cluster.run();
    for (rank, request) in failed {
        assert!(cluster.failure(rank, request).reason.contains("was refused"));
    }
    let all = cluster.submit_all(&sum("t", &[4]));
    let joins = cluster.submit_all(&join());
    cluster.run();
    assert!(cluster.all_completed(&all) && cluster.all_completed(&joins) && cluster.ended.is_empty());
}

/// The others have performed operations without the rank, so its operation numbers would differ.
#[test]
fn a_join_cannot_be_taken_back() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    cluster.executes = false;
    // Two buckets are in flight, so what is ready without rank 3 stays in the queue.
    for tensor in ["a", "b"] {
        cluster.submit_all(&request(tensor, Collective::Barrier, &[0]));
    }
    cluster.run();
    let joined = cluster.submit(3, join());
    let without: Vec<_> = [0, 1, 2].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
    cluster.run();
    cluster.withdraw(3, joined);
    cluster.run();
    assert!(cluster.is_pending(joined) && without.iter().all(|(_, request)| cluster.is_pending(*request)));
    cluster.executes = true;
    cluster.execute_all();
    assert!(without.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    let refused = cluster.submit(3, sum("t", &[4]));
    cluster.run();
    assert!(cluster.failure(3, refused).reason.contains("rank 3 has joined; wait for the join first"));
    let others = [0, 1, 2].map(|rank| (rank, cluster.submit(rank, join())));
    cluster.run();
    for (rank, request) in others.into_iter().chain([(3, joined)]) {
        assert_eq!(last_joined(&cluster, rank, request), 2);
    }
    let all = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&all) && cluster.ended.is_empty());
}

#[test]
fn joins_with_different_names_fail_instead_of_waiting() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let one = cluster.submit(0, join());
    let other = cluster.submit(1, request("another", Collective::Join, &[0]));
    cluster.run();
    let failure = cluster.failure(0, one).clone();
    assert!(failure.reason.contains("Mismatched operations: rank 1 joined by another name"), "{failure}");
    assert!(cluster.is_pending(other));
    let one = cluster.submit(0, request("another", Collective::Join, &[0]));
    cluster.run();
    assert_eq!((last_joined(&cluster, 0, one), last_joined(&cluster, 1, other)), (0, 0));
}

#[test]
fn a_join_and_another_operation_with_one_name_mismatch() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let requests: Vec<_> =
        (0..4).map(|rank| cluster.submit(rank, if rank == 2 { sum("join", &[1]) } else { join() })).collect();
    cluster.run();
    let failure = cluster.common_failure(&requests);
    assert!(failure.reason.contains("Mismatched operations: One rank did an JOIN"), "{failure}");
    let all = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&all), "nobody has joined");
}

#[test]
fn tensors_with_and_without_joined_ranks_do_not_share_a_bucket() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.submit(1, sum("a", &[4]));
    cluster.submit(1, join());
    cluster.run();
    cluster.submit(0, sum("a", &[4]));
    cluster.submit(0, sum("b", &[4]));
    cluster.submit(0, sum("c", &[4]));
    cluster.run();
    assert_eq!(cluster.buckets(1), [vec!["a"], vec!["b", "c"]]);
    assert_eq!((cluster.admitted[1][0].joined.len(), cluster.admitted[1][1].joined.len()), (0, 1));
}

#[test]
fn an_incomplete_group_does_not_hold_up_a_join() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let group = Some(Group { name: name("g"), size: 2 });
    cluster.submit(1, join());
    let held = cluster.submit(0, Request { group, ..sum("a", &[4]) });
    cluster.run();
    assert!(cluster.is_pending(held));
    let joined = cluster.submit(0, join());
    cluster.run();
    let words = "group g of process set 0 has 1 of its 2 tensors (a), and all ranks have joined";
    assert!(cluster.failure(0, held).reason.contains(words), "{}", cluster.failure(0, held));
    assert_eq!(last_joined(&cluster, 0, joined), 0);
}

#[test]
fn a_join_ends_after_all_tensors_that_were_ready() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    for tensor in ["a", "b"] {
        cluster.submit_all(&request(tensor, Collective::Barrier, &[0]));
    }
    cluster.run();
    let first = cluster.submit(1, join());
    cluster.run();
    let reduced = cluster.submit(0, sum("t", &[4]));
    let second = cluster.submit(0, join());
    cluster.run();
    assert!(cluster.is_pending(first) && cluster.is_pending(second) && cluster.is_pending(reduced));
    cluster.execute_all();
    cluster.execute_all();
    assert!(cluster.outcome(0, reduced).is_ok() && cluster.ended.is_empty());
    assert_eq!((last_joined(&cluster, 0, second), last_joined(&cluster, 1, first)), (0, 0));
}

#[test]
fn an_unrequested_end_of_a_join_is_a_fault_of_the_coordinator() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let pending = cluster.submit(1, sum("t", &[1]));
    cluster.control(1, 0, (1, 0), Control::AllJoined { set: SetId::WORLD, name: name("join"), last: Rank(0) });
    cluster.run();
    let failure = cluster.failure(1, pending);
    assert!(failure.reason.contains("which rank 1 has not asked for") && failure.cause == Cause::Bug, "{failure}");
}
