//! Tests with random interleavings: whatever the order of submissions, deliveries and executions, every request gets
//! exactly one answer, and all ranks agree on each use of a name.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use ronde_wire::{Cause, Collective, Failure, Rank, ReduceOp, RequestId};

use super::cluster::{Cluster, request, sum};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// One step of an interleaving; numbers are taken modulo the number of choices.
#[derive(Clone, Debug)]
enum Step {
    /// A rank uses a name, in a way that most ranks share, or one that is refused or does not fit.
    Submit {
        rank: u32,
        name: usize,
        odd: u8,
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
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u32..5, 0_usize..3, 0_u8..12).prop_map(|(rank, name, odd)| Step::Submit { rank, name, odd }),
        1 => any::<usize>().prop_map(|request| Step::Withdraw { request }),
        8 => any::<usize>().prop_map(|wire| Step::Deliver { wire }),
        3 => any::<usize>().prop_map(|operation| Step::Execute { operation }),
        1 => Just(Step::Wait),
    ]
}

/// What was submitted, by rank and name in order of use.
#[derive(Default)]
struct Log {
    uses: BTreeMap<(u32, usize), Vec<RequestId>>,
    all: Vec<(u32, RequestId)>,
}

impl Log {
    fn submit(&mut self, cluster: &mut Cluster, rank: u32, name: usize, odd: u8) {
        let uses = self.uses.entry((rank, name)).or_default();
        if uses.last().is_some_and(|last| cluster.is_pending(*last)) {
            return;
        }
        let what = match odd {
            0 => sum(NAMES[name], &[9]),
            1 => request(NAMES[name], Collective::Broadcast { root: Rank(77) }, &[4]),
            2 => request(NAMES[name], Collective::Reduce { op: ReduceOp::Adasum, root: Rank(0) }, &[4]),
            3 => request(NAMES[name], Collective::AllGather, &[u64::from(rank), 2]),
            _ => sum(NAMES[name], &[4]),
        };
        let request = cluster.submit(rank, what);
        cluster.drain_all();
        uses.push(request);
        self.all.push((rank, request));
    }

    fn play(&mut self, cluster: &mut Cluster, step: &Step) {
        match *step {
            Step::Submit { rank, name, odd } => self.submit(cluster, rank, name, odd),
            Step::Withdraw { request } if !self.all.is_empty() => {
                let (rank, request) = self.all[request % self.all.len()];
                cluster.withdraw(rank, request);
            }
            Step::Deliver { wire } => {
                let loaded = cluster.loaded();
                if !loaded.is_empty() {
                    cluster.deliver(loaded[wire % loaded.len()]);
                }
            }
            Step::Execute { operation } if !cluster.unexecuted.is_empty() => {
                cluster.execute(operation % cluster.unexecuted.len());
            }
            Step::Wait => {
                cluster.jump(50);
                cluster.wake_all();
            }
            Step::Withdraw { .. } | Step::Execute { .. } => {}
        }
        cluster.drain_all();
    }
}

fn execute_pending(cluster: &mut Cluster) {
    for _ in 0..1_000 {
        cluster.run();
        if cluster.unexecuted.is_empty() {
            return;
        }
        cluster.execute_all();
    }
    panic!("operations without end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The k-th use of a name has the same outcome on all ranks, and a job whose ranks use names equally often
    /// completes.
    #[test]
    fn ranks_agree_on_each_use_of_a_name(steps in vec(step(), 1..150)) {
        let mut cluster = Cluster::new(&[0, 1, 1, 2, 0]).started();
        cluster.executes = false;
        let mut log = Log::default();
        for step in &steps {
            log.play(&mut cluster, step);
        }
        execute_pending(&mut cluster);
        // Ranks that have used a name less often catch up.
        for name in 0..NAMES.len() {
            let most = (0..5).map(|rank| log.uses.get(&(rank, name)).map_or(0, Vec::len)).max().unwrap_or(0);
            for _ in 0..most {
                for rank in 0..5 {
                    if log.uses.get(&(rank, name)).map_or(0, Vec::len) < most {
                        log.submit(&mut cluster, rank, name, 9);
                    }
                }
                execute_pending(&mut cluster);
            }
            for used in 0..most {
                let ends: Vec<bool> =
                    (0..5).map(|rank| cluster.outcome(rank, log.uses[&(rank, name)][used]).is_ok()).collect();
                prop_assert!(ends.iter().all(|end| *end == ends[0]), "use {used} of {name}: {ends:?}");
            }
        }
        prop_assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
        let status = cluster.engines[0].status(cluster.now);
        prop_assert_eq!((status.negotiating, status.pending, status.in_flight), (0, 0, 0));
    }

    /// With ranks that leave or die and links that break at any time, every request gets exactly one answer, epochs end
    /// everywhere, and a new one can begin.
    #[test]
    fn every_request_completes_once(
        before in vec(step(), 0..60),
        end in 0_u8..4,
        culprit in 0_u32..5,
        after in vec(step(), 0..40),
    ) {
        let mut cluster = Cluster::new(&[0, 1, 1, 2, 0]).started();
        cluster.executes = false;
        let mut log = Log::default();
        before.iter().for_each(|step| log.play(&mut cluster, step));
        match end {
            0 => cluster.close_session(culprit),
            1 => cluster.leave(culprit, Failure::new(Cause::RankLost, "killed")),
            2 => cluster.cut(0, 1 + culprit as usize % 2),
            _ => cluster.cut(1, 2),
        }
        cluster.drain_all();
        after.iter().for_each(|step| log.play(&mut cluster, step));
        execute_pending(&mut cluster);
        for (rank, request) in &log.all {
            let _ = cluster.outcome(*rank, *request);
        }
        let mut ended: Vec<usize> = cluster.ended.iter().map(|(sidecar, ..)| *sidecar).collect();
        ended.sort_unstable();
        prop_assert_eq!(ended, [0, 1, 2], "each sidecar's epoch ends once");
        // Within an operation of the epoch all ranks that completed it got the same shape.
        let mut shapes = BTreeMap::new();
        for (_, _, outcome) in &cluster.completed {
            if let Ok(done) = outcome {
                let shape = shapes.entry((done.epoch, done.seq, done.tensor)).or_insert_with(|| done.shape.clone());
                prop_assert_eq!(&*shape, &done.shape);
            }
        }
        cluster.executes = true;
        cluster.connect();
        for rank in 0..5 {
            cluster.close_session(rank);
            cluster.attach(Rank(rank));
        }
        cluster.run();
        let requests = cluster.submit_all(&sum("again", &[4]));
        cluster.run();
        prop_assert!(cluster.all_completed(&requests));
    }
}
