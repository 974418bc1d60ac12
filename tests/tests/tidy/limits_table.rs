//! Generates the table of limits in docs/PROTOCOL.md from proto/wire/src/limits.rs. `RONDE_REGENERATE=1` writes it.

use std::collections::BTreeMap;
use std::fs;

use crate::source::{Source, root};

const DOCUMENT: &str = "docs/PROTOCOL.md";
const LIMITS: &str = "proto/wire/src/limits.rs";
/// Other files whose constants the limits are made of.
const ALSO: [&str; 1] = ["proto/wire/src/frame.rs"];
const BEGIN: &str = "<!-- limits: begin; made from proto/wire/src/limits.rs -->\n";
const END: &str = "<!-- limits: end -->";

#[test]
fn the_protocol_shows_the_limits_of_the_wire() {
    let document = Source::read(DOCUMENT).text;
    let (head, rest) = document.split_once(BEGIN).expect("docs/PROTOCOL.md has the mark where the table begins");
    let (shown, tail) = rest.split_once(END).expect("docs/PROTOCOL.md has the mark where the table ends");
    let table = table();
    if shown == table {
        return;
    }
    if std::env::var_os("RONDE_REGENERATE").is_some() {
        fs::write(root().join(DOCUMENT), format!("{head}{BEGIN}{table}{END}{tail}"))
            .expect("the document can be written");
        return;
    }
    panic!(
        "\n\nThe table of limits in {DOCUMENT} is not that of {LIMITS}.\nRun `RONDE_REGENERATE=1 cargo test -p ronde-tests --test tidy` and review the difference.\n"
    );
}

fn table() -> String {
    let mut values = BTreeMap::new();
    for path in ALSO {
        learn(&mut values, &constants(path));
    }
    let limits = constants(LIMITS);
    // A constant may be used above the line that defines it.
    learn(&mut values, &limits);
    learn(&mut values, &limits);
    let mut table = "| name | value | what |\n|---|---:|---|\n".to_owned();
    for constant in &limits {
        let name = constant.ident.to_string();
        let value = values.get(&name).unwrap_or_else(|| panic!("the value of {name} in {LIMITS} is not understood"));
        table.push_str(&format!("| `{name}` | {} | {} |\n", grouped(*value), documentation(&constant.attrs)));
    }
    table
}

/// Adds the constants whose value is made of numbers and of what is known.
fn learn(values: &mut BTreeMap<String, u64>, constants: &[syn::ItemConst]) {
    for constant in constants {
        if let Some(value) = evaluate(&constant.expr, values) {
            values.insert(constant.ident.to_string(), value);
        }
    }
}

fn constants(path: &str) -> Vec<syn::ItemConst> {
    let items = Source::read(path).syntax().items;
    items
        .into_iter()
        .filter_map(|item| if let syn::Item::Const(constant) = item { Some(constant) } else { None })
        .collect()
}

/// The value of a whole number, a sum, product or shift of them, or a constant known so far.
fn evaluate(expression: &syn::Expr, known: &BTreeMap<String, u64>) -> Option<u64> {
    match expression {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(number), .. }) => number.base10_parse().ok(),
        syn::Expr::Path(path) => known.get(&path.path.segments.last()?.ident.to_string()).copied(),
        syn::Expr::Paren(inner) => evaluate(&inner.expr, known),
        syn::Expr::Cast(cast) => evaluate(&cast.expr, known),
        syn::Expr::Binary(binary) => {
            let (left, right) = (evaluate(&binary.left, known)?, evaluate(&binary.right, known)?);
            match binary.op {
                syn::BinOp::Add(_) => left.checked_add(right),
                syn::BinOp::Sub(_) => left.checked_sub(right),
                syn::BinOp::Mul(_) => left.checked_mul(right),
                syn::BinOp::Shl(_) => left.checked_shl(u32::try_from(right).ok()?),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The documentation in one line, with links to code as code.
fn documentation(attributes: &[syn::Attribute]) -> String {
    let line = |attribute: &syn::Attribute| match &attribute.meta.require_name_value().ok()?.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value().trim().to_owned()),
        _ => None,
    };
    let lines: Vec<_> =
        attributes.iter().filter(|attribute| attribute.path().is_ident("doc")).filter_map(line).collect();
    lines.join(" ").replace("[`", "`").replace("`]", "`").replace('|', "\\|")
}

/// A number with its digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group)).collect();
    groups.join(",")
}

#[test]
fn values_are_understood() {
    let known = BTreeMap::from([("A".to_owned(), 7)]);
    let value = |text| evaluate(&syn::parse_str(text).expect("an expression"), &known);
    assert_eq!(
        [value("1 << 20"), value("4_096"), value("(2 + crate::b::A) * 3"), value("B")],
        [Some(1 << 20), Some(4096), Some(27), None]
    );
    assert_eq!([grouped(1_048_602), grouped(63), grouped(4_096)], ["1,048,602", "63", "4,096"]);
}
