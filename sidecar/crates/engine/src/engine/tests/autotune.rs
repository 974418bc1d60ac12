//! Tests of the search for better settings in a cluster: all sidecars use the coordinator's values at each operation.

use ronde_wire::{Cause, Collective, DType, Rank, ReduceOp, Request, SetId, Shape, SidecarIndex, TuningParameter};

use super::cluster::{Cluster, name};
use super::memberships::world;
use crate::autotune::{AutotuneSample, AutotuneSettings, AutotuneStage};
use crate::engine::EngineConfig;
use crate::event::Event;

/// A search of one warm-up sample and so many others, with one step in each of its portions.
fn settings(samples_max: usize, parameters: &[TuningParameter]) -> AutotuneSettings {
    AutotuneSettings {
        parameters: parameters.to_vec(),
        warmup_samples: 1,
        steps_per_sample: 1,
        samples_max,
        ..AutotuneSettings::default()
    }
}

#[expect(clippy::needless_pass_by_value, reason = "callers have no other use for it")]
fn cluster(placement: &[u32], autotune: AutotuneSettings) -> Cluster {
    let adjust = |config: EngineConfig| EngineConfig {
        autotune: Some(autotune.clone()),
        eager_bytes: 4_096,
        lanes: 1,
        chunk_bytes: Some(4_096),
        fusion_threshold_bytes: 1 << 20,
        ..config
    };
    Cluster::of(world(placement), adjust)
}

/// A sum of so many elements.
fn sum(tensor: &str, elements: u64) -> Request {
    let shape = Shape::new(vec![elements]).expect("a shape");
    Request::new(SetId::WORLD, name(tensor), Collective::AllReduce { op: ReduceOp::Sum }, DType::F32, shape)
}

/// A step of three tensors, one of them small. It takes 10 ms.
fn step(cluster: &mut Cluster) {
    let mut requests = Vec::new();
    for (tensor, elements) in [("large", 300_000), ("middle", 5_000), ("small", 8)] {
        requests.push(cluster.submit_all(&sum(tensor, elements)));
    }
    cluster.advance(10);
    cluster.run();
    for requests in &requests {
        assert!(cluster.all_completed(requests));
    }
}

/// Takes steps until the search is over; returns its outcome.
fn finish(cluster: &mut Cluster, coordinator: usize, steps: u64) -> AutotuneSample {
    for _ in 0..steps {
        step(cluster);
        let of = |(sidecar, sample): &(usize, AutotuneSample)| {
            (*sidecar == coordinator && sample.stage == AutotuneStage::Finished).then_some(*sample)
        };
        if let Some(outcome) = cluster.samples.iter().find_map(of) {
            return outcome;
        }
    }
    panic!("the search is not over after {steps} steps: {:?}", cluster.samples);
}

/// The plans that all sidecars made for one operation are equal, as the digest of each order says; here their cuts.
fn cuts(cluster: &Cluster, sidecar: usize) -> Vec<(u64, usize, usize)> {
    let cut = |admission: &std::sync::Arc<crate::event::Admission>| {
        (admission.seq.0, admission.plan.sub_schedules.len(), admission.plan.window)
    };
    cluster.admitted[sidecar].iter().map(cut).collect()
}

#[test]
fn a_search_changes_values_at_the_same_operation_on_all_sidecars_and_ends() {
    let settings = settings(6, &TuningParameter::KEEP_BITS);
    let steps = settings.steps();
    let mut cluster = cluster(&[0, 0, 1, 2], settings).started();
    let outcome = finish(&mut cluster, 0, steps);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty(), "{:?}", cluster.ended);
    // One warm-up sample, six others, the outcome; only the coordinator has any.
    assert_eq!(cluster.samples.len(), 8);
    assert!(cluster.samples.iter().all(|(sidecar, _)| *sidecar == 0));
    let sizes: std::collections::BTreeSet<u64> =
        cluster.samples.iter().map(|(_, sample)| sample.knobs.fusion_threshold_bytes).collect();
    assert!(sizes.len() >= 3, "{sizes:?}");
    let first = cuts(&cluster, 0);
    assert!(cuts(&cluster, 1) == first && cuts(&cluster, 2) == first, "sidecars cut operations differently");
    let stats = cluster.engines[0].stats();
    let tuning = ronde_wire::Invalidation::Tuning as usize;
    assert!(stats.schedules_issued >= 5 && stats.schedules_withdrawn[tuning] >= 5, "{stats:?}");
    // The values stay, and steps run ahead again.
    let status = cluster.engines[0].status(cluster.now).autotune.expect("there was a search");
    assert_eq!((status.stage, status.knobs, status.best), (AutotuneStage::Finished, outcome.knobs, Some(outcome)));
    let before = cluster.engines[0].stats().schedules_issued;
    for _ in 0..20 {
        step(&mut cluster);
    }
    let stats = cluster.engines[0].stats();
    assert!(stats.schedules_issued <= before + 1, "{stats:?}");
    assert!(cluster.engines[0].status(cluster.now).schedule.is_some());
    assert_eq!(cluster.samples.len(), 8);
    assert!(cluster.engines[1].status(cluster.now).autotune.is_none());
}

#[test]
fn values_that_change_bits_are_agreed_as_well() {
    let settings = settings(24, &TuningParameter::ALL);
    let steps = settings.steps();
    let mut cluster = cluster(&[0, 0, 1, 2], settings).started();
    finish(&mut cluster, 0, steps);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty(), "{:?}", cluster.ended);
    let knobs = || cluster.samples.iter().map(|(_, sample)| sample.knobs);
    assert!(knobs().any(|knobs| !knobs.hierarchical_allreduce) && knobs().any(|knobs| knobs.hierarchical_allreduce));
    assert!(knobs().any(|knobs| knobs.eager_bytes < 32) && knobs().any(|knobs| knobs.eager_bytes >= 32));
    let first = cuts(&cluster, 0);
    assert!(cuts(&cluster, 1) == first && cuts(&cluster, 2) == first, "sidecars cut operations differently");
}

#[test]
fn when_the_coordinator_dies_the_search_begins_again_on_the_next_one() {
    let settings = settings(4, &TuningParameter::KEEP_BITS);
    let steps = settings.steps();
    let mut cluster = cluster(&[0, 1, 2], settings).started();
    for _ in 0..25 {
        step(&mut cluster);
    }
    let searching = cluster.engines[0].status(cluster.now).autotune.expect("a search");
    assert!(searching.stage == AutotuneStage::Searching && searching.samples > 0, "{searching:?}");
    let pending: Vec<_> = [1, 2].map(|rank| (rank, cluster.submit(rank, sum("large", 300_000)))).into();
    cluster.stopped[0] = true;
    for peer in [1, 2] {
        cluster.event(peer, Event::LinkDown { peer: SidecarIndex(0), reason: "reset".to_owned() });
    }
    cluster.run();
    for (rank, request) in pending {
        let failure = cluster.failure(rank, request);
        assert_eq!((failure.cause, failure.sidecar), (Cause::SidecarLost, Some(SidecarIndex(0))), "{failure:?}");
    }
    cluster.change_to(2, &[1, 2]);
    let status = cluster.engines[1].status(cluster.now).autotune.expect("the next coordinator searches");
    assert_eq!((status.stage, status.samples), (AutotuneStage::WarmUp, 0));
    assert_eq!(status.knobs.fusion_threshold_bytes, 1 << 20);
    finish(&mut cluster, 1, steps);
}

#[test]
fn in_another_membership_an_unfinished_search_goes_on_from_its_best_and_a_finished_one_is_kept() {
    let settings = settings(3, &TuningParameter::KEEP_BITS);
    let steps = settings.steps();
    let mut cluster = cluster(&[0, 1, 2], settings).started();
    for _ in 0..25 {
        step(&mut cluster);
    }
    let best = cluster.engines[0].status(cluster.now).autotune.expect("a search").best.expect("a sample");
    cluster.leave(2, ronde_wire::Failure::new(Cause::RankLost, "it is gone"));
    cluster.run();
    cluster.change_to(2, &[0, 1]);
    let status = cluster.engines[0].status(cluster.now).autotune.expect("a search");
    assert_eq!((status.samples, status.knobs), (0, best.knobs));
    let outcome = finish(&mut cluster, 0, steps);
    cluster.leave(1, ronde_wire::Failure::new(Cause::RankLost, "it is gone"));
    cluster.run();
    cluster.change_to(3, &[0, 1, 2]);
    let status = cluster.engines[0].status(cluster.now).autotune.expect("a search");
    assert_eq!((status.stage, status.knobs), (AutotuneStage::Finished, outcome.knobs));
    step(&mut cluster);
}

#[test]
fn an_epoch_that_ends_starts_the_sample_again() {
    let mut cluster = cluster(&[0, 1], settings(3, &TuningParameter::KEEP_BITS)).started();
    for _ in 0..5 {
        step(&mut cluster);
    }
    for rank in [0, 1] {
        cluster.close_session(rank);
        cluster.run();
    }
    for rank in [0, 1] {
        cluster.attach(Rank(rank));
    }
    cluster.run();
    // Three steps to settle and five portions of one.
    for _ in 0..7 {
        step(&mut cluster);
        assert_eq!(cluster.samples.len(), 0, "steps of two epochs are in one sample");
    }
    step(&mut cluster);
    assert_eq!(cluster.samples.len(), 1);
}
