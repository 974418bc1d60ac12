//! Checks that the top level of the tree has the expected folders and files.

use std::fs;

use crate::hold;
use crate::source::{NOT_OURS, root};

const FOLDERS: [&str; 10] =
    [".ci", ".devcontainer", ".github", "compose", "docs", "plugins", "proto", "sdk-python", "sdk-rust", "sidecar"];
const FILES: [&str; 18] = [
    ".clippy.toml",
    ".dockerignore",
    ".editorconfig",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "deny.toml",
    "mkdocs.yml",
    "rustfmt.toml",
    "tests",
];
/// What git and tools keep beside the files.
const TOOLS: [&str; 6] = [".git", ".venv", ".cargo", ".mypy_cache", ".pytest_cache", ".ruff_cache"];

#[test]
fn the_top_level_is_fixed() {
    let entries = fs::read_dir(root()).expect("the root can be listed");
    let names = entries.map(|entry| entry.expect("an entry can be read").file_name().to_string_lossy().into_owned());
    let known = |name: &String| [&FOLDERS[..], &FILES, &TOOLS, &NOT_OURS].concat().contains(&name.as_str());
    let mut offences: Vec<_> = names.filter(|name| !known(name)).collect();
    offences.sort();
    hold(
        "The top level holds eight folders and the usual root files.",
        "Put it into the folder of the part that it belongs to: proto, sidecar, sdk-python, sdk-rust, plugins, compose, tests, docs.",
        &offences,
    );
}
