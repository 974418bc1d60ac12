//! Metrics that sidecars send to a collector of OpenTelemetry, which this file has: it decodes what arrives.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{metric, number_data_point};
use prost::Message;
use ronde_tests::closed_port::ClosedPort;
use ronde_tests::cluster::{PATIENCE, Plan};
use ronde_tests::harness::{DEADLINE, Run};
use serde_json::json;

use crate::WORKER;

/// What a sidecar has sent at once: what it says of itself, and its metrics without labels.
#[derive(Debug)]
struct Export {
    resource: BTreeMap<String, String>,
    values: BTreeMap<String, f64>,
}

/// A collector on the loopback. It accepts everything.
fn collector() -> Result<(SocketAddr, Receiver<Export>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let (sender, exports) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A sidecar that is killed leaves half a request.
            if let Ok(export) = answered(stream)
                && sender.send(export).is_err()
            {
                return;
            }
        }
    });
    Ok((address, exports))
}

fn answered(mut stream: std::net::TcpStream) -> Result<Export> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head)?;
    ensure!(head.starts_with("POST /v1/metrics HTTP/1.1\r\n"), "{head}");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).context("no length")?;
    let mut body = vec![0; length.parse()?];
    stream.read_exact(&mut body)?;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
    let message = ExportMetricsServiceRequest::decode(&body[..])?;
    let all = message.resource_metrics.first().context("no metrics")?;
    let resource = all.resource.iter().flat_map(|resource| &resource.attributes).map(pair).collect();
    let metrics = all.scope_metrics.iter().flat_map(|scope| &scope.metrics);
    let value = |found: &opentelemetry_proto::tonic::metrics::v1::Metric| {
        let points = match found.data.as_ref()? {
            metric::Data::Sum(sum) => &sum.data_points,
            metric::Data::Gauge(gauge) => &gauge.data_points,
            _ => return None,
        };
        match points.first().filter(|point| point.attributes.is_empty())?.value? {
            number_data_point::Value::AsDouble(value) => Some((found.name.clone(), value)),
            number_data_point::Value::AsInt(_) => None,
        }
    };
    Ok(Export { resource, values: metrics.filter_map(value).collect() })
}

fn pair(attribute: &KeyValue) -> (String, String) {
    let text = match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        other => format!("{other:?}"),
    };
    (attribute.key.clone(), text)
}

#[test]
fn a_collector_gets_the_metrics_of_all_sidecars_and_the_last_ones_at_the_end() -> Result<()> {
    let (address, exports) = collector()?;
    // Between the first export and the last one is none.
    let otlp = json!({ "endpoint": format!("http://{address}"), "interval": 3_600 });
    let mut cluster = Plan::of(&[0, 1]).otlp(otlp).start(WORKER)?;
    let mut first = BTreeMap::new();
    let deadline = Instant::now() + PATIENCE;
    while first.len() < 2 {
        let export = exports.recv_timeout(deadline.saturating_duration_since(Instant::now()))?;
        first.insert(export.resource["service.instance.id"].clone(), export);
    }
    ensure!(first.keys().eq(["test/0", "test/1"]), "{:?}", first.keys());
    let Export { resource, values } = &first["test/1"];
    let of = |name: &str| resource.get(name).map(String::as_str);
    ensure!((of("service.name"), of("ronde.sidecar")) == (Some("ronde"), Some("1")), "{resource:?}");
    ensure!(values["ronde_uptime_seconds"] > 0.0 && values["ronde_operations_total"] == 0.0, "{values:?}");
    // What happens just before the end is in the last export.
    cluster.check_sum("late", 100)?;
    for worker in &mut cluster.workers {
        worker.process.hang_up();
    }
    cluster.sidecars.iter_mut().for_each(|sidecar| sidecar.process.hang_up());
    for sidecar in &mut cluster.sidecars {
        sidecar.await_ended(PATIENCE)?;
    }
    let mut last = BTreeMap::new();
    while last.len() < 2 {
        let export = exports.recv_timeout(PATIENCE).context("there is no last export")?;
        last.insert(export.resource["ronde.sidecar"].clone(), export.values["ronde_operations_total"]);
    }
    ensure!(last.values().all(|operations| *operations >= 1.0), "{last:?}");
    Ok(())
}

#[test]
fn a_collector_that_is_not_there_fails_no_job_and_is_reported_once() {
    let closed = ClosedPort::bind().expect("a free port");
    let url = format!("http://{}", closed.address());
    let run = Run::new(2).options(["--otlp-endpoint", &url, "--otlp-interval", "1"]);
    let ended = run.start(["sh", "-c", "sleep 3"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    let lines: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("metrics are not sent")).collect();
    assert_eq!(lines.len(), 1, "{ended}");
    assert!(lines[0].contains(&closed.address().to_string()) && lines[0].contains("it cannot be reached"), "{ended}");
}

#[test]
fn metrics_never_leave_the_host_in_the_clear() {
    for (url, words) in [
        ("http://10.0.0.1:4318", "would send metrics in the clear beyond this host"),
        ("https://collector.example", "needs --otlp-ca FILE"),
    ] {
        let ended = Run::new(1).options(["--otlp-endpoint", url]).start(["true"]).wait(DEADLINE);
        assert!(ended.code != Some(0) && ended.stderr.contains(words), "{ended}");
    }
    let options = ["--otlp-endpoint", "https://localhost", "--otlp-ca", "/nowhere/ca.pem"];
    let ended = Run::new(1).options(options).start(["true"]).wait(Duration::from_secs(60).max(DEADLINE));
    assert!(ended.code != Some(0) && ended.stderr.contains("cannot read /nowhere/ca.pem"), "{ended}");
}
