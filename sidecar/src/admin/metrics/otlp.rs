//! The metrics as a message of OTLP, with the names, labels and values of the page. Pure: the times are arguments.

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Metric as OtlpMetric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, metric,
    number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;

use super::{Kind, METRICS, Metric, Sample};
use crate::driver::snapshot::Snapshot;

/// Whose metrics they are.
#[derive(Clone, Debug)]
pub(in super::super) struct Origin {
    /// The job.
    pub(in super::super) job: String,
    /// The sidecar's index.
    pub(in super::super) sidecar: u32,
    /// Its host's name.
    pub(in super::super) host: String,
    /// When its counters were 0, in nanoseconds since the Unix epoch.
    pub(in super::super) since_ns: u64,
}

/// Builds the message with all metrics at a time, in nanoseconds since the Unix epoch.
pub(in super::super) fn request(snapshot: &Snapshot, origin: &Origin, now_ns: u64) -> ExportMetricsServiceRequest {
    let times = (origin.since_ns, now_ns);
    // A metric without samples does not exist at this sidecar.
    let of = |metric: &Metric| {
        let samples = (metric.read)(snapshot);
        (!samples.is_empty()).then(|| converted(metric, samples, times))
    };
    let scope = InstrumentationScope {
        name: SERVICE.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let metrics = ScopeMetrics {
        scope: Some(scope),
        metrics: METRICS.iter().filter_map(of).collect(),
        schema_url: String::new(),
    };
    let resource = Resource { attributes: attributes(origin), ..Resource::default() };
    let all = ResourceMetrics { resource: Some(resource), scope_metrics: vec![metrics], schema_url: String::new() };
    ExportMetricsServiceRequest { resource_metrics: vec![all] }
}

/// What all metrics of a sidecar have in common. The names but the last two are OpenTelemetry's.
fn attributes(origin: &Origin) -> Vec<KeyValue> {
    let Origin { job, sidecar, host, .. } = origin;
    vec![
        text("service.name", SERVICE),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("service.instance.id", &format!("{job}/{sidecar}")),
        text("host.name", host),
        text("ronde.job", job),
        text("ronde.sidecar", &sidecar.to_string()),
    ]
}

fn converted(metric: &Metric, samples: Vec<Sample>, (since_ns, now_ns): (u64, u64)) -> OtlpMetric {
    let point = |(values, value): Sample, start_time_unix_nano| NumberDataPoint {
        attributes: metric.labels.iter().zip(&values).map(|(label, value)| text(label, value)).collect(),
        start_time_unix_nano,
        time_unix_nano: now_ns,
        value: Some(number_data_point::Value::AsDouble(value)),
        ..NumberDataPoint::default()
    };
    // When a link's connection was made is unknown here, and 0 is the word for that: a start that stayed the same would claim
    // that the counter was never reset.
    let start_ns = if metric.kind == Kind::Counter { since_ns } else { 0 };
    let data = match metric.kind {
        Kind::Counter | Kind::LinkCounter => metric::Data::Sum(Sum {
            data_points: samples.into_iter().map(|sample| point(sample, start_ns)).collect(),
            aggregation_temporality: AggregationTemporality::Cumulative as i32,
            is_monotonic: true,
        }),
        Kind::Gauge => metric::Data::Gauge(Gauge {
            data_points: samples.into_iter().map(|sample| point(sample, start_ns)).collect(),
        }),
    };
    OtlpMetric {
        name: metric.name.to_owned(),
        description: metric.help.to_owned(),
        unit: unit(metric.name).to_owned(),
        data: Some(data),
        ..OtlpMetric::default()
    }
}

/// The unit in OpenTelemetry's spelling, from the end of a name.
fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    match name.rsplit_once('_') {
        Some((_, "bytes")) => "By",
        Some((_, "seconds")) => "s",
        _ => "",
    }
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// What OpenTelemetry calls the service.
const SERVICE: &str = "ronde";

#[cfg(test)]
mod tests {
    use super::super::document::snapshot;
    use super::super::gather;
    use super::*;

    #[test]
    fn the_message_has_what_the_page_has() {
        let snapshot = snapshot();
        let origin = Origin { job: "night".into(), sidecar: 3, host: "alpha".into(), since_ns: 5 };
        let request = request(&snapshot, &origin, 7);
        let [all] = &request.resource_metrics[..] else { panic!("{request:?}") };
        let resource = all.resource.as_ref().expect("it is named");
        assert!(resource.attributes.contains(&text("service.instance.id", "night/3")), "{resource:?}");
        let metrics = &all.scope_metrics[0].metrics;
        let mut found = Vec::new();
        for metric in metrics {
            let (points, start) = match metric.data.as_ref().expect("data") {
                metric::Data::Sum(sum) => {
                    assert!(sum.is_monotonic && sum.aggregation_temporality == 2 && metric.name.ends_with("_total"));
                    (&sum.data_points, if metric.name.starts_with("ronde_link_") { 0 } else { 5 })
                }
                metric::Data::Gauge(gauge) => (&gauge.data_points, 0),
                other => panic!("{other:?}"),
            };
            for point in points {
                assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (start, 7));
                let number_data_point::Value::AsDouble(value) = point.value.expect("a value") else { panic!() };
                let labels: Vec<(String, String)> = point.attributes.iter().map(pair).collect();
                found.push((metric.name.clone(), sorted(labels), value));
            }
        }
        let mut expected = Vec::new();
        for family in gather(&snapshot).expect("unique names") {
            for sample in family.get_metric() {
                let labels = sample.get_label().iter().map(|label| (label.name().to_owned(), label.value().to_owned()));
                let value = sample.get_counter().get_value() + sample.get_gauge().get_value();
                expected.push((family.name().to_owned(), sorted(labels.collect()), value));
            }
        }
        let order = |one: &(String, Vec<(String, String)>, f64), other: &(String, Vec<(String, String)>, f64)| {
            (&one.0, &one.1).cmp(&(&other.0, &other.1))
        };
        found.sort_by(order);
        expected.sort_by(order);
        assert!(!found.is_empty());
        assert_eq!(found, expected);
    }

    fn pair(attribute: &KeyValue) -> (String, String) {
        match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
            Some(any_value::Value::StringValue(value)) => (attribute.key.clone(), value.clone()),
            other => panic!("{other:?}"),
        }
    }

    fn sorted(mut labels: Vec<(String, String)>) -> Vec<(String, String)> {
        labels.sort();
        labels
    }

    #[test]
    fn units_are_those_of_names() {
        assert_eq!(unit("ronde_sealed_bytes_total"), "By");
        assert_eq!(unit("ronde_uptime_seconds"), "s");
        assert_eq!(unit("ronde_operations_total"), "");
    }
}
