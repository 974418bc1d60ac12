//! `ronde plugin new`: creates a package that builds and passes its tests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use clap::{Args, ValueEnum};

use ronde_bootstrap::codes::Code;

/// Arguments of `ronde plugin new`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct NewArgs {
    /// The plugin's name: a letter, then letters a-z, digits and '-'.
    #[arg(value_parser = name)]
    name: String,
    /// The kind of plugin.
    #[arg(long, value_enum, default_value_t = Kind::Codec)]
    kind: Kind,
    /// The folder to make. [default: the plugin's name]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// The SDK's folder in a checkout (plugins/sdk), instead of the published crate.
    #[arg(long, value_name = "DIR")]
    sdk: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Encodes tensors for transfers between hosts.
    Codec,
    /// Reduces the ranks' tensors to one.
    Reducer,
}

pub(super) fn perform(args: &NewArgs) -> anyhow::Result<String> {
    create(args).context(Code::PluginBuild)
}

fn create(args: &NewArgs) -> anyhow::Result<String> {
    let directory = args.directory.clone().unwrap_or_else(|| PathBuf::from(&args.name));
    let shown = directory.display();
    ensure!(directory.symlink_metadata().is_err(), "{shown} exists and is not overwritten; choose another --directory");
    let fill = |text: &str| text.replace("{{name}}", &args.name).replace("{{sdk}}", &sdk(args.sdk.as_deref()));
    let manifest = fill(include_str!("template/Cargo.toml.in"));
    let source = match args.kind {
        Kind::Codec => fill(include_str!("template/codec.rs.in")),
        Kind::Reducer => fill(include_str!("template/reducer.rs.in")),
    };
    let files = [
        ("Cargo.toml", manifest.as_str()),
        ("src/lib.rs", &source),
        (".cargo/config.toml", include_str!("template/config.toml.in")),
        (".gitignore", "/target\n*.wasm\n"),
    ];
    for (path, text) in files {
        write(&directory.join(path), text)?;
    }
    Ok(format!(
        "{shown}: a plugin that builds; its logic and tests are in src/lib.rs\n  cd {shown}\n  cargo test\n  \
         ronde plugin build\n  ronde plugin test {}.wasm\n",
        args.name
    ))
}

/// Returns the package's dependency on the SDK.
fn sdk(path: Option<&Path>) -> String {
    let version = env!("CARGO_PKG_VERSION");
    match path {
        // The path may be relative to here; the package needs an absolute one.
        Some(path) => {
            let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            format!("{{ path = {:?} }}", path.display().to_string())
        }
        None => format!("{version:?}"),
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Checks a name that plugins and packages may both have.
fn name(text: &str) -> anyhow::Result<String> {
    let fits = text.len() <= ronde_plugin_host::limits::NAME_BYTES_MAX
        && text.starts_with(|letter: char| letter.is_ascii_lowercase())
        && text.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-');
    if fits { Ok(text.to_owned()) } else { Err(anyhow!("a name is a letter, then up to 63 of a-z, 0-9 and '-'")) }
}

const EXAMPLES: &str = "Examples:
  ronde plugin new my-codec
  ronde plugin new my-mean --kind reducer --sdk ../ronde/plugins/sdk";
