//! `ronde job`: a running elastic job is shown and changed from outside.

use ronde_tests::harness::{DEADLINE, Ended, Job, Run};
use serde_json::Value;

use crate::elastic_jobs::{Counting, HOSTS, workers_of};

fn ask(counting: &Counting, arguments: &[&str]) -> String {
    ask_job(&counting.job, arguments)
}

fn ask_job(job: &Job, arguments: &[&str]) -> String {
    let ended = job.beside(&[&["job"], arguments].concat());
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended}");
    ended.stdout
}

fn refused(counting: &Counting, arguments: &[&str]) -> Ended {
    let ended = counting.job.beside(&[&["job"], arguments].concat());
    assert!(ended.code.is_some_and(|code| code != 0) && ended.stdout.is_empty(), "{arguments:?}: {ended}");
    ended
}

fn status(counting: &Counting) -> Value {
    status_of(&counting.job)
}

fn status_of(job: &Job) -> Value {
    serde_json::from_str(&ask_job(job, &["status", "--json"])).expect("the state is JSON")
}

fn causes(memberships: &[Value]) -> Vec<&str> {
    memberships.iter().filter_map(|membership| membership["cause"].as_str()).collect()
}

#[test]
fn the_state_has_each_worker_with_its_process() {
    let mut counting = Counting::start(3, &["--min-np", "1", "--job", "shown", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    // One rank prints its line before the launcher knows that the others train.
    let shown = counting.job.wait_for("four workers that train", DEADLINE, |job| {
        let shown = status_of(job);
        let train = |workers: &Vec<Value>| workers.iter().filter(|worker| worker["state"] == "training").count();
        (shown["workers"].as_array().map(train) == Some(4)).then_some(shown)
    });
    let workers = shown["workers"].as_array().expect("a list").clone();
    let pids: Vec<i64> = (0..4).map(|worker| i64::from(counting.process_of(worker).pid)).collect();
    for (number, worker) in (0_u64..).zip(&workers) {
        assert_eq!((worker["rank"].as_u64(), worker["worker"].as_u64()), (Some(number), Some(number)), "{worker}");
        assert_eq!(worker["pid"].as_i64(), pids.get(usize::try_from(number).expect("small")).copied(), "{worker}");
        assert_eq!(worker["state"], "training", "{worker}");
        assert_eq!(worker["host"], if number < 2 { "127.0.0.1" } else { "127.0.0.2" }, "{worker}");
    }
    assert_eq!(
        (workers.len(), &shown["job"], &shown["membership"], &shown["changes"]),
        (4, &"shown".into(), &1.into(), &0.into())
    );
    let text = ask(&counting, &["status", "--job", "shown"]);
    assert!(text.starts_with("job shown: membership 1, 4 ranks") && text.contains("127.0.0.2"), "{text}");
    counting.finish(4);
}

#[test]
fn a_drained_host_is_left_without_a_loss_and_used_again_when_that_is_undone() {
    let mut counting = Counting::start(4, &["--min-np", "2", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    let text = ask(&counting, &["drain", "127.0.0.1", "--wait", "100"]);
    assert!(text.contains("host 127.0.0.1 is drained: its 2 workers leave at the next commit"), "{text}");
    counting.wait_for_line("membership 2: 2 ranks on 1 host, because a host is drained");
    counting.wait_for_line("[worker 2]<stdout>:connected rank=0 size=2");
    let hosts = status(&counting)["hosts"].clone();
    assert_eq!((&hosts[0]["drained"], &hosts[0]["workers"]), (&Value::Bool(true), &0.into()), "{hosts}");
    ask(&counting, &["drain", "127.0.0.1", "--undo"]);
    counting.wait_for_line("[worker 4]<stdout>:connected rank=2 size=4");
    let (memberships, ended) = counting.finish(4);
    assert_eq!(workers_of(&memberships[2]), [2, 3, 4, 5], "{ended}");
    assert!(!ended.stdout.contains("failed rank"), "nobody's step failed: {ended}");
}

#[test]
fn the_number_of_workers_changes_while_they_train() {
    let mut counting = Counting::start(3, &["--min-np", "1", "--max-np", "4", HOSTS[0], HOSTS[1]]);
    counting.wait_for_line("connected rank=3 size=4");
    let text = ask(&counting, &["scale", "2"]);
    assert!(text.contains("2 of them, the youngest, leave at the next commit"), "{text}");
    counting.wait_for_line("connected rank=0 size=2");
    ask(&counting, &["scale", "3"]);
    counting.wait_for_line("connected rank=2 size=3");
    let (memberships, ended) = counting.finish(3);
    let workers: Vec<Vec<u64>> = memberships.iter().map(workers_of).collect();
    assert_eq!(workers, [vec![0, 1, 2, 3], vec![0, 1], vec![0, 1, 4]], "{ended}");
    assert_eq!(causes(&memberships)[1..], ["fewer workers are wanted", "slots were added"], "{ended}");
    assert!(!ended.stdout.contains("failed rank"), "nobody's step failed: {ended}");
}

#[test]
fn what_a_job_cannot_do_is_refused_with_the_way_out() {
    let mut counting = Counting::start(2, &["--min-np", "2", "--max-np", "2", "--job", "firm", "-H", "127.0.0.1:2"]);
    counting.wait_for_line("connected rank=1 size=2");
    for (arguments, text) in [
        (&["scale", "1"][..], "with fewer than 2 workers (--min-np); give 2 or more"),
        (&["scale", "3"], "at most 2 workers (--max-np)"),
        (&["drain", "gamma"], "the job has no host gamma; it has 127.0.0.1"),
        (&["status", "--job", "other"], "no elastic job named other runs on this host; there are: firm"),
    ] {
        let ended = refused(&counting, arguments);
        let code = if text.starts_with("no elastic") { "[RONDE-E604]" } else { "[RONDE-E607]" };
        assert!(ended.stderr.contains(text) && ended.stderr.contains(code), "{ended}");
    }
    counting.finish(2);
}

#[test]
fn a_job_that_is_not_elastic_is_recognised() {
    let mut job = Run::new(1).options(["--job", "fixed"]).start(["sh", "-c", "echo up; exec sleep 600"]);
    job.wait_for_line("up", ronde_tests::harness::DEADLINE);
    let ended = job.beside(&["job", "status", "--job", "fixed"]);
    assert!(ended.code == Some(69) && ended.stderr.contains("[RONDE-E606]"), "{ended}");
    let ended = job.beside(&["job", "status"]);
    assert!(ended.code == Some(69) && ended.stderr.contains("[RONDE-E604]"), "{ended}");
}
