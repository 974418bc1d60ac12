//! Defines all metrics. Modules keep plain counters; a scrape copies them into Prometheus' text format.
//!
//! Names begin with `ronde_`. Counters end in `_total`, and a base unit precedes that. Labels are `port` (`control` or
//! `lane<n>`), `path`, `peer` (a sidecar's index), `rank`, `reason` and `version`.

use prometheus::proto::MetricFamily;
use prometheus::{CounterVec, Encoder, GaugeVec, Opts, Registry, TextEncoder};
use ronde_engine::ExecutorStats;
use ronde_transport::{PathStats, PortStats, QuicPath};

use crate::driver::snapshot::Snapshot;

#[cfg(test)]
pub(super) mod document;
pub(super) mod otlp;
mod table;

use table::METRICS;

/// A metric of the page.
struct Metric {
    name: &'static str,
    /// The help text, a sentence.
    help: &'static str,
    kind: Kind,
    /// The names of its labels.
    labels: &'static [&'static str],
    read: fn(&Snapshot) -> Vec<Sample>,
}

/// How a value changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// It only grows while the process lives.
    Counter,
    /// It only grows while the link's connection lives; the next connection counts from zero.
    LinkCounter,
    /// It goes up and down.
    Gauge,
}

/// Values of labels, in the order of their names, and the value.
type Sample = (Vec<String>, f64);

/// Renders the page.
///
/// # Errors
/// When two metrics have the same name, on every scrape alike.
pub(super) fn render(snapshot: &Snapshot) -> prometheus::Result<String> {
    let mut text = Vec::new();
    TextEncoder::new().encode(&gather(snapshot)?, &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn gather(snapshot: &Snapshot) -> prometheus::Result<Vec<MetricFamily>> {
    let registry = Registry::new();
    for metric in METRICS {
        let options = Opts::new(metric.name, metric.help);
        let samples = (metric.read)(snapshot);
        let labelled = |(labels, value): Sample, set: &dyn Fn(&[&str], f64)| {
            set(&labels.iter().map(String::as_str).collect::<Vec<_>>(), value);
        };
        match metric.kind {
            Kind::Counter | Kind::LinkCounter => {
                let family = CounterVec::new(options, metric.labels)?;
                let set = |labels: &[&str], value| family.with_label_values(labels).inc_by(value);
                samples.into_iter().for_each(|sample| labelled(sample, &set));
                registry.register(Box::new(family))?;
            }
            Kind::Gauge => {
                let family = GaugeVec::new(options, metric.labels)?;
                let set = |labels: &[&str], value| family.with_label_values(labels).set(value);
                samples.into_iter().for_each(|sample| labelled(sample, &set));
                registry.register(Box::new(family))?;
            }
        }
    }
    Ok(registry.gather())
}

/// A value of the whole sidecar.
fn one(value: f64) -> Vec<Sample> {
    vec![(Vec::new(), value)]
}

/// The sum over all lanes and the control thread.
fn lanes(snapshot: &Snapshot, read: fn(&ExecutorStats) -> u64) -> Vec<Sample> {
    let lanes: u64 = snapshot.lanes.iter().map(|lane| read(&lane.executor)).sum();
    one(number(lanes + read(&snapshot.inline)))
}

/// A value for each port.
fn ports(snapshot: &Snapshot, read: fn(&PortStats) -> u64) -> Vec<Sample> {
    let control = (vec![CONTROL.to_owned()], number(read(&snapshot.control)));
    let lanes = snapshot.lanes.iter().enumerate();
    let lanes = lanes.map(|(index, lane)| (vec![format!("lane{index}")], number(read(&lane.port))));
    std::iter::once(control).chain(lanes).collect()
}

/// A value for each link over QUIC that is up.
fn quic_links(snapshot: &Snapshot, read: fn(&QuicPath) -> f64) -> Vec<Sample> {
    some_links(snapshot, |path| path.quic.as_ref().map(read))
}

/// A value for each link that is up.
fn links(snapshot: &Snapshot, read: fn(&PathStats) -> f64) -> Vec<Sample> {
    some_links(snapshot, |path| Some(read(path)))
}

fn some_links(snapshot: &Snapshot, read: impl Fn(&PathStats) -> Option<f64>) -> Vec<Sample> {
    let lanes = snapshot.lanes.iter().enumerate().map(|(index, lane)| (format!("lane{index}"), &lane.paths));
    let ports = std::iter::once((CONTROL.to_owned(), &snapshot.paths)).chain(lanes);
    ports
        .flat_map(|(port, paths)| paths.iter().map(move |(peer, path)| (*peer, port.clone(), path)))
        .filter_map(|(peer, port, path)| Some((vec![peer.0.to_string(), port], read(path)?)))
        .collect()
}

/// A value for each rank.
fn by_rank(values: &[u64], unit: f64) -> Vec<Sample> {
    values.iter().enumerate().map(|(rank, value)| (vec![rank.to_string()], number(*value) * unit)).collect()
}

/// Converts to the type of Prometheus' numbers, in which whole numbers are exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "what is lost beyond 2^53 is a part in 2^53")]
fn number(value: u64) -> f64 {
    value as f64
}

fn count(value: usize) -> f64 {
    number(value as u64)
}

/// The label of the control port.
const CONTROL: &str = "control";
