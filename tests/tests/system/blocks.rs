//! The block with which `ronde run` ends a job that failed: what it names, with which code, and what is counted below it.

use std::path::Path;

use ronde_tests::harness::{DEADLINE, Ended, RemoteShell, Run, write_executable};

fn sh(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

/// A sidecar that reports that it cannot continue. Its index is in `$RONDE_SIDECAR`.
fn failing_sidecar(directory: &Path, reason: &str) -> String {
    let path = directory.join("sidecar");
    let script = format!("#!/bin/sh\nread line; echo '{{\"type\":\"fatal\",\"reason\":\"'\"{reason}\"'\"}}'; exit 1\n");
    write_executable(&path, &script);
    path.to_str().expect("a temporary path is text").to_owned()
}

fn check_shells_127(ended: &Ended, who: &str) {
    assert_eq!(ended.code, Some(127), "{ended}");
    let line = format!(
        "{who} exited with code 127 (a shell ends with it when it does not find a command, and a program when a \
         shared library is missing) [RONDE-E301]\n"
    );
    assert!(ended.stderr.contains(&line) && !ended.stderr.contains("command not found:"), "{ended}");
}

#[test]
fn a_shell_that_does_not_find_a_command_is_not_called_missing() {
    check_shells_127(&Run::new(1).start(sh("exit 127")).wait(DEADLINE), "ronde: rank 0 on host localhost");
    let shell = RemoteShell::here();
    let remote = Run::new(1).options(["-H", "alpha.invalid:1", "--remote-shell"]).options([shell.path()]);
    check_shells_127(&remote.start(sh("exit 127")).wait(DEADLINE), "ronde: rank 0 on host alpha.invalid");
    let elastic = Run::new(1).options(["--min-np", "1", "-H", "127.0.0.1:1"]);
    check_shells_127(&elastic.start(sh("exit 127")).wait(DEADLINE), "(without a rank) on host 127.0.0.1");
}

#[test]
fn a_command_that_is_not_run_has_one_code_in_all_jobs() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let missing = Run::new(1).options(["--min-np", "1", "-H", "127.0.0.1:1"]).start(["no-such-program"]).wait(DEADLINE);
    assert_eq!(missing.code, Some(127), "{missing}");
    let line = "on host 127.0.0.1 exited with code 127 (command not found: no-such-program) [RONDE-E302]\n";
    assert!(missing.stderr.contains(line), "{missing}");
    let denied = Run::new(1).start([directory.path()]).wait(DEADLINE);
    assert_eq!(denied.code, Some(126), "{denied}");
    assert!(denied.stderr.contains("rank 0 on host localhost exited with code 126 [RONDE-E302]\n"), "{denied}");
}

#[test]
fn ranks_that_fail_by_themselves_are_counted_as_such() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    // All fail, and none before all run. They start no program meanwhile, which might take longer than the launcher waits for
    // others that fail. Rank 3 waits for its end.
    let script = ": > \"$SHARED/$RANK\"; [ $RANK = 3 ] && exec sleep 1000
        for rank in 0 1 2 3; do until [ -e \"$SHARED/$rank\" ]; do :; done; done; exit 5";
    let ended = Run::new(4).env("SHARED", directory.path()).start(sh(script)).wait(DEADLINE);
    assert_eq!(ended.code, Some(5), "{ended}");
    let lines = "exited with code 5 [RONDE-E301]\n2 other ranks failed, too, with exit code 5\n1 other rank ended because of \
                 that, by signal 15 (SIGTERM)\n";
    assert!(ended.stderr.ends_with(lines), "{ended}");
}

#[test]
fn the_block_has_the_code_of_the_ranks_own_error_unless_the_program_went_on() {
    let line = "ronde.errors.MismatchError: Mismatched data types [RONDE-E306]";
    for (then, status, code, last) in [
        ("exit 1", 1, "RONDE-E306", ""),
        ("exit 3", 3, "RONDE-E301", ""),
        ("echo going on >&2; exit 1", 1, "RONDE-E301", "  going on\n"),
    ] {
        let ended = Run::new(1).start(sh(&format!("echo '{line}' >&2; {then}"))).wait(DEADLINE);
        assert_eq!(ended.code, Some(status), "{ended}");
        let block = format!(
            "ronde: rank 0 on host localhost exited with code {status} [{code}]\nlast lines of its stderr:\n  {line}\n{last}"
        );
        assert!(ended.stderr.ends_with(&block), "{ended}");
    }
}

#[test]
fn a_debugger_without_input_is_explained() {
    let ended = Run::new(1).start(sh("echo bdb.BdbQuit >&2; exit 1")).wait(DEADLINE);
    assert!(ended.stderr.contains("\nits debugger was quit or found no input: give `--stdin 0`"), "{ended}");
    let ended = Run::new(1).options(["--stdin", "0"]).start(sh("echo bdb.BdbQuit >&2; exit 1")).wait(DEADLINE);
    assert!(ended.code == Some(1) && !ended.stderr.contains("its debugger"), "{ended}");
}

#[test]
fn what_no_sidecar_can_continue_with_is_printed_once() {
    let options = ["--plugin", "/no/such/plugin.wasm"];
    for format in ["text", "json"] {
        let run = Run::new(2).sidecars(2).options(options).options(["--log-format", format]);
        let ended = run.start(["true"]).wait(DEADLINE);
        assert_eq!(ended.code, Some(64), "{ended}");
        assert_eq!(ended.stderr.matches("RONDE-E801").count(), 1, "{ended}");
    }
    let ended = Run::new(2).options(["--min-np", "2"]).options(options).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(64), "{ended}");
    assert_eq!(ended.stderr.matches("RONDE-E801").count(), 1, "{ended}");
}

#[test]
fn other_reasons_of_sidecars_are_not_lost() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let program = failing_sidecar(directory.path(), "disk $RONDE_SIDECAR is full");
    let ended = Run::new(2).sidecars(2).options(["--sidecar-command", &program]).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    for reason in ["disk 0 is full", "disk 1 is full"] {
        assert_eq!(ended.stderr.matches(reason).count(), 1, "{reason}: {ended}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_named_before_anything_starts() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let missing = directory.path().join("missing").join("report");
    for options in [&[][..], &["--min-np", "1"]] {
        let run = Run::new(1).options(options).options(["--report"]).options([&missing]);
        let ended = run.start(sh("echo started")).wait(DEADLINE);
        assert_eq!(ended.code, Some(73), "{ended}");
        let text = format!("ronde: cannot write the report {}: No such file", missing.display());
        assert!(ended.stderr.starts_with(&text) && ended.stderr.contains("[RONDE-E211]"), "{ended}");
        assert!(ended.stdout.is_empty(), "{ended}");
    }
}

#[test]
fn a_report_may_be_in_the_folder_of_the_output() {
    for options in [&[][..], &["--min-np", "1"]] {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let output = directory.path().join("output");
        let report = output.join("report.json");
        let run = Run::new(1).options(options).options(["--output-filename"]).options([&output]);
        let ended = run.options(["--report"]).options([&report]).start(sh("echo started")).wait(DEADLINE);
        assert!(report.is_file() && ended.stdout.contains("started"), "{ended}");
    }
}

#[test]
fn of_options_that_exclude_each_other_the_stronger_source_counts_and_two_of_one_start_nothing() {
    let run = || Run::new(1).env("RONDE_RUN_MIN_NP", "1");
    let ended = run().options(["--stdin", "0"]).start(sh("echo started")).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    let notice = "ronde: RONDE_RUN_MIN_NP has no effect: it cannot be used with --stdin\n";
    assert!(ended.stderr.contains(notice) && ended.stdout.contains("started"), "{ended}");
    let json = run().options(["--stdin", "0", "--log-format", "json"]).start(["true"]).wait(DEADLINE);
    assert!(json.stderr.contains("\"message\":\"RONDE_RUN_MIN_NP has no effect: "), "{json}");
    let ended = run().env("RONDE_RUN_STDIN", "0").start(sh("echo started")).wait(DEADLINE);
    assert_eq!(ended.code, Some(64), "{ended}");
    assert!(ended.stderr.contains("RONDE_RUN_STDIN: it cannot be used with RONDE_RUN_MIN_NP"), "{ended}");
    assert!(ended.stderr.contains("[RONDE-E104]") && ended.stdout.is_empty(), "{ended}");
}
