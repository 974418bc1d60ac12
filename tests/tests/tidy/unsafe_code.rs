//! Checks where unsafe code is, and that it is explained.

use cargo_metadata::TargetKind;
use syn::visit::Visit;

use crate::hold;
use crate::layers::workspace;
use crate::source::{Source, files, lines, root};

/// The library crates whose purpose it is, where tensors of Python, and calls of TensorFlow and XLA, become Rust's, and the one
/// where a WebAssembly plugin's buffers become slices.
const ALLOWED: [&str; 9] = [
    "sidecar/crates/gpu/",
    // The functions that NCCL calls, and the buffers that it passes.
    "sidecar/crates/nccl-net/src/buffer.rs",
    "sidecar/crates/nccl-net/src/exports.rs",
    "sidecar/crates/shm/",
    "sdk-python/src/address.rs",
    "sdk-python/src/frameworks/",
    "plugins/sdk/src/support.rs",
    // A library that tests load in place of NVIDIA's.
    "tests/device/",
    // The calls of a program that loads the net plugin as NCCL does.
    "tests/nccl/src/table.rs",
];
/// The packages whose roots cannot forbid it.
const PACKAGES_WITH_UNSAFE: [&str; 7] = [
    "ronde-gpu",
    "ronde-nccl-net",
    "ronde-shm",
    "ronde-python",
    "ronde-plugin",
    "ronde-tests-device",
    "ronde-tests-nccl",
];

#[test]
fn unsafe_code_is_confined_to_the_listed_packages() {
    let outside = |source: &Source| !ALLOWED.iter().any(|allowed| source.path.starts_with(allowed));
    let sources = files("rs");
    let found = sources.iter().filter(|source| outside(source)).flat_map(unsafe_places).map(|place| place.at);
    hold(
        "Unsafe code is in ronde-gpu, ronde-shm, and in the files of sdk-python, plugins/sdk and tests that the list names.",
        "What can corrupt memory is read by one person in one sitting. Use a safe function of ronde-shm, or add one there.",
        &found.collect::<Vec<_>>(),
    );
}

#[test]
fn unsafe_code_explains_why_it_is_sound() {
    let places: Vec<_> = files("rs").iter().flat_map(unsafe_places).collect();
    assert!(!places.is_empty(), "no unsafe code was found, though ronde-shm cannot do without; the scan is broken");
    let silent = places.iter().filter(|place| !place.explained).map(|place| place.at.clone());
    hold(
        "Every unsafe block and impl has a SAFETY comment directly above it.",
        "It names what must hold and where in the same module one reads that it does.",
        &silent.collect::<Vec<_>>(),
    );
}

#[test]
fn crate_roots_forbid_unsafe_code() {
    let mut offences = Vec::new();
    for package in workspace().workspace_packages() {
        for target in &package.targets {
            let kinds = [TargetKind::Lib, TargetKind::CDyLib, TargetKind::RLib, TargetKind::Bin];
            if !target.kind.iter().any(|kind| kinds.contains(kind)) {
                continue;
            }
            let path = target.src_path.strip_prefix(root()).expect("sources lie below the root").to_string();
            let level = if PACKAGES_WITH_UNSAFE.contains(&package.name.as_str()) { "deny" } else { "forbid" };
            let text = Source::read(&path).text;
            if !(text.contains(&format!("#![{level}(unsafe_code)]")) || package.name == "ronde-shm") {
                offences.push(format!("{path} lacks #![{level}(unsafe_code)]"));
            }
        }
    }
    hold("Crate roots forbid unsafe code.", "The compiler then holds the rule, in every build.", &offences);
}

/// An unsafe block, impl or function.
struct UnsafeSite {
    at: String,
    explained: bool,
}

fn unsafe_places(source: &Source) -> Vec<UnsafeSite> {
    let mut blocks = UnsafeVisitor { found: Vec::new() };
    blocks.visit_file(&source.syntax());
    let text: Vec<&str> = source.text.lines().collect();
    let explained = |line: usize| is_explained(&text[..line]);
    blocks
        .found
        .iter()
        .map(|line| UnsafeSite { at: format!("{}:{line}", source.path), explained: explained(*line) })
        .collect()
}

/// Whether the comments above the last line, or above the rest of its statement, contain the word; a function's
/// documentation may contain it as a section.
fn is_explained(text: &[&str]) -> bool {
    let above = text.iter().rev().skip(1).map(|line| line.trim());
    let is_comment = |line: &str| line.starts_with("//") || line.starts_with("#[");
    let comment: Vec<_> = above
        .skip_while(|line| !is_comment(line) && !ends_statement(line))
        .take_while(|line| is_comment(line))
        .collect();
    comment.iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety"))
}

fn ends_statement(line: &str) -> bool {
    line.is_empty() || line.ends_with(';') || line.ends_with('{') || line.ends_with('}')
}

/// The lines on which unsafe code begins.
struct UnsafeVisitor {
    found: Vec<usize>,
}

impl<'ast> Visit<'ast> for UnsafeVisitor {
    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.found.push(lines(block.unsafe_token.span).0);
        syn::visit::visit_expr_unsafe(self, block);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.found.extend(item.unsafety.map(|token| lines(token.span).0));
        syn::visit::visit_item_impl(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.found.extend(signature.unsafety.map(|token| lines(token.span).0));
        syn::visit::visit_signature(self, signature);
    }
}

#[test]
fn a_comment_has_to_stand_directly_above() {
    let places = |text: &str| {
        let source = Source { path: "a.rs".to_owned(), text: text.to_owned() };
        unsafe_places(&source).iter().map(|place| (place.at.clone(), place.explained)).collect::<Vec<_>>()
    };
    assert_eq!(places("fn f() {\n // SAFETY: why.\n let a =\n  unsafe { 1 };\n}"), [("a.rs:4".to_owned(), true)]);
    assert_eq!(places("fn f() {\n // SAFETY: why.\n g();\n unsafe { 1 };\n}"), [("a.rs:4".to_owned(), false)]);
    assert_eq!(places("unsafe impl Send for A {}"), [("a.rs:1".to_owned(), false)]);
    assert_eq!(places("/// # Safety\n/// Why.\nunsafe fn f() {}"), [("a.rs:3".to_owned(), true)]);
}
