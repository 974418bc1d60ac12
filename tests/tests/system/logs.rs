//! The logs of sidecars and the launcher.

use nix::sys::signal::Signal;
use ronde_tests::harness::{DEADLINE, Run};
use serde_json::Value;

use crate::WORKER;

#[test]
fn json_logs_carry_job_sidecar_and_message_on_every_line() {
    let run = Run::new(4).sidecars(2).options(["--log-format", "json", "--log-level", "debug", "--job", "logged"]);
    let mut job = run.env("RONDE_TEST_ENDLESS", "1").start([WORKER]);
    // A token is 32 bytes; sidecars must not log what is in the files.
    let tokens = job.wait_for("both session directories with their tokens", DEADLINE, |job| {
        let files: Vec<_> =
            job.runtime_files().iter().filter_map(|path| path.read_dir().ok()).flatten().flatten().collect();
        let tokens = files.iter().filter(|file| file.file_name().to_string_lossy().contains("token"));
        // A file may be there before its content.
        let tokens = tokens.filter_map(|file| std::fs::read(file.path()).ok()).filter(|token| token.len() == 32);
        let tokens: Vec<Vec<u8>> = tokens.collect();
        (tokens.len() == 4).then_some(tokens)
    });
    job.wait_for_line("a lane completed its part of an operation", DEADLINE);
    job.wait_for("lines of both sidecars", DEADLINE, |job| {
        job.has_line(|line| line.contains("\"sidecar\":1,") && line.contains("an operation begins")).then_some(())
    });
    job.signal(Signal::SIGINT);
    let ended = job.wait(DEADLINE);
    assert_eq!(ended.code, Some(130), "{ended}");
    let mut operations = [0; 2];
    let mut notices = 0;
    for line in ended.stderr.lines().filter(|line| !line.starts_with('[')) {
        let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for key in ["time", "level", "target", "message"] {
            assert!(value[key].is_string(), "{key} of {line}");
        }
        assert_eq!(value["job"], "logged", "{line}");
        let target = value["target"].as_str().unwrap_or_default();
        if target == "ronde::run" {
            notices += 1;
            continue;
        }
        let sidecar = value["sidecar"].as_u64().unwrap_or_else(|| panic!("no sidecar: {line}"));
        if value["message"].as_str().is_some_and(|message| message.contains("operation")) {
            assert!(value["operation"].is_string() && value["epoch"].is_u64() && value["seq"].is_u64(), "{line}");
            operations[usize::try_from(sidecar).expect("0 or 1")] += 1;
        }
    }
    assert!(operations.iter().all(|lines| *lines > 0), "{operations:?} lines about operations");
    assert!(notices > 0, "the launcher reports that it was ended");
    for token in tokens {
        let hex: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        let list = format!("{token:?}");
        let text = String::from_utf8_lossy(&token).into_owned();
        for form in [hex, list, text] {
            assert!(form.len() >= 32 && !ended.stderr.contains(&form), "a token is in the log as {form:?}");
        }
    }
}

#[test]
fn text_logs_respect_the_log_level() {
    let ended = Run::new(2).options(["--log-level", "info", "--job", "logged"]).start([WORKER]).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    let lines: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("[sidecar 0]: ")).collect();
    assert!(lines.iter().any(|line| line.contains("INFO") && line.contains("an epoch has begun")), "{ended}");
    assert!(lines.iter().all(|line| line.contains(" job=logged sidecar=0 ")), "{ended}");
    assert!(!ended.stderr.contains("DEBUG"), "{ended}");
    let ended = Run::new(1).start([WORKER]).wait(DEADLINE);
    assert!(ended.code == Some(0) && !ended.stderr.contains("INFO"), "{ended}");
}

#[test]
fn the_time_is_left_out_where_that_is_wanted() {
    for (options, variables, has_time) in [
        (&[][..], &[][..], true),
        (&["--log-without-timestamp"], &[], false),
        (&[], &[("HOROVOD_LOG_HIDE_TIME", "1")], false),
        (&["--log-with-timestamp"], &[("HOROVOD_LOG_HIDE_TIME", "1")], true),
    ] {
        let mut run = Run::new(1).options(options.iter().copied()).env("HOROVOD_LOG_LEVEL", "INFO");
        for (name, value) in variables {
            run = run.env(name, value);
        }
        let ended = run.start([WORKER]).wait(DEADLINE);
        let begun = ended.stderr.lines().find(|line| line.contains("an epoch has begun"));
        let line = begun.unwrap_or_else(|| panic!("{ended}"));
        let text = line.strip_prefix("[sidecar 0]: ").unwrap_or_default().trim_start();
        assert_eq!(text.starts_with("20"), has_time, "{line}");
        assert_eq!(text.starts_with("INFO"), !has_time, "{line}");
    }
}
