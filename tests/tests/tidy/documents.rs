//! Checks documents: links resolve, and files that they name exist.

use std::path::{Component, Path, PathBuf};

use crate::hold;
use crate::source::{Source, exists, files};

#[test]
fn links_to_files_resolve() {
    let mut offences = Vec::new();
    for document in files("md") {
        for target in links(&document.text) {
            let file = target.split('#').next().unwrap_or(&target);
            let folder = Path::new(&document.path).parent().unwrap_or(Path::new(""));
            let path = normal(&folder.join(file));
            if !(file.is_empty() || file.contains("://") || file.starts_with("mailto:") || exists(&path)) {
                offences.push(format!("{} links to {target}", document.path));
            }
        }
    }
    hold("Links in documents lead to existing files.", "Correct the link, or write the document.", &offences);
}

#[test]
fn files_named_in_documents_exist() {
    let mut offences = Vec::new();
    for path in ["README.md", "CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/PROTOCOL.md", "docs/SECURITY.md"] {
        let document = Source::read(path);
        let named = named_files(&document.text);
        assert!(
            path != "docs/ARCHITECTURE.md" || named.len() > 20,
            "{path} names only {} files; the scan is broken",
            named.len()
        );
        offences.extend(named.iter().filter(|name| !exists(name)).map(|name| format!("{path} names {name}")));
    }
    hold(
        "Files that documents name in code marks exist.",
        "A newcomer follows the names. Name them from the root of the checkout; correct the document when a file moves.",
        &offences,
    );
}

/// The targets of `[text](target)`, outside of code.
fn links(text: &str) -> Vec<String> {
    let prose = without_blocks(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.map(|target| target.split(' ').next().unwrap_or(target).to_owned()).collect()
}

/// The paths in code marks below one of the top folders, without a line number or a pattern; of a test only its file.
fn named_files(text: &str) -> Vec<String> {
    let prose = without_blocks(text);
    let marked = prose.split('`').skip(1).step_by(2);
    let below = |name: &&str| TOP.iter().any(|top| name.starts_with(top));
    let plain = |name: &&str| !name.contains(['*', '{', '<', ' ', '…']);
    let file = |name: &str| name.split("::").next().unwrap_or(name).trim_end_matches('/').to_owned();
    marked.filter(below).filter(plain).map(file).collect()
}

/// The text without fenced blocks.
fn without_blocks(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> String {
    let mut parts = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts.display().to_string()
}

const TOP: [&str; 8] = ["compose/", "docs/", "plugins/", "proto/", "sdk-python/", "sdk-rust/", "sidecar/", "tests/"];

#[test]
fn links_and_names_are_found() {
    assert_eq!(links("a [b](c.md#d) e\n```\n[f](g)\n```\n[h](i \"j\")"), ["c.md#d", "i"]);
    assert_eq!(
        named_files("see `docs/`, `proto/wire/src/lib.rs`, `make test`, `docs/*.md`, `tests/a.rs::b`"),
        ["docs", "proto/wire/src/lib.rs", "tests/a.rs"]
    );
    assert_eq!(normal(Path::new("docs/../proto/./a.rs")), "proto/a.rs");
}

#[test]
fn texts_quoted_on_the_troubleshooting_page_occur_in_the_code() {
    let page = Source::read("docs/TROUBLESHOOTING.md");
    let sources = files("rs").into_iter().chain(files("py")).filter(|source| !source.path.starts_with("tests/"));
    let sources: String = sources.map(|source| in_one_line(&source.text)).collect();
    let quoted = page.text.lines().filter_map(|line| line.strip_prefix("> "));
    let fragments: Vec<&str> = quoted.flat_map(|line| line.split('…')).map(str::trim).collect();
    let fragments: Vec<&str> = fragments.into_iter().filter(|words| words.len() >= WORDS_MIN).collect();
    assert!(fragments.len() > 40, "only {} quotations were found; the scan is broken", fragments.len());
    let mut offences: Vec<String> =
        fragments.iter().filter(|words| !sources.contains(**words)).map(|words| format!("> {words}")).collect();
    let known = Source::read("docs/ERRORS.md").text;
    let codes = page.text.split("RONDE-E").skip(1).map(|rest| format!("## RONDE-E{}:", rest.get(..3).unwrap_or(rest)));
    offences.extend(codes.filter(|code| !known.contains(code.as_str())));
    hold(
        "Texts that docs/TROUBLESHOOTING.md quotes occur in the source, and codes that it names exist.",
        "Users search for the texts that they see. Quote the current text; … replaces variable parts.",
        &offences,
    );
}

/// Joins the lines of long strings, and unescapes quotation marks.
fn in_one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\\\n") {
        line.push_str(before);
        rest = after.trim_start();
    }
    line.push_str(rest);
    line.replace("\\\"", "\"")
}

/// Shorter pieces between two names prove nothing.
const WORDS_MIN: usize = 8;
