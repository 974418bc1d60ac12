//! Tests of numbers of the wire at the ends of their ranges.

use ronde_wire::{Cause, Control, Request, Seq, SetId, SidecarIndex};

use super::cluster::{Cluster, sum};

/// A step that all ranks take; the second one is the last that is negotiated.
fn step(cluster: &mut Cluster) {
    cluster.submit_all(&sum("t", &[4]));
    cluster.run();
}

/// A cluster whose coordinator has sent a schedule that has not arrived.
fn with_a_schedule_on_the_way(placement: &[u32]) -> Cluster {
    let mut cluster = Cluster::new(placement).started();
    step(&mut cluster);
    cluster.submit_all(&sum("t", &[4]));
    cluster.drain_all();
    while let Some(wire) = cluster.loaded().into_iter().find(|(from, _)| *from != 0) {
        cluster.deliver(wire);
        cluster.drain_all();
    }
    cluster
}

/// A sidecar numbers the operations of a schedule by itself, from the number that the coordinator gives.
#[test]
fn a_schedule_that_begins_near_the_end_of_the_numbers_is_refused() {
    for first in [u64::MAX, u64::MAX - 1, u64::MAX / 2 + 1] {
        let mut cluster = with_a_schedule_on_the_way(&[0, 1]);
        let changed = std::cell::Cell::new(false);
        cluster.tamper((0, 1), |seq, message| {
            if matches!(message, Control::Schedule { .. }) {
                *seq = Seq(first);
                changed.set(true);
            }
        });
        assert!(changed.get(), "a schedule is on the way");
        cluster.run();
        (0..4).for_each(|_| step(&mut cluster));
        let (_, _, failure) = cluster.ended.first().expect("the epoch ends");
        let words = format!("schedule 1 of epoch 1 cannot be followed: it begins with operation {first}");
        assert!(failure.reason.contains(&words) && failure.cause == Cause::Bug, "{failure}");
        assert_eq!(failure.sidecar, Some(SidecarIndex(1)));
    }
}

/// Later orders follow the last operation that any sidecar has admitted of a schedule. One that claims to have admitted
/// more than is possible would leave no numbers to the others, and they would be blamed.
#[test]
fn a_sidecar_that_claims_impossible_numbers_is_the_culprit() {
    for admitted in [u64::MAX, u64::MAX / 2, 1 << 50] {
        let mut cluster = with_a_schedule_on_the_way(&[0, 1, 2]);
        cluster.run();
        (0..3).for_each(|_| step(&mut cluster));
        let cluster = withdrawn(cluster, |claimed, _| *claimed = Seq(admitted));
        let by: Vec<_> = cluster.disconnects.iter().map(|(by, whom, _)| (*by, whom.0)).collect();
        assert_eq!(by, [(0, 1)], "{admitted}: {:?}", cluster.disconnects);
        assert!(cluster.disconnects[0].2.contains("that it admitted operation"), "{:?}", cluster.disconnects);
    }
}

/// Withdraws a schedule and changes the answer of sidecar 1.
fn withdrawn(mut cluster: Cluster, change: impl Fn(&mut Seq, &mut Vec<(SetId, Seq)>)) -> Cluster {
    cluster.submit(0, sum("another", &[4]));
    let changed = std::cell::Cell::new(false);
    cluster.drain_all();
    while let Some(wire) = cluster.loaded().into_iter().next() {
        cluster.tamper((1, 0), |_, message| {
            if let Control::Frozen { admitted, completed, .. } = message
                && !changed.replace(true)
            {
                change(admitted, completed);
            }
        });
        cluster.deliver(wire);
        cluster.drain_all();
    }
    assert!(changed.get(), "the schedule is withdrawn");
    cluster
}

/// A sidecar could otherwise commit operations that the members of a set have not all admitted, and these would wait for
/// each other.
#[test]
fn a_sidecar_reports_completed_operations_of_its_own_sets_only() {
    let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[0, 2]]).started();
    let step = |cluster: &mut Cluster| {
        cluster.submit_all(&sum("t", &[4]));
        for rank in [0, 2] {
            cluster.submit(rank, Request { set: SetId(1), ..sum("u", &[4]) });
        }
        cluster.run();
    };
    (0..5).for_each(|_| step(&mut cluster));
    assert!(cluster.engines[1].stats().scheduled_operations > 0, "there is a schedule");
    let cluster = withdrawn(cluster, |admitted, completed| completed.push((SetId(1), *admitted)));
    let by: Vec<_> = cluster.disconnects.iter().map(|(by, whom, _)| (*by, whom.0)).collect();
    assert_eq!(by, [(0, 1)], "{:?}", cluster.disconnects);
}

/// An operation is complete nowhere before all members have admitted it.
#[test]
fn a_completed_operation_that_another_member_has_not_admitted_ends_the_epoch_naming_both() {
    let mut cluster = with_a_schedule_on_the_way(&[0, 1, 2]);
    cluster.run();
    (0..3).for_each(|_| step(&mut cluster));
    let cluster = withdrawn(cluster, |admitted, completed| {
        *admitted = Seq(admitted.0 + 5);
        *completed = vec![(SetId::WORLD, *admitted)];
    });
    let failure = &cluster.ended.first().expect("the epoch ends").2;
    assert_eq!(failure.sidecar, Some(SidecarIndex(1)), "{failure}");
    assert!(failure.reason.contains("sidecar 1") && failure.reason.contains("sidecar 0"), "{failure}");
    assert_eq!(cluster.ended.len(), 3, "on all sidecars");
}

/// The coordinator counts on from the newest epoch that any sidecar claims to have seen.
#[test]
fn a_false_claim_about_epochs_is_not_held_against_the_others() {
    let mut cluster = Cluster::new(&[0, 1, 2]);
    cluster.connect();
    cluster.control(0, 1, (u64::MAX / 2, 0), Control::Attached { ranks: Vec::new() });
    for _ in 0..3 {
        cluster.attach_all();
        cluster.run();
        step(&mut cluster);
        (0..3).for_each(|rank| cluster.close_session(rank));
        cluster.run();
    }
    assert!(cluster.disconnects.is_empty(), "{:?}", cluster.disconnects);
    assert_eq!(cluster.began.len(), 9, "three epochs on three sidecars: {:?}", cluster.began);
}
