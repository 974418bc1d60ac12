//! How jobs end: in order when a terminal closes, with all of their output, and without what workers leave behind.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use ronde_tests::harness::{DEADLINE, Run};
use serde_json::Value;

fn sh(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

/// A shell and the kernel send it one each.
#[test]
fn a_terminal_that_closes_with_two_signals_lets_workers_save_their_state() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (go, saved) = (directory.path().join("go"), directory.path().join("saved"));
    // It starts no program to save: a busy machine might take longer for one than it has until SIGKILL.
    let script = "trap 'until [ -e \"$GO\" ]; do :; done; echo >\"$SAVED\"; exit 0' TERM; echo ready; \
        while :; do sleep 0.05; done";
    let mut job = Run::new(1).env("GO", &go).env("SAVED", &saved).start(sh(script));
    job.wait_for_line("ready", DEADLINE);
    job.signal(Signal::SIGHUP);
    job.wait_for_line("ronde: SIGHUP: ending", DEADLINE);
    job.signal(Signal::SIGHUP);
    // The second one would end the job within this time.
    std::thread::sleep(Duration::from_millis(500));
    fs::write(&go, "").expect("a temporary directory is writable");
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(129), "{ended}");
    assert!(saved.exists(), "{ended}");
}

#[test]
fn last_output_that_cannot_be_written_is_a_failure() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let rank = directory.path().join("rank.0");
    fs::create_dir(&rank).expect("a temporary directory is writable");
    std::os::unix::fs::symlink("/dev/full", rank.join("stdout")).expect("it is ours");
    let report = directory.path().join("report.json");
    let options = ["--output-filename".as_ref(), directory.path().as_os_str(), "--report".as_ref(), report.as_os_str()];
    let ended = Run::new(1).options(options).start(sh("echo the result")).wait(DEADLINE);
    assert_eq!(ended.code, Some(74), "{ended}");
    assert!(ended.stderr.contains("cannot write the workers' output") && ended.stderr.contains("E209"), "{ended}");
    let report = fs::read_to_string(report).expect("the report is written");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!((&report["exit"], &report["code"]), (&74.into(), &"RONDE-E209".into()), "{report}");
}

/// Data loaders are killed with their worker, and their parent is gone.
#[test]
fn a_worker_that_ends_leaves_no_zombies_to_a_job_that_goes_on() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let go = directory.path().join("go");
    let script = "if [ $RONDE_RANK = 0 ]; then sleep 1000 & sleep 1000 & echo gone; exit 0; fi; \
        until [ -e \"$GO\" ]; do sleep 0.01; done";
    let mut job = Run::new(2).env("GO", &go).start(sh(script));
    job.wait_for_line("gone", DEADLINE);
    let agent = job.of_kind("agent").first().expect("there is one").pid;
    let deadline = Instant::now() + DEADLINE;
    // Its own shell is waited for, and the two that it left.
    while !zombies_of(agent).is_empty() || children_of(agent).len() > 2 {
        assert!(Instant::now() < deadline, "{:?}", zombies_of(agent));
        std::thread::sleep(Duration::from_millis(20));
    }
    fs::write(&go, "").expect("a temporary directory is writable");
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
}

fn zombies_of(parent: i32) -> Vec<i32> {
    children_of(parent).into_iter().filter(|(_, state)| state == "Z").map(|(pid, _)| pid).collect()
}

/// The children of a process with their states, by `/proc/<pid>/stat`.
fn children_of(parent: i32) -> Vec<(i32, String)> {
    let stat = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.to_owned();
        (fields.next()? == parent.to_string()).then_some((pid, state))
    };
    let entries = fs::read_dir("/proc").expect("it is mounted");
    entries.filter_map(|entry| stat(entry.ok()?.file_name().to_str()?.parse().ok()?)).collect()
}
