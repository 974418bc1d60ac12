//! Checks that the targets of tests/tests/fuzz are programs for `cargo fuzz`, too.

use crate::hold;
use crate::source::{Source, exists, files};

const FOLDER: &str = "tests/cargo-fuzz";
/// Its decoders need the libraries of the transport, which take minutes to compile.
const LEFT_OUT: [&str; 1] = ["lines_of_identity"];

#[test]
fn every_target_is_a_program_for_cargo_fuzz() {
    let targets: Vec<String> =
        files("rs").iter().filter(|source| source.path.starts_with("tests/tests/fuzz/")).flat_map(targets).collect();
    assert!(targets.len() > 10, "only {} targets were found; the scan is broken", targets.len());
    let (manifest, library) =
        (Source::read(&format!("{FOLDER}/Cargo.toml")).text, Source::read(&format!("{FOLDER}/src/lib.rs")).text);
    let mut offences = Vec::new();
    for target in targets.iter().filter(|target| !LEFT_OUT.contains(&target.as_str())) {
        let program = format!("fuzz_targets/{target}.rs");
        if !exists(&format!("{FOLDER}/{program}")) {
            offences.push(format!("{FOLDER}/{program} is missing"));
        }
        if !manifest.contains(&format!("name = \"{target}\"\npath = \"{program}\"")) {
            offences.push(format!("{FOLDER}/Cargo.toml has no program {target}"));
        }
        if !library.contains(&format!("::{target}\n")) {
            offences.push(format!("{FOLDER}/src/lib.rs has no target {target}"));
        }
    }
    hold(
        "Every target of tests/tests/fuzz is a program for `cargo fuzz`.",
        "tests/cargo-fuzz/README.md lists what a new one needs.",
        &offences,
    );
}

/// The functions that return a target.
fn targets(source: &Source) -> Vec<String> {
    let functions = source.text.split("pub(crate) fn ").skip(1).filter_map(|rest| rest.split_once("() -> Target {"));
    functions.map(|(name, _)| name.to_owned()).filter(|name| !name.contains(char::is_whitespace)).collect()
}
