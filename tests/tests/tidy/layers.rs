//! Checks the layers of docs/ARCHITECTURE.md, as the direct dependencies of each crate.

use std::sync::OnceLock;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

use crate::hold;
use crate::source::root;

/// For each crate, the crates of this project that its shipped code may use. Layer by layer.
const OWN: [(&str, &[&str]); 31] = [
    ("ronde-wire", &[]),
    ("ronde-plugin-abi", &[]),
    ("ronde-plugin", &["ronde-plugin-abi"]),
    ("ronde-plugin-adasum", &["ronde-plugin"]),
    ("ronde-plugin-bf16", &["ronde-plugin"]),
    ("ronde-plugin-clipped-mean", &["ronde-plugin"]),
    ("ronde-plugin-fp16", &["ronde-plugin"]),
    ("ronde-plugin-int8", &["ronde-plugin"]),
    ("ronde-plugin-median", &["ronde-plugin"]),
    ("ronde-plugin-onebit", &["ronde-plugin"]),
    ("ronde-plugin-randomk", &["ronde-plugin"]),
    ("ronde-plugin-topk", &["ronde-plugin"]),
    ("ronde-plugin-trimmed-mean", &["ronde-plugin"]),
    ("ronde-collectives", &["ronde-wire"]),
    ("ronde-plugin-host", &["ronde-collectives", "ronde-plugin-abi", "ronde-wire"]),
    ("ronde-rpc", &["ronde-wire"]),
    ("ronde-shm", &[]),
    ("ronde-gpu", &["ronde-shm"]),
    ("ronde-nccl-net", &["ronde-shm", "ronde-wire"]),
    ("ronde-transport", &["ronde-wire"]),
    ("ronde-engine", &["ronde-collectives", "ronde-wire"]),
    ("ronde", &["ronde-gpu", "ronde-rpc", "ronde-shm", "ronde-wire"]),
    ("ronde-bootstrap", &["ronde-transport", "ronde-wire"]),
    ("ronde-launcher", &["ronde-bootstrap", "ronde-gpu", "ronde-rpc", "ronde-transport", "ronde-wire"]),
    (
        "ronde-sidecar",
        &[
            "ronde",
            "ronde-bootstrap",
            "ronde-collectives",
            "ronde-engine",
            "ronde-gpu",
            "ronde-launcher",
            "ronde-plugin-host",
            "ronde-rpc",
            "ronde-shm",
            "ronde-transport",
            "ronde-wire",
        ],
    ),
    ("ronde-python", &["ronde"]),
    ("ronde-fuzz", &[]),
    ("ronde-tests-device", &[]),
    ("ronde-tests-nccl", &[]),
    ("ronde-tests-web", &["ronde"]),
    (
        "ronde-tests",
        &[
            "ronde",
            "ronde-collectives",
            "ronde-engine",
            "ronde-launcher",
            "ronde-rpc",
            "ronde-shm",
            "ronde-transport",
            "ronde-wire",
        ],
    ),
];

/// External dependencies that only some crates may use in shipped code.
const EXTERNAL: [(&str, &[&str]); 19] = [
    ("anyhow", &["ronde-bootstrap", "ronde-launcher", "ronde-sidecar", "ronde-tests"]),
    ("axum", &["ronde-sidecar"]),
    ("clap", &["ronde-bootstrap", "ronde-launcher", "ronde-sidecar"]),
    ("cudarc", &["ronde-gpu"]),
    ("libc", &["ronde-shm", "ronde-python", "ronde-tests-device"]),
    ("libloading", &["ronde-gpu", "ronde-tests-nccl"]),
    (
        "nix",
        &[
            "ronde-bootstrap",
            "ronde-launcher",
            "ronde-plugin-host",
            "ronde-shm",
            "ronde-sidecar",
            "ronde-tests",
            "ronde-transport",
        ],
    ),
    ("opentelemetry-proto", &["ronde-sidecar"]),
    ("prometheus", &["ronde-sidecar"]),
    ("prost", &["ronde-rpc", "ronde-sidecar"]),
    ("pyo3", &["ronde-python"]),
    ("quinn", &["ronde-transport"]),
    ("ratatui", &["ronde-sidecar"]),
    ("rustls", &["ronde-transport"]),
    ("tokio", &["ronde", "ronde-launcher", "ronde-sidecar", "ronde-tests", "ronde-transport"]),
    ("tonic", &["ronde", "ronde-rpc", "ronde-sidecar", "ronde-tests"]),
    ("tracing-subscriber", &["ronde-sidecar"]),
    ("wasmparser", &["ronde-plugin-host"]),
    ("wasmtime", &["ronde-plugin-host"]),
];

#[test]
fn every_crate_depends_on_lower_layers_only() {
    let offences = own_edges(|package, dependency| match OWN.iter().find(|(name, _)| *name == package) {
        None => Some(format!("{package} is not in the table of layers; add the crates that it may use")),
        Some((_, allowed)) if allowed.contains(&dependency) => None,
        Some(_) => Some(format!("{package} uses {dependency}, which is not in a lower layer")),
    });
    hold(
        "A crate uses only crates of lower layers.",
        "Engine and transport do not know each other, and no pure crate knows an adapter: sidecar/src/driver/mod.rs joins them.",
        &offences,
    );
}

#[test]
fn an_external_crate_is_used_only_where_it_is_allowed() {
    let mut offences = Vec::new();
    for package in workspace().workspace_packages() {
        for dependency in shipped(package) {
            let allowed_in = EXTERNAL.iter().find(|(name, _)| *name == dependency);
            if let Some((_, allowed)) = allowed_in.filter(|(_, allowed)| !allowed.contains(&package.name.as_str())) {
                offences.push(format!("{} uses {dependency}, which only {} may", package.name, allowed.join(", ")));
            }
        }
    }
    hold(
        "Some dependencies may be used by few crates only.",
        "Replacing or upgrading one changes one crate. Call the crate that wraps it, or extend that crate.",
        &offences,
    );
}

#[test]
fn the_tables_name_crates_that_exist() {
    let packages = workspace().workspace_packages();
    let known = |name: &&str| packages.iter().any(|package| package.name.as_str() == *name);
    let named = OWN.iter().flat_map(|(name, allowed)| [*name].into_iter().chain(allowed.iter().copied()));
    let named = named.chain(EXTERNAL.iter().flat_map(|(_, allowed)| allowed.iter().copied()));
    let mut offences: Vec<_> = named.filter(|name| !known(name)).map(str::to_owned).collect();
    offences.dedup();
    hold(
        "The tables of this file name crates of the workspace.",
        "A rule about a missing crate checks nothing.",
        &offences,
    );
}

/// The workspace's packages, without what they depend on.
pub(crate) fn workspace() -> &'static Metadata {
    static METADATA: OnceLock<Metadata> = OnceLock::new();
    METADATA.get_or_init(|| {
        let mut command = MetadataCommand::new();
        command.manifest_path(root().join("Cargo.toml")).no_deps();
        command.exec().expect("cargo describes the workspace that this test belongs to")
    })
}

fn own_edges(judge: impl Fn(&str, &str) -> Option<String>) -> Vec<String> {
    let packages = workspace().workspace_packages();
    let is_own = |name: &&str| packages.iter().any(|package| package.name.as_str() == *name);
    let mut offences = Vec::new();
    for package in &packages {
        // A crate without edges has to be in the table, too.
        offences.extend(
            judge(package.name.as_str(), "").filter(|_| !OWN.iter().any(|(name, _)| *name == package.name.as_str())),
        );
        offences.extend(shipped(package).filter(is_own).filter_map(|name| judge(package.name.as_str(), name)));
    }
    offences
}

/// The names of a package's dependencies other than those of its tests.
fn shipped(package: &Package) -> impl Iterator<Item = &str> {
    let shipped = package.dependencies.iter().filter(|dependency| dependency.kind != DependencyKind::Development);
    shipped.map(|dependency| dependency.name.as_str())
}
