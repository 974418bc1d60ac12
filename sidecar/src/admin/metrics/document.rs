//! Generates `docs/METRICS.md` from the table, and checks that names follow Prometheus' rules.

use std::collections::BTreeMap;
use std::time::Duration;

use prometheus::proto::MetricType;
use ronde_bootstrap::streams::LostLines;
use ronde_engine::{AutotuneSample, AutotuneStage, AutotuneStatus, Engine, EngineConfig, Knobs, Time};
use ronde_transport::{PathStats, PortStats, QuicPath};
use ronde_wire::control::{Carrier, Transport};
use ronde_wire::{SidecarIndex, World};

use super::{Kind, METRICS, Snapshot, gather};
use crate::driver::GpuState;
use crate::operation::lanes::LaneStats;
use crate::plugins::PluginStats;

fn document() -> String {
    METRICS.iter().fold(HEAD.to_owned(), |mut text, metric| {
        let kind = match metric.kind {
            Kind::Counter | Kind::LinkCounter => "counter",
            Kind::Gauge => "gauge",
        };
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let (labels, unit) = (labels.join(", "), unit(metric.name).unwrap_or_default());
        text.push_str(&format!("| `{}` | {kind} | {labels} | {unit} | {} |\n", metric.name, metric.help));
        text
    })
}

/// The base unit that a name ends in.
fn unit(name: &str) -> Option<&'static str> {
    let name = name.strip_suffix("_total").unwrap_or(name);
    ["bytes", "seconds"].into_iter().find(|unit| name.ends_with(unit))
}

const HEAD: &str = "# Metrics

Every sidecar serves its metrics in Prometheus' text format at `/metrics` on a loopback port. `ronde run --verbose`
prints the port, and `ronde status` finds it by itself. Counters start at 0 with the process, those of a link with the
link. Only the sidecar of rank 0 has the metrics marked *Coordinator*; elsewhere they stay 0 or absent.
`--otlp-endpoint` sends the same metrics to a collector of OpenTelemetry ([OPERATIONS.md](OPERATIONS.md#opentelemetry)).

Steps that repeat run by a schedule, without negotiation: the coordinator does not learn when each rank was ready. Then each
sidecar counts how long its own ranks wait for each other (`ronde_waited_for_local_seconds_total`), and a wait for the ranks of
another sidecar is not counted. `--no-run-ahead` negotiates, and so counts, every step.

Common questions:

| question | expression |
|---|---|
| throughput between hosts, bytes per second | `sum by (instance) (rate(ronde_sealed_bytes_total{port!=\"control\"}[1m]))` |
| tensors in one operation (fusion) | `rate(ronde_tensors_total[1m]) / rate(ronde_operations_total[1m])` |
| stragglers, share of time | `topk(3, rate(ronde_waited_for_seconds_total[5m]))` |
| the slowest rank | `topk(1, increase(ronde_last_to_be_ready_total[5m]))` |
| retransmitted packets, share | `rate(ronde_link_packets_lost_total[1m]) / rate(ronde_link_packets_sent_total[1m])` |
| silent peers | `max(ronde_suspect_sidecars + ronde_suspect_ranks) > 0` |

Generated from the code; do not edit.

| name | type | labels | unit | description |
|---|---|---|---|---|
";

#[test]
fn the_document_lists_every_metric() {
    crate::documents::hold("METRICS.md", &document());
}

#[test]
fn every_metric_is_on_the_page_with_the_type_and_labels_of_the_table() {
    let families = gather(&snapshot()).expect("no name twice").into_iter();
    let families: BTreeMap<String, _> = families.map(|family| (family.name().to_owned(), family)).collect();
    assert_eq!(families.len(), METRICS.len());
    for metric in METRICS {
        let family = families.get(metric.name).unwrap_or_else(|| panic!("{} has no sample", metric.name));
        let kind = if metric.kind == Kind::Gauge { MetricType::GAUGE } else { MetricType::COUNTER };
        assert_eq!(family.get_field_type(), kind, "{}", metric.name);
        for sample in family.get_metric() {
            let labels: Vec<&str> = sample.get_label().iter().map(prometheus::proto::LabelPair::name).collect();
            assert_eq!(labels, metric.labels, "{}", metric.name);
        }
    }
}

#[test]
fn names_follow_the_rules() {
    for metric in METRICS {
        let name = metric.name;
        let plain = |c: char| c.is_ascii_lowercase() || c == '_';
        assert!(name.starts_with("ronde_") && name.chars().all(plain) && !name.contains("__"), "{name}");
        assert_eq!(name.ends_with("_total"), metric.kind != Kind::Gauge, "{name}: only counters end in _total");
        for scaled in ["_ms", "_us", "_milliseconds", "_microseconds", "_kb", "_mb", "_megabytes", "_percent"] {
            assert!(!name.ends_with(scaled) && !name.contains(&format!("{scaled}_")), "{name}: give a base unit");
        }
        for inside in ["_bytes_", "_seconds_"] {
            let stem = name.strip_suffix("_total").unwrap_or(name);
            assert!(!stem.contains(inside), "{name}: the unit comes last");
        }
        assert!(metric.help.ends_with('.') && metric.help.len() > 10, "{name}: {:?} is no sentence", metric.help);
        assert!(metric.labels.is_sorted() && metric.labels.iter().all(|label| label.chars().all(plain)), "{name}");
    }
}

/// A search with a sample.
fn autotune() -> AutotuneStatus {
    let knobs = Knobs {
        fusion_threshold_bytes: 1,
        chunk_bytes: None,
        lanes: 1,
        eager_bytes: 0,
        hierarchical_allreduce: true,
        alpha_us: 1.0,
    };
    let best = AutotuneSample { stage: AutotuneStage::Searching, knobs, score: 1.0, gain: 1.0, samples: 1 };
    AutotuneStatus { stage: AutotuneStage::Searching, samples: 1, samples_max: 2, knobs, best: Some(best) }
}

/// A sidecar with something to show for every label.
pub(in super::super) fn snapshot() -> Snapshot {
    let me = SidecarIndex(0);
    let world = World::new(vec![me, SidecarIndex(1)]).expect("a world");
    let mut status = Engine::new(EngineConfig::new(me, world), Time(0)).status(Time(0));
    (status.last_to_be_ready, status.waited_for_us) = (vec![1, 2], vec![3, 4]);
    status.stats.waited_here_us = BTreeMap::from([(0, 5)]);
    (status.autotune, status.measured_cost) = (Some(autotune()), Some(status.cost));
    let quic = QuicPath {
        round_trip: Duration::from_micros(50),
        datagram_bytes: 1_452,
        window_bytes: 1,
        packets_sent: 2,
        packets_lost: 1,
        lost_bytes: 1,
    };
    let path = PathStats {
        carrier: Carrier::Quic,
        peer_address: ([127, 0, 0, 1], 7_400).into(),
        sent_bytes: 2,
        received_bytes: 3,
        quic: Some(quic),
    };
    let paths = vec![(SidecarIndex(1), path)];
    Snapshot {
        engine: status.stats.clone(),
        status,
        control: PortStats::default(),
        lanes: vec![LaneStats { paths: paths.clone(), ..LaneStats::default() }],
        inline: ronde_engine::ExecutorStats::default(),
        results: ronde_shm::ArenaUsage { mapped_bytes: 0, in_use_bytes: 0, slots: 0, segments: 0 },
        inputs_mapped_bytes: 0,
        device_bytes: 0,
        gpus: GpuState::Off,
        gpu_uses: Default::default(),
        plugins: PluginStats::default(),
        sessions: 0,
        ring_sessions: 0,
        lost_log_lines: LostLines::default(),
        up: Duration::from_secs(1),
        paths,
        transport: Transport::Auto,
        security: Vec::new(),
    }
}
