//! Checks that no process of ronde panics because nobody reads its output.

use crate::hold;
use crate::source::{Source, files};

#[test]
fn nothing_is_printed_that_panics_on_a_closed_stream() {
    let sources: Vec<Source> = files("rs").into_iter().filter(|source| is_shipped(&source.path)).collect();
    assert!(sources.len() > 100, "only {} files were found; the scan is broken", sources.len());
    hold(
        "The launcher, sidecars and tools print with ronde_bootstrap::exit, not with println! and eprintln!.",
        "These macros panic when the stream's reader has gone: a terminal that was closed, or `ronde status | head`.",
        &sources.iter().flat_map(offences).collect::<Vec<_>>(),
    );
}

/// Whether a file is a part of the program, and no test, example or build script.
fn is_shipped(path: &str) -> bool {
    let is_test = path.contains("/tests/") || path.ends_with("tests.rs");
    path.starts_with("sidecar/") && path.contains("/src/") && !is_test
}

fn offences(source: &Source) -> Vec<String> {
    let code = source.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let prints = |line: &str| ["println!(", "print!("].iter().any(|call| line.contains(call));
    let lines = code.lines().enumerate().filter(|(_, line)| prints(line) && !line.trim_start().starts_with("//"));
    lines.map(|(index, line)| format!("{}:{}: {}", source.path, index + 1, line.trim())).collect()
}

#[test]
fn calls_are_found_outside_of_tests_and_comments() {
    let text =
        "//! println!(1)\nfn f() {\n    eprintln!(\"x\");\n}\n\n#[cfg(test)]\nmod tests {\n    println!(\"y\");\n}\n";
    let source = Source { path: "a.rs".to_owned(), text: text.to_owned() };
    assert_eq!(offences(&source), ["a.rs:3: eprintln!(\"x\");"]);
    assert!(is_shipped("sidecar/crates/launcher/src/run/job.rs") && is_shipped("sidecar/src/bin/ronde/status.rs"));
    for path in
        ["sidecar/crates/shm/tests/fork.rs", "sidecar/src/flight/tests.rs", "sidecar/crates/gpu/build.rs", "a.rs"]
    {
        assert!(!is_shipped(path), "{path}");
    }
}
