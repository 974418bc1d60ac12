//! Tests of orders: fusion, bounds, sequence, digests.

use ronde_wire::{Algorithm, Cause, Collective, Control, DType, Invalidation, ReduceOp, Request, Seq, SetId};

use super::cluster::{Cluster, request, sum};
use crate::engine::EngineConfig;
use crate::event::Event;

const FOUR_ON_TWO: [u32; 4] = [0, 0, 1, 1];

#[test]
fn an_idle_engine_orders_at_once_and_later_tensors_collect() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    for tensor in ["a", "b", "c", "d", "e"] {
        cluster.submit_all(&sum(tensor, &[16]));
        cluster.run();
    }
    assert_eq!(cluster.buckets(0), [["a"], ["b"]], "two buckets are in flight");
    cluster.execute_all();
    assert_eq!(cluster.buckets(0), [vec!["a"], vec!["b"], vec!["c", "d", "e"]]);
    assert_eq!(cluster.buckets(0), cluster.buckets(1));
    let stats = cluster.engines[0].stats();
    assert_eq!((stats.ordered_operations, stats.ordered_tensors, stats.fused_tensors), (3, 5, 3));
    cluster.execute_all();
    assert_eq!(cluster.completed.len(), 10);
}

#[test]
fn tensors_that_become_ready_together_share_a_bucket() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    for rank in 0..4 {
        for n in 0..50 {
            cluster.submit(rank, sum(&format!("t{n:02}"), &[n]));
        }
    }
    cluster.run();
    assert_eq!(cluster.buckets(0).iter().map(Vec::len).sum::<usize>(), 50);
    assert!(cluster.buckets(0).len() <= 2, "few small tensors and one algorithm: {:?}", cluster.buckets(0));
}

#[test]
fn a_fusion_threshold_of_zero_orders_one_tensor_at_a_time() {
    let world = Cluster::new(&[0, 1]).world;
    let mut cluster = Cluster::of(world, |config| EngineConfig { fusion_threshold_bytes: 0, ..config }).started();
    for tensor in ["a", "b", "c"] {
        cluster.submit_all(&sum(tensor, &[16]));
    }
    cluster.run();
    assert_eq!(cluster.buckets(0), [["a"], ["b"], ["c"]]);
}

#[test]
fn the_fusion_threshold_counts_whole_tensors() {
    let world = Cluster::new(&[0, 1]).world;
    let collectives = [
        (Collective::AllGather, 8),
        (Collective::ReduceScatter { op: ReduceOp::Sum }, 16),
        (Collective::AllReduce { op: ReduceOp::Median }, 16),
    ];
    for (collective, rows) in collectives {
        for (threshold, buckets) in [(3 * 64, 1), (3 * 64 - 1, 2), (0, 3)] {
            let adjust = |config| EngineConfig { fusion_threshold_bytes: threshold, ..config };
            let mut cluster = Cluster::of(world.clone(), adjust).started();
            for tensor in ["a", "b", "c"] {
                cluster.submit_all(&request(tensor, collective.clone(), &[rows]));
            }
            cluster.run();
            assert_eq!(cluster.buckets(1).len(), buckets, "{collective:?}, {threshold}");
        }
    }
}

#[test]
fn process_sets_do_not_wait_for_each_other() {
    let mut cluster = Cluster::with_sets(&[0, 0, 1, 1, 2, 2], &[&[2, 3, 4], &[0, 1]]).started();
    cluster.executes = false;
    for tensor in ["a", "b", "c"] {
        cluster.submit_all(&request(tensor, Collective::Barrier, &[]));
    }
    cluster.run();
    assert_eq!(cluster.admitted[0].len(), 2, "the set of all ranks has two in flight");
    let member_only = Request { set: SetId(1), ..sum("x", &[3]) };
    let requests: Vec<_> = (2..5).map(|rank| cluster.submit(rank, member_only.clone())).collect();
    cluster.run();
    assert_eq!(cluster.admitted[0].len(), 2, "the coordinator's sidecar is no member of set 1");
    assert_eq!(cluster.buckets(1), [["a"], ["b"], ["x"]]);
    cluster.execute_all();
    assert!((2..5).zip(&requests).all(|(rank, request)| cluster.outcome(rank, *request).is_ok()));
    let local = Request { set: SetId(2), ..sum("x", &[3]) };
    let both = [cluster.submit(0, local.clone()), cluster.submit(1, local)];
    cluster.run();
    cluster.execute_all();
    assert!(cluster.all_completed(&both));
}

#[test]
fn an_admission_has_the_plan_the_ranks_and_the_requests() {
    let mut cluster = Cluster::new(&[1, 0, 1]).started();
    let what = Request { prescale: 0.5, postscale: 3.0, ..sum("t", &[2, 3]) };
    let requests = cluster.submit_all(&what);
    cluster.run();
    let admission = &cluster.admitted[1][0];
    assert_eq!((admission.epoch.0, admission.seq, admission.local_ranks.len()), (1, Seq(1), 2));
    let arithmetic = admission.arithmetic;
    assert_eq!((arithmetic.ranks, arithmetic.prescale, arithmetic.postscale), (3, 0.5, 3.0));
    assert_eq!(
        admission.tensors[0].requests.iter().map(|answered| answered.request).collect::<Vec<_>>(),
        [requests[0], requests[2]]
    );
    assert_eq!(admission.tensors[0].requests[0].output.to_string(), "[2, 3]");
}

#[test]
fn operations_complete_in_any_order() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    let a = cluster.submit_all(&sum("a", &[4]));
    cluster.run();
    let b = cluster.submit_all(&sum("b", &[4]));
    cluster.run();
    cluster.unexecuted.reverse();
    let (sidecar, epoch, seq) = cluster.unexecuted[0];
    cluster.execute(0);
    cluster.run();
    assert_eq!((sidecar, seq), (1, Seq(2)));
    assert!(cluster.outcome(1, b[1]).is_ok() && cluster.is_pending(a[1]));
    cluster.event(1, Event::Executed { epoch, seq });
    cluster.execute_all();
    assert!(cluster.all_completed(&a) && cluster.all_completed(&b), "an operation executed twice counts once");
}

/// Captures an order, applies `tamper`, and returns the failure that ends the epoch.
fn end_after(tamper: impl Fn(&mut ronde_wire::control::Order, &mut Seq)) -> ronde_wire::Failure {
    let mut cluster = Cluster::new(&[0, 1]).started();
    let first = cluster.submit_all(&sum("first", &[8]));
    cluster.run();
    assert!(cluster.all_completed(&first));
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("t", &[8]));
    cluster.drain_all();
    cluster.deliver((1, 0));
    cluster.drain_all();
    cluster.tamper((0, 1), |seq, message| {
        if let Control::Order(order) = message {
            tamper(order, seq);
        }
    });
    cluster.run();
    let failure = cluster.common_failure(&requests).clone();
    assert_eq!(failure.sidecar, Some(ronde_wire::SidecarIndex(1)), "{failure}");
    assert_eq!(cluster.ended.len(), 2);
    failure
}

#[test]
fn a_sidecar_checks_every_order_against_its_own_view() {
    let assert_reason = |words: &str, failure: ronde_wire::Failure| {
        assert!(failure.reason.contains(words) && failure.cause == Cause::Bug, "{failure}");
    };
    assert_reason("digest", end_after(|order, _| order.tuning.chunk_bytes *= 2));
    assert_reason("digest", end_after(|order, _| order.tuning.algorithm = Algorithm::BinomialTree));
    assert_reason(
        "digest",
        end_after(|order, _| order.tensors[0].shape = ronde_wire::Shape::new(vec![9]).expect("a shape")),
    );
    assert_reason(
        "shape [4, 2] was ordered",
        end_after(|order, _| {
            order.tensors[0].shape = ronde_wire::Shape::new(vec![4, 2]).expect("a shape");
        }),
    );
    assert_reason("type int32 was ordered", end_after(|order, _| order.dtype = DType::I32));
    assert_reason("scale", end_after(|order, _| order.postscale = 7.0));
    assert_reason(
        "was ordered",
        end_after(|order, _| {
            order.collective = Collective::AllReduce { op: ronde_wire::ReduceOp::Max };
        }),
    );
    assert_reason("not asked for", end_after(|order, _| order.tensors[0].name = super::cluster::name("other")));
    assert_reason("process set 5 does not exist", end_after(|order, _| order.set = SetId(5)));
    assert_reason("has 1 to 1024 tensors, not 0", end_after(|order, _| order.tensors.clear()));
    assert_reason("it follows operation 1", end_after(|_, seq| *seq = Seq(1)));
    assert_reason("digest", end_after(|order, _| order.digest = [0; 16]));
}

#[test]
fn an_operation_that_cannot_be_performed_ends_the_epoch() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&sum("t", &[8]));
    cluster.run();
    let (_, epoch, seq) = cluster.unexecuted[1];
    let reason = "a segment is gone".to_owned();
    cluster.event(1, Event::ExecutionFailed { epoch, seq, reason, plugin: false });
    cluster.run();
    let failure = cluster.common_failure(&requests);
    assert!(failure.reason.contains("sidecar 1 (ranks 2-3) cannot go on: operation 1 of epoch 1"), "{failure}");
    assert!(failure.reason.contains("a segment is gone"));
}

#[test]
fn an_operation_of_a_schedule_is_marked_because_other_ranks_may_be_missing() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    for _ in 0..5 {
        cluster.submit_all(&sum("t", &[4]));
        cluster.run();
    }
    assert!(!cluster.admitted[0][0].scheduled, "the first one was ordered when both ranks had submitted it");
    cluster.submit(0, sum("t", &[4]));
    cluster.run();
    assert!(cluster.admitted[0].last().expect("it was admitted").scheduled);
    let status = cluster.engines[0].status(cluster.now);
    let [request] = &status.pending_requests[..] else { panic!("{status:?}") };
    assert!(request.ordered && request.scheduled, "{request:?}");
}

/// All ranks submit one operation of a schedule and wait for it, before or without those that come first.
#[test]
fn an_operation_submitted_out_of_the_order_of_a_schedule_is_performed_after_its_patience() {
    for (alone, expected) in [("a", 1), ("b", 1), ("c", 1), ("d", 0)] {
        let mut cluster = Cluster::new(&[0, 1, 1, 2, 0]).started();
        // A bucket of `a` and `b`, then `c`.
        for _ in 0..2 {
            let mut step = cluster.submit_all(&sum("a", &[4]));
            step.extend(cluster.submit_all(&sum("b", &[4])));
            cluster.run();
            step.extend(cluster.submit_all(&sum("c", &[4])));
            cluster.run();
            assert!(step.iter().all(|request| !cluster.is_pending(*request)));
        }
        assert_eq!(cluster.buckets(1), [vec!["a", "b"], vec!["c"], vec!["a", "b"], vec!["c"]]);
        assert_eq!(cluster.engines[0].stats().schedules_issued, 1);
        let requests = cluster.submit_all(&sum(alone, &[4]));
        cluster.run();
        let waits = requests.iter().all(|request| cluster.is_pending(*request));
        assert_eq!(waits, expected == 1, "{alone}: a rank may still submit the others");
        assert_eq!(cluster.pass_patience(), waits);
        cluster.run();
        assert!(cluster.all_completed(&requests), "{alone}");
        assert_eq!(cluster.engines[0].stats().schedules_withdrawn[Invalidation::Order as usize], expected);
        assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
    }
}
