//! Sidecars whose log or messages nobody reads: their control thread answers all the same. And refusals by the hundred:
//! the log stays readable.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_tests::cluster::{Line, PATIENCE, Plan, Process, Sidecar, ronde_binary};
use ronde_tests::raw::{RawSession, WELL_BEHAVED, claim};
use serde_json::Value;

use crate::WORKER;

/// Log lines of a sidecar that were lost for this reason.
fn lost(sidecar: &Sidecar, reason: &str) -> Result<u64> {
    let (_, page) = sidecar.page("/metrics")?;
    let name = format!("ronde_log_lines_lost_total{{reason=\"{reason}\"}} ");
    let value = page.lines().find_map(|line| line.strip_prefix(&name)).context("the metric is on the page")?;
    Ok(value.parse()?)
}

/// Claims a rank and leaves, again and again: each time the sidecar sends two messages, about 60 bytes.
fn come_and_go(sidecar: &Sidecar, job: &str, times: usize) -> Result<()> {
    for claim in 0..times {
        RawSession::claim_when_free(sidecar.socket_dir()?, job, 0, WELL_BEHAVED)
            .with_context(|| format!("claim {claim}"))?;
    }
    Ok(())
}

fn is_well(sidecar: &Sidecar) -> Result<()> {
    let (status, body) = sidecar.page("/healthz")?;
    ensure!(status.contains(" 200 ") && body == "ok\n", "{status}: {body}");
    Ok(())
}

#[test]
fn a_log_that_nobody_reads_delays_nobody_and_reports_what_it_dropped() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).log("trace").start(WORKER)?;
    cluster.check_sum("while both are read", 1_000)?;
    cluster.sidecars[1].process.pause_log()?;
    let deadline = Instant::now() + PATIENCE;
    for number in 0.. {
        cluster.check_sum(&format!("while nobody reads, {number}"), 1_000)?;
        if number % 50 == 49 && lost(&cluster.sidecars[1], "unread")? > 0 {
            break;
        }
        ensure!(Instant::now() < deadline, "no line was dropped");
    }
    cluster.sidecars[1].process.resume_log();
    let reported = cluster.sidecars[1].process.await_log("the number of dropped lines", PATIENCE, |line| {
        line.text.contains("log lines were dropped").then(|| line.text.clone())
    })?;
    let count = reported.split_once("dropped=").and_then(|(_, count)| count.trim().parse::<u64>().ok());
    // More lines may be dropped until the log is read again.
    let dropped = lost(&cluster.sidecars[1], "unread")?;
    ensure!(reported.contains("sidecar=1") && count.is_some_and(|count| count > 0 && count <= dropped), "{reported}");
    cluster.check_sum("while both are read again", 1_000)
}

#[test]
fn a_sidecar_whose_launcher_does_not_read_answers_and_ends_with_that_reason() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).sidecars(WORKER)?;
    let sidecar = &mut cluster.sidecars[0];
    sidecar.process.pause_output()?;
    let paused = Instant::now();
    let ends = |line: &Line| line.text.contains("RONDE-E408").then(|| (line.at, line.text.clone()));
    let (mut claims, mut answered) = (0, paused);
    let (at, reason) = loop {
        if let Ok(found) = sidecar.process.await_log("why it ends", Duration::ZERO, ends) {
            break found;
        }
        // Without the other ranks no epoch begins. Twice what the pipe holds, 4 KiB.
        match come_and_go(sidecar, "test", usize::from(claims < 70)).and_then(|()| is_well(sidecar)) {
            Ok(()) => (claims, answered) = (claims + 1, Instant::now()),
            // It ends just now.
            Err(error) => break sidecar.process.await_log("why it ends", PATIENCE, ends).context(error)?,
        }
        ensure!(paused.elapsed() < 4 * PATIENCE, "it goes on after {claims} claims");
        std::thread::sleep(Duration::from_millis(5));
    };
    ensure!(reason.contains("the launcher does not read this sidecar's messages"), "{reason}");
    ensure!(at - paused > GIVES_UP_AFTER, "it gave up after {:?}", at - paused);
    ensure!(
        answered + GIVES_UP_AFTER > at,
        "it answered last {:?} before its end: before the pipe was full",
        at - answered
    );
    ensure!(!sidecar.process.await_exit(PATIENCE)?.success(), "it has failed");
    Ok(())
}

/// How long a sidecar waits at least for a launcher that does not read.
const GIVES_UP_AFTER: Duration = Duration::from_secs(15);

#[test]
fn a_sidecar_without_a_launcher_serves_when_nobody_reads_its_messages() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let mut command = Command::new(ronde_binary()?);
    command.args(["sidecar", "--local-ranks", "2", "--job", "test", "--runtime-dir"]).arg(directory.path());
    let process = Process::start("a sidecar", &mut command)?;
    let mut sidecar = Sidecar { process, index: 0, bound: Value::Null, serving: Value::Null };
    sidecar.await_serving()?;
    sidecar.process.pause_output()?;
    come_and_go(&sidecar, "test", 200)?;
    is_well(&sidecar)?;
    sidecar.process.resume_output();
    // Nothing is lost that had room.
    for number in 0..200 {
        sidecar.process.await_line(&format!("departure {number}"), PATIENCE, |line| {
            line.text.contains("\"left\"").then_some(())
        })?;
    }
    Ok(())
}

/// Once a line that could not be written aborted the sidecar.
#[test]
fn a_log_on_a_full_disk_ends_nobody_and_its_lines_are_counted() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let mut command = Command::new("sh");
    let script = "exec \"$0\" sidecar --local-ranks 2 --job test --log-level trace --runtime-dir \"$1\" 2>/dev/full";
    command.args(["-c", script]).arg(ronde_binary()?).arg(directory.path());
    let process = Process::start("a sidecar", &mut command)?;
    let mut sidecar = Sidecar { process, index: 0, bound: Value::Null, serving: Value::Null };
    sidecar.await_serving()?;
    come_and_go(&sidecar, "test", 20)?;
    ensure!(lost(&sidecar, "unread")? > 0);
    is_well(&sidecar)
}

#[test]
fn the_last_line_of_a_sidecar_that_fails_is_written_before_it_ends() -> Result<()> {
    for words in [&["--certs", "/nonexistent", "--peers", "127.0.0.1:1"][..], &["--bootstrap", "--log-format", "json"]]
    {
        let output = Command::new(ronde_binary()?).arg("sidecar").args(words).output()?;
        let (log, messages) = (String::from_utf8(output.stderr)?, String::from_utf8(output.stdout)?);
        ensure!(!output.status.success(), "{words:?}: {log}");
        // A launcher prints it.
        ensure!(log.contains("RONDE-E") != words.contains(&"--bootstrap"), "{words:?}: {log}");
        ensure!(messages.contains("\"type\":\"fatal\"") && messages.contains("RONDE-E"), "{words:?}: {messages}");
    }
    Ok(())
}

#[test]
fn refusals_by_the_hundred_leave_the_log_readable() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let directory = cluster.sidecars[0].socket_dir()?.to_owned();
    let good = claim(&directory, "test", 0)?;
    for _ in 0..300 {
        let wrong = client_message::Message::Claim(v1::Claim { token: vec![7; 32].into(), ..good.clone() });
        RawSession::open(&directory, Some(wrong), WELL_BEHAVED).await_end()?;
    }
    let sidecar = &mut cluster.sidecars[0];
    let refusals = |log: &str| log.lines().filter(|line| line.contains("a claim is refused")).count() as u64;
    let deadline = Instant::now() + PATIENCE;
    let (log, limited) = loop {
        // The log arrives through a pipe, later than the answers.
        let (limited, log) = (lost(sidecar, "limited")?, sidecar.process.log());
        if refusals(&log) + limited == 300 {
            break (log, limited);
        }
        ensure!(Instant::now() < deadline, "{} lines and {limited} that were left out", refusals(&log));
        std::thread::sleep(Duration::from_millis(10));
    };
    ensure!(limited > 0 && refusals(&log) >= 100, "{limited} of 300 refusals were left out of the log");
    ensure!(log.contains("lines like this one are left out"), "{log}");
    cluster.check_sum("afterwards", 1_000)
}
