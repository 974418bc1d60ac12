//! Checks that pure crates get time, bytes and randomness as arguments. `make lint` also compiles them for
//! wasm32-unknown-unknown.

use syn::visit::Visit;

use crate::hold;
use crate::source::{Source, files, is_test_only};

const PURE: [&str; 4] =
    ["plugins/abi/src/", "proto/wire/src/", "sidecar/crates/collectives/src/", "sidecar/crates/engine/src/"];
/// Paths that reach outside of the arguments. Addresses of the network are data, sockets are not.
const BANNED: [&str; 17] = [
    "std::env",
    "std::fs",
    "std::io::stderr",
    "std::io::stdin",
    "std::io::stdout",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "futures",
    "getrandom",
    "rand",
    "tokio",
];
/// Where the order of a map's entries may become visible to other sidecars.
const ORDERED: [&str; 2] = ["proto/wire/src/", "sidecar/crates/engine/src/"];
const RANDOM_ORDER: [&str; 2] = ["std::collections::HashMap", "std::collections::HashSet"];

#[test]
fn pure_crates_use_no_io_clock_thread_or_randomness() {
    hold(
        "Pure crates (plugin ABI, wire, collectives, engine) use no clock, socket, file, thread, task or randomness.",
        "So a whole cluster runs in one thread under one seed. Take time, bytes and seeds as arguments; the adapters read them.",
        &offences(&PURE, &BANNED),
    );
}

#[test]
fn decisions_do_not_depend_on_a_random_order() {
    hold(
        "The wire and the engine use BTreeMap and BTreeSet.",
        "The order of a HashMap's entries differs from process to process, and decisions have to be the same.",
        &offences(&ORDERED, &RANDOM_ORDER),
    );
}

fn offences(folders: &[&str], banned: &[&str]) -> Vec<String> {
    let sources = files("rs");
    let shipped = |source: &&Source| !source.path.contains("/tests");
    let pure = sources.iter().filter(|source| folders.iter().any(|folder| source.path.starts_with(folder)));
    let pure: Vec<_> = pure.filter(shipped).collect();
    assert!(pure.len() >= folders.len(), "pure crates were not found; the scan is broken");
    pure.iter().flat_map(|source| banned_paths(source, banned)).collect()
}

fn banned_paths(source: &Source, banned: &[&str]) -> Vec<String> {
    let mut paths = Paths { found: Vec::new() };
    paths.visit_file(&source.syntax());
    let reaches = |path: &str| banned.iter().any(|banned| path == *banned || path.starts_with(&format!("{banned}::")));
    paths.found.iter().filter(|path| reaches(path)).map(|path| format!("{} uses {path}", source.path)).collect()
}

/// All paths that code uses, with the groups of `use` taken apart; code for tests left out.
struct Paths {
    found: Vec<String>,
}

impl Paths {
    fn note_use(&mut self, prefix: &str, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => self.note_use(&format!("{prefix}{}::", path.ident), &path.tree),
            syn::UseTree::Name(name) => self.found.push(format!("{prefix}{}", name.ident)),
            syn::UseTree::Rename(rename) => self.found.push(format!("{prefix}{}", rename.ident)),
            syn::UseTree::Glob(_) => self.found.push(format!("{prefix}*")),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.note_use(prefix, tree)),
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test_only(&item.attrs) {
            self.note_use("", &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.found.push(names.join("::"));
        syn::visit::visit_path(self, path);
    }
}

#[test]
fn paths_are_found_however_they_are_written() {
    let found = |text: &str| banned_paths(&Source { path: "a.rs".to_owned(), text: text.to_owned() }, &BANNED);
    assert_eq!(found("use std::{fmt, time::{Duration, Instant as Now}};"), ["a.rs uses std::time::Instant"]);
    assert_eq!(found("fn f() { std::thread::spawn(g); }"), ["a.rs uses std::thread::spawn"]);
    assert_eq!(found("use std::fs;"), ["a.rs uses std::fs"]);
    assert_eq!(found("#[cfg(test)] mod tests { use std::fs; }").len(), 0);
    assert_eq!(found("use randomly::named;").len(), 0);
}
