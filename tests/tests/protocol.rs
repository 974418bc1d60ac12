//! Checks docs/PROTOCOL.md against the code, from which the control types and the examples in hexadecimal are
//! generated. `RONDE_REGENERATE=1 cargo test -p ronde-tests --test protocol` writes both. An independent reader in
//! Python decodes the same examples in sdk-python/tests/test_protocol.py.

#![forbid(unsafe_code)]

#[path = "protocol/examples.rs"]
mod examples;
#[path = "protocol/types.rs"]
mod types;

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn the_document_shows_the_types_of_the_wire() {
    hold("types", &types::section());
}

#[test]
fn the_document_shows_examples_as_they_are_encoded() {
    hold("examples", &examples::section());
}

/// Compares the text between the marks of a section with the expected one, or writes it.
fn hold(section: &str, expected: &str) {
    let path = root().join(DOCUMENT);
    let document = fs::read_to_string(&path).expect("docs/PROTOCOL.md can be read");
    let begin = format!("<!-- {section}: begin; made by tests/tests/protocol.rs -->\n");
    let end = format!("<!-- {section}: end -->");
    let (head, rest) = document.split_once(&begin).expect("the document has the mark where the section begins");
    let (shown, tail) = rest.split_once(&end).expect("the document has the mark where the section ends");
    if shown == expected {
        return;
    }
    assert!(
        std::env::var_os("RONDE_REGENERATE").is_some(),
        "\n\nThe section `{section}` of {DOCUMENT} differs from the code.\nRun `RONDE_REGENERATE=1 cargo test -p ronde-tests --test protocol -- --test-threads 1` and review the difference.\n"
    );
    fs::write(&path, format!("{head}{begin}{expected}{end}{tail}")).expect("the document can be written");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate ronde-tests is in the workspace").to_path_buf()
}

const DOCUMENT: &str = "docs/PROTOCOL.md";
