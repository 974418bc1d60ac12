//! `ronde plugin build`: runs cargo for WebAssembly, and inspects the module.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_plugin_host::trust::digest_text;
use ronde_plugin_host::{LoadError, inspect};

use super::{grouped, read};

/// Arguments of `ronde plugin build`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct BuildArgs {
    /// The plugin's package.
    #[arg(default_value = ".", value_name = "DIR")]
    directory: PathBuf,
    /// Where to write the module: a file name that ends in .wasm, or a folder, where it is NAME.wasm. [default: the
    /// package's folder]
    #[arg(long, value_name = "PATH")]
    out: Option<PathBuf>,
}

pub(super) fn perform(args: &BuildArgs) -> anyhow::Result<String> {
    build(args).context(Code::PluginBuild)
}

fn build(args: &BuildArgs) -> anyhow::Result<String> {
    let manifest = args.directory.join("Cargo.toml");
    let shown = args.directory.display();
    ensure!(
        manifest.is_file(),
        "there is no package in {shown}: Cargo.toml is missing; begin one with `ronde plugin new`"
    );
    ensure_target()?;
    let module = compiled(&manifest)?;
    let bytes = read(&module)?;
    let inspection = match inspect(&bytes) {
        Err(LoadError::Manifests { found: 0 }) => bail!(
            "the module has no manifest: src/lib.rs does not call ronde_plugin::export!, or the profile strips it; write \
             `strip = \"debuginfo\"` in Cargo.toml, not `strip = true`"
        ),
        other => other.context("cargo built a module that is not a plugin")?,
    };
    let manifest = &inspection.manifest;
    let path = destination(args.out.as_deref().unwrap_or(&args.directory), &manifest.name);
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    std::fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
    let (label, digest) = (manifest.label(), digest_text(&inspection.digest));
    Ok(format!("{}: {label}, {} bytes, SHA-256 {digest}\n", path.display(), grouped(bytes.len())))
}

/// Returns the file of a module of this name. In a folder that is given with `--plugin`, a sidecar takes the files'
/// names as those of the plugins.
pub(super) fn destination(out: &Path, name: &str) -> PathBuf {
    let is_module = out.extension().is_some_and(|extension| extension == "wasm") && !out.is_dir();
    if is_module { out.to_path_buf() } else { out.join(format!("{name}.wasm")) }
}

/// Checks that the compiler can build WebAssembly.
fn ensure_target() -> anyhow::Result<()> {
    let output = Command::new(program("RUSTC", "rustc"))
        .args(["--print", "target-libdir", "--target", TARGET])
        .stdin(Stdio::null())
        .output()
        .context("rustc cannot be run; install Rust from https://rustup.rs")?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        output.status.success() && Path::new(&folder).is_dir(),
        "Rust's libraries for WebAssembly are not installed; run\n  rustup target add {TARGET}"
    );
    Ok(())
}

/// Compiles the package, with cargo's messages on standard error; returns the module's path.
fn compiled(manifest: &Path) -> anyhow::Result<PathBuf> {
    let mut cargo = Command::new(program("CARGO", "cargo"));
    cargo.args(["rustc", "--release", "--lib", "--crate-type", "cdylib", "--target", TARGET]);
    cargo.args(["--message-format", "json-render-diagnostics", "--manifest-path"]).arg(manifest);
    // Flags for other targets would replace those for this one.
    cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env(FLAGS_VARIABLE, FLAGS);
    let output = cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.context("cargo cannot be run; install Rust from https://rustup.rs")?;
    ensure!(output.status.success(), "cargo could not build the package; see its messages above");
    let modules = String::from_utf8_lossy(&output.stdout).lines().filter_map(module).collect::<Vec<_>>();
    modules.into_iter().next_back().ok_or_else(|| anyhow!("cargo built no module: the package has no library"))
}

/// Returns the module that a line of cargo's messages names.
pub(super) fn module(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str());
    files.filter(|file| file.ends_with(".wasm")).map(PathBuf::from).next()
}

fn program(variable: &str, name: &str) -> std::ffi::OsString {
    std::env::var_os(variable).filter(|value| !value.is_empty()).unwrap_or_else(|| name.into())
}

const TARGET: &str = "wasm32-unknown-unknown";
const FLAGS_VARIABLE: &str = "CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS";
/// SIMD, and a stack that leaves memory to the buffers.
const FLAGS: &str = "-Ctarget-feature=+simd128 -Clink-arg=-zstack-size=65536";

const EXAMPLES: &str = "Examples:
  ronde plugin build
  ronde plugin build my-codec --out plugins";
