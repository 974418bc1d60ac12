//! One error has one exit code, whichever command meets it (docs/ERRORS.md).

use std::fs::OpenOptions;
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Command, Stdio};

use ronde_tests::harness::{DEADLINE, Ended, Run, ronde_binary};

/// Runs a command in a directory, with an interpreter that does not exist.
fn ronde(words: &[&str], directory: &Path) -> Ended {
    Run::command().in_directory(directory).env("RONDE_PYTHON", "/no/such/python").start(words).wait(DEADLINE)
}

/// Checks that the command has ended with an error, and with the exit code of that error.
fn check_ended(ended: &Ended, code: &str, status: i32) {
    assert!(ended.stderr.contains(&format!("[RONDE-{code}]\n")), "{ended}");
    assert_eq!(ended.code, Some(status), "{ended}");
}

#[test]
fn an_error_has_the_same_exit_code_in_all_commands() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(directory.path().join("bad.toml"), "[tuning]\nbogus = 1\n").expect("ours");
    std::fs::write(directory.path().join("no.flight.json"), "{}").expect("ours");
    for (line, code, status) in [
        ("status --url nonsense", "E101", 64),
        ("debug dump --url nonsense", "E101", 64),
        ("top --once --url nonsense", "E101", 64),
        ("run -np 0 true", "E101", 64),
        ("sidecar --start-timeout -5", "E101", 64),
        ("run --config missing.toml -np 1 true", "E104", 64),
        ("explain E999", "E105", 64),
        ("run --tuning bad.toml -np 1 true", "E106", 64),
        ("bench scale --tuning bad.toml", "E106", 64),
        ("worker true", "E303", 64),
        ("sidecar --certs a --job-secret-file b", "E403", 64),
        ("sidecar", "E502", 64),
        ("certs issue --authority missing --sidecars 0 out", "E504", 1),
        ("status --socket missing", "E602", 69),
        ("debug dump --socket missing", "E602", 69),
        ("status --url http://a..b:1", "E603", 69),
        ("top --once --url http://a..b:1", "E603", 69),
        ("job status --job nobody", "E604", 69),
        ("debug analyze no.flight.json", "E609", 1),
        ("bench train", "E701", 69),
        ("bench scale --plot missing/plot.svg", "E704", 73),
        ("tune -np 1 --output missing/profile.toml", "E704", 73),
        ("plugin inspect missing.wasm", "E801", 64),
        ("plugin check missing.wasm", "E801", 64),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        check_ended(&ronde(&words, directory.path()), code, status);
    }
}

#[test]
fn a_code_that_a_message_quotes_is_not_the_code_of_the_error() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (words, code, status) in [
        (&["explain", "is [RONDE-E301] a code"][..], "E105", 64),
        (&["status", "--url", "[RONDE-E301]"], "E101", 64),
        (&["debug", "analyze", "[RONDE-E301]"], "E609", 1),
        (&["plugin", "inspect", "[RONDE-E301]"], "E801", 64),
        (&["job", "status", "--[RONDE-E301]"], "E101", 64),
    ] {
        check_ended(&ronde(words, directory.path()), code, status);
    }
    let explained = ronde(&["explain", "[RONDE-E301]"], directory.path());
    assert!(explained.stdout.starts_with("RONDE-E301: ") && explained.code == Some(0), "{explained}");
}

#[test]
fn a_job_and_its_sidecar_have_the_exit_code_of_the_same_error() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (options, code, status) in [
        (&["--plugin", "/no/such/plugin.wasm"][..], "E801", 64),
        (&["--autotune", "--autotune-log-file", "/no/such/log.csv"], "E409", 73),
    ] {
        check_ended(&Run::new(1).options(options).start(["true"]).wait(DEADLINE), code, status);
        let words = [&["sidecar", "--local-ranks", "1"][..], options].concat();
        check_ended(&ronde(&words, directory.path()), code, status);
    }
}

#[test]
fn an_answer_that_cannot_be_written_fails_its_command_unless_nobody_reads() {
    let ended = |line: &str, stdout: Stdio| {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", "120"]).arg(ronde_binary()).args(line.split(' '));
        let output = command.stdin(Stdio::null()).stdout(stdout).output().expect("it starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for line in ["completions bash", "explain --list", "version", "check", "check --json", "--help", "run --help"] {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
        let (status, stderr) = ended(line, full.into());
        let reason = "cannot write the answer to standard output: No space left on device";
        assert!(stderr.contains(reason) && stderr.contains("[RONDE-E209]\n"), "{line}: {stderr}");
        assert_eq!(status, Some(74), "{line}: {stderr}");
    }
    for line in ["completions bash", "--help"] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        assert_eq!(ended(line, writer.into()), (Some(0), String::new()), "{line}");
    }
}

#[test]
fn a_sidecar_whose_port_is_taken_is_not_available() {
    let taken = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let peers = taken.local_addr().expect("it is bound").to_string();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let made = ronde(&["certs", "secret", "secret"], directory.path());
    assert_eq!(made.code, Some(0), "{made}");
    let words = ["sidecar", "--job-secret-file", "secret", "--job", "night", "--index", "0", "--peers", &peers];
    check_ended(&ronde(&words, directory.path()), "E404", 69);
}
