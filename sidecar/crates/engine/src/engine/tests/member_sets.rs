//! Tests of process sets that their members form by themselves.

use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    Cause, Collective, Control, DType, Detail, Failure, Rank, Request, RequestId, SetId, limits, set_of_members_name,
};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;
use crate::trace::Trace;

const FOUR_ON_THREE: [u32; 4] = [0, 0, 1, 2];

fn named(own: &str, ranks: &[u32]) -> Request {
    let name = set_of_members_name(own).expect("a short name");
    let ranks = ranks.iter().copied().map(Rank).collect();
    Request { dtype: DType::U8, ..request(name.as_str(), Collective::AddSetOfMembers { ranks }, &[0]) }
}

fn form(ranks: &[u32]) -> Request {
    named("g", ranks)
}

fn ask(cluster: &mut Cluster, ranks: &[u32], what: &Request) -> Vec<(u32, RequestId)> {
    ranks.iter().map(|rank| (*rank, cluster.submit(*rank, what.clone()))).collect()
}

/// The set that all members got.
fn formed(cluster: &Cluster, requests: &[(u32, RequestId)]) -> SetId {
    let detail =
        |(rank, request): &(u32, RequestId)| cluster.outcome(*rank, *request).as_ref().expect("a set").detail.clone();
    let details: Vec<Detail> = requests.iter().map(detail).collect();
    assert!(details.iter().all(|detail| *detail == details[0]), "{details:?}");
    let Detail::Set(set) = details[0] else { panic!("{details:?}") };
    set
}

/// The failure that all got.
fn failed(cluster: &Cluster, requests: &[(u32, RequestId)]) -> Failure {
    let failures: Vec<&Failure> = requests.iter().map(|(rank, request)| cluster.failure(*rank, *request)).collect();
    assert!(failures.iter().all(|failure| *failure == failures[0]), "{failures:#?}");
    failures[0].clone()
}

fn works(cluster: &mut Cluster, set: SetId, ranks: &[u32]) {
    let requests = ask(cluster, ranks, &Request { set, ..sum("within", &[4]) });
    cluster.run();
    assert!(requests.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
}

#[test]
fn members_form_a_set_without_the_other_ranks() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let first = ask(&mut cluster, &[3], &form(&[3, 1]));
    cluster.run();
    assert!(cluster.is_pending(first[0].1));
    let second = ask(&mut cluster, &[1], &form(&[1, 3]));
    cluster.run();
    let set = formed(&cluster, &[first, second].concat());
    works(&mut cluster, set, &[1, 3]);
    let alone = ask(&mut cluster, &[2], &form(&[2]));
    cluster.run();
    let alone = formed(&cluster, &alone);
    assert_ne!(alone, set);
    works(&mut cluster, alone, &[2]);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn a_set_that_exists_is_the_answer_however_it_was_made() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let add = |ranks: &[u32]| {
        let ranks = ranks.iter().copied().map(Rank).collect();
        Request { dtype: DType::U8, ..request("add", Collective::AddSet { ranks }, &[0]) }
    };
    let made = ask(&mut cluster, &[0, 1, 2, 3], &add(&[0, 2]));
    cluster.run();
    let made = formed(&cluster, &made);
    for what in [form(&[0, 2]), form(&[2, 0])] {
        let again = ask(&mut cluster, &[2, 0], &what);
        cluster.run();
        assert_eq!(formed(&cluster, &again), made);
    }
    let world = ask(&mut cluster, &[3, 2, 1, 0], &form(&[0, 1, 2, 3]));
    cluster.run();
    assert_eq!(formed(&cluster, &world), SetId::WORLD);
    let own = ask(&mut cluster, &[1, 2], &form(&[1, 2]));
    cluster.run();
    let own = formed(&cluster, &own);
    let duplicate = ask(&mut cluster, &[0, 1, 2, 3], &add(&[1, 2]));
    cluster.run();
    assert!(failed(&cluster, &duplicate).reason.contains(&format!("{own} is of ranks 1-2 already")));
    // All ranks remove it; then its members form another one.
    let remove = Request { dtype: DType::U8, ..request("remove", Collective::RemoveSet { set: own }, &[0]) };
    cluster.submit_all(&remove);
    cluster.run();
    let gone = cluster.submit(1, Request { set: own, ..sum("t", &[1]) });
    cluster.run();
    assert!(cluster.failure(1, gone).reason.contains("does not exist"));
    let again = ask(&mut cluster, &[1, 2], &form(&[1, 2]));
    cluster.run();
    let again = formed(&cluster, &again);
    works(&mut cluster, again, &[1, 2]);
}

#[test]
fn several_are_pending_at_once_in_any_order() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let (a, b) = (named("a", &[0, 1, 2]), named("b", &[1, 2, 3]));
    let one = [ask(&mut cluster, &[1], &a), ask(&mut cluster, &[2], &b)].concat();
    let two = [ask(&mut cluster, &[1], &b), ask(&mut cluster, &[2], &a)].concat();
    cluster.run();
    let last = ask(&mut cluster, &[3], &b);
    cluster.run();
    let second = formed(&cluster, &[one[1], two[0], last[0]]);
    assert!(cluster.is_pending(one[0].1) && cluster.is_pending(two[1].1));
    let last = ask(&mut cluster, &[0], &a);
    cluster.run();
    assert_ne!(formed(&cluster, &[one[0], two[1], last[0]]), second);
    // Disjoint sets may have one name, also on one sidecar.
    let halves = [ask(&mut cluster, &[0, 2], &named("c", &[0, 2])), ask(&mut cluster, &[1, 3], &named("c", &[1, 3]))];
    cluster.run();
    assert_ne!(formed(&cluster, &halves[0]), formed(&cluster, &halves[1]));
}

#[test]
fn ranks_that_disagree_fail_with_one_text_and_others_go_on() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let other = ask(&mut cluster, &[2], &form(&[2, 3]));
    let disagreeing = [ask(&mut cluster, &[0], &form(&[0, 1])), ask(&mut cluster, &[1], &form(&[0, 1, 2]))].concat();
    cluster.run();
    let failure = failed(&cluster, &disagreeing);
    assert_eq!((failure.cause, failure.rank), (Cause::Mismatch, Some(Rank(1))));
    assert!(failure.reason.contains("(rank 0: ranks 0-1; rank 1: ranks 0-2.)"), "{failure}");
    assert!(cluster.is_pending(other[0].1));
    let other = [other, ask(&mut cluster, &[3], &form(&[2, 3]))].concat();
    cluster.run();
    formed(&cluster, &other);
    // Rank 2 was to be in one of the lists: its part fails, too.
    let late = ask(&mut cluster, &[2], &form(&[0, 1, 2]));
    cluster.run();
    assert_eq!(failed(&cluster, &late), failure);
    // Rank 0 has not asked for that list yet: its first request is its part, too.
    let correct = ask(&mut cluster, &[0], &form(&[0, 1, 2]));
    let mut again = ask(&mut cluster, &[1, 2], &form(&[0, 1, 2]));
    cluster.run();
    assert_eq!(failed(&cluster, &correct), failure);
    again.extend(ask(&mut cluster, &[0], &form(&[0, 1, 2])));
    cluster.run();
    formed(&cluster, &again);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn invalid_requests_are_refused_at_once() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let set_of_some = Request { set: SetId(9), ..form(&[0, 1]) };
    let odd = [
        (form(&[1, 2]), "rank 0 is not among ranks 1-2, the members of the set"),
        (form(&[]), "rank 0 is not among no rank"),
        (form(&[0, 1, 0]), "a process set names rank 0 twice"),
        (form(&[0, 4]), "a process set cannot have rank 4: there are 4 ranks"),
        (Request { name: name("add"), ..form(&[0, 1]) }, "must be named add_process_set.members.<name>, not add"),
        (Request { name: form(&[0]).name, ..sum("t", &[1]) }, "is reserved for process sets that their members form"),
        (Request { prescale: 2.0, ..form(&[0, 1]) }, "does not reduce"),
        (set_of_some, "does not exist"),
    ];
    for (what, words) in odd {
        let request = cluster.submit(0, what);
        cluster.run();
        let failure = cluster.failure(0, request);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{failure} lacks {words}");
    }
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn a_refused_member_fails_the_others_before_and_after_they_ask() {
    for late in [false, true] {
        let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
        let bad = Request { prescale: 2.0, ..form(&[0, 2, 3]) };
        let mut requests = if late { Vec::new() } else { ask(&mut cluster, &[2], &form(&[0, 2, 3])) };
        cluster.run();
        let refused = cluster.submit(0, bad);
        cluster.run();
        assert!(cluster.failure(0, refused).reason.contains("does not reduce"));
        requests.extend(ask(&mut cluster, if late { &[2, 3] } else { &[3] }, &form(&[0, 2, 3])));
        cluster.run();
        let failure = failed(&cluster, &requests);
        assert!(failure.reason.contains("the request of rank 0 for a process set") && failure.rank == Some(Rank(0)));
        let again = ask(&mut cluster, &[3, 2, 0], &form(&[0, 2, 3]));
        cluster.run();
        formed(&cluster, &again);
    }
}

#[test]
fn a_withdrawal_fails_all_members_once() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let requests = ask(&mut cluster, &[1, 2], &form(&[1, 2, 3]));
    cluster.run();
    cluster.withdraw(1, requests[0].1);
    cluster.run();
    let failure = failed(&cluster, &requests);
    assert!(failure.reason.contains("was withdrawn: the deadline of 3 s passed"), "{failure}");
    let late = ask(&mut cluster, &[3], &form(&[1, 2, 3]));
    cluster.run();
    assert_eq!(failed(&cluster, &late), failure);
    let again = ask(&mut cluster, &[3, 2, 1], &form(&[1, 2, 3]));
    // The set is formed when the withdrawal arrives.
    cluster.run();
    cluster.withdraw(2, again[1].1);
    cluster.run();
    formed(&cluster, &again);
}

#[test]
fn a_joined_rank_asks_for_no_set_and_those_that_need_it_fail() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let join = Request { dtype: DType::U8, ..request("join", Collective::Join, &[0]) };
    let early = ask(&mut cluster, &[0, 3], &named("early", &[0, 2, 3]));
    // It has asked for this one before it joins.
    let asked = ask(&mut cluster, &[2], &named("asked", &[2, 3]));
    cluster.run();
    let mut joins = ask(&mut cluster, &[2], &join);
    cluster.run();
    let words = "Add_process_set is not supported with Join: rank 2 joined";
    assert!(failed(&cluster, &early).reason.contains(words));
    let late = ask(&mut cluster, &[3], &named("late", &[2, 3]));
    let own = ask(&mut cluster, &[2], &named("late", &[2, 3]));
    let without = ask(&mut cluster, &[0, 1, 3], &form(&[0, 1, 3]));
    let asked = [asked, ask(&mut cluster, &[3], &named("asked", &[2, 3]))].concat();
    cluster.run();
    assert!(failed(&cluster, &late).reason.contains(words));
    assert!(failed(&cluster, &own).reason.contains("rank 2 has joined; wait for the join first"));
    formed(&cluster, &without);
    formed(&cluster, &asked);
    joins.extend(ask(&mut cluster, &[0, 1, 3], &join));
    cluster.run();
    assert!(joins.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    // Calls restart: rank 2 has no part in those that failed without it.
    for own in ["early", "again"] {
        let again = ask(&mut cluster, &[0, 2, 3], &named(own, &[0, 2, 3]));
        cluster.run();
        formed(&cluster, &again);
    }
}

#[test]
fn a_lost_rank_ends_the_epoch_and_its_sets() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let kept = ask(&mut cluster, &[1, 2], &form(&[1, 2]));
    cluster.run();
    let kept = formed(&cluster, &kept);
    let pending = ask(&mut cluster, &[0, 1], &named("pending", &[0, 1, 3]));
    cluster.run();
    cluster.leave(3, Failure::new(Cause::RankLost, "it was killed"));
    cluster.run();
    let failure = failed(&cluster, &pending);
    assert_eq!((failure.cause, failure.rank), (Cause::RankLost, Some(Rank(3))));
    cluster.attach_all();
    cluster.run();
    let gone = cluster.submit(1, Request { set: kept, ..sum("t", &[1]) });
    cluster.run();
    assert!(cluster.failure(1, gone).reason.contains("does not exist"));
    // Nothing of the old calls is left.
    let again = ask(&mut cluster, &[3, 1, 0], &named("pending", &[0, 1, 3]));
    cluster.run();
    formed(&cluster, &again);
}

#[test]
fn stall_reports_name_missing_members_only() {
    let world = Cluster::new(&FOUR_ON_THREE).world;
    let mut cluster =
        Cluster::of(world, |config| EngineConfig { eager_bytes: 0, stall_warning_ms: 1_000, ..config }).started();
    let waits = ask(&mut cluster, &[0], &form(&[0, 2]));
    cluster.run();
    let status = cluster.engines[0].status(cluster.now);
    assert_eq!((status.negotiating, &status.waiting_tensors[0].missing[..]), (1, &[Rank(2)][..]));
    cluster.advance(2_500);
    let of_stall = |notice: &&(usize, Vec<_>, Vec<Rank>, String)| notice.3.contains("Missing ranks");
    let (_, _, ranks, text) = cluster.notices.iter().find(of_stall).expect("a report");
    assert_eq!(*ranks, [Rank(2)]);
    assert!(text.contains("Missing ranks:\n2: [add_process_set.members.g]"), "{text}");
    let waits = [waits, ask(&mut cluster, &[2], &form(&[0, 2]))].concat();
    cluster.run();
    formed(&cluster, &waits);
}

/// A schedule runs while sets are formed, refused and withdrawn; it is not withdrawn for them.
#[test]
fn schedules_go_on_while_members_form_sets() {
    let world = Cluster::new(&FOUR_ON_THREE).world;
    let mut cluster =
        Cluster::of(world, |config| EngineConfig { eager_bytes: 0, stall_warning_ms: 400, ..config }).started();
    let before = ask(&mut cluster, &[1], &named("before", &[1, 3]));
    let step = |cluster: &mut Cluster| {
        let requests = cluster.submit_all(&sum("t", &[1_000]));
        cluster.run();
        assert!(cluster.all_completed(&requests));
    };
    for _ in 0..12 {
        step(&mut cluster);
    }
    assert_eq!(cluster.engines[0].stats().schedules_issued, 1);
    let before = [before, ask(&mut cluster, &[3], &named("before", &[1, 3]))].concat();
    let set = ask(&mut cluster, &[0, 2], &form(&[0, 2]));
    let withdrawn = ask(&mut cluster, &[1, 2], &named("w", &[1, 2, 3]));
    cluster.run();
    formed(&cluster, &before);
    let set = formed(&cluster, &set);
    cluster.withdraw(1, withdrawn[0].1);
    let refused = cluster.submit(0, Request { prescale: 2.0, ..named("r", &[0, 3]) });
    let with_refused = ask(&mut cluster, &[3], &named("r", &[0, 3]));
    step(&mut cluster);
    failed(&cluster, &withdrawn);
    assert!(cluster.failure(0, refused).reason.contains("does not reduce"));
    assert!(failed(&cluster, &with_refused).reason.contains("was refused"));
    // One waits for long.
    let slow = ask(&mut cluster, &[1], &named("slow", &[1, 2]));
    cluster.advance(800);
    step(&mut cluster);
    let stats = cluster.engines[0].stats();
    assert_eq!((stats.schedules_issued, stats.schedules_withdrawn.iter().sum::<u64>()), (1, 0));
    // An operation on the new set does end it; the pending request survives.
    works(&mut cluster, set, &[0, 2]);
    let slow = [slow, ask(&mut cluster, &[2], &named("slow", &[1, 2]))].concat();
    step(&mut cluster);
    formed(&cluster, &slow);
    assert_eq!(cluster.engines[0].stats().schedules_withdrawn.iter().sum::<u64>(), 1);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

#[test]
fn the_coordinator_traces_requests_and_their_ends() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    cluster.engines[0].set_tracing(true);
    ask(&mut cluster, &[1, 3], &form(&[1, 3]));
    cluster.run();
    let traces = cluster.engines[0].take_traces();
    let ready = traces.iter().filter(|trace| matches!(trace, Trace::Ready { operation: "ADD_PROCESS_SET", .. }));
    assert_eq!(ready.count(), 2);
    assert!(matches!(traces.last(), Some(Trace::Concluded { operation: Some("ADD_PROCESS_SET"), .. })), "{traces:?}");
}

#[test]
fn one_rank_may_have_so_many_pending() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    for n in 0..1_024 {
        ask(&mut cluster, &[0], &named(&n.to_string(), &[0, 3]));
    }
    cluster.run();
    assert!(cluster.completed.is_empty());
    let more = cluster.submit(0, named("more", &[0, 3]));
    cluster.run();
    assert!(cluster.failure(0, more).reason.contains("rank 0 has process sets pending with 262144 ranks"));
    let other = ask(&mut cluster, &[3], &named("more", &[0, 3]));
    cluster.run();
    assert!(failed(&cluster, &other).reason.contains("was refused: rank 0 has process sets pending"));
    assert!(cluster.disconnects.is_empty());
}

/// The members of another set meet, whatever each of them has asked for by the same name before.
#[test]
fn later_members_do_not_wait_after_a_failure() {
    let mut cluster = Cluster::new(&[0, 1, 1, 2]).started();
    let disagreeing = [ask(&mut cluster, &[0], &form(&[0, 1])), ask(&mut cluster, &[1], &form(&[0, 1, 2]))].concat();
    cluster.run();
    failed(&cluster, &disagreeing);
    let mut next = Vec::new();
    for rank in 1..4 {
        next.extend(ask(&mut cluster, &[rank], &form(&[1, 2, 3])));
        cluster.run();
    }
    formed(&cluster, &next);
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0);
}

/// A request in another set than that of all ranks has the name of one that may wait, which it must not disturb.
#[test]
fn a_request_in_another_set_does_not_touch_one_that_waits() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_THREE, &[&[0, 2]]).started();
    let mut waits = ask(&mut cluster, &[0], &form(&[0, 3]));
    let elsewhere = cluster.submit(0, Request { set: SetId(1), ..form(&[0, 3]) });
    cluster.run();
    let failure = cluster.failure(0, elsewhere);
    assert!(failure.reason.contains("is for the set of all ranks, process set 0, not for process set 1"), "{failure}");
    waits.extend(ask(&mut cluster, &[3], &form(&[0, 3])));
    cluster.run();
    formed(&cluster, &waits);
    assert!(cluster.disconnects.is_empty());
}

/// All non-empty subsets of these ranks.
fn subsets(ranks: &[u32]) -> Vec<Vec<u32>> {
    let of_bits = |bits: u32| (0..).zip(ranks).filter(|(at, _)| bits >> at & 1 == 1).map(|(_, rank)| *rank).collect();
    (1..1 << ranks.len()).map(of_bits).collect()
}

/// A sidecar whose ranks form sets among themselves leaves room for the others.
#[test]
fn ranks_of_one_sidecar_cannot_use_up_all_sets() {
    let mut cluster = Cluster::new(&[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]).started();
    let own = subsets(&(1..12).collect::<Vec<u32>>());
    for ranks in &own[..limits::SETS_OF_ONE_SIDECAR_MAX] {
        let requests = ask(&mut cluster, ranks, &form(ranks));
        cluster.run();
        formed(&cluster, &requests);
    }
    for ranks in &own[limits::SETS_OF_ONE_SIDECAR_MAX..] {
        let requests = ask(&mut cluster, ranks, &form(ranks));
        cluster.run();
        let reason = failed(&cluster, &requests).reason;
        assert!(reason.contains("ranks of sidecar 1 alone have formed 256 process sets, the most"), "{reason}");
    }
    // One that exists is the answer; sets with others can be formed, and one is free again after a removal.
    let known = ask(&mut cluster, &own[2], &named("known", &own[2]));
    let shared = ask(&mut cluster, &[0, 1, 2], &named("shared", &[0, 1, 2]));
    let alone = ask(&mut cluster, &[0], &named("alone", &[0]));
    cluster.run();
    formed(&cluster, &shared);
    formed(&cluster, &alone);
    let set = formed(&cluster, &known);
    let remove = Request { dtype: DType::U8, ..request("remove", Collective::RemoveSet { set }, &[0]) };
    cluster.submit_all(&remove);
    cluster.run();
    let last = own.last().expect("subsets");
    let more = ask(&mut cluster, last, &form(last));
    cluster.run();
    formed(&cluster, &more);
}

/// The only sidecar of a job may form all sets; who has formed how many is in the refusal.
#[test]
fn a_refusal_names_who_has_formed_the_sets() {
    let mut cluster = Cluster::new(&[0; 11]).started();
    let all = subsets(&(0..11).collect::<Vec<u32>>());
    for (n, ranks) in all.iter().take(limits::SETS_MAX).enumerate() {
        let requests = ask(&mut cluster, ranks, &form(ranks));
        cluster.run();
        // The set of all ranks is one of them.
        if n < limits::SETS_MAX - 1 {
            formed(&cluster, &requests);
            continue;
        }
        let reason = failed(&cluster, &requests).reason;
        let words = "there are 1024 process sets, the most that a job may have (formed by ranks of one sidecar alone: \
                     sidecar 0: 1023). Remove sets";
        assert!(reason.contains(words), "{reason}");
    }
}

fn refusals(rank: u32, count: usize, own: &str, ranks: &[u32]) -> Vec<Announcement> {
    let name = set_of_members_name(own).expect("a short name");
    let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
    let failure = Failure::new(Cause::Refused, "no");
    let void = Intent::VoidSet { name, ranks, failure };
    (0..count).map(|_| Announcement::new(Rank(rank), void.clone())).collect()
}

/// A sidecar stops short of the limit; the one that comes last is not to blame.
#[test]
fn the_rank_that_causes_most_failures_is_named() {
    let mut cluster = Cluster::new(&[0, 1, 1, 1, 2]).started();
    for (rank, count) in [(1, 4_000), (2, 4_090), (3, 4_000), (4, 4_000)] {
        let announcements = refusals(rank, count, &rank.to_string(), &[0, rank]);
        let from = if rank < 4 { 1 } else { 2 };
        cluster.control(0, from, (1, 0), Control::Announce { announcements });
        cluster.run();
    }
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
    for n in 0..300 {
        cluster.submit(0, Request { prescale: 2.0, ..named(&format!("own.{n}"), &[0, 4]) });
        cluster.run();
    }
    let (_, _, failure) = &cluster.ended[0];
    assert_eq!(failure.rank, Some(Rank(2)), "{failure}");
    assert!(failure.reason.contains("rank 2 is the cause of most, with 1047040 ranks"), "{failure}");
}

#[test]
fn one_rank_causes_only_so_many_failures() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let announce = |announcements| Control::Announce { announcements };
    cluster.control(0, 1, (1, 0), announce(refusals(2, 4_096, "g", &[2, 3])));
    cluster.run();
    assert!(cluster.ended.is_empty());
    cluster.control(0, 1, (1, 0), announce(refusals(2, 1, "h", &[2, 3])));
    cluster.run();
    assert_eq!(cluster.ended[0].2.rank, Some(Rank(2)));
}

/// A refusal of a rank of which a request by the name waits is no part of another call.
#[test]
fn a_refusal_beside_a_request_that_waits_breaks_the_protocol() {
    let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
    let mut announcements = vec![Announcement::new(Rank(2), Intent::Ready(form(&[2, 3])))];
    announcements.extend(refusals(2, 1, "g", &[1, 2]));
    cluster.control(0, 1, (1, 0), Control::Announce { announcements });
    cluster.run();
    assert!(cluster.disconnects[0].2.contains("of which a request by this name waits"), "{:?}", cluster.disconnects);
}

/// Two ranks of one sidecar disagree again and again, each time by another name and with a list that has another rank.
#[test]
fn failures_that_others_never_learn_of_end_the_epoch() {
    let mut cluster = Cluster::new(&[0, 1, 1, 2]).started();
    for n in 0..20_000 {
        let own = n.to_string();
        ask(&mut cluster, &[1], &named(&own, &[1, 2]));
        ask(&mut cluster, &[2], &named(&own, &[1, 2, 3]));
        cluster.run();
        cluster.completed.clear();
        if !cluster.ended.is_empty() {
            assert!(cluster.ended[0].2.reason.contains("SETS_OF_MEMBERS_FAILED_MAX"), "{:?}", cluster.ended);
            assert!(cluster.ended[0].2.rank == Some(Rank(2)) && n > 2_000, "after {n}");
            return;
        }
    }
    panic!("failed requests pile up");
}

/// A sidecar that breaks the protocol is disconnected.
#[test]
fn false_announcements_are_violations() {
    let ready = |rank: u32, what: Request| Announcement::new(Rank(rank), Intent::Ready(what));
    let void = |ranks: &[u32], own: &str| {
        let ranks = ranks.iter().copied().map(Rank).collect();
        let failure = Failure::new(Cause::Refused, "no");
        let name = if own.is_empty() { name("t") } else { set_of_members_name(own).expect("a short name") };
        Announcement::new(Rank(2), Intent::VoidSet { name, ranks, failure })
    };
    let with_bytes = Announcement { contribution: vec![1].into(), ..ready(2, form(&[2, 3])) };
    let cached = Announcement::new(Rank(2), Intent::Remember { slot: 0, request: form(&[2, 3]) });
    let group = Intent::Void {
        set: SetId::WORLD,
        name: form(&[2]).name,
        failure: Failure::new(Cause::Refused, "no"),
        group: None,
    };
    let false_ones = [
        vec![ready(0, form(&[0, 2]))],
        vec![ready(2, form(&[0, 3]))],
        vec![ready(2, form(&[2, 2]))],
        vec![ready(2, form(&[2, 4]))],
        vec![ready(2, Request { set: SetId(1), ..form(&[2, 3]) })],
        vec![ready(2, Request { name: form(&[2]).name, ..sum("t", &[1]) })],
        vec![ready(2, form(&[2, 3])), ready(2, form(&[2, 3]))],
        vec![with_bytes],
        vec![cached],
        vec![Announcement::new(Rank(2), group)],
        vec![void(&[3, 2], "g")],
        vec![void(&[0, 3], "g")],
        vec![void(&[2, 4], "g")],
        vec![void(&[], "g")],
        vec![void(&[2, 3], "")],
    ];
    for announcements in false_ones {
        let mut cluster = Cluster::new(&FOUR_ON_THREE).started();
        let message = Control::Announce { announcements };
        cluster.control(0, 1, (1, 0), message.clone());
        cluster.run();
        assert_eq!(cluster.disconnects.len(), 1, "{message:?}");
        assert_eq!(cluster.disconnects[0].1.0, 1);
    }
}
