//! Checks docs/SECURITY.md: each claim of its tables names existing tests, and every target of the fuzzer is named.

use crate::hold;
use crate::source::{Source, exists, files};

const DOCUMENT: &str = "docs/SECURITY.md";

#[test]
fn tests_named_for_claims_exist() {
    let document = Source::read(DOCUMENT);
    let claims = claims(&document.text);
    assert!(claims.len() > 30, "only {} claims were found; the scan is broken", claims.len());
    let mut offences = Vec::new();
    for (claim, tests) in &claims {
        if tests.is_empty() {
            offences.push(format!("{claim:?} names no test"));
        }
        offences.extend(tests.iter().filter(|test| !is_there(test)).map(|test| format!("{claim:?} names {test}")));
    }
    hold(
        "Claims about security name the tests that check them, as `file::test`, and these tests exist.",
        "A claim without a test may be wrong. Write the test, correct its name, or remove the claim.",
        &offences,
    );
}

#[test]
fn targets_of_the_fuzzer_are_in_the_document() {
    let document = Source::read(DOCUMENT).text;
    let sources = files("rs");
    let targets = sources.iter().filter(|source| !source.path.starts_with("tests/tests/tidy/")).flat_map(targets);
    let targets: Vec<String> = targets.collect();
    assert!(targets.len() > 15, "only {} targets were found; the scan is broken", targets.len());
    let missing = targets.iter().filter(|target| !document.contains(&format!("`{target}`")));
    hold(
        "docs/SECURITY.md names every target of the fuzzer in its list of decoders.",
        "Readers check there whether an input is fuzzed.",
        &missing.map(|target| format!("{target} is not named")).collect::<Vec<_>>(),
    );
}

/// The rows of tables whose second column is `held by`: the claim, and the tests.
fn claims(text: &str) -> Vec<(String, Vec<String>)> {
    let mut claims = Vec::new();
    let mut is_table_of_claims = false;
    for line in text.lines() {
        let columns: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        match columns[..] {
            [_, "held by"] => is_table_of_claims = true,
            [claim, tests] if is_table_of_claims && line.starts_with("| ") => {
                let named = tests.split('`').skip(1).step_by(2).filter(|name| name.contains("::"));
                claims.push((claim.to_owned(), named.map(str::to_owned).collect()));
            }
            _ => is_table_of_claims &= line.starts_with('|'),
        }
    }
    claims
}

/// Whether a file has a function by this name: Rust's or Python's.
fn is_there(test: &str) -> bool {
    let Some((file, name)) = test.split_once("::") else { return false };
    let defined = |text: &str| [format!("fn {name}("), format!("def {name}(")].iter().any(|line| text.contains(line));
    exists(file) && defined(&Source::read(file).text)
}

fn targets(source: &Source) -> Vec<String> {
    let names = source.text.split("fn fuzz_").skip(1).filter_map(|rest| rest.split_once("()"));
    let is_name = |name: &&str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    names.map(|(name, _)| name).filter(is_name).map(|name| format!("fuzz_{name}")).collect()
}

#[test]
fn claims_are_read_from_the_right_tables() {
    let text = "| who | can |\n|---|---|\n| a | `b::c` |\n\n| claim | held by |\n|---|---|\n| x | `f.rs::g`, `h.py::i` |\n| y | z |\n\nA `k::l`.\n";
    let expected = [("x", vec!["f.rs::g", "h.py::i"]), ("y", Vec::new())];
    let expected = expected.map(|(claim, tests)| (claim.to_owned(), tests.into_iter().map(str::to_owned).collect()));
    assert_eq!(claims(text), expected);
    assert!(is_there("tests/tests/tidy/claims.rs::is_there") && !is_there("tests/tests/tidy/claims.rs::is_not"));
}
