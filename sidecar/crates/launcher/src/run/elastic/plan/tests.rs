//! Each rule of the plan.

use super::cluster::{Cluster, Source, bounds, seconds};
use super::*;

fn enters(actions: &[Action]) -> Vec<(u32, u64, u32, u32)> {
    let enter = |action: &Action| match action {
        Action::Enter { sidecar, membership, added, removed } => Some((*sidecar, *membership, *added, *removed)),
        _ => None,
    };
    actions.iter().filter_map(enter).collect()
}

fn started(actions: &[Action]) -> Vec<u32> {
    let start = |action: &Action| match action {
        Action::StartWorker { worker, .. } => Some(*worker),
        _ => None,
    };
    actions.iter().filter_map(start).collect()
}

fn committed(actions: &[Action]) -> Vec<(u64, Cause)> {
    let commit = |action: &Action| match action {
        Action::Notice(Notice::Committed { members, cause, .. }) => Some((members.number, *cause)),
        _ => None,
    };
    actions.iter().filter_map(commit).collect()
}

#[test]
fn a_job_starts_with_all_slots_up_to_the_most() {
    let cluster = Cluster::running(bounds(2, 2, 5), &[2, 2, 2]);
    assert_eq!(cluster.ranks(), [0, 1, 2, 3, 4]);
    assert_eq!(committed(&cluster.log), [(1, Cause::Start)]);
    assert!(enters(&cluster.log).is_empty(), "no sidecar of the first membership has one to leave");
    let sidecars: Vec<u32> =
        cluster.plan.committed().expect("committed").seats.iter().map(|seat| seat.sidecar).collect();
    assert_eq!(sidecars, [0, 0, 1, 1, 2]);
}

#[test]
fn a_host_beyond_the_most_workers_is_not_started() {
    let cluster = Cluster::running(bounds(2, 2, 4), &[2, 2, 2]);
    assert_eq!(cluster.agents.len(), 2, "{:?}", cluster.agents);
}

#[test]
fn a_job_waits_for_the_slots_that_it_needs_to_start() {
    let mut cluster = Cluster::new(bounds(4, 2, 8));
    cluster.list(&[3]);
    cluster.run_for(seconds(5));
    assert_eq!(cluster.number(), 0);
    assert!(cluster.log.contains(&Action::Notice(Notice::Waiting { have: 3, needed: 4 })), "{:?}", cluster.log);
    cluster.list(&[3, 1]);
    cluster.run_for(seconds(20));
    assert_eq!(cluster.ranks().len(), 4);
}

#[test]
fn too_few_slots_for_too_long_end_the_job_with_the_count() {
    let mut cluster = Cluster::new(bounds(4, 2, 8));
    cluster.list(&[3]);
    cluster.run_for(seconds(599));
    assert_eq!(cluster.ended, None);
    cluster.run_for(seconds(2));
    assert_eq!(cluster.ended, Some(End::TooFew { have: 3, needed: 4, cause: None }));
}

#[test]
fn hosts_that_cannot_become_more_are_not_waited_for() {
    let mut cluster = Cluster::new(Bounds { has_discovery: false, ..bounds(4, 2, 8) });
    cluster.list(&[3]);
    cluster.deliver_all();
    assert_eq!(cluster.ended, Some(End::TooFew { have: 3, needed: 4, cause: None }));
}

#[test]
fn survivors_go_on_at_once_and_the_slot_is_refilled_after_that() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    let (before, then) = (cluster.log.len(), cluster.now);
    cluster.end_worker(1, false);
    // Only sidecars answer; the new worker is not up yet.
    cluster.silent.insert(Source::Worker(4));
    cluster.deliver_all();
    assert_eq!(cluster.now, then, "no time has to pass");
    assert_eq!(cluster.ranks(), [0, 2, 3]);
    let actions = cluster.since(before);
    assert_eq!(committed(actions), [(2, Cause::Worker(1))]);
    assert_eq!(enters(actions), [(0, 2, 0, 1), (1, 2, 0, 1)]);
    assert_eq!(started(actions), [4], "the slot is refilled");
    cluster.event(Event::Attached { worker: 4 });
    cluster.silent.clear();
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [0, 2, 3, 4], "survivors keep their order, the new worker is last");
    assert_eq!(committed(cluster.since(before)), [(2, Cause::Worker(1)), (3, Cause::Added)]);
}

#[test]
fn rank_0_is_the_oldest_survivor() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    cluster.end_worker(0, false);
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [1, 2, 3, 4]);
    cluster.end_worker(1, false);
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [2, 3, 4, 5]);
}

#[test]
fn the_workers_of_a_lost_sidecar_are_stopped_and_its_host_cools_down() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    let before = cluster.log.len();
    cluster.end_sidecar(0);
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [2, 3]);
    let actions = cluster.since(before);
    assert!(actions.contains(&Action::StopWorker { worker: 0 }) && actions.contains(&Action::StopWorker { worker: 1 }));
    assert_eq!(committed(actions), [(2, Cause::Sidecar(0))]);
    cluster.run_for(seconds(10));
    assert_eq!(cluster.ranks(), [2, 3, 4, 5], "the host is used again");
    let sidecars = cluster.plan.committed().expect("committed").sidecars();
    assert_eq!(sidecars, [1, 2], "with another sidecar");
}

#[test]
fn a_lost_host_is_replaced_by_another_one() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2, 2]);
    cluster.end_agent(0);
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [2, 3, 4, 5]);
    assert!(cluster.agents.values().any(|host| host == "c"));
}

#[test]
fn new_hosts_do_not_disturb_before_their_workers_have_attached() {
    let mut cluster = Cluster::running(bounds(2, 2, 8), &[2]);
    let before = cluster.log.len();
    cluster.silent.extend([Source::Worker(2), Source::Worker(3)]);
    cluster.list(&[2, 2]);
    cluster.run_for(seconds(3));
    assert_eq!(started(cluster.since(before)), [2, 3]);
    assert!(enters(cluster.since(before)).is_empty(), "training goes on");
    cluster.event(Event::Attached { worker: 2 });
    cluster.deliver_all();
    assert!(enters(cluster.since(before)).is_empty(), "until all have attached");
    cluster.event(Event::Attached { worker: 3 });
    cluster.deliver_all();
    assert_eq!(enters(cluster.since(before)), [(0, 2, 2, 0)], "a new sidecar has nothing to leave");
    assert_eq!(cluster.ranks(), [0, 1, 2, 3]);
}

#[test]
fn a_new_worker_that_ends_or_does_not_attach_is_dropped() {
    let mut cluster = Cluster::running(bounds(2, 2, 8), &[2]);
    cluster.silent.extend([Source::Worker(2), Source::Worker(3)]);
    cluster.list(&[2, 2]);
    cluster.run_for(seconds(3));
    let before = cluster.log.len();
    cluster.end_worker(2, false);
    cluster.event(Event::Attached { worker: 3 });
    cluster.silent.insert(Source::Worker(4));
    cluster.deliver_all();
    assert!(enters(cluster.since(before)).is_empty(), "its replacement is waited for");
    cluster.run_for(seconds(99));
    assert!(enters(cluster.since(before)).is_empty());
    cluster.run_for(seconds(2));
    assert_eq!(cluster.ranks(), [0, 1, 3]);
    let actions = cluster.since(before);
    assert!(actions.contains(&Action::Notice(Notice::NotAttached { worker: 4 })), "{actions:?}");
    let excluded = Notice::SlotExcluded { host: "b".to_owned(), slot: 0, cooldown: None };
    assert!(actions.contains(&Action::Notice(excluded)), "{actions:?}");
}

#[test]
fn a_loss_does_not_wait_for_new_workers_but_takes_those_that_have_attached() {
    let mut cluster = Cluster::running(bounds(3, 1, 8), &[3]);
    cluster.silent.extend([Source::Worker(3), Source::Worker(4), Source::Worker(5)]);
    cluster.list(&[3, 2]);
    cluster.run_for(seconds(3));
    cluster.event(Event::Attached { worker: 4 });
    cluster.deliver_all();
    let then = cluster.now;
    cluster.end_worker(0, false);
    cluster.deliver_all();
    assert_eq!((cluster.ranks(), cluster.now), (vec![1, 2, 4], then));
    cluster.event(Event::Attached { worker: 3 });
    cluster.event(Event::Attached { worker: 5 });
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [1, 2, 4, 3, 5], "the others follow in the next change");
}

#[test]
fn a_loss_while_entering_replaces_the_change() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    cluster.end_worker(1, false);
    cluster.answers.sort_by_key(|(source, _)| *source);
    while enters(&cluster.log).is_empty() {
        cluster.deliver(0);
    }
    cluster.end_worker(3, false);
    cluster.deliver_all();
    assert_eq!(committed(&cluster.log)[1], (3, Cause::Worker(1)), "the second one was not committed");
    assert_eq!(cluster.ranks()[..2], [0, 2]);
}

#[test]
fn a_new_worker_that_is_lost_while_entering_makes_the_others_enter_another_membership() {
    let mut cluster = Cluster::running(bounds(2, 2, 3), &[2]);
    cluster.list(&[2, 1]);
    while enters(&cluster.log).is_empty() {
        if cluster.answers.is_empty() {
            cluster.pass(seconds(1));
        } else {
            cluster.deliver(0);
        }
    }
    cluster.end_worker(2, false);
    cluster.silent.insert(Source::Worker(3));
    cluster.deliver_all();
    assert_eq!((cluster.number(), cluster.ranks()), (3, vec![0, 1]), "its epoch was over");
}

#[test]
fn below_the_least_the_survivors_are_prepared_and_wait() {
    let mut cluster = Cluster::running(bounds(4, 4, 4), &[2, 2]);
    let before = cluster.log.len();
    cluster.end_agent(1);
    cluster.deliver_all();
    let changes = |action: &&Action| matches!(action, Action::Change { sidecar: 0, .. });
    assert_eq!(cluster.since(before).iter().filter(changes).count(), 1, "{:?}", cluster.since(before));
    assert!(enters(cluster.since(before)).is_empty());
    assert!(cluster.workers.contains_key(&0) && cluster.workers.contains_key(&1), "survivors stay");
    cluster.run_for(seconds(20));
    assert_eq!(cluster.ranks(), [0, 1, 4, 5]);
}

#[test]
fn survivors_wait_for_the_elastic_timeout() {
    let mut cluster = Cluster::running(bounds(4, 4, 4), &[2, 2]);
    cluster.list(&[2]);
    cluster.end_agent(1);
    cluster.run_for(seconds(599));
    assert_eq!(cluster.ended, None);
    cluster.run_for(seconds(2));
    assert_eq!(cluster.ended, Some(End::TooFew { have: 2, needed: 4, cause: Some(Cause::Agent(1)) }));
}

#[test]
fn hosts_that_disappear_are_removed_in_order() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    let before = cluster.log.len();
    cluster.list(&[0, 2]);
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [2, 3]);
    let actions = cluster.since(before);
    assert_eq!(enters(actions), [(1, 2, 0, 2)]);
    let position = |wanted: &Action| actions.iter().position(|action| action == wanted).expect("it is done");
    let commit = position(&Action::Commit { sidecar: 1, membership: 2 });
    assert!(position(&Action::StopWorker { worker: 0 }) > commit);
    assert!(position(&Action::CloseSidecar { sidecar: 0 }) > commit);
    assert!(position(&Action::DropAgent { agent: 0 }) > position(&Action::CloseSidecar { sidecar: 0 }));
    assert_eq!(committed(actions), [(2, Cause::Removed)]);
}

#[test]
fn a_worker_that_leaves_while_its_host_is_removed_does_not_end_the_job() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    cluster.list(&[0, 2]);
    while enters(&cluster.log).is_empty() {
        cluster.deliver(0);
    }
    cluster.end_worker(0, true);
    cluster.end_worker(1, false);
    cluster.deliver_all();
    assert_eq!((cluster.ranks(), cluster.ended), (vec![2, 3], None));
    assert_eq!(committed(&cluster.log)[1], (2, Cause::Removed));
}

#[test]
fn a_host_that_disappears_stays_while_there_are_too_few_others() {
    let mut cluster = Cluster::running(bounds(4, 3, 4), &[2, 2]);
    cluster.list(&[0, 2]);
    cluster.run_for(seconds(60));
    assert_eq!(cluster.ranks(), [0, 1, 2, 3]);
    cluster.list(&[0, 2, 2]);
    cluster.run_for(seconds(10));
    assert_eq!(cluster.ranks(), [2, 3, 4, 5]);
}

#[test]
fn the_last_host_with_the_state_stays_until_others_have_it() {
    let mut cluster = Cluster::running(bounds(2, 2, 4), &[2]);
    cluster.list(&[0, 2]);
    cluster.run_for(seconds(10));
    assert_eq!(cluster.ranks(), [2, 3]);
    let sizes: Vec<usize> = cluster
        .log
        .iter()
        .filter_map(|action| match action {
            Action::Notice(Notice::Committed { members, .. }) => Some(members.seats.len()),
            _ => None,
        })
        .collect();
    assert_eq!(sizes, [2, 4, 2], "they are together once");
}

#[test]
fn after_a_success_no_membership_begins() {
    let mut cluster = Cluster::running(bounds(4, 2, 8), &[2, 2]);
    cluster.end_worker(2, true);
    let before = cluster.log.len();
    cluster.list(&[2, 2, 2]);
    cluster.run_for(seconds(10));
    assert!(cluster.since(before).is_empty(), "{:?}", cluster.since(before));
    [0, 1].into_iter().for_each(|worker| cluster.end_worker(worker, true));
    assert_eq!(cluster.ended, None);
    cluster.end_worker(3, true);
    assert_eq!(cluster.ended, Some(End::Success));
}

#[test]
fn new_workers_do_not_wait_for_one_that_ended_before_they_came() {
    let mut cluster = Cluster::running(bounds(1, 1, 2), &[1]);
    cluster.list(&[1, 1]);
    // Its function is over when the sidecars are released, and it closes its session.
    cluster.event(Event::Left { worker: 0 });
    cluster.run_for(seconds(20));
    assert_eq!(cluster.ranks(), [0, 1]);
    let before = cluster.log.len();
    cluster.end_worker(0, true);
    assert!(cluster.since(before).contains(&Action::StopWorker { worker: 1 }), "{:?}", cluster.since(before));
}

#[test]
fn a_worker_that_ends_within_its_membership_stops_nobody() {
    let mut cluster = Cluster::running(bounds(1, 1, 2), &[1]);
    cluster.list(&[1, 1]);
    cluster.event(Event::Left { worker: 0 });
    cluster.event(Event::Attached { worker: 0 });
    cluster.run_for(seconds(20));
    cluster.event(Event::Left { worker: 0 });
    let before = cluster.log.len();
    cluster.end_worker(0, true);
    assert!(!cluster.since(before).contains(&Action::StopWorker { worker: 1 }), "{:?}", cluster.since(before));
}

#[test]
fn a_failure_after_a_success_is_the_jobs() {
    let mut cluster = Cluster::running(bounds(4, 2, 8), &[2, 2]);
    [(2, true), (1, false), (0, true), (3, false)].into_iter().for_each(|(worker, success)| {
        cluster.end_worker(worker, success);
    });
    assert_eq!(cluster.ended, Some(End::Failed(Cause::Worker(1))));
}

#[test]
fn new_workers_are_stopped_when_the_job_succeeds() {
    let mut cluster = Cluster::running(bounds(2, 2, 8), &[2]);
    cluster.silent.insert(Source::Worker(3));
    cluster.list(&[2, 2]);
    cluster.run_for(seconds(3));
    cluster.end_worker(0, true);
    cluster.end_worker(1, true);
    cluster.deliver_all();
    assert_eq!(cluster.ended, Some(End::Success));
}

#[test]
fn a_command_that_never_joins_succeeds() {
    let mut cluster = Cluster::new(bounds(2, 2, 2));
    cluster.silent.extend([Source::Worker(0), Source::Worker(1)]);
    cluster.list(&[2]);
    cluster.run_for(seconds(1_000));
    cluster.end_worker(0, true);
    cluster.run_for(seconds(1_000));
    cluster.end_worker(1, true);
    assert_eq!(cluster.ended, Some(End::Success));
}

#[test]
fn a_worker_that_ends_without_joining_does_not_leave_others_waiting() {
    let mut cluster = Cluster::new(bounds(2, 2, 2));
    cluster.silent.insert(Source::Worker(1));
    cluster.list(&[2]);
    cluster.deliver_all();
    cluster.end_worker(1, true);
    cluster.run_for(seconds(101));
    assert_eq!(cluster.ended, Some(End::NeverJoined { worker: 1 }));
}

#[test]
fn without_a_survivor_the_first_loss_ends_the_job() {
    let mut cluster = Cluster::running(bounds(2, 1, 2), &[2]);
    cluster.end_worker(1, false);
    cluster.end_worker(0, false);
    assert_eq!(cluster.ended, Some(End::Failed(Cause::Worker(1))));
}

#[test]
fn a_command_that_fails_at_once_ends_the_job_after_a_few_attempts() {
    for has_discovery in [true, false] {
        let mut cluster = Cluster::new(Bounds { has_discovery, ..bounds(2, 2, 4) });
        cluster.silent.extend((0..40).map(Source::Worker));
        cluster.list(&[2]);
        cluster.deliver_all();
        for worker in 0..40 {
            if cluster.ended.is_none() {
                assert!(cluster.workers.contains_key(&worker), "worker {worker} is started");
                cluster.end_worker(worker, false);
                cluster.run_for(seconds(1));
            }
        }
        assert_eq!(cluster.ended, Some(End::Failed(Cause::Worker(0))));
        let attempts = started(&cluster.log).len();
        assert!((5..=6).contains(&attempts), "three for a slot, not {attempts} for two");
    }
}

#[test]
fn the_only_host_that_cannot_be_reached_ends_the_job_at_once() {
    let mut cluster = Cluster::new(bounds(2, 2, 4));
    cluster.silent.insert(Source::Agent(0));
    cluster.list(&[2]);
    cluster.end_agent(0);
    assert_eq!(cluster.ended, Some(End::Failed(Cause::Agent(0))));
}

#[test]
fn a_host_that_cannot_be_reached_is_left_out() {
    let mut cluster = Cluster::new(bounds(2, 2, 4));
    cluster.silent.insert(Source::Agent(0));
    cluster.list(&[2, 2]);
    cluster.run_for(seconds(29));
    assert_eq!(cluster.ranks(), [0, 1], "the other one is not kept waiting for long");
    cluster.run_for(seconds(2));
    assert!(cluster.log.contains(&Action::DropAgent { agent: 0 }), "{:?}", cluster.log);
    cluster.run_for(seconds(20));
    assert_eq!(cluster.ranks(), [0, 1, 2, 3], "another attempt succeeds");
}

#[test]
fn a_sidecar_that_does_not_answer_counts_as_lost() {
    for stage in ["prepare", "enter"] {
        let mut cluster = Cluster::running(bounds(6, 2, 6), &[2, 2, 2]);
        cluster.end_worker(0, false);
        if stage == "enter" {
            while enters(&cluster.log).is_empty() {
                cluster.deliver(0);
            }
        }
        cluster.answers.retain(|(source, _)| *source != Source::Sidecar(1));
        cluster.silent.insert(Source::Sidecar(1));
        cluster.run_for(seconds(14));
        assert_eq!(cluster.number(), 1);
        cluster.run_for(seconds(2));
        assert_eq!(cluster.ranks()[..3], [1, 4, 5], "{stage}");
        let silent = |action: &Action| matches!(action, Action::Notice(Notice::Silent { sidecar: 1, .. }));
        assert!(cluster.log.iter().any(silent), "{stage}");
    }
}

#[test]
fn workers_may_train_on_before_a_change_that_only_adds() {
    let mut cluster = Cluster::running(bounds(2, 2, 4), &[1, 1]);
    cluster.list(&[1, 1, 1]);
    while enters(&cluster.log).is_empty() {
        if cluster.answers.is_empty() {
            cluster.pass(seconds(1));
        } else {
            cluster.deliver(0);
        }
    }
    let entered = std::mem::take(&mut cluster.answers);
    cluster.run_for(seconds(10_000));
    assert_eq!((cluster.number(), cluster.ended), (1, None));
    assert!(cluster.log.contains(&Action::Notice(Notice::NotEntered { membership: 2 })));
    cluster.answers = entered;
    cluster.deliver(0);
    cluster.answers.clear();
    cluster.run_for(seconds(16));
    let silent = |action: &Action| matches!(action, Action::Notice(Notice::Silent { sidecar: 1, .. }));
    assert!(cluster.log.iter().any(silent), "the epoch is over for all when one has entered");
}

#[test]
fn the_reset_limit_ends_the_job_at_the_next_loss_but_not_for_new_hosts() {
    let mut cluster = Cluster::running(Bounds { reset_limit: Some(1), ..bounds(3, 1, 8) }, &[3]);
    cluster.end_worker(2, false);
    cluster.deliver_all();
    assert_eq!(cluster.ranks(), [0, 1]);
    let before = cluster.log.len();
    cluster.list(&[3, 3]);
    cluster.run_for(seconds(10));
    assert!(started(cluster.since(before)).is_empty());
    cluster.end_worker(0, false);
    assert_eq!(cluster.ended, Some(End::ResetLimit { limit: 1, cause: Cause::Worker(0) }));
}

#[test]
fn a_crowded_host_has_several_sidecars() {
    let cluster = Cluster::running(Bounds { local_max: 3, ..bounds(2, 2, 9) }, &[7]);
    let seats: Vec<u32> = cluster.plan.committed().expect("committed").seats.iter().map(|seat| seat.sidecar).collect();
    assert_eq!(seats, [0, 0, 0, 1, 1, 1, 2]);
}

#[test]
fn a_host_that_comes_back_gets_another_agent_and_sidecar() {
    let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
    cluster.list(&[2]);
    cluster.deliver_all();
    cluster.list(&[2, 2]);
    cluster.run_for(seconds(5));
    assert_eq!(cluster.ranks(), [0, 1, 4, 5]);
    assert_eq!(cluster.plan.committed().expect("committed").sidecars(), [0, 2]);
    assert_eq!(cluster.agents.keys().copied().collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn a_host_with_one_worker_gets_another_sidecar_when_it_fails() {
    let mut cluster = Cluster::running(bounds(2, 1, 2), &[1, 1]);
    cluster.end_worker(1, false);
    cluster.run_for(seconds(3));
    assert_eq!(cluster.ranks(), [0, 2]);
    assert_eq!(cluster.plan.committed().expect("committed").sidecars(), [0, 2], "the first one was left out once");
}
