//! Hosts of a job whose agents send what is not theirs to send: a host is trusted with its own ranks only.

use ronde_tests::harness::{DEADLINE, Ended, RemoteShell, Run, with_start_timeouts};

/// Runs one rank on each of two hosts. The agent of the second one sends its greeting, and then this line.
fn with_agent_that_sends(line: &str) -> (Ended, tempfile::TempDir) {
    let hello = format!(
        r#"{{"type":"hello","version":"{}","hostname":"beta","interfaces":[{{"interface":"lo","address":"127.0.0.1","prefix_length":8}}],"port":1}}"#,
        env!("CARGO_PKG_VERSION")
    );
    let shell = RemoteShell::script(&format!(
        "case $1 in beta*) echo '{hello}'; echo '{line}'; exec cat > /dev/null;; esac\nexec sh -c \"$2\""
    ));
    let attempt = |timeout: &str| {
        let files = tempfile::tempdir().expect("a temporary directory");
        let hosts = ["-H", "alpha.invalid:1,beta.invalid:1", "--start-timeout", timeout, "--remote-shell"];
        let run = Run::new(2).options(hosts).options([shell.path()]);
        let run = run.options(["--output-filename"]).options([files.path()]);
        let mut job = run.start(["sh", "-c", "echo true words"]);
        job.wait_for_nothing_left(DEADLINE);
        (job.wait(DEADLINE), files)
    };
    let is_reached = |(ended, _): &(Ended, _)| ended.stderr.contains("it sent a message about");
    with_start_timeouts(20, attempt, is_reached).0
}

#[test]
fn a_host_prints_and_reports_for_its_own_ranks_only() {
    for (line, what) in [
        (r#"{"type":"output","worker":0,"stream":"stdout","text":"forged\\n"}"#, "rank 0"),
        (r#"{"type":"output","worker":7,"stream":"stderr","text":"forged\\n"}"#, "rank 7"),
        (r#"{"type":"worker_exited","worker":0,"status":{"code":0}}"#, "rank 0"),
        (r#"{"type":"sidecar_log","sidecar":0,"text":"forged\\n"}"#, "sidecar 0"),
        (r#"{"type":"sidecar","sidecar":0,"line":{"type":"fatal","reason":"forged"}}"#, "sidecar 0"),
    ] {
        let (ended, files) = with_agent_that_sends(line);
        assert_eq!(ended.code, Some(69), "{line}: {ended}");
        let words = format!("ronde: host beta.invalid: it sent a message about {what}, which does not run there; see");
        assert!(ended.stderr.contains(&words), "{line}: {ended}");
        assert!(!format!("{ended}").contains("forged"), "{line}: {ended}");
        let printed = |name| std::fs::read_to_string(files.path().join(name)).expect("the launcher made it");
        assert!(!printed("rank.0/stdout").contains("forged") && !printed("rank.1/stderr").contains("forged"));
    }
}

#[test]
fn a_host_cannot_name_links_to_sidecars_that_do_not_exist() {
    let line = r#"{"type":"sidecar","sidecar":1,"line":{"type":"dialling","peer":4000000000}}"#;
    let (ended, _) = with_agent_that_sends(line);
    assert_eq!(ended.code, Some(69), "{ended}");
    let words = "host beta.invalid: it sent a message about a link of sidecar 1 to sidecar 4000000000";
    assert!(ended.stderr.contains(words) && !ended.stderr.contains("panicked"), "{ended}");
}
