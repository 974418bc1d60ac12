//! Random failures, and hosts that come and go: rules that always hold, and where it leads when failures stop.

use proptest::prelude::*;

use super::super::exclusion::CooldownRange;
use super::cluster::{Cluster, Source, bounds, seconds};
use super::*;

#[derive(Clone, Debug)]
enum Step {
    Deliver(usize),
    Pass(u64),
    Fail(usize),
    Succeed(usize),
    LoseSidecar(usize),
    LoseAgent(usize),
    Silence(usize),
    Hang(usize),
    List(Vec<u32>),
    Drain(usize, bool),
    Scale(u32),
    Preempt(usize, bool),
    ReportHung(usize),
    ReportUnreachable(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        30 => (0_usize..100).prop_map(Step::Deliver),
        4 => (0_u64..40).prop_map(Step::Pass),
        3 => (0_usize..100).prop_map(Step::Fail),
        1 => (0_usize..100).prop_map(Step::LoseSidecar),
        1 => (0_usize..100).prop_map(Step::LoseAgent),
        1 => (0_usize..100).prop_map(Step::Silence),
        1 => (0_usize..100).prop_map(Step::Hang),
        2 => proptest::collection::vec(0_u32..5, 1..6).prop_map(Step::List),
        1 => (0_usize..5, any::<bool>()).prop_map(|(host, undo)| Step::Drain(host, undo)),
        1 => (0_u32..12).prop_map(Step::Scale),
        1 => (0_usize..100).prop_map(Step::ReportHung),
        1 => (0_usize..100, 0_usize..100).prop_map(|(one, other)| Step::ReportUnreachable(one, other)),
        1 => (0_usize..100, any::<bool>()).prop_map(|(at, is_host)| Step::Preempt(at, is_host)),
    ];
    proptest::collection::vec(step, 1..200)
}

fn nth<K: Copy + Ord, V>(map: &std::collections::BTreeMap<K, V>, at: usize) -> Option<K> {
    if map.is_empty() { None } else { map.keys().nth(at % map.len()).copied() }
}

fn take(cluster: &mut Cluster, step: Step) {
    match step {
        Step::Deliver(at) if !cluster.answers.is_empty() => cluster.deliver(at % cluster.answers.len()),
        Step::Deliver(_) => {
            cluster.pass(seconds(1));
        }
        Step::Pass(more) => {
            cluster.pass(seconds(more));
        }
        Step::Fail(at) => nth(&cluster.workers, at).into_iter().for_each(|worker| cluster.end_worker(worker, false)),
        Step::Succeed(at) => nth(&cluster.workers, at).into_iter().for_each(|worker| cluster.end_worker(worker, true)),
        Step::LoseSidecar(at) => nth(&cluster.sidecars, at).into_iter().for_each(|index| cluster.end_sidecar(index)),
        Step::LoseAgent(at) => nth(&cluster.agents, at).into_iter().for_each(|agent| cluster.end_agent(agent)),
        Step::Silence(at) => {
            if let Some(sidecar) = nth(&cluster.sidecars, at) {
                cluster.silent.insert(Source::Sidecar(sidecar));
                cluster.answers.retain(|(source, _)| *source != Source::Sidecar(sidecar));
            }
        }
        Step::Hang(at) => {
            if let Some(worker) = nth(&cluster.workers, at) {
                cluster.silent.insert(Source::Worker(worker));
                cluster.answers.retain(|(source, _)| *source != Source::Worker(worker));
            }
        }
        Step::List(slots) => cluster.list(&slots),
        // What does not fit is refused, and changes nothing.
        Step::Drain(host, undo) => drop(cluster.drain(["a", "b", "c", "d", "e"][host], undo)),
        Step::Preempt(at, true) => {
            nth(&cluster.agents, at)
                .into_iter()
                .for_each(|agent| cluster.event(Event::Preempted { agent, worker: None }));
        }
        Step::Preempt(at, false) => {
            nth(&cluster.workers, at).into_iter().for_each(|worker| cluster.terminate_worker(worker));
        }
        Step::ReportHung(at) => {
            let (worker, membership) = (nth(&cluster.workers, at), cluster.number());
            let coordinator = cluster.plan.committed().map(|members| members.seats[0].sidecar);
            if let (Some(worker), Some(sidecar)) = (worker, coordinator) {
                cluster.event(Event::Hung { sidecar, worker, membership });
            }
        }
        Step::ReportUnreachable(one, other) => {
            let (one, other, membership) =
                (nth(&cluster.sidecars, one), nth(&cluster.sidecars, other), cluster.number());
            if let (Some(sidecar), Some(peer)) = (one, other) {
                cluster.event(Event::Unreachable { sidecar, peer, membership });
                if sidecar % 2 == 0 {
                    cluster.event(Event::Linked { sidecar, peer });
                }
            }
        }
        Step::Scale(workers) => drop(cluster.scale(workers)),
    }
}

fn end_workers_of_silent_sidecars(cluster: &mut Cluster) {
    let is_silent = |sidecar: &u32| cluster.silent.contains(&Source::Sidecar(*sidecar));
    let lost: Vec<u32> =
        cluster.workers.iter().filter(|(_, sidecar)| is_silent(sidecar)).map(|(worker, _)| *worker).collect();
    lost.into_iter().for_each(|worker| cluster.end_worker(worker, false));
}

fn with_cooldown(min: u32, max: u32, spares: u32) -> Bounds {
    let cooldown = Some(CooldownRange { min: seconds(5), max: seconds(60) });
    Bounds {
        cooldown,
        local_max: 3,
        replaces_stalled: true,
        spares,
        elastic_timeout: seconds(3_600),
        ..bounds(min, min, max)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    /// The cluster checks each order that it gets.
    #[test]
    fn a_job_uses_all_slots_when_failures_stop(min in 1_u32..5, more in 0_u32..8, spares in 0_u32..3, first in proptest::collection::vec(0_u32..5, 1..6), steps in steps(), last in proptest::collection::vec(0_u32..5, 1..6)) {
        let max = min + more;
        let mut cluster = Cluster::new(with_cooldown(min, max, spares));
        cluster.list(&first);
        for step in steps {
            take(&mut cluster, step);
        }
        cluster.list(&last);
        // A silent sidecar answers no more, but is replaced: for want of an answer, or because its workers lose it and end.
        cluster.run_for(seconds(100));
        end_workers_of_silent_sidecars(&mut cluster);
        // Each cool-down ends, also that of a replacement.
        cluster.run_for(seconds(3_000));
        if cluster.ended.is_some() {
            return Ok(());
        }
        let slots: u32 = cluster.plan.hosts.iter().map(|host| u32::try_from(host.offered()).expect("few")).sum();
        let size = u32::try_from(cluster.ranks().len()).expect("few");
        let wanted = cluster.plan.wanted_size;
        if slots >= min {
            let awaited: Vec<u32> = cluster.ranks().into_iter().filter(|worker| !cluster.plan.has_come(*worker)).collect();
            prop_assert!(awaited.is_empty() || !cluster.plan.waits_for_others(), "{awaited:?} are waited for");
            // A host that is not used any more stays when it is the only one with the state and there is no other place.
            let is_stuck = wanted == 1 && cluster.ranks().iter().all(|worker| !cluster.plan.is_wanted(*worker));
            // Programs that never join run to their end. So before any worker has joined, one that hangs is waited for.
            let hangs = |worker: &u32| cluster.silent.contains(&Source::Worker(*worker));
            let is_waiting = cluster.plan.first_attached.is_none() && cluster.workers.keys().any(hangs);
            let is_right = size == slots.min(wanted) || is_stuck || is_waiting;
            prop_assert!(is_right, "{} of {} slots, {} are wanted", size, slots, wanted);
        }
        let size = cluster.workers.len();
        prop_assert!(size <= (max + spares) as usize, "{} workers run, at most {}", size, max + spares);
    }

    #[test]
    fn a_job_ends_with_its_workers(min in 1_u32..4, steps in steps(), ends in proptest::collection::vec((any::<bool>(), 0_usize..100), 60)) {
        let mut cluster = Cluster::new(with_cooldown(min, min + 4, 1));
        cluster.list(&[2, 2, 2]);
        for step in steps {
            take(&mut cluster, step);
        }
        cluster.list(&[2, 2, 2]);
        cluster.run_for(seconds(300));
        if cluster.ended.is_some() || cluster.number() == 0 {
            return Ok(());
        }
        let rank_0 = cluster.ranks()[0];
        let runs = cluster.workers.contains_key(&rank_0);
        cluster.end_worker(rank_0, true);
        for (success, at) in ends {
            take(&mut cluster, if success { Step::Succeed(at) } else { Step::Fail(at) });
            cluster.deliver_all();
        }
        cluster.run_for(seconds(200));
        prop_assert!(!runs || cluster.ended.is_some(), "{:?}", cluster.workers);
    }
}
