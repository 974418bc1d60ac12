//! Exports to collectors that accept, reject, hang, or are not there.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, channel};

use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsPartialSuccess, ExportMetricsServiceRequest};

use super::super::metrics::document::snapshot;
use super::*;
use crate::closed_port::closed_port;

/// A collector that answers so; returns its address and the requests, head and body, that it gets.
fn collector(status: &'static str, answer: Vec<u8>) -> (SocketAddr, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("it connects");
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).expect("a request");
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).expect("ASCII");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
            let mut body = vec![0; length.parse().expect("a number")];
            stream.read_exact(&mut body).expect("a body");
            let head_of_answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", answer.len());
            stream.write_all(head_of_answer.as_bytes()).and_then(|()| stream.write_all(&answer)).expect("it reads");
            if sender.send((head, body)).is_err() {
                return;
            }
        }
    });
    (address, requests)
}

fn target(address: SocketAddr) -> Target {
    let endpoint = Endpoint {
        is_tls: false,
        host: address.ip().to_string(),
        port: address.port(),
        path: "/v1/metrics".to_owned(),
    };
    let origin = Origin { job: "night".into(), sidecar: 1, host: "alpha".into(), since_ns: 1 };
    Target { endpoint, tls: None, origin, interval: Duration::from_secs(1) }
}

#[tokio::test]
async fn a_collector_gets_a_message_of_otlp() {
    let (address, requests) = collector("200 OK", Vec::new());
    export(&target(address), &snapshot()).await.expect("it accepts");
    let (head, body) = requests.recv().expect("one");
    assert!(head.starts_with("POST /v1/metrics HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("host: {address}\r\n")) && head.contains(PROTOBUF), "{head}");
    let message = ExportMetricsServiceRequest::decode(&body[..]).expect("a message of OTLP");
    let metrics = &message.resource_metrics[0].scope_metrics[0].metrics;
    assert!(metrics.iter().any(|metric| metric.name == "ronde_operations_total"), "{metrics:?}");
}

#[tokio::test]
async fn rejections_are_errors_with_a_short_reason() {
    let rejected = async |status, answer| {
        let (address, _requests) = collector(status, answer);
        let error = export(&target(address), &snapshot()).await.expect_err("it rejects");
        format!("{error:#}")
    };
    let text = rejected("429 Too Many Requests", "x".repeat(10_000).into_bytes()).await;
    assert!(text.starts_with("it answers 429 Too Many Requests: xxx") && text.len() < 300, "{text}");
    let some = ExportMetricsPartialSuccess { rejected_data_points: 7, error_message: "too old".into() };
    let some = ExportMetricsServiceResponse { partial_success: Some(some) };
    assert_eq!(rejected("200 OK", some.encode_to_vec()).await, "it has rejected 7 values: too old");
    let text = rejected("200 OK", b"<html>".to_vec()).await;
    assert!(text.starts_with("the answer is not an OTLP message"), "{text}");
    let text = rejected("403 Forbidden", "\u{1b}[2J\n".repeat(100).into_bytes()).await;
    let shown = text.strip_prefix("it answers 403 Forbidden: ").expect("the status");
    assert!(shown.starts_with("\\u{1b}[2J\\n\\u{1b}[2J") && !shown.contains(char::is_control), "{text}");
    assert_eq!(shown.chars().count(), REASON_CHARS_MAX);
    let text = rejected("200 OK", vec![0; ANSWER_BYTES_MAX + 1]).await;
    assert!(text.starts_with("its answer cannot be read"), "{text}");
}

#[tokio::test]
async fn a_collector_that_is_not_there_is_an_error() {
    let (_bound, closed) = closed_port();
    let error = export(&target(closed), &snapshot()).await.expect_err("nobody listens");
    assert!(format!("{error:#}").starts_with("it cannot be reached"), "{error:#}");
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_hangs_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let error = export(&target(address), &snapshot()).await.expect_err("it never answers");
    assert_eq!(error.to_string(), "it has not answered within 10 s");
    drop(listener);
}

#[tokio::test]
async fn redirections_are_not_followed() {
    let (other, others) = collector("200 OK", Vec::new());
    let moved: &'static str = format!("302 Found\r\nlocation: http://{other}/v1/metrics").leak();
    let (address, requests) = collector(moved, Vec::new());
    let error = export(&target(address), &snapshot()).await.expect_err("it has not accepted anything");
    assert_eq!(error.to_string(), "it answers 302 Found: ");
    assert!(requests.recv().is_ok() && others.try_recv().is_err(), "nothing is sent to the other address");
}

/// What a sidecar logs without options while `action` runs.
fn logged(action: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Lines(Arc<std::sync::Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no thread has panicked").write(line)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    // The filter of `process::logging` without options.
    let (writer, filter) = (lines.clone(), tracing_subscriber::EnvFilter::new("warn,ronde=warn"));
    let log = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_env_filter(filter).with_ansi(false);
    tracing::subscriber::with_default(log.finish(), action);
    let lines = lines.0.lock().expect("no thread has panicked");
    String::from_utf8(lines.clone()).expect("text")
}

#[test]
fn exports_that_fail_and_that_succeed_again_are_logged_once_each() {
    let endpoint = target("127.0.0.1:1".parse().expect("an address")).endpoint;
    let mut reported = ExportErrorReported::default();
    let log = logged(|| {
        for succeeds in [true, false, false, true, true, false] {
            reported.note(&endpoint, if succeeds { Ok(()) } else { Err(anyhow::anyhow!("no\n")) });
        }
    });
    let lines: Vec<&str> = log.lines().collect();
    let fails = "metrics are not sent to the collector at 127.0.0.1:1: no\\n. The job continues";
    let again = "metrics are sent to the collector at 127.0.0.1:1 again";
    let expected = [fails, again, fails];
    assert_eq!(lines.len(), expected.len(), "{log}");
    assert!(lines.iter().zip(expected).all(|(line, part)| line.contains(part)), "{log}");
}
