//! Checks sizes: files of at most 600 lines, functions of at most 70. Longer ones are listed with their size, and may
//! only shrink.

use syn::visit::Visit;

use crate::hold;
use crate::source::{Source, files, lines};

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;

/// File, lines.
const LONG_FILES: &[(&str, usize)] = &[];
/// File and function, lines.
const LONG_FUNCTIONS: &[(&str, usize)] = &[];

#[test]
fn files_are_short() {
    let sources = files("rs").into_iter().chain(files("py"));
    let sizes: Vec<_> = sources.map(|source| (source.path, source.text.lines().count())).collect();
    hold(
        &format!("A file has at most {FILE_LINES_MAX} lines."),
        "A reader keeps one file in the head. Split by what changes together, not by kind; a new name has to mean something.",
        &offences(&sizes, FILE_LINES_MAX, LONG_FILES),
    );
}

#[test]
fn functions_are_short() {
    let mut sizes: Vec<_> = files("rs").iter().flat_map(rust_functions).collect();
    sizes.extend(files("py").iter().flat_map(python_functions));
    assert!(sizes.len() > 100, "only {} functions were found; the scan is broken", sizes.len());
    hold(
        &format!("A function has at most {FUNCTION_LINES_MAX} lines."),
        "It fits a screen. Keep branches and state in the parent, move what is pure into functions below it.",
        &offences(&sizes, FUNCTION_LINES_MAX, LONG_FUNCTIONS),
    );
}

/// The offences: what is too long, and listed sizes that are wrong.
fn offences(sizes: &[(String, usize)], max: usize, listed: &[(&str, usize)]) -> Vec<String> {
    let listed_size = |name: &str| listed.iter().find(|(listed, _)| *listed == name).map(|(_, size)| *size);
    let too_long = sizes.iter().filter(|(_, size)| *size > max);
    let mut found: Vec<String> = too_long
        .filter_map(|(name, size)| match listed_size(name) {
            None => Some(format!("{name}: {size} lines")),
            Some(entry) if *size > entry => Some(format!("{name}: grew from {entry} to {size} lines")),
            Some(entry) if *size < entry => {
                Some(format!("{name}: shrank to {size} lines; lower its entry from {entry}"))
            }
            Some(_) => None,
        })
        .collect();
    for (name, _) in listed {
        if !sizes.iter().any(|(known, size)| known == name && *size > max) {
            found.push(format!("{name}: is not longer than {max} lines any more; remove its entry"));
        }
    }
    found
}

fn rust_functions(source: &Source) -> Vec<(String, usize)> {
    let mut functions = RustFunctions { path: &source.path, found: Vec::new() };
    functions.visit_file(&source.syntax());
    functions.found
}

/// Functions by name, from `fn` to the closing brace: neither attributes nor documentation count.
struct RustFunctions<'a> {
    path: &'a str,
    found: Vec<(String, usize)>,
}

impl RustFunctions<'_> {
    fn note(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let (first, _) = lines(signature.fn_token.span);
        let (_, last) = lines(body.brace_token.span.close());
        self.found.push((format!("{} {}", self.path, signature.ident), last - first + 1));
    }
}

impl<'ast> Visit<'ast> for RustFunctions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.note(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.note(&item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.note(&item.sig, body);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}

/// Functions by name, from `def` to the last line that is indented deeper.
fn python_functions(source: &Source) -> Vec<(String, usize)> {
    let lines: Vec<&str> = source.text.lines().collect();
    let is_definition =
        |line: &str| line.trim_start().starts_with("def ") || line.trim_start().starts_with("async def ");
    let starts = (0..lines.len()).filter(|index| is_definition(lines[*index]));
    starts
        .map(|start| {
            let depth = indent(lines[start]);
            let closes_signature = |line: &str| indent(line) == depth && line.trim_start().starts_with(')');
            let inside = |line: &&&str| line.trim().is_empty() || indent(line) > depth || closes_signature(line);
            let body: Vec<_> = lines[start + 1..].iter().take_while(inside).collect();
            let blank = body.iter().rev().take_while(|line| line.trim().is_empty()).count();
            let header = lines[start].trim_start().trim_start_matches("async ").trim_start_matches("def ");
            let name = header.split('(').next().unwrap_or(header);
            (format!("{} {name}", source.path), body.len() - blank + 1)
        })
        .collect()
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[test]
fn a_listed_size_may_only_shrink() {
    let sizes = |size| vec![("a.rs".to_owned(), size)];
    assert_eq!(offences(&sizes(70), 70, &[]).len(), 0);
    assert_eq!(offences(&sizes(71), 70, &[]), ["a.rs: 71 lines"]);
    assert_eq!(offences(&sizes(80), 70, &[("a.rs", 80)]).len(), 0);
    assert_eq!(offences(&sizes(81), 70, &[("a.rs", 80)]), ["a.rs: grew from 80 to 81 lines"]);
    assert!(offences(&sizes(79), 70, &[("a.rs", 80)])[0].contains("lower its entry"));
    assert!(offences(&sizes(70), 70, &[("a.rs", 80)])[0].contains("remove its entry"));
}

#[test]
fn functions_are_measured_to_their_end() {
    let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
    let rust = source("a.rs", "/// Doc.\nfn one() {\n    fn two() {}\n}\ntrait T { fn three(); }\n");
    assert_eq!(rust_functions(&rust), [("a.rs one".to_owned(), 3), ("a.rs two".to_owned(), 1)]);
    let python = source("a.py", "def one(\n    a,\n):\n    b\n\n    c\n\n\nasync def two():\n    pass\n");
    assert_eq!(python_functions(&python), [("a.py one".to_owned(), 6), ("a.py two".to_owned(), 2)]);
}
