//! Tests of operations with a plugin: matched by digest, committed by the coordinator, failed without ending the epoch.

use std::sync::Arc;

use ronde_wire::{
    Cause, Codec, Collective, Control, DType, PluginUse, PluginWork, Rank, ReduceOp, Request, SetId, SidecarIndex,
    World,
};

use super::cluster::{Cluster, request, sum};
use super::liveness::advance_with_workers;
use crate::engine::EngineConfig;
use crate::event::Event;

const FOUR_ON_TWO: [u32; 4] = [0, 0, 1, 1];

pub(super) fn topk() -> PluginUse {
    let work = PluginWork::Codec { block_elements: 64, encoded_bytes: 300 };
    PluginUse { name: "topk".into(), version: "1.0.0".into(), digest: [7; 32], parameters: vec![1], work }
}

pub(super) fn coded(tensor: &str, plugin: PluginUse) -> Request {
    Request { codec: Codec::Plugin, plugin: Some(Arc::new(plugin)), ..sum(tensor, &[8]) }
}

fn reduced(tensor: &str, work: PluginWork) -> Request {
    let plugin = PluginUse { name: "median".into(), work, ..topk() };
    let plain = request(tensor, Collective::AllReduce { op: ReduceOp::Plugin }, &[8]);
    Request { plugin: Some(Arc::new(plugin)), ..plain }
}

#[test]
fn no_rank_gets_a_result_before_all_members_have_performed_the_operation() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&coded("t", topk()));
    cluster.run();
    assert_eq!(cluster.unexecuted.len(), 2);
    cluster.execute(0);
    cluster.run();
    assert!(requests.iter().all(|request| cluster.is_pending(*request)) && cluster.committed.is_empty());
    cluster.execute(0);
    cluster.run();
    assert!(cluster.all_completed(&requests));
    let seq = cluster.admitted[0][0].seq;
    let mut committed = cluster.committed.clone();
    committed.sort_unstable();
    assert_eq!(committed, [(0, seq), (1, seq)]);
    assert_eq!(cluster.admitted[0][0].plugin.as_ref().map(|plugin| plugin.elements.clone()), Some(vec![8]));
}

#[test]
fn a_plugin_failure_on_one_sidecar_fails_only_that_operation_everywhere() {
    for late in [false, true] {
        let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
        cluster.executes = false;
        let requests = cluster.submit_all(&reduced("t", PluginWork::NAry));
        let other = cluster.submit_all(&sum("other", &[8]));
        cluster.run();
        let (_, epoch, seq) = cluster.unexecuted[0];
        if late {
            // The other member has performed it already.
            let at = cluster.unexecuted.iter().position(|(sidecar, _, of)| (*sidecar, *of) == (0, seq));
            cluster.execute(at.expect("sidecar 0 has admitted it"));
        }
        let reason = "plugin median@1.0.0 trapped: unreachable".to_owned();
        cluster.event(1, Event::ExecutionFailed { epoch, seq, reason: reason.clone(), plugin: true });
        // Another lane has failed, too.
        cluster.event(1, Event::ExecutionFailed { epoch, seq, reason, plugin: true });
        cluster.run();
        let failure = cluster.common_failure(&requests);
        assert_eq!((failure.cause, failure.sidecar.map(|s| s.0)), (Cause::Refused, Some(1)), "{failure}");
        for part in ["tensor t of process set 0", "on sidecar 1", "median@1.0.0 trapped: unreachable"] {
            assert!(failure.reason.contains(part), "{failure}");
        }
        assert!(cluster.ended.is_empty() && cluster.committed.is_empty());
        cluster.execute_all();
        assert!(cluster.all_completed(&other));
        let again = cluster.submit_all(&reduced("t", PluginWork::NAry));
        cluster.run();
        cluster.execute_all();
        assert!(cluster.all_completed(&again), "the name is free");
    }
}

/// The codec state of a set is dropped once none of its operations is in flight, and not before: their residuals count
/// until then.
#[test]
fn a_removed_set_is_forgotten_when_its_last_operation_is_committed() {
    for fails in [false, true] {
        let mut cluster = Cluster::with_sets(&[0, 0, 1], &[&[1, 2]]).started();
        cluster.executes = false;
        let requests: Vec<_> =
            (1..3).map(|rank| cluster.submit(rank, Request { set: SetId(1), ..coded("t", topk()) })).collect();
        cluster.run();
        let (_, epoch, seq) = cluster.unexecuted[0];
        let remove = request("remove", Collective::RemoveSet { set: SetId(1) }, &[0]);
        let removals = cluster.submit_all(&Request { dtype: DType::U8, ..remove });
        cluster.run();
        assert!(cluster.all_completed(&removals) && cluster.forgotten.is_empty());
        if fails {
            cluster.event(1, Event::ExecutionFailed { epoch, seq, reason: "it is over".into(), plugin: true });
            cluster.run();
        } else {
            cluster.execute_all();
        }
        assert!((1..).zip(&requests).all(|(rank, request)| cluster.outcome(rank, *request).is_err() == fails));
        assert_eq!(cluster.committed.len(), if fails { 0 } else { 2 });
        cluster.forgotten.sort_unstable();
        assert_eq!(cluster.forgotten, [(0, SetId(1)), (1, SetId(1))]);
    }
}

/// All ranks have submitted, so no rank is missing.
#[test]
fn a_stall_report_names_the_sidecars_that_are_not_done_with_a_plugin() {
    let world = World::new(FOUR_ON_TWO.map(SidecarIndex).into()).expect("a world");
    let mut cluster = Cluster::of(world, |config| EngineConfig { stall_warning_ms: 2_000, ..config }).started();
    cluster.executes = false;
    let requests = cluster.submit_all(&coded("t", topk()));
    cluster.run();
    let of_first = cluster.unexecuted.iter().position(|(sidecar, ..)| *sidecar == 0);
    cluster.execute(of_first.expect("sidecar 0 has admitted it"));
    cluster.run();
    advance_with_workers(&mut cluster, 1_900, None);
    assert!(cluster.notices.is_empty());
    advance_with_workers(&mut cluster, 800, None);
    let (at, sidecars, ranks, text) = cluster.notices[0].clone();
    assert_eq!((at, sidecars, ranks), (0, vec![], vec![]));
    let words = "Tensor t of process set 0 has waited for plugin topk@1.0.0 (070707070707) for 2.";
    assert!(text.contains(words) && text.contains("not done: sidecar 1 (ranks 2-3)."), "{text}");
    assert_eq!(cluster.notices.len(), 1, "once an interval");
    cluster.execute_all();
    assert!(cluster.all_completed(&requests));
    advance_with_workers(&mut cluster, 2_500, None);
    assert_eq!(cluster.notices.len(), 2, "{:?}", cluster.notices);
    assert!(cluster.notices[1].3.contains("The stall is over"), "{:?}", cluster.notices[1]);
}

#[test]
fn operations_in_flight_at_a_shutdown_are_committed() {
    for fails in [false, true] {
        let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
        cluster.executes = false;
        let requests = cluster.submit_all(&coded("t", topk()));
        cluster.run();
        cluster.close_session(3);
        cluster.run();
        assert!(cluster.ended.is_empty(), "what was ordered is finished");
        let (_, epoch, seq) = cluster.unexecuted[0];
        if fails {
            cluster.event(0, Event::ExecutionFailed { epoch, seq, reason: "it is over".into(), plugin: true });
            cluster.run();
            assert!(cluster.common_failure(&requests).reason.contains("it is over"));
        } else {
            cluster.execute_all();
            assert!(cluster.all_completed(&requests));
        }
        assert_eq!(cluster.ended.len(), 2);
        assert!(cluster.ended.iter().all(|(_, _, failure)| failure.cause == Cause::ShutDown));
    }
}

#[test]
fn different_modules_with_one_name_are_listed_with_their_sidecars() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let odd = PluginUse { digest: [9; 32], ..topk() };
    let requests: Vec<_> = (0..)
        .zip([topk(), topk(), odd.clone(), odd])
        .map(|(rank, plugin)| cluster.submit(rank, coded("t", plugin)))
        .collect();
    cluster.run();
    let failure = cluster.common_failure(&requests);
    assert_eq!((failure.cause, failure.rank), (Cause::Mismatch, Some(Rank(2))), "{failure}");
    for part in [
        "sidecar 0: topk@1.0.0 (070707070707)",
        "sidecar 1: topk@1.0.0 (090909090909)",
        "install the same file on all hosts",
    ] {
        assert!(failure.reason.contains(part), "{failure}");
    }
}

#[test]
fn a_tensor_with_more_blocks_than_a_plan_holds_is_refused_alone() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let too_long = Request { shape: sum("t", &[64 << 20, 2]).shape, ..coded("t", topk()) };
    let refused = cluster.submit_all(&too_long);
    cluster.run();
    let failure = cluster.common_failure(&refused);
    assert_eq!(failure.cause, Cause::Refused, "{failure}");
    assert!(failure.reason.contains("has 2097152 blocks, more than the 262144 of an operation"), "{failure}");
    let next = cluster.submit_all(&coded("t", topk()));
    cluster.run();
    assert!(cluster.ended.is_empty() && cluster.all_completed(&next));
}

#[test]
fn other_parameters_or_another_plugin_are_a_mismatch() {
    let other = PluginUse { parameters: vec![2], ..topk() };
    let named = PluginUse { name: "onebit".into(), ..topk() };
    for (odd, words) in [(coded("t", other), "with parameters [2]"), (coded("t", named), "onebit@1.0.0")] {
        let mut cluster = Cluster::new(&[0, 1]).started();
        let requests = vec![cluster.submit(0, coded("t", topk())), cluster.submit(1, odd)];
        cluster.run();
        let failure = cluster.common_failure(&requests);
        assert!(failure.reason.contains("Mismatched codecs") && failure.reason.contains(words), "{failure}");
    }
    let mut cluster = Cluster::new(&[0, 1]).started();
    let plain = request("t", Collective::AllReduce { op: ReduceOp::Median }, &[8]);
    let requests = vec![cluster.submit(0, reduced("t", PluginWork::NAry)), cluster.submit(1, plain)];
    cluster.run();
    let failure = cluster.common_failure(&requests);
    assert!(failure.reason.contains("plugin median@1.0.0"), "{failure}");
}

#[test]
fn a_plugin_without_a_fitting_collective_is_refused() {
    let codec = || Some(Arc::new(topk()));
    let gather = Request { plugin: codec(), ..request("t", Collective::AllGather, &[8]) };
    let maximum = Collective::AllReduce { op: ReduceOp::Max };
    let unnamed = Request { codec: Codec::Plugin, ..sum("t", &[8]) };
    let scatter = request("t", Collective::ReduceScatter { op: ReduceOp::Plugin }, &[8]);
    let large = PluginUse { work: PluginWork::Codec { block_elements: 1 << 19, encoded_bytes: 1 }, ..topk() };
    for (wrong, words) in [
        (gather, "ALLGATHER takes no plugin"),
        (Request { codec: Codec::Plugin, plugin: codec(), ..request("t", maximum, &[8]) }, "goes with sum or average"),
        (Request { plugin: codec(), ..sum("t", &[8]) }, "goes with sum or average"),
        (unnamed, "names none"),
        (scatter, "is not supported"),
        (coded("t", PluginUse { name: String::new(), ..topk() }), "the length of the name"),
        (coded("t", PluginUse { parameters: vec![0; 17], ..topk() }), "the number of parameters"),
        (reduced("t", PluginWork::TwoPass { measures: 65 }), "the number of measures"),
        (coded("t", large), "more than a chunk"),
    ] {
        let mut cluster = Cluster::new(&[0, 1]).started();
        let requests = cluster.submit_all(&wrong);
        cluster.run();
        let failure = cluster.failure(0, requests[0]);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{words}: {failure}");
        let fine = cluster.submit_all(&sum("u", &[8]));
        cluster.run();
        assert!(cluster.all_completed(&fine));
    }
}

#[test]
fn buckets_hold_tensors_of_one_plugin() {
    let mut cluster = Cluster::new(&[0, 1]).started();
    cluster.executes = false;
    for tensor in ["a", "b"] {
        cluster.submit_all(&sum(tensor, &[8]));
        cluster.run();
    }
    let other = PluginUse { parameters: vec![2], ..topk() };
    let all = [coded("c", topk()), coded("d", topk()), coded("e", other), reduced("f", PluginWork::Adaptive)];
    let requests: Vec<_> = all.iter().flat_map(|what| cluster.submit_all(what)).collect();
    cluster.submit_all(&reduced("g", PluginWork::Adaptive));
    cluster.run();
    // Two are in flight at a time.
    for _ in 0..3 {
        cluster.execute_all();
    }
    assert_eq!(cluster.buckets(0)[2..], [vec!["c", "d"], vec!["e"], vec!["f"], vec!["g"]]);
    assert!(requests.iter().all(|request| !cluster.is_pending(*request)));
}

#[test]
fn a_sidecar_that_reports_without_being_a_member_is_expelled() {
    let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[0, 1]]).started();
    cluster.executes = false;
    for rank in 0..2 {
        cluster.submit(rank, Request { set: SetId(1), ..coded("t", topk()) });
    }
    cluster.run();
    let seq = cluster.admitted[0][0].seq.0;
    cluster.control(0, 2, (1, seq), Control::Performed { failure: None });
    cluster.run();
    assert!(cluster.disconnects.iter().any(|(_, peer, why)| peer.0 == 2 && why.contains("must not report")));
}
