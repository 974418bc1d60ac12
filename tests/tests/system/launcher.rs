//! The launcher with real agents and sidecars; the workers are small shell scripts.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use ronde_tests::cluster::Network;
use ronde_tests::harness::{DEADLINE, Ended, Job, RemoteShell, Run, with_start_timeouts, write_executable};
use serde_json::Value;

fn sh(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

/// The variables that one rank printed with `env`.
fn environment_of(ended: &Ended, rank: u32) -> BTreeMap<String, String> {
    let pairs = ended.stdout_of(rank).into_iter().filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// A sidecar that follows a script instead of the protocol.
fn sidecar_script(directory: &Path, body: &str) -> String {
    let path = directory.join("sidecar");
    write_executable(&path, &format!("#!/bin/sh\n{body}\n"));
    path.to_str().expect("a temporary path is text").to_owned()
}

fn assert_nothing_left(mut job: Job) {
    job.wait_for_nothing_left(DEADLINE);
    assert_eq!(job.runtime_files(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn workers_find_every_promised_variable_and_no_secret() {
    let script = "env; stat -c 'MODE=%a' $RONDE_TOKEN_FILE; echo PWD_IS=$(pwd); ls $RONDE_SOCKET | tr '\\n' ' '";
    let run = Run::new(4).sidecars(2).options(["-x", "GIVEN=a=b", "--job", "names"]);
    let ended = run
        .env("PASSED", "on")
        .env("CUDA_VISIBLE_DEVICES", "0")
        .env("RONDE_RANK", "9")
        .start(sh(script))
        .wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    let mut ports = std::collections::BTreeSet::new();
    for rank in 0..4 {
        let found = environment_of(&ended, rank);
        let (local, cross) = (rank % 2, rank / 2);
        for prefix in ["RONDE_", "HOROVOD_"] {
            let numbers = [
                ("RANK", rank),
                ("SIZE", 4),
                ("LOCAL_RANK", local),
                ("LOCAL_SIZE", 2),
                ("CROSS_RANK", cross),
                ("CROSS_SIZE", 2),
            ];
            for (name, number) in numbers {
                assert_eq!(
                    found.get(&format!("{prefix}{name}")),
                    Some(&number.to_string()),
                    "{prefix}{name} of rank {rank}"
                );
            }
        }
        let rank_text = rank.to_string();
        let expected = [
            ("RANK", rank_text.as_str()),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", if local == 0 { "0" } else { "1" }),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("PYTHONUNBUFFERED", "1"),
            ("RONDE_JOB", "names"),
            ("HOROVOD_HOSTNAME", "localhost"),
            ("GIVEN", "a=b"),
            ("PASSED", "on"),
            ("MODE", "400"),
        ];
        for (name, value) in expected {
            assert_eq!(found.get(name).map(String::as_str), Some(value), "{name} of rank {rank}");
        }
        assert!(!found.contains_key("CUDA_VISIBLE_DEVICES"));
        assert_eq!(
            found.get("PWD_IS"),
            std::env::current_dir().expect("it exists").to_str().map(str::to_owned).as_ref()
        );
        assert!(found["RONDE_TOKEN_FILE"].starts_with(&format!("{}/", found["RONDE_SOCKET"])));
        let sockets = ended.stdout_of(rank).last().copied().unwrap_or_default().to_owned();
        assert!(sockets.contains("rpc.sock") && sockets.contains("mem.sock"), "{sockets}");
        ports.insert(found["MASTER_PORT"].clone());
        let secret = found.iter().find(|(_, value)| value.contains("PRIVATE") || value.contains("BEGIN"));
        assert_eq!(secret, None);
    }
    assert_eq!(ports.len(), 1, "one master port for all");
}

#[test]
fn lines_are_prefixed_by_rank_and_stream() {
    let ended = Run::new(2).start(sh("echo out; echo err >&2; printf 'no end'")).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    for rank in 0..2 {
        assert_eq!(ended.stdout_of(rank), ["out", "no end"]);
        assert!(ended.stderr.lines().any(|line| line == format!("[{rank}]<stderr>:err")), "{ended}");
    }
}

#[test]
fn a_hundred_thousand_lines_come_whole_and_in_order() {
    const LINES: usize = 25_000;
    // Many writes of odd sizes: one line is rarely one write.
    let script = format!(
        "awk -v r=$RANK 'BEGIN {{ for (i = 0; i < {LINES}; i++) printf \"%d of %d: %0*d\\n\", i, r, i % 97, 7 }}' | dd bs=777 2>/dev/null"
    );
    let ended = Run::new(4).start(sh(&script)).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for rank in 0..4 {
        let lines = ended.stdout_of(rank);
        assert_eq!(lines.len(), LINES);
        for (number, line) in lines.iter().enumerate() {
            let expected = format!("{number} of {rank}: {:0width$}", 7, width = number % 97);
            assert_eq!(*line, expected);
        }
    }
    assert_eq!(ended.stdout.lines().count(), 4 * LINES, "no line without a prefix");
}

#[test]
fn a_long_line_is_cut_and_nothing_of_it_lost() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let options = ["--output-filename".as_ref(), directory.path().as_os_str()];
    let ended =
        Run::new(1).options(options).start(sh("head -c 1000000 /dev/zero | tr '\\0' x; echo; echo end")).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = ended.stdout_of(0);
    assert_eq!(lines.last(), Some(&"end"));
    assert_eq!(lines.iter().map(|line| line.bytes().filter(|byte| *byte == b'x').count()).sum::<usize>(), 1_000_000);
    assert!(lines.iter().all(|line| line.len() <= 256 << 10), "a piece is bounded");
    let file = fs::read_to_string(directory.path().join("rank.0/stdout")).expect("the launcher wrote it");
    assert_eq!(file.len(), 1_000_000 + "\nend\n".len(), "files hold the line in one piece");
}

#[test]
fn output_files_hold_each_rank_s_streams() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let options = ["--output-filename".as_ref(), directory.path().as_os_str()];
    let run = Run::new(11).options(options).options(["--prefix-output-with-timestamp"]);
    let ended = run.start(sh("echo out $RANK; echo err $RANK >&2")).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    for rank in 0..11 {
        let read = |stream| {
            fs::read_to_string(directory.path().join(format!("rank.{rank:02}/{stream}"))).expect("it is there")
        };
        assert_eq!((read("stdout"), read("stderr")), (format!("out {rank}\n"), format!("err {rank}\n")));
    }
    let line = ended.stdout.lines().next().expect("eleven lines");
    assert!(line.starts_with("20") && line.contains("Z[") && line.contains("]<stdout>:out "), "{line}");
}

#[test]
fn the_first_failure_ends_the_rest_and_is_named() {
    let script = "if [ $RANK = 2 ]; then echo first >&2; echo why it failed >&2; exit 7; fi; sleep 1000";
    let mut job = Run::new(4).sidecars(2).start(sh(script));
    let line = job.wait_for_line("ronde: rank", DEADLINE);
    assert_eq!(line, "ronde: rank 2 failed; ending the 3 ranks that still run");
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(7), "{ended}");
    let block = "ronde: rank 2 on host localhost exited with code 7 [RONDE-E301]\nlast lines of its stderr:\n  first\n  why it \
                 failed\n3 other ranks ended because of that, by signal 15 (SIGTERM)\n";
    assert!(ended.stderr.ends_with(block), "{ended}");
}

#[test]
fn a_worker_that_fails_because_of_another_is_not_blamed() {
    // Rank 0 fails when rank 1 has gone.
    let script = "if [ $RANK = 1 ]; then echo $$ > \"$SHARED\"; kill -SEGV $$; fi
        until [ -s \"$SHARED\" ]; do sleep 0.01; done
        while kill -0 $(cat \"$SHARED\") 2>/dev/null; do sleep 0.01; done; exit 3";
    let directory = tempfile::tempdir().expect("a temporary directory");
    let ended = Run::new(2).env("SHARED", directory.path().join("pid")).start(sh(script)).wait(DEADLINE);
    assert_eq!(ended.code, Some(139), "{ended}");
    assert!(ended.stderr.contains("ronde: rank 1 on host localhost was killed by signal 11 (SIGSEGV)"), "{ended}");
    assert!(!ended.stderr.contains("ronde: rank 0"), "{ended}");
}

#[test]
fn a_worker_that_ignores_the_request_is_killed() {
    let script = "trap '' TERM; echo ready; if [ $RANK = 1 ]; then until [ -e \"$GO\" ]; do sleep 0.01; done; exit 5; fi; while :; do sleep 1; done";
    let directory = tempfile::tempdir().expect("a temporary directory");
    let go = directory.path().join("go");
    let mut job = Run::new(2).env("GO", &go).start(sh(script));
    job.wait_for_line("[0]<stdout>:ready", DEADLINE);
    fs::write(&go, "").expect("a temporary directory is writable");
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(5), "{ended}");
}

#[test]
fn a_command_that_does_not_exist_is_explained() {
    let ended = Run::new(1).start(["no-such-program"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(127), "{ended}");
    assert!(
        ended.stderr.contains("rank 0 on host localhost exited with code 127 (command not found: no-such-program)"),
        "{ended}"
    );
    let directory = tempfile::tempdir().expect("a temporary directory");
    let ended = Run::new(1).start([directory.path()]).wait(DEADLINE);
    assert_eq!(ended.code, Some(126), "{ended}");
    assert!(ended.stderr.contains("Permission denied"), "{ended}");
}

#[test]
fn a_wrong_command_line_is_explained() {
    let ended = Run::new(5).options(["-H", "localhost:2,other:2"]).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(64), "{ended}");
    assert!(ended.stderr.contains("Requested more processes (5) than there are available slots (4)"), "{ended}");
    let ended = Run::new(1).options(["-H", "localhost:"]).start(["true"]).wait(DEADLINE);
    assert!(ended.code == Some(64) && ended.stderr.contains("Invalid host input"), "{ended}");
}

#[test]
fn a_configuration_file_with_three_mistakes_starts_nothing() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("ronde.toml");
    fs::write(&file, "[run]\nlanes = 99\nnum_proc = 2\n\n[other]\n").expect("a temporary directory is writable");
    let options = ["--config".as_ref(), file.as_os_str()];
    let ended = Run::new(1).options(options).start(sh("echo started")).wait(DEADLINE);
    assert_eq!(ended.code, Some(64), "{ended}");
    assert!(ended.stderr.starts_with("ronde: 3 mistakes in the configuration [RONDE-E104]\n"), "{ended}");
    for (line, what) in [(2, "lanes: invalid value '99'"), (3, "has no key num_proc"), (5, "there is no table [other]")]
    {
        let place = format!("{}:{line}: ", file.display());
        assert!(
            ended.stderr.lines().any(|text| text.contains(&place) && text.contains(what)),
            "{place}{what}: {ended}"
        );
    }
    assert!(ended.stdout.is_empty(), "{ended}");
}

#[test]
fn an_option_of_ronde_after_the_program_is_noticed_and_belongs_to_the_program() {
    let program = ["sh", "-c", "echo got $1 $2", "sh", "-np", "4"];
    let ended = Run::new(1).start(program).wait(DEADLINE);
    assert_eq!((ended.code, &*ended.stdout), (Some(0), "[0]<stdout>:got -np 4\n"), "{ended}");
    assert!(ended.stderr.contains("ronde: -np comes after sh, so it is an argument of that program"), "{ended}");
}

/// Workers with children: some in the worker's group, some in a session of their own.
const FAMILY: &str = "sleep 1000 & setsid sleep 1000 & setsid sh -c 'sleep 1000 & sleep 1000' & echo ready; wait";

#[test]
fn ctrl_c_leaves_no_processes_or_files() {
    let mut job = Run::new(4).sidecars(2).start(sh(FAMILY));
    (0..4).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    assert!(!job.runtime_files().is_empty(), "session directories are in the runtime directory");
    job.signal(Signal::SIGINT);
    job.wait_for_line("ronde: ended by SIGINT", DEADLINE);
    assert_nothing_left(job);
}

#[test]
fn an_interrupt_is_the_exit_code() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut job = Run::new(2).start(sh("echo ready; sleep 1000"));
        job.wait_for_line("ready", DEADLINE);
        job.signal(signal);
        let ended = job.wait(DEADLINE);
        assert_eq!(ended.code, Some(code), "{ended}");
    }
}

#[test]
fn a_signal_that_is_ignored_from_the_start_stays_ignored() {
    // As under `nohup`, and in the background of a shell without job control.
    for signal in [Signal::SIGHUP, Signal::SIGINT] {
        check_ignored(signal);
    }
}

fn check_ignored(signal: Signal) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let go = directory.path().join("go");
    let run = Run::new(1).env("GO", &go).ignoring(signal);
    let mut job = run.start(sh("echo ready; until [ -e \"$GO\" ]; do sleep 0.01; done"));
    job.wait_for_line("ready", DEADLINE);
    job.signal(signal);
    fs::write(&go, "").expect("a temporary directory is writable");
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
}

#[test]
fn a_second_ctrl_c_does_not_wait() {
    let mut job = Run::new(2).start(sh("trap '' TERM; echo ready; while :; do sleep 1000; done"));
    (0..2).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    job.signal(Signal::SIGINT);
    job.wait_for_line("ronde: SIGINT: ending", DEADLINE);
    job.signal(Signal::SIGINT);
    assert_nothing_left(job);
}

#[test]
fn a_killed_launcher_leaves_no_processes_or_files() {
    let mut job = Run::new(4).sidecars(2).start(sh(FAMILY));
    (0..4).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    job.signal(Signal::SIGKILL);
    assert_nothing_left(job);
}

#[test]
fn a_killed_agent_takes_its_workers_along() {
    let mut job = Run::new(2).start(sh("echo ready; exec sleep 1000"));
    (0..2).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    job.of_kind("agent").iter().for_each(|agent| agent.signal(Signal::SIGKILL));
    job.wait_for_line("ronde: the connection to host localhost (ranks 0-1) was lost", DEADLINE);
    assert_nothing_left(job);
}

#[test]
fn a_killed_sidecar_ends_the_job_and_its_directory_goes() {
    let mut job = Run::new(4).sidecars(2).start(sh("echo ready; sleep 1000"));
    (0..4).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    job.sidecar(1, DEADLINE).signal(Signal::SIGKILL);
    job.wait_for_line("ronde: sidecar 1 on host localhost was lost; ending the 4 ranks that still run", DEADLINE);
    job.wait_for_line(
        "ronde: sidecar 1 on host localhost, which serves ranks 2-3, was killed by signal 9 (SIGKILL)",
        DEADLINE,
    );
    assert_nothing_left(job);
}

#[test]
fn output_that_nobody_reads_does_not_keep_ctrl_c_from_working() {
    let mut job = Run::new(2).stdout_unread().start(sh("echo ready >&2; yes"));
    // The other rank's line may wait after output that is not read.
    job.wait_for_line("<stderr>:ready", DEADLINE);
    job.signal(Signal::SIGINT);
    assert_nothing_left(job);
}

#[test]
fn output_that_nobody_can_read_ends_the_job() {
    let mut job = Run::new(2).stdout_unread().start(sh("echo ready >&2; yes"));
    job.wait_for_line("<stderr>:ready", DEADLINE);
    job.close_stdout();
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(74), "{ended}");
    assert!(ended.stderr.contains("cannot write the workers' output"), "{ended}");
}

#[test]
fn the_block_that_names_the_cause_comes_past_output_that_nobody_reads() {
    // Rank 1 fails. Rank 0 writes without end from SIGTERM on, so that the launcher's output is blocked when the block comes.
    // It starts no program for that, and its lines are long: a busy machine gives it little time until SIGKILL.
    let directory = tempfile::tempdir().expect("a temporary directory");
    let line = "y".repeat(2_000);
    let script = "if [ $RONDE_RANK = 0 ]; then trap 'while :; do echo $LINE; done' TERM; : > $TRAPPED; sleep 1000; fi; \
                  until [ -e $TRAPPED ]; do sleep 0.01; done; echo bye >&2; exit 3";
    let run = Run::new(2).stdout_unread().env("TRAPPED", directory.path().join("trapped")).env("LINE", &line);
    let job = run.start(sh(script));
    let capacity = job.stdout_capacity();
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(3), "{ended}");
    // A write that finds less than a page of room may wait for a whole page.
    let is_blocked = ended.stdout.contains(&format!("[0]<stdout>:{line}\n")) && ended.stdout.len() + 4_096 > capacity;
    assert!(is_blocked, "it was not blocked: {} of {capacity} bytes", ended.stdout.len());
    let block = "ronde: rank 1 on host localhost exited with code 3 [RONDE-E301]\nlast lines of its stderr:\n";
    assert_eq!(ended.stderr.matches(block).count(), 1, "{ended}");
}

#[test]
fn a_sidecar_that_does_not_start_is_named_with_its_ranks() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let program = sidecar_script(directory.path(), "echo still looking for my keys >&2; exec sleep 1000");
    let attempt = |timeout: &str| {
        let run = Run::new(4).sidecars(2).options(["--start-timeout", timeout, "--sidecar-command", &program]);
        run.start(["true"]).wait(DEADLINE)
    };
    let (ended, timeout) =
        with_start_timeouts(10, attempt, |ended| ended.stderr.contains("  still looking for my keys"));
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(ended.stderr.contains(&format!("not everything started within {timeout} s (--start-timeout)")), "{ended}");
    for ranks in ["ranks 0-1", "ranks 2-3"] {
        assert!(
            ended.stderr.contains(&format!("{ranks} on host localhost: its sidecar has not opened its ports")),
            "{ended}"
        );
    }
    assert!(ended.stderr.contains("  still looking for my keys"), "{ended}");
}

#[test]
fn a_sidecar_that_fails_reports_the_reason() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let fatal = r#"read line; echo '{"type":"fatal","reason":"the disk is full"}'; exit 1"#;
    let program = sidecar_script(directory.path(), fatal);
    let ended = Run::new(2).options(["--sidecar-command", &program]).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(
        ended.stderr.contains("the sidecar of ranks 0-1 on host localhost cannot go on: the disk is full"),
        "{ended}"
    );
}

#[test]
fn a_sidecar_that_sends_malformed_messages_is_rejected() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (answer, complaint) in [
        ("hello", "cannot go on: its output cannot be parsed"),
        (
            r#"{"type":"bound","certificate_request":"x","control":"127.0.0.1:1","lanes":[],"version":"0"}"#,
            "cannot issue a certificate to the sidecar of rank 0 on host localhost: the certificate request cannot be used",
        ),
    ] {
        let program = sidecar_script(directory.path(), &format!("read line; echo '{answer}'; exec sleep 1000"));
        let ended = Run::new(1).options(["--sidecar-command", &program]).start(["true"]).wait(DEADLINE);
        assert!(ended.code == Some(69) && ended.stderr.contains(complaint), "{ended}");
    }
}

#[test]
fn other_hosts_are_reached_through_the_remote_shell() {
    let shell = RemoteShell::here();
    let run = Run::new(3).options(["-H", "alpha.invalid:2,beta.invalid:2", "--remote-shell"]).options([shell.path()]);
    let ended = run.env("TRAVELS", "in the pipe").start(sh("env; echo >&2 to stderr")).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    let place = |rank| {
        let found = environment_of(&ended, rank);
        ["HOROVOD_HOSTNAME", "LOCAL_RANK", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "TRAVELS"]
            .map(|name| found[name].clone())
    };
    assert_eq!(place(0), ["alpha.invalid", "0", "0", "2", "in the pipe"]);
    assert_eq!(place(1), ["alpha.invalid", "1", "0", "1", "in the pipe"]);
    assert_eq!(place(2), ["beta.invalid", "0", "1", "2", "in the pipe"]);
    let mut calls = shell.calls();
    calls.sort();
    let expected = |host: &str| format!("{host}|exec {} agent|2", ronde_tests::harness::ronde_binary().display());
    assert_eq!(calls, [expected("alpha.invalid"), expected("beta.invalid")], "nothing but the host and the agent");
}

#[test]
fn a_killed_remote_launcher_leaves_no_processes_or_files() {
    let shell = RemoteShell::here();
    let mut job = Run::new(2)
        .options(["-H", "a.invalid:1,b.invalid:1", "--remote-shell"])
        .options([shell.path()])
        .start(sh(FAMILY));
    (0..2).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    job.signal(Signal::SIGKILL);
    assert_nothing_left(job);
}

#[test]
fn a_host_that_cannot_be_reached_shows_the_output_of_the_remote_shell() {
    let shell = RemoteShell::script(
        "case $1 in b.*) echo \"$1: Permission denied (publickey).\" >&2; exit 255;; esac; exec sh -c \"$2\"",
    );
    let run = Run::new(4).options(["-H", "a.invalid:2,b.invalid:2", "--remote-shell"]).options([shell.path()]);
    let ended = run.start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(
        ended
            .stderr
            .contains("ronde: cannot start ronde on host b.invalid (ranks 2-3): the remote shell exited with code 255"),
        "{ended}"
    );
    assert!(ended.stderr.contains("  b.invalid: Permission denied (publickey)."), "{ended}");
}

#[test]
fn a_host_that_does_not_answer_is_named_with_its_ranks() {
    let shell = RemoteShell::script("case $1 in b.*) exec sleep 1000;; esac; echo Welcome to $1; exec sh -c \"$2\"");
    let options = ["-H", "a.invalid:2,b.invalid:2", "--start-timeout", "2", "--remote-shell"];
    let mut job = Run::new(4).options(options).options([shell.path()]).start(["true"]);
    job.wait_for_line("ranks 2-3 on host b.invalid: the remote shell has not started ronde there", DEADLINE);
    assert_nothing_left(job);
}

#[test]
fn a_remote_shell_that_is_not_there_is_named() {
    let ended = Run::new(1)
        .options(["-H", "a.invalid:1", "--remote-shell", "/no/such/shell -p 22"])
        .start(["true"])
        .wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(ended.stderr.contains("cannot start \"/no/such/shell\" to reach host a.invalid (rank 0)"), "{ended}");
}

#[test]
fn hosts_of_a_network_make_a_job() {
    if Network::is_left_out("hosts_of_a_network_make_a_job") {
        return;
    }
    let network = Network::up(2).expect("hosts");
    let shell = RemoteShell::into_network(&network, 2);
    let hostfile = tempfile::NamedTempFile::new().expect("a temporary file");
    let hosts = format!("# two\n{} slots=2\n\n{} slots=2\n", network.address(0), network.address(1));
    fs::write(hostfile.path(), hosts).expect("a temporary file is writable");
    let run = Run::new(4)
        .options(["--hostfile".as_ref(), hostfile.path().as_os_str()])
        .options(["--remote-shell"])
        .options([shell.path()]);
    let ended = run
        .start(sh("echo $RANK at $MASTER_ADDR on $(ip -br -4 addr show | tr -s ' ' | cut -d' ' -f3 | tr '\\n' ' ')"))
        .wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    for rank in 0..4 {
        let (master, own) = (network.address(0), network.address(rank / 2));
        let line = ended.stdout_of(rank).concat();
        assert!(line.starts_with(&format!("{rank} at {master} on ")) && line.contains(&format!(" {own}/24")), "{line}");
    }
}

#[test]
fn the_report_describes_the_outcome_of_the_job() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let read = |name: &str| -> Value {
        let text = fs::read_to_string(directory.path().join(name)).expect("the launcher wrote it");
        serde_json::from_str(&text).expect("it is JSON")
    };
    let run = |name: &str, script: &str| {
        let path = directory.path().join(name);
        Run::new(3)
            .sidecars(2)
            .options(["--job", "reported", "--report"])
            .options([&path])
            .start(sh(script))
            .wait(DEADLINE)
    };
    assert_eq!(run("good", "true").code, Some(0));
    let good = read("good");
    assert_eq!(
        (&good["job"], &good["ranks"], &good["exit"], &good["failure"]),
        (&"reported".into(), &3.into(), &0.into(), &Value::Null)
    );
    assert_eq!(good["hosts"][0]["ranks"], serde_json::json!([0, 1, 2]));
    assert_eq!(good["sidecars"][1]["ranks"], serde_json::json!([2]));
    assert!(good["sidecars"][0]["summary"]["sealed_bytes"].is_u64(), "{good}");
    assert_eq!(run("bad", "exit $((RANK * 4))").code.map(|code| code > 0), Some(true));
    let bad = read("bad");
    assert!(bad["failure"].as_str().is_some_and(|text| text.starts_with("rank ")), "{bad}");
}
