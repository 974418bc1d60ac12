//! Tests of the begin and end of epochs, with orderly exits and losses.

use ronde_wire::{Cause, Control, Epoch, Failure, Rank, SidecarIndex, World};

use super::cluster::{Cluster, sum};
use crate::engine::{EngineConfig, EnginePhase};
use crate::event::Event;

const FOUR_ON_TWO: [u32; 4] = [0, 0, 1, 1];

#[test]
fn an_epoch_begins_when_all_ranks_have_attached() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO);
    cluster.connect();
    let early = cluster.submit(0, sum("t", &[1]));
    for rank in [3, 0, 2] {
        cluster.attach(Rank(rank));
        cluster.run();
    }
    assert!(cluster.failure(0, early).reason.contains("no epoch has begun"));
    let status = cluster.engines[0].status(cluster.now);
    assert_eq!((status.phase, status.ranks_missing), (EnginePhase::Waiting, vec![Rank(1)]));
    assert!(cluster.began.is_empty());
    cluster.attach(Rank(1));
    cluster.run();
    assert_eq!(cluster.began, [(0, Epoch(1)), (1, Epoch(1))]);
    let status = cluster.engines[1].status(cluster.now);
    assert_eq!((status.phase, status.ranks_in_epoch), (EnginePhase::Active, vec![Rank(2), Rank(3)]));
}

#[test]
fn attachments_survive_a_late_or_broken_link() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO);
    cluster.attach_all();
    cluster.drain_all();
    cluster.cut(0, 1);
    cluster.run();
    assert!(cluster.began.is_empty());
    cluster.connect();
    cluster.run();
    assert_eq!(cluster.began.len(), 2);
    assert!(cluster.ended.is_empty(), "the repeated list is not taken for the next epoch's");
}

#[test]
fn a_lost_list_of_attached_ranks_is_sent_again_on_the_same_link() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO);
    cluster.attach_all();
    cluster.drain_all();
    cluster.deliver((1, 0));
    cluster.event(0, Event::LinkDown { peer: SidecarIndex(1), reason: "reset".to_owned() });
    cluster.drain_all();
    cluster.engines[0] = crate::Engine::new(EngineConfig::new(SidecarIndex(0), cluster.world.clone()), cluster.now);
    cluster.run();
    cluster.attach(Rank(0));
    cluster.attach(Rank(1));
    cluster.advance(2_000);
    assert!(cluster.began.iter().filter(|(sidecar, _)| *sidecar == 1).count() >= 1, "{:?}", cluster.began);
}

#[test]
fn a_shutdown_names_the_rank_and_a_new_epoch_can_begin() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let pending = cluster.submit(0, sum("t", &[1]));
    cluster.close_session(3);
    cluster.run();
    let failure = cluster.failure(0, pending).clone();
    assert_eq!((failure.cause, failure.rank), (Cause::ShutDown, Some(Rank(3))));
    assert!(
        failure.reason.contains("has been shut down: rank 3 on sidecar 1 has left: the worker said goodbye"),
        "{failure}"
    );
    assert_eq!(cluster.ended.len(), 2);
    let after = cluster.submit(1, sum("t", &[1]));
    cluster.run();
    assert_eq!(*cluster.failure(1, after), failure, "what comes later fails with the first failure");
    // All ranks attach again; those that had not left do so with new sessions.
    for rank in 0..3 {
        cluster.close_session(rank);
    }
    cluster.attach_all();
    cluster.run();
    assert_eq!(cluster.began.last(), Some(&(1, Epoch(2))));
    let requests = cluster.submit_all(&sum("t", &[1]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    assert_eq!(cluster.admitted[0][0].seq.0, 1, "seq starts at 1 in each epoch");
}

#[test]
fn a_rank_that_attaches_again_before_the_epoch_ends_waits_for_the_next_one() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    cluster.close_session(3);
    cluster.attach(Rank(3));
    let early = cluster.submit(3, sum("t", &[1]));
    cluster.run();
    assert!(cluster.failure(3, early).cause == Cause::Refused, "{:?}", cluster.failure(3, early));
    for rank in 0..3 {
        cluster.attach(Rank(rank));
    }
    cluster.run();
    assert_eq!(cluster.began.len(), 4);
    assert_eq!(cluster.ended.len(), 2);
}

#[test]
fn operations_ordered_before_a_shutdown_complete() {
    let mut cluster = Cluster::new(&[0, 0, 1, 1, 2]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("last", &[64]));
    cluster.run();
    // Sidecar 0 is done and its ranks close while the last chunks are still in flight to the others.
    cluster.execute_on(0);
    cluster.close_session(0);
    cluster.close_session(1);
    cluster.run();
    assert!(cluster.is_pending(requests[2]), "not failed");
    assert_eq!(cluster.engines[1].status(cluster.now).phase, EnginePhase::Closing);
    assert!(!cluster.engines[0].is_drained(), "the others still need this process");
    let late = cluster.submit(2, sum("more", &[1]));
    cluster.run();
    assert!(cluster.failure(2, late).cause == Cause::ShutDown);
    cluster.execute_all();
    assert!(cluster.all_completed(&requests));
    assert_eq!(cluster.ended.len(), 3);
    assert!(cluster.engines.iter().all(crate::Engine::is_drained));
}

#[test]
fn all_ranks_close_at_once_in_any_order() {
    for first in 0..4_u32 {
        let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
        let requests = cluster.submit_all(&sum("t", &[64]));
        cluster.run();
        for n in 0..4 {
            cluster.close_session((first + n) % 4);
        }
        cluster.run();
        assert!(cluster.all_completed(&requests));
        assert_eq!(cluster.ended.len(), 2);
        assert!(cluster.ended.iter().all(|(_, _, failure)| failure.cause == Cause::ShutDown));
    }
}

#[test]
fn operations_that_cannot_finish_after_a_shutdown_fail_with_the_shutdown() {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("a", &[4]));
    let unordered = cluster.submit(0, sum("b", &[4]));
    cluster.run();
    // Rank 1 leaves during its operation, and its memory goes with it.
    cluster.close_session(1);
    let (_, epoch, seq) = cluster.unexecuted[1];
    cluster.event(1, Event::ExecutionFailed { epoch, seq, reason: "its memory is gone".to_owned(), plugin: false });
    cluster.run();
    let failure = cluster.common_failure(&requests).clone();
    assert_eq!((failure.cause, failure.rank), (Cause::ShutDown, Some(Rank(1))));
    assert_eq!(*cluster.failure(0, unordered), failure);
    assert_eq!(cluster.ended.len(), 3);
    assert!(cluster.engines.iter().all(crate::Engine::is_drained));
}

#[test]
fn a_lost_rank_ends_everything_at_once() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    cluster.executes = false;
    let ordered = cluster.submit_all(&sum("a", &[4]));
    let waiting = cluster.submit(1, sum("b", &[4]));
    cluster.run();
    let killed = Failure::new(Cause::RankLost, "rank 2 was killed by signal 9").with_rank(Rank(2));
    cluster.leave(2, killed);
    cluster.run();
    let failure = cluster.common_failure(&ordered).clone();
    assert_eq!(failure, *cluster.failure(1, waiting));
    assert_eq!(failure.reason, "rank 2 was killed by signal 9");
    assert_eq!((failure.cause, failure.rank), (Cause::RankLost, Some(Rank(2))));
    cluster.execute_all();
    assert!(cluster.engines.iter().all(|e| e.stats().executed == 0), "late executions mean nothing");
}

#[test]
fn a_rank_lost_during_a_shutdown_does_not_fail_others() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("a", &[4]));
    cluster.run();
    cluster.close_session(0);
    cluster.run();
    cluster.leave(3, Failure::new(Cause::RankLost, "its process exited"));
    cluster.run();
    cluster.execute_all();
    assert!(cluster.all_completed(&requests));
}

#[test]
fn a_sidecar_lost_during_a_shutdown_is_not_awaited() {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("a", &[4]));
    cluster.run();
    cluster.close_session(0);
    cluster.run();
    cluster.stopped[2] = true;
    cluster.cut(0, 2);
    cluster.run();
    for rank in [0, 1] {
        assert!(cluster.failure(rank, requests[rank as usize]).reason.contains("sidecar 2 (rank 2) is lost"));
    }
    assert!(cluster.engines[0].is_drained() && cluster.engines[1].is_drained());
}

/// A list that was in flight when the epoch began names ranks that now take part in it.
#[test]
fn a_stale_list_of_attached_ranks_begins_no_epoch() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.leave(0, Failure::new(Cause::RankLost, "its process exited"));
    cluster.drain_all();
    cluster.attach(Rank(0));
    cluster.control(0, 1, (0, 0), Control::Attached { ranks: vec![Rank(1)] });
    cluster.drain_all();
    assert_eq!(cluster.began.len(), 2, "rank 1 has not attached since epoch 1 began: {:?}", cluster.began);
    cluster.run();
    cluster.attach(Rank(1));
    cluster.run();
    assert_eq!(cluster.began[2..], [(0, Epoch(2)), (1, Epoch(2))]);
}

/// The coordinator's own operations may still need a sidecar that has finished the epoch.
#[test]
fn a_sidecar_lost_after_it_finished_ends_the_operations_that_need_it() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("a", &[4]));
    cluster.run();
    cluster.close_session(1);
    cluster.run();
    cluster.execute_on(1);
    cluster.run();
    assert!(cluster.is_pending(requests[0]));
    cluster.stopped[1] = true;
    cluster.cut(0, 1);
    cluster.run();
    assert!(!cluster.is_pending(requests[0]), "rank 0 waits for chunks that never come");
    assert!(cluster.engines[0].is_drained());
}

/// Sidecars that still need it, or have not received the end yet, would treat its exit as a loss.
#[test]
fn a_finished_sidecar_stays_until_all_have_finished() {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("last", &[64]));
    cluster.run();
    cluster.close_session(2);
    cluster.run();
    cluster.execute_on(2);
    cluster.run();
    assert_eq!(cluster.ended.iter().map(|(sidecar, ..)| *sidecar).collect::<Vec<_>>(), [2]);
    assert!(!cluster.engines[2].is_drained(), "the others have not finished");
    cluster.execute_all();
    assert!(cluster.all_completed(&requests) && cluster.engines.iter().all(crate::Engine::is_drained));
}

/// It does not wait for ever: without the coordinator there is no sidecar to wait for.
#[test]
fn a_finished_sidecar_leaves_when_the_coordinator_is_lost() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    cluster.submit_all(&sum("last", &[64]));
    cluster.run();
    cluster.close_session(1);
    cluster.run();
    cluster.execute_on(1);
    cluster.run();
    assert!(!cluster.engines[1].is_drained());
    cluster.stopped[0] = true;
    cluster.cut(0, 1);
    cluster.run();
    assert!(cluster.engines[1].is_drained());
}

/// Lanes and control links are separate connections: messages of one may be read after later messages of the other.
#[test]
fn a_lane_closed_by_the_coordinator_does_not_hide_the_shutdown_reason() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let pending = cluster.submit(1, sum("t", &[4]));
    cluster.run();
    cluster.leave(0, Failure::new(Cause::RankLost, "rank 0 exited with code 3"));
    let closed = |closed| Event::LaneDown { peer: SidecarIndex(0), closed, reason: "closed by the peer".to_owned() };
    cluster.event(1, closed(true));
    cluster.run();
    assert_eq!(cluster.failure(1, pending).rank, Some(Rank(0)), "{}", cluster.failure(1, pending));

    let mut cluster = Cluster::new(&[0, 1]).started();
    let pending = cluster.submit(1, sum("t", &[4]));
    cluster.run();
    cluster.event(1, closed(false));
    cluster.run();
    assert_eq!(cluster.failure(1, pending).sidecar, Some(SidecarIndex(0)));
}

/// A coordinator that was only paused learns that the others have ended the epoch that it still waits for.
#[test]
fn a_sidecar_that_gave_up_on_the_coordinator_reports_it() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("a", &[4]));
    cluster.run();
    cluster.close_session(1);
    cluster.event(1, Event::LinkDown { peer: SidecarIndex(0), reason: "silence".to_owned() });
    cluster.run();
    assert!(!cluster.is_pending(requests[0]) && !cluster.is_pending(requests[1]));
    assert!(cluster.engines[0].is_drained());
}

#[test]
fn a_sidecar_with_another_world_is_named() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO);
    let other = World::new([0, 0, 1, 1, 1].map(SidecarIndex).into()).expect("a world");
    cluster.engines[1] = crate::Engine::new(EngineConfig::new(SidecarIndex(1), other), cluster.now);
    cluster.connect();
    cluster.attach_all();
    cluster.run();
    assert_eq!(cluster.ended.len(), 2, "both sidecars' sessions are told");
    for (_, _, failure) in &cluster.ended {
        assert!(failure.reason.contains("sidecar 1 (ranks 2-3) cannot go on: its configuration"), "{failure}");
    }
    assert_eq!(cluster.began, [(0, Epoch(1))]);
}

#[test]
fn a_rank_that_leaves_while_the_epoch_begins_ends_it() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO);
    cluster.connect();
    cluster.attach_all();
    cluster.drain_all();
    while cluster.loaded().contains(&(1, 0)) {
        cluster.deliver((1, 0));
    }
    cluster.drain_all();
    cluster.leave(2, Failure::new(Cause::RankLost, "its process exited"));
    cluster.run();
    assert_eq!(cluster.ended.len(), 2);
    assert!(cluster.ended[0].2.reason.contains("rank 2 on sidecar 1 has left: its session ended before epoch 1 began"));
}

#[test]
fn messages_of_other_epochs_are_dropped_and_counted() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    cluster.close_session(0);
    cluster.run();
    for rank in 1..4 {
        cluster.close_session(rank);
    }
    cluster.attach_all();
    cluster.run();
    let pending = cluster.submit(0, sum("t", &[1]));
    cluster.run();
    let ended = || Control::EpochEnd { failure: Failure::new(Cause::RankLost, "old") };
    for epoch in [0, 1, 3, u64::MAX] {
        let before = cluster.engines[1].stats().stale_frames;
        cluster.control(1, 0, (epoch, 0), ended());
        assert_eq!(cluster.engines[1].stats().stale_frames, before + 1);
        let before = cluster.engines[0].stats().stale_frames;
        cluster.control(0, 1, (epoch, 0), Control::Failed { failure: Failure::new(Cause::Bug, "old") });
        assert_eq!(cluster.engines[0].stats().stale_frames, before + 1);
    }
    cluster.control(1, 0, (1, 0), Control::EpochBegin { world: cluster.world.clone(), eager_bytes: 0 });
    cluster.run();
    assert!(cluster.is_pending(pending) && cluster.ended.len() == 2, "epoch 2 goes on");
    let again = (1..4).map(|rank| cluster.submit(rank, sum("t", &[1]))).count();
    cluster.run();
    assert!(again == 3 && cluster.outcome(0, pending).is_ok());
}
