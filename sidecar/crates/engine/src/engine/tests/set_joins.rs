//! Tests of joins in process sets other than that of all ranks. Those of one set do not affect another one.

use bytes::Bytes;
use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    AnySource, Cause, Collective, Control, DType, Detail, Group, Pair, Rank, ReduceOp, Request, RequestId, SetId,
    set_of_members_name,
};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;
use crate::event::Event;

const FOUR_ON_THREE: [u32; 4] = [0, 0, 1, 2];
/// The set of ranks 1, 2 and 3, and that of ranks 0 and 1.
const SETS: [&[u32]; 2] = [&[1, 2, 3], &[0, 1]];
const FIRST: SetId = SetId(1);
const SECOND: SetId = SetId(2);

fn of(set: SetId, what: Request) -> Request {
    Request { set, ..what }
}

fn join(set: SetId) -> Request {
    of(set, Request { dtype: DType::U8, ..request("join", Collective::Join, &[0]) })
}

fn reduce(set: SetId, tensor: &str, op: ReduceOp) -> Request {
    of(set, request(tensor, Collective::AllReduce { op }, &[4]))
}

fn total(set: SetId, tensor: &str) -> Request {
    reduce(set, tensor, ReduceOp::Sum)
}

fn remove(set: SetId) -> Request {
    request("remove", Collective::RemoveSet { set }, &[0])
}

fn ask(cluster: &mut Cluster, ranks: &[u32], what: &Request) -> Vec<(u32, RequestId)> {
    ranks.iter().map(|rank| (*rank, cluster.submit(*rank, what.clone()))).collect()
}

fn succeeded(cluster: &Cluster, requests: &[(u32, RequestId)]) -> bool {
    requests.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok())
}

fn all_fail_with(cluster: &Cluster, requests: &[(u32, RequestId)], words: &str) {
    for (rank, request) in requests {
        let failure = cluster.failure(*rank, *request);
        assert!(failure.reason.contains(words), "{failure} lacks {words}");
    }
}

/// The rank that joined last, which all ranks receive.
fn last_joined(cluster: &Cluster, requests: &[(u32, RequestId)]) -> Rank {
    let detail = |(rank, request): &(u32, RequestId)| match cluster.outcome(*rank, *request) {
        Ok(done) => done.detail.clone(),
        Err(failure) => panic!("{failure}"),
    };
    let details: Vec<Detail> = requests.iter().map(detail).collect();
    assert!(details.iter().all(|detail| *detail == details[0]), "{details:?}");
    let Detail::LastJoined(last) = details[0] else { panic!("{details:?}") };
    last
}

/// Ranks join one after the other.
fn join_in_turn(cluster: &mut Cluster, ranks: &[u32], set: SetId) -> Vec<(u32, RequestId)> {
    let mut joins = Vec::new();
    for rank in ranks {
        joins.push((*rank, cluster.submit(*rank, join(set))));
        cluster.run();
    }
    joins
}

/// A refusal of a rank's join by its service.
fn refuse_join(cluster: &mut Cluster, rank: u32, set: SetId) {
    let (reason, home) = ("no".to_owned(), cluster.home(Rank(rank)));
    let (rank, name, group, members) = (Rank(rank), name("join"), None, Vec::new());
    cluster.event(home, Event::Refused { rank, set, name, group, members, reason });
    cluster.run();
}

#[test]
fn joined_ranks_of_a_set_take_part_with_zeros_until_all_of_it_have_joined() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let mut joins = ask(&mut cluster, &[3], &join(FIRST));
    cluster.run();
    let allowed = [
        reduce(FIRST, "t", ReduceOp::Sum),
        reduce(FIRST, "t", ReduceOp::Average),
        reduce(FIRST, "t", ReduceOp::Adasum),
        of(FIRST, request("t", Collective::Barrier, &[0])),
    ];
    for (rank, rest) in [(1, vec![2]), (2, vec![])] {
        let active: Vec<u32> = rest.iter().copied().chain([rank]).collect();
        for what in &allowed {
            let requests = ask(&mut cluster, &active, what);
            cluster.run();
            assert!(succeeded(&cluster, &requests), "{what:?}");
            let newest = |sidecar: usize| cluster.admitted[sidecar].last().expect("an operation");
            assert_eq!((newest(2).joined.as_slice(), newest(2).topology.set), (&[Rank(3)][..], FIRST));
            assert_eq!(newest(0).joined.is_empty(), active.contains(&1), "rank 1");
            assert_eq!(newest(1).arithmetic.ranks, 3, "an average divides by all ranks of the set");
        }
        joins.extend(ask(&mut cluster, &[rank], &join(FIRST)));
        cluster.run();
    }
    assert_eq!(last_joined(&cluster, &joins), Rank(2));
    let all = ask(&mut cluster, &[1, 2, 3], &reduce(FIRST, "t", ReduceOp::Max));
    cluster.run();
    assert!(succeeded(&cluster, &all) && cluster.ended.is_empty() && cluster.disconnects.is_empty());
    let status = cluster.engines[0].status(cluster.now);
    assert_eq!((status.negotiating, status.ranks_joined.len()), (0, 0));
}

#[test]
fn joins_of_different_sets_are_independent() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    // Rank 1 is in all of them.
    let mut first = ask(&mut cluster, &[1], &join(FIRST));
    cluster.run();
    assert_eq!(cluster.engines[0].status(cluster.now).ranks_joined, [Rank(1)]);
    let elsewhere = ask(&mut cluster, &[0, 1], &reduce(SECOND, "t", ReduceOp::Max));
    let everywhere = cluster.submit_all(&sum("t", &[4]));
    let without = ask(&mut cluster, &[2, 3], &total(FIRST, "t"));
    cluster.run();
    assert!(succeeded(&cluster, &elsewhere) && cluster.all_completed(&everywhere) && succeeded(&cluster, &without));
    let mut second = ask(&mut cluster, &[0], &join(SECOND));
    let mut all = ask(&mut cluster, &[3], &join(SetId::WORLD));
    cluster.run();
    // All three wait, each with another rank.
    assert!([&first, &second, &all].iter().all(|joins| cluster.is_pending(joins[0].1)));
    let without = [
        ask(&mut cluster, &[1], &total(SECOND, "u")),
        ask(&mut cluster, &[2, 3], &total(FIRST, "u")),
        ask(&mut cluster, &[0, 1, 2], &sum("u", &[4])),
    ];
    cluster.run();
    assert!(without.iter().all(|requests| succeeded(&cluster, requests)));
    second.extend(ask(&mut cluster, &[1], &join(SECOND)));
    cluster.run();
    assert_eq!(last_joined(&cluster, &second), Rank(1));
    first.extend(join_in_turn(&mut cluster, &[3, 2], FIRST));
    assert_eq!(last_joined(&cluster, &first), Rank(2));
    assert!(cluster.is_pending(all[0].1));
    all.extend(join_in_turn(&mut cluster, &[2, 1, 0], SetId::WORLD));
    assert_eq!(last_joined(&cluster, &all), Rank(0));
}

#[test]
fn a_rank_that_joined_in_a_set_submits_nothing_more_there() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let mut joins = ask(&mut cluster, &[2], &join(FIRST));
    cluster.run();
    for what in [total(FIRST, "t"), join(FIRST), of(FIRST, request("other", Collective::Join, &[0]))] {
        let refused = ask(&mut cluster, &[2], &what);
        cluster.run();
        all_fail_with(&cluster, &refused, "rank 2 has joined; wait for the join first");
    }
    // A refusal by the service concerns no other rank, either.
    let (reason, members) = ("odd".to_owned(), Vec::new());
    let refused = Event::Refused { rank: Rank(2), set: FIRST, name: name("t"), group: None, members, reason };
    cluster.event(1, refused);
    let without = ask(&mut cluster, &[1, 3], &total(FIRST, "t"));
    cluster.run();
    assert!(succeeded(&cluster, &without));
    joins.extend(join_in_turn(&mut cluster, &[1, 3], FIRST));
    assert_eq!(last_joined(&cluster, &joins), Rank(3));
}

#[test]
fn collectives_that_zeros_would_change_are_rejected_in_the_set_alone() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    ask(&mut cluster, &[1], &join(FIRST));
    let send = |from: u32, to: u32| {
        let name = Pair { from: Rank(from), to: Rank(to) }.message_name(0, 0);
        request(name.as_str(), Collective::Send { to: Rank(to), tag: 0 }, &[1])
    };
    let to_joined = ask(&mut cluster, &[2], &of(FIRST, send(2, 1)));
    let to_active = ask(&mut cluster, &[2], &of(FIRST, send(2, 3)));
    let in_world = ask(&mut cluster, &[2], &send(2, 1));
    cluster.run();
    all_fail_with(&cluster, &to_joined, "Send is not supported with Join: rank 1 joined");
    assert!(cluster.is_pending(to_active[0].1) && cluster.is_pending(in_world[0].1));
    let root = Rank(2);
    for what in [
        request("t", Collective::AllGather, &[4]),
        request("t", Collective::Broadcast { root }, &[4]),
        request("t", Collective::AllReduce { op: ReduceOp::Max }, &[4]),
        request("t", Collective::ReduceScatter { op: ReduceOp::Sum }, &[4]),
    ] {
        let requests = ask(&mut cluster, &[2, 3], &of(FIRST, what.clone()));
        let everywhere = cluster.submit_all(&what);
        cluster.run();
        all_fail_with(&cluster, &requests, "is not supported with Join: rank 1 joined");
        assert!(cluster.all_completed(&everywhere), "{what:?}");
        let again = ask(&mut cluster, &[2, 3], &total(FIRST, "t"));
        cluster.run();
        assert!(succeeded(&cluster, &again));
    }
    ask(&mut cluster, &[2, 3], &join(FIRST));
    cluster.run();
    let all = ask(&mut cluster, &[1, 2, 3], &total(FIRST, "t"));
    cluster.run();
    assert!(succeeded(&cluster, &all), "the joined rank was excused from every rejection");
}

#[test]
fn a_set_is_not_removed_while_a_rank_has_joined_in_it() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    cluster.executes = false;
    // Two buckets are in flight, so what is ready without rank 3 stays in the queue.
    for tensor in ["a", "b"] {
        ask(&mut cluster, &[1, 2, 3], &of(FIRST, request(tensor, Collective::Barrier, &[0])));
    }
    let mut joins = ask(&mut cluster, &[3], &join(FIRST));
    cluster.run();
    let removals = cluster.submit_all(&remove(FIRST));
    cluster.run();
    let failure = cluster.common_failure(&removals);
    let words = "process set 1 cannot be removed: rank 3 has joined in it; remove it when the join is complete";
    assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{failure}");
    let stranded = ask(&mut cluster, &[1, 2], &total(FIRST, "t"));
    joins.extend(ask(&mut cluster, &[1, 2], &join(FIRST)));
    cluster.run();
    assert!(cluster.is_pending(joins[0].1), "the join ends after what was ready without rank 3");
    let removals = cluster.submit_all(&remove(FIRST));
    let other = cluster.submit_all(&Request { name: name("remove another"), ..remove(SECOND) });
    cluster.run();
    let failure = cluster.common_failure(&removals);
    assert!(failure.reason.contains("process set 1 cannot be removed: its ranks have joined in it"), "{failure}");
    assert!(cluster.all_completed(&other));
    cluster.executes = true;
    cluster.execute_all();
    assert!(succeeded(&cluster, &stranded));
    assert_eq!(last_joined(&cluster, &joins), Rank(2));
    let removals = cluster.submit_all(&remove(FIRST));
    cluster.run();
    assert!(cluster.all_completed(&removals) && cluster.ended.is_empty());
    let gone = ask(&mut cluster, &[1], &join(FIRST));
    cluster.run();
    all_fail_with(&cluster, &gone, "Process set provided does not exist");
}

/// The announcement of the join arrives after the removal is decided.
#[test]
fn a_join_that_comes_too_late_fails_with_its_set() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let mut removals: Vec<_> = (0..3).map(|rank| (rank, cluster.submit(rank, remove(FIRST)))).collect();
    cluster.run();
    removals.push((3, cluster.submit(3, remove(FIRST))));
    cluster.drain_all();
    cluster.deliver((2, 0));
    cluster.drain_all();
    let late = ask(&mut cluster, &[2], &join(FIRST));
    cluster.run();
    assert!(succeeded(&cluster, &removals));
    all_fail_with(&cluster, &late, "tensor join: process set 1 was removed");
    // A set with the same number has no joined ranks.
    let added = cluster.submit_all(&request("add", Collective::AddSet { ranks: vec![Rank(2), Rank(3)] }, &[0]));
    cluster.run();
    let Ok(Detail::Set(set)) = cluster.outcome(2, added[2]).as_ref().map(|done| done.detail.clone()) else { panic!() };
    assert_eq!(set, FIRST);
    let all = ask(&mut cluster, &[2, 3], &reduce(set, "t", ReduceOp::Max));
    cluster.run();
    assert!(succeeded(&cluster, &all) && cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn a_failed_join_does_not_count_in_its_set_and_leaves_others_alone() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    cluster.executes = false;
    for set in [FIRST, SetId::WORLD] {
        let ranks: &[u32] = if set == FIRST { &[1, 2, 3] } else { &[0, 1, 2, 3] };
        for tensor in ["a", "b"] {
            ask(&mut cluster, ranks, &of(set, request(tensor, Collective::Barrier, &[0])));
        }
    }
    cluster.run();
    let failed = ask(&mut cluster, &[3], &join(FIRST));
    let kept = ask(&mut cluster, &[3], &join(SetId::WORLD));
    let stranded = ask(&mut cluster, &[1, 2], &total(FIRST, "t"));
    let without = ask(&mut cluster, &[0, 1, 2], &sum("t", &[4]));
    cluster.run();
    refuse_join(&mut cluster, 2, FIRST);
    all_fail_with(&cluster, &failed, "was refused");
    all_fail_with(&cluster, &stranded, "to be performed without rank 3, whose join has failed");
    assert!(cluster.is_pending(kept[0].1));
    cluster.executes = true;
    cluster.execute_all();
    assert!(succeeded(&cluster, &without));
    // The rejection of the name was sent to rank 1, too, which has to use it once more.
    let late = ask(&mut cluster, &[1], &join(FIRST));
    cluster.run();
    all_fail_with(&cluster, &late, "was refused");
    let joins = join_in_turn(&mut cluster, &[3, 2, 1], FIRST);
    assert_eq!(last_joined(&cluster, &joins), Rank(1));
    assert!(cluster.ended.is_empty());
}

#[test]
fn an_incomplete_group_of_a_set_does_not_hold_up_its_join() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let group = Some(Group { name: name("g"), size: 2 });
    let in_group = |what: Request| Request { group: group.clone(), ..what };
    let other = ask(&mut cluster, &[0, 1], &in_group(total(SECOND, "a")));
    ask(&mut cluster, &[3], &join(FIRST));
    let held = ask(&mut cluster, &[1, 2], &in_group(total(FIRST, "a")));
    cluster.run();
    assert!(cluster.is_pending(held[0].1));
    let joins = ask(&mut cluster, &[1, 2], &join(FIRST));
    cluster.run();
    let words = "group g of process set 1 has 1 of its 2 tensors (a), and all ranks have joined";
    all_fail_with(&cluster, &held, words);
    assert_eq!(last_joined(&cluster, &joins), Rank(2));
    assert!(cluster.is_pending(other[0].1), "the group of another set still waits");
    let rest = ask(&mut cluster, &[0, 1], &in_group(total(SECOND, "b")));
    cluster.run();
    assert!(succeeded(&cluster, &other) && succeeded(&cluster, &rest));
}

#[test]
fn ranks_form_a_set_by_themselves_and_join_in_it() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let ranks = vec![Rank(1), Rank(3)];
    let name = set_of_members_name("pair").expect("a short name");
    let formed = ask(&mut cluster, &[1, 3], &request(name.as_str(), Collective::AddSetOfMembers { ranks }, &[0]));
    cluster.run();
    let done = cluster.outcome(1, formed[0].1).as_ref().expect("a set");
    let Detail::Set(set) = done.detail else { panic!("{done:?}") };
    let mut joins = ask(&mut cluster, &[3], &join(set));
    let alone = ask(&mut cluster, &[1], &total(set, "t"));
    cluster.run();
    assert!(succeeded(&cluster, &alone));
    // A rank that has joined in this set still makes others.
    let ranks = vec![Rank(0), Rank(3)];
    let other = ask(&mut cluster, &[0, 3], &request(name.as_str(), Collective::AddSetOfMembers { ranks }, &[0]));
    cluster.run();
    assert!(succeeded(&cluster, &other));
    joins.extend(ask(&mut cluster, &[1], &join(set)));
    cluster.run();
    assert_eq!(last_joined(&cluster, &joins), Rank(1));
    let unconcerned = cluster.admitted[1].iter().filter(|admission| admission.topology.set == set).count();
    assert_eq!(unconcerned, 0, "sidecar 1 serves no rank of the set");
}

#[test]
fn a_join_in_a_set_ends_a_schedule_and_the_rest_of_the_set_goes_on() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let step = |cluster: &mut Cluster, of_set: &[u32]| {
        let everywhere = cluster.submit_all(&sum("t", &[4]));
        let requests = ask(cluster, of_set, &total(FIRST, "s"));
        cluster.run();
        assert!(cluster.all_completed(&everywhere) && succeeded(cluster, &requests));
    };
    for _ in 0..10 {
        step(&mut cluster, &[1, 2, 3]);
    }
    assert_eq!(cluster.engines[0].stats().schedules_issued, 1);
    let joins = ask(&mut cluster, &[2], &join(FIRST));
    for _ in 0..10 {
        step(&mut cluster, &[1, 3]);
    }
    let stats = cluster.engines[0].stats();
    assert_eq!((stats.schedules_issued, stats.schedules_withdrawn.iter().sum::<u64>()), (1, 1), "none with a join");
    let joins = [joins, ask(&mut cluster, &[1, 3], &join(FIRST))].concat();
    cluster.run();
    assert_eq!(last_joined(&cluster, &joins), Rank(3));
    for _ in 0..30 {
        step(&mut cluster, &[1, 2, 3]);
    }
    assert_eq!(cluster.engines[0].stats().schedules_issued, 2);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn a_receive_from_any_source_fails_when_all_others_of_its_set_have_joined() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let any = AnySource { to: Rank(2), tag: 9 }.receive_name(0);
    let receive = request(any.as_str(), Collective::RecvAny { tag: 9 }, &[0]);
    let in_set = ask(&mut cluster, &[2], &of(FIRST, receive.clone()));
    let in_world = ask(&mut cluster, &[2], &receive);
    ask(&mut cluster, &[1], &join(FIRST));
    ask(&mut cluster, &[3], &join(SetId::WORLD));
    cluster.run();
    assert!(cluster.is_pending(in_set[0].1));
    // A rank does not join while its receive waits in the set.
    let refused = ask(&mut cluster, &[2], &join(FIRST));
    cluster.run();
    all_fail_with(&cluster, &refused, "waits; wait for it before the join");
    // The refusal is the rank's part in this use of the name, which fails for the others.
    let failed = ask(&mut cluster, &[3], &join(FIRST));
    cluster.run();
    all_fail_with(&cluster, &failed, "waits; wait for it before the join");
    assert!(cluster.is_pending(in_set[0].1));
    let rest = ask(&mut cluster, &[1, 3], &join(FIRST));
    cluster.run();
    all_fail_with(&cluster, &in_set, "all other ranks have joined");
    assert!(cluster.is_pending(in_world[0].1));
    let joins = [rest, ask(&mut cluster, &[2], &join(FIRST))].concat();
    cluster.run();
    let pending = joins.iter().filter(|(_, request)| cluster.is_pending(*request)).count();
    assert_eq!(pending, 0, "{joins:?}");
}

#[test]
fn joined_ranks_of_a_set_contribute_nothing_to_an_eager_operation() {
    let world = Cluster::with_sets(&FOUR_ON_THREE, &SETS).world;
    let mut cluster = Cluster::of(world, |config| EngineConfig { eager_bytes: 4_096, ..config }).started();
    ask(&mut cluster, &[3], &join(FIRST));
    let requests = ask(&mut cluster, &[1, 2], &of(FIRST, sum("t", &[1])));
    cluster.run();
    assert!(succeeded(&cluster, &requests));
    let admission = &cluster.admitted[0][0];
    assert_eq!(admission.contributions[0].iter().map(Bytes::len).collect::<Vec<_>>(), [4, 4, 0]);
    assert_eq!(admission.joined, [Rank(3)]);
}

#[test]
fn hostile_joins_in_a_set_harm_only_the_sender() {
    // The coordinator reports the end of a join for which nobody asked.
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let pending = ask(&mut cluster, &[2], &total(FIRST, "t"));
    cluster.control(1, 0, (1, 0), Control::AllJoined { set: FIRST, name: name("join"), last: Rank(1) });
    cluster.run();
    all_fail_with(&cluster, &pending, "which rank 2 has not asked for");
    // A sidecar announces a join under the name of a receive, which one rank negotiates alone.
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
    let any = AnySource { to: Rank(3), tag: 9 }.receive_name(0);
    for (rank, set, words) in [(3, FIRST, "announces JOIN of rank 3 as"), (3, SECOND, "takes no part in it")] {
        let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &SETS).started();
        let what = Request { name: if set == FIRST { any.clone() } else { name("join") }, ..join(set) };
        let announcements = vec![Announcement::new(Rank(rank), Intent::Ready(what))];
        cluster.control(0, 2, (1, 0), Control::Announce { announcements });
        cluster.run();
        let (_, peer, reason) = cluster.disconnects.first().expect("one");
        assert!(peer.0 == 2 && reason.contains(words), "{reason}");
    }
    // An order names a rank of the set as joined that has not.
    ask(&mut cluster, &[3], &join(FIRST));
    cluster.run();
    let requests = ask(&mut cluster, &[1, 2], &total(FIRST, "t"));
    cluster.drain_all();
    cluster.deliver((1, 0));
    cluster.drain_all();
    cluster.tamper((0, 1), |_, message| {
        if let Control::Order(order) = message {
            order.joined = vec![Rank(2), Rank(3)];
        }
    });
    cluster.run();
    let failure = cluster.failure(2, requests[1].1);
    assert!(failure.reason.contains("rank 2 is marked as joined but has not joined"), "{failure}");
}
