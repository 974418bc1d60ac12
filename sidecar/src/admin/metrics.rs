//! The one place where metrics have names. Cores keep plain counters; a scrape copies them into Prometheus' text form.
//!
//! Names end in a base unit or in `_total`; the only label is `port`, which is `control` or `lane<n>`.

use prometheus::{Encoder, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};
use ronde_transport::PortStats;

use super::Snapshot;

/// The page.
///
/// # Errors
/// When two metrics have the same name, which no scrape with other numbers changes.
pub(super) fn render(snapshot: &Snapshot) -> prometheus::Result<String> {
    let registry = Registry::new();
    for (name, help, value) in sidecar_metrics(snapshot) {
        if name.ends_with("_total") {
            let counter = IntCounter::new(name, help)?;
            counter.inc_by(value);
            registry.register(Box::new(counter))?;
        } else {
            let gauge = IntGauge::new(name, help)?;
            // Gauges beyond 2^63 do not occur; they would show as the greatest number rather than as a negative one.
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            registry.register(Box::new(gauge))?;
        }
    }
    for (name, help, read) in PORT_METRICS {
        let family = IntCounterVec::new(Opts::new(name, help), &["port"])?;
        family.with_label_values(&["control"]).inc_by(read(&snapshot.control));
        for (index, lane) in snapshot.lanes.iter().enumerate() {
            family.with_label_values(&[&format!("lane{index}")]).inc_by(read(&lane.port));
        }
        registry.register(Box::new(family))?;
    }
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A metric: name, help, value.
type Metric = (&'static str, &'static str, u64);
/// A metric of a port: name, help, where its value is.
type PortMetric = (&'static str, &'static str, fn(&PortStats) -> u64);

fn sidecar_metrics(snapshot: &Snapshot) -> Vec<Metric> {
    let engine = &snapshot.engine;
    let lanes = |read: fn(&ronde_engine::ExecutorStats) -> u64| snapshot.lanes.iter().map(|l| read(&l.executor)).sum();
    vec![
        ("ronde_sessions", "Live sessions of local workers.", snapshot.sessions as u64),
        ("ronde_requests_submitted_total", "Requests that workers submitted here.", engine.submitted),
        ("ronde_requests_completed_total", "Requests that completed.", engine.completed),
        ("ronde_requests_failed_total", "Requests that failed.", engine.failed),
        (
            "ronde_requests_announced_again_total",
            "Requests announced by a number, because they were announced before.",
            engine.announced_again,
        ),
        ("ronde_cache_evictions_total", "Remembered requests forgotten for others.", engine.cache_evictions),
        ("ronde_process_sets", "Process sets that there are.", snapshot.status.sets as u64),
        ("ronde_ranks_joined", "Ranks known to have joined.", snapshot.status.ranks_joined.len() as u64),
        ("ronde_operations_total", "Operations performed here; fused tensors are one operation.", engine.executed),
        ("ronde_tensors_total", "Tensors in the operations performed here.", engine.tensors_executed),
        ("ronde_epochs_total", "Epochs that began.", engine.epochs),
        ("ronde_stale_frames_total", "Control frames of other epochs, dropped.", engine.stale_frames),
        ("ronde_contributed_bytes_total", "Bytes read from local contributions.", lanes(|s| s.contributed_bytes)),
        ("ronde_reduced_bytes_total", "Bytes reduced into others.", lanes(|s| s.reduced_bytes)),
        ("ronde_published_bytes_total", "Bytes of results written.", lanes(|s| s.published_bytes)),
        (
            "ronde_private_copies_bytes_total",
            "Private bytes copied because they were shared.",
            lanes(|s| s.copied_bytes),
        ),
        ("ronde_early_chunks_total", "Chunks held before their operation was admitted.", lanes(|s| s.chunks_held)),
        ("ronde_dropped_chunks_total", "Chunks of other epochs, dropped.", lanes(|s| s.chunks_dropped)),
        ("ronde_result_mapped_bytes", "Shared memory of result segments.", snapshot.results.mapped_bytes),
        ("ronde_result_in_use_bytes", "Shared memory of results not yet released.", snapshot.results.in_use_bytes),
    ]
}

const PORT_METRICS: [PortMetric; 6] = [
    ("ronde_sealed_bytes_total", "Bytes handed to encryption.", |s| s.sealed_bytes),
    ("ronde_opened_bytes_total", "Bytes that came out of decryption.", |s| s.opened_bytes),
    ("ronde_frames_sent_total", "Frames sent.", |s| s.frames_sent),
    ("ronde_frames_received_total", "Frames received.", |s| s.frames_received),
    ("ronde_links_opened_total", "Links that were opened.", |s| s.links_opened),
    ("ronde_refusals_total", "Connections and hellos that were refused.", |s| s.refusals),
];
