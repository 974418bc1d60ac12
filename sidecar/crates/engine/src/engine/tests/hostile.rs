//! Tests with arbitrary messages of peers: nothing panics, and ranks of other sidecars are unaffected.

use proptest::collection::vec;
use proptest::prelude::*;
use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{Activity, Cause, Control, Epoch, Failure, Group, Rank, RequestId, Seq, SetId, SidecarIndex, limits};

use super::arbitrary::{PLACEMENT, control, number, request, small};
use super::cluster::{Cluster, name, sum};
use super::plugins::{coded, topk};
use crate::event::Event;

fn messages() -> impl Strategy<Value = Vec<(usize, u32, u64, u64, Control)>> {
    let epoch = prop_oneof![6 => Just(1_u64), 1 => 0_u64..4, 1 => number()];
    let seq = prop_oneof![4 => 0_u64..6, 1 => number()];
    vec((0_usize..3, small(), epoch, seq, control()), 1..25)
}

/// All ranks take equal steps, which the coordinator schedules from the second one on; the operations of the last step
/// are in flight. Returns all requests with their ranks.
fn busy(cluster: &mut Cluster, steps: usize, is_coded: bool) -> Vec<(u32, RequestId)> {
    let mut requests = Vec::new();
    for step in 0..steps {
        cluster.executes = step + 1 < steps;
        requests.extend((0..).zip(cluster.submit_all(&sum("t", &[4]))));
        cluster.run();
    }
    cluster.executes = false;
    if is_coded {
        requests.extend((0..).zip(cluster.submit_all(&coded("coded", topk()))));
        cluster.run();
    }
    requests
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any sidecar sends any message to any other one while correct ranks have pending requests, are steps into a
    /// schedule, and wait for the commit of an operation with a plugin: no panic, and every request completes exactly
    /// once.
    #[test]
    fn arbitrary_messages_never_panic_and_every_request_completes(
        steps in 0_usize..5,
        is_coded in any::<bool>(),
        messages in messages(),
        ask in vec((0_u32..4, request()), 0..8),
    ) {
        let mut cluster = Cluster::new(&PLACEMENT).started();
        let mut requests = busy(&mut cluster, steps, is_coded);
        let mut ask = ask.into_iter();
        for (to, from, epoch, seq, message) in messages {
            if let Some((rank, what)) = ask.next() {
                requests.push((rank, cluster.submit(rank, what)));
            }
            if from as usize != to {
                cluster.control(to, from, (epoch, seq), message);
            }
            cluster.run();
        }
        cluster.advance(200);
        cluster.close_session(3);
        cluster.close_session(0);
        cluster.run();
        cluster.executes = true;
        while !cluster.unexecuted.is_empty() {
            cluster.execute_all();
        }
        // A sidecar that was misled about the epoch detects it by silence.
        cluster.stopped[0] = true;
        cluster.advance(8_000);
        for (rank, request) in requests {
            let _ = cluster.outcome(rank, request);
        }
    }

    /// A sidecar that is not the coordinator can affect another one only by ending the epoch.
    #[test]
    fn a_sidecar_without_ranks_of_a_request_cannot_complete_it(messages in vec((any::<u64>(), control()), 1..12)) {
        let mut cluster = Cluster::new(&PLACEMENT).started();
        let pending = cluster.submit(2, sum("t", &[4]));
        cluster.run();
        for (seq, message) in messages {
            // Sidecar 2 to sidecar 1, neither of which coordinates.
            let before = cluster.disconnects.len();
            cluster.engines[1].handle_event(cluster.now, Event::Control {
                from: SidecarIndex(2), epoch: Epoch(1), seq: Seq(seq), message,
            });
            cluster.drain_all();
            prop_assert_eq!(cluster.disconnects.len(), before + 1);
            prop_assert!(cluster.is_pending(pending));
            prop_assert!(cluster.admitted[1].is_empty());
        }
    }
}

#[test]
fn a_sidecar_speaks_only_for_its_own_ranks() {
    let foreign = [
        Control::Attached { ranks: vec![Rank(0)] },
        Control::Left { rank: Rank(0), failure: Failure::new(Cause::RankLost, "gone") },
        Control::SuspectRanks { ranks: vec![Rank(3), Rank(99)] },
        Control::Activities {
            activities: vec![Activity { rank: Rank(0), silent_ms: None, last_call: None, pending: 0, oldest: None }],
        },
        Control::AskActivity { ranks: vec![Rank(1)] },
        Control::Announce { announcements: vec![Announcement::new(Rank(0), Intent::Ready(sum("t", &[1])))] },
        Control::Done,
        Control::Unreachable { sidecar: SidecarIndex(77), reason: String::new() },
        Control::EpochEnd { failure: Failure::new(Cause::RankLost, "gone") },
    ];
    for message in foreign {
        let mut cluster = Cluster::new(&PLACEMENT).started();
        let pending = cluster.submit(1, sum("t", &[1]));
        cluster.run();
        cluster.control(0, 1, (1, 1), message.clone());
        cluster.run();
        assert_eq!(cluster.disconnects.len(), 1, "{message:?}");
        assert_eq!((cluster.disconnects[0].0, cluster.disconnects[0].1), (0, SidecarIndex(1)));
        let failure = cluster.failure(1, pending);
        assert!(failure.reason.contains("sidecar 1 (rank 2) is lost: sidecar 1 breaks the protocol"), "{failure}");
    }
}

#[test]
fn an_unknown_sidecar_is_disconnected_and_changes_nothing() {
    let mut cluster = Cluster::new(&PLACEMENT).started();
    let pending = cluster.submit(1, sum("t", &[1]));
    cluster.control(0, 9, (1, 0), Control::Failed { failure: Failure::new(Cause::Bug, "x") });
    cluster.control(1, 9, (1, 0), Control::Heartbeat { sent_us: 1, echo_us: 1, held_us: 1 });
    cluster.run();
    assert_eq!(cluster.disconnects.len(), 2);
    assert!(cluster.is_pending(pending) && cluster.ended.is_empty());
}

/// A request that is complete on all ranks, but waits for operations in flight or for the rest of its group.
fn waiting_for_its_order(in_group: bool) -> (Cluster, Vec<RequestId>) {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    cluster.executes = false;
    let mut what = sum("t", &[4]);
    if in_group {
        what.group = Some(Group { name: name("g"), size: 2 });
    } else {
        for operation in 0..limits::BUCKETS_IN_FLIGHT {
            cluster.submit_all(&sum(&format!("busy.{operation}"), &[4]));
            cluster.run();
        }
    }
    let waiting = cluster.submit_all(&what);
    cluster.run();
    (cluster, waiting)
}

#[test]
fn a_second_announcement_of_a_request_that_waits_for_its_order_breaks_the_protocol() {
    let void = |cause| Intent::Void {
        set: SetId::WORLD,
        name: name("t"),
        failure: Failure::new(cause, "refused"),
        group: None,
    };
    let again = [Intent::Ready(sum("t", &[4])), void(Cause::Refused)];
    for (in_group, intent) in again.iter().flat_map(|intent| [(false, intent), (true, intent)]) {
        let announcements = vec![Announcement::new(Rank(2), intent.clone())];
        let (mut cluster, waiting) = waiting_for_its_order(in_group);
        cluster.control(0, 2, (1, 0), Control::Announce { announcements });
        cluster.run();
        let text = "before its earlier request is ordered or rejected";
        assert!(cluster.disconnects.iter().any(|(at, who, why)| (*at, who.0) == (0, 2) && why.contains(text)));
        for (rank, request) in (0..2).zip(waiting) {
            let failure = cluster.failure(rank, request);
            assert_eq!(failure.cause, Cause::SidecarLost, "{failure}");
            assert!(failure.reason.starts_with("sidecar 2 (rank 2) is lost"), "{failure}");
        }
    }
    // A timeout at that moment is legitimate.
    let (mut cluster, waiting) = waiting_for_its_order(false);
    cluster.withdraw(2, waiting[2]);
    cluster.run();
    assert!(cluster.disconnects.is_empty() && cluster.ended.is_empty());
}

#[test]
fn a_sidecar_that_drops_an_uncommitted_operation_ends_it_on_all() {
    let mut cluster = Cluster::new(&[0, 1, 2]).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&coded("t", topk()));
    cluster.run();
    cluster.execute_on(0);
    cluster.execute_on(1);
    cluster.close_session(2);
    cluster.run();
    assert!(requests.iter().all(|request| cluster.is_pending(*request)), "its report may still arrive");
    cluster.control(0, 2, (1, 0), Control::Attached { ranks: Vec::new() });
    cluster.run();
    for (rank, request) in (0..2).zip(requests) {
        assert_eq!(cluster.failure(rank, request).cause, Cause::ShutDown);
    }
}
