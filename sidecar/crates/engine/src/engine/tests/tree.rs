//! Tests of the tree of control links: relayed messages, which sidecar may send which message, and the loss of relays.
//! The fan-out is 2: below 0 are 1 and 2, below 1 are 3 and 4, below 2 are 5 and 6.

use proptest::collection::vec;
use proptest::prelude::*;
use ronde_wire::{Ascent, Cause, Control, Enclosed, Epoch, Failure, Rank, Seq, SidecarIndex, World};

use super::arbitrary::relayed;
use super::cluster::{Cluster, index, sum};
use crate::engine::EngineConfig;
use crate::event::Event;

const SEVEN: [u32; 7] = [0, 1, 2, 3, 4, 5, 6];

fn tree() -> Cluster {
    let world = World::new(SEVEN.map(SidecarIndex).into()).expect("a world");
    Cluster::of(world, |config| EngineConfig { control_fan_out: 2, ..config })
}

/// Advances time while all workers of running sidecars send messages.
fn advance(cluster: &mut Cluster, ms: u64) {
    for _ in 0..ms / 100 {
        for rank in (0..).map(Rank).take(cluster.world.size()) {
            let sidecar = cluster.home(rank);
            if !cluster.stopped[sidecar] {
                cluster.event(sidecar, Event::RankAlive { rank });
            }
        }
        cluster.advance(100);
    }
}

fn culprits(cluster: &Cluster) -> Vec<(usize, Option<u32>)> {
    let mut named: Vec<_> = cluster.ended.iter().map(|(at, _, f)| (*at, f.sidecar.map(|s| s.0))).collect();
    named.sort_unstable();
    named
}

#[test]
fn an_epoch_runs_over_a_tree() {
    let mut cluster = tree().started();
    assert_eq!(cluster.began.len(), 7);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    assert!(cluster.engines[1].stats().relayed > 0 && cluster.engines[3].stats().relayed == 0);
    advance(&mut cluster, 20_000);
    assert!(cluster.ended.is_empty() && cluster.notices.is_empty(), "{:?} {:?}", cluster.ended, cluster.notices);
    cluster.close_session(5);
    cluster.run();
    assert_eq!(cluster.ended.len(), 7);
    assert!(cluster.ended.iter().all(|(_, _, f)| f.cause == Cause::ShutDown && f.rank == Some(Rank(5))));
    assert!(cluster.engines.iter().all(crate::Engine::is_drained));
}

#[test]
fn no_sidecar_of_a_tree_leaves_before_the_last_has_finished() {
    let mut cluster = tree().started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    cluster.close_session(0);
    let late = cluster.unexecuted.iter().position(|(sidecar, ..)| *sidecar == 6).expect("admitted there");
    let late = cluster.unexecuted.remove(late);
    cluster.execute_all();
    assert_eq!((cluster.ended.len(), cluster.is_pending(requests[6])), (6, true));
    assert!(!cluster.engines.iter().any(crate::Engine::is_drained));
    cluster.unexecuted.push(late);
    cluster.execute_all();
    // At once: they do not wait for the next tick.
    assert!(cluster.all_completed(&requests) && cluster.engines.iter().all(crate::Engine::is_drained));
}

#[test]
fn control_links_exist_only_along_the_tree() {
    let mut cluster = tree();
    cluster.attach_all();
    cluster.drain_all();
    // The first message to a neighbour opens the link to it.
    let mut asked = cluster.loaded();
    asked.sort_unstable();
    assert_eq!(asked, [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]);
    for (child, parent) in asked {
        cluster.event(parent, Event::LinkUp { peer: index(child), lanes: 1 });
        cluster.event(child, Event::LinkUp { peer: index(parent), lanes: 1 });
    }
    cluster.run();
    assert_eq!(cluster.began.len(), 7);
    let peers = |at: usize| cluster.engines[at].status(cluster.now).links.iter().map(|l| l.peer.0).collect::<Vec<_>>();
    assert_eq!((peers(1), peers(6)), (vec![0, 3, 4], vec![2]));
}

#[test]
fn a_lost_relay_is_named_by_all_and_not_those_below_it() {
    let mut cluster = tree().started();
    let pending: Vec<_> = [0, 2, 3, 4, 5, 6].map(|rank| (rank, cluster.submit(rank, sum("t", &[4])))).into();
    cluster.run();
    cluster.stopped[1] = true;
    for peer in [0, 3, 4] {
        cluster.cut(1, peer);
    }
    cluster.run();
    for (rank, request) in pending {
        let failure = cluster.failure(rank, request);
        assert_eq!((failure.cause, failure.sidecar), (Cause::SidecarLost, Some(SidecarIndex(1))), "{failure}");
    }
    let below = cluster.ended.iter().find(|(at, ..)| *at == 3).expect("it has ended the epoch");
    let words = "sidecar 1 (rank 1), on the path to the coordinator, is lost: connection reset";
    assert!(below.2.reason.contains(words), "{}", below.2);
}

#[test]
fn a_lost_leaf_is_reported_by_its_parent() {
    let mut cluster = tree().started();
    let pending = cluster.submit(5, sum("t", &[4]));
    cluster.run();
    cluster.stopped[3] = true;
    cluster.cut(1, 3);
    cluster.run();
    let text = &cluster.failure(5, pending).reason;
    assert!(text.contains("sidecar 3 (rank 3) is lost: connection reset"), "{text}");
    assert_eq!(cluster.ended.len(), 7);
}

#[test]
fn the_loss_of_the_coordinator_reaches_all_levels() {
    let mut cluster = tree().started();
    cluster.stopped[0] = true;
    cluster.cut(0, 1);
    cluster.cut(0, 2);
    cluster.run();
    assert_eq!(culprits(&cluster)[1..], [1, 2, 3, 4, 5, 6].map(|at| (at, Some(0))));
}

#[test]
fn a_new_epoch_begins_over_new_paths() {
    let mut cluster = tree().started();
    cluster.cut(0, 1);
    cluster.run();
    assert_eq!(cluster.ended.len(), 7);
    for (peer, at) in [(1, 0), (0, 1)] {
        cluster.event(at, Event::LinkUp { peer: index(peer), lanes: 1 });
    }
    cluster.attach_all();
    cluster.run();
    assert_eq!(cluster.began.len(), 14, "{:?}", cluster.began);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
}

#[test]
fn a_silent_sidecar_below_a_relay_is_suspected_then_lost() {
    let mut cluster = tree().started();
    let pending = cluster.submit(2, sum("t", &[4]));
    cluster.run();
    cluster.stopped[6] = true;
    advance(&mut cluster, 900);
    assert!(cluster.notices.is_empty());
    advance(&mut cluster, 500);
    assert_eq!(cluster.notices.len(), 6, "{:?}", cluster.notices);
    assert!(cluster.notices.iter().all(|(_, sidecars, ranks, _)| *sidecars == [SidecarIndex(6)] && ranks.is_empty()));
    advance(&mut cluster, 3_300);
    assert!(cluster.ended.is_empty(), "{:?}", cluster.ended);
    advance(&mut cluster, 700);
    let failure = cluster.failure(2, pending);
    assert!(failure.reason.contains("sidecar 6 (rank 6) is lost: it has been silent for 5."), "{failure}");
    assert_eq!(cluster.ended.len(), 6);
}

#[test]
fn a_silent_relay_is_suspected_by_those_below_and_not_the_coordinator() {
    let mut cluster = tree().started();
    cluster.stopped[1] = true;
    advance(&mut cluster, 1_500);
    let notices: Vec<_> = cluster.notices.iter().filter(|(at, ..)| *at == 3).collect();
    assert_eq!(notices.len(), 1);
    assert_eq!(notices[0].1, [SidecarIndex(1)]);
    advance(&mut cluster, 4_500);
    assert_eq!(culprits(&cluster), [0, 2, 3, 4, 5, 6].map(|at| (at, Some(1))));
}

#[test]
fn a_silent_coordinator_is_noticed_on_all_levels() {
    let mut cluster = tree().started();
    cluster.stopped[0] = true;
    advance(&mut cluster, 1_500);
    let late: Vec<_> = cluster.notices.iter().map(|(at, sidecars, ..)| (*at, sidecars.clone())).collect();
    for at in 1..7 {
        assert!(late.contains(&(at, vec![SidecarIndex(0)])), "{at}: {late:?}");
    }
    advance(&mut cluster, 4_500);
    assert_eq!(culprits(&cluster), [1, 2, 3, 4, 5, 6].map(|at| (at, Some(0))));
}

#[test]
fn a_paused_relay_changes_nothing() {
    let mut cluster = tree().started();
    cluster.stopped[2] = true;
    advance(&mut cluster, 3_000);
    cluster.stopped[2] = false;
    advance(&mut cluster, 700);
    assert!(cluster.ended.is_empty(), "{:?}", cluster.ended);
    for at in [0, 1, 3, 5] {
        let last = cluster.notices.iter().rfind(|(sidecar, ..)| *sidecar == at).expect("a notice");
        assert_eq!((last.1.len(), last.3.as_str()), (0, "All sidecars and ranks respond again."), "{at}");
    }
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
}

#[test]
fn an_order_is_sent_once_per_branch() {
    let mut cluster = tree().started();
    for rank in 0..7 {
        cluster.submit(rank, sum("t", &[4]));
    }
    // Everything goes up to the coordinator, and no further.
    for _ in 0..10 {
        cluster.drain_all();
        for wire in cluster.loaded() {
            if wire.0 != 0 {
                cluster.deliver(wire);
            }
        }
    }
    cluster.drain_all();
    assert_eq!([1, 2].map(|child| cluster.wire_len((0, child))), [1, 1]);
}

#[test]
fn a_relay_that_speaks_for_others_is_expelled() {
    let mut cluster = tree().started();
    let failed = Control::Failed { failure: Failure::new(Cause::Bug, "forged") };
    for (origin, at, from) in [(5, 0, 1), (1, 0, 1), (4, 1, 3), (0, 0, 1)] {
        let mut cluster = tree().started();
        let message = Enclosed::new(&failed);
        let ascent = Ascent::Message { origin: SidecarIndex(origin), epoch: Epoch(1), seq: Seq(0), message };
        let generation = cluster.generation(at, from);
        cluster.control(
            at,
            u32::try_from(from).expect("few"),
            (0, 0),
            Control::Ascending { generation, ascents: vec![ascent] },
        );
        cluster.run();
        let words = format!("it sends a message for sidecar {origin}, which is not below it in the tree");
        assert!(
            cluster
                .disconnects
                .iter()
                .any(|(by, whom, text)| (*by, *whom) == (at, index(from)) && text.contains(&words))
        );
        assert!(
            cluster.ended.iter().all(|(_, _, failure)| failure.sidecar == Some(index(from))),
            "{:?}",
            cluster.ended
        );
    }
    // Items with an old number are void.
    let message = Enclosed::new(&failed);
    let ascent = Ascent::Message { origin: SidecarIndex(3), epoch: Epoch(1), seq: Seq(0), message };
    cluster.control(0, 1, (0, 0), Control::Ascending { generation: 999, ascents: vec![ascent] });
    cluster.run();
    assert!(cluster.disconnects.is_empty() && cluster.ended.is_empty());
}

#[test]
fn a_violation_below_a_relay_is_punished_by_the_parent() {
    let mut cluster = tree().started();
    // Sidecar 6 sends a message for rank 0, and sidecar 2 relays it.
    let message = Enclosed::new(&Control::Attached { ranks: vec![Rank(0)] });
    let ascent = Ascent::Message { origin: SidecarIndex(6), epoch: Epoch(1), seq: Seq(0), message };
    let generation = cluster.generation(2, 6);
    cluster.control(2, 6, (0, 0), Control::Ascending { generation, ascents: vec![ascent] });
    cluster.run();
    assert_eq!(cluster.disconnects.iter().map(|(by, whom, _)| (*by, whom.0)).collect::<Vec<_>>(), [(2, 6)]);
    assert!(cluster.disconnects[0].2.contains("it sends a message for rank 0, which it does not serve"));
    assert!(culprits(&cluster).iter().filter(|(at, _)| *at != 6).all(|(_, culprit)| *culprit == Some(6)));
}

#[test]
fn coordinator_messages_are_accepted_from_the_parent_only() {
    let down = || Control::Descending { to: None, message: Enclosed::new(&Control::Done) };
    let end = || Control::EpochEnd { failure: Failure::new(Cause::ShutDown, "forged") };
    let path = || Control::PathDown { sidecar: SidecarIndex(5), reason: "forged".to_owned() };
    let silent = || Control::Silent { sidecars: vec![(SidecarIndex(5), 9_000)] };
    // At sidecar 1: from its child, from its parent, from an unknown sidecar.
    for (from, message) in [(3, down()), (3, end()), (3, path()), (3, silent()), (0, path()), (0, silent()), (2, end())]
    {
        let mut cluster = tree().started();
        cluster.control(1, from, (1, 0), message);
        cluster.drain_all();
        let by: Vec<_> = cluster.disconnects.iter().map(|(by, whom, _)| (*by, whom.0)).collect();
        assert_eq!(by, [(1, from)], "{:?}", cluster.disconnects);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any sidecar sends any message to any other one: no panic, and every request completes exactly once.
    #[test]
    fn arbitrary_messages_on_a_tree_never_panic_and_every_request_completes(
        messages in vec((0_usize..7, 0_u32..8, 0_u64..3, 0_u64..4, relayed()), 1..20),
    ) {
        let mut cluster = tree().started();
        let requests: Vec<_> = (0..7).map(|rank| (rank, cluster.submit(rank, sum(&format!("t{}", rank % 2), &[4])))).collect();
        for (to, from, epoch, seq, message) in messages {
            if from as usize != to {
                cluster.control(to, from, (epoch, seq), message);
            }
            cluster.run();
        }
        // A misled sidecar detects it by silence.
        cluster.stopped[0] = true;
        cluster.close_session(0);
        cluster.advance(10_000);
        for (rank, request) in requests.into_iter().skip(1) {
            let _ = cluster.outcome(rank, request);
        }
    }
}
