//! Checks the modules of the sidecar: each folder of `sidecar/src` uses only those below it, so that modules have no
//! cyclic dependencies.

use std::collections::BTreeSet;

use crate::hold;
use crate::source::{Source, files};

/// From the top to the bottom; `sidecar/src/lib.rs` describes them.
const MODULES: [&str; 10] =
    ["process", "web", "admin", "driver", "operation", "session", "streams", "plugins", "flight", "timeline"];

#[test]
fn a_module_of_the_sidecar_uses_only_modules_below_it() {
    let sources: Vec<Source> = files("rs").into_iter().filter(|source| module_of(&source.path).is_some()).collect();
    let found: BTreeSet<&str> = sources.iter().filter_map(|source| module_of(&source.path)).collect();
    assert_eq!(found, BTreeSet::from(MODULES), "the folders of sidecar/src and the list of modules differ");
    hold(
        "A module of the sidecar uses only modules below it.",
        "Move the item that is needed down, or hand it over as an argument from above. The order is in sidecar/src/lib.rs.",
        &sources.iter().flat_map(offences).collect::<Vec<_>>(),
    );
}

/// The module of a file; none for the program and for files at the top.
fn module_of(path: &str) -> Option<&str> {
    let (module, _) = path.strip_prefix("sidecar/src/")?.split_once('/')?;
    (module != "bin").then_some(module)
}

fn offences(source: &Source) -> Vec<String> {
    let height = |module: &str| MODULES.iter().position(|known| *known == module);
    let Some(own) = module_of(&source.path).and_then(height) else { return Vec::new() };
    let above = |module: &&str| height(module).is_some_and(|other| other < own);
    let offence = |module: &str| format!("{} uses {module}, which is above {}", source.path, MODULES[own]);
    used(&source.text).into_iter().filter(above).map(offence).collect()
}

/// The modules of the crate that code names by `crate::`, grouped imports included.
fn used(text: &str) -> BTreeSet<&str> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let mut found = BTreeSet::new();
    for rest in code.flat_map(|line| line.split("crate::").skip(1)) {
        let grouped = rest.strip_prefix('{').map(|group| group.split(','));
        let paths = grouped.map_or_else(|| vec![rest], Iterator::collect);
        let name = |path: &'_ str| path.trim_start().find(|c: char| !c.is_ascii_lowercase() && c != '_');
        found.extend(paths.into_iter().filter_map(|path| path.trim_start().get(..name(path)?)));
    }
    found
}

#[test]
fn uses_are_found_and_judged() {
    let text = "use crate::session::table::SessionId;\nuse crate::{driver::Driver, web::serve};\n// crate::process\n";
    assert_eq!(used(text), BTreeSet::from(["session", "driver", "web"]));
    let source = |path: &str| Source { path: path.to_owned(), text: text.to_owned() };
    assert_eq!(offences(&source("sidecar/src/process/mod.rs")), Vec::<String>::new());
    let found = offences(&source("sidecar/src/operation/table.rs"));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[1].ends_with("uses web, which is above operation"), "{found:?}");
}
