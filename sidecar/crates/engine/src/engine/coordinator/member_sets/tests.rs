use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

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

fn refuse(sets: &mut MemberSets, rank: u32, ranks: &[u32]) -> Option<Ended> {
    sets.refuse(&name(), Rank(rank), &list(ranks), &BTreeSet::new(), no()).expect("in order")
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
    // The others are told, too, when they ask for the list for the first time; then all meet again.
    for rank in [2, 0] {
        assert_eq!(failed(ask(&mut sets, rank, &[0, 1, 2])), (list(&[rank]), text.clone()));
    }
    for rank in [0, 2] {
        assert_eq!(ask(&mut sets, rank, &[0, 1, 2]), Asked::Waits);
    }
    assert!(matches!(ask(&mut sets, 1, &[0, 1, 2]), Asked::Complete(_)));
    assert_eq!(failed(ask(&mut sets, 1, &[0, 1])), (list(&[1]), text));
    assert!(sets.names.is_empty() && sets.failed.by_cause.is_empty() && sets.failed.total == 0);
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
    assert_eq!((sets.failed.total, sets.names.len()), (0, 0));
}

#[test]
fn a_refused_request_is_the_part_of_its_rank_whoever_comes_first() {
    let none = BTreeSet::new();
    let mut sets = MemberSets::default();
    ask(&mut sets, 0, &[0, 1]);
    let ended = refuse(&mut sets, 1, &[0, 1]).expect("rank 0 waits");
    assert_eq!((ended.ranks, sets.failed.total, sets.names.len()), (list(&[0]), 0, 0));
    let mut sets = MemberSets::default();
    assert_eq!(refuse(&mut sets, 1, &[0, 1]), None);
    assert_eq!(failed(ask(&mut sets, 0, &[0, 1])).0, list(&[0]));
    assert!(sets.names.is_empty());
    // Refused on both; and a set of one.
    for (rank, ranks) in [(1, &[0, 1][..]), (0, &[0, 1]), (2, &[2])] {
        assert_eq!(refuse(&mut sets, rank, ranks), None);
    }
    assert!(sets.names.is_empty());
    // Another list of the same name is not concerned.
    ask(&mut sets, 2, &[1, 2]);
    assert_eq!(refuse(&mut sets, 1, &[0, 1]), None);
    assert!(matches!(ask(&mut sets, 1, &[1, 2]), Asked::Complete(_)));
    // A rank has one request by a name.
    ask(&mut sets, 2, &[1, 2]);
    let beside = sets.refuse(&name(), Rank(2), &list(&[2, 3]), &none, no());
    assert!(beside.is_err_and(|why| why.contains("of which a request by this name waits")));
}

#[test]
fn each_rank_gets_all_failures_in_their_order() {
    let (mut sets, none) = (MemberSets::default(), BTreeSet::new());
    for why in ["first", "second"] {
        let failure = Failure::new(Cause::Refused, why);
        assert_eq!(sets.refuse(&name(), Rank(1), &list(&[0, 1, 2]), &none, failure), Ok(None));
    }
    // Rank 0 withdraws a third one; it has been told of the others.
    let text = |sets: &mut MemberSets, rank| failed(ask(sets, rank, &[0, 1, 2])).1;
    assert_eq!([text(&mut sets, 0), text(&mut sets, 0)], ["first", "second"]);
    assert_eq!(ask(&mut sets, 0, &[0, 1, 2]), Asked::Waits);
    let ended = sets.withdraw(&name(), Rank(0), &none, Failure::new(Cause::Refused, "third")).expect("it waited");
    assert_eq!(ended.ranks, list(&[0]));
    assert_eq!(text(&mut sets, 1), "third");
    assert_eq!([text(&mut sets, 2), text(&mut sets, 2), text(&mut sets, 2)], ["first", "second", "third"]);
    assert_eq!((sets.failed.total, sets.names.len()), (0, 0));
}

/// Requests of a rank do not look at all failed calls of the name: at this number of them that takes minutes.
#[test]
fn requests_do_not_scan_failed_calls() {
    let mut sets = MemberSets::default();
    for _ in 0..4_000 {
        refuse(&mut sets, 1, &[1, 2]);
    }
    let start = Instant::now();
    for _ in 0..100_000 {
        assert!(matches!(ask(&mut sets, 2, &[2]), Asked::Complete(_)));
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// Calls of long lists that wait by one name do not make the other requests by it slow.
#[test]
fn requests_do_not_scan_long_lists() {
    let (mut sets, none) = (MemberSets::default(), BTreeSet::new());
    for rank in 0..60 {
        let ranks: Vec<Rank> = (0..4_096).filter(|other| *other >= 64 || *other == rank).map(Rank).collect();
        assert_eq!(sets.ask(Time(1), &name(), Rank(rank), &ranks, &none), Ok(Asked::Waits));
    }
    let all: Vec<u32> = (0..62).collect();
    let start = Instant::now();
    for _ in 0..1_000 {
        assert_eq!(ask(&mut sets, 60, &all), Asked::Waits);
        sets.withdraw(&name(), Rank(60), &none, no()).expect("it waited");
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
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
    assert!(sets.failed.total > 0);
    sets.all_joined();
    assert_eq!((sets.failed.total, sets.names.len()), (0, 0));
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
    // One rank causes 4,096, and all together 16,384: the one with most of them is named.
    let refuse = |sets: &mut MemberSets, n: usize, rank: u32| {
        let failure = no().with_rank(Rank(rank));
        assert_eq!(sets.refuse(&named(n), Rank(rank), &list(&[rank, 9]), &none, failure), Ok(None));
        sets.overflow()
    };
    let mut of_one = MemberSets::default();
    let over = (0..5_000).find_map(|n| refuse(&mut of_one, n, 2).map(|over| (n, over)));
    assert_eq!(over, Some((4_096, (Some(Rank(2)), 4_097 * 256))));
    for (rank, count) in [(2, 4_000), (3, 4_001), (4, 4_000), (5, 4_000), (6, 383)] {
        assert!((0..count).all(|n| refuse(&mut sets, n, rank).is_none()));
    }
    assert_eq!(refuse(&mut sets, 383, 6), Some((Some(Rank(3)), 4_001 * 256)));
}

/// Ascending ranks by bits.
fn of_bits(bits: u32) -> Vec<Rank> {
    (0..4).filter(|rank| bits >> rank & 1 == 1).map(Rank).collect()
}

/// All lists with a rank, of this number of ranks.
fn lists_with(rank: u32, ranks: u32) -> Vec<Vec<Rank>> {
    (1_u32..1 << ranks).filter(|bits| bits >> rank & 1 == 1).map(of_bits).collect()
}

/// All orders in which ranks can make two requests each.
fn orders(left: &mut Vec<u8>, order: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
    if left.iter().all(|left| *left == 0) {
        all.push(order.clone());
    }
    for rank in 0..left.len() {
        if left[rank] > 0 {
            left[rank] -= 1;
            order.push(rank);
            orders(left, order, all);
            order.pop();
            left[rank] += 1;
        }
    }
}

fn all_orders(ranks: usize) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    orders(&mut vec![2; ranks], &mut Vec::new(), &mut all);
    all
}

/// Requests of ranks by one name, each as soon as the one before it is answered.
struct SmallWorld<'a> {
    wanted: &'a [Vec<&'a [Rank]>],
    sets: MemberSets,
    /// How each request of each rank was answered.
    answers: Vec<Vec<&'static str>>,
    /// The requests that each rank has made.
    made: Vec<usize>,
}

impl<'a> SmallWorld<'a> {
    /// All ranks make their requests; the order says which rank is next if it can.
    fn of(wanted: &'a [Vec<&'a [Rank]>], order: &[usize]) -> Self {
        let (made, answers) = (vec![0; wanted.len()], vec![Vec::new(); wanted.len()]);
        let mut world = Self { wanted, sets: MemberSets::default(), answers, made };
        for rank in order {
            world.step(*rank);
        }
        // Ranks that had to wait in their turn.
        while (0..wanted.len()).any(|rank| world.step(rank)) {}
        world.check();
        world
    }

    /// The rank makes its next request. False when it waits, or has made all.
    fn step(&mut self, rank: usize) -> bool {
        let (made, id) = (self.made[rank], Rank(u32::try_from(rank).expect("few")));
        if made == self.wanted[rank].len() || self.waits(rank) {
            return false;
        }
        let ranks = self.wanted[rank][made];
        self.made[rank] += 1;
        let asked = self.sets.ask(Time(1), &name(), id, ranks, &BTreeSet::new()).expect("in order");
        let (who, how) = match asked {
            Asked::Waits => return true,
            Asked::Complete(_) => (ranks.to_vec(), "formed"),
            Asked::Failed(ended) => (ended.ranks, "failed"),
        };
        for who in who.iter().map(|rank| rank.index()) {
            assert!(self.waits(who), "rank {who} was answered without a request");
            self.answers[who].push(how);
            if how == "formed" {
                assert_eq!(self.wanted[who][self.made[who] - 1], ranks, "{:?}", self.wanted);
                assert_eq!(self.times(who, ranks), self.times(rank, ranks), "{:?}", self.wanted);
            }
        }
        true
    }

    fn waits(&self, rank: usize) -> bool {
        self.made[rank] > self.answers[rank].len()
    }

    /// How often a rank has asked for a list.
    fn times(&self, rank: usize, ranks: &[Rank]) -> usize {
        self.wanted[rank][..self.made[rank]].iter().filter(|list| **list == ranks).count()
    }

    /// Whoever waits, waits for a rank that has asked for the list less often, and in the end for one that waits for nobody.
    fn check(&self) {
        let missing: Vec<Vec<Rank>> = self.sets.waiting().map(|waiting| waiting.missing).collect();
        for rank in (0..self.wanted.len()).filter(|rank| self.waits(*rank)) {
            let late = self.late(rank);
            assert!(!late.is_empty() && missing.contains(&late), "{rank} {:?} {missing:?}", self.wanted);
            let mut reached: BTreeSet<Rank> = late.into_iter().collect();
            for _ in 0..self.wanted.len() {
                let next: Vec<Rank> =
                    reached.iter().filter(|rank| self.waits(rank.index())).flat_map(|r| self.late(r.index())).collect();
                reached.extend(next);
            }
            assert!(reached.iter().any(|rank| !self.waits(rank.index())), "{rank} {:?}", self.wanted);
            assert!(reached.iter().all(|other| other.index() != rank), "{rank} {:?}", self.wanted);
        }
        let pending: usize = self.sets.pending.values().sum();
        let waits = (0..self.wanted.len()).filter(|rank| self.waits(*rank)).count();
        assert_eq!(pending, waits * limits::SET_OF_MEMBERS_RANKS_MIN);
    }

    /// The members of the list for which a rank waits that have asked for it less often.
    fn late(&self, rank: usize) -> Vec<Rank> {
        let ranks = self.wanted[rank][self.made[rank] - 1];
        let own = self.times(rank, ranks);
        ranks.iter().copied().filter(|other| self.times(other.index(), ranks) < own).collect()
    }
}

fn count(world: &SmallWorld<'_>, outcomes: &mut BTreeMap<&'static str, usize>) {
    for rank in 0..world.wanted.len() {
        let waits = usize::from(world.waits(rank));
        *outcomes.entry("waits").or_default() += waits;
        for how in &world.answers[rank] {
            *outcomes.entry(how).or_default() += 1;
        }
    }
}

/// Each of three ranks makes two requests by one name: all combinations of lists, in all orders. Each request is answered
/// at most once, sets are formed by the n-th requests of all their ranks, and nobody waits for one that has asked as often.
#[test]
fn all_small_worlds_agree() {
    let orders = all_orders(3);
    let lists: Vec<Vec<Vec<Rank>>> = (0..3).map(|rank| lists_with(rank, 3)).collect();
    let two = |rank: usize| {
        let of = &lists[rank];
        of.iter().flat_map(move |first| of.iter().map(move |second| vec![&first[..], &second[..]])).collect::<Vec<_>>()
    };
    let (first, second, third) = (two(0), two(1), two(2));
    let mut outcomes = BTreeMap::new();
    for zero in &first {
        for one in &second {
            for two in &third {
                let wanted = [zero.clone(), one.clone(), two.clone()];
                for order in &orders {
                    count(&SmallWorld::of(&wanted, order), &mut outcomes);
                }
            }
        }
    }
    assert!(outcomes.len() == 3 && outcomes.values().all(|count| *count > 10_000), "{outcomes:?}");
}

/// The same for four ranks, drawn.
#[test]
fn small_worlds_of_four_ranks_agree() {
    let orders = all_orders(4);
    let lists: Vec<Vec<Vec<Rank>>> = (0..4).map(|rank| lists_with(rank, 4)).collect();
    let mut outcomes = BTreeMap::new();
    // A linear congruential generator: the same worlds in every run.
    let mut state = 1_u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).expect("31 bits") % below
    };
    for _ in 0..50_000 {
        // Few lists, so that ranks agree often.
        let few = [draw(8), draw(8), draw(8)];
        let mut of = |rank: usize| lists[rank][few[draw(3)]].as_slice();
        let wanted: Vec<Vec<&[Rank]>> = (0..4).map(|rank| vec![of(rank), of(rank)]).collect();
        let order = &orders[draw(orders.len())];
        count(&SmallWorld::of(&wanted, order), &mut outcomes);
    }
    assert!(outcomes.len() == 3 && outcomes.values().all(|count| *count > 1_000), "{outcomes:?}");
}

/// Ranks that ask for their sets in one order form all of them, however far some are ahead.
#[test]
fn ranks_that_agree_on_an_order_never_fail() {
    let orders = all_orders(4);
    for (first, second) in (1..16).flat_map(|first| (1..16).map(move |second| (of_bits(first), of_bits(second)))) {
        let of = |rank: u32| {
            let both = [first.as_slice(), second.as_slice()];
            both.into_iter().filter(|list| list.contains(&Rank(rank))).collect::<Vec<_>>()
        };
        let wanted: Vec<Vec<&[Rank]>> = (0..4).map(of).collect();
        for order in orders.iter().step_by(7) {
            let world = SmallWorld::of(&wanted, order);
            for (answers, wanted) in world.answers.iter().zip(&wanted) {
                assert_eq!(*answers, vec!["formed"; wanted.len()], "{wanted:?}");
            }
        }
    }
}
