//! Tests of the measured cost model: which operations are samples, and what it changes.

use ronde_wire::TuningParameter;

use super::cluster::{Cluster, sum};
use super::memberships::world;
use crate::autotune::AutotuneSettings;
use crate::engine::EngineConfig;

const GAMMA: f64 = 3e-4;

/// Three sidecars with a rank each, which measure.
fn cluster(adjust: impl Fn(EngineConfig) -> EngineConfig) -> Cluster {
    let measuring = |config| adjust(EngineConfig { measured_gamma_us_per_byte: Some(GAMMA), ..config });
    Cluster::of(world(&[0, 1, 2]), measuring).started()
}

/// Performs a sum alone.
fn perform(cluster: &mut Cluster, name: &str, elements: u64) {
    let requests = cluster.submit_all(&sum(name, &[elements]));
    cluster.advance(1);
    cluster.run();
    assert!(cluster.all_completed(&requests));
}

/// Performs sums of several sizes, each with a new name, so that all are negotiated.
fn perform_new_names(cluster: &mut Cluster, prefix: &str) {
    for number in 0..20 {
        perform(cluster, &format!("{prefix}.{number}"), 4_096 << (number % 8));
    }
}

#[test]
fn a_measured_gamma_is_reported_and_selects_no_algorithm() {
    let mut cluster = cluster(|config| config);
    let given = cluster.engines[0].status(cluster.now).cost;
    perform_new_names(&mut cluster, "t");
    let status = cluster.engines[0].status(cluster.now);
    assert_eq!(status.measured_cost.expect("enough operations").gamma_us_per_byte, GAMMA);
    assert_eq!(status.cost, given);
    assert!(given.gamma_us_per_byte < GAMMA, "{given:?}");
}

/// A schedule admits operations before other sidecars' ranks are ready: the time for which they wait is no latency.
#[test]
fn operations_of_a_schedule_are_no_samples() {
    let mut cluster = cluster(|config| config);
    for _ in 0..20 {
        perform(&mut cluster, "small", 4_096);
        perform(&mut cluster, "large", 4_096 << 8);
    }
    let status = cluster.engines[0].status(cluster.now);
    assert!(status.stats.scheduled_operations > 20, "{:?}", status.stats);
    assert_eq!(status.measured_cost, None);
}

#[test]
fn samples_under_other_values_of_a_search_do_not_count() {
    let parameters = vec![TuningParameter::ChunkBytes];
    let settings = AutotuneSettings { parameters, warmup_samples: 0, steps_per_sample: 1, ..Default::default() };
    let mut cluster = cluster(|config| EngineConfig { autotune: Some(settings.clone()), run_ahead: None, ..config });
    perform_new_names(&mut cluster, "t");
    assert!(cluster.engines[0].status(cluster.now).measured_cost.is_some());
    let before = cluster.engines[0].status(cluster.now).autotune.expect("a search").knobs;
    for _ in 0..100 {
        perform(&mut cluster, "step", 4_096);
        let status = cluster.engines[0].status(cluster.now);
        if status.autotune.expect("a search").knobs != before {
            assert_eq!(status.measured_cost, None);
            return;
        }
    }
    panic!("the search has not changed a value");
}
