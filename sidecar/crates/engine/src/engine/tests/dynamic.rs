//! Tests of added and removed process sets, groups, and the request cache.

use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    Cause, Collective, Control, DType, Detail, Group, Pair, ProcessSet, Rank, ReduceOp, Request, RequestId, SetId,
    limits,
};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;
use crate::event::Event;

const FOUR_ON_THREE: [u32; 4] = [0, 0, 1, 2];

fn add(ranks: &[u32]) -> Request {
    let ranks = ranks.iter().copied().map(Rank).collect();
    Request { dtype: DType::U8, ..request("add", Collective::AddSet { ranks }, &[0]) }
}

fn remove(set: u32) -> Request {
    Request { dtype: DType::U8, ..request("remove", Collective::RemoveSet { set: SetId(set) }, &[0]) }
}

/// The detail that all ranks get.
fn detail(cluster: &Cluster, requests: &[RequestId]) -> Detail {
    let detail = |(rank, request): (u32, &RequestId)| {
        let done = cluster.outcome(rank, *request).as_ref().expect("a result");
        assert_eq!((done.shape.to_string(), done.own), ("[0]".to_owned(), false));
        done.detail.clone()
    };
    let details: Vec<Detail> = (0..).zip(requests).map(detail).collect();
    assert!(details.iter().all(|detail| *detail == details[0]), "{details:?}");
    details[0].clone()
}

fn asked(cluster: &mut Cluster, what: &Request) -> Detail {
    let requests = cluster.submit_all(what);
    cluster.run();
    detail(cluster, &requests)
}

fn set(id: u32) -> Detail {
    Detail::Set(SetId(id))
}

/// The steps of a set repeat while a rank waits for another operation, so that no schedule is issued before the set is
/// removed.
#[test]
fn steps_of_a_removed_set_are_not_scheduled() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[1, 2]]).started();
    let waits = cluster.submit(0, sum("alone", &[4]));
    for _ in 0..8 {
        works(&mut cluster, 1, &[1, 2]);
    }
    assert_eq!(asked(&mut cluster, &remove(1)), set(1));
    cluster.withdraw(0, waits);
    for rank in 1..4 {
        cluster.submit(rank, sum("alone", &[4]));
    }
    cluster.run();
    let requests = cluster.submit_all(&sum("everybody", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests) && cluster.ended.is_empty(), "{:?}", cluster.ended);
}

/// The ranks of a set reduce within it.
fn works(cluster: &mut Cluster, set: u32, ranks: &[u32]) {
    let what = Request { set: SetId(set), ..sum("within", &[4]) };
    let requests: Vec<_> = ranks.iter().map(|rank| (*rank, cluster.submit(*rank, what.clone()))).collect();
    cluster.run();
    assert!(requests.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
}

#[test]
fn sets_are_added_and_removed_and_their_ids_used_again_in_order() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[1, 2]]).started();
    assert_eq!(asked(&mut cluster, &add(&[3, 0])), set(2));
    works(&mut cluster, 2, &[0, 3]);
    assert_eq!(asked(&mut cluster, &add(&[2])), set(3));
    works(&mut cluster, 3, &[2]);
    assert_eq!(asked(&mut cluster, &remove(3)), set(3));
    assert_eq!(asked(&mut cluster, &remove(1)), set(1));
    let gone = cluster.submit(1, Request { set: SetId(1), ..sum("t", &[1]) });
    cluster.run();
    assert!(cluster.failure(1, gone).reason.contains("Process set provided does not exist"));
    for none in [0, 1, 3, 99] {
        assert_eq!(asked(&mut cluster, &remove(none)), Detail::None);
    }
    assert_eq!(asked(&mut cluster, &add(&[1, 2, 3])), set(3));
    assert_eq!(asked(&mut cluster, &add(&[1, 2])), set(1));
    assert_eq!(asked(&mut cluster, &add(&[1, 3])), set(4));
    works(&mut cluster, 3, &[1, 2, 3]);
    works(&mut cluster, 1, &[1, 2]);
    works(&mut cluster, 4, &[1, 3]);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn invalid_process_sets_are_refused_on_all_ranks() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[1, 2]]).started();
    let odd = [
        (add(&[2, 1]), "duplicate process set: process set 1 is of ranks 1-2 already"),
        (add(&[0, 1, 2, 3]), "duplicate process set: process set 0 is of ranks 0-3 already"),
        (add(&[1, 3, 1]), "a process set names rank 1 twice"),
        (add(&[1, 4]), "a process set cannot have rank 4: there are 4 ranks"),
        (add(&[]), "a process set has at least one rank"),
        (Request { group: Some(Group { name: name("g"), size: 1 }), ..add(&[1]) }, "cannot be in a group"),
    ];
    for (what, words) in odd {
        let requests = cluster.submit_all(&what);
        cluster.run();
        for (rank, request) in (0..).zip(requests) {
            let failure = cluster.failure(rank, request);
            assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{failure} lacks {words}");
        }
    }
    let different = |rank: u32| if rank == 2 { add(&[1]) } else { add(&[0, 1]) };
    let requests: Vec<_> = (0..4).map(|rank| cluster.submit(rank, different(rank))).collect();
    cluster.run();
    let words = "Mismatched process sets: One rank asked for ranks 0-1, but another rank for rank 1.";
    assert!(cluster.common_failure(&requests).reason.contains(words));
    let different = |rank: u32| remove(if rank == 3 { 1 } else { 2 });
    let requests: Vec<_> = (0..4).map(|rank| cluster.submit(rank, different(rank))).collect();
    cluster.run();
    let words = "Mismatched process sets: One rank asked for process set 2, but another rank for process set 1.";
    assert!(cluster.common_failure(&requests).reason.contains(words));
    let elsewhere = Request { set: SetId(1), ..add(&[1]) };
    let refused = cluster.submit(1, elsewhere);
    cluster.run();
    assert!(cluster.failure(1, refused).reason.contains("ADD_PROCESS_SET is for the set of all ranks"));
    assert_eq!(asked(&mut cluster, &add(&[0, 1])), set(2), "a list in another order is the same");
    assert!(cluster.ended.is_empty());
}

#[test]
fn the_number_of_process_sets_is_bounded() {
    // All proper subsets of 11 ranks in order of their bits.
    let subset = |bits: u32| (0..11).filter(|rank| bits >> rank & 1 == 1).collect::<Vec<u32>>();
    let most = u32::try_from(limits::SETS_MAX).expect("a small number");
    let sets: Vec<Vec<u32>> = (1..most).map(subset).collect();
    let sets: Vec<&[u32]> = sets.iter().map(Vec::as_slice).collect();
    let mut cluster = Cluster::with_sets(&[0; 11], &sets).started();
    let requests = cluster.submit_all(&add(&subset(most)));
    cluster.run();
    assert!(
        cluster.common_failure(&requests).reason.contains("there are 1024 process sets, the most that a job may have")
    );
    assert_eq!(asked(&mut cluster, &remove(7)), set(7));
    assert_eq!(asked(&mut cluster, &add(&subset(most))), set(7));
}

#[test]
fn pending_requests_of_a_removed_set_fail_and_ordered_ones_complete() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[0, 2, 3]]).started();
    cluster.executes = false;
    let in_set = |what: Request| Request { set: SetId(1), ..what };
    let under_way: Vec<_> = [0, 2, 3].map(|rank| (rank, cluster.submit(rank, in_set(sum("a", &[4]))))).into();
    cluster.run();
    let mut pending: Vec<_> = [0, 2].map(|rank| (rank, cluster.submit(rank, in_set(sum("b", &[4]))))).into();
    let message = Pair { from: Rank(2), to: Rank(3) }.message_name(0, 0);
    let send = request(message.as_str(), Collective::Send { to: Rank(3), tag: 0 }, &[1]);
    pending.push((2, cluster.submit(2, in_set(send))));
    let group = Some(Group { name: name("g"), size: 2 });
    let grouped = in_set(Request { group, ..sum("c", &[4]) });
    pending.extend([0, 2, 3].map(|rank| (rank, cluster.submit(rank, grouped.clone()))));
    cluster.run();
    assert_eq!(asked(&mut cluster, &remove(1)), set(1));
    for (rank, request) in pending {
        let failure = cluster.failure(rank, request);
        assert!(failure.reason.contains("process set 1 was removed") && failure.cause == Cause::Refused, "{failure}");
    }
    cluster.execute_all();
    assert!(under_way.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    cluster.executes = true;
    let sizes = |cluster: &mut Cluster| [0, 1, 2].map(|set| cluster.engines[0].set_size(SetId(set)));
    assert_eq!(sizes(&mut cluster), [Some(4), None, None]);
    assert_eq!(asked(&mut cluster, &add(&[0, 2])), set(1));
    assert_eq!(sizes(&mut cluster), [Some(4), Some(2), None]);
    works(&mut cluster, 1, &[0, 2]);
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0);
}

#[test]
fn a_set_id_is_reused_only_after_the_last_operation_of_its_set_is_done_everywhere() {
    let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[1, 2]]).started();
    cluster.executes = false;
    let in_set = |ranks: &[u32], cluster: &mut Cluster| {
        let what = Request { set: SetId(1), ..sum("t", &[4]) };
        ranks.iter().map(|rank| (*rank, cluster.submit(*rank, what.clone()))).collect::<Vec<_>>()
    };
    let old = in_set(&[1, 2], &mut cluster);
    cluster.run();
    assert_eq!(asked(&mut cluster, &remove(1)), set(1));
    assert_eq!(asked(&mut cluster, &add(&[0, 1])), set(2));
    assert_eq!(asked(&mut cluster, &remove(2)), set(2));
    // The first member is done, the other one is not.
    cluster.execute(0);
    cluster.run();
    assert_eq!(asked(&mut cluster, &add(&[0, 1])), set(2));
    cluster.execute_all();
    assert!(old.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    assert_eq!(asked(&mut cluster, &add(&[0, 2])), set(1));
    let new = in_set(&[0, 2], &mut cluster);
    cluster.run();
    cluster.execute_all();
    assert!(new.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
}

#[test]
fn a_late_message_about_a_removed_set_does_not_affect_the_next_set_with_its_id() {
    let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[1, 2]]).started();
    let in_set = Request { set: SetId(1), ..sum("t", &[4]) };
    // All ranks request both at once; sidecar 1 receives the removal of the old set late.
    let removes = cluster.submit_all(&remove(1));
    let adds = cluster.submit_all(&add(&[0, 1]));
    cluster.drain_all();
    cluster.deliver((1, 0));
    cluster.deliver((2, 0));
    cluster.drain_all();
    let stale = cluster.submit(1, in_set);
    cluster.run();
    assert!(cluster.failure(1, stale).reason.contains("process set 1 was removed"));
    assert_eq!(detail(&cluster, &removes), set(1));
    assert_eq!(detail(&cluster, &adds), set(2), "the id is not free before all have heard that");
    works(&mut cluster, 2, &[0, 1]);
    assert_eq!(asked(&mut cluster, &add(&[0, 2])), set(1));
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn process_sets_added_in_an_epoch_end_with_it() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[1, 2]]).started();
    assert_eq!(asked(&mut cluster, &add(&[0, 3])), set(2));
    assert_eq!(asked(&mut cluster, &remove(1)), set(1));
    for rank in 0..4 {
        cluster.close_session(rank);
    }
    cluster.run();
    cluster.attach_all();
    cluster.run();
    works(&mut cluster, 1, &[1, 2]);
    let gone = cluster.submit(3, Request { set: SetId(2), ..sum("t", &[1]) });
    cluster.run();
    assert!(cluster.failure(3, gone).reason.contains("Process set provided does not exist"));
}

#[test]
fn process_sets_change_only_on_valid_coordinator_messages() {
    let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
    let added = |id, list: &[u32]| Control::SetAdded {
        name: name("add"),
        set: ProcessSet { id: SetId(id), ranks: ranks(list) },
    };
    let removed = Control::SetRemoved { name: name("remove"), set: SetId(1) };
    for message in [added(5, &[0]), removed.clone()] {
        let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[1, 2]]).started();
        cluster.control(1, 2, (1, 0), message);
        cluster.run();
        assert!(cluster.disconnects[0].2.contains("over a link that the job does not have"));
    }
    let odd = [
        (added(0, &[0]), "process set 0 cannot be added"),
        (added(1, &[0]), "process set 1 cannot be added"),
        (added(5, &[]), "which rank 1 has not asked for"),
        (added(5, &[1, 0]), "which rank 1 has not asked for"),
        (added(5, &[0, 77]), "which rank 1 has not asked for"),
        (removed, "which rank 1 has not asked for"),
    ];
    for (message, words) in odd {
        let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[1, 2]]).started();
        let pending = cluster.submit(1, sum("t", &[1]));
        cluster.submit(1, add(&[0]));
        cluster.control(1, 0, (1, 0), message);
        cluster.run();
        let failure = cluster.failure(1, pending);
        assert!(failure.reason.contains(words), "{failure} lacks {words}");
    }
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.control(0, 1, (1, 0), Control::SetForgotten { set: SetId(1) });
    cluster.run();
    assert!(cluster.disconnects[0].2.contains("it reports process set 1 as forgotten, which was not removed"));
}

fn grouped(tensor: &str, group: &str, size: u32) -> Request {
    Request { group: Some(Group { name: name(group), size }), ..sum(tensor, &[4]) }
}

#[test]
fn a_group_is_ordered_when_all_of_it_is_ready() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let all = |cluster: &mut Cluster, tensor| {
        let requests = cluster.submit_all(&grouped(tensor, "g", 3));
        cluster.run();
        requests
    };
    let a = all(&mut cluster, "a");
    let alone = cluster.submit_all(&sum("alone", &[4]));
    cluster.run();
    let b = all(&mut cluster, "b");
    assert_eq!(cluster.buckets(0), [["alone"]]);
    let c = all(&mut cluster, "c");
    assert_eq!(cluster.buckets(0), [vec!["alone"], vec!["a", "b", "c"]]);
    assert!([a, b, c, alone].iter().all(|requests| cluster.all_completed(requests)));
}

#[test]
fn a_rejected_tensor_leaves_its_group() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let refused = |tensor| Request { dtype: DType::Bool, ..grouped(tensor, "g", 3) };
    let refused = |tensor| Request { collective: Collective::AllReduce { op: ReduceOp::Average }, ..refused(tensor) };
    for round in 0..3 {
        // In turn: all ranks' requests are refused, one rank's is refused, the requests mismatch.
        let a = cluster.submit_all(&grouped("a", "g", 3));
        let odd: Vec<_> = (0..4)
            .map(|rank| {
                let what = match (round, rank) {
                    (0, _) | (1, 2) => refused("b"),
                    (2, 3) => Request { dtype: DType::F64, ..grouped("b", "g", 3) },
                    _ => grouped("b", "g", 3),
                };
                cluster.submit(rank, what)
            })
            .collect();
        cluster.run();
        assert!(cluster.is_pending(a[0]));
        let c = cluster.submit_all(&grouped("c", "g", 3));
        cluster.run();
        assert!((0..).zip(odd).all(|(rank, request)| cluster.outcome(rank, request).is_err()));
        assert!(cluster.all_completed(&a) && cluster.all_completed(&c), "round {round}");
    }
    // Withdrawn while it is ready and waits for the rest.
    let a = cluster.submit_all(&grouped("a", "g", 2));
    cluster.run();
    cluster.withdraw(2, a[2]);
    cluster.run();
    assert!(cluster.common_failure(&a).reason.contains("was withdrawn"));
    let b = cluster.submit_all(&grouped("b", "g", 2));
    cluster.run();
    assert!(cluster.all_completed(&b) && cluster.ended.is_empty());
}

#[test]
fn a_refusal_without_a_group_counts_for_the_group_that_another_rank_names() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let reason = "the slot is outside of the segment".to_owned();
    cluster.event(
        0,
        Event::Refused { rank: Rank(0), set: SetId::WORLD, name: name("a"), group: None, members: Vec::new(), reason },
    );
    let b = cluster.submit_all(&grouped("b", "g", 2));
    cluster.run();
    assert!(cluster.is_pending(b[0]));
    let a = cluster.submit(1, grouped("a", "g", 2));
    cluster.run();
    assert!(cluster.failure(1, a).reason.contains("outside of the segment") && cluster.all_completed(&b));
}

#[test]
fn groups_of_different_sizes_are_different_groups() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let a = cluster.submit_all(&grouped("a", "g", 2));
    let b = cluster.submit_all(&grouped("b", "g", 3));
    let c = cluster.submit_all(&grouped("c", "g", 3));
    cluster.run();
    assert!(cluster.is_pending(a[0]) && cluster.is_pending(b[0]));
    let d = cluster.submit_all(&grouped("d", "g", 2));
    cluster.run();
    assert!(cluster.all_completed(&a) && cluster.all_completed(&d) && cluster.is_pending(c[0]));
    let e = cluster.submit_all(&grouped("e", "g", 3));
    cluster.run();
    assert!([b, c, e].iter().all(|requests| cluster.all_completed(requests)));
    let odd: Vec<_> = (0..4).map(|rank| cluster.submit(rank, grouped("a", "g", 2 + rank / 3))).collect();
    cluster.run();
    let words = "One rank had group g of 2 tensors, but another rank had g of 3 tensors. (ranks 0-2";
    let failure = cluster.common_failure(&odd);
    assert!(failure.reason.contains(words) && failure.rank == Some(Rank(3)), "{failure}");
}

#[test]
fn a_tensor_of_several_groups_leaves_each_of_them_once() {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    let odd: Vec<_> =
        (0..).zip(["g", "h", "g"]).map(|(rank, group)| cluster.submit(rank, grouped("a", group, 2))).collect();
    cluster.run();
    assert!(cluster.common_failure(&odd).reason.contains("Mismatched groups"));
    let first = cluster.submit_all(&grouped("b", "g", 2));
    cluster.run();
    assert!(cluster.all_completed(&first));
    let second = cluster.submit_all(&grouped("b", "g", 2));
    cluster.run();
    assert!(cluster.is_pending(second[0]), "the second use of a is missing");
    let a = cluster.submit_all(&grouped("a", "g", 2));
    cluster.run();
    assert!(cluster.all_completed(&second) && cluster.all_completed(&a));
}

#[test]
fn a_group_with_one_tensor_that_fails_in_every_use_ends_the_epoch() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    for round in 0..65 {
        assert!(cluster.ended.is_empty(), "round {round}");
        cluster.submit(0, grouped("a", "g", 2));
        cluster.submit(1, Request { dtype: DType::F64, ..grouped("a", "g", 2) });
        cluster.run();
    }
    let (_, _, failure) = &cluster.ended[0];
    let words =
        "tensor a of process set 0 has failed in 64 uses of group g, of which other tensors were never asked for";
    assert!(failure.reason.contains(words) && failure.cause == Cause::Bug, "{failure}");
    assert_eq!(cluster.ended.len(), 2);
}

#[test]
fn ranks_may_run_ahead_through_several_uses_of_a_group() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let mut requests = [Vec::new(), Vec::new()];
    let odd = Request { dtype: DType::F64, ..grouped("a", "g", 2) };
    // The first use of `a` is rejected, and its second is ready before the first use of `b`.
    for (rank, what) in [(0, grouped("a", "g", 2)), (1, odd), (0, grouped("a", "g", 2)), (1, grouped("a", "g", 2))] {
        requests[rank as usize].push(cluster.submit(rank, what));
        cluster.run();
    }
    for rank in [0, 1] {
        requests[rank as usize].push(cluster.submit(rank, grouped("b", "g", 2)));
        cluster.run();
    }
    assert_eq!(cluster.buckets(0), [["b"]], "it was the last of the first use");
    for rank in [0, 1] {
        requests[rank as usize].push(cluster.submit(rank, grouped("b", "g", 2)));
        cluster.run();
    }
    for rank in [0_u32, 1] {
        let of_rank = &requests[rank as usize];
        let ends: Vec<bool> = of_rank.iter().map(|request| cluster.outcome(rank, *request).is_ok()).collect();
        assert_eq!(ends, [false, true, true, true]);
    }
}

#[test]
fn repeated_requests_are_announced_by_cache_slot() {
    let world = Cluster::new(&FOUR_ON_THREE).world;
    let mut cluster = Cluster::of(world, |config| EngineConfig { run_ahead: None, ..config }).started();
    for step in 0..5 {
        let a = cluster.submit_all(&sum("a", &[4]));
        let b = cluster.submit_all(&request("b", Collective::AllGather, &[1 + step / 4]));
        cluster.run();
        assert!(cluster.all_completed(&a) && cluster.all_completed(&b));
    }
    let again: Vec<u64> = cluster.engines.iter().map(|engine| engine.stats().announced_again).collect();
    // Twice five announcements of each rank; each sidecar says each request once in full, and `b` again when it has
    // changed.
    assert_eq!(again, [20 - 3, 10 - 3, 10 - 3]);
    for rank in 0..4 {
        cluster.close_session(rank);
    }
    cluster.run();
    cluster.attach_all();
    cluster.run();
    let a = cluster.submit_all(&sum("a", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&a), "both sides have forgotten everything");
    assert_eq!(cluster.engines[1].stats().announced_again, again[1]);
}

#[test]
fn the_first_cache_eviction_is_reported_once() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    for n in 0..limits::ANNOUNCE_SLOTS_MAX + 2 {
        cluster.submit_all(&sum(&n.to_string(), &[1]));
    }
    cluster.run();
    assert_eq!(cluster.engines[1].stats().cache_evictions, 2);
    let notices = cluster.notices.iter().filter(|(_, _, _, text)| text.contains("More than 1024 different requests"));
    assert_eq!(notices.count(), 2, "each sidecar says it once");
}

#[test]
fn unknown_cache_slots_are_protocol_violations() {
    let barrier = request("b", Collective::Barrier, &[0]);
    let gather = request("g", Collective::Gather { root: Rank(0) }, &[1]);
    let too_large = u16::try_from(limits::ANNOUNCE_SLOTS_MAX).expect("a small number");
    let odd = [
        (Intent::Again { slot: 0 }, "it announces cache slot 0, which is empty"),
        (Intent::Again { slot: u16::MAX }, "it announces cache slot 65535, which is empty"),
        (Intent::Remember { slot: too_large, request: barrier }, "it caches a request in slot 1024"),
        (Intent::Remember { slot: 0, request: gather }, "it caches a request for GATHER, which is never cached"),
    ];
    for (intent, words) in odd {
        let mut cluster = Cluster::new(&[0, 1]).started();
        let announcements = vec![Announcement::new(Rank(1), intent)];
        cluster.control(0, 1, (1, 0), Control::Announce { announcements });
        cluster.run();
        assert!(cluster.disconnects[0].2.contains(words), "{:?}", cluster.disconnects);
    }
}
