//! Elastic jobs of the launcher, with real agents and sidecars: workers, sidecars and hosts come and go.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use ronde_tests::harness::{DEADLINE, Ended, Job, Process, Run, with_start_timeouts, write_executable};
use serde_json::Value;

use crate::WORKER;

/// Two hosts on this machine.
pub(crate) const HOSTS: [&str; 2] = ["-H", "127.0.0.1:2,127.0.0.2:2"];

/// An elastic job of workers that count until a file is there.
pub(crate) struct Counting {
    pub(crate) job: Job,
    directory: tempfile::TempDir,
}

impl Counting {
    pub(crate) fn start(ranks: u32, options: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().expect("a temporary directory"), ranks, options)
    }

    pub(crate) fn start_in(directory: tempfile::TempDir, ranks: u32, options: &[&str]) -> Self {
        let report = path_in(&directory, "report");
        let run = Run::new(ranks).options(options).options(["--report", &report]);
        let job = run.env("RONDE_TEST_COUNT_UNTIL", path_in(&directory, "stop")).start([WORKER]);
        Self { job, directory }
    }

    pub(crate) fn wait_for_line(&mut self, text: &str) -> String {
        self.job.wait_for_line(text, DEADLINE)
    }

    pub(crate) fn kill_worker(&mut self, worker: u32) {
        self.process_of(worker).signal(Signal::SIGKILL);
    }

    pub(crate) fn process_of(&mut self, worker: u32) -> Process {
        let number = worker.to_string();
        self.job.wait_for(&format!("the process of worker {worker}"), DEADLINE, |job| {
            let is_it = |process: &Process| process.environment.get("RONDE_WORKER") == Some(&number);
            let becomes = |process: &Process| process.arguments.get(1).is_some_and(|word| word == "exec-worker");
            job.processes().into_iter().find(|process| is_it(process) && !becomes(process))
        })
    }

    /// The index of the sidecar of a worker: its directory is named after job, index and a random number.
    fn sidecar_of(&mut self, worker: u32) -> u32 {
        let socket = self.process_of(worker).environment.remove("RONDE_SOCKET").expect("the launcher sets it");
        let index = socket.rsplit('-').nth(1).expect("three parts");
        index.parse().expect("an index")
    }

    /// Lets the workers end, and returns the committed memberships of the report.
    pub(crate) fn finish(mut self, size: u32) -> (Vec<Value>, Ended) {
        fs::write(self.directory.path().join("stop"), "").expect("a temporary directory is writable");
        self.wait_for_line(&format!("finished rank=0 size={size}"));
        let Self { job, directory } = self;
        let ended = job.wait(DEADLINE);
        assert_eq!(ended.code, Some(0), "{ended}");
        let steps: Vec<&str> = ended.stdout.lines().filter(|line| line.contains("finished")).collect();
        let last = |line: &&str| line.rsplit_once("step=").map(|(_, step)| step.to_owned());
        let mut distinct: Vec<_> = steps.iter().map(last).collect();
        distinct.dedup();
        assert!(steps.len() == size as usize && distinct.len() == 1, "all end in one step: {ended}");
        let report = fs::read_to_string(directory.path().join("report")).expect("the report is there");
        let report: Value = serde_json::from_str(&report).expect("a report is JSON");
        (report["memberships"].as_array().expect("an elastic job has memberships").clone(), ended)
    }
}

pub(crate) fn path_in(directory: &tempfile::TempDir, name: &str) -> String {
    directory.path().join(name).to_str().expect("a temporary path is text").to_owned()
}

/// A discovery script that prints a file, which [`list_hosts`] replaces in one step.
pub(crate) fn discovery(directory: &Path, hosts: &str) -> String {
    list_hosts(directory, hosts);
    let path: PathBuf = directory.join("discover.sh");
    write_executable(&path, "#!/bin/sh\ncat \"$(dirname \"$0\")/hosts\"\n");
    path.to_str().expect("a temporary path is text").to_owned()
}

pub(crate) fn list_hosts(directory: &Path, hosts: &str) {
    fs::write(directory.join("draft"), hosts).expect("writable");
    fs::rename(directory.join("draft"), directory.join("hosts")).expect("writable");
}

pub(crate) fn workers_of(membership: &Value) -> Vec<u64> {
    membership["workers"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

#[test]
fn survivors_of_a_killed_worker_go_on_and_its_slot_is_used_again() {
    let mut counting = Counting::start(4, &["--min-np", "2", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    counting.kill_worker(1);
    counting.wait_for_line("membership 2: 3 ranks on 2 hosts, because worker 1 was lost");
    counting.wait_for_line("membership 3: 4 ranks on 2 hosts, because slots were added");
    counting.wait_for_line("[worker 4]<stdout>:connected rank=3 size=4");
    let (memberships, ended) = counting.finish(4);
    let workers: Vec<Vec<u64>> = memberships.iter().map(workers_of).collect();
    assert_eq!(workers, [vec![0, 1, 2, 3], vec![0, 2, 3], vec![0, 2, 3, 4]], "{ended}");
    let recovery = memberships[1]["recovery_s"].as_f64().expect("it follows a loss");
    assert!((0.0..60.0).contains(&recovery), "{recovery}");
    assert!(ended.stderr.contains("worker 1 (rank 1) on host 127.0.0.1 was killed by signal 9 (SIGKILL)"), "{ended}");
}

#[test]
fn the_loss_of_rank_0_and_of_the_coordinators_sidecar_is_survived() {
    let mut counting = Counting::start(4, &["--min-np", "2", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    counting.kill_worker(0);
    counting.wait_for_line("[worker 1]<stdout>:connected rank=0 size=4");
    let coordinator = counting.sidecar_of(1);
    counting.job.sidecar(coordinator, DEADLINE).signal(Signal::SIGKILL);
    // Its workers end because of it, and may be reported before.
    counting.wait_for_line(&format!("sidecar {coordinator} on host 127.0.0.1 was killed by signal 9"));
    counting.wait_for_line("[worker 2]<stdout>:connected rank=0 size=4");
    let (memberships, ended) = counting.finish(4);
    let last = workers_of(memberships.last().expect("there are some"));
    assert_eq!(last[..2], [2, 3], "{ended}");
    let numbers: Vec<u64> = memberships.iter().filter_map(|membership| membership["number"].as_u64()).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
}

#[test]
fn a_worker_that_does_not_come_back_after_a_change_counts_as_lost() {
    let connected = |line: &str| line.contains("connected rank=3 size=4");
    let attempt = |timeout: &str| {
        let options =
            ["--min-np", "2", "--start-timeout", timeout, "-x", "RONDE_TEST_STAYS_AWAY=1", HOSTS[0], HOSTS[1]];
        let mut counting = Counting::start(4, &options);
        counting.job.wait_for("a first membership, or that the time passed", DEADLINE, |job| {
            job.has_line(|line| connected(line) || line.contains("RONDE-E208")).then_some(())
        });
        counting
    };
    let (mut counting, timeout) = with_start_timeouts(20, attempt, |counting| counting.job.has_line(connected));
    counting.wait_for_line("connected rank=3 size=4");
    counting.kill_worker(3);
    counting.wait_for_line("[worker 1]<stdout>:stays away");
    let text = "worker 1 (rank 1) on host 127.0.0.1 has not come back for its rank in membership";
    let line = counting.wait_for_line(text);
    assert!(line.contains(&format!("within {timeout} s (--start-timeout)")) && line.contains("RONDE-E208"), "{line}");
    counting.wait_for_line("because worker 1 was lost");
    let replacement = counting.wait_for_line("[worker 5]<stdout>:connected rank=3 size=4");
    let (memberships, ended) = counting.finish(4);
    let last = workers_of(memberships.last().expect("there are some"));
    assert!(last[..2] == [0, 2] && !last.contains(&1), "{replacement}: {ended}");
}

#[test]
fn a_worker_that_hangs_is_killed_and_replaced() {
    let options = ["--min-np", "2", "--replace-stalled", "5", "-x", "RONDE_TEST_HANGS=2", HOSTS[0], HOSTS[1]];
    let mut counting = Counting::start(4, &options);
    counting.wait_for_line("[worker 2]<stdout>:hangs rank=2");
    let line = counting.wait_for_line("worker 2 (rank 2) on host 127.0.0.2 hangs, so it is killed and replaced");
    for text in ["rank 2 has not asked for allreduce.step for ", "none of its calls is pending", "RONDE-E304"] {
        assert!(line.contains(text), "{text:?} is not in {line}");
    }
    counting.wait_for_line("because worker 2 was lost");
    counting.wait_for_line("[worker 4]<stdout>:connected rank=3 size=4");
    let (memberships, ended) = counting.finish(4);
    assert_eq!(workers_of(memberships.last().expect("there are some")), [0, 1, 3, 4], "{ended}");
}

#[test]
fn a_spare_worker_takes_the_place_of_a_lost_one_at_once() {
    let options = ["--min-np", "2", "--max-np", "3", "--spares", "1", "-H", "127.0.0.1:4"];
    let mut counting = Counting::start(3, &options);
    counting.wait_for_line("connected rank=2 size=3");
    counting.wait_for_line("worker 3 is a spare one and has started; it waits for a loss");
    counting.kill_worker(1);
    counting.wait_for_line("membership 3: 3 ranks on 1 host, because worker 1 was lost");
    counting.wait_for_line("[worker 3]<stdout>:connected rank=2 size=3");
    counting.wait_for_line("worker 4 is a spare one");
    let (memberships, ended) = counting.finish(3);
    let workers: Vec<Vec<u64>> = memberships.iter().map(workers_of).collect();
    assert_eq!(workers, [vec![0, 1, 2], vec![0, 2, 3]], "{ended}");
}

#[test]
fn a_host_that_gets_sigterm_is_left_at_the_next_commit() {
    let mut counting = Counting::start(4, &["--min-np", "2", "--preemption-notice", "100", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    let agent = counting.process_of(2).parent;
    let of_host = |process: &Process| process.pid == agent || process.parent == agent;
    let processes: Vec<Process> = counting.job.processes().into_iter().filter(of_host).collect();
    // As a system that shuts down: all processes but those that train, which have no handler here.
    let kept = |process: &&Process| !process.environment.contains_key("RONDE_WORKER");
    processes.iter().filter(kept).for_each(|process| process.signal(Signal::SIGTERM));
    counting.wait_for_line("host 127.0.0.2 got SIGTERM: the workers of that host leave at the next commit");
    counting.wait_for_line("membership 2: 2 ranks on 1 host, because a host got SIGTERM");
    counting.wait_for_line("[worker 0]<stdout>:connected rank=0 size=2");
    let (memberships, ended) = counting.finish(2);
    assert_eq!(workers_of(&memberships[1]), [0, 1], "{ended}");
    assert!(!ended.stdout.contains("failed rank"), "nobody's step failed: {ended}");
    assert!(!ended.stderr.contains("was lost"), "{ended}");
}

#[test]
fn a_host_whose_workers_do_not_commit_in_time_is_lost() {
    let options = ["--min-np", "1", "--preemption-notice", "3", "-x", "RONDE_TEST_HANGS=0", HOSTS[0], HOSTS[1]];
    let mut counting = Counting::start(4, &options);
    counting.wait_for_line("[worker 0]<stdout>:hangs rank=0");
    let agent = counting.process_of(0).parent;
    let agents = counting.job.of_kind("agent");
    agents.iter().filter(|process| process.pid == agent).for_each(|process| process.signal(Signal::SIGTERM));
    let line = counting.wait_for_line("its workers have not left within 3 s (--preemption-notice)");
    assert!(line.contains("RONDE-E221"), "{line}");
    counting.wait_for_line("[worker 2]<stdout>:connected rank=0 size=2");
    let (memberships, ended) = counting.finish(2);
    assert_eq!(workers_of(&memberships[1]), [2, 3], "{ended}");
}

#[test]
fn a_worker_that_sigterm_ends_empties_its_host_for_the_time_of_the_notice() {
    let mut counting = Counting::start(4, &["--min-np", "2", "--preemption-notice", "3", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    counting.process_of(3).signal(Signal::SIGTERM);
    counting.wait_for_line("worker 3 on host 127.0.0.2 got SIGTERM");
    counting.wait_for_line("[worker 0]<stdout>:connected rank=0 size=2");
    counting.wait_for_line("[worker 4]<stdout>:connected rank=2 size=4");
    let (memberships, ended) = counting.finish(4);
    assert_eq!(workers_of(memberships.last().expect("there are some")), [0, 1, 4, 5], "{ended}");
}

#[test]
fn hosts_that_appear_are_used_and_those_that_disappear_are_left() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let place = directory.path().to_owned();
    let script = discovery(&place, "127.0.0.1:2\n");
    let mut counting = Counting::start_in(directory, 2, &["--min-np", "1", "--host-discovery-script", &script]);
    counting.wait_for_line("connected rank=1 size=2");
    list_hosts(&place, "127.0.0.1:2\n127.0.0.2:1\n");
    counting.wait_for_line("connected rank=2 size=3");
    list_hosts(&place, "127.0.0.2:1\n");
    counting.wait_for_line("[worker 2]<stdout>:connected rank=0 size=1");
    let (memberships, ended) = counting.finish(1);
    let workers: Vec<Vec<u64>> = memberships.iter().map(workers_of).collect();
    assert_eq!(workers, [vec![0, 1], vec![0, 1, 2], vec![2]], "{ended}");
    assert!(!ended.stdout.contains("failed rank"), "nobody's step failed: {ended}");
}

#[test]
fn too_few_slots_are_waited_for_and_then_counted() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let script = discovery(directory.path(), "127.0.0.1:1\n");
    let options = ["--min-np", "2", "--host-discovery-script", &script, "--elastic-timeout", "4"];
    let ended = Run::new(2).options(options).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    for text in ["needs 2 slots, and there are 1; it waits", "there are 1 after waiting 4 s", "RONDE-E220"] {
        assert!(ended.stderr.contains(text), "{text}: {ended}");
    }
}

#[test]
fn a_discovery_script_that_fails_first_ends_the_job() {
    let options = ["--min-np", "2", "--host-discovery-script", "echo no cloud >&2; exit 3"];
    let ended = Run::new(2).options(options).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(64), "{ended}");
    for text in ["exited with code 3", "no cloud", "RONDE-E102"] {
        assert!(ended.stderr.contains(text), "{text}: {ended}");
    }
}

#[test]
fn a_command_that_fails_everywhere_ends_the_job_with_its_code() {
    let options = ["--min-np", "2", "-H", "127.0.0.1:2"];
    let ended = Run::new(2).options(options).start(["sh", "-c", "echo broken >&2; exit 7"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(7), "{ended}");
    assert!(ended.stderr.contains("RONDE-E301") && ended.stderr.contains("broken"), "{ended}");
}

#[test]
fn the_reset_limit_ends_the_job_with_horovods_words() {
    let options = ["--min-np", "1", "--reset-limit", "0", "-H", "127.0.0.1:2"];
    let mut counting = Counting::start(2, &options);
    counting.wait_for_line("connected rank=1 size=2");
    counting.kill_worker(1);
    let ended = counting.job.wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(ended.stderr.contains("number of resets during elastic job exceeded limit: 0"), "{ended}");
    assert_eq!(ended.stderr.matches("worker 1 (rank 1)").count(), 1, "the loss is in the block at the end: {ended}");
    assert!(ended.stderr.contains("RONDE-E301"), "with its own code, too: {ended}");
}

#[test]
fn a_command_that_does_not_join_runs_to_its_end() {
    let options = ["--min-np", "2", "-H", "127.0.0.1:2"];
    let script = "echo worker $RONDE_WORKER of $RONDE_SIZE, elastic $HOROVOD_ELASTIC";
    let mut job = Run::new(2).options(options).start(["sh", "-c", script]);
    job.wait_for_nothing_left(DEADLINE);
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    for worker in 0..2 {
        let line = format!("[worker {worker}]<stdout>:worker {worker} of 2, elastic 1");
        assert!(ended.stdout.lines().any(|found| found == line), "{ended}");
    }
}
