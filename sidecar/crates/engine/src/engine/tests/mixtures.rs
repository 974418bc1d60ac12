//! Random mixtures of joins, messages, groups, added and removed sets, refusals and withdrawals.
//!
//! As long as all sidecars are correct, no epoch ends and no sidecar is disconnected, whatever ranks submit and in
//! whatever order. When all ranks withdraw what they wait for, every request has exactly one answer and new operations
//! work.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use ronde_wire::{
    Codec, Collective, DType, Detail, Group, Pair, Rank, ReduceOp, Request, RequestId, SetId, set_of_members_name,
};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::PendingStatus;

const PLACEMENT: [u32; 5] = [0, 1, 1, 2, 0];
const RANKS: u32 = 5;

/// One step of a mixture; numbers are taken modulo the number of choices.
#[derive(Clone, Debug)]
enum Step {
    /// One rank submits a request.
    Submit {
        rank: u32,
        set: u32,
        what: What,
    },
    /// All ranks submit it, starting with this one.
    Everybody {
        first: u32,
        set: u32,
        what: What,
    },
    Withdraw {
        request: usize,
    },
    Deliver {
        wire: usize,
    },
    Execute {
        operation: usize,
    },
}

#[derive(Clone, Debug)]
enum What {
    Reduce {
        name: usize,
        odd: u8,
    },
    Grouped {
        name: usize,
        size: u32,
    },
    Gather {
        name: usize,
    },
    Join {
        name: usize,
    },
    Barrier,
    Message {
        other: u32,
        sends: bool,
        count: u64,
    },
    AddSet {
        ranks: u8,
    },
    /// Named by 0 or 1; the ranks of the list are the bits.
    AddSetOfMembers {
        name: u8,
        ranks: u8,
    },
    RemoveSet {
        set: u32,
    },
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        8 => (0_usize..3, 0_u8..10).prop_map(|(name, odd)| What::Reduce { name, odd }),
        3 => (0_usize..3, 1_u32..3).prop_map(|(name, size)| What::Grouped { name, size }),
        2 => (0_usize..3).prop_map(|name| What::Gather { name }),
        3 => prop_oneof![40 => Just(0_usize), 1 => Just(1), 2 => Just(2)].prop_map(|name| What::Join { name }),
        1 => Just(What::Barrier),
        4 => (0..RANKS, any::<bool>(), 0_u64..1)
            .prop_map(|(other, sends, count)| What::Message { other, sends, count }),
        3 => prop_oneof![1 => Just(3_u8), 1 => 1_u8..32].prop_map(|ranks| What::AddSet { ranks }),
        2 => (0_u8..2, prop_oneof![2 => Just(3_u8), 1 => Just(6_u8), 2 => 1_u8..32])
            .prop_map(|(name, ranks)| What::AddSetOfMembers { name, ranks }),
        3 => prop_oneof![4 => Just(1_u32), 1 => 0_u32..4].prop_map(|set| What::RemoveSet { set }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let set = || prop_oneof![6 => Just(0_u32), 3 => Just(1), 1 => Just(2)];
    prop_oneof![
        3 => (0..RANKS, set(), what()).prop_map(|(rank, set, what)| Step::Submit { rank, set, what }),
        5 => (0..RANKS, set(), what()).prop_map(|(first, set, what)| Step::Everybody { first, set, what }),
        1 => any::<usize>().prop_map(|request| Step::Withdraw { request }),
        40 => any::<usize>().prop_map(|wire| Step::Deliver { wire }),
        6 => any::<usize>().prop_map(|operation| Step::Execute { operation }),
    ]
}

/// The request of a rank.
fn asked(rank: u32, set: u32, what: &What) -> Request {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    const JOINS: [&str; 2] = ["join", "another join"];
    let set = SetId(set);
    let made = match *what {
        What::Reduce { name, odd: 0 } => request(NAMES[name], Collective::Broadcast { root: Rank(9) }, &[4]),
        What::Reduce { name, odd: 1 } => request(NAMES[name], Collective::AllReduce { op: ReduceOp::Max }, &[4]),
        What::Reduce { name, odd: 2 } => Request { codec: Codec::F16, ..sum(NAMES[name], &[4]) },
        What::Reduce { name, .. } => sum(NAMES[name], &[4]),
        What::Grouped { name: tensor, size } => {
            Request { group: Some(Group { name: name("g"), size }), ..sum(NAMES[tensor], &[4]) }
        }
        What::Gather { name } => request(NAMES[name], Collective::AllGather, &[u64::from(rank), 2]),
        What::Join { name: 2 } => {
            // It is refused: a join has no group.
            let group = Some(Group { name: name("g"), size: 1 });
            Request { group, ..request("join", Collective::Join, &[0]) }
        }
        What::Join { name } => Request { dtype: DType::U8, ..request(JOINS[name], Collective::Join, &[0]) },
        What::Barrier => request("barrier", Collective::Barrier, &[0]),
        What::Message { other, sends, count } => {
            let (me, other) = (Rank(rank), Rank(other));
            let pair = if sends { Pair { from: me, to: other } } else { Pair { from: other, to: me } };
            let collective =
                if sends { Collective::Send { to: other, tag: 0 } } else { Collective::Recv { from: other, tag: 0 } };
            request(pair.message_name(0, count).as_str(), collective, &[3])
        }
        What::AddSet { ranks } => {
            let ranks = (0..RANKS).filter(|rank| ranks >> rank & 1 == 1).map(Rank).collect();
            request("add", Collective::AddSet { ranks }, &[0])
        }
        What::AddSetOfMembers { name, ranks } => {
            let ranks = (0..RANKS).filter(|rank| ranks >> rank & 1 == 1).map(Rank).collect();
            let name = set_of_members_name(&name.to_string()).expect("a short name");
            request(name.as_str(), Collective::AddSetOfMembers { ranks }, &[0])
        }
        What::RemoveSet { set } => request("remove", Collective::RemoveSet { set: SetId(set) }, &[0]),
    };
    Request { set, ..made }
}

struct Play {
    cluster: Cluster,
    submitted: Vec<(u32, RequestId)>,
}

impl Play {
    fn new() -> Self {
        let mut cluster = Cluster::with_sets(&PLACEMENT, &[&[1, 2, 4]]).started();
        cluster.executes = false;
        Self { cluster, submitted: Vec::new() }
    }

    fn step(&mut self, step: &Step) {
        let cluster = &mut self.cluster;
        match step {
            Step::Submit { rank, set, what } => {
                self.submitted.push((*rank, cluster.submit(*rank, asked(*rank, *set, what))));
            }
            Step::Everybody { first, set, what } => {
                for rank in (0..RANKS).map(|rank| (rank + first) % RANKS) {
                    self.submitted.push((rank, cluster.submit(rank, asked(rank, *set, what))));
                }
            }
            Step::Withdraw { request } if !self.submitted.is_empty() => {
                let (rank, request) = self.submitted[request % self.submitted.len()];
                cluster.withdraw(rank, request);
            }
            Step::Deliver { wire } => {
                let loaded = cluster.loaded();
                if !loaded.is_empty() {
                    cluster.deliver(loaded[wire % loaded.len()]);
                }
            }
            Step::Execute { operation } => {
                let executable = cluster.executable();
                if !executable.is_empty() {
                    cluster.execute(executable[operation % executable.len()]);
                }
            }
            Step::Withdraw { .. } => {}
        }
        self.cluster.drain_all();
    }

    fn execute_pending(&mut self) {
        for _ in 0..10_000 {
            self.cluster.run();
            // A rank may be ahead in a schedule, with an operation that the others have not submitted.
            match self.cluster.executable().first() {
                Some(at) => self.cluster.execute(*at),
                None => return,
            }
        }
        panic!("operations without end");
    }

    /// The same, with time to wait. The mixture may have left a schedule that expects other operations first. If all
    /// ranks wait for a later one, each sidecar finds its ranks out of order, but only after the schedule's patience.
    fn await_pending(&mut self) {
        for _ in 0..100 {
            self.execute_pending();
            if !self.cluster.pass_patience() {
                return;
            }
        }
        panic!("checks of the order without end");
    }

    /// All ranks withdraw their requests.
    fn give_up(&mut self) {
        self.execute_pending();
        for (rank, request) in self.submitted.clone() {
            if self.cluster.is_pending(request) {
                self.cluster.withdraw(rank, request);
            }
        }
        self.execute_pending();
        self.join_the_joined();
    }

    /// Joins cannot be withdrawn: the other ranks of the set join, too, with each name that was used for a join.
    fn join_the_joined(&mut self) {
        while let Some(first) = self.pending_joins().into_iter().next() {
            let (set, joins) = (first.set, self.pending_joins());
            let absent = |rank: &Rank| !joins.iter().any(|join| join.set == set && join.rank == *rank);
            for rank in self.ranks_of(set).into_iter().filter(absent) {
                let what = Request { set, dtype: DType::U8, ..request(first.name.as_str(), Collective::Join, &[0]) };
                self.cluster.submit(rank.0, what);
            }
            self.execute_pending();
        }
    }

    fn pending_joins(&self) -> Vec<PendingStatus> {
        let of = |sidecar: &crate::engine::Engine| sidecar.status(self.cluster.now).pending_requests;
        self.cluster.engines.iter().flat_map(of).filter(|pending| pending.collective == "JOIN").collect()
    }

    fn ranks_of(&self, set: SetId) -> Vec<Rank> {
        let sets = self.cluster.engines[0].status(self.cluster.now).process_sets;
        let found = sets.into_iter().find(|known| known.id == set).map(|known| known.ranks);
        found.unwrap_or_else(|| (0..RANKS).map(Rank).collect())
    }

    /// A new name works in the set of all ranks.
    fn works(&mut self) {
        let requests = self.cluster.submit_all(&sum("fresh", &[4]));
        self.execute_pending();
        assert!(self.cluster.all_completed(&requests));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn correct_sidecars_never_report_protocol_violations(steps in vec(step(), 1..300)) {
        let mut play = Play::new();
        steps.iter().for_each(|step| play.step(step));
        play.give_up();
        prop_assert!(play.cluster.ended.is_empty(), "{:?}", play.cluster.ended);
        prop_assert!(play.cluster.disconnects.is_empty(), "{:?}", play.cluster.disconnects);
        for (rank, request) in &play.submitted {
            let _ = play.cluster.outcome(*rank, *request);
        }
        play.works();
        let status = play.cluster.engines[0].status(play.cluster.now);
        prop_assert_eq!((status.pending, status.in_flight), (0, 0));
    }

    /// Joins complete: when all other ranks join with the same name, all of them get the same last rank.
    #[test]
    fn all_ranks_can_join_after_any_sequence_of_operations(steps in vec(step(), 1..300)) {
        let mut play = Play::new();
        steps.iter().for_each(|step| play.step(step));
        play.give_up();
        let join = Request { dtype: DType::U8, ..request("a fresh join", Collective::Join, &[0]) };
        let requests = play.cluster.submit_all(&join);
        play.execute_pending();
        let last: Vec<&Detail> = (0..)
            .zip(&requests)
            .map(|(rank, request)| &play.cluster.outcome(rank, *request).as_ref().expect("all have joined").detail)
            .collect();
        prop_assert!(last.iter().all(|detail| *detail == last[0] && matches!(detail, Detail::LastJoined(_))), "{last:?}");
        // The rounds of all names of the set of all ranks are reset.
        for name in ["a", "b", "c", "join"] {
            let requests = play.cluster.submit_all(&sum(name, &[4]));
            play.await_pending();
            prop_assert!(play.cluster.all_completed(&requests), "{name}");
        }
        prop_assert!(play.cluster.ended.is_empty() && play.cluster.disconnects.is_empty());
    }
}

/// The mixtures reach completions, refusals and mismatches, so that the tests above are meaningful.
#[test]
fn the_generated_mixtures_reach_every_outcome() {
    let mut runner = TestRunner::deterministic();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..300 {
        let steps = vec(step(), 1..300).new_tree(&mut runner).expect("a schedule").current();
        let mut play = Play::new();
        steps.iter().for_each(|step| play.step(step));
        play.give_up();
        for admission in play.cluster.admitted.iter().flatten() {
            let pair = admission.tensors[0].name.as_str().starts_with("message");
            *seen.entry("messages").or_default() += usize::from(pair);
            *seen.entry("orders with joined ranks").or_default() += usize::from(!admission.joined.is_empty());
            let of_set = !admission.joined.is_empty() && admission.topology.set != SetId::WORLD;
            *seen.entry("orders of sets with joined ranks").or_default() += usize::from(of_set);
            let added = admission.topology.set.0 > 1;
            *seen.entry("orders of added sets").or_default() += usize::from(added && !pair);
        }
        for (_, _, outcome) in &play.cluster.completed {
            let what = match outcome.as_ref().map(|done| &done.detail) {
                Ok(Detail::LastJoined(_)) => "joins",
                Ok(Detail::Set(_)) => "sets",
                Err(failure) => {
                    let words = [
                        "is not supported with Join",
                        "was removed",
                        "whose join has failed",
                        "another name",
                        "cannot be removed",
                    ];
                    let found = words.into_iter().find(|words| failure.reason.contains(words));
                    found.unwrap_or("other failures")
                }
                Ok(_) => "others",
            };
            *seen.entry(what).or_default() += 1;
        }
    }
    let expected = [
        "messages",
        "orders with joined ranks",
        "orders of sets with joined ranks",
        "orders of added sets",
        "joins",
        "sets",
        "is not supported with Join",
        "was removed",
        "whose join has failed",
        "another name",
        "cannot be removed",
    ];
    for what in expected {
        assert!(seen.get(what).is_some_and(|count| *count > 0), "no {what}: {seen:?}");
    }
}
