//! Tests of entering another membership: other ranks and sidecars, epochs that count on, a coordinator that changes.

use ronde_wire::{Cause, Control, Epoch, Failure, Rank, Seq, SidecarIndex, World};

use super::cluster::{Cluster, sum};
use super::plugins::{coded, topk};
use crate::event::Event;

/// The world of a placement.
pub(super) fn world(placement: &[u32]) -> World {
    World::new(placement.iter().copied().map(SidecarIndex).collect()).expect("a world")
}

impl Cluster {
    /// Ends the epoch by the loss of a rank, and enters a world on all of its sidecars. Others are stopped.
    pub(super) fn change_to(&mut self, number: u64, placement: &[u32]) {
        let next = world(placement);
        let after = Epoch::before_membership(number);
        for sidecar in 0..self.engines.len() {
            self.stopped[sidecar] = !next.sidecars().contains(&SidecarIndex(u32::try_from(sidecar).expect("few")));
            if !self.stopped[sidecar] {
                self.engines[sidecar].enter(self.now, next.clone(), after);
            }
        }
        self.drop_wires();
        self.world = next;
        for (a, b) in self.live_pairs() {
            self.event(a, Event::LinkUp { peer: SidecarIndex(u32::try_from(b).expect("few")), lanes: 1 });
        }
        self.attach_all();
        self.run();
    }
}

/// The first epoch of a membership.
fn first(membership: u64) -> Epoch {
    Epoch(Epoch::before_membership(membership).0 + 1)
}

fn lost(rank: u32) -> Failure {
    Failure::new(Cause::RankLost, format!("rank {rank} is gone"))
}

#[test]
fn survivors_continue_with_new_ranks_in_the_next_epoch() {
    let mut cluster = Cluster::new(&[0, 0, 1, 1]).started();
    let pending = cluster.submit(0, sum("t", &[4]));
    cluster.leave(2, lost(2));
    cluster.run();
    assert_eq!(cluster.failure(0, pending).cause, Cause::RankLost);
    cluster.change_to(2, &[0, 0, 1]);
    assert_eq!(cluster.began, [(0, Epoch(1)), (1, Epoch(1)), (0, first(2)), (1, first(2))]);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert_eq!(requests.len(), 3);
    assert!(cluster.all_completed(&requests));
}

#[test]
fn the_loss_of_the_coordinator_makes_another_one() {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    cluster.stopped[0] = true;
    for peer in [1, 2] {
        cluster.event(peer, Event::LinkDown { peer: SidecarIndex(0), reason: "reset".to_owned() });
    }
    cluster.run();
    cluster.change_to(2, &[1, 2]);
    assert_eq!(cluster.began[3..], [(1, first(2)), (2, first(2))]);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    // The first coordinator returns.
    cluster.leave(0, lost(0));
    cluster.run();
    cluster.change_to(3, &[0, 1, 2]);
    assert_eq!(cluster.began[5..], [(0, first(3)), (1, first(3)), (2, first(3))]);
}

#[test]
fn a_job_grows_by_sidecars_and_ranks() {
    let mut cluster = Cluster::new(&[0, 1, 2]);
    cluster.stopped[2] = true;
    for sidecar in [0, 1] {
        cluster.engines[sidecar].enter(cluster.now, world(&[0, 1]), Epoch(0));
    }
    cluster.change_to(2, &[0, 1]);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    for rank in [0, 1] {
        cluster.close_session(rank);
    }
    cluster.run();
    cluster.change_to(3, &[0, 1, 2, 2]);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert_eq!(requests.len(), 4);
    assert!(cluster.all_completed(&requests));
}

#[test]
fn ranks_that_attached_before_attach_again() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.leave(1, lost(1));
    cluster.leave(0, lost(0));
    cluster.run();
    // Rank 0 returns before its sidecar enters the next membership, in which it waits for its new rank.
    cluster.attach(Rank(0));
    cluster.run();
    let next = world(&[0]);
    cluster.stopped[1] = true;
    cluster.engines[0].enter(cluster.now, next.clone(), Epoch::before_membership(2));
    cluster.world = next;
    cluster.advance(1_000);
    assert_eq!(cluster.began.len(), 2, "nobody has attached");
    cluster.attach(Rank(0));
    cluster.run();
    assert_eq!(cluster.began[2..], [(0, first(2))]);
}

#[test]
fn messages_of_the_last_membership_are_void() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.leave(1, lost(1));
    cluster.run();
    cluster.change_to(2, &[0, 1]);
    let requests = cluster.submit_all(&sum("t", &[4]));
    cluster.event(1, Event::Control { from: SidecarIndex(0), epoch: Epoch(1), seq: Seq(0), message: ended() });
    cluster.run();
    assert!(cluster.all_completed(&requests), "the end of epoch 1 does not end epoch 2");
}

fn ended() -> Control {
    Control::EpochEnd { failure: Failure::new(Cause::RankLost, "gone") }
}

#[test]
fn counters_continue() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let requests = cluster.submit_all(&coded("t", topk()));
    cluster.run();
    assert!(cluster.all_completed(&requests));
    let before = cluster.engines[0].stats().completed;
    cluster.leave(1, lost(1));
    cluster.run();
    cluster.change_to(2, &[0]);
    assert!(before > 0 && cluster.engines[0].stats().completed == before);
    assert_eq!(cluster.engines[0].stats().epochs, 2);
}

#[test]
fn epochs_of_a_membership_are_above_those_of_earlier_ones_whoever_survives() {
    // Sidecar 1 has not received the begin of the first epoch, which sidecar 0 has begun.
    let mut cluster = Cluster::new(&[0, 1]);
    cluster.connect();
    cluster.attach_all();
    cluster.drain_all();
    for _ in 0..20 {
        if cluster.began.is_empty() {
            let from_one = cluster.wire_len((1, 0)) > 0;
            cluster.deliver(if from_one { (1, 0) } else { (0, 1) });
            cluster.drain_all();
        }
    }
    assert_eq!(cluster.began, [(0, Epoch(1))]);
    cluster.change_to(2, &[1]);
    assert_eq!(cluster.began[1..], [(1, first(2))]);
    assert_eq!(first(2).to_string(), "epoch 2.1");
}
