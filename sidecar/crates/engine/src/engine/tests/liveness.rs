//! Tests of silence, lost links, pauses and stalls in virtual time.

use std::sync::Arc;

use ronde_wire::{Cause, Collective, Control, Failure, Group, Rank, Record, Request, SidecarIndex, World, limits};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;
use crate::event::Event;

const THREE: [u32; 4] = [0, 1, 1, 2];

/// Advances time while all workers but one send messages.
pub(super) fn advance_with_workers(cluster: &mut Cluster, ms: u64, silent: Option<u32>) {
    for _ in 0..ms / 100 {
        for rank in (0..).map(Rank).take(cluster.world.size()) {
            let sidecar = cluster.home(rank);
            if silent != Some(rank.0) && !cluster.stopped[sidecar] {
                cluster.event(sidecar, Event::RankAlive { rank });
            }
        }
        cluster.advance(100);
    }
}

#[test]
fn a_quiet_epoch_lasts() {
    let mut cluster = Cluster::new(&THREE).started();
    advance_with_workers(&mut cluster, 60_000, None);
    assert!(cluster.ended.is_empty() && cluster.notices.is_empty());
    assert!(cluster.engines[1].stats().heartbeats > 500);
    let status = cluster.engines[1].status(cluster.now);
    let to_coordinator = status.links.iter().find(|link| link.peer == SidecarIndex(0)).expect("a link");
    assert_eq!((to_coordinator.round_trip_us, to_coordinator.clock_offset_us), (Some(0), Some(0)));
}

#[test]
fn a_silent_sidecar_is_suspected_then_dead() {
    let mut cluster = Cluster::new(&THREE).started();
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    let pending = cluster.submit(0, sum("u", &[4]));
    cluster.run();
    cluster.stopped[1] = true;
    advance_with_workers(&mut cluster, 900, None);
    assert!(cluster.notices.is_empty());
    advance_with_workers(&mut cluster, 400, None);
    assert_eq!(cluster.notices.len(), 2, "one notice at each sidecar that is heard: {:?}", cluster.notices);
    let (_, sidecars, ranks, text) = cluster.notices[0].clone();
    assert_eq!((sidecars, ranks), (vec![SidecarIndex(1)], vec![]));
    assert!(text.contains("Silent for more than 1.0 seconds: sidecar 1 (ranks 1-2)."), "{text}");
    assert_eq!(cluster.engines[2].status(cluster.now).suspect_sidecars, [SidecarIndex(1)]);
    advance_with_workers(&mut cluster, 3_500, None);
    assert!(cluster.ended.is_empty(), "not before the peer timeout");
    advance_with_workers(&mut cluster, 400, None);
    let failure = cluster.failure(0, pending);
    assert_eq!((failure.cause, failure.sidecar), (Cause::SidecarLost, Some(SidecarIndex(1))));
    assert!(failure.reason.contains("sidecar 1 (ranks 1-2) is lost: it has been silent for 5."), "{failure}");
    assert_eq!(cluster.ended.iter().map(|(sidecar, ..)| *sidecar).collect::<Vec<_>>(), [0, 2]);
    assert!(cluster.all_completed(&requests), "what was complete stays so");
}

#[test]
fn a_pause_of_three_seconds_changes_nothing() {
    for paused in [0, 1] {
        let mut cluster = Cluster::new(&THREE).started();
        let pending = cluster.submit_all(&sum("t", &[4]));
        cluster.stopped[paused] = true;
        advance_with_workers(&mut cluster, 3_000, None);
        cluster.stopped[paused] = false;
        advance_with_workers(&mut cluster, 500, None);
        assert!(cluster.ended.is_empty(), "{:?}", cluster.ended);
        let last = cluster.notices.last().expect("a notice");
        assert_eq!((last.1.len(), last.3.as_str()), (0, "All sidecars and ranks respond again."));
        let _ = pending;
    }
}

#[test]
fn a_sidecar_that_was_paused_itself_declares_no_peer_dead() {
    let mut cluster = Cluster::new(&THREE).started();
    // A suspended machine: time jumps for all. All sidecars wake and check their timers before they receive anything.
    cluster.jump(60_000);
    cluster.wake_all();
    cluster.run();
    assert!(cluster.ended.is_empty(), "{:?}", cluster.ended);
    assert!(cluster.engines.iter().all(|engine| engine.stats().pauses == 1));
    advance_with_workers(&mut cluster, 6_000, None);
    assert!(cluster.ended.is_empty());
    // A sidecar that stays silent after the grace period is detected.
    cluster.stopped[2] = true;
    advance_with_workers(&mut cluster, 5_300, None);
    assert_eq!(cluster.ended[0].2.sidecar, Some(SidecarIndex(2)));
}

#[test]
fn each_sidecar_ends_the_epoch_itself_when_the_coordinator_is_lost() {
    let mut cluster = Cluster::new(&THREE).started();
    let pending = cluster.submit(1, sum("t", &[4]));
    cluster.run();
    cluster.stopped[0] = true;
    advance_with_workers(&mut cluster, 1_300, None);
    assert!(cluster.notices.iter().any(|(at, sidecars, ..)| *at == 1 && *sidecars == [SidecarIndex(0)]));
    advance_with_workers(&mut cluster, 4_000, None);
    let failure = cluster.failure(1, pending);
    assert!(failure.reason.contains("sidecar 0 (rank 0), the coordinator, is lost: it has been silent"), "{failure}");
    assert_eq!(cluster.ended.len(), 2);
}

#[test]
fn an_epoch_end_that_was_lost_with_a_link_is_learned_from_heartbeats() {
    let mut cluster = Cluster::new(&THREE).started();
    let pending = cluster.submit(3, sum("t", &[4]));
    cluster.run();
    // Only the coordinator's end notices that the link was replaced; its next message to sidecar 2 is lost.
    cluster.event(0, Event::LinkDown { peer: SidecarIndex(2), reason: "reset".to_owned() });
    cluster.drain_all();
    cluster.tamper((0, 2), |_, message| *message = Control::Suspects { sidecars: vec![], ranks: vec![] });
    cluster.event(0, Event::LinkUp { peer: SidecarIndex(2), lanes: 1 });
    cluster.run();
    assert!(cluster.is_pending(pending));
    cluster.advance(200);
    assert!(cluster.failure(3, pending).reason.contains("it no longer takes part in epoch 1"));
}

#[test]
fn a_lost_link_ends_the_epoch_at_once() {
    let mut cluster = Cluster::new(&THREE).started();
    let pending = [(0, cluster.submit(0, sum("t", &[4]))), (3, cluster.submit(3, sum("t", &[4])))];
    cluster.run();
    cluster.cut(0, 1);
    cluster.run();
    for (rank, request) in pending {
        let failure = cluster.failure(rank, request);
        assert!(failure.reason.contains("sidecar 1 (ranks 1-2) is lost: connection reset"), "{failure}");
    }
    assert_eq!(cluster.ended.len(), 3, "sidecar 1 has lost its coordinator");
    assert!(cluster.ended.iter().any(|(at, _, f)| *at == 1 && f.sidecar == Some(SidecarIndex(0))));
}

#[test]
fn two_sidecars_that_cannot_reach_each_other_are_both_named() {
    let mut cluster = Cluster::new(&THREE).started();
    let pending = cluster.submit(0, sum("t", &[4]));
    cluster.run();
    cluster.cut(1, 2);
    cluster.run();
    let text = &cluster.failure(0, pending).reason;
    let one = text.contains("sidecar 1 cannot reach sidecar 2 (rank 3): connection reset");
    let other = text.contains("sidecar 2 cannot reach sidecar 1 (ranks 1-2): connection reset");
    assert!(one || other, "{text}");
    assert_eq!(cluster.ended.len(), 3);
}

#[test]
fn a_link_lost_before_the_epoch_is_not_fatal() {
    let mut cluster = Cluster::new(&THREE);
    cluster.connect();
    cluster.attach(Rank(1));
    cluster.attach(Rank(2));
    cluster.run();
    cluster.cut(0, 1);
    cluster.advance(10_000);
    assert!(cluster.ended.is_empty() && cluster.notices.is_empty());
    cluster.connect();
    cluster.attach(Rank(0));
    cluster.attach(Rank(3));
    cluster.run();
    assert_eq!(cluster.began.len(), 3);
}

#[test]
fn a_silent_worker_is_suspected_then_lost() {
    let mut cluster = Cluster::new(&THREE).started();
    let pending = cluster.submit(0, sum("t", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 1_300, Some(2));
    assert_eq!(cluster.notices.len(), 3);
    assert!(cluster.notices.iter().all(|(_, sidecars, ranks, _)| sidecars.is_empty() && *ranks == [Rank(2)]));
    cluster.event(1, Event::RankAlive { rank: Rank(2) });
    advance_with_workers(&mut cluster, 200, Some(2));
    assert!(cluster.notices[3..].iter().all(|(_, sidecars, ranks, _)| sidecars.is_empty() && ranks.is_empty()));
    advance_with_workers(&mut cluster, 5_200, Some(2));
    let failure = cluster.failure(0, pending);
    assert!(failure.reason.contains("rank 2 has been silent for 5.0 seconds: its process"), "{failure}");
    assert_eq!(cluster.sessions_ended.len(), 1);
    assert_eq!(cluster.sessions_ended[0].0, Rank(2));
}

#[test]
fn stall_reports_name_ranks_and_tensors_and_are_taken_back() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    let mut cluster = Cluster::of(world, |config| EngineConfig { stall_warning_ms: 2_000, ..config }).started();
    for n in 0..8 {
        let tensor = format!("t{n}");
        for rank in [0, 1] {
            cluster.submit(rank, sum(&tensor, &[4]));
        }
    }
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    assert!(cluster.notices.is_empty());
    let status = cluster.engines[0].status(cluster.now);
    assert_eq!((status.negotiating, status.waiting_tensors.len()), (8, 8));
    assert_eq!(status.waiting_tensors[0].missing, [Rank(2), Rank(3)]);
    advance_with_workers(&mut cluster, 800, None);
    let (at, sidecars, ranks, text) = cluster.notices[0].clone();
    assert_eq!((at, sidecars, ranks), (0, vec![], vec![Rank(2), Rank(3)]));
    let words = "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are \
                 waiting for remainder of ranks for more than 2 seconds.";
    assert!(text.contains(words), "{text}");
    assert!(text.contains("Missing ranks:\n2: [t0, t1, t2, t3, t4, t5 and 2 more]\n3: [t0"), "{text}");
    assert_eq!(cluster.notices.len(), 1, "once an interval");
    advance_with_workers(&mut cluster, 9_000, None);
    assert_eq!(cluster.notices.len(), 1, "a stall is reported once");
    for n in 0..8 {
        for rank in [2, 3] {
            cluster.submit(rank, sum(&format!("t{n}"), &[4]));
        }
    }
    cluster.run();
    advance_with_workers(&mut cluster, 2_500, None);
    assert_eq!(cluster.notices.len(), 2);
    assert_eq!(cluster.notices[1].2, []);
}

#[test]
fn what_waited_when_an_epoch_ended_is_known_until_the_next_one() {
    let mut cluster = Cluster::of(World::new(THREE.map(SidecarIndex).into()).expect("a world"), |it| it).started();
    for rank in [0, 1] {
        cluster.submit(rank, sum("late", &[4]));
    }
    cluster.run();
    cluster.advance(500);
    cluster.leave(3, Failure::new(Cause::RankLost, "its process was killed"));
    cluster.run();
    cluster.advance(700);
    let status = cluster.engines[0].status(cluster.now);
    assert!(status.waiting_tensors.is_empty(), "the epoch is over");
    let [waited] = &status.waited_at_end[..] else { panic!("{status:?}") };
    assert_eq!((waited.name.as_str(), &waited.missing[..]), ("late", &[Rank(2), Rank(3)][..]));
    assert!((1_200..1_400).contains(&waited.age_ms), "{waited:?}");
    assert!(cluster.engines[1].status(cluster.now).waited_at_end.is_empty(), "only the coordinator knows");
}

#[test]
fn a_stall_ends_the_epoch_after_the_configured_time() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    let adjust = |config| EngineConfig { stall_warning_ms: 2_000, stall_shutdown_ms: 3_000, ..config };
    let mut cluster = Cluster::of(world, adjust).started();
    // Joins wait by design, and joined ranks are not missing.
    let joined = cluster.submit(3, request("join", Collective::Join, &[0]));
    cluster.run();
    advance_with_workers(&mut cluster, 4_000, None);
    assert!(cluster.notices.is_empty() && cluster.ended.is_empty());
    let pending: Vec<_> = [0, 1].map(|rank| (rank, cluster.submit(rank, sum("late", &[4])))).into();
    cluster.run();
    advance_with_workers(&mut cluster, 2_900, None);
    assert_eq!((cluster.notices.len(), cluster.notices[0].2.as_slice()), (1, [Rank(2)].as_slice()));
    assert!(cluster.ended.is_empty());
    advance_with_workers(&mut cluster, 400, None);
    for (rank, request) in pending.into_iter().chain([(3, joined)]) {
        let failure = cluster.failure(rank, request);
        let words = "ronde has been shut down: tensors have waited for some ranks for more than 3.0 seconds, the limit of \
                     stall_shutdown.\nMissing ranks:\n2: [late]";
        assert!(failure.reason.contains(words), "{failure}");
        assert_eq!((failure.cause, failure.rank), (Cause::ShutDown, Some(Rank(2))));
    }
    assert_eq!(cluster.ended.len(), 3);
}

#[test]
fn no_stall_is_reported_when_reports_are_off() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    for (stall_warning_ms, reports) in [(60_000, 1), (u64::MAX, 0)] {
        let mut cluster = Cluster::of(world.clone(), |config| EngineConfig { stall_warning_ms, ..config }).started();
        let waiting = cluster.submit(0, sum("late", &[4]));
        cluster.run();
        advance_with_workers(&mut cluster, 90_000, None);
        assert_eq!(cluster.notices.len(), reports);
        assert!(cluster.ended.is_empty() && cluster.is_pending(waiting));
    }
}

#[test]
fn a_stall_shutdown_does_not_come_before_the_warning() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    let adjust = |config| EngineConfig { stall_warning_ms: 2_000, stall_shutdown_ms: 500, ..config };
    let mut cluster = Cluster::of(world, adjust).started();
    let status = cluster.engines[0].status(cluster.now);
    assert_eq!(
        status.notes,
        ["stall_shutdown of 0.5 seconds is shorter than stall_warning; 2.0 seconds is used instead"]
    );
    cluster.submit(0, sum("late", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    assert!(cluster.ended.is_empty());
    advance_with_workers(&mut cluster, 400, None);
    assert_eq!(cluster.ended.len(), 3);
}

#[test]
fn a_group_that_lacks_tensors_is_named() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    let adjust = |config| EngineConfig { stall_warning_ms: 2_000, stall_shutdown_ms: 4_000, ..config };
    let mut cluster = Cluster::of(world, adjust).started();
    let grouped = |tensor| Request { group: Some(Group { name: name("layer.1"), size: 3 }), ..sum(tensor, &[4]) };
    let held = cluster.submit_all(&grouped("a"));
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    assert!(cluster.notices.is_empty());
    cluster.submit(0, grouped("b"));
    cluster.run();
    advance_with_workers(&mut cluster, 700, None);
    let text = &cluster.notices[0].3;
    assert!(
        text.starts_with("One or more tensors wait for others of their groups for more than 2.0 seconds."),
        "{text}"
    );
    let words = "\nGroup layer.1 of process set 0 has 1 of its 3 tensors (a), for 2.";
    assert!(text.contains(words), "{text}");
    assert!(text.ends_with(" seconds now; some ranks have asked for b, nobody for 1 more."), "{text}");
    cluster.submit(1, grouped("c"));
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    let failure = cluster.common_failure(&held);
    assert!(failure.reason.contains("; some ranks have asked for b, c."), "{failure}");
    let words = "ronde has been shut down: tensors have waited for others of their groups for more than 4.0 seconds, the \
                 limit of stall_shutdown.\nGroup layer.1 of process set 0 has 1 of its 3 tensors (a)";
    assert!(failure.reason.contains(words), "{failure}");
    assert_eq!((failure.cause, failure.rank), (Cause::ShutDown, None));
}

#[test]
fn a_world_of_one_sidecar_needs_no_peer() {
    let mut cluster = Cluster::new(&[0, 0]).started();
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    advance_with_workers(&mut cluster, 10_000, None);
    cluster.close_session(0);
    cluster.close_session(1);
    cluster.run();
    assert!(cluster.engines[0].is_drained());
    assert_eq!(cluster.engines[0].poll_timeout(), None);
}

fn called(cluster: &mut Cluster, rank: u32, operation: &str, line: u32) {
    let (rank, operation) = (Rank(rank), name(operation));
    let site = Some(format!("train.py:{line}"));
    cluster.event(cluster.home(rank), Event::Called { rank, collective: "ALLGATHER", operation, site });
}

#[test]
fn a_stall_is_reported_with_what_the_missing_ranks_do() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    let mut cluster = Cluster::of(world, |config| EngineConfig { stall_warning_ms: 2_000, ..config }).started();
    called(&mut cluster, 2, "allgather.x", 88);
    cluster.submit(2, request("allgather.x", Collective::AllGather, &[1]));
    advance_with_workers(&mut cluster, 1_000, None);
    for rank in [0, 1] {
        cluster.submit(rank, sum("allreduce.grad.7", &[4]));
    }
    cluster.run();
    // The first report comes after two seconds and has the all-gather only, the second one after four.
    advance_with_workers(&mut cluster, 3_400, None);
    let (.., text) = cluster.notices.last().expect("a report");
    for words in [
        "\n2: [allreduce.grad.7]\n",
        "rank 2 has not asked for allreduce.grad.7 for 3.",
        "; its last call was allgather 'x' at train.py:88, 4.",
        " seconds ago; its call allgather.x is pending; its process last responded 0.",
        "\nrank 3 has not asked for allgather.x for 4.",
        "; it has called nothing yet, and none of its calls is pending; its process last responded",
    ] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
}

#[test]
fn a_stall_report_does_not_wait_for_a_silent_sidecar() {
    let world = World::new(THREE.map(SidecarIndex).into()).expect("a world");
    let mut cluster = Cluster::of(world, |config| EngineConfig { stall_warning_ms: 2_000, ..config }).started();
    for rank in [0, 1, 2] {
        cluster.submit(rank, sum("t", &[4]));
    }
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    cluster.stopped[2] = true;
    advance_with_workers(&mut cluster, 1_300, None);
    let stalls: Vec<_> = cluster.notices.iter().filter(|(.., text)| text.contains("Missing ranks:\n3: [t]")).collect();
    assert_eq!(stalls.len(), 1, "{:?}", cluster.notices);
    assert!(!stalls[0].3.contains("has not asked"), "nothing is known: {}", stalls[0].3);
}

#[test]
fn a_silent_rank_leaves_a_record_for_all_ranks() {
    let mut cluster = Cluster::new(&THREE).started();
    called(&mut cluster, 2, "allgather.x", 88);
    let pending = cluster.submit(0, sum("t", &[4]));
    cluster.run();
    advance_with_workers(&mut cluster, 6_000, Some(2));
    let record = cluster.failure(0, pending).record.clone().expect("a record");
    let call = record.last_call.as_ref().expect("it has called something");
    assert_eq!((record.rank, call.to_string().as_str()), (Rank(2), "allgather 'x' at train.py:88"));
    assert!(cluster.ended.iter().all(|(.., failure)| failure.record.as_ref() == Some(&record)));
}

#[test]
fn a_record_from_the_network_is_truncated() {
    let mut cluster = Cluster::new(&THREE).started();
    let pending = cluster.submit(0, sum("t", &[4]));
    cluster.run();
    let stderr_tail = vec!["\x1b[2J".repeat(100_000); 50];
    let record = cluster.engines[1].record(Rank(1), cluster.now);
    let record = Record { stderr_tail, ..record };
    let failure = Failure::new(Cause::RankLost, "gone").with_record(Some(Arc::new(record)));
    cluster.control(0, 1, (1, 0), Control::Left { rank: Rank(1), failure });
    cluster.run();
    let text = cluster.failure(0, pending).to_string();
    assert!(text.len() < limits::REASON_BYTES_MAX + 2 * limits::RECORD_BYTES_MAX && !text.contains('\x1b'), "{text}");
}
