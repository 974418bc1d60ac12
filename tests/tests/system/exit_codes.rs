//! One error has one exit code, whichever command meets it (docs/ERRORS.md).

use std::net::UdpSocket;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use ronde_tests::harness::{DEADLINE, Run, ronde_binary};

/// Runs a command in a directory, without an environment that names sidecars or an interpreter.
fn ronde(words: &[&str], directory: &Path) -> Output {
    let mut command = Command::new(ronde_binary());
    command.args(words).current_dir(directory).stdin(Stdio::null());
    let output = command.env_remove("RONDE_SOCKET").env("RONDE_PYTHON", "/no/such/python").output();
    output.expect("the ronde binary can be started")
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
        let output = ronde(&words, directory.path());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(&format!("[RONDE-{code}]")), "{line}: {error}");
        assert_eq!(output.status.code(), Some(status), "{line}: {error}");
    }
}

#[test]
fn a_job_and_its_sidecar_have_the_exit_code_of_the_same_error() {
    for (options, code, status) in [
        (["--plugin", "/no/such/plugin.wasm", "--verbose"], "E801", 64),
        (["--autotune", "--autotune-log-file", "/no/such/log.csv"], "E409", 73),
    ] {
        let ended = Run::new(1).options(options).start(["true"]).wait(DEADLINE);
        assert!(ended.stderr.contains(&format!("[RONDE-{code}]")), "{ended}");
        assert_eq!(ended.code, Some(status), "{ended}");
    }
}

#[test]
fn a_sidecar_whose_port_is_taken_is_not_available() {
    let taken = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let peers = taken.local_addr().expect("it is bound").to_string();
    let directory = tempfile::tempdir().expect("a temporary directory");
    assert!(ronde(&["certs", "secret", "secret"], directory.path()).status.success());
    let words = ["sidecar", "--job-secret-file", "secret", "--job", "night", "--index", "0", "--peers", &peers];
    let output = ronde(&words, directory.path());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("[RONDE-E404]"), "{error}");
    assert_eq!(output.status.code(), Some(69), "{error}");
}
