//! Checks that each published crate's package is complete. `make package` also builds them.

use std::collections::BTreeSet;
use std::process::Command;

use cargo_metadata::{DependencyKind, MetadataCommand, Package};

use crate::hold;
use crate::source::root;

/// What crates.io has; the others are parts of the Python wheel and of the tests.
const PUBLISHED: [&str; 14] = [
    "ronde",
    "ronde-bootstrap",
    "ronde-collectives",
    "ronde-engine",
    "ronde-gpu",
    "ronde-launcher",
    "ronde-plugin",
    "ronde-plugin-abi",
    "ronde-plugin-host",
    "ronde-rpc",
    "ronde-shm",
    "ronde-sidecar",
    "ronde-transport",
    "ronde-wire",
];

#[test]
fn published_crates_are_complete() {
    let members = members();
    let published: BTreeSet<&str> =
        members.iter().filter(|member| is_published(member)).map(|member| member.name.as_str()).collect();
    assert_eq!(published, BTreeSet::from(PUBLISHED), "`publish = false` is missing somewhere, or too much");
    let offences = members.iter().filter(|member| is_published(member)).flat_map(lacks);
    hold(
        "Each published crate has a description and depends on versions.",
        "crates.io asks for it, and its readers do. Paths exist in this checkout only.",
        &offences.collect::<Vec<_>>(),
    );
}

#[test]
fn packages_hold_licence_readme_and_sources() {
    let mut offences = Vec::new();
    for member in members().iter().filter(|member| is_published(member)) {
        let packaged = packaged(&member.name);
        let folder = member.manifest_path.parent().expect("a manifest is in a folder");
        let relative = folder.strip_prefix(root()).expect("members lie in the workspace").to_string();
        let sources = crate::source::files("rs").into_iter().filter_map(|source| {
            let own = source.path.strip_prefix(&format!("{relative}/src/"))?;
            Some(format!("src/{own}"))
        });
        let needed = ["LICENSE".to_owned(), "README.md".to_owned()].into_iter().chain(sources);
        let missing = needed.filter(|name| !packaged.contains(name));
        offences.extend(missing.map(|name| format!("{} does not package {name}", member.name)));
    }
    hold("A package holds licence, readme and sources.", "Correct `include` in the crate's Cargo.toml.", &offences);
}

fn members() -> Vec<Package> {
    let metadata = MetadataCommand::new().manifest_path(root().join("Cargo.toml")).no_deps().exec();
    metadata.expect("cargo describes the workspace").packages
}

/// Whether a crate may go to a registry.
fn is_published(package: &Package) -> bool {
    package.publish.as_ref().is_none_or(|registries| !registries.is_empty())
}

/// What a crate's description lacks.
fn lacks(package: &Package) -> Vec<String> {
    let name = &package.name;
    let given = [
        ("description", package.description.is_some()),
        ("license", package.license.is_some()),
        ("readme", package.readme.is_some()),
        ("repository", package.repository.is_some()),
        ("keywords", (1..=5).contains(&package.keywords.len())),
        ("categories", !package.categories.is_empty()),
    ];
    let mut lacks: Vec<String> =
        given.iter().filter(|(_, given)| !given).map(|(what, _)| format!("{name} has no {what}")).collect();
    // Those of tests are taken out of the package when they have no version.
    for dependency in package.dependencies.iter().filter(|dependency| dependency.kind != DependencyKind::Development) {
        if dependency.path.is_some() && dependency.req.to_string() == "*" {
            lacks.push(format!("{name} names no version of {}", dependency.name));
        }
        if dependency.path.is_some() && !PUBLISHED.contains(&dependency.name.as_str()) {
            lacks.push(format!("{name} depends on {}, which is not published", dependency.name));
        }
    }
    lacks
}

/// The files that cargo would package.
fn packaged(name: &str) -> BTreeSet<String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let listed = cargo.args(["package", "--list", "--allow-dirty", "--offline", "--package", name]).current_dir(root());
    let output = listed.output().expect("cargo starts");
    assert!(output.status.success(), "cargo package: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}
