//! Tests of the traces of rank 0's engine, for timelines.

use ronde_wire::{Collective, DType, Rank, ReduceOp, Seq, SetId, Shape};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;
use crate::trace::Trace;

fn traced(mut cluster: Cluster) -> Cluster {
    cluster.engines[0].set_tracing(true);
    cluster
}

fn traces(cluster: &mut Cluster) -> Vec<Trace> {
    cluster.engines[0].take_traces()
}

fn ready(tensor: &str, rank: u32) -> Trace {
    Trace::Ready { set: SetId::WORLD, name: name(tensor), operation: "ALLREDUCE", rank: Rank(rank) }
}

fn concluded(tensor: &str, operation: Option<&'static str>) -> Trace {
    Trace::Concluded { set: SetId::WORLD, name: name(tensor), operation }
}

fn ordered(seq: u64, tensors: &[(&str, u64)], ahead: bool) -> Trace {
    let shape = |elements| Shape::new(vec![elements]).expect("a shape");
    let tensors = tensors.iter().map(|(tensor, elements)| (name(tensor), shape(*elements))).collect();
    Trace::Ordered { seq: Seq(seq), set: SetId::WORLD, operation: "ALLREDUCE", dtype: DType::F32, tensors, ahead }
}

fn over(seq: u64, dropped: bool) -> Trace {
    Trace::Over { seq: Seq(seq), dropped }
}

#[test]
fn nothing_is_traced_unless_tracing_is_on() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.submit_all(&sum("t", &[2]));
    cluster.run();
    assert_eq!(traces(&mut cluster), []);
    cluster.engines[0].set_tracing(true);
    cluster.submit(0, sum("t", &[2]));
    cluster.run();
    assert_eq!(traces(&mut cluster), [ready("t", 0)]);
    cluster.submit(1, sum("t", &[2]));
    cluster.run();
    cluster.engines[0].set_tracing(false);
    assert_eq!(traces(&mut cluster), [], "what nobody took is forgotten");
}

#[test]
fn readiness_of_each_rank_is_traced_then_the_order_then_the_end() {
    for eager_bytes in [0, 4_096] {
        let world = Cluster::new(&[0, 1, 1]).world;
        let mut cluster = traced(Cluster::of(world, |config| EngineConfig { eager_bytes, ..config }).started());
        for rank in [2, 0, 1] {
            cluster.submit(rank, sum("t", &[2]));
            cluster.run();
        }
        let expected =
            [ready("t", 2), ready("t", 0), ready("t", 1), Trace::Cycle, ordered(1, &[("t", 2)], false), over(1, false)];
        assert_eq!(traces(&mut cluster), expected, "{eager_bytes}");
    }
}

#[test]
fn fused_tensors_are_traced_as_one_order() {
    let mut cluster = traced(Cluster::new(&[0, 1]).started());
    for tensor in ["a", "b"] {
        cluster.submit(0, sum(tensor, &[3]));
    }
    cluster.run();
    for tensor in ["a", "b"] {
        cluster.submit(1, sum(tensor, &[3]));
    }
    cluster.run();
    let found = traces(&mut cluster);
    assert_eq!(found[4..], [Trace::Cycle, ordered(1, &[("a", 3), ("b", 3)], false), over(1, false)]);
}

#[test]
fn failures_joins_and_adasum_are_traced_by_name() {
    let mut cluster = traced(Cluster::new(&[0, 1]).started());
    cluster.submit(0, sum("t", &[2]));
    cluster.submit(1, sum("t", &[3]));
    cluster.run();
    assert_eq!(traces(&mut cluster).last(), Some(&concluded("t", None)));
    let refused = cluster.submit(0, sum("u", &[2]));
    cluster.run();
    cluster.withdraw(0, refused);
    cluster.run();
    assert_eq!(traces(&mut cluster), [ready("u", 0), concluded("u", None)]);
    cluster.submit_all(&request("j", Collective::Join, &[]));
    cluster.run();
    assert_eq!(traces(&mut cluster).last(), Some(&concluded("j", Some("JOIN"))));
    cluster.submit_all(&request("a", Collective::AllReduce { op: ReduceOp::Adasum }, &[4]));
    cluster.run();
    let is_adasum = |trace: &Trace| matches!(trace, Trace::Ordered { operation: "ADASUM", .. });
    assert!(traces(&mut cluster).iter().any(is_adasum));
}

#[test]
fn operations_of_other_sidecars_are_traced_from_order_to_end() {
    for eager_bytes in [0, 4_096] {
        let world = Cluster::with_sets(&[0, 1, 2], &[&[1, 2]]).world;
        let mut cluster = traced(Cluster::of(world, |config| EngineConfig { eager_bytes, ..config }).started());
        for rank in [1, 2] {
            let mut what = sum("t", &[2]);
            what.set = SetId(1);
            cluster.submit(rank, what);
        }
        cluster.run();
        let found = traces(&mut cluster);
        assert!(matches!(found[found.len() - 2], Trace::Ordered { seq: Seq(1), set: SetId(1), .. }), "{found:?}");
        assert_eq!(found.last(), Some(&over(1, false)), "{eager_bytes}");
        assert!(cluster.admitted[0].is_empty());
    }
}

#[test]
fn a_schedule_is_traced_for_local_ranks_and_dropped_operations_are_traced_again() {
    let mut cluster = traced(Cluster::new(&[0, 1]).started());
    for _ in 0..2 {
        cluster.submit_all(&sum("t", &[2]));
        cluster.run();
    }
    let found = traces(&mut cluster);
    let cycles = found.iter().filter(|trace| **trace == Trace::Cycle).count();
    assert_eq!(cycles, 3, "two orders and the schedule: {found:?}");
    cluster.submit_all(&sum("t", &[2]));
    cluster.run();
    assert_eq!(traces(&mut cluster), [ready("t", 0), ordered(3, &[("t", 2)], true), over(3, false)]);
    cluster.executes = false;
    cluster.submit(0, sum("t", &[2]));
    cluster.run();
    // Another rank deviates: the operation that no rank has completed is dropped and negotiated again.
    cluster.submit(1, sum("other", &[2]));
    cluster.run();
    let found = traces(&mut cluster);
    let rest = [ready("t", 0), ordered(4, &[("t", 2)], true), over(4, true), ready("t", 0), ready("other", 1)];
    for trace in &rest {
        assert!(found.contains(trace), "{trace:?} is not in {found:?}");
    }
}

#[test]
fn the_end_of_an_epoch_is_traced() {
    let mut cluster = traced(Cluster::new(&[0, 1]).started());
    cluster.submit(0, sum("t", &[2]));
    cluster.run();
    cluster.close_session(1);
    cluster.run();
    assert_eq!(traces(&mut cluster), [ready("t", 0), Trace::EpochOver]);
}
