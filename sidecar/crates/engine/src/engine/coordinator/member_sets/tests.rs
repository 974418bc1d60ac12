use std::collections::{BTreeMap, BTreeSet};

use super::*;

fn name() -> TensorName {
    ronde_wire::set_of_members_name("t").expect("a short name")
}

fn list(ranks: &[u32]) -> Vec<Rank> {
    ranks.iter().copied().map(Rank).collect()
}

fn ask(sets: &mut MemberSets, rank: u32, ranks: &[u32]) -> Asked {
    sets.ask(Time(7), &name(), Rank(rank), &list(ranks), &BTreeSet::new()).expect("in order")
}

/// The ranks whose requests fail, and why.
fn failed(asked: Asked) -> (Vec<Rank>, String) {
    match asked {
        Asked::Failed(Ended { ranks, failure }) => (ranks, failure.reason),
        other => panic!("{other:?}"),
    }
}

fn no() -> Failure {
    Failure::new(Cause::Refused, "no")
}

#[test]
fn a_call_is_complete_when_all_its_ranks_have_asked() {
    let mut sets = MemberSets::default();
    assert_eq!(ask(&mut sets, 3, &[1, 3]), Asked::Waits);
    let waiting: Vec<Vec<Rank>> = sets.waiting().map(|waiting| waiting.missing).collect();
    assert_eq!(waiting, [list(&[1])]);
    assert_eq!(ask(&mut sets, 1, &[1, 3]), Asked::Complete(Time(7)));
    assert_eq!(ask(&mut sets, 2, &[2]), Asked::Complete(Time(7)));
    assert_eq!((sets.len(), sets.names.len(), sets.pending[&Rank(1)]), (0, 0, 0));
}

#[test]
fn disjoint_sets_may_have_one_name() {
    let mut sets = MemberSets::default();
    for (rank, ranks) in [(0, [0, 1]), (2, [2, 3])] {
        assert_eq!(ask(&mut sets, rank, &ranks), Asked::Waits);
    }
    for (rank, ranks) in [(3, [2, 3]), (1, [0, 1])] {
        assert!(matches!(ask(&mut sets, rank, &ranks), Asked::Complete(_)));
    }
}

/// Rank 2 is ahead of the others, which ask for the sets one after the other by the same name.
#[test]
fn overlapping_sets_that_can_still_be_complete_do_not_fail() {
    let mut sets = MemberSets::default();
    assert_eq!(ask(&mut sets, 2, &[1, 2]), Asked::Waits);
    assert_eq!(ask(&mut sets, 0, &[0, 1]), Asked::Waits);
    assert!(matches!(ask(&mut sets, 1, &[0, 1]), Asked::Complete(_)));
    assert!(matches!(ask(&mut sets, 1, &[1, 2]), Asked::Complete(_)));
}

#[test]
fn ranks_that_disagree_fail_with_one_text() {
    let mut sets = MemberSets::default();
    assert_eq!(ask(&mut sets, 0, &[0, 1]), Asked::Waits);
    let (ranks, text) = failed(ask(&mut sets, 1, &[0, 1, 2]));
    assert_eq!(ranks, list(&[0, 1]));
    let words = "One rank asked for ranks 0-1, but another rank for ranks 0-2. (rank 0: ranks 0-1; rank 1: ranks 0-2.)";
    assert!(text.contains(words) && text.contains("add_process_set.members.t"), "{text}");
    // The third one is told, too; then all meet again.
    assert_eq!(failed(ask(&mut sets, 2, &[0, 1, 2])), (list(&[2]), text));
    assert_eq!(sets.failed, 0);
    for rank in [0, 2] {
        assert_eq!(ask(&mut sets, rank, &[0, 1, 2]), Asked::Waits);
    }
    assert!(matches!(ask(&mut sets, 1, &[0, 1, 2]), Asked::Complete(_)));
    assert!(sets.names.is_empty());
}

#[test]
fn a_ring_of_ranks_that_wait_for_each_other_fails() {
    let mut sets = MemberSets::default();
    assert_eq!(ask(&mut sets, 0, &[0, 1]), Asked::Waits);
    assert_eq!(ask(&mut sets, 1, &[1, 2]), Asked::Waits);
    // It waits for the ring, and is no part of it.
    assert_eq!(ask(&mut sets, 3, &[0, 3]), Asked::Waits);
    let (ranks, text) = failed(ask(&mut sets, 2, &[0, 2]));
    assert_eq!(ranks, list(&[0, 1, 2]));
    assert!(text.contains("(rank 0: ranks 0-1; rank 1: ranks 1-2; rank 2: ranks 0, 2.)"), "{text}");
    assert!(matches!(ask(&mut sets, 0, &[0, 3]), Asked::Complete(_)));
}

#[test]
fn a_withdrawal_fails_the_call_and_the_part_of_those_who_ask_later() {
    let (mut sets, none) = (MemberSets::default(), BTreeSet::new());
    assert_eq!(sets.withdraw(&name(), Rank(0), &none, no()), None);
    ask(&mut sets, 0, &[0, 1, 2]);
    ask(&mut sets, 1, &[0, 1, 2]);
    let ended = sets.withdraw(&name(), Rank(1), &none, no()).expect("it was pending");
    assert_eq!(ended.ranks, list(&[0, 1]));
    assert_eq!(sets.withdraw(&name(), Rank(1), &none, no()), None);
    assert_eq!(ask(&mut sets, 0, &[0, 1, 2]), Asked::Waits);
    assert_eq!(failed(ask(&mut sets, 2, &[0, 1, 2])).0, list(&[2]));
    assert_eq!(ask(&mut sets, 2, &[0, 1, 2]), Asked::Waits);
    assert!(matches!(ask(&mut sets, 1, &[0, 1, 2]), Asked::Complete(_)));
    assert_eq!((sets.failed, sets.names.len()), (0, 0));
}

#[test]
fn a_refused_request_is_the_part_of_its_rank_whoever_comes_first() {
    let none = BTreeSet::new();
    let mut sets = MemberSets::default();
    ask(&mut sets, 0, &[0, 1]);
    let ended = sets.refuse(&name(), Rank(1), &list(&[0, 1]), &none, no()).expect("rank 0 waits");
    assert_eq!((ended.ranks, sets.failed, sets.names.len()), (list(&[0]), 0, 0));
    let mut sets = MemberSets::default();
    assert_eq!(sets.refuse(&name(), Rank(1), &list(&[0, 1]), &none, no()), None);
    assert_eq!(failed(ask(&mut sets, 0, &[0, 1])).0, list(&[0]));
    assert!(sets.names.is_empty());
    // A rank that is to be told asks with others, of whom one waits: both are told.
    ask(&mut sets, 0, &[0, 1]);
    failed(ask(&mut sets, 1, &[0, 1, 2]));
    ask(&mut sets, 1, &[1, 2]);
    assert_eq!(failed(ask(&mut sets, 2, &[1, 2])).0, list(&[1, 2]));
    assert!(sets.names.is_empty());
    // Ranks of none of the lists do not suffer.
    ask(&mut sets, 0, &[0, 1]);
    failed(ask(&mut sets, 1, &[0, 1, 2]));
    ask(&mut sets, 3, &[2, 3]);
    assert!(matches!(ask(&mut sets, 2, &[2, 3]), Asked::Complete(_)));
    failed(ask(&mut sets, 2, &[0, 2]));
    assert!(sets.names.is_empty());
    // Refused on both.
    assert_eq!(sets.refuse(&name(), Rank(1), &list(&[0, 1]), &none, no()), None);
    assert_eq!(sets.refuse(&name(), Rank(0), &list(&[0, 1]), &none, no()), None);
    assert!(sets.names.is_empty());
    // Another list of the same name is not concerned.
    ask(&mut sets, 2, &[1, 2]);
    assert_eq!(sets.refuse(&name(), Rank(1), &list(&[0, 1]), &none, no()), None);
    assert_eq!(sets.len(), 1);
}

#[test]
fn a_joined_rank_fails_calls_that_need_it_and_has_no_part_in_them() {
    let mut sets = MemberSets::default();
    ask(&mut sets, 0, &[0, 1, 2]);
    ask(&mut sets, 1, &[1, 3]);
    let joined: BTreeSet<Rank> = [Rank(1)].into();
    let ended = sets.join(Rank(1), &joined);
    let [(_, Ended { ranks, failure })] = &ended[..] else { panic!("{ended:?}") };
    assert_eq!(*ranks, list(&[0]));
    assert!(failure.reason.contains("is not supported with Join: rank 1 joined"), "{failure}");
    // It had asked for the other one before.
    assert!(matches!(sets.ask(Time(8), &name(), Rank(3), &list(&[1, 3]), &joined), Ok(Asked::Complete(_))));
    let late = sets.ask(Time(8), &name(), Rank(0), &list(&[0, 1]), &joined).expect("in order");
    assert_eq!(failed(late).0, list(&[0]));
    // A rank that has joined may still disagree: it had asked for another list.
    let mut disagreeing = MemberSets::default();
    ask(&mut disagreeing, 1, &[1, 2]);
    let other = disagreeing.ask(Time(8), &name(), Rank(2), &list(&[0, 1, 2]), &joined).expect("in order");
    assert!(failed(other).1.contains("Mismatched process sets"));
    // Rank 2 has not been told, until all have joined.
    assert!(sets.failed > 0);
    sets.all_joined();
    assert_eq!((sets.failed, sets.names.len()), (0, 0));
}

#[test]
fn pending_and_failed_requests_are_bounded() {
    let none = BTreeSet::new();
    let named = |n: usize| ronde_wire::set_of_members_name(&n.to_string()).expect("a short name");
    let mut sets = MemberSets::default();
    for n in 0..1_024 {
        assert!(sets.ask(Time(1), &named(n), Rank(0), &list(&[0, 1]), &none).is_ok());
    }
    assert!(sets.ask(Time(1), &named(9_999), Rank(0), &list(&[0, 1]), &none).is_err());
    assert!(sets.ask(Time(1), &named(9_999), Rank(1), &list(&[0, 1]), &none).is_ok());
    assert!(sets.ask(Time(1), &named(1), Rank(0), &list(&[0, 1]), &none).is_err(), "twice");
    for n in 0..20_000 {
        if sets.overflows() {
            assert!(n > 16_000);
            return;
        }
        sets.refuse(&named(n), Rank(2), &list(&[2, 3]), &none, no());
    }
    panic!("failed requests pile up");
}

/// Each of three ranks asks for one list by one name: all combinations of lists, in every order of arrival. Each request is
/// answered at most once, and a set is formed exactly by ranks that all asked for it.
#[test]
fn all_small_worlds_agree() {
    let lists: Vec<Vec<Rank>> =
        (1_u32..8).map(|bits| (0..3).filter(|rank| bits >> rank & 1 == 1).map(Rank).collect()).collect();
    let mut outcomes = BTreeMap::from([("formed", 0), ("failed", 0), ("waits", 0)]);
    for first in &lists {
        for second in &lists {
            for third in &lists {
                let wanted = [first, second, third];
                for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
                    small_world(wanted, order, &mut outcomes);
                }
            }
        }
    }
    assert!(outcomes.values().all(|count| *count > 100), "{outcomes:?}");
}

/// Rank `n` asks once, for `wanted[n]` if it is in there.
fn small_world(wanted: [&Vec<Rank>; 3], order: [usize; 3], outcomes: &mut BTreeMap<&'static str, usize>) {
    let (mut sets, none) = (MemberSets::default(), BTreeSet::new());
    let mut ended: BTreeMap<Rank, &'static str> = BTreeMap::new();
    let asks = |rank: &Rank| wanted[rank.index()].contains(rank);
    for rank in order.map(|at| Rank(u32::try_from(at).expect("three ranks"))).into_iter().filter(asks) {
        let ranks = wanted[rank.index()];
        let (who, how) = match sets.ask(Time(1), &name(), rank, ranks, &none).expect("in order") {
            Asked::Waits => continue,
            Asked::Complete(_) => (ranks.clone(), "formed"),
            Asked::Failed(ended) => (ended.ranks, "failed"),
        };
        for rank in who {
            assert!(asks(&rank), "{rank} was answered without a request");
            assert_eq!(ended.insert(rank, how), None, "{rank} was answered twice");
        }
    }
    for rank in (0..3).map(Rank).filter(asks) {
        let ranks = wanted[rank.index()];
        let agreed = ranks.iter().all(|other| wanted[other.index()] == ranks);
        let how = ended.get(&rank).copied().unwrap_or("waits");
        *outcomes.get_mut(how).expect("one of the three") += 1;
        if agreed && how != "formed" {
            // A member may have had its part in a call that failed before.
            assert_eq!(how, "failed", "{rank} {wanted:?} {order:?}");
        }
        assert!(agreed || how != "formed", "{rank} {wanted:?} {order:?}");
        // Whoever waits needs a rank that has asked for nothing more, or for a list that lacks the ranks of a ring.
        if how == "waits" {
            assert!(sets.waiting().any(|waiting| !waiting.missing.contains(&rank)));
        }
    }
    let pending: usize = sets.pending.values().sum();
    let waits = (0..3).map(Rank).filter(|rank| asks(rank) && !ended.contains_key(rank)).count();
    assert_eq!(pending, waits * limits::SET_OF_MEMBERS_RANKS_MIN);
}
