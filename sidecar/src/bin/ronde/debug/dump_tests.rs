//! Dumps of the records of servers that answer like sidecars.

use super::tests::{MADE_US, stuck};
use super::*;

/// The address of a server that gives these answers, one to each request, after `before`.
fn server(
    answers: Vec<(&'static str, String)>,
    before: impl Fn() + Send + 'static,
) -> (SocketAddr, std::thread::JoinHandle<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let serve = move || {
        for (status, body) in answers {
            let (mut stream, _) = listener.accept().expect("it connects");
            let mut request = [0; 1 << 10];
            let _ = std::io::Read::read(&mut stream, &mut request).expect("a request in one packet");
            before();
            let answer = format!("HTTP/1.1 {status}\r\n\r\n{body}");
            std::io::Write::write_all(&mut stream, answer.as_bytes()).expect("it reads");
        }
    };
    (address, std::thread::spawn(serve))
}

fn json(record: &FlightRecord) -> String {
    serde_json::to_string(record).expect("a record is JSON")
}

#[test]
fn a_sidecar_whose_record_others_read_is_asked_again_until_the_time_is_over() {
    let busy = || ("503 Service Unavailable", "others read the flight record of this sidecar\n".to_owned());
    let (address, ended) = server(vec![busy(), busy(), ("200 OK", json(&stuck()[0]))], || ());
    let record = record_of(address, PATIENCE, Duration::from_millis(1)).expect("the third answer");
    assert_eq!(record, stuck()[0]);
    ended.join().expect("three requests");
    let (address, _) = server(vec![busy()], || ());
    let error = record_of(address, PATIENCE, PATIENCE).expect_err("no time is left for another request");
    assert!(error.to_string().contains("is not ready: others read the flight record"), "{error:#}");
    // A sidecar that is ending does not become ready.
    let (address, _) = server(vec![("503 Service Unavailable", String::new())], || ());
    let error = record_of(address, PATIENCE, Duration::ZERO).expect_err("it is ending");
    assert!(error.to_string().contains("it may be ending"), "{error:#}");
}

#[test]
fn a_dump_asks_all_sidecars_at_once_and_removes_no_file() {
    let folder = tempfile::tempdir().expect("a directory");
    let output = folder.path().join("records");
    let args = DumpArgs { socket: None, url: None, job: None, output: output.clone() };
    for number in 0..6 {
        // No server answers until all have been asked.
        let all_asked = std::sync::Arc::new(std::sync::Barrier::new(2));
        let of = |record: FlightRecord| {
            let all_asked = std::sync::Arc::clone(&all_asked);
            let record = FlightRecord { made_us: MADE_US + number, ..record };
            server(vec![("200 OK", json(&record))], move || {
                let _ = all_asked.wait();
            })
            .0
        };
        let text = dump_of(&stuck().map(of), &args).expect("two records");
        assert!(text.contains("sidecar 0 of job job: ") && text.contains("sidecar 1 of job job: "), "{text}");
    }
    assert_eq!(flight::files(&output).expect("records").len(), 2 * 6);
}
