//! The files of the checkout, and Rust code as a syntax tree.

use std::fs;
use std::path::{Path, PathBuf};

/// A text file of the checkout.
pub(crate) struct Source {
    /// From the checkout's root, with slashes.
    pub(crate) path: String,
    /// Its content.
    pub(crate) text: String,
}

impl Source {
    /// Reads a file by its path from the root.
    pub(crate) fn read(path: &str) -> Self {
        let text = fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
        Self { path: path.to_owned(), text }
    }

    /// The syntax tree of a Rust file.
    pub(crate) fn syntax(&self) -> syn::File {
        syn::parse_file(&self.text).unwrap_or_else(|error| panic!("cannot parse {}: {error}", self.path))
    }

    /// Whether the file is written by a program, and thus has that program's style.
    pub(crate) fn is_generated(&self) -> bool {
        self.path.contains("/generated/")
    }
}

/// The checkout's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate ronde-tests is in the workspace").to_path_buf()
}

/// All files with an extension that people wrote, in the order of their paths.
pub(crate) fn files(extension: &str) -> Vec<Source> {
    let mut found = Vec::new();
    collect(&root(), &mut found);
    let root = root();
    let relative = |path: &PathBuf| path.strip_prefix(&root).expect("found below the root").display().to_string();
    let mut paths: Vec<_> =
        found.iter().filter(|path| path.extension().is_some_and(|found| found == extension)).map(relative).collect();
    paths.sort();
    let sources = paths.iter().map(|path| Source::read(path));
    sources.filter(|source| !source.is_generated()).collect()
}

/// Whether a path from the root names something that is there.
pub(crate) fn exists(path: &str) -> bool {
    root().join(path).exists()
}

/// The attribute that keeps an item out of what is shipped.
pub(crate) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let list = attribute.meta.require_list();
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg") && list.is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

/// The first and the last line of a piece of syntax.
pub(crate) fn lines(span: proc_macro2::Span) -> (usize, usize) {
    (span.start().line, span.end().line)
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry of a folder can be read").path();
        let name = path.file_name().expect("an entry has a name").to_string_lossy().into_owned();
        if NOT_OURS.contains(&name.as_str()) || name.starts_with('.') && name != ".ci" {
            continue;
        }
        if path.is_dir() {
            collect(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Folders that builds and tools make.
pub(crate) const NOT_OURS: [&str; 4] = ["target", "dist", "__pycache__", "node_modules"];
