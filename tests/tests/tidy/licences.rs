//! Checks the licences of all shipped dependencies. `make deny` also checks for known vulnerabilities, which needs the
//! network.

use cargo_metadata::{MetadataCommand, Package};

use crate::hold;
use crate::source::root;

/// Licences without conditions on those who use ronde. deny.toml has the same list.
const ALLOWED: [&str; 11] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

#[test]
fn dependencies_are_free_to_use() {
    let mut command = MetadataCommand::new();
    // Other systems' crates are not fetched by a build, so only this one's can be asked about.
    let here = [
        "--locked".to_owned(),
        "--filter-platform".to_owned(),
        format!("{}-unknown-linux-gnu", std::env::consts::ARCH),
    ];
    let metadata = command.manifest_path(root().join("Cargo.toml")).other_options(here).exec();
    let packages = metadata.expect("cargo describes the dependencies that this test was built with").packages;
    assert!(packages.len() > 50, "only {} packages were found; the scan is broken", packages.len());
    hold(
        "Every dependency has a licence of the list.",
        "Read its terms; add the licence here and in deny.toml if it has no conditions for users of ronde.",
        &packages.iter().filter(|package| !is_allowed(package)).map(describe).collect::<Vec<_>>(),
    );
}

fn describe(package: &Package) -> String {
    format!("{} {}: {}", package.name, package.version, package.license.as_deref().unwrap_or("no licence named"))
}

fn is_allowed(package: &Package) -> bool {
    package.license.as_deref().is_some_and(is_free)
}

/// Whether the expression can be met with licences of the list: one of alternatives, all of what is joined.
fn is_free(expression: &str) -> bool {
    let joined = |alternative: &str| {
        alternative.split(" AND ").all(|part| {
            let part = part.trim_matches(['(', ')', ' ']);
            ALLOWED.contains(&part) || part.contains(" OR ") && is_free(part)
        })
    };
    // The old form of an alternative is a slash. `(A OR B) AND C` is taken apart at AND first.
    let expression = expression.replace('/', " OR ");
    if expression.contains('(') { joined(&expression) } else { expression.split(" OR ").any(joined) }
}

#[test]
fn expressions_are_understood() {
    let free = [
        "MIT",
        "MIT/GPL-2.0",
        "GPL-3.0 OR Apache-2.0",
        "(MIT OR GPL-2.0) AND Unicode-3.0",
        "ISC AND (Apache-2.0 OR ISC)",
    ];
    assert_eq!(free.map(is_free), [true; 5]);
    assert_eq!(["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR ISC) AND GPL-2.0", ""].map(is_free), [false; 4]);
}
