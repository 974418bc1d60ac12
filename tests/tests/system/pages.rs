//! The pages of a sidecar for people and monitoring, and its shutdown.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{Line, PATIENCE, Plan, Process, Sidecar, ronde_binary, sum};
use ronde_tests::harness::DEADLINE;
use ronde_tests::script::{Answer, Ask, Fill};
use serde_json::{Value, json};

use crate::WORKER;

#[test]
fn the_status_page_shows_who_is_missing_for_which_tensor() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let fill = Fill::Whole { seed: 1 };
    let first = cluster.workers[0].submit(sum("waiting", 100, fill))?;
    let expected = json!({ "name": "allreduce.waiting", "collective": "ALLREDUCE", "missing": [1, 2] });
    cluster.sidecars[0].await_status(|status| shows(&status["waiting_tensors"], &expected))?;
    let third = cluster.workers[2].submit(sum("waiting", 100, fill))?;
    let expected = json!({ "name": "allreduce.waiting", "missing": [1] });
    cluster.sidecars[0].await_status(|status| shows(&status["waiting_tensors"], &expected))?;
    // Each sidecar shows the requests of its own ranks.
    let own = json!({ "name": "allreduce.waiting", "rank": 2, "ordered": false });
    cluster.sidecars[1].await_status(|status| shows(&status["pending_requests"], &own))?;
    let second = cluster.workers[1].submit(sum("waiting", 100, fill))?;
    for (worker, id) in cluster.workers.iter_mut().zip([first, second, third]) {
        ensure!(worker.digest(id, PATIENCE)? == fill.digest_of_sum(&[0, 1, 2], 400), "rank {}", worker.rank);
    }
    cluster.sidecars[0].await_status(|status| {
        status["waiting_tensors"] == json!([]) && status["pending"] == 0 && status["last_to_be_ready"][1] == 1
    })?;
    Ok(())
}

/// Whether a list has an entry with these fields.
fn shows(list: &Value, fields: &Value) -> bool {
    let fits =
        |entry: &Value| fields.as_object().is_some_and(|fields| fields.iter().all(|(key, value)| entry[key] == *value));
    list.as_array().is_some_and(|list| list.iter().any(fits))
}

#[test]
fn metrics_are_prometheus_text_and_grow_with_sealed_bytes() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let (head, body) = cluster.sidecars[0].page("/healthz")?;
    ensure!(head.contains("200") && body.contains("ok"), "{head} {body}");
    let bytes = 4 << 20;
    let before = metrics(&cluster.sidecars[0])?;
    cluster.check_sum("payload", bytes / 4)?;
    let after = metrics(&cluster.sidecars[0])?;
    let grown = |name: &str| {
        let total = |metrics: &BTreeMap<String, f64>| {
            metrics.iter().filter(|(key, _)| key.split('{').next() == Some(name)).map(|(_, value)| value).sum::<f64>()
        };
        total(&after) - total(&before)
    };
    let (sealed, opened) = (grown("ronde_sealed_bytes_total"), grown("ronde_opened_bytes_total"));
    println!("a sum of {bytes} bytes: {sealed} sealed and {opened} opened by sidecar 0");
    ensure!(sealed >= 4_194_304.0 && opened >= 4_194_304.0, "{sealed} sealed, {opened} opened");
    ensure!(sealed < 1.2 * 4_194_304.0, "{sealed} bytes sealed for a tensor of {bytes}");
    Ok(())
}

/// The metrics page as a map, parsed by the rules of Prometheus' text format.
fn metrics(sidecar: &Sidecar) -> Result<BTreeMap<String, f64>> {
    let (head, body) = sidecar.page("/metrics")?;
    ensure!(head.contains("200"), "{head}");
    let mut types = BTreeMap::new();
    let mut values = BTreeMap::new();
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (kind, name, rest) = (words.next(), words.next(), words.next());
            match kind {
                Some("HELP") => ensure!(rest.is_some_and(|help| !help.is_empty()), "no help: {line}"),
                Some("TYPE") => drop(types.insert(name.context("a name")?, rest.context("a type")?)),
                _ => anyhow::bail!("not a comment of Prometheus: {line}"),
            }
            continue;
        }
        let (key, value) = line.rsplit_once(' ').with_context(|| format!("not a sample: {line}"))?;
        let name = key.split('{').next().unwrap_or_default();
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        ensure!(name.starts_with("ronde_") && name.chars().all(plain), "not a name: {line}");
        ensure!(key.len() == name.len() || key.ends_with("\"}"), "labels are not closed: {line}");
        let kind = types.get(name).with_context(|| format!("no type: {line}"))?;
        ensure!(name.ends_with("_total") == (*kind == "counter"), "only counters end in _total: {line}");
        ensure!(values.insert(key.to_owned(), value.parse()?).is_none(), "twice: {line}");
    }
    ensure!(!values.is_empty(), "no metrics");
    Ok(values)
}

#[test]
fn an_idle_sidecar_shuts_down_at_sigterm_and_notifies_its_workers() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    cluster.check_sum("before", 1_000)?;
    cluster.sidecars[1].process.signal(Signal::SIGTERM)?;
    let asked = Instant::now();
    let summary = cluster.sidecars[1].await_ended(LEAVES_WITHIN)?;
    let status = cluster.sidecars[1].process.await_exit(LEAVES_WITHIN)?;
    println!("left {:?} after SIGTERM, with sessions open: {summary}", asked.elapsed());
    ensure!(status.success(), "{status}");
    ensure!(summary["tensors"] == 1 && summary["sealed_bytes"].as_u64() > Some(0), "{summary}");
    ensure!(!cluster.sidecars[1].socket_dir()?.exists(), "its session directory is left");
    for worker in &mut cluster.workers {
        let over = |answer| if let Answer::Over { text } = answer { Some(text) } else { None };
        let text = worker.await_answer("the end of its session", PATIENCE, over)?;
        println!("rank {} receives: {text}", worker.rank);
        ensure!(text.contains("sidecar 1"), "rank {} receives {text:?}", worker.rank);
    }
    Ok(())
}

#[test]
fn a_sidecar_whose_workers_have_left_leaves_at_once() -> Result<()> {
    // A busy machine may take as long as a drain, but not each time.
    for _ in 0..3 {
        if time_to_leave()? < DRAIN_TIMEOUT {
            return Ok(());
        }
    }
    bail!("nothing was left to wait for")
}

/// How long two sidecars take to end whose workers have left.
fn time_to_leave() -> Result<Duration> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    cluster.check_sum("before", 1_000)?;
    for worker in &mut cluster.workers {
        worker.ask(&Ask::Close)?;
    }
    for worker in &mut cluster.workers {
        ensure!(worker.process.await_exit(PATIENCE)?.success(), "rank {} failed", worker.rank);
    }
    let asked = Instant::now();
    cluster.sidecars.iter_mut().for_each(|sidecar| sidecar.process.hang_up());
    for sidecar in &mut cluster.sidecars {
        sidecar.await_ended(PATIENCE)?;
        ensure!(sidecar.process.await_exit(PATIENCE)?.success(), "sidecar {} failed", sidecar.index);
        ensure!(!sidecar.socket_dir()?.exists(), "sidecar {} leaves its directory", sidecar.index);
    }
    println!("both sidecars left {:?} after their launcher hung up", asked.elapsed());
    Ok(asked.elapsed())
}

#[test]
fn ctrl_c_during_an_all_reduce_leaves_no_processes_or_files() -> Result<()> {
    let mark = format!("ronde-test-{}-ctrl-c", std::process::id());
    // A shell that starts the tests in the background ignores SIGINT, and the launcher would inherit that.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(ronde_binary()?).args(["run", "-np", "4", "--sidecars", "2", WORKER]);
    command.env("RONDE_TEST_ENDLESS", "1").env("HOROVOD_START_TIMEOUT", "120").env(MARK, &mark);
    let mut launcher = Process::start("ronde run", &mut command)?;
    for rank in 0..4 {
        let prefix = format!("[{rank}]<stdout>:");
        let reduces = |line: &Line| (line.text.starts_with(&prefix) && line.text.contains("\"done\"")).then_some(());
        launcher.await_line(&format!("a first result of rank {rank}"), DEADLINE, reduces)?;
    }
    ensure!(marked(&mark).len() >= 4 + 2, "the search for processes finds {:?} only", marked(&mark));
    let asked = Instant::now();
    launcher.signal(Signal::SIGINT)?;
    let status = launcher.await_exit(LEAVES_WITHIN)?;
    println!("the launcher left {:?} after SIGINT", asked.elapsed());
    ensure!(status.code() == Some(130), "{status}");
    ensure!(marked(&mark).is_empty(), "left: {:?}", marked(&mark));
    Ok(())
}

/// The command lines of all processes that inherited the mark.
fn marked(mark: &str) -> Vec<String> {
    let wanted = format!("{MARK}={mark}");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes()) {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            // A process that has ended and is not reaped has none.
            if !line.is_empty() {
                found.push(String::from_utf8_lossy(&line).replace('\0', " "));
            }
        }
    }
    found
}

const MARK: &str = "RONDE_TEST_MARK";
/// The longest drain, and what a busy machine adds; less than the sum of the waits after which the launcher gives up.
const LEAVES_WITHIN: Duration = Duration::from_secs(30);
/// How long a sidecar lets sessions continue (`DRAIN_TIMEOUT` of the sidecar).
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

#[test]
fn the_page_for_people_loads_nothing_and_its_streams_are_bounded() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    cluster.check_sum("payload", 1000)?;
    let (head, page) = whole_answer(&cluster.sidecars[0], "/")?;
    ensure!(head.contains("200") && page.contains("<!doctype html>"), "{head}");
    let policy = head.lines().find(|line| line.starts_with("content-security-policy")).context("a policy")?;
    ensure!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let mut first = Stream::open(&cluster.sidecars[0])?;
    for _ in 0..2 {
        let status = first.status()?;
        ensure!(status["placement"] == json!([0, 1]) && status["phase"] == "active", "{status}");
    }
    let others: Vec<Stream> = (1..VIEWERS_MAX).map(|_| Stream::open(&cluster.sidecars[0])).collect::<Result<_>>()?;
    let (refused, words) = whole_answer(&cluster.sidecars[0], "/events")?;
    ensure!(refused.contains("503") && words.contains("viewers"), "{refused} {words}");
    drop(others);
    // The places of viewers that went away are free again.
    let deadline = Instant::now() + PATIENCE;
    while Stream::open(&cluster.sidecars[0]).is_err() {
        ensure!(Instant::now() < deadline, "no place became free");
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.sidecars[0].process.signal(Signal::SIGTERM)?;
    while first.status().is_ok() {
        ensure!(Instant::now() < deadline, "the stream outlives the sidecar");
    }
    Ok(())
}

/// As many streams as a sidecar serves at a time.
const VIEWERS_MAX: usize = 32;

/// Requests a page; returns its head and its body.
fn whole_answer(sidecar: &Sidecar, path: &str) -> Result<(String, String)> {
    let mut stream = request(sidecar, path)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer has a head")?;
    Ok((head.to_owned(), body.to_owned()))
}

fn request(sidecar: &Sidecar, path: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&sidecar.admin()?, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: sidecar\r\nConnection: close\r\n\r\n")?;
    Ok(stream)
}

/// A viewer's stream of status pages.
struct Stream(BufReader<TcpStream>);

impl Stream {
    /// Opens it and reads its head.
    fn open(sidecar: &Sidecar) -> Result<Self> {
        let mut opened = Self(BufReader::new(request(sidecar, "/events")?));
        let mut line = String::new();
        opened.0.read_line(&mut line)?;
        ensure!(line.contains("200"), "{line}");
        Ok(opened)
    }

    /// Reads to the next page.
    fn status(&mut self) -> Result<Value> {
        loop {
            let mut line = String::new();
            ensure!(self.0.read_line(&mut line)? > 0, "the stream has ended");
            if let Some(page) = line.strip_prefix("data: ") {
                return serde_json::from_str(page).context("an event's data is JSON");
            }
        }
    }
}
